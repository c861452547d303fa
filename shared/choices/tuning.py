"""Chooses the engine of ``"auto"`` by what ``python -m edgeless tune`` measured and wrote into the user's tuning file.

``EDGELESS_TUNING`` is one of :data:`MODES`: ``"cached"``, the default, reads the file. A decision is kept with the
graph and registered in the core, where ops, backward included, find it by their index arrays
(``core_cuda/common/decisions.h``). It takes effect before the first call.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Optional

import torch
from torch import Tensor

from .. import _C
from ..graph.formats import CSC, CSC_ROWS, CSR, HeldByCore
from .tuning_file import Entry, TuningFile, default_file, named_file

if TYPE_CHECKING:
    from ..graph.handle import Graph

__all__ = ["MODES", "Shape", "Tuner", "key", "shape_of_dot", "shape_of_sum", "sides_of"]

MODES = ("off", "cached")
_DOT, _DOT_BACKWARD = "dot_D", "dot_backward_D"


class Shape(NamedTuple):
    """The data that an op reads per edge. With a graph and a direction it is the key of a decision.

    Attributes:
        op: "spmm"; or "dot_D64" and "dot_backward_D64", attention with 64 features per head.
        width: columns of a row, all heads.
        weighted: whether the op also reads a weight per edge.
    """

    op: str
    dtype: torch.dtype
    width: int
    weighted: bool


def shape_of_sum(x: Tensor, weight: Optional[Tensor]) -> Shape:
    """The shape of a sum of rows of ``x``."""
    return Shape("spmm", x.dtype, x.numel() // max(x.size(0), 1), weight is not None)


def shape_of_dot(dtype: torch.dtype, heads: int, head_dim: int, *, backward: bool) -> Shape:
    """The shape of dot product attention; one decision covers both passes of the backward."""
    return Shape(f"{_DOT_BACKWARD if backward else _DOT}{head_dim}", dtype, heads * head_dim, False)


def parse_dot(op: str) -> tuple[bool, int]:
    """(whether it is the backward, features per head) of the ``op`` of a :func:`shape_of_dot`."""
    return op.startswith(_DOT_BACKWARD), int(op.rpartition("D")[2])


@dataclass
class _State:
    """The tuner's state for one shape on one graph."""

    formats: tuple = ()  # the graph's formats at the last look-up
    engines: dict[str, str] = field(default_factory=dict)  # decided side -> engine
    complete: bool = False  # whether every side that the graph has is decided


class DecisionsFormat(HeldByCore):
    """The decisions kept with a graph."""

    def __init__(self):
        super().__init__(_C.Decisions())
        self.states: dict[Shape, _State] = {}


def sides_of(graph: Graph, shape: Optional[Shape] = None) -> dict[str, tuple[Tensor, Tensor]]:
    """Side -> arrays of the directions that the graph has built, limited to those that key decisions on ``shape``."""
    sides = {}
    for key, side in ((CSR, "by_dst"), (CSC, "by_src"), (CSC_ROWS, "by_src")):
        if key in graph._formats:
            sides[side] = tuple(graph._formats[key][:2])
    if shape is None or shape.op == "spmm":
        return sides
    complete = "by_src" in sides or not shape.op.startswith(_DOT_BACKWARD)
    return {side: arrays for side, arrays in sides.items() if side == "by_dst" and complete}


class Tuner:
    """Decides engines for graphs by the user's file.

    Args:
        engines: all engine names, in the core's order.
        prepare: (graph, engine) builds the format that an engine needs and keeps it with the graph.
        mode: one of :data:`MODES`; by default ``EDGELESS_TUNING``.
        file: the tuning file; by default ``EDGELESS_TUNING_FILE``, or else :func:`default_file`.
        may_wait: returns whether the host may wait for the GPU now.
    Raises:
        ValueError: mode is not one of :data:`MODES`.
    """

    def __init__(
        self,
        engines: tuple[str, ...],
        prepare: Callable[[Graph, str], None],
        *,
        mode: Optional[str] = None,
        file: Optional[TuningFile] = None,
        may_wait: Callable[[], bool] = lambda: not torch.cuda.is_current_stream_capturing(),
    ):
        mode = os.environ.get("EDGELESS_TUNING") or "cached" if mode is None else mode
        if mode not in MODES:
            raise ValueError(f"EDGELESS_TUNING must be off or cached, got {mode!r}")
        self.mode = mode
        if file is not None:
            self.file = file
        self._engines, self._prepare, self._may_wait = engines, prepare, may_wait
        self._lock = threading.RLock()
        self._sizes: Optional[set[tuple[int, int, int]]] = None  # (num_src, num_dst, num_edges) in the file

    @functools.cached_property
    def file(self) -> TuningFile:
        """The user's file. Located at first use: importing edgeless must not require a home folder."""
        return TuningFile(default_file(), self._engines)

    @functools.cached_property
    def active(self) -> bool:
        """True if the tuner may ever decide anything; determined once, at the first sum on a GPU.

        A file that the user names counts even if it does not exist, so that reading it can warn.
        """
        return self.mode == "cached" and (self.file.exists() or named_file() is not None)

    def may_decide(self, graph: Graph) -> bool:
        """Returns whether :meth:`decide` has anything to do for a graph; called before every sum over a large graph."""
        return self.active and ("tuned" in graph._formats or self._knows_sizes(graph))

    def decide(self, graph: Graph, shape: Shape) -> bool:
        """Keeps with ``graph`` the decisions for an op that is about to run; returns whether all sides are decided.

        Call it where :meth:`may_decide` is true, after the graph's arrays for the op are built, and not in a traced
        function.
        """
        kept = graph._formats.get("tuned")
        state = None if kept is None else kept.states.get(shape)
        if state is None or state.formats != tuple(graph._formats):
            if not self._may_wait():
                return False
            with self._lock:
                kept = graph.format("tuned", lambda _: DecisionsFormat())
                state = kept.states.setdefault(shape, _State())
                self._look_up(graph, kept, shape, state)
        return state.complete

    def _knows_sizes(self, graph: Graph) -> bool:
        """Returns whether the file has a graph of these sizes; only then is it worth computing the fingerprint."""
        if self._sizes is None:
            entries = self.file.entries().values()
            self._sizes = {(entry["num_src"], entry["num_dst"], entry["num_edges"]) for entry in entries}
        return (graph.num_src, graph.num_dst, graph.num_edges) in self._sizes

    def _look_up(self, graph: Graph, kept: DecisionsFormat, shape: Shape, state: _State) -> None:
        self._update(graph, shape, state)
        if not state.complete and self._knows_sizes(graph):
            for side in set(sides_of(graph, shape)) - set(state.engines):
                entry = self.file.entries().get(tuple(key(graph, shape, side).values()))
                if entry is not None:
                    self._keep(graph, kept, shape, side, entry, f"measured on {entry['date']}, {self.file}")
        self._update(graph, shape, state)
        for engine in set(state.engines.values()):  # the graph may have new arrays that the engine must prepare
            self._is_prepared(graph, engine)
        state.formats = tuple(graph._formats)

    def _update(self, graph: Graph, shape: Shape, state: _State) -> None:
        sides = sides_of(graph, shape)
        found = {side: _C.decision(list(arrays), *shape) for side, arrays in sides.items()}
        state.engines = {side: self._engines[decided[0]] for side, decided in found.items() if decided is not None}
        state.complete = len(state.engines) == len(sides)
        state.formats = tuple(graph._formats)

    def _keep(self, graph: Graph, kept: DecisionsFormat, shape: Shape, side: str, entry: Entry, origin: str) -> None:
        if not self._is_prepared(graph, entry["engine"]):
            return
        kept.held.decide(*sides_of(graph)[side], *shape, self._engines.index(entry["engine"]), origin)

    def _is_prepared(self, graph: Graph, engine: str) -> bool:
        """Builds the format of an engine and keeps it with the graph; False where memory is short."""
        try:
            if engine != "rowsplit":
                self._prepare(graph, engine)
        except torch.OutOfMemoryError:
            return False
        return True


def key(graph: Graph, shape: Shape, side: str) -> Entry:
    """The key of a decision, in the order of :data:`edgeless.choices.tuning_file.KEY`."""
    from .. import __version__

    device = torch.cuda.get_device_name(graph.device) if graph.device.type == "cuda" else str(graph.device)
    return {
        "fingerprint": graph.fingerprint,
        "num_src": graph.num_src,
        "num_dst": graph.num_dst,
        "num_edges": graph.num_edges,
        "device": device,
        "edgeless": __version__,
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
        "op": shape.op,
        "side": side,
        "dtype": str(shape.dtype).removeprefix("torch."),
        "width": shape.width,
        "weighted": shape.weighted,
    }
