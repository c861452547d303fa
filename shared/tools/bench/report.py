"""Prints the table of one graph and case."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import torch

from edgeless.plan.steps import Device, Step
from edgeless.tools.cli.console import megabytes, milliseconds, plus_minus, print_table, times
from edgeless.tools.cli.devices import describe_device

from . import peers, plans
from .baseline import Baseline, describe
from .graphs import BenchGraph
from .measure import Result
from .work import DTYPES, Case


def print_case(
    graph: BenchGraph, case: Case, results: list[Result], device: torch.device, baseline: Optional[Baseline]
) -> None:
    """Prints one row per peer, mode and number of threads."""
    threads = list(dict.fromkeys(result.threads for result in results))
    columns: dict[str, Sequence[str]] = {
        "peer": [_name(result, threads) for result in results],
        "": [result.mode.replace("_", " + ") for result in results],
        "ms": [result.failed or milliseconds(result.median_ms) for result in results],
        "spread": ["" if result.failed else plus_minus(f"{100 * result.spread:.0f} %") for result in results],
    }
    if len(threads) > 1:
        columns[f"against {threads[0]} thread{'s' * (threads[0] > 1)}"] = [_scaling(r, results) for r in results]
    else:
        columns["edgeless is faster by"] = [_faster(result, results) for result in results]
    columns["peak memory"] = [_size(result.peak_bytes) for result in results]
    columns["kept"] = [_size(result.kept_bytes) for result in results]
    columns["first call"] = [_size(result.first_call_bytes) for result in results]
    if case.kind == "op":
        columns["useful GB/s"] = [_rate(graph, result) for result in results]
        columns["of the roofline"] = [_share(graph, result) for result in results]
    if baseline is not None:
        figures = [None if r.failed else baseline.figure(graph.name, case, r.mode) for r in results]
        columns["ratio to the best peer"] = [describe(f, r.median_ms) for f, r in zip(figures, results)]
        columns["its peak"] = ["" if f is None or f.peak_mb is None else f"{f.peak_mb:,.0f} MB" for f in figures]
    columns = {name: cells for name, cells in columns.items() if any(cells)}
    size = "" if case.kind == "op" else f", {case.features} -> {case.heads} x {case.channels}"
    print()
    print_table(
        f"{graph.name}: {graph.num_nodes:,} nodes, {graph.num_edges:,} edges; {case.label}{size}; "
        f"{describe_device(device, threads)}",
        list(columns),
        list(zip(*columns.values())),
    )


def planned(graph: BenchGraph, result: Result) -> Sequence[Step]:
    """The steps of edgeless for a bare aggregation, whose bytes and roofline hold for all peers; none for layers and
    failed results.
    """
    case = result.case
    if case.kind != "op" or result.failed:
        return []
    sizes = plans.Sizes(graph.num_nodes, graph.num_nodes, graph.num_edges)
    device = Device.of(graph.edge_index.device)
    steps = plans.steps_of(case.name, DTYPES[case.dtype], sizes, device, dropout=case.dropout > 0, engine="rowsplit")
    return plans.of_mode(steps, result.mode)


def _rate(graph: BenchGraph, result: Result) -> str:
    """The plan's bytes over the measured time, as text."""
    num_bytes = sum(step.bytes for step in planned(graph, result))
    return f"{num_bytes / (result.median_ms / 1e3) / 1e9:,.0f}" if num_bytes else ""


def _share(graph: BenchGraph, result: Result) -> str:
    """The time at the roofline over the measured time, as text."""
    seconds = plans.seconds_at_roof(planned(graph, result))
    return f"{100 * seconds / (result.median_ms / 1e3):.0f} %" if seconds else ""


def _name(result: Result, threads: list[int]) -> str:
    return result.peer if len(threads) == 1 else f"{result.peer}, {result.threads} thread{'s' * (result.threads > 1)}"


def _size(count: Optional[int]) -> str:
    return "" if count is None else megabytes(count)


def _find(results: list[Result], peer: str, mode: str, threads: int) -> Optional[float]:
    for result in results:
        if (result.peer, result.mode, result.threads) == (peer, mode, threads):
            return result.median_ms
    return None


def _scaling(result: Result, results: list[Result]) -> str:
    first = results[0].threads
    reference = _find(results, result.peer, result.mode, first)
    return "" if result.failed or result.threads == first else times(reference / result.median_ms)


def _faster(result: Result, results: list[Result]) -> str:
    """This peer's time over that of edgeless in the same framework, as text; empty for edgeless itself."""
    if result.failed or peers.ours(result.peer):
        return ""
    mate = "edgeless" if result.case.kind == "op" else f"edgeless-{peers.LAYER_PEERS[result.peer][0]}"
    mine = _find(results, mate, result.mode, result.threads)
    return "" if mine is None else times(result.median_ms / mine)
