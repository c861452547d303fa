"""``--suite shapes``: bare attention over heads and head dims, and the shapes that are slow for their size.

A shape is slow for its size ("falls off") if its time per byte is far above that of another shape of the same score,
precision, mode and graph whose rows have at least as many bytes. The bytes of an edge are those of one row of all
heads, plus 64 for its other costs. On CUDA the launches are replayed from a CUDA graph: the host has no part in the
figures.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass

import torch

from edgeless.tools.cli.console import print_table
from edgeless.tools.timing import Failed, Timer

from .graphs import BenchGraph
from .ops import OPS, graph_of, parse
from .runs import Suite
from .work import DTYPES, MODES, GraphedWork, Work, op_case

HEADS = (1, 2, 3, 4, 8, 16)
DIMS = (4, 8, 16, 20, 32, 40, 64, 96, 128, 256, 512)
SCORES = ("gatv2", "gat", "gt")
PRECISIONS = ("fp32", "bf16")
BESIDE = 64  # bytes per edge beside its row
BAR = 1.8


@dataclass(frozen=True)
class Shape:
    """One cell: milliseconds of a mode, and ``off``, its time per byte over that of the best shape with at least as
    many bytes per row.
    """

    graph: str
    score: str
    dtype: str
    mode: str
    heads: int
    dim: int
    ms: float
    off: float = 1.0

    @property
    def row_bytes(self) -> int:
        """The bytes of a row, all heads."""
        return self.heads * self.dim * DTYPES[self.dtype].itemsize

    @property
    def per_byte(self) -> float:
        """Milliseconds per byte of an edge."""
        return self.ms / (self.row_bytes + BESIDE)


def names() -> list[str]:
    """The op name of every shape."""
    return [f"{score}_H{heads}_D{dim}" for score, heads, dim in itertools.product(SCORES, HEADS, DIMS)]


def measure(graph: BenchGraph, timer: Timer, modes, heads=HEADS, dims=DIMS, scores=SCORES) -> list[Shape]:
    """Times every shape on one graph, in both precisions. Shapes that cannot run are left out."""
    handle, device = graph_of(graph), graph.edge_index.device
    found = []
    for score, dtype in itertools.product(scores, PRECISIONS):
        for h, d in itertools.product(heads, dims):
            work = _work(handle, graph, score, DTYPES[dtype], h, d, device)
            timings = timer.compare({mode: work.mode(mode) for mode in modes})
            for mode, timing in timings.items():
                if not isinstance(timing, Failed):
                    found.append(Shape(graph.name, score, dtype, mode, h, d, timing.median))
            del work
    return with_ratios(found)


def _work(handle, graph: BenchGraph, score: str, dtype: torch.dtype, heads: int, dim: int, device) -> Work:
    shapes = OPS[score].shapes(graph.num_nodes, heads, dim)
    inputs = [torch.randn(shape, device=device, dtype=dtype).requires_grad_() for shape in shapes]
    kind = GraphedWork if device.type == "cuda" else Work
    return kind(lambda: OPS[score].edgeless(handle, *inputs), inputs)


def with_ratios(shapes: list[Shape]) -> list[Shape]:
    """The same shapes with ``off`` filled in."""

    def peers(shape: Shape) -> list[Shape]:
        def same(s):
            return (s.graph, s.score, s.dtype, s.mode)

        return [s for s in shapes if same(s) == same(shape) and s.row_bytes >= shape.row_bytes]

    return [Shape(**{**vars(shape), "off": shape.per_byte / min(s.per_byte for s in peers(shape))}) for shape in shapes]


def halves_that_lose(shapes: list[Shape]) -> list[tuple[Shape, float]]:
    """bfloat16 shapes that are slower than the same ones in float32, with the ratio."""
    floats = {(s.graph, s.score, s.mode, s.heads, s.dim): s.ms for s in shapes if s.dtype == "fp32"}
    pairs = [
        (s, s.ms / floats.get((s.graph, s.score, s.mode, s.heads, s.dim), s.ms)) for s in shapes if s.dtype == "bf16"
    ]
    return sorted((pair for pair in pairs if pair[1] > 1), key=lambda pair: -pair[1])


def as_row(shape: Shape) -> dict:
    """A shape as a row of the JSON file."""
    case = asdict(op_case(f"{shape.score}_H{shape.heads}_D{shape.dim}", shape.dtype))
    return {
        "graph": shape.graph, "case": case, "peer": "edgeless", "mode": shape.mode, "threads": None, "failed": None,
        "median_ms": shape.ms,
    }  # fmt: skip


def of_row(row: dict) -> Shape:
    """The shape of a row of JSON."""
    case = row["case"]
    score, heads, dim = parse(case["name"])
    return Shape(row["graph"], score, case["dtype"], row["mode"], heads, dim, row["median_ms"])


def worst_of_each_case(suite: Suite) -> tuple[list[str], list[list[str]]]:
    """Columns and rows for the performance page: for each score and precision the worst shape of each graph, in the
    forward and with the backward.
    """
    shapes = with_ratios([of_row(row) for row in suite.rows if not row["failed"]])
    rows = []
    for score, dtype in dict.fromkeys((s.score, s.dtype) for s in shapes):
        cells = []
        for graph in suite.graphs():
            worst = []
            for mode in MODES:
                some = [s for s in shapes if (s.graph, s.score, s.dtype, s.mode) == (graph, score, dtype, mode)]
                found = max(some, key=lambda s: s.off, default=None)
                worst.append("not measured" if found is None else f"{found.off:.2f} (H{found.heads} D{found.dim})")
            cells.append("<br>".join(worst))
        rows.append([f"{score} {dtype}", *cells])
    return ["", *suite.graphs()], rows


def print_shapes(shapes: list[Shape]) -> None:
    """A table of ``off`` for every graph, score, precision and mode, and the worst of all."""
    key = lambda s: (s.graph, s.score, s.dtype, s.mode)  # noqa: E731
    for (graph, score, dtype, mode), cells in itertools.groupby(sorted(shapes, key=key), key):
        cells = list(cells)
        heads, dims = sorted({s.heads for s in cells}), sorted({s.dim for s in cells})
        at = {(s.heads, s.dim): s for s in cells}
        rows = [[f"H{h}", *(f"{at[h, d].off:.2f}" if (h, d) in at else "-" for d in dims)] for h in heads]
        print_table(f"{graph}, {score}, {dtype}, {mode}: time per byte over the best", ["", *map(str, dims)], rows)
    print(summary(shapes))


def summary(shapes: list[Shape]) -> str:
    """The worst shapes, and the bfloat16 ones that are slower than float32."""
    lines = []
    for shape in sorted(shapes, key=lambda s: -s.off)[:12]:
        lines.append(
            f"{shape.off:.2f} {shape.graph} {shape.score} H{shape.heads} D{shape.dim} {shape.dtype} {shape.mode} "
            f"{shape.ms:.3g} ms"
        )
    above = sum(shape.off > BAR for shape in shapes)
    lines.append(f"{above} of {len(shapes)} above {BAR}")
    losing = halves_that_lose(shapes)
    for shape, ratio in losing[:12]:
        lines.append(
            f"bf16 takes {ratio:.2f} times as long as fp32: {shape.graph} {shape.score} H{shape.heads} D{shape.dim} "
            f"{shape.mode} {shape.ms:.3g} ms"
        )
    lines.append(f"{len(losing)} bf16 shapes are slower than fp32")
    return "\n".join(lines)
