"""Whole forwards as programs, for layers that make tensors by edge before they call ``propagate()``.

SchNet's CFConv computes a filter for each edge, an EGNN distances and what an MLP makes of them, and their
``propagate()`` alone would read these as arguments. A program of the whole forward computes them within its walks.
Where a forward cannot be traced, the generator takes ``propagate()`` alone.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Optional, Union

from torch import Tensor

from edgeless.layers.calls import ran_generated
from edgeless.programs import EDGE, Refused
from edgeless.programs.layers import compiling_at_once

from . import calls
from .messages import Call
from .plain_edges import checked
from .recalled import recall

NEXT = "its forward makes tensors by edge, so that it runs as a whole from its next call on"


class _Thread(threading.local):
    """What this thread's forward is doing.

    Attributes:
        given: the layer whose forward runs, and its arguments by name.
        traced: whether a forward runs for a trace or a check, where ``propagate()`` is the stock method.
        refused: a layer, and why its ``propagate()`` runs by the stock method this time.
    """

    given: Optional[tuple[Any, dict[str, Any]]] = None
    traced = False
    refused: Optional[tuple[Any, str]] = None


class _Whole:
    """A layer whose forward runs as a program; ``by_node`` names an argument with a row for each node."""

    def __init__(self, by_node: str):
        self.by_node = by_node


STATE = _Thread()
# Layers that make tensors by edge; for the others, why their forwards are no programs.
LAYERS: weakref.WeakKeyDictionary[Any, Union[_Whole, str]] = weakref.WeakKeyDictionary()
_names: weakref.WeakKeyDictionary[type, Optional[tuple[str, ...]]] = weakref.WeakKeyDictionary()


class ForwardCall(Call):
    """A call of a layer's forward; sources and destinations are the same nodes."""

    def __init__(self, layer, method: Callable, num_nodes: int, num_edges: int, kwargs: dict[str, Any]):
        self._nodes = num_nodes
        super().__init__(layer, method, (), num_edges, None, kwargs)

    def _counts(self, size, kwargs) -> tuple[int, int]:
        return self._nodes, self._nodes

    def _called(self, ends: Tensor, size: tuple[int, int], given: dict[str, Any]) -> Any:
        with _set("traced", True):
            return self.method(self.layer, edge_index=ends, **given)


def runs_whole(layer) -> bool:
    """Whether a layer was seen to make tensors by edge, and nothing is known against a program of its forward."""
    return isinstance(LAYERS.get(layer), _Whole)


def run(layer, forward: Callable, args: tuple, kwargs: dict) -> Any:
    """A layer's forward, as one program where that is known to be of use and can be done.

    Args:
        layer: one that :data:`LAYERS` has nothing against.
        forward: the stock method, bound.
    """
    known = LAYERS.get(layer)
    names = _parameters(type(layer))
    given = None if names is None else _by_name(names, args, kwargs)
    edge_index = None if given is None else given.pop("edge_index", None)
    if type(edge_index) is not Tensor:
        return forward(*args, **kwargs)
    if known is None:
        with _set("given", (layer, given)), _set("refused", None):
            return forward(*args, **kwargs)
    try:
        again = recall(layer, "forward", edge_index, given, calls.PROGRAMS)
        if again is not None and calls._may_run_again(*again, given):
            entry, graph, tensors = again
            values = entry.program(graph, tensors)
            ran_generated(layer, entry.program.how, entry.program.text)
            return calls._results(layer, tensors, entry.program, values)
        with compiling_at_once():
            return _run_long(layer, known, edge_index, given)
    except Refused as error:
        with _set("refused", (layer, str(error)) if runs_whole(layer) else None):
            return forward(*args, **kwargs)


def _by_name(names: tuple[str, ...], args: tuple, kwargs: dict) -> Optional[dict[str, Any]]:
    """All arguments by name, or None if they do not fit."""
    given = dict(zip(names, args))
    fits = len(args) <= len(names) and not any(name in given or name not in names for name in kwargs)
    return {**given, **kwargs} if fits else None


def _run_long(layer, known: _Whole, edge_index: Tensor, given: dict) -> Any:
    """Runs a call whose program is not known from an earlier one."""
    rows = given.get(known.by_node)
    if not isinstance(rows, Tensor) or rows.dim() < 1:
        raise Refused(f"{known.by_node} is no tensor")
    edge_index = checked(edge_index)

    def make(num_edges: int) -> ForwardCall:
        return ForwardCall(layer, _stock_forward(type(layer)), rows.size(0), num_edges, given)

    try:
        return calls.run_call(layer, "forward", edge_index, edge_index, given, make, None)
    except calls.NoProgram as error:
        LAYERS[layer] = str(error)
        raise


def notice(layer, call: Call) -> None:
    """Looks for tensors by edge among what a forward gives to ``propagate()``.

    Raises:
        Refused: it has made some, and will run as a whole from now on; or it does not this time.
    """
    if STATE.refused is not None and STATE.refused[0] is layer:
        raise Refused(STATE.refused[1])
    if STATE.given is None or STATE.given[0] is not layer or layer in LAYERS:
        return
    given = STATE.given[1]
    ids = {id(value) for value in given.values()}
    own = list(zip(call.tensors, call.spaces))[: call.first_own]
    made = sum(t.numel() for t, space in own if space.kind == EDGE and id(t) not in ids)
    nodes = [name for name, t in given.items() if isinstance(t, Tensor) and t.dim() and t.size(0) == call.counts[0]]
    if made <= call.num_edges:  # narrow ones cost little, and existing ops may take them
        LAYERS[layer] = "it makes no tensors by edge"
        return
    if not (call.one_set and nodes):
        LAYERS[layer] = "its nodes cannot be told by the arguments"
        return
    LAYERS[layer] = _Whole(nodes[0])
    STATE.refused = layer, NEXT
    raise Refused(NEXT)


@contextlib.contextmanager
def _set(name: str, value: Any) -> Iterator[None]:
    before = getattr(STATE, name)
    setattr(STATE, name, value)
    try:
        yield
    finally:
        setattr(STATE, name, before)


def _stock_forward(cls: type) -> Callable:
    """The forward of the class that the mixin stands before."""
    bases = cls.__mro__[cls.__mro__.index(calls.GeneratedLayer) + 1 :]
    return next(vars(base)["forward"] for base in bases if "forward" in vars(base))


def _parameters(cls: type) -> Optional[tuple[str, ...]]:
    """The names of a forward's arguments, or None if they cannot all be given by name, or none is ``edge_index``."""
    if cls not in _names:
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD,)
        parameters = list(inspect.signature(_stock_forward(cls)).parameters.values())[1:]
        fits = all(p.kind in kinds for p in parameters) and any(p.name == "edge_index" for p in parameters)
        _names[cls] = tuple(p.name for p in parameters) if fits else None
    return _names[cls]
