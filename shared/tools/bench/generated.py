"""The table of layers that the generator runs, against the faster of PyG eager and PyG compiled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Optional

from edgeless.tools.cli.layers import GENERATED, GROUPS

from .runs import Suite, geometric_mean
from .work import MODES

PEERS = ("pyg", "pyg-compiled")
EAGER, REPLAYED = "edgeless-pyg", "edgeless-pyg-graphed"
MISSING = "—"


class Cell(NamedTuple):
    """The better peer's time over ours, for the forward and for forward + backward; None where one is not known.

    Attributes:
        ms: our time.
        called, replayed: the ratios for eager calls, and for replays from a CUDA graph.
        memory: the peers' smaller peak memory over ours, with the backward.
    """

    ms: tuple[Optional[float], ...]
    called: tuple[Optional[float], ...]
    replayed: tuple[Optional[float], ...]
    memory: Optional[float]


def table(suite: Suite) -> tuple[Sequence[str], list[list[str]]]:
    """The columns and a row for each kind of message: means for several settings; for one, its mean and every layer."""
    settings = list(dict.fromkeys((row["case"]["dtype"], row["case"]["features"]) for row in suite.rows))
    measured = {row["case"]["name"] for row in suite.rows}
    rows = []
    for group in GROUPS:
        names = [name for name in GENERATED if name in measured and GENERATED[name].group == group]
        if not names:
            continue
        cells, heads = [], [f"**{group}**"]
        for graph in suite.graphs():
            found = {s: {name: _cell(suite, graph, name, s) for name in names} for s in settings}
            lines = [_mean(found[s]) for s in settings]
            if len(settings) == 1:
                lines += map(_text, found[settings[0]].values())
            cells.append("<br>".join(lines))
        if len(settings) == 1:
            heads += [GENERATED[name].baseline for name in names]
        rows.append(["<br>".join(heads), *cells])
    return [", ".join(f"{dtype} {width}" for dtype, width in settings), *suite.graphs()], rows


def _cell(suite: Suite, graph: str, name: str, setting: tuple[str, int]) -> Cell:
    found = {
        (row["peer"], row["mode"]): row
        for row in suite.rows
        if (row["graph"], row["case"]["name"], (row["case"]["dtype"], row["case"]["features"]))
        == (graph, name, setting)
        and row["failed"] is None
    }

    def ratios(mine: str) -> tuple[Optional[float], ...]:
        pairs = [(_least(found, "median_ms", mode), found.get((mine, mode))) for mode in MODES]
        return tuple(None if best is None or row is None else best / row["median_ms"] for best, row in pairs)

    ms = tuple(found[EAGER, mode]["median_ms"] if (EAGER, mode) in found else None for mode in MODES)
    peak, mine = _least(found, "peak_bytes", MODES[-1]), found.get((EAGER, MODES[-1]), {}).get("peak_bytes")
    return Cell(ms, ratios(EAGER), ratios(REPLAYED), peak / mine if peak and mine else None)


def _least(found: dict, key: str, mode: str) -> Optional[float]:
    known = [found[peer, mode][key] for peer in PEERS if (peer, mode) in found and found[peer, mode][key] is not None]
    return min(known, default=None)


def _pair(values: Sequence[Optional[float]], form: str = ".3g") -> str:
    return " / ".join(MISSING if value is None else f"{value:{form}}" for value in values)


def _text(cell: Cell) -> str:
    if cell.ms == (None, None):
        return MISSING
    replayed = f"; {_pair(cell.replayed, '.2g')}" if any(cell.replayed) else ""
    memory = "" if cell.memory is None else f", {cell.memory:.2g}"
    return f"{_pair(cell.ms)} ({_pair(cell.called, '.2g')}{replayed}{memory})"


def _mean(cells: dict[str, Cell]) -> str:
    """Geometric means, and the layer that gains least with its backward."""

    def mean(values: list[Optional[float]]) -> Optional[float]:
        known = [value for value in values if value is not None]
        return geometric_mean(known) if known else None

    def means(kind: str) -> list[Optional[float]]:
        return [mean([getattr(cell, kind)[i] for cell in cells.values()]) for i in range(len(MODES))]

    called, replayed, memory = means("called"), means("replayed"), mean([cell.memory for cell in cells.values()])
    last = {name: max((x for x in (c.called[-1], c.replayed[-1]) if x), default=None) for name, c in cells.items()}
    known = {name: value for name, value in last.items() if value is not None}
    text = _pair(called, ".2g") + (f"; {_pair(replayed, '.2g')}" if any(replayed) else "")
    text = f"**{text}**" + ("" if memory is None else f", {memory:.2g}")
    least = min(known, key=known.get, default=None)
    return text if least is None or len(cells) == 1 else f"{text} ({known[least]:.2g} {least})"
