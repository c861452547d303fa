"""The options of the ``bench`` command, their defaults, and the checks of their values."""

from __future__ import annotations

import argparse
from pathlib import Path

from edgeless.distributed.carriers import CARRIERS
from edgeless.tools.cli.devices import UsageError
from edgeless.tools.cli.files import check_writable
from edgeless.tools.cli.layers import EVERY_LAYER, GENERATED, LAYERS
from edgeless.tools.cli.options import MOST_THREADS, check_count, check_real

from . import training
from .graphs import HELP
from .peers import LAYER_PEERS, OP_PEERS
from .suites import SUITES
from .work import DTYPES, MODES

DROPPING = ("gatv2", "gat", "rgat")  # layers that drop attention in both frameworks
SIZES = {"features": 128, "heads": 4, "channels": 32}


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"takes whole numbers, as in 15,10, got {text!r}") from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of the command. The first are for users who want to know what a layer or a graph gains."""
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
    """Fills missing options from the suite, or else from the defaults, and checks all options."""
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
    check_real("--limit", args.limit)
    check_real("--dropout", args.dropout, 1)
    if args.dropout and (
        args.minibatch or args.new_graphs or args.scale_out or args.ddp or args.shapes or args.training
    ):
        raise UsageError("--dropout is for --op and --layer")
    if args.data is not None and not args.data.is_dir():
        raise UsageError(f"--data {args.data}: no such folder")
    if args.json is not None:
        check_writable("--json", args.json)
    return args
