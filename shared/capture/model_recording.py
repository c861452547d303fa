"""Forward and backward of equal calls, recorded in CUDA graphs and replayed as one autograd node."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Optional

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .. import _C, _extension
from ..autocast import autocast_dtype, autocasts
from ..graph import max_degrees
from ..graph.weak_cache import held_graphs
from .keys import State, Unfit, flatten, is_moving, parts_of, unflatten
from .watching import WatchingMode

__all__ = ["CudaGraphs", "Recording", "Watch", "in_words", "place_of"]

_WAITS = "called a synchronizing CUDA operation"  # a part of the text of PyTorch's warning
_MOST_RUNS = 8  # additional runs before a recording, beside the three of every call
_MOST_DIFFERENTIABLE = 3  # outputs, since a backward is recorded for each non-empty subset that a loss may use


# CUDA ----------------------------------------------------------------------------------------------------------------


class CudaGraphs:
    """All that is specific to CUDA; tests replace it."""

    kind = "cuda"

    def __init__(self):
        self._streams: dict[tuple[int, int], torch.cuda.Stream] = {}

    def device(self) -> Optional[int]:
        """Returns the index of the current device, or None before CUDA is initialised."""
        return torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def stream(self, device: int) -> int:
        """Returns the handle of the current stream; work on two streams must not share a capture's memory."""
        return torch._C._cuda_getCurrentRawStream(device)

    def is_capturing(self) -> bool:
        """Returns whether the current stream is being captured."""
        return torch.cuda.is_current_stream_capturing()

    def generator(self) -> torch.Generator:
        """Returns the device's generator, from which dropout draws."""
        return torch.cuda.default_generators[torch.cuda.current_device()]

    def host_states(self) -> list[tuple[Any, Callable[[Any], None]]]:
        """Returns the states and setters of the host's generators, whose draws a replay would repeat."""
        found = [(random.getstate(), random.setstate), (torch.get_rng_state().tolist(), _set_cpu_state)]
        if (numpy := sys.modules.get("numpy")) is not None:
            name, keys, *rest = numpy.random.get_state()
            found.append(((name, keys.tolist(), *rest), numpy.random.set_state))
        return found

    def recorder(self) -> _CudaRecorder:
        """Returns a new recorder for the CUDA graphs of one recording."""
        device = torch.cuda.current_device()
        key = device, self.stream(device)
        if key not in self._streams:
            self._streams[key] = torch.cuda.Stream()
        return _CudaRecorder(self.generator(), self._streams[key])


class _CudaRecorder:
    """Records CUDA graphs that share a memory pool and are replayed in the order of their recording.

    All recordings for one of the user's streams are made on one stream, because a cuBLAS workspace belongs to a stream:
    graphs that share a workspace are then replayed on one stream, never concurrently.
    """

    def __init__(self, generator: torch.Generator, stream: torch.cuda.Stream):
        self._generator, self._stream = generator, stream
        self._pool = torch.cuda.graph_pool_handle()

    @contextlib.contextmanager
    def warming(self) -> Iterator[None]:
        """Runs the block on the recording stream, ordered with the current one: for the runs before a recording."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)

    @contextlib.contextmanager
    def not_waiting(self) -> Iterator[None]:
        """Raises ``Unfit`` at the end of the block if this thread waited for the GPU in it.

        A capture would fail at the wait, and PyTorch's allocator and generators do not recover from a failed capture.
        The mode that reports waits applies to the whole process, and other threads may wait, so it warns instead of
        raising an error.
        """
        waited, before = [], torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            showwarning, thread = warnings.showwarning, threading.get_ident()

            def show(message, *where, **how):
                if _WAITS not in str(message):
                    showwarning(message, *where, **how)
                elif threading.get_ident() == thread:
                    waited.append(message)

            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
            warnings.filterwarnings("always", _WAITS)
            warnings.showwarning = show
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode(before)
        if waited:
            raise Unfit("the model waits for the GPU, as .item() does and a mask that selects rows")

    def record(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Returns the result of ``function()``, and a function that replays its work on the GPU."""
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        drawn = self._generator.clone_state() if hasattr(self._generator, "clone_state") else None  # torch < 2.4
        try:
            # thread_local: calls that a capture forbids stay allowed in other threads, such as those of data loaders.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                result = function()
        except Exception:
            # A capture that cannot end leaves the generator and the current stream in the state of the capture.
            if drawn is not None:
                self._generator.graphsafe_set_state(drawn)
            torch.cuda.set_stream(current)
            raise
        return result, graph.replay


# What a model must not do --------------------------------------------------------------------------------------------


class Watch(WatchingMode):
    """Collects the tensors that ops read and no op in the block has made.

    Raises:
        Unfit: an op writes to one that is not in ``writable`` (storages, see :func:`place_of`).
    """

    def __init__(self, kind: str, writable: set[int]):
        super().__init__()
        self.read: dict[int, Tensor] = {}
        self._made: set[int] = set()
        self._kind, self._writable = kind, writable

    def note(self, values: Iterable[Any]) -> None:
        """Notes the tensors among ``values`` as read."""
        for leaf in values:
            if isinstance(leaf, Tensor) and self._watches(leaf) and place_of(leaf) not in self._made:
                self.read.setdefault(place_of(leaf), leaf.detach())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.note(tree_leaves((args, kwargs)))
        if isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable:
            self._check_writes(func, args, kwargs)
        out = func(*args, **kwargs)
        places = (place_of(leaf) for leaf in tree_leaves(out) if isinstance(leaf, Tensor))
        self._made.update(place for place in places if place not in self.read)  # views of read tensors are not new
        return out

    def _check_writes(self, func, args, kwargs) -> None:
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for t in tree_leaves(args[i] if i < len(args) else kwargs.get(argument.name)):
                if isinstance(t, Tensor) and place_of(t) not in self._made and place_of(t) not in self._writable:
                    self._writes(t)

    def _watches(self, t: Tensor) -> bool:
        return t.device.type == self._kind

    def _writes(self, t: Tensor) -> None:
        raise Unfit("the model writes to a tensor that is neither a buffer nor its own result")


def place_of(t: Tensor) -> int:
    """Returns an id of the memory of a tensor, valid while the tensor is alive."""
    return t.untyped_storage()._cdata


def _reaches_others(outputs: list[Tensor], wanted: list[Tensor]) -> bool:
    """Returns whether a backward through ``outputs`` reaches autograd leaves that are not in ``wanted``."""
    known, seen = {id(t) for t in wanted}, set()
    nodes = [out.grad_fn for out in outputs]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name().endswith("AccumulateGrad") and id(node.variable) not in known:
            return True
        nodes += [following for following, _ in node.next_functions]
    return False


def _set_cpu_state(state: list[int]) -> None:
    torch.set_rng_state(torch.tensor(state, dtype=torch.uint8, device="cpu"))


# A recording ---------------------------------------------------------------------------------------------------------


class _Plain(torch.nn.Module):
    """Calls the model's class forward instead of the one that :class:`~edgeless.Capture` has put in its place."""

    def __init__(self, model: torch.nn.Module, forward):
        super().__init__()
        self.model, self._forward = model, forward

    def forward(self, *args, **kwargs):
        return self._forward(self.model, *args, **kwargs)


class Recording:
    """Forward and backward of equal calls.

    Args:
        graphs: the device interface, :class:`CudaGraphs`.
        model: the captured model.
        forward: the forward of its class.
        leaves, tree: the flattened arguments, see :func:`~edgeless.capture.keys.flatten`.
        state: the current state of the model.
    Raises:
        Unfit: the call cannot be recorded.
    """

    def __init__(self, graphs, model: torch.nn.Module, forward, leaves: list[Any], tree, state: State):
        self.state = state
        constants = [leaf for leaf in leaves if not is_moving(leaf)]
        self._versions = [(leaf, leaf._version) for leaf in constants if isinstance(leaf, Tensor)]
        # References, so that no other object gets their ids.
        self._held: list[Any] = [constants, [parts_of(leaf) for leaf in constants]]
        moving = [leaf for leaf in leaves if is_moving(leaf)]
        self._inputs = [leaf.detach().clone() for leaf in moving]
        self._training = torch.is_grad_enabled()
        self.parameters = [p for p in model.parameters() if p.requires_grad] if self._training else []
        plain, names = _Plain(model, forward), {id(p): name for name, p in model.named_parameters()}
        dtype, enabled = autocast_dtype("cuda"), autocasts("cuda")

        def run() -> tuple[list[Any], list[Tensor]]:
            """Returns the outputs, and the autograd leaves whose gradients are wanted.

            The leaves share memory with inputs and parameters but are new tensors: a parameter's AccumulateGrad node is
            bound to the stream of its first use for as long as the user holds something that refers to it.
            """
            pairs = zip(self._inputs, moving, strict=True)
            inputs = [static.detach().requires_grad_(leaf.requires_grad) for static, leaf in pairs]
            aliases = {id(p): torch.nn.Parameter(p.detach()) for p in self.parameters}
            given = iter(inputs)
            args, kwargs = unflatten(tree, (next(given) if is_moving(leaf) else leaf for leaf in leaves))
            outputs: list[Any] = []
            with torch.autocast("cuda", dtype, enabled, cache_enabled=False):
                of_model = {f"model.{names[key]}": alias for key, alias in aliases.items()}
                self._tree = flatten(torch.func.functional_call(plain, of_model, args, kwargs), outputs)
            wanted = [*(t for t in inputs if t.requires_grad), *aliases.values()] if self._training else []
            return outputs, wanted

        recorder = graphs.recorder()
        self._warm_up(graphs, recorder, model, run)
        self._record(recorder, run)

    def _warm_up(self, graphs, recorder, model: torch.nn.Module, run) -> None:
        """Runs the call three times, watches the first and last run, and restores buffers and generators.

        No kernel can be loaded during a recording. If one was loaded in the last run, or the degrees of a graph became
        known in the middle of it, a recording would perhaps launch others: then the call runs again.
        """
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        generator, host = graphs.generator(), graphs.host_states()
        drawn = generator.get_state()
        writable = {place_of(buffer) for buffer, _ in buffers}
        try:
            with recorder.warming():
                with Watch(graphs.kind, writable):
                    self._run_once(graphs, run)
                self._run_once(graphs, run)
                for _ in range(1 + _MOST_RUNS):
                    before = _extension.provided, max_degrees.arrived
                    watch = Watch(graphs.kind, writable)
                    with watch, recorder.not_waiting():
                        self._run_once(graphs, run)
                    if (_extension.provided, max_degrees.arrived) == before:
                        break
        except Unfit:
            raise
        except Exception as error:  # the model's error, which its uncaptured call will raise again, or out of memory
            raise Unfit(in_words(error)) from error
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    if not torch.equal(buffer, before):  # a write raises the version, which makes cached graphs stale
                        buffer.copy_(before)
            generator.set_state(drawn)
            pairs = zip(host, graphs.host_states(), strict=True)
            moved = [restore(state) for (state, restore), (now, _) in pairs if state != now]
            changed = None if self.state.holds(model) else self.state.change(model)
            if changed is not None:
                self.state.restore(model)
        if changed is not None:
            raise Unfit(changed)
        if moved:
            raise Unfit("the model draws random numbers on the CPU")
        # The CUDA graphs read these tensors but did not make them: they are held, since the graph cache may drop them,
        # and so are their graphs, which keep blocks.
        self._held += watch.read.values()
        self._held += held_graphs(list(watch.read.values()))

    def _run_once(self, graphs, run) -> None:
        outputs, wanted = run()
        self._check(graphs, outputs, wanted)
        for chosen in _choices(outputs, wanted):
            given = [outputs[i] for i in chosen]
            grads = _gradients(given, wanted, [torch.zeros_like(out) for out in given])
            if any(g is not None and g.layout is not torch.strided for g in grads):
                raise Unfit("a gradient is sparse")

    def _record(self, recorder, run) -> None:
        try:
            (outputs, wanted), forward = recorder.record(run)
            call = _C.RecordedCall(
                inputs=self._inputs,
                outputs=[out.detach() for out in outputs],
                differentiable=[out.requires_grad for out in outputs],
                forward=forward,
                held=self._held,
            )
            for chosen in _choices(outputs, wanted):
                given = [outputs[i] for i in chosen]
                grad_outputs = [torch.empty_like(out) for out in given]
                grads, replay = recorder.record(functools.partial(_gradients, given, wanted, grad_outputs))
                call.add_backward([i in chosen for i in range(len(outputs))], replay, grad_outputs, grads)
        except Exception as error:
            raise Unfit(in_words(error)) from error
        self._call = call

    def _check(self, graphs, outputs: list[Any], wanted: list[Tensor]) -> None:
        given = {place_of(t) for t in (*self._inputs, *self.parameters)}
        for out in outputs:
            if type(out) is not Tensor or out.device.type != graphs.kind:
                raise Unfit("an output is no plain tensor on a GPU")
            if place_of(out) in given:
                raise Unfit("an output is an argument or a parameter itself")
        differentiable = [out for out in outputs if out.requires_grad]
        if len(differentiable) > _MOST_DIFFERENTIABLE:
            raise Unfit(f"there are more than {_MOST_DIFFERENTIABLE} outputs with gradients")
        if _reaches_others(differentiable, wanted):
            raise Unfit("gradients go to a tensor that is neither an argument nor a parameter")

    def is_stale(self) -> bool:
        """Returns whether no call can equal this one again, as a constant was written to or a parameter replaced."""
        return any(t._version != version for t, version in self._versions) or not self.state.has_memory()

    def is_free(self) -> bool:
        """Returns whether no backward is pending whose saved tensors a replay would overwrite."""
        return self._call.is_free()

    def replay(self, leaves: list[Any]):
        """Returns the result of a call with these arguments."""
        return unflatten(self._tree, iter(self._call([leaf for leaf in leaves if is_moving(leaf)], self.parameters)))


def _choices(outputs: list[Tensor], wanted: list[Tensor]) -> list[tuple[int, ...]]:
    """Returns every non-empty subset of the differentiable outputs, by their indices."""
    differentiable = [i for i, out in enumerate(outputs) if out.requires_grad] if wanted else []
    sizes = range(1, len(differentiable) + 1)
    return [chosen for size in sizes for chosen in itertools.combinations(differentiable, size)]


def _gradients(outputs: list[Tensor], wanted: list[Tensor], grads: list[Tensor]) -> list[Optional[Tensor]]:
    # retain_graph: otherwise kernels overwrite saved tensors, which the backward of the next subset reads.
    return list(torch.autograd.grad(outputs, wanted, grads, allow_unused=True, retain_graph=True))


def in_words(error: Exception) -> str:
    """Returns why an exception kept a call from being captured."""
    return f"it failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
