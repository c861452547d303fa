"""Mini-batches with DGL's NeighborSampler: SAGEConv on sampled blocks, new ones at every step."""

from __future__ import annotations

import os

os.environ.setdefault("DGLBACKEND", "pytorch")  # otherwise DGL writes a configuration file at its first import

import dgl
import torch
import torch.nn.functional as F
from torch import Tensor

from edgeless.dgl.nn import SAGEConv  # in place of: from dgl.nn import SAGEConv

NODES, EDGES, CLASSES, FEATURES = 5_000, 100_000, 4, 32


def make_data() -> tuple[dgl.DGLGraph, Tensor, Tensor]:
    """A graph that mostly joins nodes of one class, noisy features ``[N, F]``, labels ``[N]``."""
    y = torch.randint(CLASSES, (NODES,))
    x = torch.randn(CLASSES, FEATURES)[y] + 3 * torch.randn(NODES, FEATURES)
    src, dst = torch.randint(NODES, (2, 4 * EDGES))
    kept = (y[src] == y[dst]) | (torch.rand(4 * EDGES) < 0.05)
    return dgl.graph((src[kept][:EDGES], dst[kept][:EDGES]), num_nodes=NODES), x, y


class Net(torch.nn.Module):
    """SAGE -> ReLU -> SAGE, each on a block of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = SAGEConv(FEATURES, 32, "mean")
        self.conv2 = SAGEConv(32, CLASSES, "mean")

    def forward(self, blocks: list, x: Tensor) -> Tensor:
        return self.conv2(blocks[1], self.conv1(blocks[0], x).relu())


def main() -> None:
    torch.manual_seed(0)
    dgl.seed(0)
    graph, x, y = make_data()
    sampler = dgl.dataloading.NeighborSampler([5, 10])  # from the input to the output
    loader = dgl.dataloading.DataLoader(graph, torch.arange(NODES), sampler, batch_size=256, shuffle=True)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for epoch in range(1, 4):
        total = 0.0
        for inputs, seeds, blocks in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(blocks, x[inputs]), y[seeds])
            loss.backward()
            optimizer.step()
            total += loss.item() * len(seeds)
        print(f"epoch {epoch}: loss {total / NODES:.3f}")


if __name__ == "__main__":
    main()
