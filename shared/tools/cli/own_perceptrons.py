"""Layers that apply a perceptron to every edge, called like PyG's other layers."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def perceptron(*widths: int) -> torch.nn.Sequential:
    """Linear maps with a ReLU between each two."""
    maps = [torch.nn.Linear(a, b) for a, b in zip(widths, widths[1:])]
    return torch.nn.Sequential(*[m for each in maps for m in (each, torch.nn.ReLU())][:-1])


@functools.cache
def point_net(base: type) -> type:
    """PyG's PointNetConv, or ours, with the first three features as positions.

    It is called as ``layer(x, edge_index)``, of shapes ``[N, features]`` and ``[2, E]``, and returns ``[N, channels]``.
    """

    class PointNet(base):
        def __init__(self, features: int, channels: int):
            super().__init__(perceptron(features + 3, channels, channels), add_self_loops=False)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return super().forward(x, x[:, :3], edge_index)

    return PointNet


@functools.cache
def edge_filter(base: type) -> type:
    """A subclass of PyG's MessagePassing, or of ours: a perceptron of an edge's features weighs what is summed, as in
    SchNet.

    It is called as ``layer(x, edge_index, edge_attr)``, of shapes ``[N, features]``, ``[2, E]`` and ``[E,
    edge_features]``, and returns ``[N, channels]``.
    """

    class EdgeFilter(base):
        def __init__(self, features: int, channels: int, edge_features: int):
            super().__init__(aggr="sum")
            self.lin = torch.nn.Linear(features, channels, bias=False)
            self.nn = perceptron(edge_features, channels, channels)

        def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
            return self.propagate(edge_index, x=self.lin(x), edge_attr=edge_attr, size=None)

        def message(self, x_j: Tensor, edge_attr: Tensor) -> Tensor:
            return x_j * self.nn(edge_attr)

    return EdgeFilter
