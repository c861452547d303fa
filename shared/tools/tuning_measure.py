"""Measures engines on a graph for the ``tune`` command, with random rows in place of the user's, and chooses one."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Optional

import torch
from torch import Tensor

from edgeless.checks import opmath_dtype
from edgeless.choices.engines import CusparseFormat, engine, pick
from edgeless.choices.tuning import Shape, key, parse_dot, sides_of
from edgeless.choices.tuning_file import Entry
from edgeless.graph.handle import Graph
from edgeless.graph.wsb import WsbFormat

from .timing import Failed, Timer

__all__ = ["ENGINES", "Measured", "break_even", "choose", "entry_of", "measure"]

EXPECTED_USES = 100  # calls within which blocks must save the time of building them
LEAST_GAIN = 0.03  # share of rowsplit's time that another engine must save: less is noise

# Engines whose sums are bitwise reproducible from run to run. Rowsplit needs no format of its own.
ENGINES = ("rowsplit", "wsb", "cusparse")
ROUNDS, RUNS, WARMUP = 3, 3, 2


@dataclass
class Measured:
    """Measured engines on one direction of a graph.

    Attributes:
        ms: milliseconds by engine, without engines that could not run.
        build_ms: milliseconds to build the blocks of wsb, where measured.
    """

    ms: dict[str, float]
    build_ms: Optional[float] = None


def break_even(found: Measured, engine: str) -> Optional[float]:
    """The number of uses after which ``engine`` has saved its preparation time against rowsplit; None: never."""
    saved = found.ms["rowsplit"] - found.ms[engine]
    if saved <= 0:
        return None
    return (found.build_ms or 0.0) / saved if engine == "wsb" else 0.0


def choose(found: Measured) -> str:
    """The fastest engine that beats rowsplit by more than noise and breaks even within ``EXPECTED_USES``."""
    bound = (1 - LEAST_GAIN) * found.ms["rowsplit"]
    paying = [
        name
        for name, ms in found.ms.items()
        if ms < bound and (uses := break_even(found, name)) is not None and uses <= EXPECTED_USES
    ]
    return min(paying, key=found.ms.__getitem__, default="rowsplit")


def entry_of(graph: Graph, shape: Shape, side: str, measured: Measured) -> Entry:
    """A decision as an entry of the file."""
    return {
        **key(graph, shape, side),
        "engine": choose(measured),
        "ms": {name: round(ms, 4) for name, ms in measured.ms.items()},
        "build_ms": None if measured.build_ms is None else round(measured.build_ms, 3),
        "date": datetime.date.today().isoformat(),
    }


def measure(
    graph: Graph, shape: Shape, sides: list[str], rounds: int = ROUNDS, runs: int = RUNS
) -> dict[str, Measured]:
    """Times every engine that supports an op of this shape on the given directions of a graph. Waits for the GPU.

    Returns:
        The measurements by side; empty where memory is short. Formats built for engines are not kept with the graph.
    """
    try:
        return _measured(graph, shape, sides, rounds, runs)
    except torch.OutOfMemoryError:
        return {}


def _measured(graph: Graph, shape: Shape, sides: list[str], rounds: int, runs: int) -> dict[str, Measured]:
    made: dict[str, Any] = {}  # held until everything is measured
    build_ms: Optional[float] = None
    if shape.dtype.itemsize == 2 and not shape.weighted:
        made["wsb"] = WsbFormat()
        build_ms = _milliseconds(graph.device, lambda: made["wsb"].make(graph))
    if shape.op == "spmm":
        made["cusparse"] = CusparseFormat()
        made["cusparse"].learn(graph)
    arrays = sides_of(graph)
    # The blocks of all directions are built together; each direction is charged an equal share.
    share = None if build_ms is None else build_ms / len(arrays)
    found = {}
    for side in sides:
        times = _sum if shape.op == "spmm" else _attention
        ms = times(graph, shape, side, rounds, runs)
        if "rowsplit" in ms:
            found[side] = Measured(ms, share if "wsb" in ms else None)
    return found


def _timed(
    graph: Graph, call: Callable[[], Any], op: str, args: dict[str, Any], rounds: int, runs: int
) -> dict[str, float]:
    """Milliseconds of ``call`` by engine, for the engines that support the op."""

    def run(name: str) -> None:
        with engine(name):
            call()

    runnable = [name for name in ENGINES if pick(op, args, name)[1] == ""]
    timer = Timer(graph.device, rounds, runs, WARMUP)
    timings = timer.compare({name: lambda name=name: run(name) for name in runnable})
    return {name: timing.median for name, timing in timings.items() if not isinstance(timing, Failed)}


def _most(csr: list[Tensor]) -> int:
    """The largest degree, which calls on a graph pass to the op as well."""
    return int(csr[0].diff().max()) if csr[0].numel() > 1 else 0


def _attention(graph: Graph, shape: Shape, side: str, rounds: int, runs: int) -> dict[str, float]:
    backward, head_dim = parse_dot(shape.op)
    heads = shape.width // head_dim
    draw = torch.Generator(graph.device).manual_seed(0)
    csr = graph.csr_arrays(False)
    csc = graph.csc_arrays(False) if backward else []
    with torch.no_grad():
        sizes = (graph.num_dst, graph.num_src, graph.num_src, graph.num_dst)
        options = {"device": graph.device, "dtype": shape.dtype, "generator": draw}
        q, k, v, grad = (torch.randn(size, heads, head_dim, **options) for size in sizes)
        args = {
            "dst": q, "src": k, "value": v, "att": None, "edge_attr": None, "edge_proj": None, "edge_scale": None,
            "csr": csr, "csc": csc, "seed": None, "score": "dot", "coefficient": head_dim**-0.5, "dropout": 0.0,
            "max_degrees": [_most(arrays) for arrays in (csr, csc) if arrays],
        }  # fmt: skip
        forward = partial(torch.ops.edgeless.attention, **args, out_dtype=shape.dtype)
        if not backward:
            return _timed(graph, forward, "attention", args, rounds, runs)
        out, stats = forward()
        saved = {"grad_out": grad, "grad_weights": None, "out": out, "softmax_stats": stats}
        needs = [True] * 3 + [False] * 4
        call = partial(torch.ops.edgeless.attention_backward, **saved, **args, dropped_weights=False, needs=needs)
        return _timed(graph, call, "attention_backward", args, rounds, runs)


def _sum(graph: Graph, shape: Shape, side: str, rounds: int, runs: int) -> dict[str, float]:
    csr = graph.csr_arrays(shape.weighted) if side == "by_dst" else graph.csc_arrays(shape.weighted)
    num_rows = graph.num_src if side == "by_dst" else graph.num_dst
    draw = torch.Generator(graph.device).manual_seed(0)  # leaves the user's generator untouched
    options = {"device": graph.device, "generator": draw}
    statistics = opmath_dtype(shape.dtype)
    with torch.no_grad():
        x = torch.randn(num_rows, shape.width, dtype=shape.dtype, **options)
        weight = torch.rand(graph.num_edges, 1, dtype=statistics, **options) if shape.weighted else None
        most, args = [_most(csr)], {"x": x, "weight": weight, "csr": csr}
        call = partial(torch.ops.edgeless.spmm, x, weight, None, None, csr, [], None, most)
        return _timed(graph, call, "spmm", args, rounds, runs)


def _milliseconds(device: torch.device, call) -> float:
    """Milliseconds of one call by the wall clock, since building blocks makes the host wait for the GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * (time.perf_counter() - start)
