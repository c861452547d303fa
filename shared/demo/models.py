"""The two-layer networks of the demo, written as a user would: only the import of ``nn`` differs between the sides."""

from __future__ import annotations

import importlib

import torch
import torch.nn.functional as F
from torch import Tensor

LAYERS = {
    "pyg": {"gatv2": "GATv2Conv", "gat": "GATConv", "transformer": "TransformerConv"},
    "dgl": {"gatv2": "GATv2Conv", "gat": "GATConv", "transformer": "DotGatConv"},
}
MODULES = {
    ("pyg", "stock"): "torch_geometric.nn",
    ("pyg", "edgeless"): "edgeless.pyg.nn",
    ("dgl", "stock"): "dgl.nn",
    ("dgl", "edgeless"): "edgeless.dgl.nn",
}


def layer_class(framework: str, side: str, layer: str) -> type:
    """The class that one side trains, e.g. ("pyg", "edgeless", "gatv2") -> edgeless.pyg.nn.GATv2Conv."""
    return getattr(importlib.import_module(MODULES[framework, side]), LAYERS[framework][layer])


class PyGNet(torch.nn.Module):
    """conv -> ELU -> conv, dropout before each and on the attention."""

    def __init__(self, conv: type, features: int, hidden: int, classes: int, heads: int, dropout: float):
        super().__init__()
        self.conv1 = conv(features, hidden, heads=heads, dropout=dropout)
        self.conv2 = conv(hidden * heads, classes, heads=1, concat=False, dropout=dropout)
        self.dropout = dropout

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = F.dropout(x, self.dropout, self.training)
        x = F.elu(self.conv1(x, edge_index))
        x = F.dropout(x, self.dropout, self.training)
        return self.conv2(x, edge_index)


class DGLNet(torch.nn.Module):
    """The same network on DGL's interface."""

    def __init__(self, conv: type, features: int, hidden: int, classes: int, heads: int, dropout: float):
        super().__init__()
        options = {"allow_zero_in_degree": True}
        if conv.__name__ != "DotGatConv":  # which has no dropout of its own
            options["attn_drop"] = dropout
        self.conv1 = conv(features, hidden, heads, **options)
        self.conv2 = conv(hidden * heads, classes, 1, **options)
        self.dropout = dropout

    def forward(self, x: Tensor, graph) -> Tensor:
        x = F.dropout(x, self.dropout, self.training)
        x = F.elu(self.conv1(graph, x).flatten(1))
        x = F.dropout(x, self.dropout, self.training)
        return self.conv2(graph, x).mean(1)


def make_graph(framework: str, edge_index: Tensor, num_nodes: int, self_loops: bool):
    """What the network takes as its graph: PyG's edge_index, or a DGLGraph.

    Args:
        self_loops: PyG's layer adds self loops; DGL's graph then gets them here, so that both walk the same edges.
    """
    if framework == "pyg":
        return edge_index
    import dgl

    graph = dgl.graph((edge_index[0], edge_index[1]), num_nodes=num_nodes)
    return dgl.add_self_loop(dgl.remove_self_loop(graph)) if self_loops else graph


def make_net(framework: str, side: str, layer: str, **sizes) -> torch.nn.Module:
    """The network of one side; both sides draw the same parameters from the same seed."""
    net = PyGNet if framework == "pyg" else DGLNet
    return net(layer_class(framework, side, layer), **sizes)
