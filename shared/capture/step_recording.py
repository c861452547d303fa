"""Records a whole step in a CUDA graph, after observing it, and replays it."""

from __future__ import annotations

import contextlib
import gc
import io
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Optional, Union

import torch
from torch import Tensor

from .. import _C
from ..graph.deferred_checks import DeferredChecks, deferring, excusing
from ..graph.weak_cache import forget_graphs, held_graphs
from .batches import with_leaves
from .keys import Unfit, flatten, unflatten
from .model_recording import Watch, in_words, place_of
from .surroundings import Surroundings, counts_versions

__all__ = ["Observation", "StepRecording", "observed"]

_READS = torch.ops.aten._local_scalar_dense.default  # a read of a number by the host
_CLOCKS = frozenset({"time", "perf_counter", "monotonic", "process_time", "time_ns", "perf_counter_ns"})
_PLAIN = (type(None), bool, int, float, str)


# What a step does ----------------------------------------------------------------------------------------------------


class _StepWatch(Watch):
    """Collects the tensors that a step reads and writes but has not made, and actions that no replay can repeat.

    Args:
        kind: the type of the device on which the step runs.
        given: the memory of the arguments that differ between calls, see :func:`place_of`.
    """

    def __init__(self, kind: str, given: set[int]):
        super().__init__(kind, set())
        self.written: dict[int, Tensor] = {}
        self.faults: list[str] = []
        self._given = given
        self._excused = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is _READS and args[0].device.type == self._kind and not self._excused:
            self.faults.append("the step reads a number from the GPU, as .item(), float() and bool() do")
        return super().__torch_dispatch__(func, types, args, kwargs)

    @contextlib.contextmanager
    def excuse(self) -> Iterator[None]:
        """A context in which the step may wait for the GPU."""
        self._excused += 1
        mode = torch.cuda.get_sync_debug_mode() if self._kind == "cuda" else 0
        if mode:
            torch.cuda.set_sync_debug_mode(0)
        try:
            yield
        finally:
            self._excused -= 1
            if mode:
                torch.cuda.set_sync_debug_mode(mode)

    def _watches(self, t: Tensor) -> bool:
        return True

    def _writes(self, t: Tensor) -> None:
        if t.device.type != self._kind:
            self.faults.append("the step writes to a tensor on the CPU, such as the step counter of an optimizer")
        elif place_of(t) in self._given:
            self.faults.append("the step writes to its arguments")
        elif t.dim() and not _C.is_moving(t):
            self.faults.append("the step writes to a tensor of integers that it did not make")
        else:
            self.written.setdefault(place_of(t), t.detach())


@contextlib.contextmanager
def _heard(faults: list[str]) -> Iterator[None]:
    """Notes in ``faults`` that the block prints, writes to files or reads the clock."""
    if sys.getprofile() is not None:  # a profiler is active and must not be disturbed
        yield
        return

    def hear(frame, event, function):
        if event != "c_call":
            return
        name, owner = getattr(function, "__name__", ""), getattr(function, "__self__", None)
        if function is print or (isinstance(owner, io.IOBase) and not _warns(frame)):
            faults.append("the step prints or writes to a file")
        elif name in _CLOCKS and getattr(owner, "__name__", "") == "time":
            faults.append("the step reads the clock")

    collects = gc.isenabled()
    gc.disable()  # its callbacks, which read the clock in some programs, do not belong to the step
    sys.setprofile(hear)
    try:
        yield
    finally:
        sys.setprofile(None)
        if collects:
            gc.enable()


def _warns(frame: Optional[FrameType]) -> bool:
    """Returns whether a call comes from Python's warnings, which a replay need not repeat."""
    while frame is not None and frame.f_globals.get("__name__") not in ("warnings", "_py_warnings"):  # from 3.14 on
        frame = frame.f_back
    return frame is not None


class Observation:
    """The actions of a step in a call that was observed."""

    def __init__(self, watch: _StepWatch, before: list[Optional[Tensor]], kind: str):
        self.faults = watch.faults
        # The CUDA graph reads these tensors but does not make them. The graph cache may drop them, so they are held.
        self.read = [t for place, t in watch.read.items() if place not in watch._given]
        self.written = list(watch.written.values())
        touched = {*watch.read, *watch.written}
        self.touched = [grad is not None and place_of(grad) in touched for grad in before]
        self.watched = [t for t in self.read if counts_versions(t, kind)]


def observed(graphs, recorder, moving: list[Tensor], leaves: list[Tensor], run: Callable[[], Any]):
    """Runs a step and observes it.

    Args:
        graphs, recorder: the device interface, :class:`~edgeless.capture.model_recording.CudaGraphs`.
        moving: the arguments that differ between calls.
        leaves: the parameters whose gradients the step may read.
        run: calls the step.
    Returns:
        The step's result, and the observation, whose ``faults`` say why the step cannot be captured.
    """
    watch = _StepWatch(graphs.kind, {place_of(t) for t in moving})
    before, host = [leaf.grad for leaf in leaves], graphs.host_states()
    with contextlib.suppress(Unfit), recorder.warming():
        with recorder.not_waiting(), _heard(watch.faults), excusing(watch.excuse), watch:
            result, waited = run(), True
        waited = False
    if waited:
        watch.faults.append("the step waits for the GPU, as .item() does and a mask that selects rows")
    if any(state != now for (state, _), (now, _) in zip(host, graphs.host_states(), strict=True)):
        watch.faults.append("the step draws random numbers on the CPU")
    return result, Observation(watch, before, graphs.kind)


# The replay ----------------------------------------------------------------------------------------------------------


class StepRecording:
    """The recording of a step for equal calls.

    Args:
        graphs, recorder: the device interface, :class:`~edgeless.capture.model_recording.CudaGraphs`.
        function: the step.
        arguments: the call's ``(args, kwargs)``.
        leaves: the arguments taken apart, see :func:`~edgeless.capture.batches.leaves_of`.
        constant: for every leaf, whether it is the same object in all calls. Other tensors are copied in.
        state: the current surroundings of the step.
        seen: the observation of the last call.
    Raises:
        Unfit: the step cannot be recorded. Then no state has changed.
    """

    def __init__(self, graphs, recorder, function, arguments, leaves, constant, state: Surroundings, seen: Observation):
        self.state = state
        self.checks = DeferredChecks(_device_of(leaves, state))
        self._moves = [isinstance(leaf, Tensor) and not same for leaf, same in zip(leaves, constant)]
        self._constants = [(i, leaf) for i, (leaf, same) in enumerate(zip(leaves, constant)) if same and _is_held(leaf)]
        integers = [leaf for _, leaf in self._constants if isinstance(leaf, Tensor) and not _C.is_moving(leaf)]
        self._versions = [(t, t._version) for t in (*integers, *seen.watched)]
        self._addresses = [(t, t.data_ptr()) for _, t in self._constants if isinstance(t, Tensor)]
        self._held: list[Any] = [seen.read, held_graphs(seen.read)]
        self._written = seen.written
        with torch.no_grad():
            self._inputs = [leaf.clone() for leaf, moves in zip(leaves, self._moves) if moves]
        statics = iter(self._inputs)
        given = [next(statics) if moves else leaf for leaf, moves in zip(leaves, self._moves)]
        args, kwargs = with_leaves(arguments, iter(given))
        self._groups = _by_dtype(self._inputs)
        before = [leaf.grad for leaf in state.leaves]
        self._wanted = [
            None if grad is None else grad if touched else True for grad, touched in zip(before, seen.touched)
        ]
        host = graphs.host_states()
        torch.clear_autocast_cache()
        try:
            with deferring(self.checks):
                result, self._replay = recorder.record(lambda: function(*args, **kwargs))
            self._changes = state.changes()
            self._grads = [leaf.grad for leaf in state.leaves]
            outputs: list[Any] = []
            self._tree = flatten(result, outputs)
            self._check(graphs, outputs)
            if any(was != now for (was, _), (now, _) in zip(host, graphs.host_states(), strict=True)):
                raise Unfit("the step draws random numbers on the CPU")
        except Exception as error:
            for leaf, grad in zip(state.leaves, before):
                leaf.grad = grad
            state.restore()
            for (was, restore), (now, _) in zip(host, graphs.host_states(), strict=True):
                if was != now:
                    restore(was)
            raise error if isinstance(error, Unfit) else Unfit(in_words(error)) from error
        finally:
            torch.clear_autocast_cache()
            forget_graphs(self._inputs)
        self._outputs = [out.detach() if isinstance(out, Tensor) else out for out in outputs]

    def _check(self, graphs, outputs: list[Any]) -> None:
        given = {place_of(t) for t in (*self._inputs, *self.state.tensors)}
        for out in outputs:
            if isinstance(out, Tensor):
                if type(out) is not Tensor or out.device.type != graphs.kind or out.layout is not torch.strided:
                    raise Unfit("a result is no plain tensor on the GPU")
                if place_of(out) in given:
                    raise Unfit("a result is an argument or a parameter itself")
            elif not isinstance(out, _PLAIN):
                raise Unfit(f"a result is a {type(out).__name__}")

    def is_stale(self) -> bool:
        """Returns whether no call can equal this one again, as a tensor that it reads was edited."""
        return any(t._version != version for t, version in self._versions)

    def fits(self, leaves: list[Any]) -> bool:
        """Returns whether a call with these arguments, and with the current gradients, equals the recorded one.

        The caller has compared the key and the state.
        """
        return (
            all(leaves[i] is leaf for i, leaf in self._constants)
            and all(t.data_ptr() == address for t, address in self._addresses)
            and all(t._version == version for t, version in self._versions)
            and all(map(_fits, self._wanted, (leaf.grad for leaf in self.state.leaves)))
        )

    def replay(self, leaves: list[Any]) -> Any:
        """Returns the result of a call with these arguments."""
        moving = [leaf for leaf, moves in zip(leaves, self._moves) if moves]
        with torch.no_grad():
            for places in self._groups:
                torch._foreach_copy_([self._inputs[i] for i in places], [moving[i] for i in places], non_blocking=True)
            self._replay()
            for change in self._changes:
                change.apply()
            for leaf, grad in zip(self.state.leaves, self._grads):
                if leaf.grad is not grad:
                    leaf.grad = grad
            _raise_versions(self._written)
            if self.checks.any:
                self.checks.send()
            outputs = [out.clone() if isinstance(out, Tensor) else out for out in self._outputs]
        return unflatten(self._tree, iter(outputs))


def _fits(wanted: Union[Tensor, bool, None], grad: Optional[Tensor]) -> bool:
    """Returns whether a gradient matches a recording; ``wanted`` is None for none, True for any, or the tensor."""
    return grad is wanted or (wanted is True and grad is not None)


def _device_of(leaves: list[Any], state: Surroundings) -> torch.device:
    return next(t.device for t in (*leaves, *state.tensors) if isinstance(t, Tensor))


def _is_held(leaf: Any) -> bool:
    return not isinstance(leaf, (*_PLAIN, torch.dtype, torch.Size, torch.device))


def _by_dtype(tensors: list[Tensor]) -> list[list[int]]:
    """Returns the indices of tensors grouped by dtype, since one call copies a group."""
    groups: dict[torch.dtype, list[int]] = {}
    for place, tensor in enumerate(tensors):
        groups.setdefault(tensor.dtype, []).append(place)
    return list(groups.values())


def _raise_versions(tensors: list[Tensor]) -> None:
    """Makes autograd and caches notice that a replay wrote to tensors."""
    try:
        torch.autograd.graph.increment_version(tensors)
    except (AttributeError, TypeError):  # torch before 2.5 takes one tensor
        for t in tensors:
            torch.autograd.graph.increment_version(t)
