"""Compares the engine that ``"auto"`` chooses with every other: distance from the fastest, and the cost of blocks."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, NamedTuple, Optional

import torch

from edgeless.graph import wsb
from edgeless.tools.cli.console import print_table

from .graphs import BenchGraph
from .measure import Result
from .ops import graph_of
from .twins import POWER_LAW

GRAPHS = (*POWER_LAW, "city-roads-L")
OPS = ("gatv2_H2_D64", "gat_H2_D64", "gt_H4_D128", "spmm_none_F512", "min_F512")
CHOSEN, BLOCKS = "edgeless-auto", "edgeless-wsb"
PEERS = ("edgeless-rowsplit", BLOCKS, "edgeless-cusparse")


class Choice(NamedTuple):
    """One cell: a graph, an aggregation, a mode.

    Attributes:
        times: engine -> ms, for the engines that support the case.
        chosen_ms: the time of ``CHOSEN``.
        engine: the engine that ``CHOSEN`` ran.
        uses: calls after which blocks have saved their build time; None if never, or if not measured.
    """

    graph: str
    case: tuple[str, str]
    mode: str
    times: dict[str, float]
    chosen_ms: float
    engine: str
    uses: Optional[float]

    @property
    def fastest(self) -> str:
        """The fastest engine."""
        return min(self.times, key=self.times.get)

    @property
    def slowdown(self) -> float:
        """The chosen engine's time over the least time, its own included."""
        return self.chosen_ms / min(self.chosen_ms, *self.times.values())


def blocks_of(graph: BenchGraph, device: torch.device) -> dict[str, Any]:
    """The cost of blocks for one direction: edges per row read, milliseconds to build them, their bytes."""
    indptr, indices, _ = graph_of(graph).csr

    def make() -> wsb.Blocks:
        made = wsb.blocks_of(indptr, indices, graph.num_nodes)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return made

    made = make()  # not timed: the first call loads kernels
    begin = time.perf_counter()
    made = make()
    spent = time.perf_counter() - begin
    reuse = wsb.edges_a_row(indptr, indices, graph.num_nodes)
    return {"reuse": reuse, "build_ms": 1e3 * spent, "blocks_bytes": sum(t.nbytes for t in made)}


def of_row(result: Result, blocks: dict[str, Any]) -> dict[str, Any]:
    """Fields on blocks to add to a result's row of the JSON file; empty for other engines."""
    return blocks if result.peer == BLOCKS else {}


def choices(rows: Iterable[dict]) -> list[Choice]:
    """The cells of a run in which both the chosen engine and another were timed."""
    cells: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        if row.get("peer") in (*PEERS, CHOSEN) and row.get("failed") is None:
            key = row["graph"], (row["case"]["name"], row["case"]["dtype"]), row["mode"]
            cells.setdefault(key, {})[row["peer"]] = row
    found = []
    for key, peers in cells.items():
        times = {peer.partition("-")[2]: row["median_ms"] for peer, row in peers.items() if peer != CHOSEN}
        if CHOSEN in peers and times:
            chosen = peers[CHOSEN]
            found.append(Choice(*key, times, chosen["median_ms"], chosen["engine"] or "", _uses(key[2], peers)))
    return found


def _uses(mode: str, peers: dict[str, dict]) -> Optional[float]:
    if BLOCKS not in peers or PEERS[0] not in peers:
        return None
    saved = peers[PEERS[0]]["median_ms"] - peers[BLOCKS]["median_ms"]
    directions = 1 if mode == "forward" else 2
    return directions * peers[BLOCKS]["build_ms"] / saved if saved > 0 else None


def print_chosen(rows: list[dict]) -> None:
    """Prints every cell, the worst first; nothing if no engine was timed beside the chosen one."""
    found = sorted(choices(rows), key=lambda choice: -choice.slowdown)
    if not found:
        return
    names = [peer.partition("-")[2] for peer in PEERS if any(peer.partition("-")[2] in c.times for c in found)]
    columns = ["graph", "case", "", *names, "chosen", "its ms", "against the fastest", "blocks pay after"]
    cells = []
    for choice in found:
        ms = [f"{choice.times[name]:.3g}" if name in choice.times else "" for name in names]
        uses = "" if choice.uses is None else f"{choice.uses:,.0f} calls"
        label, mode = " ".join(choice.case), choice.mode.replace("_", " + ")
        of_chosen = [choice.engine, f"{choice.chosen_ms:.3g}", f"{choice.slowdown:.2f}", uses]
        cells.append([choice.graph, label, mode, *ms, *of_chosen])
    print()
    print_table("The engine that is chosen, against the fastest", columns, cells)
