"""The ``plan`` command: which kernels run for an aggregation on a graph of given sizes, or for a layer over relations
on a graph of the bench, why, and what it costs.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Optional

import torch

from edgeless.choices.engines import ENGINES
from edgeless.plan.steps import DEVICES, Device, Step, table
from edgeless.tools.bench import graphs, plans, shapes, twins
from edgeless.tools.bench.plans import Sizes
from edgeless.tools.bench.suites import SUITES
from edgeless.tools.bench.work import DTYPES

from .devices import UsageError, pick_device
from .plan_layers import PLANNED, layer_steps
from .plan_turns import turns

# The suites of the bench that time ops. A whole layer's or model's kernels depend on its options and its graph.
PLANNED_SUITES = [name for name, suite in SUITES.items() if suite.get("op") or suite.get("shapes")]
_LAYER_SIZES = (64, 1, 64)  # features, heads, channels: those of the bench's suites of layers over relations

# Sizes of graphs that are read from files; those of the others are known by name.
_FILES = {"tolokers": Sizes(11_758, 11_758, 1_038_000), "cora": Sizes(2_708, 2_708, 10_556)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of the command."""
    parser.add_argument("op", nargs="*", help="gatv2_H8_D128, gat_H4_D32, gt_H4_D128, spmm_both_F512, min_F512, ...")
    parser.add_argument(
        "--layer", nargs="+", choices=PLANNED, help="in place of an op: a layer over relations, 64 -> 1 head of 64"
    )
    parser.add_argument("--suite", choices=PLANNED_SUITES, help="every cell of a suite of ops of the bench command")
    parser.add_argument(
        "--graph", nargs="+", help="a graph of the bench (pokec, ...), tolokers or cora; default: arxiv"
    )
    parser.add_argument("--nodes", type=int, help="in place of --graph, with --edges")
    parser.add_argument("--edges", type=int)
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, help="default: fp32")
    parser.add_argument(
        "--device",
        help=f"{', '.join(DEVICES)}, cuda (this machine's) or cpu (default: h200, cpu for a suite of CPU threads)",
    )
    parser.add_argument("--engine", choices=ENGINES, default="auto", help="of sums (default: auto)")
    parser.add_argument("--dropout", action="store_true", help="with dropout of attention")
    parser.add_argument("--arrays", action="store_true", help="with edge weights or returned attention")
    parser.add_argument("--inference", action="store_true", help="of a layer: without its backward")
    parser.add_argument(
        "--turns", action="store_true", help="of an op: with how many more or fewer edges and nodes other kernels run"
    )
    parser.add_argument("--max-degree", type=int, default=-1, help="edges of the longest row, where it is known")


def run(args: argparse.Namespace) -> int:
    """Prints the plan of every case."""
    if args.layer:
        return _run_layers(args)
    suite = suite_of(args.suite)
    ops = ops_of("plan", args, suite)
    wanted = args.device or ("cpu" if "compare_threads" in suite else "h200")
    device = DEVICES.get(wanted) or Device.of(pick_device(wanted))
    for name, sizes in graphs_of(args, suite):
        for op in ops:
            for dtype in args.dtype or suite.get("dtype") or ["fp32"]:
                options = {"dropout": args.dropout, "arrays": args.arrays, "max_degree": args.max_degree}
                plan = partial(_plan, op, DTYPES[dtype], device, args.engine, options)
                steps = plan(sizes)
                print(f"{op} {dtype}, {name} ({sizes.num_dst:,} nodes, {sizes.num_edges:,} edges), {device.name}")
                print("  " + table(steps).replace("\n", "\n  "))
                for turn in turns(plan, sizes) if args.turns else ():
                    print(f"  {steps[turn.step].step}, {turn}")
    return 0


def _plan(op: str, dtype: torch.dtype, device: Device, engine: str, options: dict, sizes: Sizes) -> list[Step]:
    return steps_of(op, dtype, sizes, device, engine=engine, **options)


def _run_layers(args: argparse.Namespace) -> int:
    """Prints the plan of every layer on every graph."""
    given = {"an op": args.op, "--suite": args.suite, "--nodes": args.nodes, "--edges": args.edges}
    given["--turns"] = args.turns or None
    for name, value in given.items():
        if value not in (None, []):
            raise UsageError(f"--layer needs a graph with relations, so {name} has no meaning beside it")
    device = DEVICES.get(args.device or "h200") or Device.of(pick_device(args.device))
    if not device.multiprocessors:
        raise UsageError("--layer is for GPUs: for the CPU, edgeless.explain(layer, *inputs, plan=True)")
    for name in args.graph or ["fb15k"]:
        if not graphs.has_relations(name):
            raise UsageError(f"--layer needs a graph with relations, such as aifb or fb15k, got {name!r}")
        graph = graphs.load(name, None, torch.device("cpu"))
        edges = graph.edge_index, graph.relations.edge_type, graph.relations.num_types, graph.num_nodes
        for layer in args.layer:
            for dtype in args.dtype or ["fp32"]:
                steps = layer_steps(layer, edges, DTYPES[dtype], _LAYER_SIZES, device, args.inference)
                print(f"{layer} {dtype}, {name} ({graph.num_nodes:,} nodes, {graph.num_edges:,} edges), {device.name}")
                print("  " + table(steps).replace("\n", "\n  "))
    return 0


def ops_of(command: str, args: argparse.Namespace, suite: dict) -> list[str]:
    """The ops that the arguments or the suite name.

    Raises:
        UsageError: they name none.
    """
    ops = args.op or suite.get("op")
    if not ops:
        raise UsageError(f"{command} needs an op, as in: edgeless {command} gatv2_H8_D128 --graph twitch --dtype bf16")
    return ops


def suite_of(name: Optional[str]) -> dict:
    """The options of a suite, with the shapes of attention among its ops by name."""
    suite = SUITES.get(name, {})
    if suite.get("shapes"):
        return {**suite, "op": shapes.names(), "dtype": list(shapes.PRECISIONS)}
    return suite


def graphs_of(args: argparse.Namespace, suite: dict) -> Iterator[tuple[str, Sizes]]:
    """Names and sizes of the graphs that the arguments or the suite name."""
    if (args.nodes is None) != (args.edges is None):
        raise UsageError("--nodes and --edges go together")
    if args.nodes is not None:
        if args.nodes < 0 or args.edges < 0:
            raise UsageError(f"--nodes and --edges must not be negative, got {args.nodes} and {args.edges}")
        yield "a graph", Sizes(args.nodes, args.nodes, args.edges)
        return
    for name in args.graph or suite.get("graph") or ["arxiv"]:
        yield name, _sizes(name)


def _sizes(name: str) -> Sizes:
    if name in _FILES:
        return _FILES[name]
    found = graphs.sizes(name)
    if found is None:
        known = ", ".join([*_FILES, *graphs.OWN, *twins.NAMES])
        raise UsageError(f"--graph must be one of {known}, got {name!r}")
    nodes, edges = found
    return Sizes(nodes, nodes, edges)


def steps_of(*call, **options) -> list[Step]:
    """:func:`edgeless.tools.bench.plans.steps_of` for a name that a user typed.

    Raises:
        UsageError: no aggregation has this name.
    """
    try:
        return plans.steps_of(*call, **options)
    except ValueError as error:
        raise UsageError(str(error)) from error
