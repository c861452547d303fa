"""The tasks of the demo: classes of nodes, or prediction of triples."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from edgeless.tools.cli.layers import DEMO_LAYERS, make_input
from edgeless.tools.cli.relations import PygEdges, Relations

from .data import NodeData
from .models import Net
from .relational import LinkData

SCORED = 20_000  # triples per step, and as many negative ones
RANKED = 256  # triples that are ranked at once


class FullBatch:
    """A task whose epoch is one step of the optimizer."""

    def loss(self, net: torch.nn.Module, epoch: int) -> Tensor:
        """The loss of an epoch."""
        raise NotImplementedError

    def epoch(self, net: torch.nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> float:
        """Trains once on everything; returns the loss."""
        net.train()
        optimizer.zero_grad(set_to_none=True)
        loss = self.loss(net, epoch)
        loss.backward()
        optimizer.step()
        return loss.item()


class Classes(FullBatch):
    """Node classification: cross entropy on the training nodes, accuracy on the others."""

    def __init__(self, data: NodeData, config: dict, device: torch.device):
        self.config, self.device, self.num_classes = config, device, data.num_classes
        self.x, self.y, self.train, self.val, self.test, edge_index = (
            t.to(device) for t in (data.x, data.y, data.train, data.val, data.test, data.edge_index)
        )
        self.relations = data.relations and data.relations.to(device)
        self.graph = make_input(config["layer"], config["framework"], edge_index, data.num_nodes, self.relations)
        if width := DEMO_LAYERS[config["layer"]].edge_features:  # random features, the same on both sides
            edge_attr = torch.randn(edge_index.size(1), width, generator=torch.Generator().manual_seed(0))
            self.graph = PygEdges(edge_index, data.num_nodes, edge_attr.to(device))

    def toy(self) -> Classes:
        """The same task on three nodes with the same width, since generated code is compiled for a width."""
        edge_index = torch.tensor([[0, 1, 2], [1, 2, 0]])
        y, chosen, zeros = self.y[:3].cpu(), torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.int64)
        relations = self.relations and Relations.of(edge_index, zeros, 1, zeros)
        x = torch.rand(3, self.x.size(1))
        toy = Classes(NodeData("toy", x, y, edge_index, chosen, chosen, chosen, relations), self.config, self.device)
        toy.num_classes = self.num_classes
        return toy

    def net(self) -> torch.nn.Module:
        """A new network."""
        return _net(self.config, self.x.size(1), self.num_classes, self.relations).to(self.device)

    def loss(self, net: torch.nn.Module, epoch: int) -> Tensor:
        """The loss of all training nodes."""
        return F.cross_entropy(net(self.x, self.graph)[self.train], self.y[self.train])

    def scores(self, net: torch.nn.Module) -> dict[str, float]:
        """The fractions of nodes that are classified right."""
        right = (net(self.x, self.graph).argmax(1) == self.y).float()
        return {"val": right[self.val].mean().item(), "test": right[self.test].mean().item()}


class LinkNet(torch.nn.Module):
    """A learnt row for every node, two layers over the training triples, and a row for every relation (DistMult)."""

    def __init__(self, config: dict, num_nodes: int, num_relations: int, relations: Relations):
        super().__init__()
        width = config["heads"] * config["hidden"]
        self.nodes = torch.nn.Parameter(torch.nn.init.xavier_normal_(torch.empty(num_nodes, width)))
        self.relations = torch.nn.Parameter(torch.nn.init.xavier_normal_(torch.empty(num_relations, width)))
        self.encoder = _net(config, width, width, relations)

    @property
    def conv1(self) -> torch.nn.Module:
        """The first layer."""
        return self.encoder.conv1

    def forward(self, graph) -> Tensor:
        """Rows of all nodes."""
        return self.encoder(self.nodes, graph)


class Links(FullBatch):
    """Link prediction: cross entropy of triples and of as many with another head or tail; filtered ranks of the test
    triples among all heads and all tails.
    """

    def __init__(self, data: LinkData, config: dict, device: torch.device):
        self.config, self.device, self.data = config, device, data
        edge_index, relations = data.edges()
        self.relations = relations.to(device)
        layer, framework = config["layer"], config["framework"]
        self.graph = make_input(layer, framework, edge_index.to(device), data.num_nodes, self.relations)

    def toy(self) -> Links:
        """The same task on three nodes."""
        triples = torch.tensor([[0, 0, 1], [1, 0, 2]])
        return Links(LinkData("toy", 3, 1, triples, triples, triples), self.config, self.device)

    def net(self) -> torch.nn.Module:
        """A new network."""
        return LinkNet(self.config, self.data.num_nodes, self.data.num_relations, self.relations).to(self.device)

    def loss(self, net: LinkNet, epoch: int) -> Tensor:
        """The loss of random triples, drawn with the epoch as seed."""
        draw = torch.Generator().manual_seed(epoch)
        true = self.data.train[torch.randint(len(self.data.train), (SCORED,), generator=draw)]
        false = true.clone()
        place = 2 * torch.randint(2, (SCORED, 1), generator=draw)
        false.scatter_(1, place, torch.randint(self.data.num_nodes, (SCORED, 1), generator=draw))
        head, relation, tail = torch.cat([true, false]).to(self.device).t()
        rows = net(self.graph)
        logits = (rows[head] * net.relations[relation] * rows[tail]).sum(1)
        return F.binary_cross_entropy_with_logits(
            logits, (torch.arange(2 * SCORED, device=self.device) < SCORED).float()
        )

    def scores(self, net: LinkNet) -> dict[str, float]:
        """The mean reciprocal rank, and the fraction of ranks up to 10."""
        rows = net(self.graph)
        known = torch.cat([self.data.train, self.data.val, self.data.test]).to(self.device)
        test = self.data.test.to(self.device)
        ranks = torch.cat(
            [_ranks(rows, net.relations, test[:, order], known[:, order]) for order in ([0, 1, 2], [2, 1, 0])]
        )
        return {"test": (1 / ranks).mean().item(), "hits": (ranks <= 10).double().mean().item()}


def _ranks(rows: Tensor, relations: Tensor, triples: Tensor, known: Tensor) -> Tensor:
    """Ranks of the last nodes of ``triples`` among all nodes that make no other known triple, ties halfway."""
    places = relations.size(0)
    keys, order = (known[:, 0] * places + known[:, 1]).sort()
    others = known[order, 2]
    ranks = []
    for some in triples.split(RANKED):
        scores = (rows[some[:, 0]] * relations[some[:, 1]]) @ rows.t()
        own = scores.gather(1, some[:, 2:])
        wanted = some[:, 0] * places + some[:, 1]
        low, high = torch.searchsorted(keys, wanted), torch.searchsorted(keys, wanted, right=True)
        counts = high - low
        line = torch.arange(len(some), device=keys.device).repeat_interleave(counts)
        start = (counts.cumsum(0) - counts - low).repeat_interleave(counts)
        scores[line, others[torch.arange(len(line), device=keys.device) - start]] = -torch.inf
        ranks.append(1 + (scores > own).sum(1) + 0.5 * (scores == own).sum(1).double())
    return torch.cat(ranks)


def _net(config: dict, features: int, classes: int, relations) -> Net:
    sizes = {name: config[name] for name in ("hidden", "heads", "dropout")}
    names = (config["framework"], config["side"], config["layer"])
    return Net(*names, features=features, classes=classes, relations=relations, **sizes)
