"""What DDP costs in training on mini-batches: a step with it, and the same step of the same process without it.

Each process has sampled its batches beforehand, by uniform draws in plain torch: sampling is the frameworks' own.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from edgeless.backends import backend
from edgeless.cli.console import milliseconds, print_table
from edgeless.cli.devices import describe_device
from edgeless.cli.layers import make_layer
from edgeless.graph import Graph

from . import processes
from .graphs import load

WIDTH, CLASSES, HEADS = 128, 40, 4
BATCHES, WARMUP_PASSES = 8, 1


@dataclass
class DDPStep:
    """Medians in milliseconds; ``efficiency`` is ``alone_ms / ddp_ms``."""

    graph: str
    model: str
    processes: int
    seeds: int
    alone_ms: float
    ddp_ms: float
    efficiency: float
    same_parameters: bool


class Net(nn.Module):
    """Two layers, as NeighborLoader's batches want them."""

    def __init__(self, model: str):
        super().__init__()
        self.conv1 = make_layer(model, "pyg", "edgeless", WIDTH, HEADS, WIDTH // HEADS)
        self.conv2 = make_layer(model, "pyg", "edgeless", WIDTH, HEADS, CLASSES // HEADS)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv2(self.conv1(x, edge_index).relu(), edge_index)


def sample(graph: Graph, seeds: Tensor, fanout) -> tuple[Tensor, Tensor]:
    """(ids of the nodes, seeds first; edges ``[2, E]`` among them) of uniform draws with replacement."""
    indptr, indices, _ = graph.csr
    nodes, edges, frontier = seeds, [], seeds
    for count in fanout:
        begin, degree = indptr[frontier].long(), indptr[frontier + 1].long() - indptr[frontier].long()
        drawn = (torch.rand(len(frontier), count, device=seeds.device) * degree.unsqueeze(1)).long()
        has = (degree > 0).unsqueeze(1).expand_as(drawn)
        source = indices[(begin.unsqueeze(1) + drawn)[has]].long()
        edges.append(torch.stack((source, frontier.unsqueeze(1).expand_as(drawn)[has])))
        known = torch.zeros(graph.num_src, dtype=torch.bool, device=seeds.device)
        known[nodes] = True
        frontier = source[~known[source]].unique()
        nodes = torch.cat((nodes, frontier))
    place = torch.empty(graph.num_src, dtype=torch.int64, device=seeds.device)
    place[nodes] = torch.arange(len(nodes), device=seeds.device)
    return nodes, place[torch.cat(edges, dim=1)]


def measure(config: dict) -> list[DDPStep]:
    """Config as of :func:`edgeless.bench.scaleout.measure`, with batch_size and fanout."""
    return processes.run(_work, config["parts"], config)


def _work(rank, size, device, config):
    whole = load(config["graph"], config["data"], device)
    graph = Graph.from_edge_index(whole.edge_index, whole.num_nodes, whole.num_nodes)
    torch.manual_seed(rank)
    batches = []
    for _ in range(BATCHES):
        seeds = torch.randperm(whole.num_nodes, device=device)[: config["batch_size"]]
        nodes, edge_index = sample(graph, seeds, config["fanout"])
        x, y = (
            torch.randn(len(nodes), WIDTH, device=device),
            torch.randint(CLASSES, (len(seeds),), device=device),
        )
        batches.append((x, edge_index, y))
    with backend("fused"):
        for model in config["models"]:
            alone = _steps(Net(model).to(device), batches, device, config["rounds"])
            torch.manual_seed(0)
            net = Net(model).to(device)
            trained = DistributedDataParallel(net, static_graph=True, gradient_as_bucket_view=True) if size > 1 else net
            together = _steps(trained, batches, device, config["rounds"])
            same = [sum(float(p.detach().double().sum()) for p in net.parameters())] * size
            if size > 1:
                dist.all_gather_object(same, same[rank])
            yield DDPStep(
                config["graph"],
                model,
                size,
                config["batch_size"],
                alone,
                together,
                alone / together,
                len(set(same)) == 1,
            )


def _steps(net: nn.Module, batches, device, rounds: int) -> float:
    """The time of a step, the median over passes through the batches. All processes begin a pass together, and steps
    follow one another as they do in training: the host waits for the device at the end of a pass. Every batch is new to
    the layers, as its edges are.
    """
    optimizer = torch.optim.Adam(net.parameters(), lr=0.001)
    passes = []
    for number in range(WARMUP_PASSES + rounds):
        if dist.is_initialized():
            dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begun = time.perf_counter()
        for x, edge_index, y in batches:
            edge_index = edge_index.clone()  # a new graph to the cache
            optimizer.zero_grad()
            F.cross_entropy(net(x, edge_index)[: len(y)], y).backward()
            optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number >= WARMUP_PASSES:
            passes.append(time.perf_counter() - begun)
    return 1e3 * statistics.median(passes) / len(batches)


def print_steps(steps: list[DDPStep], device: torch.device) -> None:
    """One table for a graph."""
    rows = [
        [s.model, str(s.processes), f"{s.seeds:,}", milliseconds(s.alone_ms), milliseconds(s.ddp_ms)]
        + [f"{s.efficiency:.2f}", "yes" if s.same_parameters else "no"]
        for s in steps
    ]
    columns = ["", "processes", "seeds each", "step ms", "under DDP", "efficiency", "same parameters"]
    title = f"{steps[0].graph}: mini-batches under DDP; {describe_device(device)}"
    print_table(title, columns, rows, [f"Passes of {BATCHES} steps begin together; sampling is not timed."])
