"""Node classification with DGL: a two-layer GATv2 on a small random graph with planted classes."""

from __future__ import annotations

import os

os.environ.setdefault("DGLBACKEND", "pytorch")  # otherwise DGL writes a configuration file at its first import

import dgl
import torch
import torch.nn.functional as F
from torch import Tensor

from edgeless.dgl.nn import GATv2Conv  # in place of: from dgl.nn import GATv2Conv

NODES, EDGES, CLASSES, FEATURES = 2_000, 40_000, 4, 32


def make_data() -> tuple[dgl.DGLGraph, Tensor, Tensor]:
    """A graph that mostly joins nodes of one class, noisy features ``[N, F]``, labels ``[N]``."""
    y = torch.randint(CLASSES, (NODES,))
    x = torch.randn(CLASSES, FEATURES)[y] + 3 * torch.randn(NODES, FEATURES)
    src, dst = torch.randint(NODES, (2, 4 * EDGES))
    kept = ((y[src] == y[dst]) | (torch.rand(4 * EDGES) < 0.05)) & (src != dst)
    graph = dgl.graph((src[kept][:EDGES], dst[kept][:EDGES]), num_nodes=NODES)
    return dgl.add_self_loop(graph), x, y


class Net(torch.nn.Module):
    """GATv2 -> ELU -> GATv2."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = GATv2Conv(FEATURES, 8, num_heads=4)
        self.conv2 = GATv2Conv(32, CLASSES, num_heads=1)

    def forward(self, graph: dgl.DGLGraph, x: Tensor) -> Tensor:
        x = F.elu(self.conv1(graph, x)).flatten(1)  # [N, heads, channels] -> [N, heads * channels]
        return self.conv2(graph, x).squeeze(1)


def main() -> None:
    torch.manual_seed(0)
    graph, x, y = make_data()
    train = torch.rand(NODES) < 0.1
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for epoch in range(1, 31):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(graph, x)[train], y[train])
        loss.backward()
        optimizer.step()
        if epoch % 10 == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}")
    with torch.no_grad():
        correct = net(graph, x).argmax(1) == y
    print(f"test accuracy: {100 * correct[~train].float().mean():.1f} %")


if __name__ == "__main__":
    main()
