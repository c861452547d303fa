"""Training steps on sampled neighbours, where every step has a new graph.

Two layers, ReLU between them, cross entropy on the batch's seeds, Adam. The framework's loader (drawing neighbours,
gathering their features) is timed apart from the step (forward, backward, optimiser). A second step on each batch then
finds everything that layers cache per graph; the time it saves is the cost of a new graph.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

import edgeless
from edgeless.tools.cli.console import milliseconds, plus_minus, print_table, times
from edgeless.tools.cli.devices import UsageError, describe_device, installed
from edgeless.tools.cli.layers import LAYERS, Layer, call_layer, make_graph, make_layer
from edgeless.tools.cli.relations import DGLBlock, PygDictionaries, PygEdges, Relations
from edgeless.tools.timing import Timing, clock_of, in_a_line

from .graphs import BenchGraph
from .peers import LAYER_PEERS, ours, wanted_of
from .work import Case

PEERS = ("pyg", "edgeless-pyg", "dgl", "edgeless-dgl")
CLASSES = 40
TURN = 6  # timed batches of a peer's turn, after one that is not timed

Batch = tuple[Any, Tensor, Tensor]  # (the layers' graph arguments, features, labels of the seeds)


@dataclass
class Sampling:
    """Parameters of the sampler: seeds per batch, and neighbours per node, from the seeds outwards."""

    batch_size: int = 1024
    fanout: Sequence[int] = (15, 10)


@dataclass
class Step:
    """One peer's figures, medians in milliseconds over ``batches``.

    Attributes:
        sampling_ms: drawing a batch and gathering its features.
        step_ms: forward, backward and optimiser on a new batch.
        again_ms: a second step on the same batch.
        new_graph_ms: the difference of the two, batch by batch.
    """

    graph: str
    case: Case
    peer: str
    failed: Optional[str] = None
    sampling_ms: Optional[float] = None
    step_ms: Optional[float] = None
    spread: Optional[float] = None
    again_ms: Optional[float] = None
    new_graph_ms: Optional[float] = None
    batches: int = 0


def why_not(peer: str) -> Optional[str]:
    """Returns what must be installed for a peer to draw batches, or None."""
    framework = LAYER_PEERS[peer][0]
    if not installed(framework):
        return f"needs {framework}: pip install 'edgeless[{framework}]'"
    if framework == "pyg" and not any(map(importlib.util.find_spec, ("pyg_lib", "torch_sparse"))):
        return "NeighborLoader needs pyg-lib, or: pip install --no-build-isolation torch_scatter torch_sparse"
    return None


def peers_of(wanted: Optional[Sequence[str]]) -> list[str]:
    """The wanted peers of this benchmark, or all of them."""
    return wanted_of("--minibatch", wanted, PEERS)


# Batches -------------------------------------------------------------------------------------------------------------


def _pyg_batches(
    graph: BenchGraph, x: Tensor, y: Tensor, sampling: Sampling, relations: Optional[Relations]
) -> Callable[[], Iterator[Batch]]:
    from torch_geometric.data import Data
    from torch_geometric.loader import NeighborLoader

    device = graph.edge_index.device
    data = Data(x=x, y=y, edge_index=graph.edge_index.cpu())
    if relations is not None:
        data.edge_type = relations.edge_type.cpu()
    loader = NeighborLoader(data, list(sampling.fanout), batch_size=sampling.batch_size, shuffle=True)

    def draw() -> Iterator[Batch]:
        for batch in loader:
            batch = batch.to(device)
            edges = batch.edge_index
            if relations is not None:
                edges = PygEdges(edges, batch.num_nodes, batch.edge_type)
            yield [edges] * 2, batch.x, batch.y[: batch.batch_size]

    return draw


def _pyg_typed_batches(
    graph: BenchGraph, x: Tensor, y: Tensor, sampling: Sampling, relations: Relations
) -> Callable[[], Iterator[Batch]]:
    """Batches with several node types. The seeds are of the most frequent type, whose nodes come first."""
    from torch_geometric.data import HeteroData
    from torch_geometric.loader import NeighborLoader

    device = graph.edge_index.device
    relations = relations.to(torch.device("cpu"))
    whole, data = PygDictionaries.of(graph.edge_index.cpu(), graph.num_nodes, relations), HeteroData()
    for name, features, labels in zip(whole.sizes, whole.parts(x), whole.parts(y)):
        data[name].x, data[name].y = features, labels
    for edge_type, edges in whole.edges.items():
        data[edge_type].edge_index = edges
    nodes = sorted(whole.sizes, key=whole.sizes.get, reverse=True)
    loader = NeighborLoader(
        data, list(sampling.fanout), input_nodes=nodes[0], batch_size=sampling.batch_size, shuffle=True
    )

    def draw() -> Iterator[Batch]:
        for batch in loader:
            batch = batch.to(device)
            sizes = {name: batch[name].num_nodes for name in nodes}
            edges = PygDictionaries(sizes, batch.edge_index_dict)
            seeds = batch[nodes[0]]
            yield [edges] * 2, torch.cat([batch[name].x for name in nodes]), seeds.y[: seeds.batch_size]

    return draw


def _dgl_batches(
    graph: BenchGraph, x: Tensor, y: Tensor, sampling: Sampling, layer: Layer, relations: Optional[Relations]
) -> Callable[[], Iterator[Batch]]:
    import dgl

    device = graph.edge_index.device
    whole = make_graph("dgl", graph.edge_index.cpu(), graph.num_nodes, layer.self_loops)
    types = None if relations is None else relations.to(device)
    loader = dgl.dataloading.DataLoader(
        whole,
        torch.arange(graph.num_nodes),
        dgl.dataloading.NeighborSampler(list(reversed(sampling.fanout))),  # DGL orders fanouts from the input
        batch_size=sampling.batch_size,
        shuffle=True,
    )

    def types_of(block: dgl.DGLGraph) -> tuple[Tensor, ...]:
        edge_type = types.edge_type[block.edata[dgl.EID]]
        if layer.types == "edges":
            return (edge_type,)
        return types.node_type[block.srcdata[dgl.NID]], edge_type

    def draw() -> Iterator[Batch]:
        for inputs, seeds, blocks in loader:
            blocks = [block.to(device) for block in blocks]
            if types is not None:
                blocks = [DGLBlock(block, *types_of(block)) for block in blocks]
            yield blocks, x[inputs].to(device), y[seeds].to(device)

    return draw


# A step --------------------------------------------------------------------------------------------------------------


class Net(torch.nn.Module):
    """layer -> ReLU -> layer, the second without heads; only the layers' classes differ between peers."""

    def __init__(self, case: Case, framework: str, side: str, relations: Optional[Relations] = None):
        super().__init__()
        self.framework = framework
        sizes = (case.features, case.heads, case.channels), (case.heads * case.channels, 1, CLASSES)
        layers = [make_layer(case.name, framework, side, *size, relations=relations) for size in sizes]
        self.first, self.second = layers

    def forward(self, graphs: Sequence[Any], x: Tensor) -> Tensor:
        """Class scores of every destination of the second graph."""
        x = call_layer(self.framework, self.first, x, graphs[0]).relu()
        return call_layer(self.framework, self.second, x, graphs[1])


@dataclass
class Peer:
    """One peer, ready to train; ``draw`` starts an epoch of its batches."""

    draw: Callable[[], Iterator[Batch]]
    net: Net
    fused: bool
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self):
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=1e-3)

    def step(self, batch: Batch) -> Tensor:
        """One training step; returns the loss. The fused backend raises where edgeless would run an upstream layer."""
        graphs, x, y = batch
        with edgeless.backend("fused" if self.fused else "auto"):
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.net(graphs, x)[: len(y)], y)
            loss.backward()
            self.optimizer.step()
        return loss.detach()


def build(case: Case, peer: str, graph: BenchGraph, sampling: Sampling) -> Peer:
    """Sets up one peer on random features and labels, the same for every peer of a case."""
    framework, side, _ = LAYER_PEERS[peer]
    device = graph.edge_index.device
    torch.manual_seed(0)
    x, y = torch.randn(graph.num_nodes, case.features), torch.randint(CLASSES, (graph.num_nodes,))
    layer = LAYERS[case.name]
    relations = None if layer.types is None else graph.relations
    if framework == "dgl":
        draw = _dgl_batches(graph, x, y, sampling, layer, relations)
    elif layer.types == "edges and nodes":
        draw = _pyg_typed_batches(graph, x, y, sampling, relations)
    else:
        draw = _pyg_batches(graph, x, y, sampling, relations)
    torch.manual_seed(0)
    return Peer(draw, Net(case, framework, side, relations).to(device), ours(peer))


# Measuring -----------------------------------------------------------------------------------------------------------


def measure(
    graph: BenchGraph, case: Case, wanted: Optional[Sequence[str]], rounds: int, sampling: Sampling
) -> list[Step]:
    """Times all peers in interleaved turns. A peer that cannot run gets a reason in place of figures."""
    failed, peers = {}, {}
    for name in peers_of(wanted):
        reason = why_not(name)
        if reason is None and getattr(LAYERS[case.name], LAYER_PEERS[name][0]) is None:
            reason = "the framework has no such layer"
        if reason is None:
            peers[name] = build(case, name, graph, sampling)
        else:
            failed[name] = reason
    found = {name: tuple(Timing() for _ in range(4)) for name in peers}
    for turn in range(rounds):
        for name, peer in peers.items():
            if name in failed:
                continue
            torch.manual_seed(turn)  # all peers of a framework draw the same batches
            try:
                _turn(peer, graph.edge_index.device, *found[name])
            except Exception as error:  # a failing peer must not stop the measurement of the others
                failed[name] = in_a_line(error)
    return [
        Step(graph.name, case, name, failed=failed[name])
        if name in failed
        else Step(graph.name, case, name, None, *_figures(*found[name]))
        for name in peers_of(wanted)
    ]


def _turn(peer: Peer, device: torch.device, sampled: Timing, fresh: Timing, again: Timing, new_graph: Timing) -> None:
    clock = clock_of(device)
    draw, kept = peer.draw(), []
    try:
        for count in range(1 + TURN):
            start = clock()
            batch = next(draw, None)
            if batch is None:  # the graph has fewer batches
                break
            drawn = clock()
            peer.step(batch)
            if count > 0:  # the first batch must allocate again the memory that the previous peer freed
                sampled.runs.append(drawn - start)
                fresh.runs.append(clock() - drawn)
                kept.append(batch)
    finally:
        draw.close()
    if not kept:
        raise UsageError(f"one batch of {peer.net.framework} takes the whole graph; give a smaller --batch-size")
    for batch, first in zip(kept, fresh.runs[-len(kept) :]):
        start = clock()
        peer.step(batch)
        again.runs.append(clock() - start)
        new_graph.runs.append(first - again.runs[-1])


def _figures(sampled: Timing, fresh: Timing, again: Timing, new_graph: Timing) -> tuple:
    return (
        sampled.median,
        fresh.median,
        fresh.spread,
        again.median,
        max(0.0, new_graph.median),
        len(fresh.runs),
    )


# Reporting -----------------------------------------------------------------------------------------------------------


def print_steps(graph: BenchGraph, case: Case, steps: list[Step], sampling: Sampling, device: torch.device) -> None:
    """Prints one row per peer."""
    by_peer = {step.peer: step for step in steps if step.failed is None}
    rows = []
    for step in by_peer.values():
        mate = None if ours(step.peer) else by_peer.get(f"edgeless-{step.peer}")
        share = 100 * step.new_graph_ms / step.step_ms
        rows.append(
            [
                step.peer,
                milliseconds(step.sampling_ms),
                milliseconds(step.step_ms),
                plus_minus(f"{100 * step.spread:.0f} %"),
                f"{milliseconds(step.new_graph_ms)} = {share:.0f} %",
                "" if mate is None else times(step.step_ms / mate.step_ms),
            ]
        )
    fanout = ", ".join(map(str, sampling.fanout))
    print()
    print_table(
        f"{graph.name}: {graph.num_nodes:,} nodes, {graph.num_edges:,} edges; training two layers of {case.name}, "
        f"{case.features} -> {case.heads} x {case.channels} -> {CLASSES}, batches of {sampling.batch_size:,}, "
        f"neighbours {fanout}; {describe_device(device)}",
        ["peer", "sampling ms", "step ms", "spread", "for a new graph", "edgeless is faster by"],
        rows,
        [f"{step.peer}: {step.failed}" for step in steps if step.failed is not None],
    )
