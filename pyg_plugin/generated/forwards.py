"""Whole forwards as programs, for layers that make edge tensors before they call ``propagate()``.

SchNet's CFConv computes a filter for each edge, an EGNN distances and an MLP of them. A program of ``propagate()``
alone would read these as arguments; a program of the whole forward computes them within its walks. Where a forward
cannot be traced, the program is that of ``propagate()`` alone.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any, Optional

from torch import Tensor

from edgeless.layers.calls import ran_generated
from edgeless.programs import Refused
from edgeless.programs.layers import compiling_at_once

from .calls import PROGRAMS, NoProgram, may_run_again, results, run_call
from .known_forwards import LAYERS, Whole, runs_whole, thread_state
from .messages import Call
from .plain_edges import checked
from .recalled import recall
from .stock_steps import stock_forward

_names: weakref.WeakKeyDictionary[type, Optional[tuple[str, ...]]] = weakref.WeakKeyDictionary()


class ForwardCall(Call):
    """A call of a layer's forward; sources and destinations are the same nodes."""

    def __init__(self, layer, method: Callable, num_nodes: int, num_edges: int, kwargs: dict[str, Any]):
        self._nodes = num_nodes
        super().__init__(layer, method, (), num_edges, None, kwargs)

    def _counts(self, size, kwargs) -> tuple[int, int]:
        return self._nodes, self._nodes

    def _called(self, ends: Tensor, size: tuple[int, int], given: dict[str, Any]) -> Any:
        with thread_state("traced", True):
            return self.method(self.layer, edge_index=ends, **given)


def run(layer, forward: Callable, args: tuple, kwargs: dict) -> Any:
    """Runs a layer's forward, as one program if the layer is known to make edge tensors.

    Args:
        layer: a layer that has no reason against it in :data:`LAYERS`.
        forward: the bound upstream method.
    """
    known = LAYERS.get(layer)
    names = _parameters(type(layer))
    given = None if names is None else _by_name(names, args, kwargs)
    edge_index = None if given is None else given.pop("edge_index", None)
    if type(edge_index) is not Tensor:
        return forward(*args, **kwargs)
    if known is None:
        with thread_state("given", (layer, given)), thread_state("refused", None):
            return forward(*args, **kwargs)
    try:
        again = recall(layer, "forward", edge_index, given, PROGRAMS)
        if again is not None and may_run_again(*again, given):
            entry, graph, tensors = again
            values = entry.program(graph, tensors)
            ran_generated(layer, entry.program.how, entry.program.text)
            return results(layer, tensors, entry.program, values)
        with compiling_at_once():
            return _run_long(layer, known, edge_index, given)
    except Refused as error:
        with thread_state("refused", (layer, str(error)) if runs_whole(layer) else None):
            return forward(*args, **kwargs)


def _by_name(names: tuple[str, ...], args: tuple, kwargs: dict) -> Optional[dict[str, Any]]:
    """All arguments by name, or None if they do not fit the signature."""
    given = dict(zip(names, args))
    fits = len(args) <= len(names) and not any(name in given or name not in names for name in kwargs)
    return {**given, **kwargs} if fits else None


def _run_long(layer, known: Whole, edge_index: Tensor, given: dict) -> Any:
    """Runs a call that is not recalled from an earlier one."""
    rows = given.get(known.by_node)
    if not isinstance(rows, Tensor) or rows.dim() < 1:
        raise Refused(f"{known.by_node} is no tensor")
    edge_index = checked(edge_index)

    def make(num_edges: int) -> ForwardCall:
        return ForwardCall(layer, stock_forward(type(layer)), rows.size(0), num_edges, given)

    try:
        return run_call(layer, "forward", edge_index, edge_index, given, make, None)
    except NoProgram as error:
        LAYERS[layer] = str(error)
        raise


def _parameters(cls: type) -> Optional[tuple[str, ...]]:
    """The names of a forward's arguments; None if some cannot be passed by name, or none is ``edge_index``."""
    if cls not in _names:
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD,)
        parameters = list(inspect.signature(stock_forward(cls)).parameters.values())[1:]
        fits = all(p.kind in kinds for p in parameters) and any(p.name == "edge_index" for p in parameters)
        _names[cls] = tuple(p.name for p in parameters) if fits else None
    return _names[cls]
