"""Measures one peer's peak memory in a process of its own: ``python -m edgeless.tools.bench.memory`` < JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

import torch

from edgeless.tools.cli.child import configuration, emit
from edgeless.tools.cli.memory import peak_memory

from . import graphs
from .peers import build
from .work import MODES, Case, Work


def is_made_by_runs(peer: str) -> bool:
    """Returns whether a peer's first runs prepare later ones by compiling code for shapes or recording a CUDA graph."""
    return peer.endswith(("-compiled", "-graphed", "-captured"))


def measure(case: Case, peer: str, graph: graphs.BenchGraph, made: Optional[Work] = None) -> dict[str, Optional[float]]:
    """Peak bytes above the inputs, per mode; None where a CUDA graph is replayed, whose memory was taken when it was
    captured.

    Args:
        made: the peer, if its first runs are done (:func:`is_made_by_runs`).

    Memory that a peer keeps between calls, such as a converted graph, counts. Memory that a process's first call takes
    (imports, thread pools, the compiler) does not: a call on a toy graph takes it before. ``kept`` is the part of the
    peaks that remains between calls; ``first_call`` is the peak of the very first call on the graph, conversion
    included. A compiled peer compiles for the shapes that it meets, so it is warmed up on the graph itself, and only
    its steady state is reported.
    """
    if made is not None and all(map(made.is_replayed, MODES)):
        return dict.fromkeys(MODES)
    device = graph.edge_index.device
    compiled = is_made_by_runs(peer)
    if compiled:
        work = made or build(case, peer, graph)
        for mode in MODES:
            work.mode(mode)()
    else:
        toy = build(case, peer, graphs.load("toy", None, device))
        toy.forward_backward()
        work = build(case, peer, graph)
        like = toy.grad_out[0]
        work.grad_out = [like.new_empty(rows, *like.shape[1:]).normal_() for rows in work.rows]  # they are inputs too
        del toy
    peaks = {}
    with peak_memory(device) as first:
        work.forward_backward()
    for mode in MODES:
        with peak_memory(device) as steady:
            work.mode(mode)()
        kept = 0 if compiled else max(0, steady.before - first.before)
        peaks[mode] = None if work.is_replayed(mode) else steady.bytes + kept
    if not compiled:
        peaks.update(kept=kept, first_call=first.bytes)
    return peaks


def main(config: dict) -> None:
    """Runs one measurement and emits its result."""
    torch.set_num_threads(config["threads"])
    data = config["data"] and Path(config["data"])
    graph = graphs.load(config["graph"], data, torch.device(config["device"]))
    emit("result", **measure(Case(**config["case"]), config["peer"], graph))


if __name__ == "__main__":
    main(configuration())
