"""An attention layer as users write it, which PyG does not have: edge features are in its scores and its values."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.utils import softmax


@functools.cache
def own_attention(base: type) -> type:
    """The attention as a subclass of PyG's MessagePassing or of ours.

    It is called as ``layer(x, edge_index, edge_attr)``, of shapes ``[N, features]``, ``[2, E]`` and ``[E,
    edge_features]``, and returns ``[N, channels]``.
    """

    class OwnAttention(base):
        def __init__(self, features: int, channels: int, edge_features: int):
            super().__init__(aggr="sum")
            self.lin = torch.nn.Linear(features, channels)
            self.score = torch.nn.Linear(edge_features, channels, bias=False)
            self.gate = torch.nn.Linear(edge_features, channels, bias=False)
            self.vector = torch.nn.Parameter(torch.randn(channels) / channels**0.5)

        def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
            return self.propagate(edge_index, x=self.lin(x), edge_attr=edge_attr, size=None)

        def message(self, x_i: Tensor, x_j: Tensor, edge_attr: Tensor, index: Tensor, size_i: int) -> Tensor:
            scores = F.leaky_relu(x_i + x_j + self.score(edge_attr), 0.2) * self.vector
            weights = softmax(scores.sum(-1, keepdim=True), index, num_nodes=size_i)
            return weights * (x_j * torch.sigmoid(self.gate(edge_attr)))

    return OwnAttention
