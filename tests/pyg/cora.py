"""Trains two attention layers of 8 heads of 8 on Cora, stock and fused, and compares test accuracy over seeds.

    python tests/pyg/cora.py --seeds 10 --layer gatv2 --root ../shared/data/planetoid/Cora/raw

The test beside this file runs a short version of it.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics

import torch
import torch.nn.functional as F
import torch_geometric.nn as stock
from torch_geometric.io import read_planetoid_data
from torch_geometric.utils import remove_self_loops

import edgeless
import edgeless.pyg.nn as fused

LAYERS = {"gatv2": "GATv2Conv", "gat": "GATConv", "transformer": "TransformerConv"}


def load(folder):
    """Cora in Planetoid's layout with row-normalized features."""
    data = read_planetoid_data(str(folder), "cora")
    data.x = data.x / data.x.sum(dim=1, keepdim=True).clamp(min=1)
    data.edge_index = remove_self_loops(data.edge_index)[0]
    return data


class Net(torch.nn.Module):
    def __init__(self, package, layer, in_channels, num_classes, dropout):
        super().__init__()
        layer = getattr(package, LAYERS[layer])
        self.dropout = dropout
        self.first = layer(in_channels, 8, heads=8, dropout=dropout)
        self.second = layer(64, num_classes, heads=8, concat=False, dropout=dropout)

    def forward(self, x, edge_index):
        x = F.dropout(x, self.dropout, self.training)
        x = F.elu(self.first(x, edge_index))
        x = F.dropout(x, self.dropout, self.training)
        return self.second(x, edge_index)


def train(package, data, seed, *, layer="gatv2", epochs=200, dropout=0.6, rate=0.005):
    """(losses of every epoch, test accuracy at the best validation accuracy)."""
    torch.manual_seed(seed)
    model = Net(package, layer, data.num_features, int(data.y.max()) + 1, dropout)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, weight_decay=5e-4)
    losses, best = [], (0.0, 0.0)
    for _ in range(epochs):
        model.train()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data.x, data.edge_index)[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        model.eval()
        with torch.no_grad():
            right = model(data.x, data.edge_index).argmax(dim=1) == data.y
        accuracy = tuple(float(right[mask].double().mean()) for mask in (data.val_mask, data.test_mask))
        best = max(best, accuracy, key=lambda pair: pair[0])
    return losses, best[1]


def compare(data, seeds, **options):
    """Test accuracies over ``range(seeds)``: (of the upstream layers, of the fused layers, which may not fall back)."""
    accuracies = []
    for package in (stock, fused):
        with edgeless.backend("fused") if package is fused else contextlib.nullcontext():
            accuracies.append([train(package, data, seed, **options)[1] for seed in range(seeds)])
    return accuracies


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", default="../shared/data/planetoid/Cora/raw")
    parser.add_argument("--layer", choices=LAYERS, default="gatv2")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=200)
    options = parser.parse_args()
    accuracies = compare(load(options.root), options.seeds, layer=options.layer, epochs=options.epochs)
    for name, found in zip(("stock", "edgeless"), accuracies, strict=True):
        print(f"{name:>9}: {statistics.mean(found):.4f} +- {statistics.stdev(found):.4f} over {len(found)} seeds")


if __name__ == "__main__":
    main()
