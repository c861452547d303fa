"""Measures engines on a graph, for :mod:`edgeless.tuning`: on rows of its own, not of the user's."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Optional

import torch

from .engines import CusparseFormat, engine, pick
from .tuning import Measured, Shape, sides_of
from .wsb import WsbFormat

if TYPE_CHECKING:
    from .graph import Graph

__all__ = ["ENGINES", "measure"]

# Engines whose sums are the same bits in every run. Rowsplit needs nothing to be made.
ENGINES = ("rowsplit", "wsb", "cusparse")
ROUNDS, RUNS, WARMUP = 3, 3, 2


def measure(
    graph: Graph, shape: Shape, sides: list[str], rounds: int = ROUNDS, runs: int = RUNS
) -> tuple[dict[str, Measured], dict[str, Any]]:
    """Times every engine that runs sums of a shape over directions of a graph. Waits for the GPU.

    Returns:
        What was found, by side; nothing where there is no memory for it. And what the engines made, which is not kept
        with the graph.
    """
    try:
        return _measured(graph, shape, sides, rounds, runs)
    except torch.OutOfMemoryError:
        return {}, {}


def _measured(graph: Graph, shape: Shape, sides: list[str], rounds: int, runs: int):
    made: dict[str, Any] = {}
    build_ms: Optional[float] = None
    if shape.dtype.itemsize == 2 and not shape.weighted:
        made["wsb"] = WsbFormat()
        build_ms = _milliseconds(graph.device, lambda: made["wsb"].make(graph))
    made["cusparse"] = CusparseFormat()
    made["cusparse"].learn(graph)
    arrays = sides_of(graph)
    # Blocks of both directions are made at once; each is charged with its share.
    share = None if build_ms is None else build_ms / len(arrays)
    found = {}
    for side in sides:
        ms = _side(graph, shape, side, rounds, runs)
        if "rowsplit" in ms:
            found[side] = Measured(ms, share if "wsb" in ms else None)
    return found, made


def _side(graph: Graph, shape: Shape, side: str, rounds: int, runs: int) -> dict[str, float]:
    from .bench.timing import Failed, Timer  # torch and the standard library alone

    csr = graph.csr_arrays(shape.weighted) if side == "by_dst" else graph.csc_arrays(shape.weighted)
    num_rows = graph.num_src if side == "by_dst" else graph.num_dst
    draw = torch.Generator(graph.device).manual_seed(0)  # the user's draws stay as they are
    options = {"device": graph.device, "generator": draw}
    statistics = torch.float64 if shape.dtype == torch.float64 else torch.float32
    with torch.no_grad():
        x = torch.randn(num_rows, shape.width, dtype=shape.dtype, **options)
        weight = torch.rand(graph.num_edges, 1, dtype=statistics, **options) if shape.weighted else None

        degrees = csr[0].diff()
        most = [int(degrees.max())] if degrees.numel() else []  # which graphs in use know

        def run(name: str) -> None:
            with engine(name):
                torch.ops.edgeless.spmm(x, weight, None, None, csr, [], None, most)

        args = {"x": x, "weight": weight, "csr": csr}
        runnable = [name for name in ENGINES if pick("spmm", args, name)[1] == ""]
        timer = Timer(graph.device, rounds, runs, WARMUP)
        timings = timer.compare({name: lambda name=name: run(name) for name in runnable})
    return {name: timing.median for name, timing in timings.items() if not isinstance(timing, Failed)}


def _milliseconds(device: torch.device, call) -> float:
    """What one call takes, by the clock: making blocks waits for the GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * (time.perf_counter() - start)
