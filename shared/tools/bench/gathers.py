"""Measures how a node order speeds up four load patterns of a gather: the same sum of dot products by each.

A warp processes one destination. By feature, its lanes read one neighbour's row together; by neighbour, each lane reads
another neighbour's row. A lane loads one float or 16 bytes at a time. Every row's neighbours are processed twice, so
that the second pass shows the effect of the caches. The gap of an order is its speedup of gathers by neighbour minus
its speedup of gathers by feature.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Optional

import torch

import edgeless
from edgeless.tools.cli.console import milliseconds, print_table, times
from edgeless.tools.cli.devices import UsageError, describe_device
from edgeless.tools.timing import Failed, Timer

WIDTHS = [32, 64, 128, 256, 512]
PASSES = 2
BY = ("feature", "neighbour")
LOADS = ("scalar", "16 bytes")


@dataclass
class Gather:
    """One pattern of loads over one graph in one order, in float32.

    ``bytes`` is the size of its loads, wherever they are served from. ``faster`` is the speedup over the graph's own
    order.
    """

    graph: str
    order: str
    width: int
    by: str
    loads: str
    bytes: int
    failed: Optional[str] = None
    median_ms: Optional[float] = None
    spread: Optional[float] = None
    faster: Optional[float] = None


def check(device: torch.device, widths: list[int]) -> None:
    """Raises UsageError where the gathers cannot run."""
    if device.type != "cuda":
        raise UsageError("--gathers times loads of a GPU's warps, and --device is the CPU")
    for width in widths:
        if width % 4:
            raise UsageError(f"--widths must be multiples of 4, whose rows 16-byte loads fill, got {width}")


def dots(handle: edgeless.Graph, x: torch.Tensor, by: str, loads: str, passes: int = PASSES) -> torch.Tensor:
    """``passes`` times the sum of <x[i], x[j]> over the neighbours j of every i; x ``[N, F]`` of float32."""
    indptr, indices = handle.csr_arrays(False)
    return torch.ops.edgeless.gather_dots(x, indptr, indices, by == BY[1], loads == LOADS[1], passes)


def measure(name: str, handles: dict[str, edgeless.Graph], given: str, widths: list[int], timer: Timer) -> list[Gather]:
    """Times every pattern in every order, the orders taking turns."""
    found = []
    for width in widths:
        handle = handles[given]
        x = torch.randn(handle.num_src, width, device=timer.device)
        num_bytes = PASSES * handle.num_edges * (2 * 4 * width + handle.csr.indices.element_size())
        for by, loads in itertools.product(BY, LOADS):
            runs = {order: partial(dots, handle, x, by, loads) for order, handle in handles.items()}
            cells = [Gather(name, order, width, by, loads, num_bytes) for order in handles]
            found += compared(cells, timer.compare(runs), given)
    return found


def compared(cells: list[Gather], timings: dict, given: str) -> list[Gather]:
    """The cells of one pattern, completed with the times of its runs in each order."""
    for cell in cells:
        timing = timings[cell.order]
        if isinstance(timing, Failed):
            cell.failed = str(timing)
        else:
            cell.median_ms, cell.spread = timing.median, timing.spread
    before = next(cell.median_ms for cell in cells if cell.order == given)
    for cell in cells:
        if cell.order != given and None not in (before, cell.median_ms):
            cell.faster = before / cell.median_ms
    return cells


def gaps(cells: list[Gather]) -> dict[tuple[str, str, int], float]:
    """(order, loads, width) -> the gap: the speedup of gathers by neighbour minus that of gathers by feature."""
    faster = {(cell.order, cell.loads, cell.width, cell.by): cell.faster for cell in cells}
    found = {}
    for order, loads, width, by in faster:
        pair = [faster.get((order, loads, width, one)) for one in (BY[1], BY[0])]
        if by == BY[0] and None not in pair:
            found[order, loads, width] = pair[0] - pair[1]
    return found


def print_gathers(name: str, cells: list[Gather], device: torch.device) -> None:
    """A table with a row for every order, width and kind of loads."""
    found = gaps(cells)
    rows = []
    for one in cells:
        if one.by != BY[0]:
            continue
        other = next(c for c in cells if (c.order, c.width, c.loads, c.by) == (one.order, one.width, one.loads, BY[1]))
        gap = found.get((one.order, one.loads, one.width))
        row = [one.order, str(one.width), one.loads]
        for cell in (one, other):
            rate = "" if cell.failed else f"{cell.bytes / cell.median_ms / 1e6:,.0f}"
            row += [
                cell.failed or milliseconds(cell.median_ms),
                rate,
                "" if cell.faster is None else times(cell.faster),
            ]
        rows.append([*row, "" if gap is None else f"{gap:+.2f}"])
    columns = ["order", "width", "loads"]
    columns += [f"{what}{by}" for by in BY for what in ("ms by ", "GB/s by ", "faster by ")]
    notes = [
        f"sums of dot products with all neighbours, float32, {PASSES} passes; GB/s: of what loads ask for",
        "gap: what the order makes gathers by neighbour faster by, less the same by feature",
    ]
    print()
    print_table(f"{name}, gathers, {describe_device(device)}", [*columns, "gap"], rows, notes)


def draw(file: Path, title: str, cells: list[Gather]) -> None:
    """The gaps over the width: a panel for every graph and kind of loads, a line for every order."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(cell.graph for cell in cells))
    size = (5 * len(LOADS), 3.2 * len(names))
    figure, panels = plt.subplots(len(names), len(LOADS), figsize=size, squeeze=False, sharex=True)
    for name, row in zip(names, panels):
        found = gaps([cell for cell in cells if cell.graph == name])
        for loads, axes in zip(LOADS, row):
            for order in dict.fromkeys(order for order, _, _ in found):
                line = [(width, gap) for (*which, width), gap in found.items() if which == [order, loads]]
                axes.plot(*zip(*line), label=order, marker=".")
            axes.axhline(0, color="#9aa5b1", linewidth=0.8)
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:g}")
            axes.set_title(f"{name}, {loads}", parse_math=False)
            axes.spines[["top", "right"]].set_visible(False)
        row[0].set_ylabel("gap: by neighbour less by feature")
        if found:
            row[-1].legend()
    for axes in panels[-1]:
        axes.set_xlabel("numbers of a row, log scale")
    figure.suptitle(title, fontsize=9, parse_math=False)
    figure.tight_layout()
    figure.savefig(file, dpi=150)
    plt.close(figure)
