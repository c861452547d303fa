"""One side of the demo: trains in a process of its own and sends what it measured to the parent."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import edgeless
from edgeless.cli.child import emit
from edgeless.cli.layers import LAYERS, make_graph
from edgeless.cli.memory import peak_memory

from .data import NodeData, community_graph, read_npz, read_planetoid
from .models import Net


def load(source: dict) -> NodeData:
    """The graph that the command line chose."""
    if source["kind"] == "planetoid":
        return read_planetoid(Path(source["root"]), source["name"])
    if source["kind"] == "npz":
        return read_npz(Path(source["file"]))
    return community_graph(**source["options"])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def train_step(net, optimizer, x, graph, y, train) -> float:
    """One epoch of full-batch training; returns the loss."""
    net.train()
    optimizer.zero_grad(set_to_none=True)
    loss = F.cross_entropy(net(x, graph)[train], y[train])
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def accuracy(net, x, graph, y, mask) -> float:
    """Share of the nodes in mask that are classified right."""
    net.eval()
    return (net(x, graph)[mask].argmax(1) == y[mask]).float().mean().item()


def run(config: dict) -> None:
    """Trains ``config["seeds"]`` times and emits an ``epoch`` event per epoch and one ``result``."""
    torch.set_num_threads(config["threads"])
    device = torch.device(config["device"])
    framework, side, layer = config["framework"], config["side"], config["layer"]
    data = load(config["data"])
    x, y, train, val, test = (t.to(device) for t in (data.x, data.y, data.train, data.val, data.test))

    def new(features: int, seed: int):
        torch.manual_seed(seed)
        sizes = {name: config[name] for name in ("hidden", "heads", "dropout")}
        net = Net(framework, side, layer, features=features, classes=data.num_classes, **sizes).to(device)
        return net, torch.optim.Adam(net.parameters(), lr=config["lr"], weight_decay=config["weight_decay"])

    # What loads at the first step (the optimizer's imports, thread pools, the kernels of a GPU) belongs to neither
    # side's training: one step on a graph of three nodes brings it in.
    loops = LAYERS[layer].self_loops
    small = make_graph(framework, torch.tensor([[0, 1, 2], [1, 2, 0]], device=device), 3, loops)
    train_step(
        *new(4, 0), torch.rand(3, 4, device=device), small, y[:3], torch.ones(3, dtype=torch.bool, device=device)
    )

    graph = make_graph(framework, data.edge_index.to(device), len(x), loops)
    runs, seconds, peak = [], [], 0
    with edgeless.backend("fused" if side == "edgeless" else "auto"):  # never a stock layer under our name
        for seed in range(config["seed"], config["seed"] + config["seeds"]):
            net, optimizer = new(x.shape[1], seed)
            losses = []
            with peak_memory(device) as measured:
                for _ in range(config["epochs"]):
                    start = time.perf_counter()
                    losses.append(train_step(net, optimizer, x, graph, y, train))
                    _synchronize(device)
                    seconds.append(time.perf_counter() - start)
                    emit("epoch", loss=losses[-1], seconds=seconds[-1])
            peak = max(peak, measured.bytes)
            scores = {name: accuracy(net, x, graph, y, mask) for name, mask in (("val", val), ("test", test))}
            runs.append({"seed": seed, "losses": losses, **scores})
    emit("result", runs=runs, seconds=seconds, peak_bytes=peak, layer=type(net.conv1).__module__)


if __name__ == "__main__":
    run(json.load(sys.stdin))
