"""The store of a graph's formats, which are derived from it and kept with it: adjacencies, scales, other graphs, facts.

A graph has one such store, a dictionary. A key is a name or a tuple that begins with one, and
:meth:`edgeless.Graph.format` takes the function that builds a missing entry from the graph. A value is a Tensor, a
Graph, or a tuple, list or dictionary of these; numbers and None count as 0 bytes. An entry that grows while it is kept
has a class with ``kept_tensors`` and ``num_formats``. These types decide how many bytes an entry has, when the cache
counts a graph's bytes again, and which entries are kept when a graph is moved, copied or pickled. Entries live as long
as the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from ..checks import STAND_INS, compiling, normal_tensors, transforming

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
POSITIONS = "positions"  # for every edge of the CSC, its index within its CSR row
PLACES = "places"  # the CSC-to-CSR permutation: for every edge of the CSC, its index in the CSR
CSC_ROWS = "csc rows"  # [indptr, indices] of the CSC, kept without edge ids until an op needs them

_NUMBERS = frozenset((int, bool, float, str, type(None)))  # types of values that hold no tensors


def tensors_of(value: Any) -> list[Tensor]:
    """Returns all tensors that an entry holds, including those of a graph in it."""
    found: list[Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[Tensor]) -> None:
    kind = type(value)  # hot: runs for every new graph
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
    """Returns the bytes of the tensors of an entry or a whole store; a tensor that is held twice counts once."""
    return sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors_of(value)}.values())


def _has_stand_ins(value: Any) -> bool:
    """Returns whether a tensor of an entry or a graph is a stand-in that torch.export traces with."""
    return any(type(t) in STAND_INS for t in tensors_of(value))


def graphs_of(value: Any) -> list[Any]:
    """Returns the graphs and other growing objects that an entry holds directly, not those inside them."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [graph for part in value for graph in graphs_of(part)]
    if isinstance(value, int):  # torch.compile cannot trace hasattr of a symbolic size
        return []
    return [value] if hasattr(value, "num_formats") else []


class Keeper:
    """Base class of the graphs, typed or not: it has a store of formats."""

    _formats: Formats
    _graphs: list[Any]  # the graphs and other growing objects among the formats

    def format(self, key: Hashable, build: Callable[[Any], Any]) -> Any:
        """Returns the entry of ``key``, which ``build(self)`` makes the first time."""
        if key in self._formats:
            return self._formats[key]
        with normal_tensors():
            value = build(self)
        runs_python = compiling() and not torch.compiler.is_dynamo_compiling()  # torch.export's default mode
        if transforming() or (runs_python and _has_stand_ins(value) and not _has_stand_ins(self)):
            return value  # its tensors belong to the transform or the trace, which the graph outlives
        self._formats[key] = value
        self._graphs += graphs_of(value)
        return value

    def num_formats(self) -> int:
        """Returns the number of entries of this store and the graphs in it. Only a CSC that gets edge ids lowers it."""
        num = len(self._formats)
        for graph in self._graphs:
            num += graph.num_formats()
        return num

    def record_stream(self, stream) -> None:
        """Calls :meth:`torch.Tensor.record_stream` of all CUDA tensors that are kept so far."""
        for tensor in tensors_of(self):
            if tensor.is_cuda:
                tensor.record_stream(stream)


class HeldByCore:
    """An entry that grows while it is kept and whose contents an object of the C++ extension holds.

    Args:
        held: the object, with ``kept_tensors()`` and ``num_entries()``.
    """

    def __init__(self, held: Any):
        self.held = held

    def kept_tensors(self) -> list[Tensor]:
        """Returns the tensors that the held object keeps."""
        return self.held.kept_tensors()

    def num_formats(self) -> int:
        """Returns the number of entries that the held object has made so far."""
        return self.held.num_entries()

    def _missing_bytes(self) -> int:
        return 0


def facts(formats: Formats) -> Formats:
    """Returns the numbers among the formats, which are the same on every device."""
    return {key: value for key, value in formats.items() if isinstance(value, (bool, int, float))}


def travelling(formats: Formats) -> Formats:
    """Returns what a copy or a pickle contains: the adjacency and the facts. Other formats are recomputed on demand."""
    return {**{key: formats[key] for key in (CSR, CSC) if key in formats}, **facts(formats)}
