"""Node classification with PyTorch Geometric: a two-layer GATv2 on a small random graph with planted classes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from edgeless.pyg.nn import GATv2Conv  # in place of: from torch_geometric.nn import GATv2Conv

NODES, EDGES, CLASSES, FEATURES = 2_000, 40_000, 4, 32


def make_data() -> tuple[Tensor, Tensor, Tensor]:
    """Noisy features ``[N, F]``, an ``edge_index`` ``[2, E]`` that mostly joins nodes of one class, labels ``[N]``."""
    y = torch.randint(CLASSES, (NODES,))
    x = torch.randn(CLASSES, FEATURES)[y] + 3 * torch.randn(NODES, FEATURES)
    src, dst = torch.randint(NODES, (2, 4 * EDGES))
    kept = (y[src] == y[dst]) | (torch.rand(4 * EDGES) < 0.05)
    return x, torch.stack([src, dst])[:, kept][:, :EDGES].contiguous(), y


class Net(torch.nn.Module):
    """GATv2 -> ELU -> GATv2."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = GATv2Conv(FEATURES, 8, heads=4)
        self.conv2 = GATv2Conv(32, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv2(F.elu(self.conv1(x, edge_index)), edge_index)


def main() -> None:
    torch.manual_seed(0)
    x, edge_index, y = make_data()
    train = torch.rand(NODES) < 0.1
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for epoch in range(1, 31):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x, edge_index)[train], y[train])
        loss.backward()
        optimizer.step()
        if epoch % 10 == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}")
    with torch.no_grad():
        correct = net(x, edge_index).argmax(1) == y
    print(f"test accuracy: {100 * correct[~train].float().mean():.1f} %")


if __name__ == "__main__":
    main()
