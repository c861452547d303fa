"""Code that both adapters share for layers whose calls run as programs."""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Optional

import torch
from torch import Tensor

from ..capture.watching import is_seen
from ..choices.backends import transform_refusal
from ..graph.handle import Graph
from ..layers.adapter import named
from ..layers.calls import looks_ahead, recording
from ..layers.explanation import Explanation
from . import worth
from .front.spaces import FIRST, Refused

if TYPE_CHECKING:
    from .program import Program

CHOICES = ("auto", "off", "land", "on")
# The dictionary behind os.environ. os.environ itself raises an exception for a variable that is not set, which takes
# some 8 us of a small call's 100.
_ENVIRONMENT = getattr(os.environ, "_data", os.environ)
_VARIABLE = os.environ.encodekey("EDGELESS_GENERATE") if _ENVIRONMENT is not os.environ else "EDGELESS_GENERATE"
OFF = "EDGELESS_GENERATE is off"
SEEN = "a mode of torch that sees every op is active"
MOST_PROGRAMS = 32  # made for one layer
_made: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


class GeneratedMixin:
    """Base of the mixins of both adapters, which precede a layer's class and have no state.

    Class attributes of a mixin:
        _runs_generated: marks the classes that have the mixin.
        _no_calls: the unsupported reason of a layer that made no call which could be generated.
    """

    _no_calls: ClassVar[str]

    @staticmethod
    def _class_of(base: type) -> type:
        """The class with the mixin and ``base`` as bases."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return named(self, super().__repr__())

    def __reduce_ex__(self, protocol):
        base = vars(type(self)).get("_generated_from")
        if base is None:
            return super().__reduce_ex__(protocol)
        state = self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__
        return _rebuilt, (type(self)._class_of, base), state

    def _recorded_calls(self, inputs: tuple, kwargs: dict) -> list[tuple[Any, Explanation]]:
        """Calls the layer and returns (layer, explanation) of every layer that ran."""
        with torch.random.fork_rng(devices=[]), recording(ahead=True) as calls:
            self(*inputs, **kwargs)
        return calls

    def _explanation(self, inputs: tuple, kwargs: dict, plan: bool) -> Explanation:
        """The result of :func:`edgeless.explain`, which runs a copy of the layer."""
        calls = copy.deepcopy(self)._recorded_calls(inputs, kwargs)
        told = [explanation for of, explanation in calls if isinstance(of, GeneratedMixin)]
        reasons = dict.fromkeys(reason for found in told for reason in found.reasons)
        if not told:
            reasons = {self._no_calls: None}
        how = "; ".join(dict.fromkeys(found.how for found in told if found.fused))
        texts = "\n".join(dict.fromkeys(found.levels for found in told if found.levels)) if plan else ""
        return Explanation(type(self).__name__, not reasons, tuple(reasons), how=how, levels=texts)


def _rebuilt(class_of: Callable[[type], type], base: type) -> Any:
    """A layer without state, for pickle to set."""
    cls = class_of(base)
    return cls.__new__(cls)


class GeneratedClasses:
    """Makes the classes of layers whose messages the generator runs: a mixin before each layer's class.

    Args:
        mixin: the class whose methods replace the upstream ones.
    """

    def __init__(self, mixin: type):
        self._mixin, self._made, self._making = mixin, {}, threading.Lock()

    def of(self, cls: type, module: Optional[str] = None) -> type:
        """The class with the mixin and ``cls`` as bases; the same class every time.

        Args:
            module: the ``__module__`` of the new class; by default that of ``cls``.
        """
        with self._making:
            if cls not in self._made:
                body = {
                    "__module__": module or cls.__module__,
                    "__qualname__": cls.__qualname__,
                    "__doc__": cls.__doc__,
                    "stock": cls,
                    "_generated_from": cls,
                }
                self._made[cls] = type(cls)(cls.__name__, (self._mixin, cls), body)
            return self._made[cls]


def generate_choice() -> str:
    """The value of ``EDGELESS_GENERATE``: ``"auto"``, the default: programs where they should not be slower than the
    upstream layer; ``"off"``: no programs; ``"land"``: only programs that existing ops compute; ``"on"``: all programs.

    Raises:
        ValueError: it has another value.
    """
    if _VARIABLE not in _ENVIRONMENT:
        return "auto"
    choice = os.environ["EDGELESS_GENERATE"] or "auto"
    if choice not in CHOICES:
        raise ValueError(f"EDGELESS_GENERATE must be one of {', '.join(CHOICES)}, got {choice!r}")
    return choice


def compiling_at_once() -> contextlib.AbstractContextManager:
    """Compiles walks at once while :func:`edgeless.explain` runs, which reports what later calls will run."""
    if not looks_ahead() or generate_choice() != "auto":
        return contextlib.nullcontext()
    from .run import compiled  # imports the tracer, which takes long

    return contextlib.nullcontext() if compiled.compile_mode() == "off" else compiled.compiling("now")


def check_graph(program: Program, graph: Graph, choice: str, width: int = 1) -> None:
    """Refuses a graph on which a program cannot run, or would be slower.

    Args:
        width: the numbers per edge of a later program that this one may become a part of.
    """
    if choice == "auto":
        worth.refuse_slow(program, graph, width)
    if program.needs_last and not graph.format("last nodes have edges", _last_have_edges):
        raise Refused("the number of nodes is computed from edge_index, whose last node has no edge")


def check_settled(layer) -> None:
    """Refuses a layer that needs a new program at every call, for example because a number in its key changes."""
    _made[layer] = _made.get(layer, 0) + 1
    if _made[layer] > MOST_PROGRAMS:
        raise Refused(f"{MOST_PROGRAMS} programs were made for this layer, whose state or arguments do not settle")


def refuse_modes(own: int = 0) -> None:
    """Refuses a call because of torch's modes.

    Args:
        own: the number of active function modes that belong to the caller.
    """
    if torch.jit.is_tracing():
        raise Refused("the call is being traced by torch.jit")
    if transform := transform_refusal():
        raise Refused(transform)
    if torch.is_inference_mode_enabled():
        raise Refused("inference mode is on")
    if is_seen(own):
        raise Refused(SEEN)


def write_back(program: Program, tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copies the new values of the arguments that a program writes, such as the statistics of a norm, into them."""
    if program.written:
        with torch.no_grad():
            for position, value in zip(program.written, values[program.results :]):
                tensors[position - FIRST].copy_(value)


def _last_have_edges(graph) -> bool:
    return all(bool(rows.indptr[-1] > rows.indptr[-2]) for rows in (graph.csr, graph.csc))
