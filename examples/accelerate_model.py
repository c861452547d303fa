"""edgeless.accelerate() on a model of torch_geometric.nn.models: swapped in place, with the same results."""

from __future__ import annotations

import torch
from torch_geometric.nn.models import GAT

import edgeless

NODES, EDGES, FEATURES = 2_000, 40_000, 32


def main() -> None:
    torch.manual_seed(0)
    x, edge_index = torch.randn(NODES, FEATURES), torch.randint(NODES, (2, EDGES))
    model = GAT(FEATURES, hidden_channels=32, num_layers=3, out_channels=7, heads=4, v2=True).eval()
    with torch.no_grad():
        before = model(x, edge_index)

    print(edgeless.accelerate(model))  # what was swapped, and what was kept and why

    with torch.no_grad(), edgeless.backend("fused"):  # raises, instead of falling back, if a call cannot be fused
        after = model(x, edge_index)
    print(f"largest difference from the model before: {(after - before).abs().max():.1e}")
    print(edgeless.explain(model, x, edge_index))  # what each layer's call runs
    print(edgeless.report())  # what ran so far


if __name__ == "__main__":
    main()
