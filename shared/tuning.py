"""Which engine ``"auto"`` takes where it was measured: by this process, or before, as a file of the user says.

``EDGELESS_TUNING`` is one of :data:`MODES`. What is decided is kept with the graph and told to the core, where an op
finds it by the arrays that it is given (``core_cuda/decisions.h``), in the backward too. A decision comes before the
first call that it is for or, where it is measured, once; so calls give the same bits but for that one change.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import torch
from torch import Tensor

from . import _C
from .choices import block
from .formats import CSC, CSC_ROWS, CSR, HeldByCore
from .tuning_file import Entry, TuningFile, default_file, named_file

if TYPE_CHECKING:
    from .graph import Graph

__all__ = ["MODES", "Measured", "Shape", "Tuner", "break_even", "choose", "shape_of_dot", "shape_of_sum"]

MODES = ("off", "cached", "on")
USES = 50  # of an op on a graph, after which measuring engines takes less time than what was spent anyway
EXPECTED_USES = 100  # within which blocks must have saved the time that they took to make
_DOT, _DOT_BACKWARD = "dot_D", "dot_backward_D"
_MEASURING = _C.Choice("edgeless.measuring", ("measuring", "resting"))
LEAST_GAIN = 0.03  # of rowsplit's time: less is the noise of a measurement


class Shape(NamedTuple):
    """What an op reads for an edge: the key of a decision, together with a graph and a direction.

    Attributes:
        op: "spmm"; "dot_D64" and "dot_backward_D64", attention by heads of so many features.
        width: numbers of a row, all heads.
        weighted: whether a number for every edge is read as well.
    """

    op: str
    dtype: torch.dtype
    width: int
    weighted: bool


def shape_of_sum(x: Tensor, weight: Optional[Tensor]) -> Shape:
    """Of a sum of rows of ``x``."""
    return Shape("spmm", x.dtype, x.numel() // max(x.size(0), 1), weight is not None)


def shape_of_dot(dtype: torch.dtype, heads: int, head_dim: int, *, backward: bool) -> Shape:
    """Of dot product attention, whose backward walks both directions and is decided as one."""
    return Shape(f"{_DOT_BACKWARD if backward else _DOT}{head_dim}", dtype, heads * head_dim, False)


def parse_dot(op: str) -> tuple[bool, int]:
    """(whether it is the backward, features of a head) of such an op."""
    return op.startswith(_DOT_BACKWARD), int(op.rpartition("D")[2])


@dataclass
class Measured:
    """Engines on one direction of a graph.

    Attributes:
        ms: milliseconds by engine; those that could not run are missing.
        build_ms: what making the blocks took, where that was measured.
    """

    ms: dict[str, float]
    build_ms: Optional[float] = None


def break_even(found: Measured, engine: str) -> Optional[float]:
    """After how many uses ``engine`` has saved what it takes to prepare, against rowsplit; None: never."""
    saved = found.ms["rowsplit"] - found.ms[engine]
    if saved <= 0:
        return None
    return (found.build_ms or 0.0) / saved if engine == "wsb" else 0.0


def choose(found: Measured) -> str:
    """The fastest engine, if it is faster than rowsplit by more than noise and pays soon enough."""
    bound = (1 - LEAST_GAIN) * found.ms["rowsplit"]
    paying = [
        name
        for name, ms in found.ms.items()
        if ms < bound and (uses := break_even(found, name)) is not None and uses <= EXPECTED_USES
    ]
    return min(paying, key=found.ms.__getitem__, default="rowsplit")


@dataclass
class _State:
    """What is known of one shape on one graph."""

    formats: tuple = ()  # of the graph, when the file was last asked
    engines: dict[str, str] = field(default_factory=dict)  # by the sides that are decided
    complete: bool = False  # whether these are all that the graph has
    uses: int = 0
    given_up: bool = False


class DecisionsFormat(HeldByCore):
    """The decisions that a graph keeps."""

    def __init__(self):
        super().__init__(_C.Decisions())
        self.states: dict[Shape, _State] = {}


def sides_of(graph: Graph, shape: Optional[Shape] = None) -> dict[str, tuple[Tensor, Tensor]]:
    """The arrays of the directions that a graph has by now, those alone by which decisions on ``shape`` are found."""
    sides = {}
    for key, side in ((CSR, "by_dst"), (CSC, "by_src"), (CSC_ROWS, "by_src")):
        if key in graph._formats:
            sides[side] = tuple(graph._formats[key][:2])
    if shape is None or shape.op == "spmm":
        return sides
    complete = "by_src" in sides or not shape.op.startswith(_DOT_BACKWARD)
    return {side: arrays for side, arrays in sides.items() if side == "by_dst" and complete}


class Tuner:
    """Decides for graphs, from a file and, where the mode is ``"on"``, by measuring.

    Args:
        engines: all names, in the order that the core knows.
        measure: (graph, shape, sides) -> (:class:`Measured` by side, what was made for engines, by their names).
        prepare: (graph, engine) makes what an engine needs and lets the graph keep it.
        mode: one of :data:`MODES`; ``EDGELESS_TUNING`` when None.
        file: ``EDGELESS_TUNING_FILE`` or the default when None.
        may_wait: whether the current moment allows to wait for the GPU.
    Raises:
        ValueError: for any other mode.
    """

    def __init__(
        self,
        engines: tuple[str, ...],
        measure: Callable[[Graph, Shape, list[str]], tuple[dict[str, Measured], dict[str, Any]]],
        prepare: Callable[[Graph, str], None],
        *,
        mode: Optional[str] = None,
        file: Optional[TuningFile] = None,
        may_wait: Callable[[], bool] = lambda: not torch.cuda.is_current_stream_capturing(),
    ):
        mode = os.environ.get("EDGELESS_TUNING") or "cached" if mode is None else mode
        if mode not in MODES:
            raise ValueError(f"EDGELESS_TUNING must be off, cached or on, got {mode!r}")
        self.mode = mode
        if file is not None:
            self.file = file
        self._engines, self._measure, self._prepare, self._may_wait = engines, measure, prepare, may_wait
        self._lock = threading.RLock()
        self._sizes: Optional[set[tuple[int, int, int]]] = None  # of the graphs in the file

    @functools.cached_property
    def file(self) -> TuningFile:
        """The user's file. Who imports edgeless has asked nothing of it yet, and may have no home where it could be."""
        return TuningFile(default_file(), self._engines)

    @functools.cached_property
    def active(self) -> bool:
        """Whether it may ever decide anything. Found out once, at the first sum on a GPU.

        A file that the user names is read, even if only to say that it cannot be.
        """
        return self.mode == "on" or (self.mode == "cached" and (self.file.exists() or named_file() is not None))

    @staticmethod
    def resting() -> contextlib.AbstractContextManager:
        """Measures nothing inside the ``with`` block: where the ops that run are being watched."""
        return block(_MEASURING, "resting")

    def may_decide(self, graph: Graph) -> bool:
        """Whether :meth:`decide` has anything to do for a graph; asked before every sum over a large one."""
        return self.active and (self.mode == "on" or "tuned" in graph._formats or self._knows_sizes(graph))

    def decide(self, graph: Graph, shape: Shape) -> bool:
        """Lets ``graph`` keep what is decided for an op that is about to run; whether all its directions are decided.

        To be called where :meth:`may_decide` says so, when the graph's arrays for the op are at hand, in no traced
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
        if self.mode == "on" and not state.complete and not state.given_up:
            state.uses += 1
            if state.uses > USES and _MEASURING.name != "resting" and self._may_wait():
                with self._lock:
                    self._measure_now(graph, kept, shape, state)
        return state.complete

    def _knows_sizes(self, graph: Graph) -> bool:
        """Whether the file has a graph of these sizes: only then is a fingerprint worth its time."""
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
        for engine in set(state.engines.values()):  # the graph may have arrays that are new to it
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
        """Lets the graph keep what an engine needs; False where there is no memory for it."""
        try:
            if engine != "rowsplit":
                self._prepare(graph, engine)
        except torch.OutOfMemoryError:
            return False
        return True

    def _measure_now(self, graph: Graph, kept: DecisionsFormat, shape: Shape, state: _State) -> None:
        if state.complete or state.given_up:  # another thread was here
            return
        wanted = sorted(set(sides_of(graph, shape)) - set(state.engines))
        found, made = self._measure(graph, shape, wanted)
        entries = []
        for side, measured in found.items():
            entry = entry_of(graph, shape, side, measured)
            entries.append(entry)
            if entry["engine"] in made:
                graph.format(entry["engine"], lambda _, name=entry["engine"]: made[name])
            self._keep(graph, kept, shape, side, entry, f"measured on {entry['date']}, by this process")
        self._update(graph, shape, state)
        state.uses, state.given_up = 0, not entries
        if entries:
            self.store(entries)
            self._sizes = None

    def store(self, entries: list[Entry]) -> None:
        """Writes decisions to the file; a warning where that fails."""
        try:
            self.file.add(entries)
        except (OSError, ValueError) as error:
            warnings.warn(f"edgeless: decisions are not kept in {self.file}: {error}", stacklevel=2)


def key(graph: Graph, shape: Shape, side: str) -> Entry:
    """What a decision is for, in the order of :data:`edgeless.tuning_file.KEY`."""
    from . import __version__

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


def entry_of(graph: Graph, shape: Shape, side: str, measured: Measured) -> Entry:
    """A decision as it stands in the file."""
    return {
        **key(graph, shape, side),
        "engine": choose(measured),
        "ms": {name: round(ms, 4) for name, ms in measured.ms.items()},
        "build_ms": None if measured.build_ms is None else round(measured.build_ms, 3),
        "date": datetime.date.today().isoformat(),
    }
