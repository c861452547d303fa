"""Replays a model's forward and backward from CUDA graphs, since models on small graphs are launch-bound."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any, Optional, TypeVar

import torch

from .._C import call_key
from ..checks import compiling
from ..graph.weak_cache import trusts_versions
from .counts import Counts, recording_lock
from .keys import State, Unfit, call_refusal, flatten, is_moving, leaf_key, settings
from .model_recording import CudaGraphs, Recording

__all__ = ["Capture", "capture"]

_MISSES = 4  # after this many times ``most`` calls in a row without a replay, capturing ends
_MOST_SEEN = 256  # distinct calls that are counted
_CUDA = CudaGraphs()
_Model = TypeVar("_Model", bound=torch.nn.Module)


def capture(model: _Model, *, warmup: int = 3, most: int = 8) -> _Model:
    """Lets ``model`` replay its forward and backward from CUDA graphs once calls repeat.

    The model is called as before and stays the same object, with its parameters, optimizer, ``state_dict`` and hooks.
    After ``warmup`` equal calls, forward and backward are captured; later equal calls replay the capture. Calls are
    equal if they have the same graph, shapes, dtypes, parameters, training modes, module attributes, autocast and
    choices of backend and engine. Each other graph or shape gets a capture of its own, up to ``most``; calls beyond
    that, or that cannot be captured, run as before, and ``model.captured`` says why: it is the :class:`Capture`, whose
    report is also in the model's ``repr``, unless its class prints in a way of its own. Results equal the model's own
    bit by bit; dropout draws a new mask in every replay. Outputs and gradients are copies, so that the next call does
    not change them.

    Integer tensors in arguments and buffers, such as ``edge_index``, are constants of a capture: after an in-place
    write that PyTorch's version counter sees, the tensor needs another capture. Floating-point arguments are copied in.
    A replay does not run the model's Python code: a model that sets attributes, writes to its arguments or draws from
    Python's generator is not captured. Other state that it reads, such as global variables or lists edited in place,
    must not change; call ``model.captured.release()`` before it does.

    After many calls in a row without a replay, as on sampled graphs, the model's own forward is restored, and the
    report says so. A copy of the model, deep or pickled, is not captured: its ``captured`` is None.

    Args:
        model: any module whose parameters are on one GPU.
        warmup: equal calls before a capture, at least 1.
        most: the largest number of captures that are kept. Each holds the memory of a forward and a backward.
    Returns:
        ``model`` itself.
    Raises:
        TypeError: ``model`` is no module.
        ValueError: ``warmup`` or ``most`` is less than 1, the model is captured already, or it has an attribute of its
            own that is called ``captured``.

    Example:
        >>> import torch, edgeless
        >>> model = edgeless.capture(torch.nn.Linear(2, 1))
        >>> model(torch.ones(3, 2)).shape  # on the CPU it runs as it is
        torch.Size([3, 1])
        >>> print(model.captured)
        0 captured, 0 replayed
          1 not captured: a tensor is not on the current GPU
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"capture: model must be a torch.nn.Module, got {type(model).__name__}")
    for name, value in (("warmup", warmup), ("most", most)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"capture: {name} must be an int of at least 1, got {value!r}")
    if isinstance(model.__dict__.get("forward"), _Forward):
        raise ValueError("capture: model is captured already; call model.captured.release() first")
    if not isinstance(getattr(model, "captured", None), (Capture, type(None))):
        raise ValueError("capture: model must have no attribute of its own called 'captured', which takes the report")
    own = model.__dict__.get("forward", model.forward)  # a copied model has its bound class forward here
    if getattr(own, "__func__", None) is not type(model).forward:
        raise ValueError("capture: model must have the forward of its class, got one of its own")
    Capture(model, warmup, most)
    return model


class _Calls:
    """The recordings of a captured model, and the calls that were counted.

    The model's forward holds them, not the handle: a recording holds the model's attributes, the handle among them.
    """

    def __init__(self):
        self.kept: dict[Hashable, list[Recording]] = {}  # key of a call -> recordings, one per state of the model
        self.seen: dict[Hashable, list[_Seen]] = {}


class _Forward:
    """Replaces the forward of a captured model."""

    def __init__(self, owner: Capture):
        self.owner = owner
        self.calls = _Calls()

    def __call__(self, *args, **kwargs):
        return self.owner._call(args, kwargs)

    def __reduce_ex__(self, protocol):
        """Gives a copy of the model, or one read from a pickle, the forward of its class."""
        return getattr, (self.owner._model(), "forward")  # evaluated before the copy has instance attributes


class _ExtraRepr:
    """Adds the report to a captured model's ``repr``."""

    def __init__(self, owner: Capture):
        self.owner = owner

    def __call__(self) -> str:
        model = self.owner._model()
        own = type(model).extra_repr(model)
        report = "captured: " + self.owner.report().replace("\n", "\n  ")
        return f"{own}\n{report}" if own else report

    def __reduce_ex__(self, protocol):
        """Does the same as :meth:`_Forward.__reduce_ex__`."""
        return getattr, (self.owner._model(), "extra_repr")


class _Seen:
    """Equal calls that were not captured: their number, their constants and the state of the model."""

    def __init__(self, leaves: list[Any]):
        self.count = 0
        self.state: Optional[State] = None
        self.failed = False  # if True, a capture has failed and is not tried again
        self._constants = [weakref.ref(leaf) for leaf in leaves if _is_object(leaf)]

    def are(self, leaves: list[Any]) -> bool:
        """Returns whether these are the same constants, and not new objects with the ids of dead ones."""
        return all(ref() is leaf for ref, leaf in zip(self._constants, filter(_is_object, leaves)))


def _is_object(leaf: Any) -> bool:
    return hasattr(leaf, "__weakref__") and not is_moving(leaf)


class Capture(Counts):
    """The object at ``model.captured``, which reports on the captures and can release the model."""

    def __init__(self, model: torch.nn.Module, warmup: int, most: int, graphs: Any = _CUDA):
        self._model = weakref.ref(model)
        self._warmup, self._most, self._graphs = warmup, most, graphs
        super().__init__()
        forward = _Forward(self)
        self._calls = weakref.ref(forward.calls)
        model.forward, model.captured, model.extra_repr = forward, self, _ExtraRepr(self)

    def __reduce_ex__(self, protocol):
        """A copy of the model has no captures."""
        return type(None), ()

    def release(self) -> None:
        """Restores the model's own forward and drops all captures. The report remains."""
        model = self._model()
        if model is not None and getattr(model.__dict__.get("forward"), "owner", None) is self:
            del model.forward
        self._kept.clear()
        self._seen.clear()

    @property
    def _kept(self) -> dict[Hashable, list[Recording]]:
        calls = self._calls()
        return {} if calls is None else calls.kept

    @property
    def _seen(self) -> dict[Hashable, list[_Seen]]:
        calls = self._calls()
        return {} if calls is None else calls.seen

    def _call(self, args: tuple, kwargs: dict[str, Any]):
        model = self._model()
        if compiling():
            return type(model).forward(model, *args, **kwargs)
        recording = None
        try:
            recording = self._find(model, args, leaves := [], kwargs)
        except Unfit as unfit:
            self._refuse(str(unfit))
        if recording is None:
            self._misses += 1
            if self._misses >= max(_MISSES, self._warmup + 1) * self._most:
                self._gave_up = True
                self.release()
            return type(model).forward(model, *args, **kwargs)
        self._misses = 0
        if not recording.is_free():
            self._refuse("the backward of the call before is still to come")
            return type(model).forward(model, *args, **kwargs)
        self._replays += 1
        return recording.replay(leaves)

    def _find(self, model, args: tuple, leaves: list[Any], kwargs: dict[str, Any]) -> Optional[Recording]:
        """Appends the arguments' leaves to ``leaves`` and returns their recording; None if there is none yet.

        It first looks up the arguments, which are cheap to compare and differ between sampled graphs, then compares
        the state of the model.
        """
        device = self._graphs.device()
        plain = None if device is None else call_key(args, kwargs, device)
        if plain is None:
            tree = flatten((args, kwargs), leaves)
            arguments = tree, tuple([leaf_key(leaf, device) for leaf in leaves])
        else:
            *arguments, found = plain
            leaves += found
        if device is None:
            raise Unfit("no tensor is on a GPU")
        if recording_lock.locked() or self._graphs.is_capturing():
            raise Unfit("another capture is going on")
        key = (*arguments, type(model).forward, model.training, self._graphs.stream(device), settings())
        for recording in self._kept.get(key, ()):
            if recording.state.holds(model):
                if (why := call_refusal()) is not None:
                    raise Unfit(why)
                return recording
        return self._count(key, model, leaves, flatten((args, kwargs), []), device)

    def _count(self, key, model, leaves: list[Any], tree, device: int) -> Optional[Recording]:
        """Counts a call and records it once it has repeated more than ``warmup`` times."""
        if (why := call_refusal()) is not None:
            raise Unfit(why)
        if len(self._seen) >= _MOST_SEEN:
            self._seen.clear()
        alike = [seen for seen in self._seen.get(key, ()) if seen.are(leaves)]
        self._seen[key] = alike
        seen = next((seen for seen in alike if seen.state is None or seen.state.holds(model)), None)
        if seen is None:
            if alike:
                self._refuse(alike[-1].state.change(model))
            alike.append(seen := _Seen(leaves))
            del alike[: -self._most]
        elif seen.failed:
            return None
        elif seen.state is None:
            seen.state = State(model, device, "forward")
        seen.count += 1
        if seen.count <= self._warmup or self._gave_up:
            return None
        return self._record(key, seen, model, leaves, tree)

    def _record(self, key, seen: _Seen, model, leaves: list[Any], tree) -> Optional[Recording]:
        if not trusts_versions():
            raise Unfit("EDGELESS_CACHE asks for more than versions to tell edited graphs")
        call = self._graphs, model, type(model).forward, leaves, tree, seen.state
        return self._recorded(key, seen, lambda: Recording(*call))
