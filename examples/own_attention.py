"""A layer of one's own on edgeless.functional: dot-product attention with queries and keys of unit length.

Needs neither PyTorch Geometric nor DGL.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import edgeless
from edgeless.functional import dot_attention

NODES, EDGES = 2_000, 40_000


class UnitAttention(torch.nn.Module):
    """Multi-head dot-product attention whose queries and keys have length one, with a learnt temperature."""

    def __init__(self, features: int, heads: int, channels: int) -> None:
        super().__init__()
        self.heads, self.channels = heads, channels
        self.qkv = torch.nn.Linear(features, 3 * heads * channels)
        self.temperature = torch.nn.Parameter(torch.tensor(5.0))

    def forward(self, graph: edgeless.Graph, x: Tensor) -> Tensor:
        """``[N, features]`` -> ``[N, heads * channels]``."""
        q, k, v = self.qkv(x).view(-1, 3, self.heads, self.channels).unbind(1)
        q = self.temperature * F.normalize(q, dim=-1)
        return dot_attention(graph, q, F.normalize(k, dim=-1), v, scale=1.0).flatten(1)


def main() -> None:
    torch.manual_seed(0)
    graph = edgeless.Graph.from_edge_index(torch.randint(NODES, (2, EDGES)), NODES, NODES)
    x, target = torch.randn(NODES, 32), torch.randn(NODES, 32)
    layer = UnitAttention(32, heads=4, channels=8)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.01)
    for step in range(1, 31):
        optimizer.zero_grad()
        loss = F.mse_loss(layer(graph, x), target)
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}, temperature {layer.temperature.item():.2f}")


if __name__ == "__main__":
    main()
