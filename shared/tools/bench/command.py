"""The ``bench`` command: the loop over graphs and cases, the tables, the JSON file."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from itertools import product
from typing import Optional

import torch

from edgeless.tools.cli.console import print_table
from edgeless.tools.cli.devices import UsageError, pick_device
from edgeless.tools.cli.layers import GENERATED
from edgeless.tools.cli.options import check_room
from edgeless.tools.cli.setting import setting_of
from edgeless.tools.timing import Timer

from . import ddp, engines, minibatch, new_graphs, plans, scaleout, shapes, training
from .baseline import Baseline, geometric_means
from .graphs import BenchGraph, check_name, has_relations, load
from .measure import Plan, Result, measure, peers_of
from .options import DROPPING, add_arguments, complete
from .report import planned, print_case
from .runs import Rows
from .suites import RELATIONAL
from .work import Case, op_case

__all__ = ["add_arguments", "as_row", "cases_of", "run"]


def _device(args: argparse.Namespace) -> torch.device:
    device = pick_device(args.device)
    if not args.compare_threads:
        return device
    if device.type == "cuda" and args.device != "auto":
        raise UsageError("--compare-threads counts CPU threads; leave out --device cuda")
    return torch.device("cpu")


def cases_of(args: argparse.Namespace) -> list[Case]:
    """Every (layer or op, dtype) that the arguments name."""
    try:
        ops = [op_case(name, dtype, args.dropout) for name in args.op or () for dtype in args.dtype]
    except ValueError as error:
        raise UsageError(f"--op: {error}") from None
    layers = []
    for name in args.layer or ():
        if args.dropout and name not in DROPPING:
            raise UsageError(f"--dropout is for {', '.join(DROPPING)}, got --layer {name}")
        sizes = [(args.features, args.heads, args.channels, args.dropout)]
        if name in GENERATED:
            sizes = [(width, 1, width, 0.0) for width in args.width]
        layers += [Case("layer", name, dtype, *size) for size in sizes for dtype in args.dtype]
    return layers + ops


def run(args: argparse.Namespace) -> int:
    """Measures and prints one table per graph and case."""
    args = complete(args)
    device = _device(args)
    threads = args.compare_threads or [args.threads]
    torch.set_num_threads(threads[0])
    baseline = Baseline(args.baseline) if args.baseline else None
    cuda = device.type == "cuda"
    timer = Timer(
        device,
        rounds=args.rounds or (3 if cuda else 5),
        runs=args.runs,
        warmup=(10 if cuda else 2) if args.warmup is None else args.warmup,
        cold=args.cold_l2,
    )
    plan = Plan(timer, args.peers, args.mode, threads, not args.no_memory, args.data, args.limit)
    cases = cases_of(args)
    if any(case.name in GENERATED for case in cases):
        os.environ.setdefault("EDGELESS_GENERATE", "on")
        os.environ.setdefault("EDGELESS_COMPILE_WALKS", "now")  # timed code must not change between runs
    sizes = (args.features, args.heads, args.channels)
    steps = [Case("minibatch", name, "fp32", *sizes) for name in args.minibatch or ()]
    renewed = [Case("new graphs", name, "fp32", *sizes) for name in args.new_graphs or ()]
    sampling = minibatch.Sampling(args.batch_size, args.fanout)
    for case in cases:
        peers_of(case, args.peers, device)  # reports a wrong name before minutes of measuring
    if steps:
        minibatch.peers_of(args.peers)
    if renewed:
        new_graphs.peers_of(args.peers)
    if several := [*(args.scale_out or ()), *(args.ddp or ())]:
        scaleout.check(several, args.parts, device, args.carrier)
    named = {"--layer": args.layer or (), "--minibatch": args.minibatch or (), "--new-graphs": args.new_graphs or ()}
    typed = [f"{option} {name}" for option, names in named.items() for name in names if name in RELATIONAL]
    if args.training:
        training.peers_of(args.peers)
        training.check(args.training, args.graph, args.dtype)
    others = bool(cases or steps or renewed or several or args.shapes)
    for name in args.graph:
        if name not in training.DATASETS or others:
            check_name(name, args.data)
        if typed and not has_relations(name):
            raise UsageError(f"{typed[0]} needs a graph with relations, and --graph {name} has none")
    results, rows = [], Rows(args.json, setting_of(args, device))
    for name in args.graph:
        for model in args.training or ():
            made = None if name in training.DATASETS else load(name, args.data, device)
            for count, dtype in product(args.molecules if made is None else [None], args.dtype):
                trained = training.measure(name, made, model, count, dtype, args.peers, device, timer.rounds)
                training.print_steps(trained, device)
                rows.keep([asdict(row) for row in trained])
        if several:
            config = _of_processes(args, name, device)
            if args.scale_out:
                epochs = scaleout.measure({**config, "models": list(args.scale_out)})
                scaleout.print_epochs(epochs, device)
                rows.keep([asdict(epoch) for epoch in epochs])
            if args.ddp:
                measured = ddp.measure({**config, "models": list(args.ddp)})
                ddp.print_steps(measured, device)
                rows.keep([asdict(step) for step in measured])
        if not (cases or steps or renewed or args.shapes):
            continue
        graph = load(name, args.data, device)
        blocks = engines.blocks_of(graph, device) if engines.BLOCKS in (args.peers or ()) else {}
        for case in (*cases, *steps, *renewed):
            width = max(case.features, case.heads * case.channels)
            check_room(f"--graph {name}: a row of {width:,} numbers for every node", 8 * width * graph.num_nodes)
        for case in cases:
            found = measure(plan, graph, case)
            print_case(graph, case, found, device, baseline)
            results += found
            rows.keep([as_row(graph, result, baseline) | engines.of_row(result, blocks) for result in found])
        if args.shapes:
            cells = shapes.measure(graph, timer, args.mode)
            shapes.print_shapes(cells)
            rows.keep([shapes.as_row(cell) for cell in cells])
        for case in steps:
            measured = minibatch.measure(graph, case, args.peers, timer.rounds, sampling)
            minibatch.print_steps(graph, case, measured, sampling, device)
            rows.keep([asdict(step) for step in measured])
        for case in renewed:
            measured = new_graphs.measure(graph, case, args.peers, args.mode, timer.rounds)
            new_graphs.print_steps(graph, case, measured, device)
            rows.keep([asdict(step) for step in measured])
    engines.print_chosen(rows)
    if baseline is not None:
        columns = ["case", "peer", "", "geometric mean", "least", "graphs"]
        print()
        print_table(f"Ratio to the best peer ({baseline.origin})", columns, geometric_means(results, baseline))
    return 0


def _of_processes(args: argparse.Namespace, graph: str, device: torch.device) -> dict:
    """The configuration for the processes of ``--scale-out`` and ``--ddp``."""
    return {
        "graph": graph,
        "data": args.data,
        "device": device.type,
        "dtypes": args.dtype,
        "parts": args.parts,
        "method": args.partition,
        "carriers": args.carrier,
        "rounds": args.rounds or 8,
        "threads": 1 if device.type == "cpu" else args.threads,
        "batch_size": args.batch_size,
        "fanout": args.fanout,
    }


def as_row(graph: BenchGraph, result: Result, baseline: Optional[Baseline]) -> dict:
    """A result as a row of the JSON file."""
    row = {**asdict(result), "nodes": graph.num_nodes, "edges": graph.num_edges}
    figure = None if baseline is None else baseline.figure(graph.name, result.case, result.mode)
    if figure is not None:
        row["best_peer"] = asdict(figure)
    steps = planned(graph, result)
    if steps:
        row["planned_bytes"] = sum(step.bytes for step in steps)
        seconds = plans.seconds_at_roof(steps)
        row["roofline_ms"] = None if seconds is None else 1e3 * seconds
    return row
