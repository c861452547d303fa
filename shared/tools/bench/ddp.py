"""The overhead of DDP in mini-batch training: a step with it, and the same step of the same process without it.

Batches are plain, so that the first layer builds the graph, or prefetched by :func:`edgeless.prefetch`. Gradients are
averaged by DDP or by :func:`edgeless.distributed.average_gradients`. The step without averaging takes the same batches
in the same way.

Each process samples its batches in advance, by uniform draws in plain torch, since sampling is the frameworks' job.
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

import edgeless.distributed as ed
from edgeless import prefetch
from edgeless.choices.backends import backend
from edgeless.graph.handle import Graph
from edgeless.tools.cli.console import milliseconds, print_table
from edgeless.tools.cli.devices import describe_device
from edgeless.tools.cli.layers import LAYERS, make_layer

from . import processes
from .graphs import load
from .runs import Suite

WIDTH, CLASSES, HEADS = 128, 40, 4
BATCHES, WARMUP_PASSES = 8, 1
ALONE, WAYS = "alone", ("ddp", "average_gradients")


@dataclass
class DDPStep:
    """Medians in milliseconds; ``efficiency`` is ``alone_ms / ddp_ms``.

    Attributes:
        average: how gradients are averaged, "ddp" or "average_gradients".
        prefetched: whether batches and their graphs are prefetched, in both steps.
    """

    graph: str
    model: str
    average: str
    prefetched: bool
    processes: int
    seeds: int
    alone_ms: float
    ddp_ms: float
    efficiency: float
    same_parameters: bool


class Net(nn.Module):
    """Two layers on one graph, as for NeighborLoader's batches."""

    def __init__(self, model: str):
        super().__init__()
        self.conv1 = make_layer(model, "pyg", "edgeless", WIDTH, HEADS, WIDTH // HEADS)
        self.conv2 = make_layer(model, "pyg", "edgeless", WIDTH, HEADS, CLASSES // HEADS)

    def forward(self, x: Tensor, edges) -> Tensor:
        return self.conv2(self.conv1(x, edges).relu(), edges)


def sample(graph: Graph, seeds: Tensor, fanout) -> tuple[Tensor, Tensor]:
    """Samples neighbours uniformly with replacement; returns (node ids, seeds first; local edges ``[2, E]``)."""
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
    """Takes the config of :func:`edgeless.tools.bench.scaleout.measure` with batch_size and fanout."""
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
            for prefetched in (False, True):
                yield from _compare(model, _Batches(batches, prefetched, model, device), size, device, config)


def _compare(model: str, batches: _Batches, size: int, device: torch.device, config: dict):
    """Times the step alone and with every way of averaging, in turns, so that slow changes of the host's load affect
    all of them alike.
    """
    ways = WAYS if size > 1 else WAYS[:1]
    trainings = {way: _Training(model, way, size > 1, device) for way in (ALONE, *ways)}
    for number in range(WARMUP_PASSES + config["rounds"]):
        for training in trainings.values():
            training.go_through(batches, timed=number >= WARMUP_PASSES)
    alone = trainings[ALONE].step_ms(len(batches))
    for way in ways:
        together, net = trainings[way].step_ms(len(batches)), trainings[way].net
        same = [sum(float(p.detach().double().sum()) for p in net.parameters())] * size
        if size > 1:
            dist.all_gather_object(same, same[dist.get_rank()])
        yield DDPStep(
            config["graph"],
            model,
            way,
            batches.prefetched,
            size,
            config["batch_size"],
            alone,
            together,
            alone / together,
            len(set(same)) == 1,
        )


class _Batches:
    """Iterates over the batches. Every pass clones their edges, so that layers see new graphs."""

    def __init__(self, batches, prefetched: bool, model: str, device: torch.device):
        self._batches, self.prefetched, self._device = batches, prefetched, device
        self._loops = LAYERS[model].self_loops

    def __iter__(self):
        if self.prefetched:
            return iter(prefetch(self._batches, self._with_graph, self._device))
        return ((x, edge_index.clone(), y) for x, edge_index, y in self._batches)

    def __len__(self) -> int:
        return len(self._batches)

    def _with_graph(self, batch):
        x, edge_index, y = batch
        return x, Graph.from_edge_index(edge_index.clone(), len(x), len(x), self_loops=self._loops), y


class _Training:
    """A model, its optimizer and the times of its passes."""

    def __init__(self, model: str, way: str, together: bool, device: torch.device):
        torch.manual_seed(0)
        self.net: nn.Module = Net(model).to(device)
        self._device = device
        self._averages = together and way == "average_gradients"
        if together and way == "ddp":
            self.net = DistributedDataParallel(self.net, static_graph=True, gradient_as_bucket_view=True)
        self._optimizer = torch.optim.Adam(self.net.parameters(), lr=0.001)
        self._passes: list[float] = []

    def go_through(self, batches: _Batches, timed: bool) -> None:
        """One pass over the batches. All processes start it together; the host waits for the device only at its end, as
        in training.
        """
        if dist.is_initialized():
            dist.barrier()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        begun = time.perf_counter()
        for x, edges, y in batches:
            self._optimizer.zero_grad()
            F.cross_entropy(self.net(x, edges)[: len(y)], y).backward()
            if self._averages:
                ed.average_gradients(self.net)
            self._optimizer.step()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if timed:
            self._passes.append(time.perf_counter() - begun)

    def step_ms(self, steps: int) -> float:
        """Milliseconds per step, the median over passes of ``steps`` steps."""
        return 1e3 * statistics.median(self._passes) / steps


def page_table(suite: Suite) -> tuple[list[str], list[list[str]]]:
    """The columns and rows of docs/performance.md: a row for each model and number of seeds."""
    ways = [(average, prefetched) for prefetched in (False, True) for average in WAYS]
    found = {(s["graph"], s["seeds"], s["model"], s["average"], s["prefetched"]): s for s in suite.rows}
    rows = []
    for case in dict.fromkeys(key[:3] for key in found):
        steps = [found.get((*case, *way)) for way in ways]
        cells = ["" if s is None else f"{s['alone_ms']:.2f}, {s['ddp_ms']:.2f}: {s['efficiency']:.2f}" for s in steps]
        rows.append([f"{case[0]}, {case[1]:,} seeds, {case[2]}", *cells])
    return ["", *(f"{average}{', prefetched' if prefetched else ''}" for average, prefetched in ways)], rows


def print_steps(steps: list[DDPStep], device: torch.device) -> None:
    """One table for a graph."""
    rows = [
        [s.model, s.average, "prefetched" if s.prefetched else "", str(s.processes), f"{s.seeds:,}"]
        + [milliseconds(s.alone_ms), milliseconds(s.ddp_ms)]
        + [f"{s.efficiency:.2f}", "yes" if s.same_parameters else "no"]
        for s in steps
    ]
    columns = ["", "averaged by", "batches", "processes", "seeds each", "alone ms", "together ms", "efficiency"]
    columns.append("same parameters")
    title = f"{steps[0].graph}: mini-batches under DDP; {describe_device(device)}"
    notes = [f"Passes of {BATCHES} steps, by one way after the other, begin together; sampling is not timed."]
    print_table(title, columns, rows, notes)
