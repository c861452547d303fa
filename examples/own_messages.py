"""Eight kinds of message functions of one's own, each run without an edge tensor by one changed import.

Trains each layer for a step and prints what ran. With --plan it prints both levels of each program as well;
docs/own-messages.md shows them. Messages are generated where EDGELESS_GENERATE says so: here everywhere.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.utils import softmax

import edgeless
from edgeless.pyg.nn import MessagePassing  # was: from torch_geometric.nn import MessagePassing

NODES, EDGES, WIDTH, HEADS, TYPES = 2_000, 40_000, 32, 4, 5


class CatAttention(MessagePassing):
    """Attention whose score is a layer over both rows, side by side."""

    def __init__(self) -> None:
        super().__init__(aggr="sum", node_dim=0)
        self.lin, self.score = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH // HEADS, 1)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.lin(x).view(-1, HEADS, WIDTH // HEADS)
        return self.propagate(edge_index, h=h, size=None).flatten(1)

    def message(self, h_i: Tensor, h_j: Tensor, index: Tensor, size_i: int) -> Tensor:
        score = F.leaky_relu(self.score(torch.cat([h_i, h_j], dim=-1)), 0.2)
        return softmax(score, index, num_nodes=size_i) * h_j


class QueryKeyValue(MessagePassing):
    """Scaled products of queries and keys, all three maps within message()."""

    def __init__(self) -> None:
        super().__init__(aggr="sum")
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, size=None)

    def message(self, x_i: Tensor, x_j: Tensor, index: Tensor, size_i: int) -> Tensor:
        score = (self.q(x_i) * self.k(x_j)).sum(-1, keepdim=True) / WIDTH**0.5
        return softmax(score, index, num_nodes=size_i) * self.v(x_j)


class GatedSum(MessagePassing):
    """Sums through a gate that both ends and an edge's features open."""

    def __init__(self) -> None:
        super().__init__(aggr="sum")
        self.gate_i, self.gate_j, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.gate_e = nn.Linear(TYPES, WIDTH, bias=False)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, e=edge_attr, size=None)

    def message(self, x_i: Tensor, x_j: Tensor, e: Tensor) -> Tensor:
        return torch.sigmoid(self.gate_i(x_i) + self.gate_j(x_j) + self.gate_e(e)) * self.value(x_j)


class UnitDifferences(MessagePassing):
    """The mean direction from a node to its neighbours, and how alike their rows are."""

    def __init__(self) -> None:
        super().__init__(aggr="mean")

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, size=None)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        alike = F.cosine_similarity(x_i, x_j, dim=-1).unsqueeze(-1)
        return F.normalize(x_j - x_i, dim=-1) * alike


class TypedEdges(MessagePassing):
    """A learnt row for each type of edge, added before the activation."""

    def __init__(self) -> None:
        super().__init__(aggr="sum")
        self.types, self.lin = nn.Embedding(TYPES, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        return self.lin(self.propagate(edge_index, x=x, edge_type=edge_type, size=None))

    def message(self, x_j: Tensor, edge_type: Tensor) -> Tensor:
        return F.relu(x_j + self.types(edge_type))


class RadialFilter(MessagePassing):
    """Rows weighed by radial functions of the distance between two positions."""

    def __init__(self) -> None:
        super().__init__(aggr="sum")
        self.centres, self.lin = nn.Parameter(torch.linspace(0, 3, 8)), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor, pos: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, pos=pos, size=None)

    def message(self, x_j: Tensor, pos_i: Tensor, pos_j: Tensor) -> Tensor:
        distance = ((pos_j - pos_i) ** 2).sum(-1, keepdim=True).add(1e-6).sqrt()
        return x_j * self.lin(torch.exp(-((distance - self.centres) ** 2)))


class TwoMoments(MessagePassing):
    """A message of two parts, which an aggregate() of one's own sums apart and puts together."""

    def __init__(self) -> None:
        super().__init__(aggr="sum")
        self.lin = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.lin(self.propagate(edge_index, x=x, size=None))

    def message(self, x_i: Tensor, x_j: Tensor) -> tuple[Tensor, Tensor]:
        difference = x_j - x_i
        return difference, difference * difference

    def aggregate(self, inputs: tuple[Tensor, Tensor], index: Tensor, dim_size: int) -> Tensor:
        parts = [self.aggr_module(part, index, dim_size=dim_size) for part in inputs]
        return torch.cat(parts, dim=-1)


class SumAndMaximum(MessagePassing):
    """Several aggregations of one message, and an update() that sees the node's own row."""

    def __init__(self) -> None:
        super().__init__(aggr=["sum", "max"])
        self.lin = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, size=None)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return F.silu(x_j - x_i)

    def update(self, inputs: Tensor, x: Tensor) -> Tensor:
        return self.lin(torch.cat([x, inputs], dim=-1))


def calls(nodes: int = NODES, edges: int = EDGES) -> list[tuple[MessagePassing, tuple[Tensor, ...]]]:
    """The layers with their inputs on a random graph."""
    edge_index, x = torch.randint(nodes, (2, edges)), torch.randn(nodes, WIDTH)
    edge_type, pos = torch.randint(TYPES, (edges,)), torch.randn(nodes, 3)
    return [
        (CatAttention(), (x, edge_index)),
        (QueryKeyValue(), (x, edge_index)),
        (GatedSum(), (x, edge_index, F.one_hot(edge_type, TYPES).float())),
        (UnitDifferences(), (x, edge_index)),
        (TypedEdges(), (x, edge_index, edge_type)),
        (RadialFilter(), (x, pos, edge_index)),
        (TwoMoments(), (x, edge_index)),
        (SumAndMaximum(), (x, edge_index)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", action="store_true", help="print what is computed, and how")
    args = parser.parse_args()
    os.environ.setdefault("EDGELESS_GENERATE", "on")
    torch.manual_seed(0)
    for layer, inputs in calls():
        inputs[0].requires_grad_()
        layer(*inputs).square().mean().backward()
        print(edgeless.explain(layer, *inputs, plan=args.plan))


if __name__ == "__main__":
    main()
