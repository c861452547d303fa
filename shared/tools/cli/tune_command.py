"""The ``tune`` command: finds the fastest engine for sums and dot product attention over a graph.

Then ``"auto"`` chooses it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from edgeless.choices.engines import tuner
from edgeless.choices.tuning import MODES, Shape, shape_of_dot, sides_of
from edgeless.choices.tuning_file import Entry
from edgeless.graph.handle import Graph
from edgeless.tools import tuning_measure
from edgeless.tools.bench.graphs import HELP, BenchGraph, check_name, load
from edgeless.tools.bench.ops import graph_of
from edgeless.tools.bench.work import DTYPES, Case, op_case
from edgeless.tools.tuning_measure import Measured, break_even, entry_of

from .console import milliseconds, print_table
from .devices import UsageError, describe_device, pick_device
from .files import OutputError
from .options import check_count, check_room

ATTENTION = "gt"
SUMS = ("spmm_none", "spmm_both")  # one engine is the best for both, since degrees are scales of nodes
DEFAULT_OPS = ["spmm_none_F128"]
_SIDES = {"by_dst": "forward", "by_src": "backward"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of the command."""
    parser.add_argument("--show", action="store_true", help="print what is decided already, and where that is kept")
    parser.add_argument("--graph", nargs="+", help=HELP)
    parser.add_argument("--data", type=Path, help="folder with ind.cora.* or NAME.npz somewhere in it")
    parser.add_argument("--self-loops", action="store_true", help="as layers that add self loops see the graph")
    parser.add_argument("--op", nargs="+", help=f"spmm_none_F512, gt_H4_D128 (default: {' '.join(DEFAULT_OPS)})")
    parser.add_argument("--weighted", action="store_true", help="sums with a weight for every edge")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["bf16", "fp32"], help="default: bf16 fp32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each engine (default: 5)")
    parser.add_argument("--runs", type=int, default=10, help="runs of a turn (default: 10)")
    parser.add_argument("--dry-run", action="store_true", help="decide nothing: print what was measured")


def run(args: argparse.Namespace) -> int:
    """Measures, prints a table for each graph and case, and writes the decisions."""
    if args.show:
        show()
        return 0
    for name in ("rounds", "runs"):
        check_count(f"--{name}", getattr(args, name))
    if not args.graph:
        raise UsageError("tune needs --graph, as in: edgeless tune --graph hm:community --op spmm_none_F512; or --show")
    if args.data is not None and not args.data.is_dir():
        raise UsageError(f"--data {args.data}: no such folder")
    cases = [_case(name, dtype) for name in args.op or DEFAULT_OPS for dtype in args.dtype]
    for name in args.graph:
        check_name(name, args.data)
    device = pick_device(args.device)
    if device.type != "cuda":
        raise UsageError(f"--device {args.device}: the CPU has one engine, rowsplit, so there is nothing to decide")
    for name in args.graph:
        graph = load(name, args.data, device)
        width = max(case.heads * case.channels for case in cases)
        check_room(f"--graph {name}: a row of {width:,} numbers for every node", 8 * width * graph.num_nodes)
        handle = graph_of(graph)
        handle = handle.with_self_loops() if args.self_loops else handle
        for case in cases:
            _tune(handle, graph, case, args, device)
    if not args.dry_run:
        print(f"\nkept in {tuner.file}, which is used unless EDGELESS_TUNING=off")
    return 0


def _case(name: str, dtype: str) -> Case:
    try:
        case = op_case(name, dtype)
    except ValueError as error:
        raise UsageError(f"--op: {error}") from None
    if case.op not in (*SUMS, ATTENTION):
        some = "sums and dot product attention, as spmm_none_F512 and gt_H4_D128"
        raise UsageError(f"--op {name}: engines are chosen for {some}; others run on rowsplit alone")
    return case


def _shapes(case: Case, weighted: bool) -> list[Shape]:
    """The shapes for which a case decides the engine."""
    dtype = DTYPES[case.dtype]
    if case.op == ATTENTION:
        return [shape_of_dot(dtype, case.heads, case.channels, backward=backward) for backward in (False, True)]
    return [Shape("spmm", dtype, case.channels, weighted)]


def _tune(handle: Graph, graph: BenchGraph, case: Case, args: argparse.Namespace, device: torch.device) -> None:
    handle.csr_arrays(args.weighted), handle.csc_arrays(args.weighted)  # the directions that are measured
    entries = []
    for shape in _shapes(case, args.weighted):
        sides = sorted(sides_of(handle, shape))
        found = tuning_measure.measure(handle, shape, sides, args.rounds, args.runs)
        if not found:
            raise OutputError(f"--graph {graph.name}, {case.label}: there is no memory to measure it in")
        entries += [entry_of(handle, shape, side, measured) for side, measured in found.items()]
    if not args.dry_run:
        try:
            tuner.file.add(entries)
        except (OSError, ValueError) as error:
            raise OutputError(f"{tuner.file}: {error}") from error
    loops = " with self loops" * args.self_loops
    title = f"{graph.name}{loops}: {case.label}{' weighted' * args.weighted}, {describe_device(device)}"
    print()
    print_table(title, ["pass", "engine", "ms", "to make, ms", "uses to break even", ""], rows(entries), _NOTES)


_NOTES = ["uses to break even: after which an engine has saved what it takes to make what it needs, against rowsplit"]


def rows(entries: list[Entry]) -> list[list[str]]:
    """A row of the table for every engine of every decision."""
    table = []
    for entry in entries:
        found = Measured(entry["ms"], entry["build_ms"])
        for name, ms in entry["ms"].items():
            uses = None if name == "rowsplit" or "rowsplit" not in found.ms else break_even(found, name)
            table.append(
                [
                    _pass_of(entry),
                    name,
                    milliseconds(ms),
                    milliseconds(found.build_ms) if name == "wsb" and found.build_ms is not None else "",
                    "" if name == "rowsplit" else "never" if uses is None else f"{uses:,.0f}",
                    "taken" if name == entry["engine"] else "",
                ]
            )
    return table


def _pass_of(entry: Entry) -> str:
    """The pass of a decision; for attention only one side has decisions."""
    if entry["op"].startswith("dot_backward"):
        return "backward"
    return _SIDES.get(entry["side"], entry["side"])


def show() -> None:
    """Prints the user's file."""
    file = tuner.file
    print(f"{file}: EDGELESS_TUNING={tuner.mode} (one of {', '.join(MODES)})")
    try:
        entries = list(file.read().values())
    except (OSError, ValueError) as error:
        raise OutputError(f"{file} is not used: {error}") from error
    if not entries:
        print("no decisions")
        return
    columns = [
        "graph",
        "edges",
        "op",
        "pass",
        "dtype",
        "width",
        "engine",
        "ms by engine",
        "uses to break even",
        "measured on",
    ]
    table = []
    for entry in entries:
        found = Measured(entry["ms"], entry["build_ms"])
        uses = break_even(found, entry["engine"]) if {"rowsplit", entry["engine"]} <= set(found.ms) else None
        table.append(
            [
                entry["fingerprint"],
                f"{entry['num_edges']:,}",
                entry["op"].replace("_backward", "") + " weighted" * entry["weighted"],
                _pass_of(entry),
                entry["dtype"],
                str(entry["width"]),
                entry["engine"],
                ", ".join(f"{name} {milliseconds(ms)}" for name, ms in entry["ms"].items()),
                "" if uses is None else f"{uses:,.0f}",
                f"{entry['date']}, {entry['device']}, torch {entry['torch']}",
            ]
        )
    print_table(f"{len(entries)} decision{'s' * (len(entries) != 1)}", columns, table)
