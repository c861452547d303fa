"""The store of what is derived from a graph and kept with it: adjacencies, scales, other graphs, facts.

A graph has one such store, a dictionary. A key says what an entry is, a name or a tuple that begins with one, and
:meth:`edgeless.Graph.format` is given the function that builds what is missing from the graph. A value holds tensors: a
Tensor, a Graph, or a tuple, list or dictionary of these; numbers and None take no memory. What grows while it is kept
has a class of its own, with ``kept_tensors`` and ``num_formats``. Everything else follows from that: what an entry
weighs, when the cache has to weigh a graph anew, and what goes along when a graph is moved, copied or pickled. Entries
die with the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from .graph_checks import STAND_INS, compiling, normal_tensors, transforming

__all__ = [
    "CSC",
    "CSC_ROWS",
    "CSR",
    "Formats",
    "PLACES",
    "POSITIONS",
    "HeldByCore",
    "Keeper",
    "facts",
    "graphs_of",
    "num_bytes",
    "tensors_of",
    "travelling",
]

Formats = dict[Hashable, Any]

CSR = "csr"  # Compressed: rows are destinations
CSC = "csc"  # Compressed: rows are sources
POSITIONS = "positions"  # of every edge of the CSC, in its destination's row
PLACES = "places"  # of every edge of the CSC, in the CSR
CSC_ROWS = "csc rows"  # [indptr, indices] of the CSC, which keeps no edge ids until somebody needs them

_NUMBERS = frozenset((int, bool, float, str, type(None)))  # and what else takes no memory


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors that an entry holds, those of a graph within it included."""
    found: list[Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[Tensor]) -> None:
    kind = type(value)  # hot: every new graph is weighed
    if kind in _NUMBERS:
        return
    if kind is Tensor or isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, (tuple, list)):
        for part in value:
            _collect(part, found)
    elif isinstance(value, dict):
        _collect([*value.values()], found)
    elif hasattr(value, "_formats"):
        _collect([*vars(value).values()], found)
    elif hasattr(value, "kept_tensors"):
        found += value.kept_tensors()


def num_bytes(value: Any) -> int:
    """Bytes of the tensors of an entry or of a whole store; a tensor that is held twice counts once."""
    return sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors_of(value)}.values())


def _has_stand_ins(value: Any) -> bool:
    """Whether a tensor of an entry or a graph is one that torch.export computes with."""
    return any(type(t) in STAND_INS for t in tensors_of(value))


def graphs_of(value: Any) -> list[Any]:
    """The graphs, and what else grows, that an entry holds; not those that these hold."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [graph for part in value for graph in graphs_of(part)]
    if isinstance(value, int):  # torch.compile cannot ask one of its own for attributes
        return []
    return [value] if hasattr(value, "num_formats") else []


class Keeper:
    """What has such a store: a graph, with or without types."""

    _formats: Formats
    _graphs: list[Any]  # those among the formats

    def format(self, key: Hashable, build: Callable[[Any], Any]) -> Any:
        """What is kept under ``key``, from ``build(self)`` the first time."""
        if key in self._formats:
            return self._formats[key]
        with normal_tensors():
            value = build(self)
        runs_python = compiling() and not torch.compiler.is_dynamo_compiling()  # as torch.export does by default
        if transforming() or (runs_python and _has_stand_ins(value) and not _has_stand_ins(self)):
            return value  # of the transform or the trace, which the graph outlives
        self._formats[key] = value
        self._graphs += graphs_of(value)
        return value

    def num_formats(self) -> int:
        """How many things are kept, here and with the graphs among them. Never falls but by transposes."""
        num = len(self._formats)
        for graph in self._graphs:
            num += graph.num_formats()
        return num

    def record_stream(self, stream) -> None:
        """As :meth:`torch.Tensor.record_stream`, of all that is kept by now."""
        for tensor in tensors_of(self):
            if tensor.is_cuda:
                tensor.record_stream(stream)


class HeldByCore:
    """An entry that grows while it is kept: an object of the extension holds what is in it.

    Args:
        held: has ``kept_tensors()`` and ``num_entries()``.
    """

    def __init__(self, held: Any):
        self.held = held

    def kept_tensors(self) -> list[Tensor]:
        """The tensors within."""
        return self.held.kept_tensors()

    def num_formats(self) -> int:
        """How many things were made so far."""
        return self.held.num_entries()

    def _missing_bytes(self) -> int:
        return 0


def facts(formats: Formats) -> Formats:
    """What holds of the graph on every device: numbers."""
    return {key: value for key, value in formats.items() if isinstance(value, (bool, int, float))}


def travelling(formats: Formats) -> Formats:
    """What goes along in a copy or a pickle: the adjacency and facts. The rest is derived anew when it is asked for."""
    return {**{key: formats[key] for key in (CSR, CSC) if key in formats}, **facts(formats)}
