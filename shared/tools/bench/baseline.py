"""Published figures of the best peers, from another machine or day, and our ratio to them."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from edgeless.tools.cli.console import milliseconds
from edgeless.tools.cli.devices import UsageError
from edgeless.tools.cli.layers import EVERY_LAYER

from .measure import Result
from .work import MODES, Case

H200 = Path(__file__).parent / "h200_peers.json"
H200_RELATIONS = Path(__file__).parent / "h200_relations_peers.json"  # layers over relations, 64 -> 64, one head


@dataclass(frozen=True)
class Figure:
    """The best peer's time in milliseconds, and the least peak memory in MB where it is known."""

    peer: str
    ms: float
    peak_mb: Optional[float]


class Baseline:
    """A file like ``h200_peers.json``: the best peer for each (graph, op or layer, dtype)."""

    def __init__(self, file: Path):
        try:
            content = json.loads(file.read_text())
            self.origin = f"{content['machine']}, {content['date']}"
            self._rows = {("op", r["graph"], r["op"], r["dtype"]): r for r in content["aggregation"]}
            self._rows.update({("layer", r["graph"], r["layer"], r["dtype"]): r for r in content["layers"]})
            figures = [_figure(row, mode) for row in self._rows.values() for mode in MODES]
            if any(figure is not None and not figure.ms > 0 for figure in figures):
                raise ValueError("a time that is not positive")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"--baseline {file}: not a file of peer figures ({error!r})") from error

    def figure(self, graph: str, case: Case, mode: str) -> Optional[Figure]:
        """The best peer of one cell; None where no peer was measured, as for all cells with dropout."""
        if case.dropout:
            return None
        name = EVERY_LAYER[case.name].baseline if case.kind == "layer" else case.name
        row = self._rows.get((case.kind, graph, name, case.dtype))
        return None if row is None else _figure(row, mode)


def _figure(row: dict, mode: str) -> Optional[Figure]:
    if f"{mode}_ms" not in row:
        return None
    peak_mb = row.get(f"{mode}_peak_mb")
    return Figure(row[f"{mode}_peer"], float(row[f"{mode}_ms"]), None if peak_mb is None else float(peak_mb))


def geometric_means(results: list[Result], baseline: Baseline) -> list[list[str]]:
    """Rows of (case, peer, mode, geometric mean of the ratios, least ratio and its graph), over the measured graphs."""
    cells: dict[tuple, list[tuple[float, str]]] = {}
    for result in results:
        figure = baseline.figure(result.graph, result.case, result.mode)
        if figure is not None and result.median_ms:
            key = (result.case.label, result.peer, result.mode)
            cells.setdefault(key, []).append((figure.ms / result.median_ms, result.graph))
    rows = []
    for (label, peer, mode), ratios in sorted(cells.items(), key=lambda c: (c[0][0], c[0][1], MODES.index(c[0][2]))):
        mean = math.exp(sum(math.log(ratio) for ratio, _ in ratios) / len(ratios))
        least, graph = min(ratios)
        rows.append([label, peer, mode, f"{mean:.2f}", f"{least:.2f} ({graph})", str(len(ratios))])
    return rows


def describe(figure: Optional[Figure], ms: float) -> str:
    """A cell of the table: the best peer's time over ours, and the best peer's time."""
    return "" if figure is None else f"{figure.ms / ms:.2f} of {milliseconds(figure.ms)}"
