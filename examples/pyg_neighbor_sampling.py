"""Mini-batches with PyTorch Geometric's NeighborLoader: SAGEConv on sampled neighbours, a new graph at every step.

The loader needs pyg-lib or torch_sparse; without either, the script says so and stops.
"""

from __future__ import annotations

import importlib.util

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader

from edgeless.pyg.nn import SAGEConv  # in place of: from torch_geometric.nn import SAGEConv

NODES, EDGES, CLASSES, FEATURES = 5_000, 100_000, 4, 32


def make_data() -> Data:
    """A random graph that mostly joins nodes of one class, with noisy features and labels."""
    y = torch.randint(CLASSES, (NODES,))
    x = torch.randn(CLASSES, FEATURES)[y] + 3 * torch.randn(NODES, FEATURES)
    src, dst = torch.randint(NODES, (2, 4 * EDGES))
    kept = (y[src] == y[dst]) | (torch.rand(4 * EDGES) < 0.05)
    return Data(x=x, y=y, edge_index=torch.stack([src, dst])[:, kept][:, :EDGES].contiguous())


class Net(torch.nn.Module):
    """SAGE -> ReLU -> SAGE."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = SAGEConv(FEATURES, 32)
        self.conv2 = SAGEConv(32, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv2(self.conv1(x, edge_index).relu(), edge_index)


def main() -> None:
    if not any(map(importlib.util.find_spec, ("pyg_lib", "torch_sparse"))):
        print("skipped: NeighborLoader needs pyg-lib or torch_sparse, and neither is installed")
        return
    torch.manual_seed(0)
    loader = NeighborLoader(make_data(), num_neighbors=[10, 5], batch_size=256, shuffle=True)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for epoch in range(1, 4):
        total = 0.0
        for batch in loader:
            optimizer.zero_grad()
            out = net(batch.x, batch.edge_index)[: batch.batch_size]  # the seeds come first
            loss = F.cross_entropy(out, batch.y[: batch.batch_size])
            loss.backward()
            optimizer.step()
            total += loss.item() * batch.batch_size
        print(f"epoch {epoch}: loss {total / NODES:.3f}")


if __name__ == "__main__":
    main()
