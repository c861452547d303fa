"""The ``bench`` command: options, the loop over graphs and cases, the tables."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Optional

import torch

from edgeless.distributed.carriers import CARRIERS
from edgeless.tools.cli.console import print_table
from edgeless.tools.cli.devices import UsageError, pick_device
from edgeless.tools.cli.files import check_writable, writing
from edgeless.tools.cli.layers import EVERY_LAYER, GENERATED, LAYERS
from edgeless.tools.cli.options import MOST_THREADS, check_count, check_real, check_room
from edgeless.tools.cli.setting import setting_of
from edgeless.tools.timing import Timer

from . import ddp, engines, minibatch, new_graphs, plans, scaleout, shapes, training
from .baseline import H200, H200_RELATIONS, Baseline, geometric_means
from .graphs import HELP, MOLECULES, BenchGraph, check_name, has_relations, load
from .measure import Plan, Result, measure, peers_of
from .peers import LAYER_PEERS, OP_PEERS
from .report import planned, print_case
from .work import DTYPES, MODES, Case, op_case

OPS = ("gatv2_H2_D64", "gatv2_H8_D128", "gt_H4_D128")
ATTENTION = ("gatv2", "gat", "transformer")
DROPPING = ("gatv2", "gat", "rgat")  # layers that drop attention in both frameworks
RELATIONAL = tuple(name for name, layer in LAYERS.items() if layer.types is not None)
ONE_HEAD = {"features": 64, "heads": 1, "channels": 64}
SIZES = {"features": 128, "heads": 4, "channels": 32}
NEW_GRAPHS = {
    "graph": [name for name, count in MOLECULES.items() if count <= 64],
    "new_graphs": tuple(name for name in LAYERS if name != "gcn-cached"),  # which is for one graph
    "features": 64,
    "heads": 4,
    "channels": 16,
}
SUITES = {
    "cpu": {
        "graph": ["cora", "tolokers", "arxiv", "pattern"],
        "layer": (*ATTENTION, "agnn"),
    },
    "cpu-sums": {
        "graph": ["cora", "tolokers", "arxiv", "pattern"],
        "layer": ("gcn", "graphconv", "sage-mean", "sage-max"),
    },
    "overhead": {
        "graph": ["tiny"],
        "layer": (*ATTENTION, "agnn", "gcn", "graphconv", "sage-mean", "sage-max"),
        "peers": ["pyg", "dgl", "edgeless-pyg", "edgeless-dgl"],
    },
    "minibatch": {
        "graph": ["arxiv"],
        "minibatch": ("sage-mean", "sage-max", "gatv2"),
    },
    "molecules": {**NEW_GRAPHS, "threads": 1},
    "threads": {
        "graph": ["tolokers", "star"],
        "op": ["gatv2_H4_D32", "gat_H4_D32", "gt_H4_D32"],
        "peers": ["edgeless"],
        "compare_threads": [1, 2],
    },
    "h200": {
        "graph": ["tolokers", "arxiv", "city-roads-L", "twitch", "hm", "pokec"],
        "op": OPS,
        "dtype": ["fp32", "bf16"],
        "peers": ["edgeless"],
        "baseline": H200,
    },
    "h200-sums": {
        "graph": ["tolokers", "arxiv", "city-roads-L", "twitch", "hm", "pokec"],
        "op": ["min_F512", "spmm_none_F512", "spmm_both_F512"],
        "dtype": ["fp32", "bf16"],
        "peers": ["torch-csr", "edgeless", "edgeless-cusparse"],
        "baseline": H200,
    },
    "engines": {
        "graph": [*engines.GRAPHS, *(f"{name}:community" for name in engines.GRAPHS)],
        "op": engines.OPS,
        "dtype": ["fp32", "bf16"],
        "peers": [*engines.PEERS, engines.CHOSEN],
        "mode": ["forward_backward"],
        "rounds": 1,
        "warmup": 3,
        "runs": 5,
        "no_memory": True,
    },
    "shapes": {
        "graph": ["artnet", "city-reviews", "avazu"],
        "shapes": True,
    },
    "scale-out": {
        "graph": ["arxiv"],
        "scale_out": scaleout.MODELS,
    },
    "ddp": {
        "graph": ["arxiv"],
        "ddp": scaleout.MODELS,
    },
    "h200-scale-out": {
        "graph": ["products", "pokec"],
        "scale_out": scaleout.MODELS,
        "dtype": ["fp32", "bf16"],
        "carrier": ["all_to_all", "symmetric"],
    },
    "h200-layers": {
        "graph": ["tolokers", "arxiv", "cora", "pattern"],
        "layer": (*ATTENTION, "gcn", "sage-max", "graphconv"),
        "dtype": ["fp32", "bf16"],
        "peers": ["pyg", "pyg-compiled", "edgeless-pyg", "edgeless-pyg-graphed"],
        "mode": ["forward_backward"],
        "baseline": H200,
    },
    "small": {"graph": ["tiny"], "training": training.ON_A_GRAPH, "dtype": ["fp32", "bf16"]},
    "small-molecules": {
        "graph": list(training.DATASETS),
        "training": training.ON_MOLECULES,
        "molecules": [32, 128, 512],
    },
    "h200-molecules": {**NEW_GRAPHS, "peers": ["pyg", "edgeless-pyg"]},
    "generator": {
        "graph": ["hm", "pokec", "arxiv", "city-roads-L", "molecules-4096"],
        "layer": tuple(GENERATED),
        "width": [64, 128],
        "dtype": ["fp32", "bf16"],
        "peers": ["pyg", "pyg-compiled", "edgeless-pyg", "edgeless-pyg-graphed"],
        "rounds": 2,
        "warmup": 3,
        "runs": 5,
    },
    "generator-cpu": {
        "graph": ["tolokers"],
        "layer": tuple(GENERATED),
        "width": [64],
        "peers": ["pyg", "pyg-compiled", "edgeless-pyg"],
        "rounds": 3,
    },
    "relations": {
        "graph": ["aifb", "fb15k"],
        "layer": RELATIONAL,
        **ONE_HEAD,
        "peers": ["pyg", "dgl", "edgeless-pyg", "edgeless-dgl"],
        "rounds": 3,
        "limit": 180.0,
    },
    "h200-relations": {
        "graph": ["aifb", "mutag", "bgs", "am", "fb15k", "biokg", "mag", "wikikg2"],
        "layer": RELATIONAL,
        **ONE_HEAD,
        "dtype": ["fp32", "bf16"],
        "peers": ["pyg", "edgeless-pyg", "edgeless-pyg-graphed"],
        "baseline": H200_RELATIONS,
    },
}


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"takes whole numbers, as in 15,10, got {text!r}") from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of the command: first those of a user who asks what a layer or a graph gains."""
    parser.add_argument(
        "--layer",
        nargs="+",
        choices=EVERY_LAYER,
        metavar="NAME",
        help=f"whole layers, 128 -> 4 heads of 32 by default: {', '.join(EVERY_LAYER)}",
    )
    parser.add_argument("--graph", nargs="+", help=HELP)
    parser.add_argument("--data", type=Path, help="folder with ind.cora.* or NAME.npz somewhere in it")
    parser.add_argument("--features", type=int, help="input features of a layer (default: 128)")
    parser.add_argument("--heads", type=int, help="of a layer (default: 4)")
    parser.add_argument("--channels", type=int, help="of a layer, per head (default: 32)")
    parser.add_argument(
        "--width",
        nargs="+",
        type=int,
        help=f"numbers that the layers {', '.join(GENERATED)} take and give for a node (default: 64)",
    )
    parser.add_argument("--dropout", type=float, default=0.0, help=f"in attention, of --op and {', '.join(DROPPING)}")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, help="CPU threads (default: 2)")
    parser.add_argument(
        "--dtype",
        nargs="+",
        choices=DTYPES,
        metavar="NAME",
        help=f"{', '.join(DTYPES)}: of an op's inputs; a layer runs under autocast, or over relations in it",
    )
    known = sorted({*LAYER_PEERS, *OP_PEERS})
    parser.add_argument("--peers", nargs="+", choices=known, metavar="NAME", help=f"some of {', '.join(known)}")
    parser.add_argument(
        "--mode", nargs="+", choices=MODES, metavar="NAME", help=f"{' or '.join(MODES)} (default: both)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    _add_subjects(parser.add_argument_group("other subjects than whole layers on a graph"))
    _add_measuring(parser.add_argument_group("how it is measured"))


def _add_subjects(group) -> None:
    group.add_argument(
        "--op", nargs="+", help="bare aggregation: gatv2_H2_D64, gat_H4_D32, gt_H4_D128, spmm_both_F512, min_F512"
    )
    group.add_argument(
        "--minibatch",
        nargs="+",
        choices=LAYERS,
        metavar="LAYER",
        help="training two such layers on sampled neighbours, in float32",
    )
    group.add_argument(
        "--new-graphs",
        nargs="+",
        choices=LAYERS,
        metavar="LAYER",
        help="three such layers, in float32, on a graph that is new in every step, as a batch of molecules is",
    )
    trained = sorted({*training.ON_MOLECULES, *training.ON_A_GRAPH})
    group.add_argument(
        "--training",
        nargs="+",
        choices=trained,
        metavar="MODEL",
        help=f"steps with loss and Adam of {', '.join(trained)}: on molecules (--graph {' '.join(training.DATASETS)}), "
        "or on a graph",
    )
    group.add_argument(
        "--molecules", type=_numbers, metavar="32,128", help="molecules in a batch, for --training (default: 128)"
    )
    group.add_argument("--batch-size", type=int, default=1024, help="seeds of a mini-batch (default: 1024)")
    group.add_argument(
        "--fanout", type=_numbers, default=[15, 10], help="neighbours a node draws, from the seeds outwards (15,10)"
    )
    group.add_argument(
        "--shapes", action="store_const", const=True, help="bare attention over heads and head dims: which fall off"
    )
    group.add_argument(
        "--scale-out", nargs="+", metavar="MODEL", help="full-batch training on parts of the graph: sage-mean, gatv2"
    )
    group.add_argument("--ddp", nargs="+", metavar="MODEL", help="mini-batches with and without DDP, likewise")
    group.add_argument("--parts", type=int, default=2, help="processes, or GPUs, for these two (default: 2)")
    group.add_argument("--partition", choices=("random", "contiguous", "metis"), default="random")
    group.add_argument(
        "--carrier",
        nargs="+",
        choices=CARRIERS,
        metavar="NAME",
        help=f"{', '.join(CARRIERS)}: what brings rows of other processes to --scale-out",
    )


def _add_measuring(group) -> None:
    group.add_argument(
        "--suite",
        choices=SUITES,
        metavar="NAME",
        help=f"options of a set of figures in the documents: {', '.join(SUITES)}",
    )
    group.add_argument("--compare-threads", type=_numbers, metavar="1,2", help="time each peer with each of these")
    group.add_argument("--rounds", type=int, help="turns of each peer (default: 5 on the CPU, 3 on CUDA)")
    group.add_argument("--runs", type=int, help="runs of a turn on CUDA (default: 10)")
    group.add_argument("--warmup", type=int, help="runs before (default: 2 on the CPU, 10 on CUDA)")
    group.add_argument("--cold-l2", action="store_true", help="empty the L2 before every run on CUDA")
    group.add_argument(
        "--no-memory", action="store_const", const=True, help="leave out the peaks (a process for each peer)"
    )
    group.add_argument(
        "--limit",
        type=float,
        help="seconds that a peer may take for a few steps in a process of its own, on the CPU (default: any)",
    )
    group.add_argument("--baseline", type=Path, help="JSON with figures of the best peers; print our ratio to them")


def complete(args: argparse.Namespace) -> argparse.Namespace:
    """Fills what was not given from the suite, or else from the defaults."""
    for name, value in SUITES.get(args.suite, {}).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    kinds = (args.layer, args.op, args.minibatch, args.new_graphs, args.scale_out, args.ddp, args.training)
    if all(kind is None for kind in kinds) and not args.shapes:
        args.layer = ["gatv2"]
    for name, size in SIZES.items():
        if getattr(args, name) is None:
            setattr(args, name, size)
    args.graph = args.graph or ["arxiv"]
    args.runs = 10 if args.runs is None else args.runs
    args.threads = 2 if args.threads is None else args.threads
    args.dtype = args.dtype or ["fp32"]
    args.carrier = args.carrier or ["auto"]
    args.mode = args.mode or list(MODES)
    if len(args.fanout) != 2:
        raise UsageError(f"--fanout takes a number for each of the two layers, as in 15,10, got {args.fanout}")
    args.width = args.width or [64]
    for width in args.width:
        check_count("--width", width)
    for name in ("features", "heads", "channels", "batch_size", "rounds", "runs", "parts"):
        check_count(f"--{name.replace('_', '-')}", getattr(args, name))
    check_count("--warmup", args.warmup, least=0)
    check_count("--threads", args.threads, most=MOST_THREADS)
    for count in args.compare_threads or ():
        check_count("--compare-threads", count, most=MOST_THREADS)
    args.molecules = args.molecules or [128]
    for count in args.molecules:
        check_count("--molecules", count)
    for count in args.fanout:
        check_count("--fanout", count)
    check_real("--limit", args.limit, 0)
    check_real("--dropout", args.dropout, 0, 1)
    if args.dropout and (
        args.minibatch or args.new_graphs or args.scale_out or args.ddp or args.shapes or args.training
    ):
        raise UsageError("--dropout is for --op and --layer")
    if args.data is not None and not args.data.is_dir():
        raise UsageError(f"--data {args.data}: no such folder")
    if args.json is not None:
        check_writable("--json", args.json)
    return args


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
        os.environ.setdefault("EDGELESS_COMPILE_WALKS", "now")  # what is timed must not change in between
    sizes = (args.features, args.heads, args.channels)
    steps = [Case("minibatch", name, "fp32", *sizes) for name in args.minibatch or ()]
    renewed = [Case("new graphs", name, "fp32", *sizes) for name in args.new_graphs or ()]
    sampling = minibatch.Sampling(args.batch_size, args.fanout)
    for case in cases:
        peers_of(case, args.peers, device)  # a wrong name is told before minutes of measuring
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
    results, rows = [], []
    setting = setting_of(args, device)

    def keep(more: list[dict]) -> None:
        rows.extend(more)
        if args.json:  # after every case: a long run that breaks off leaves what it has
            with writing("--json", args.json) as file:
                file.write_text(json.dumps({"setting": setting, "results": rows}, indent=1))

    for name in args.graph:
        for model in args.training or ():
            made = None if name in training.DATASETS else load(name, args.data, device)
            for count, dtype in product(args.molecules if made is None else [None], args.dtype):
                trained = training.measure(name, made, model, count, dtype, args.peers, device, timer.rounds)
                training.print_steps(trained, device)
                keep([asdict(row) for row in trained])
        if several:
            config = _of_processes(args, name, device)
            if args.scale_out:
                epochs = scaleout.measure({**config, "models": list(args.scale_out)})
                scaleout.print_epochs(epochs, device)
                keep([asdict(epoch) for epoch in epochs])
            if args.ddp:
                measured = ddp.measure({**config, "models": list(args.ddp)})
                ddp.print_steps(measured, device)
                keep([asdict(step) for step in measured])
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
            keep([as_row(graph, result, baseline) | engines.of_row(result, blocks) for result in found])
        if args.shapes:
            cells = shapes.measure(graph, timer, args.mode)
            shapes.print_shapes(cells)
            keep([shapes.as_row(cell) for cell in cells])
        for case in steps:
            measured = minibatch.measure(graph, case, args.peers, timer.rounds, sampling)
            minibatch.print_steps(graph, case, measured, sampling, device)
            keep([asdict(step) for step in measured])
        for case in renewed:
            measured = new_graphs.measure(graph, case, args.peers, args.mode, timer.rounds)
            new_graphs.print_steps(graph, case, measured, device)
            keep([asdict(step) for step in measured])
    engines.print_chosen(rows)
    if baseline is not None:
        columns = ["case", "peer", "", "geometric mean", "least", "graphs"]
        print()
        print_table(f"Ratio to the best peer ({baseline.origin})", columns, geometric_means(results, baseline))
    return 0


def _of_processes(args: argparse.Namespace, graph: str, device: torch.device) -> dict:
    """What the processes of ``--scale-out`` and ``--ddp`` are told."""
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
    """A result as it stands in the JSON file."""
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
