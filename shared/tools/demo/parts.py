"""``torchrun --nproc-per-node P -m edgeless demo --parts P``: the training of the demo on parts of its graph."""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import edgeless
import edgeless.distributed as ed
from edgeless.graph.handle import Graph
from edgeless.tools.cli.child import ChildError, run_child
from edgeless.tools.cli.console import megabytes, milliseconds, print_table, progress
from edgeless.tools.cli.devices import UsageError, describe_device
from edgeless.tools.cli.layers import LAYERS
from edgeless.tools.cli.memory import peak_memory

from .data import NodeData
from .models import Net
from .train import load

TIMEOUT = 3600.0  # seconds; other processes wait while the first one trains the upstream layers alone


def check(parts: int) -> None:
    """Raises UsageError unless the processes that torchrun started can share this number of parts."""
    processes = int(os.environ.get("WORLD_SIZE", 1))
    if parts % processes:
        raise UsageError(f"--parts {parts}: the {processes} processes must divide it")
    if processes == 1 and parts > 1:
        raise UsageError(f"--parts {parts}: start it with: torchrun --nproc-per-node {parts} -m edgeless demo ...")


def run(args: argparse.Namespace, config: dict, stock_name: str) -> int:
    """Trains on all processes, the upstream layers before that on the first one alone; the first prints the table."""
    device = ed.init("cuda" if config["device"].startswith("cuda") else "cpu", timeout=TIMEOUT)
    if dist.is_initialized() and device.type == "cpu" and args.threads is None:
        torch.set_num_threads(max(1, config["threads"] // dist.get_world_size()))
    first = not dist.is_initialized() or dist.get_rank() == 0
    stock, columns = None, ["", f"edgeless, {args.parts} parts"]
    with tempfile.TemporaryDirectory() as folder:
        where = [folder]
        if first:
            data = load(config["data"])
            _partition(data, args, config, f"{folder}/parts")
            stock = _stock(config, stock_name)
        if dist.is_initialized():
            dist.broadcast_object_list(where)
        dg = ed.load(f"{where[0]}/parts", device, carrier=args.carrier)
        found = _train(dg, config, device)
    if dist.is_initialized():
        dist.destroy_process_group()
    if not first:
        return 0
    title = f"{data.name}: {dg.total_nodes:,} nodes, {dg.total_edges:,} edges; {describe_device(device)}"
    rows = [
        ["time of an epoch, median", f"{milliseconds(1e3 * statistics.median(found['seconds']))} ms"],
        ["peak memory of training, largest of a process", megabytes(found["peak_bytes"])],
        ["test accuracy", f"{100 * found['test']:.1f} %"],
        ["training loss, last epoch", f"{found['losses'][-1]:.4f}"],
        ["nodes of a process, and halo", f"{found['own']:,} and {found['halo']:,}"],
        ["carrier of the halo's rows", dg.carrier if dg.size > 1 else "none"],
    ]
    notes = [f"Parts by --partition {args.partition}. All processes share this machine's cores or have a GPU each."]
    if stock is not None:
        columns.insert(1, f"{stock_name}, one process")
        beside = (
            f"{milliseconds(1e3 * statistics.median(stock['seconds']))} ms",
            megabytes(stock["peak_bytes"]),
            f"{100 * stock['runs'][0]['test']:.1f} %",
            f"{stock['runs'][0]['losses'][-1]:.4f}",
            f"{dg.total_nodes:,}",
            "",
        )
        rows = [[name, value, ours] for (name, ours), value in zip(rows, beside)]
    else:
        notes.append(f"{stock_name} did not fit on one process.")
    print_table(title, columns, rows, notes)
    return 0


def _partition(data: NodeData, args: argparse.Namespace, config: dict, folder: str) -> None:
    edge_index = data.edge_index
    if config["framework"] == "dgl" and LAYERS[config["layer"]].self_loops:  # PyG's layer adds them itself
        edge_index = Graph.from_edge_index(edge_index, len(data.x), len(data.x)).with_self_loops().edge_index()
    ed.partition(edge_index, len(data.x), args.parts, folder, method=args.partition, node_data=_node_data(data))


def _node_data(data: NodeData) -> dict:
    return {name: getattr(data, name) for name in ("x", "y", "train", "val", "test")}


def _stock(config: dict, name: str):
    """The result of the upstream layers on one process; None if they run out of memory."""
    with progress() as add:
        advance = add(name, config["epochs"])
        try:
            return run_child(
                "edgeless.tools.demo.train",
                {**config, "seeds": 1, "side": "stock"},
                lambda event: advance(f"loss {event['loss']:.4f}  {milliseconds(1e3 * event['seconds'])} ms"),
            )
        except ChildError as error:
            if "out of memory" not in str(error).lower():
                raise
            return None


def _train(dg: ed.DistGraph, config: dict, device: torch.device) -> dict:
    torch.manual_seed(config["seed"])
    classes = int(ed.gather(dg.ndata["y"], dg).max()) + 1
    x, y = dg.ndata["x"], dg.ndata["y"]
    sizes = {name: config[name] for name in ("hidden", "heads", "dropout")}
    net = Net(config["framework"], "edgeless", config["layer"], features=x.size(1), classes=classes, **sizes)
    net = model = ed.convert_batchnorm(net.to(device))
    if dg.size > 1:
        model = DistributedDataParallel(net, static_graph=True, gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(net.parameters(), lr=config["lr"], weight_decay=config["weight_decay"])
    losses, seconds = [], []
    with edgeless.backend("fused"), peak_memory(device) as peak:
        for _ in range(config["epochs"]):
            begun = time.perf_counter()
            net.train()
            optimizer.zero_grad(set_to_none=True)
            loss = ed.mean(F.cross_entropy(model(x, dg), y, reduction="none"), dg.ndata["train"], dg)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - begun)
    net.eval()
    with torch.no_grad(), edgeless.backend("fused"):
        right = (net(x, dg).argmax(1) == y).float()
    said = [(peak.bytes + dg.halo.carrier.bytes, dg.num_own, dg.num_halo)]
    if dg.size > 1:
        said *= dg.size
        dist.all_gather_object(said, said[dg.rank])
    peaks, own, halo = zip(*said)
    return {
        "losses": losses,
        "seconds": seconds,
        "test": ed.mean(right, dg.ndata["test"], dg).item(),
        "peak_bytes": max(peaks),
        "own": max(own),
        "halo": max(halo),
    }
