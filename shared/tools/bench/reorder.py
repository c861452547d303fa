"""The ``reorder`` command: the cost, the statistics and the speedup of each order of a graph's nodes."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Optional

import torch

import edgeless
from edgeless import reordering
from edgeless.tools.cli.console import milliseconds, plus_minus, print_table, times
from edgeless.tools.cli.devices import UsageError, describe_device, pick_device
from edgeless.tools.cli.files import check_writable, writing
from edgeless.tools.cli.options import MOST_THREADS, check_count, check_room
from edgeless.tools.cli.setting import setting_of
from edgeless.tools.demo.plot import check_drawable
from edgeless.tools.timing import Failed, Timer

from . import gathers, twins
from .graphs import HELP, BenchGraph, check_name, load
from .ops import OPS, graph_of
from .runs import Rows
from .work import DTYPES, MODES, Case, Work, op_case

GIVEN, OWN_ORDER = "as given", "the twin's communities"
HEIGHTS = (16, 64)
DEFAULT_OPS = ["spmm_none_F128", "gatv2_H4_D32"]


@dataclass
class Order:
    """One order of a graph's nodes. ``seconds`` is the time to find it and to build the graph in it."""

    graph: str
    name: str
    seconds: Optional[float]
    reuse: dict[int, float]
    bandwidth: int
    mean_distance: float


@dataclass
class Cell:
    """One op in one order, compared with the graph's own order.

    ``recovered`` is the fraction of the time saved by the twin's community order. ``runs`` is the number of runs of the
    op that save the time to find the order, None if they never do.
    """

    graph: str
    order: str
    case: Case
    mode: str
    failed: Optional[str] = None
    median_ms: Optional[float] = None
    spread: Optional[float] = None
    faster: Optional[float] = None
    recovered: Optional[float] = None
    runs: Optional[float] = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of the command."""
    parser.add_argument("--graph", nargs="+", help=HELP)
    parser.add_argument("--data", type=Path, help="folder with ind.cora.* or NAME.npz somewhere in it")
    parser.add_argument(
        "--method", nargs="+", choices=reordering.METHODS, help="default: all whose libraries are installed"
    )
    parser.add_argument("--num-parts", type=int, help="of METIS (default: one for 512 nodes)")
    parser.add_argument("--seed", type=int, default=0, help="of METIS (default: 0)")
    parser.add_argument("--op", nargs="+", help=f"bare aggregations to time (default: {' '.join(DEFAULT_OPS)})")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["fp32"])
    parser.add_argument("--mode", nargs="+", choices=MODES, default=["forward_backward"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument("--rounds", type=int, help="turns of each order (default: 5 on the CPU, 3 on CUDA)")
    parser.add_argument("--runs", type=int, default=10, help="runs of a turn on CUDA (default: 10)")
    parser.add_argument(
        "--gathers", action="store_true", help="time bare gathers of rows on CUDA too: by feature and by neighbour"
    )
    parser.add_argument(
        "--widths", nargs="+", type=int, default=gathers.WIDTHS, help="of their rows (default: 32 to 512)"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw what the orders are worth to the gathers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure")


def run(args: argparse.Namespace) -> int:
    """Prints statistics of the orders of each graph, and the time of each op in them."""
    for name in ("num_parts", "rounds", "runs"):
        check_count(f"--{name.replace('_', '-')}", getattr(args, name))
    check_count("--threads", args.threads, most=MOST_THREADS)
    check_count("--seed", args.seed, least=0)
    if args.data is not None and not args.data.is_dir():
        raise UsageError(f"--data {args.data}: no such folder")
    if args.json is not None:
        check_writable("--json", args.json)
    device = pick_device(args.device)
    _check_gathers(args, device)
    cases = [] if args.gathers and not args.op else _cases(args)
    args.graph = args.graph or ["hm"]
    for name in args.graph:
        check_name(name, args.data)
    torch.set_num_threads(args.threads)
    cuda = device.type == "cuda"
    timer = Timer(device, rounds=args.rounds or (3 if cuda else 5), runs=args.runs, warmup=10 if cuda else 1)
    setting, gathered = setting_of(args, device), []
    rows = Rows(args.json, setting)
    for name in args.graph:
        graph = load(name, args.data, device)
        width = max([case.heads * case.channels for case in cases] + args.widths * args.gathers)
        check_room(f"--graph {name}: a row of {width:,} numbers for every node", 8 * width * graph.num_nodes)
        handles, orders = _orders(graph, args, device)
        _print_orders(graph, orders)
        rows.keep([asdict(order) for order in orders])
        for case in cases:
            cells = measure(graph, handles, orders, case, args.mode, timer)
            _print_cells(graph, case, cells, device)
            rows.keep([asdict(cell) for cell in cells])
        if args.gathers:
            found = gathers.measure(name, handles, GIVEN, args.widths, timer)
            gathers.print_gathers(name, found, device)
            rows.keep([asdict(cell) for cell in found])
            gathered += found
    if args.plot is not None:
        with writing("--plot", args.plot) as file:
            gathers.draw(file, f"{describe_device(device)}, {setting['command']}", gathered)
    return 0


def _check_gathers(args: argparse.Namespace, device: torch.device) -> None:
    for width in args.widths:
        check_count("--widths", width)
    if args.gathers:
        gathers.check(device, args.widths)
    if args.plot is not None:
        if not args.gathers:
            raise UsageError("--plot draws gathers; add --gathers")
        check_drawable(args.plot)
        check_writable("--plot", args.plot)


def _cases(args: argparse.Namespace) -> list[Case]:
    try:
        return [op_case(name, dtype) for name in args.op or DEFAULT_OPS for dtype in args.dtype]
    except ValueError as error:
        raise UsageError(f"--op: {error}") from None


def _orders(graph: BenchGraph, args: argparse.Namespace, device) -> tuple[dict[str, edgeless.Graph], list[Order]]:
    """The graph in every order, with both directions built, and the statistics of each order."""
    one_edge = edgeless.Graph.from_edge_index(torch.tensor([[0], [1]]))
    handles = {GIVEN: graph_of(graph)}
    seconds: dict[str, Optional[float]] = {GIVEN: None}
    for method in args.method or reordering.METHODS:
        options = {"seed": args.seed, "num_parts": args.num_parts if method == "metis" else None}
        try:
            one_edge.reorder(method)  # loads the library, which takes a second once
        except ImportError as error:
            if args.method:
                raise UsageError(f"--method {method}: {error}") from None
            print(f"{method} left out: {error}")
            continue
        start = time.perf_counter()
        try:
            reordered, _ = handles[GIVEN].reorder(method, **options)
        except RuntimeError as error:  # a failing method must not stop the measurement of the others
            print(f"{method} left out: {error}")
            continue
        _ = reordered.csr, reordered.csc
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        handles[method], seconds[method] = reordered, time.perf_counter() - start
    if graph.name in (*twins.POWER_LAW, *twins.ROADS):
        twin = twins.twin(graph.name, order="community", device=str(device))
        own = BenchGraph(graph.name, twin.num_nodes, torch.stack([twin.src, twin.dst]), twin.symmetric)
        handles[OWN_ORDER], seconds[OWN_ORDER] = graph_of(own), None
    return handles, [_order(graph.name, name, handle, seconds[name]) for name, handle in handles.items()]


def _order(graph: str, name: str, handle: edgeless.Graph, seconds: Optional[float]) -> Order:
    reuse = {height: reordering.reuse(handle, height) for height in HEIGHTS}
    return Order(graph, name, seconds, reuse, reordering.bandwidth(handle), reordering.mean_distance(handle))


def measure(
    graph: BenchGraph, handles: dict[str, edgeless.Graph], orders: list[Order], case: Case, modes, timer: Timer
) -> list[Cell]:
    """Times one op in every order, the orders taking turns."""
    op = OPS[case.op]
    shapes = op.shapes(graph.num_nodes, case.heads, case.channels)
    options = {"device": timer.device, "dtype": DTYPES[case.dtype]}
    # Random rows, since their order changes no time.
    inputs = [torch.randn(shape, **options).requires_grad_() for shape in shapes]
    works = {name: Work(lambda handle=handle: op.edgeless(handle, *inputs), inputs) for name, handle in handles.items()}
    cells = []
    for mode in modes:
        timings = timer.compare({name: work.mode(mode) for name, work in works.items()})
        cells += compared(graph.name, case, mode, timings, {order.name: order.seconds for order in orders})
    return cells


def compared(graph: str, case: Case, mode: str, timings: dict, seconds: dict[str, Optional[float]]) -> list[Cell]:
    """The cells of one mode, from the times of the runs in each order and the times to find the orders."""
    cells = {name: Cell(graph, name, case, mode) for name in timings}
    for name, timing in timings.items():
        if isinstance(timing, Failed):
            cells[name].failed = str(timing)
        else:
            cells[name].median_ms, cells[name].spread = timing.median, timing.spread
    before = cells[GIVEN].median_ms
    best = cells[OWN_ORDER].median_ms if OWN_ORDER in cells else None
    for name, cell in cells.items():
        if name == GIVEN or cell.failed or before is None:
            continue
        saved = before - cell.median_ms
        cell.faster = before / cell.median_ms
        if best is not None and best < before:
            cell.recovered = saved / (before - best)
        if saved > 0 and seconds[name] is not None:
            cell.runs = 1e3 * seconds[name] / saved
    return list(cells.values())


def _print_orders(graph: BenchGraph, orders: list[Order]) -> None:
    columns = ["order", "seconds", *(f"reuse {height}" for height in HEIGHTS), "bandwidth", "mean distance"]
    rows = [
        [
            order.name,
            "" if order.seconds is None else f"{order.seconds:.2f}",
            *(f"{order.reuse[height]:.2f}" for height in HEIGHTS),
            f"{order.bandwidth:,}",
            f"{order.mean_distance:,.0f}",
        ]
        for order in orders
    ]
    print()
    notes = ["reuse: edges for each row that a window of so many destinations gathers once"]
    print_table(f"{graph.name}: {graph.num_nodes:,} nodes, {graph.num_edges:,} edges", columns, rows, notes)


def _print_cells(graph: BenchGraph, case: Case, cells: list[Cell], device: torch.device) -> None:
    columns = {
        "order": [cell.order for cell in cells],
        "": [cell.mode.replace("_", " + ") for cell in cells],
        "ms": [cell.failed or milliseconds(cell.median_ms) for cell in cells],
        "spread": ["" if cell.failed else plus_minus(f"{100 * cell.spread:.0f} %") for cell in cells],
        "faster by": ["" if cell.faster is None else times(cell.faster) for cell in cells],
        "recovered": ["" if cell.recovered is None else f"{100 * cell.recovered:.0f} %" for cell in cells],
        "runs to break even": ["" if cell.runs is None else f"{cell.runs:,.0f}" for cell in cells],
    }
    columns = {name: entries for name, entries in columns.items() if any(entries)}
    print()
    title = f"{graph.name}, {case.label}, {describe_device(device)}"
    notes = ["recovered: of what the twin's own order saves"] if "recovered" in columns else []
    if "runs to break even" in columns:
        notes.append("a run is what one layer does: a model of two layers breaks even in half as many epochs")
    print_table(title, list(columns), list(zip(*columns.values())), notes)
