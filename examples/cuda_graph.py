"""A training step captured in a CUDA graph and replayed: on small graphs the launches take longer than the work.

Needs a GPU and an edgeless built with its CUDA kernels; without them the script says so and stops.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import edgeless
from edgeless.choices.backends import kernel_refusal
from edgeless.functional import gatv2_attention

NODES, EDGES, STEPS = 2_000, 10_000, 200


class Layer(torch.nn.Module):
    """GATv2 on an edgeless.Graph."""

    def __init__(self, features: int, heads: int, channels: int) -> None:
        super().__init__()
        self.heads, self.channels = heads, channels
        self.source = torch.nn.Linear(features, heads * channels)
        self.target = torch.nn.Linear(features, heads * channels)
        self.att = torch.nn.Parameter(torch.randn(heads, channels) / channels**0.5)

    def forward(self, graph: edgeless.Graph, x: Tensor) -> Tensor:
        """``[N, features]`` -> ``[N, heads * channels]``."""
        x_l = self.source(x).view(-1, self.heads, self.channels)
        x_r = self.target(x).view(-1, self.heads, self.channels)
        return gatv2_attention(graph, x_l, x_r, self.att).flatten(1)


def milliseconds_a_step(step: Callable[[], None], device: torch.device) -> float:
    """Mean over STEPS runs of ``step``."""
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize(device)
    return 1e3 * (time.perf_counter() - start) / STEPS


def main() -> None:
    device = torch.device("cuda")
    refusal = "torch sees no GPU" if not torch.cuda.is_available() else kernel_refusal(device)
    if refusal:
        print(f"skipped: {refusal}")
        return
    torch.manual_seed(0)
    edge_index = torch.randint(NODES, (2, EDGES), device=device)
    graph = edgeless.Graph.from_edge_index(edge_index, NODES, NODES)
    _ = graph.csr, graph.csc  # built now: a capture may not wait for the GPU
    x, target = torch.randn(NODES, 32, device=device), torch.randn(NODES, 32, device=device)
    layer = Layer(32, heads=4, channels=8).to(device)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.01, capturable=True)
    loss = torch.zeros((), device=device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)  # a captured step writes its gradients to the same memory every time
        error = F.mse_loss(layer(graph, x), target)
        error.backward()
        optimizer.step()
        loss.copy_(error.detach())

    with edgeless.backend("fused"):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # warm-up: the first steps allocate and fill caches, which a capture may not
            for _ in range(5):
                step()
        torch.cuda.current_stream().wait_stream(side)
        eager = milliseconds_a_step(step, device)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            step()
    replayed = milliseconds_a_step(captured.replay, device)
    print(f"a step: {eager:.3f} ms launched one by one, {replayed:.3f} ms replayed; loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
