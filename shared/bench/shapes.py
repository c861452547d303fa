"""Whether the time per byte falls off for some number of heads and width: the table of ``--suite shapes``."""

from __future__ import annotations

from .ops import parse
from .runs import Suite
from .work import DTYPES, MODES

EDGE_BYTES = 64  # what an edge costs beside its row


def worst_of_each_case(suite: Suite) -> tuple[list[str], list[list[str]]]:
    """Columns and rows: per score and precision, the worst shape of each graph, forward and with the backward."""
    graphs = suite.graphs()
    kinds = list(dict.fromkeys((parse(name)[0], dtype) for name, dtype in suite.cases()))
    rows = []
    for kind in kinds:
        cells = []
        for graph in graphs:
            worst = (_worst(suite, graph, kind, mode) for mode in MODES)
            cells.append("<br>".join(f"{ratio:.2f} ({name})" for ratio, name in worst))
        rows.append([" ".join(kind), *cells])
    return ["", *graphs], rows


def _worst(suite: Suite, graph: str, kind: tuple[str, str], mode: str) -> tuple[float, str]:
    costs = []  # (bytes a row, time per byte, shape)
    for row in suite.rows:
        case = row["case"]
        score, heads, width = parse(case["name"])
        if (row["graph"], (score, case["dtype"]), row["mode"]) == (graph, kind, mode) and not row["failed"]:
            size = heads * width * DTYPES[case["dtype"]].itemsize
            costs.append((size, row["median_ms"] / (size + EDGE_BYTES), f"H{heads} D{width}"))
    ratios = [(cost / min(c for s, c, _ in costs if s >= size), shape) for size, cost, shape in costs]
    return max(ratios, default=(float("nan"), "not measured"))
