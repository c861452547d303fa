"""The ``demo`` command: options, the two processes, the table and the plot."""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch

from edgeless.cli.child import run_child
from edgeless.cli.console import megabytes, milliseconds, plus_minus, print_table, progress, times
from edgeless.cli.devices import PACKAGES, UsageError, describe_device, pick_device, require
from edgeless.cli.files import check_writable, writing
from edgeless.cli.layers import LAYERS
from edgeless.cli.options import MOST_THREADS, check_count, check_real, check_room
from edgeless.cli.setting import setting_of

from . import parts
from .data import PLANETOID
from .plot import check_drawable, draw
from .train import load

# (hidden, heads, dropout, lr, weight decay, epochs); for the citation graphs those of the GAT paper, section 3.3.
DEFAULTS = {"community": (32, 4, 0.0, 0.02, 0.0, 30), "planetoid": (8, 8, 0.6, 0.005, 5e-4, 200)}
DEFAULTS["npz"] = DEFAULTS["community"]
MIN_NODES = 160  # ten for each class of the community graph


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of the command."""
    kinds = "; ".join(
        f"{name}: {' or '.join(dict.fromkeys((kind.pyg[0], kind.dgl[0])))}" for name, kind in LAYERS.items()
    )
    parser.add_argument(
        "--layer", choices=LAYERS, default="gatv2", metavar="NAME", help=f"in PyG or DGL (default: gatv2). {kinds}"
    )
    parser.add_argument("--framework", choices=PACKAGES, default="pyg")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 (default: auto)")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads (default: torch's choice)")
    graph = parser.add_argument_group("graph", "default: a seeded community graph made here, nothing is downloaded")
    graph.add_argument("--nodes", type=int, default=12_000, help="of the community graph (default: 12000)")
    graph.add_argument("--edges", type=int, default=1_000_000, help="of the community graph (default: 1000000)")
    graph.add_argument("--dataset", choices=PLANETOID, help="with --root DIR, as PyG's Planetoid lays it out")
    graph.add_argument("--root", type=Path, help="folder of the data set")
    graph.add_argument("--npz", type=Path, help="node_features, node_labels, edges, {train,val,test}_masks")
    split = parser.add_argument_group("parts", "torchrun --nproc-per-node P -m edgeless demo --parts P")
    split.add_argument("--parts", type=int, help="train on parts of the graph, full batch, one or more a process")
    split.add_argument("--partition", choices=("random", "contiguous", "metis"), default="random")
    model = parser.add_argument_group(
        "training", "default: 4 heads of 32; for Planetoid 8 heads of 8, as in the GAT paper"
    )
    for name, kind in OPTIONS.items():
        model.add_argument(f"--{name.replace('_', '-')}", type=kind, default=None)
    model.add_argument("--seed", type=int, default=0, help="of the parameters and the graph (default: 0)")
    model.add_argument("--seeds", type=int, default=1, help="train with that many seeds in a row (default: 1)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the table and the loss curves")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")


OPTIONS = {"hidden": int, "heads": int, "dropout": float, "lr": float, "weight_decay": float, "epochs": int}


def configure(args: argparse.Namespace) -> dict:
    """Turns the options into what the child processes take; raises UsageError for what does not fit together."""
    if bool(args.dataset) != bool(args.root):
        raise UsageError("--dataset and --root go together: --dataset cora --root DIR")
    if args.dataset and args.npz:
        raise UsageError("--dataset and --npz are two graphs; give one")
    if args.dataset:
        data = {"kind": "planetoid", "name": args.dataset, "root": str(args.root)}
    elif args.npz:
        data = {"kind": "npz", "file": str(args.npz)}
    else:
        options = {"num_nodes": args.nodes, "num_edges": args.edges, "seed": args.seed}
        data = {"kind": "community", "options": options}
    for name in ("epochs", "seeds", "hidden", "heads"):
        check_count(f"--{name}", getattr(args, name))
    check_count("--parts", args.parts)
    check_count("--threads", args.threads, most=MOST_THREADS)
    check_count("--edges", args.edges, least=2)  # an undirected one is two
    check_count("--nodes", args.nodes, least=MIN_NODES)
    check_count("--seed", args.seed, least=0)
    check_real("--dropout", args.dropout, 0, 1)
    check_real("--lr", args.lr, 0)
    check_real("--weight-decay", args.weight_decay, 0)
    config = {
        name: default if getattr(args, name) is None else getattr(args, name)
        for name, default in zip(OPTIONS, DEFAULTS[data["kind"]])
    }
    require(args.framework)
    device = pick_device(args.device)
    if args.plot:
        check_drawable(args.plot)
    for option, file in (("--plot", args.plot), ("--json", args.json)):
        if file:
            check_writable(option, file)
    if args.plot and args.json and args.plot.resolve() == args.json.resolve():
        raise UsageError(f"--plot and --json are the same file, {args.json}")
    if data["kind"] == "community":
        check_room(f"a graph of {args.nodes:,} nodes and {args.edges:,} edges", 3000 * args.nodes + 100 * args.edges)
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
        "seeds": args.seeds,
    }


def run(args: argparse.Namespace) -> int:
    """Trains both sides one after the other (never at once: they would slow each other) and prints the table."""
    config = configure(args)
    if args.parts is not None:
        parts.check(args.parts)
        return parts.run(args, config, side_names(config)["stock"])
    data = load(config["data"])  # a bad file is reported before anything starts
    width = config["heads"] * config["hidden"]
    check_room(f"a layer of {config['heads']:,} heads of {config['hidden']:,}", 8 * width * (width + len(data.x)))
    names = side_names(config)
    sides = {}
    with progress() as add:
        for side, name in names.items():
            advance = add(name, config["epochs"] * config["seeds"])

            def show(event: dict, advance=advance) -> None:
                advance(f"loss {event['loss']:.4f}  {milliseconds(1e3 * event['seconds'])} ms")

            sides[side] = run_child("edgeless.demo.train", {**config, "side": side}, show)
    size = f"{config['heads']} heads of {config['hidden']}" if LAYERS[config["layer"]].has_heads else f"width {width}"
    title = (
        f"{data.name}: {len(data.x):,} nodes, {data.edge_index.shape[1]:,} edges, {data.x.shape[1]} features; "
        f"two layers, {size}, {config['epochs']} epochs; "
        f"{describe_device(torch.device(config['device']))}"
    )
    print_table(title, ["", *names.values(), "ratio"], summary(sides["stock"], sides["edgeless"]), notes(config))
    if args.json:
        setting = setting_of(args, torch.device(config["device"]))
        with writing("--json", args.json):
            args.json.write_text(json.dumps({"setting": setting, "title": title, "config": config, **sides}, indent=1))
    if args.plot:
        with writing("--plot", args.plot):
            draw(args.plot, title, names, sides)
        print(f"drawn in {args.plot}")
    return 0


def side_names(config: dict) -> dict[str, str]:
    """Side -> the heading of its column."""
    layer, _ = getattr(LAYERS[config["layer"]], config["framework"])
    stock = {"pyg": "PyG", "dgl": "DGL"}[config["framework"]]
    return {"stock": f"{stock} {layer}", "edgeless": f"edgeless {layer}"}


def _spread(values: list[float]) -> str:
    text = f"{100 * statistics.mean(values):.1f} %"
    return text if len(values) == 1 else f"{text} {plus_minus(f' {100 * statistics.stdev(values):.1f}')}"


def _change(stock: float, ours: float) -> str:
    if min(stock, ours) <= 0:
        return ""
    return f"{times(stock / ours)} less" if ours <= stock else f"{times(ours / stock)} more"


def summary(stock: dict, ours: dict) -> list[list[str]]:
    """The rows of the table."""
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
    for label, name in (("test accuracy", "test"), ("validation accuracy", "val")):
        a, b = ([run[name] for run in side["runs"]] for side in (stock, ours))
        difference = round(100 * (statistics.mean(b) - statistics.mean(a)), 1) + 0.0  # no -0.0
        rows.append([label, _spread(a), _spread(b), f"{difference:+.1f} points"])
    a, b = ([run["losses"][-1] for run in side["runs"]] for side in (stock, ours))
    rows.append(["training loss, last epoch", f"{statistics.mean(a):.4f}", f"{statistics.mean(b):.4f}", ""])
    return rows


def notes(config: dict) -> list[str]:
    """What a reader needs to judge the table."""
    lines = [
        "Same seed, graph and parameters; each side ran alone in a process of its own.",
        "Memory is counted above the state before the first epoch; accuracy is that of the last epoch.",
    ]
    if config["dropout"]:
        lines.append(
            "The two sides draw different dropout masks, so the accuracies agree only within the spread of seeds."
        )
    return lines
