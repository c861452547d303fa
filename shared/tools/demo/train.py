"""One side of the demo: trains in a process of its own and sends its measurements to the parent."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Union

import torch

import edgeless
from edgeless.tools.cli.child import configuration, emit
from edgeless.tools.cli.memory import peak_memory

from .data import NodeData, community_graph, read_npz, read_planetoid
from .molecules import MoleculeData, Molecules, molecules
from .relational import LinkData, read_wn18rr, relational_graph
from .tasks import Classes, Links

TASKS = {NodeData: Classes, LinkData: Links, MoleculeData: Molecules}
MADE = {"community": community_graph, "relational": relational_graph, "molecules": molecules}
Task = Union[Classes, Links, Molecules]


def load(source: dict) -> Union[NodeData, LinkData, MoleculeData]:
    """The graph that the command line chose."""
    kind = source["kind"]
    if kind == "planetoid":
        return read_planetoid(Path(source["root"]), source["name"])
    if kind == "wn18rr":
        return read_wn18rr(Path(source["root"]))
    if kind == "npz":
        return read_npz(Path(source["file"]))
    return MADE[kind](**source["options"])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def run(config: dict) -> None:
    """Trains ``config["seeds"]`` times and emits an ``epoch`` event per epoch and one ``result``."""
    torch.set_num_threads(config["threads"])
    device = torch.device(config["device"])
    side = config["side"]
    data = load(config["data"])
    task = TASKS[type(data)](data, config, device)

    def new(task: Task, seed: int):
        torch.manual_seed(seed)
        net = task.net()
        return net, torch.optim.Adam(net.parameters(), lr=config["lr"], weight_decay=config["weight_decay"])

    # Loading at the first step (the optimizer's imports, thread pools, the kernels of a GPU) is no part of the
    # training: a step on a graph of three nodes does it before.
    toy = task.toy()
    toy.epoch(*new(toy, 0), 0)

    runs, seconds, peak = [], [], 0
    with edgeless.backend("fused" if side == "edgeless" else "auto"):  # so that no upstream layer runs under our name
        for seed in range(config["seed"], config["seed"] + config["seeds"]):
            net, optimizer = new(task, seed)
            losses = []
            with peak_memory(device) as measured:
                for epoch in range(config["epochs"]):
                    start = time.perf_counter()
                    losses.append(task.epoch(net, optimizer, epoch))
                    _synchronize(device)
                    seconds.append(time.perf_counter() - start)
                    emit("epoch", loss=losses[-1], seconds=seconds[-1])
            peak = max(peak, measured.bytes)
            net.eval()
            with torch.no_grad():
                scores = task.scores(net)
            runs.append({"seed": seed, "losses": losses, **scores})
    emit("result", runs=runs, seconds=seconds, peak_bytes=peak, layer=type(net.conv1).__module__)


if __name__ == "__main__":
    run(configuration())
