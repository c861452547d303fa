"""Whole layers by name: how each framework builds one with the same sizes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Optional

import torch

from edgeless.demo.models import MODULES

Build = Callable[[type, int, int, int], torch.nn.Module]  # (class, features, heads, channels)


@dataclass(frozen=True)
class Layer:
    """A layer that both frameworks may have.

    Attributes:
        pyg, dgl: (class name, how to build it), or None where the framework has no such layer.
        self_loops: PyG's layer adds self loops, so DGL's graph gets them beforehand: all peers walk the same edges.
        baseline: what the layer is called in a file of peer figures.
        multiplies: PyG's layer multiplies by a sparse matrix where it is given one, which is faster than edge tensors.
    """

    pyg: tuple[str, Build]
    dgl: Optional[tuple[str, Build]]
    self_loops: bool
    baseline: str
    multiplies: bool = False


def _pyg_attention(cls: type, features: int, heads: int, channels: int) -> torch.nn.Module:
    return cls(features, channels, heads=heads)


def _dgl_attention(cls: type, features: int, heads: int, channels: int) -> torch.nn.Module:
    return cls(features, channels, num_heads=heads, allow_zero_in_degree=True)


def _wide(**options) -> Build:
    """A layer without heads, as wide as the heads together."""
    return lambda cls, features, heads, channels: cls(features, heads * channels, **options)


def _dgl_graph_conv(norm: str) -> Build:
    return _wide(norm=norm, allow_zero_in_degree=True)


def _dgl_sage(aggregator: str) -> Build:
    return lambda cls, features, heads, channels: cls(features, heads * channels, aggregator)


def _pyg_agnn(cls: type, features: int, heads: int, channels: int) -> torch.nn.Module:
    return cls()


def _dgl_agnn(cls: type, features: int, heads: int, channels: int) -> torch.nn.Module:
    return cls(allow_zero_in_degree=True)


LAYERS = {
    "gatv2": Layer(("GATv2Conv", _pyg_attention), ("GATv2Conv", _dgl_attention), True, "GATv2Conv"),
    "gat": Layer(("GATConv", _pyg_attention), ("GATConv", _dgl_attention), True, "GATConv"),
    "transformer": Layer(("TransformerConv", _pyg_attention), ("DotGatConv", _dgl_attention), False, "TransformerConv"),
    "agnn": Layer(("AGNNConv", _pyg_agnn), ("AGNNConv", _dgl_agnn), True, "AGNNConv"),
    "gcn": Layer(("GCNConv", _wide()), ("GraphConv", _dgl_graph_conv("both")), True, "GCNConv", True),
    "gcn-cached": Layer(
        ("GCNConv", _wide(cached=True)), ("GraphConv", _dgl_graph_conv("both")), True, "GCNConv(cached)", True
    ),
    # DGL has no such layer: its nearest lacks the product with the node's own features.
    "graphconv": Layer(("GraphConv", _wide()), ("GraphConv", _dgl_graph_conv("none")), False, "GraphConv", True),
    "sage-mean": Layer(("SAGEConv", _wide()), ("SAGEConv", _dgl_sage("mean")), False, "SAGEConv(mean)", True),
    "sage-max": Layer(("SAGEConv", _wide(aggr="max")), ("SAGEConv", _dgl_sage("pool")), False, "SAGEConv(max)", True),
}


def make_layer(name: str, framework: str, side: str, features: int, heads: int, channels: int) -> torch.nn.Module:
    """One side's layer, e.g. ("gatv2", "pyg", "edgeless") -> an edgeless.pyg.nn.GATv2Conv.

    Raises:
        AttributeError: edgeless has no such layer for this framework.
    """
    class_name, build = getattr(LAYERS[name], framework)
    return build(getattr(importlib.import_module(MODULES[framework, side]), class_name), features, heads, channels)
