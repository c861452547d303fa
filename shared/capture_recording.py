"""Forward and backward of one kind of call, recorded in CUDA graphs and replayed as one node of autograd."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Optional

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from . import _C
from .autocast import autocast_dtype, autocasts
from .capture_keys import State, Unfit, flatten, is_moving, parts_of, unflatten
from .engines import tuner
from .graph_cache import held_graphs

__all__ = ["CudaGraphs", "Recording"]

_WAITS = "called a synchronizing CUDA operation"  # as PyTorch says
_MOST_DIFFERENTIABLE = 3  # outputs: a backward is recorded for every set of them that a loss may use


# CUDA ----------------------------------------------------------------------------------------------------------------


class CudaGraphs:
    """All that is particular to CUDA, so that tests can put something else in its place."""

    kind = "cuda"

    def __init__(self):
        self._streams: dict[tuple[int, int], torch.cuda.Stream] = {}

    def device(self) -> Optional[int]:
        """The index of the current device, None where no tensor can be on one yet."""
        return torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def stream(self, device: int) -> int:
        """The current stream: work on two of them must not share a capture's memory."""
        return torch._C._cuda_getCurrentRawStream(device)

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured."""
        return torch.cuda.is_current_stream_capturing()

    def generator(self) -> torch.Generator:
        """What dropout on the device draws from."""
        return torch.cuda.default_generators[torch.cuda.current_device()]

    def host_states(self) -> list[tuple[Any, Callable[[Any], None]]]:
        """The states of the generators whose draws a replay would repeat, and how to set them."""
        found = [(random.getstate(), random.setstate), (torch.get_rng_state().tolist(), _set_cpu_state)]
        if (numpy := sys.modules.get("numpy")) is not None:
            name, keys, *rest = numpy.random.get_state()
            found.append(((name, keys.tolist(), *rest), numpy.random.set_state))
        return found

    def recorder(self) -> _CudaRecorder:
        """For the graphs of one recording."""
        device = torch.cuda.current_device()
        key = device, self.stream(device)
        if key not in self._streams:
            self._streams[key] = torch.cuda.Stream()
        return _CudaRecorder(self.generator(), self._streams[key])


class _CudaRecorder:
    """Records graphs that share memory and are replayed in the order in which they were made.

    All recordings for one stream of a user are made on one stream: a workspace of cuBLAS belongs to it, so two graphs
    that share one never run at a time.
    """

    def __init__(self, generator: torch.Generator, stream: torch.cuda.Stream):
        self._generator, self._stream = generator, stream
        self._pool = torch.cuda.graph_pool_handle()

    @contextlib.contextmanager
    def warming(self) -> Iterator[None]:
        """For runs ahead of the first recording."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)

    @contextlib.contextmanager
    def not_waiting(self) -> Iterator[None]:
        """Raises ``Unfit`` at the end where this thread has waited for the GPU meanwhile.

        A capture would fail there, but PyTorch's allocator and generators do not recover from one that does. What
        reports a wait is a mode of the process, so it must not be an error: other threads may wait.
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
        """What ``function()`` returns, and what runs on the GPU again what it ran."""
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        drawn = self._generator.clone_state() if hasattr(self._generator, "clone_state") else None  # torch < 2.4
        try:
            # Other threads, as those of data loaders, may do meanwhile what a capture may not.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                result = function()
        except Exception:
            # A capture that cannot be ended leaves both as they were within it.
            if drawn is not None:
                self._generator.graphsafe_set_state(drawn)
            torch.cuda.set_stream(current)
            raise
        return result, graph.replay


# What a model must not do --------------------------------------------------------------------------------------------


class _Watch(TorchDispatchMode):
    """Collects the tensors that ops read and that no op within made; refuses writes to others than ``writable``."""

    def __init__(self, kind: str, writable: set[int]):
        super().__init__()
        self.read: dict[int, Tensor] = {}
        self._made: set[int] = set()
        self._kind, self._writable = kind, writable

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.device.type == self._kind and _place(leaf) not in self._made:
                self.read.setdefault(_place(leaf), leaf.detach())
        if isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable:
            self._check_writes(func, args, kwargs)
        out = func(*args, **kwargs)
        places = (_place(leaf) for leaf in tree_leaves(out) if isinstance(leaf, Tensor))
        self._made.update(place for place in places if place not in self.read)  # views of what was read are not made
        return out

    def _check_writes(self, func, args, kwargs) -> None:
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for t in tree_leaves(args[i] if i < len(args) else kwargs.get(argument.name)):
                if isinstance(t, Tensor) and _place(t) not in self._made and _place(t) not in self._writable:
                    raise Unfit("the model writes to a tensor that is neither a buffer nor its own result")


def _place(t: Tensor) -> int:
    return t.untyped_storage()._cdata


def _reaches_others(outputs: list[Tensor], wanted: list[Tensor]) -> bool:
    """Whether a backward through ``outputs`` gives gradients to other leaves of autograd as well."""
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
    """A model with the forward of its class."""

    def __init__(self, model: torch.nn.Module, forward):
        super().__init__()
        self.model, self._forward = model, forward

    def forward(self, *args, **kwargs):
        return self._forward(self.model, *args, **kwargs)


class Recording:
    """Forward and backward of one kind of call.

    Args:
        graphs: how to record, :class:`CudaGraphs`.
        model: what is called.
        forward: of its class.
        leaves, tree: of the arguments, see :func:`~edgeless.capture_keys.flatten`.
        state: what the model is made of now.
    Raises:
        Unfit: they cannot be recorded.
    """

    def __init__(self, graphs, model: torch.nn.Module, forward, leaves: list[Any], tree, state: State):
        self.state = state
        constants = [leaf for leaf in leaves if not is_moving(leaf)]
        self._versions = [(leaf, leaf._version) for leaf in constants if isinstance(leaf, Tensor)]
        self._held: list[Any] = [constants, [parts_of(leaf) for leaf in constants]]  # so their ids stay theirs
        moving = [leaf for leaf in leaves if is_moving(leaf)]
        self._inputs = [leaf.detach().clone() for leaf in moving]
        self._training = torch.is_grad_enabled()
        self.parameters = [p for p in model.parameters() if p.requires_grad] if self._training else []
        plain, names = _Plain(model, forward), {id(p): name for name, p in model.named_parameters()}
        dtype, enabled = autocast_dtype("cuda"), autocasts("cuda")

        def run() -> tuple[list[Any], list[Tensor]]:
            """Outputs, and the leaves of autograd whose gradients are wanted.

            They share memory with inputs and parameters but are leaves of their own: autograd's node of a parameter
            belongs to the stream on which it was first used, and what a user still holds keeps it there.
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
        """Three runs, the first and the last of them watched, that leave no trace in buffers and generators."""
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        generator, host = graphs.generator(), graphs.host_states()
        drawn = generator.get_state()
        writable = {_place(buffer) for buffer, _ in buffers}
        watch = _Watch(graphs.kind, writable)
        try:
            with recorder.warming(), tuner.resting():  # a measurement would be a wait for the GPU
                with _Watch(graphs.kind, writable):
                    self._run_once(graphs, run)
                self._run_once(graphs, run)
                with watch, recorder.not_waiting():
                    self._run_once(graphs, run)
        except Unfit:
            raise
        except Exception as error:  # the model's own, which its call will raise again, or one of memory
            raise Unfit(_in_words(error)) from error
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    if not torch.equal(buffer, before):  # a write to the ids of a graph would make it another one
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
        # What the graphs read and do not make: a cache may drop it otherwise, and a graph its blocks.
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
            raise Unfit(_in_words(error)) from error
        self._call = call

    def _check(self, graphs, outputs: list[Any], wanted: list[Tensor]) -> None:
        given = {_place(t) for t in (*self._inputs, *self.parameters)}
        for out in outputs:
            if type(out) is not Tensor or out.device.type != graphs.kind:
                raise Unfit("an output is no plain tensor on a GPU")
            if _place(out) in given:
                raise Unfit("an output is an argument or a parameter itself")
        differentiable = [out for out in outputs if out.requires_grad]
        if len(differentiable) > _MOST_DIFFERENTIABLE:
            raise Unfit(f"there are more than {_MOST_DIFFERENTIABLE} outputs with gradients")
        if _reaches_others(differentiable, wanted):
            raise Unfit("gradients go to a tensor that is neither an argument nor a parameter")

    def is_stale(self) -> bool:
        """Whether no call can be this one again: a constant was written to, or a parameter replaced."""
        return any(t._version != version for t, version in self._versions) or not self.state.has_memory()

    def is_free(self) -> bool:
        """Whether no backward is to come for which a replay would overwrite what it needs."""
        return self._call.is_free()

    def replay(self, leaves: list[Any]):
        """The result of a call with these arguments."""
        return unflatten(self._tree, iter(self._call([leaf for leaf in leaves if is_moving(leaf)], self.parameters)))


def _choices(outputs: list[Tensor], wanted: list[Tensor]) -> list[tuple[int, ...]]:
    """Every set of outputs, by their places, through which gradients may come."""
    differentiable = [i for i, out in enumerate(outputs) if out.requires_grad] if wanted else []
    sizes = range(1, len(differentiable) + 1)
    return [chosen for size in sizes for chosen in itertools.combinations(differentiable, size)]


def _gradients(outputs: list[Tensor], wanted: list[Tensor], grads: list[Tensor]) -> list[Optional[Tensor]]:
    # The graph is retained, or the second of two backward passes would read what the first one wrote over.
    return list(torch.autograd.grad(outputs, wanted, grads, allow_unused=True, retain_graph=True))


def _in_words(error: Exception) -> str:
    return f"it failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
