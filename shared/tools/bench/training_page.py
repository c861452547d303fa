"""The tables of docs/small-graphs-figures.md, from runs of ``python -m edgeless bench --training``."""

from __future__ import annotations

from typing import Optional

from edgeless.tools.cli.console import milliseconds

from .page_tables import MISSING, ratio
from .runs import Suite, geometric_mean
from .training import PEERS

_COLUMNS = ["PyG", "PyG compiled", "PyG with CUDA graphs", "edgeless", "edgeless, captured"]  # headings of PEERS
_Cases = dict[tuple, dict[str, dict]]


def molecules(suite: Suite) -> tuple[list[str], list[list[str]]]:
    """One row for each data set, number of molecules and model, then the means for each number of molecules."""
    cases, rows = _cases(suite), []
    for (graph, count, *model), found in cases.items():
        cells = [_both(found.get(peer), found.get("pyg")) for peer in PEERS]
        rows.append([f"{graph}, {count}, {' '.join(model)}", *cells, _memory(found), _padding(found.get(PEERS[-1]))])
    for count in dict.fromkeys(count for _, count, *_ in cases):
        means = [_mean([found for case, found in cases.items() if case[1] == count], peer) for peer in PEERS[1:]]
        rows.append([f"**{count} molecules, geometric mean**", "", *means, "", ""])
    return ["", *_COLUMNS, "memory", "padding"], rows


def one_graph(suite: Suite) -> tuple[list[str], list[list[str]]]:
    """One row for each graph and model."""
    rows = []
    for (graph, _, *model), found in _cases(suite).items():
        cells = [_step(found.get(peer), found.get("pyg")) for peer in PEERS]
        rows.append([f"{graph}, {' '.join(model)}", *cells, _memory(found)])
    return ["", *_COLUMNS, "memory"], rows


def _cases(suite: Suite) -> _Cases:
    """The measured steps by peer, for each data set, number of molecules, model and dtype."""
    cases: _Cases = {}
    for row in suite.rows:
        found = cases.setdefault((row["graph"], row["batch_size"], row["model"], row.get("dtype", "fp32")), {})
        if row["failed"] is None:
            found[row["peer"]] = row
    return cases


def _step(row: Optional[dict], stock: Optional[dict]) -> str:
    if row is None:
        return MISSING
    faster = "" if stock is None or row is stock else f" ({ratio(stock['step_ms'] / row['step_ms'])})"
    return f"{milliseconds(row['step_ms'])}{faster}"


def _both(row: Optional[dict], stock: Optional[dict]) -> str:
    if row is None:
        return MISSING
    times = f"{milliseconds(row['step_ms'])} / {milliseconds(row['total_ms'])}"
    if stock is None or row is stock:
        return times
    return f"{times} ({' / '.join(ratio(stock[name] / row[name]) for name in ('step_ms', 'total_ms'))})"


def _mean(cases: list[dict[str, dict]], peer: str) -> str:
    pairs = [(found["pyg"], found[peer]) for found in cases if "pyg" in found and peer in found]
    if not pairs:
        return MISSING
    means = [geometric_mean([stock[name] / row[name] for stock, row in pairs]) for name in ("step_ms", "total_ms")]
    return f"**{' / '.join(map(ratio, means))}**"


def _memory(found: dict[str, dict]) -> str:
    """The captured peer's peak over PyG's."""
    stock, mine = found.get("pyg"), found.get(PEERS[-1])
    return (
        MISSING if stock is None or mine is None or not stock["peak_mb"] else ratio(mine["peak_mb"] / stock["peak_mb"])
    )


def _padding(row: Optional[dict]) -> str:
    return MISSING if row is None or row["waste"] is None else f"{100 * row['waste']:.1f} %"
