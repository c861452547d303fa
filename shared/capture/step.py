"""Replays whole training steps, with loss, backward and optimizer, from CUDA graphs."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Optional, Union

import torch
from torch import Tensor

from .. import _extension
from ..checks import compiling
from ..graph import max_degrees
from ..graph.weak_cache import trusts_versions
from .batches import leaves_of, step_key
from .counts import Counts, recording_lock
from .keys import Unfit, call_refusal, flatten, settings, unflatten
from .model_recording import CudaGraphs
from .optimizers import Prepared
from .step_recording import Observation, StepRecording, observed
from .surroundings import Surroundings

__all__ = ["CapturedStep", "capture_step"]

_MISSES = 8  # after this many times ``most`` calls in a row without a replay, a step is not captured any more
_MOST_SEEN = 256  # distinct calls that are counted
_MOST_STATES = 16  # kept surroundings
_MOST_WATCHED = 8  # most watched calls until one launches the same kernels as the call before
_CUDA = CudaGraphs()

Models = Union[torch.nn.Module, Iterable[torch.nn.Module], None]
Optimizers = Union[torch.optim.Optimizer, Iterable[torch.optim.Optimizer], None]


def capture_step(
    function: Optional[Callable] = None,
    *,
    model: Models = None,
    optimizer: Optimizers = None,
    warmup: int = 3,
    most: int = 16,
) -> Any:
    """Lets a whole training step run as one replay of a CUDA graph, once calls with arguments of equal shapes repeat.

    ``function`` takes a batch, and computes loss, gradients and the optimizer's step as it would without this. The
    first ``warmup`` calls of a kind run as they are written, and the last of these is observed. The next call is
    recorded, and later calls are replayed. Calls are of one kind if their arguments have the same shapes and dtypes and
    the same numbers and text, and if nothing else that the step reads has changed: modes, modules and attributes of
    models, the state and hyperparameters of optimizers, closures and global variables of the function, autocast,
    backend and engine. Arguments are tensors, numbers, text, nested tuples, lists and dictionaries of them, and batches
    of PyG. Their tensors, of integers too, are copied into the recording, except those that were the same objects in
    all calls before it. A graph that differs between calls is sorted on the GPU in every replay; its ids are checked
    there, and a wrong one is an error of a later call.

    Results equal those of the function itself bit by bit. Dropout draws the same masks; BatchNorm, moving averages and
    gradients that several calls accumulate are updated; learning rates follow a scheduler. The function's results have
    no autograd history in any call.

    A step that prints, reads a number from the GPU (``.item()``), writes to a tensor on the CPU, draws random numbers
    on the host, changes lists or objects, or has hooks is not recorded: it runs as it is written, and :meth:`report`
    says why. So does every step on the CPU. Everything outside of ``function`` runs as before; call ``model.train()``
    and ``scheduler.step()`` there.

    Optimizers on a GPU are made capturable if torch supports it (their step counters move to the GPU), and the learning
    rates of Adam, AdamW and fused optimizers become tensors, which schedulers write to. Other optimizers keep a number,
    and a step with another number is recorded again.

    Args:
        function: the step. Without it, the result is a decorator.
        model: the module, or the modules, that the step trains or calls. Those in closures are found as well.
        optimizer: the optimizer or optimizers, likewise.
        warmup: equal calls before a recording, at least 2.
        most: the largest number of recordings that are kept. All share one memory pool.
    Returns:
        A :class:`CapturedStep`, which is called like ``function``.
    Raises:
        TypeError: function, model or optimizer is something else.
        ValueError: ``warmup`` is less than 2, or ``most`` less than 1.
        IndexError: raised by a call if a graph of an earlier call had ids out of range.

    Example:
        >>> import torch, edgeless
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> @edgeless.capture_step(model=model, optimizer=optimizer)
        ... def step(x, y):
        ...     optimizer.zero_grad()
        ...     loss = (model(x) - y).square().mean()
        ...     loss.backward()
        ...     optimizer.step()
        ...     return loss
        >>> step(torch.ones(3, 2), torch.ones(3, 1)).shape  # on the CPU it runs as it is
        torch.Size([])
        >>> print(step)
        0 captured, 0 replayed
          1 not captured: an argument is a tensor that is not on the current GPU: move the batch before the step
    """
    for name, value, least in (("warmup", warmup, 2), ("most", most, 1)):
        if not isinstance(value, int) or value < least:
            raise ValueError(f"capture_step: {name} must be an int of at least {least}, got {value!r}")
    models = _several("model", model, torch.nn.Module)
    optimizers = _several("optimizer", optimizer, torch.optim.Optimizer)
    if function is None:
        return lambda found: CapturedStep(_called(found), models, optimizers, warmup, most)
    return CapturedStep(_called(function), models, optimizers, warmup, most)


def _called(function: Any) -> Callable:
    if not callable(function):
        raise TypeError(f"capture_step: function must be callable, got {type(function).__name__}")
    return function


def _several(name: str, given: Any, kind: type) -> list:
    found = [] if given is None else [given] if isinstance(given, kind) else given
    if not isinstance(found, (list, tuple)) or not all(isinstance(one, kind) for one in found):
        raise TypeError(f"capture_step: {name} must be a {kind.__name__} or several, got {type(given).__name__}")
    return list(found)


class _Seen:
    """Equal calls that were not recorded: their number, and which arguments were the same objects in all."""

    def __init__(self, state: Optional[Surroundings], pattern: list[bool], before: Optional[_Seen]):
        self.state, self.pattern = state, pattern
        self.count = self.watched = 0
        self.constant: list[bool] = [] if before is None else before.constant
        self.observation: Optional[Observation] = None
        self.failed = False
        self._stamps: list[Any] = [] if before is None else before._stamps

    def add(self, leaves: list[Any]) -> None:
        """Counts a call with these arguments."""
        stamps = [_stamp(leaf) for leaf in leaves]
        if self._stamps:
            constant = [
                same and before[1:] == now[1:] and before[0]() is leaf
                for same, before, now, leaf in zip(self.constant, self._stamps, stamps, leaves)
            ]
            if constant != self.constant:
                self.observation = None  # the step has to be observed again
            self.constant = constant
        else:
            self.constant = [True] * len(leaves)
        self._stamps = stamps
        self.count += 1


def _stamp(leaf: Any) -> tuple:
    """A value that is equal for a constant argument: the object and, for integers, its version."""
    if isinstance(leaf, Tensor):
        return weakref.ref(leaf), leaf.data_ptr(), None if leaf.is_floating_point() else leaf._version
    if hasattr(leaf, "__weakref__"):
        return weakref.ref(leaf), None, None
    return (lambda: leaf), None, None


class CapturedStep(Counts):
    """A step that is replayed where it can be, see :func:`capture_step`. It is called like the function."""

    def __init__(self, function: Callable, models: list, optimizers: list, warmup: int, most: int, graphs: Any = _CUDA):
        super().__init__()
        functools.update_wrapper(self, function, updated=())
        self._function, self._roots = function, [*models, *optimizers]
        self._optimizers = Prepared(optimizers, "cuda")
        self._warmup, self._most, self._graphs = warmup, most, graphs
        self._kept: dict[Hashable, list[StepRecording]] = {}
        self._seen: dict[Hashable, list[_Seen]] = {}
        self._states: list[Surroundings] = []
        self._recorders: dict[Hashable, Any] = {}
        self._running = threading.local()

    def __call__(self, *args, **kwargs):
        if compiling() or getattr(self._running, "now", False):  # a nested call of the step belongs to the outer one
            return self._function(*args, **kwargs)
        self._running.now = True
        try:
            return self._call(args, kwargs)
        finally:
            self._running.now = False

    def release(self) -> None:
        """Drops all recordings. Later calls are counted anew."""
        for found in (self._kept, self._seen, self._states, self._recorders):
            found.clear()
        self._gave_up, self._misses = False, 0

    # A call ----------------------------------------------------------------------------------------------------------

    def _call(self, args: tuple, kwargs: dict[str, Any]):
        if self._gave_up:
            return _without_history(self._function(*args, **kwargs))
        self._report_wrong_ids()
        leaves: list[Any] = []
        try:
            found = self._find((args, kwargs), leaves)
        except Unfit as unfit:
            self._refuse(str(unfit))
            found = None
        if isinstance(found, StepRecording):
            self._misses = 0
            self._replays += 1
            return found.replay(leaves)
        self._misses += 1
        if self._misses >= _MISSES * self._most:
            self.release()
            self._gave_up, self._misses = True, _MISSES * self._most
        if found is None or self._gave_up:
            return _without_history(self._function(*args, **kwargs))
        return _without_history(self._watched(found, leaves, args, kwargs))

    def _report_wrong_ids(self) -> None:
        for kept in self._kept.values():
            for recording in kept:
                if (what := recording.checks.wrong()) is not None:
                    raise IndexError(f"capture_step: in a call before, {what}; what was computed from it is wrong")

    def _find(self, arguments: tuple, leaves: list[Any]) -> Union[StepRecording, _Seen, None]:
        """Appends the arguments' leaves to ``leaves`` and decides how to run the call.

        Returns:
            The recording to replay; the calls of this kind, if this call is to be observed; None if it just runs.
        """
        device = self._graphs.device()
        tree = leaves_of(arguments, leaves)
        key = (tree, tuple([step_key(leaf, self._graphs.kind, device) for leaf in leaves]))
        if device is None:
            raise Unfit("no tensor is on a GPU")
        if recording_lock.locked() or self._graphs.is_capturing():
            raise Unfit("another capture is going on")
        if (why := call_refusal()) is not None:
            raise Unfit(why)
        self._optimizers.renew()
        key = (*key, self._graphs.stream(device), settings())
        state = self._state()
        for recording in self._kept.get(key, ()):
            if recording.state is state and recording.fits(leaves):
                return recording
        return self._count(key, state, leaves, arguments, device)

    def _state(self) -> Optional[Surroundings]:
        for place, state in enumerate(self._states):
            if state.holds():
                self._states.insert(0, self._states.pop(place))
                return state
        return None

    def _count(self, key, state, leaves: list[Any], arguments, device: int) -> Union[StepRecording, _Seen, None]:
        if len(self._seen) >= _MOST_SEEN:
            self._seen.clear()
        alike = self._seen.setdefault(key, [])
        if state is None and alike:  # the call repeats an earlier one, so the search is profitable
            if self._states:
                self._refuse(self._states[0].difference())
            state = Surroundings(self._function, self._roots, self._graphs.kind, device)
            self._states.insert(0, state)
            for gone in self._states[_MOST_STATES:]:
                self._drop(lambda recording, gone=gone: recording.state is gone)
            del self._states[_MOST_STATES:]
        pattern = [] if state is None else [leaf.grad is not None for leaf in state.leaves]
        seen = next((seen for seen in alike if seen.state is state and seen.pattern == pattern), None)
        if seen is None and alike and alike[-1].state is None:
            seen = alike[-1]
            seen.state, seen.pattern = state, pattern
        elif seen is None:
            seen = _Seen(state, pattern, alike[-1] if alike else None)
            alike.append(seen)
            del alike[: -self._most]
        if seen.failed:
            return None
        seen.add(leaves)
        if state is None or seen.count < self._warmup:
            return None
        if seen.observation is None:
            return seen if trusts_versions() else self._refuse("EDGELESS_CACHE asks for more than versions")
        return self._record(key, seen, leaves, arguments)

    def _recorder(self) -> Any:
        """The recorder for the current stream; its recordings share a pool, since they are replayed one at a time."""
        key = self._graphs.stream(self._graphs.device()), threading.get_ident()
        if key not in self._recorders:
            self._recorders[key] = self._graphs.recorder()
        return self._recorders[key]

    def _watched(self, seen: _Seen, leaves: list[Any], args: tuple, kwargs: dict[str, Any]):
        """Calls the function and observes it. The next call may be recorded if this one launched no new kernels."""
        moving = [leaf for leaf, same in zip(leaves, seen.constant) if isinstance(leaf, Tensor) and not same]
        before = _extension.provided, max_degrees.arrived
        result, observation = observed(
            self._graphs, self._recorder(), moving, seen.state.leaves, lambda: self._function(*args, **kwargs)
        )
        seen.watched += 1
        try:
            seen.state.changes()
        except Unfit as unfit:
            observation.faults.append(str(unfit))
        if (_extension.provided, max_degrees.arrived) != before and seen.watched < _MOST_WATCHED:
            return result  # code was compiled and loaded, which writes files and reads the clock
        if observation.faults:
            seen.failed = True
            for fault in dict.fromkeys(observation.faults):
                self._refuse(fault)
        else:
            seen.observation = observation
        return result

    def _record(self, key, seen: _Seen, leaves: list[Any], arguments) -> StepRecording:
        def record() -> StepRecording:
            gc.collect()  # unreferenced autograd nodes may belong to another stream
            call = self._function, arguments, leaves, seen.constant, seen.state, seen.observation
            try:
                return StepRecording(self._graphs, self._recorder(), *call)
            except Unfit:
                seen.observation = None  # the observation holds tensors
                raise

        return self._recorded(key, seen, record)


def _without_history(result: Any) -> Any:
    """Detaches results, so that calls that were not replayed have no autograd history either."""
    leaves: list[Any] = []
    tree = flatten(result, leaves)
    return unflatten(tree, iter([leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]))
