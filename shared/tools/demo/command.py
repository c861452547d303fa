"""The ``demo`` command: options, the two processes, the table and the plot."""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path

import torch

from edgeless.distributed.carriers import CARRIERS
from edgeless.tools.cli.child import run_child
from edgeless.tools.cli.console import megabytes, milliseconds, plus_minus, print_table, progress, times
from edgeless.tools.cli.devices import PACKAGES, UsageError, describe_device, pick_device, require
from edgeless.tools.cli.files import check_writable, writing
from edgeless.tools.cli.layers import DEMO_LAYERS, GENERATED
from edgeless.tools.cli.options import MOST_THREADS, check_count, check_real, check_room
from edgeless.tools.cli.setting import setting_of
from edgeless.tools.timing import Timing

from . import parts
from .data import PLANETOID
from .plot import check_drawable, draw
from .train import load

# (hidden, heads, dropout, lr, weight decay, epochs); for the citation graphs those of the GAT paper, section 3.3.
DEFAULTS = {"community": (32, 4, 0.0, 0.02, 0.0, 30), "planetoid": (8, 8, 0.6, 0.005, 5e-4, 200)}
DEFAULTS["npz"] = DEFAULTS["community"]
DEFAULTS["relational"] = (8, 4, 0.0, 0.01, 0.0, 20)
DEFAULTS["wn18rr"] = (16, 4, 0.0, 0.01, 0.0, 10)
DEFAULTS["molecules"] = (16, 4, 0.0, 0.005, 0.0, 10)
SIZES = {"community": (12_000, 1_000_000), "relational": (6_000, 60_000)}  # nodes, edges
OWN_EDGES = 200_000  # edges for a user's message function, for which upstream layers keep a dozen edge tensors
MOLECULES = 2_000
MIN_MOLECULES = 8
MIN_NODES = 160  # ten per class of the community graph
SEEDS_WITH_DROPOUT = 3
BUSY = 0.1  # fraction of the median; a wider spread of epochs' times is reported
ACCURACIES = (("test accuracy", "test"), ("validation accuracy", "val"))
RANKS = (("test MRR (filtered)", "test"), ("test hits@10", "hits"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of the command."""
    kinds = "; ".join(f"{name}: {' or '.join(kind.classes)}" for name, kind in DEMO_LAYERS.items())
    parser.add_argument(
        "--layer", choices=DEMO_LAYERS, default="gatv2", metavar="NAME", help=f"in PyG or DGL (default: gatv2). {kinds}"
    )
    parser.add_argument("--framework", choices=PACKAGES, default="pyg")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 (default: auto)")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads (default: torch's choice)")
    graph = parser.add_argument_group(
        "graph",
        "default: a seeded graph made here, nothing is downloaded: of communities, or with relations for a layer over "
        "relations",
    )
    graph.add_argument("--nodes", type=int, help="of the graph that is made (default: 12000, with relations 6000)")
    graph.add_argument(
        "--edges",
        type=int,
        help="of the graph that is made (default: 1000000, with relations 60000, own-attention 200000)",
    )
    graph.add_argument(
        "--molecules",
        type=int,
        nargs="?",
        const=MOLECULES,
        metavar="COUNT",
        help="small graphs in batches in place of one graph, with PyG: that many are made (default: 2000)",
    )
    graph.add_argument(
        "--dataset",
        choices=(*PLANETOID, "wn18rr"),
        help="with --root DIR, as PyG's Planetoid lays it out; wn18rr: which links hold, for a layer over relations",
    )
    graph.add_argument("--root", type=Path, help="folder of the data set")
    graph.add_argument(
        "--npz",
        type=Path,
        help="node_features, node_labels, edges [E, 2], read in both directions, {train,val,test}_masks; or PyG's x, "
        "y, edge_index [2, E], read as it stands, {train,val,test}_mask",
    )
    split = parser.add_argument_group("parts", "torchrun --nproc-per-node P -m edgeless demo --parts P")
    split.add_argument("--parts", type=int, help="train on parts of the graph, full batch, one or more a process")
    split.add_argument("--partition", choices=("random", "contiguous", "metis"), default="random")
    split.add_argument("--carrier", choices=CARRIERS, default="auto", help="of rows between processes (default: auto)")
    model = parser.add_argument_group(
        "training", "default: 4 heads of 32; for Planetoid 8 heads of 8, as in the GAT paper"
    )
    for name, kind in OPTIONS.items():
        model.add_argument(f"--{name.replace('_', '-')}", type=kind, default=None)
    model.add_argument("--seed", type=int, default=0, help="of the parameters and the graph (default: 0)")
    model.add_argument(
        "--seeds", type=int, help="train with that many seeds in a row (default: 1, with dropout 3: one is noise)"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the table and the loss curves")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")


OPTIONS = {"hidden": int, "heads": int, "dropout": float, "lr": float, "weight_decay": float, "epochs": int}


def _data(args: argparse.Namespace) -> dict:
    """The source of the graph."""
    typed = DEMO_LAYERS[args.layer].types is not None
    if args.parts is not None and (typed or args.layer in GENERATED):
        kind = "over relations" if typed else "whose messages are generated"
        raise UsageError(f"--parts {args.parts}: --layer {args.layer}, {kind}, does not run on parts of a graph")
    if args.molecules is not None:
        return _molecules(args)
    if args.dataset == "wn18rr":
        if not typed:
            names = ", ".join(name for name, layer in DEMO_LAYERS.items() if layer.types is not None)
            raise UsageError(f"--dataset wn18rr is for a layer over relations ({names}), got --layer {args.layer}")
        return {"kind": "wn18rr", "root": str(args.root)}
    if typed and (args.dataset or args.npz):
        option = "--dataset" if args.dataset else "--npz"
        raise UsageError(f"--layer {args.layer} needs a graph with relations, and that of {option} has none")
    if args.dataset:
        return {"kind": "planetoid", "name": args.dataset, "root": str(args.root)}
    if args.npz:
        return {"kind": "npz", "file": str(args.npz)}
    kind = "relational" if typed else "community"
    sizes = (SIZES[kind][0], OWN_EDGES) if args.layer in GENERATED else SIZES[kind]
    nodes, edges = (given or default for given, default in zip((args.nodes, args.edges), sizes))
    return {"kind": kind, "options": {"num_nodes": nodes, "num_edges": edges, "seed": args.seed}}


def _molecules(args: argparse.Namespace) -> dict:
    """Checks the options for small graphs."""
    check_count("--molecules", args.molecules, least=MIN_MOLECULES)
    others = {"--dataset": args.dataset, "--npz": args.npz, "--nodes": args.nodes, "--edges": args.edges}
    for option, value in {**others, "--parts": args.parts}.items():
        if value is not None:
            raise UsageError(f"--molecules and {option} do not go together")
    if args.framework != "pyg":
        raise UsageError(f"--molecules needs --framework pyg, got {args.framework}")
    if DEMO_LAYERS[args.layer].types is not None or args.layer in GENERATED or args.layer == "gcn-cached":
        raise UsageError(f"--molecules is for layers over one edge type and new graphs, got --layer {args.layer}")
    return {"kind": "molecules", "options": {"count": args.molecules, "seed": args.seed}}


def configure(args: argparse.Namespace) -> dict:
    """Makes the configuration of the child processes; raises UsageError for options that do not fit together."""
    if bool(args.dataset) != bool(args.root):
        raise UsageError("--dataset and --root go together: --dataset cora --root DIR")
    if args.dataset and args.npz:
        raise UsageError("--dataset and --npz are two graphs; give one")
    data = _data(args)
    for name in ("epochs", "seeds", "hidden", "heads"):
        check_count(f"--{name}", getattr(args, name))
    check_count("--parts", args.parts)
    check_count("--threads", args.threads, most=MOST_THREADS)
    check_count("--edges", args.edges, least=2)  # an undirected edge counts as two
    check_count("--nodes", args.nodes, least=MIN_NODES)
    check_count("--seed", args.seed, least=0)
    check_real("--dropout", args.dropout, 1)
    check_real("--lr", args.lr)
    check_real("--weight-decay", args.weight_decay)
    config = {
        name: default if getattr(args, name) is None else getattr(args, name)
        for name, default in zip(OPTIONS, DEFAULTS[data["kind"]])
    }
    seeds = args.seeds or (SEEDS_WITH_DROPOUT if config["dropout"] else 1)
    require(args.framework)
    if getattr(DEMO_LAYERS[args.layer], args.framework) is None:
        raise UsageError(f"--layer {args.layer}: {PACKAGES[args.framework][1]} has no such layer")
    device = pick_device(args.device)
    if args.plot:
        check_drawable(args.plot)
    for option, file in (("--plot", args.plot), ("--json", args.json)):
        if file:
            check_writable(option, file)
    if args.plot and args.json and args.plot.resolve() == args.json.resolve():
        raise UsageError(f"--plot and --json are the same file, {args.json}")
    if data["kind"] in SIZES:
        nodes, edges = data["options"]["num_nodes"], data["options"]["num_edges"]
        check_room(f"a graph of {nodes:,} nodes and {edges:,} edges", 3000 * nodes + 100 * edges)
    if args.threads:
        torch.set_num_threads(args.threads)
    return {
        **config,
        "data": data,
        "layer": args.layer,
        "framework": args.framework,
        "device": str(device),
        "threads": torch.get_num_threads(),
        "seed": args.seed,
        "seeds": seeds,
    }


def run(args: argparse.Namespace) -> int:
    """Trains both sides one after the other (never at once: they would slow each other) and prints the table."""
    config = configure(args)
    if args.parts is not None:
        parts.check(args.parts)
        return parts.run(args, config, side_names(config)["stock"])
    if config["layer"] in GENERATED:  # generated from the first step on, so that all steps are alike
        os.environ.setdefault("EDGELESS_GENERATE", "on")
        os.environ.setdefault("EDGELESS_COMPILE_WALKS", "now")
    data = load(config["data"])  # a bad file is reported before anything starts
    width = config["heads"] * config["hidden"]
    check_room(f"a layer of {config['heads']:,} heads of {config['hidden']:,}", 8 * width * (width + data.num_nodes))
    names = side_names(config)
    sides = {}
    with progress() as add:
        for side, name in names.items():
            advance = add(name, config["epochs"] * config["seeds"])

            def show(event: dict, advance=advance) -> None:
                advance(f"loss {event['loss']:.4f}  {milliseconds(1e3 * event['seconds'])} ms")

            sides[side] = run_child("edgeless.tools.demo.train", {**config, "side": side}, show)
    size = (
        f"{config['heads']} heads of {config['hidden']}" if DEMO_LAYERS[config["layer"]].has_heads else f"width {width}"
    )
    title = (
        f"{data.name}: {data.size}; two layers, {size}, {config['epochs']} epochs; "
        f"{describe_device(torch.device(config['device']))}"
    )
    rows = summary(sides["stock"], sides["edgeless"], RANKS if config["data"]["kind"] == "wn18rr" else ACCURACIES)
    print_table(title, ["", *names.values(), "ratio"], rows, notes(config, sides))
    if args.json:
        setting = setting_of(args, torch.device(config["device"]))
        with writing("--json", args.json) as file:
            file.write_text(json.dumps({"setting": setting, "title": title, "config": config, **sides}, indent=1))
    if args.plot:
        with writing("--plot", args.plot) as file:
            draw(file, title, names, sides)
        print(f"drawn in {args.plot}")
    return 0


def side_names(config: dict) -> dict[str, str]:
    """Side -> the heading of its column."""
    layer, _ = getattr(DEMO_LAYERS[config["layer"]], config["framework"])
    stock = {"pyg": "PyG", "dgl": "DGL"}[config["framework"]]
    if config["layer"] in GENERATED:  # a user's class
        layer = DEMO_LAYERS[config["layer"]].baseline
    return {"stock": f"{stock} {layer}", "edgeless": f"edgeless {layer}"}


def _spread(values: list[float]) -> str:
    text = f"{100 * statistics.mean(values):.1f} %"
    return text if len(values) == 1 else f"{text} {plus_minus(f' {100 * statistics.stdev(values):.1f}')}"


def _change(stock: float, ours: float) -> str:
    if min(stock, ours) <= 0:
        return ""
    return f"{times(stock / ours)} less" if ours <= stock else f"{times(ours / stock)} more"


def summary(stock: dict, ours: dict, scores: tuple[tuple[str, str], ...]) -> list[list[str]]:
    """The rows of the table; ``scores`` are (heading, name) of scores that are fractions."""
    rows = []
    for label, read, show in (
        (
            "time of an epoch, median",
            lambda s: 1e3 * statistics.median(s["seconds"]),
            lambda v: f"{milliseconds(v)} ms",
        ),
        ("peak memory of training", lambda s: s["peak_bytes"], megabytes),
    ):
        a, b = read(stock), read(ours)
        rows.append([label, show(a), show(b), _change(a, b)])
    for label, name in scores:
        a, b = ([run[name] for run in side["runs"]] for side in (stock, ours))
        difference = round(100 * (statistics.mean(b) - statistics.mean(a)), 1) + 0.0  # no -0.0
        rows.append([label, _spread(a), _spread(b), f"{difference:+.1f} points"])
    a, b = ([run["losses"][-1] for run in side["runs"]] for side in (stock, ours))
    rows.append(["training loss, last epoch", f"{statistics.mean(a):.4f}", f"{statistics.mean(b):.4f}", ""])
    return rows


def notes(config: dict, sides: dict[str, dict]) -> list[str]:
    """The notes that a reader needs to judge the table."""
    lines = [
        "Same seed, graph and parameters; each side ran alone in a process of its own.",
        "Memory is counted above the state before the first epoch; scores are those of the last epoch.",
    ]
    if config["dropout"]:
        lines.append(
            "The two sides draw different dropout masks, so the accuracies agree only within the spread of seeds."
        )
    if config["layer"] in GENERATED:
        lines.append("Messages are generated (EDGELESS_GENERATE=on); their code is compiled before the first epoch.")
    if config["data"]["kind"] == "molecules":
        lines.append("edgeless has batches of its PaddedLoader, and replays captured steps where there is a GPU.")
    spread = max(Timing([1e3 * seconds for seconds in side["seconds"]]).spread for side in sides.values())
    if spread > BUSY:
        wide = plus_minus(f" {100 * spread:.0f} %")
        lines.append(f"The times of epochs spread by {wide}: the machine may be busy with something else.")
    return lines
