"""Layers by name: how each framework builds one with the same sizes, and the graph that it takes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor

from .relations import DGLEdges, PygDictionaries, PygEdges, Relations, TypedInput

# What a user would import a layer from.
MODULES = {
    ("pyg", "stock"): "torch_geometric.nn",
    ("pyg", "edgeless"): "edgeless.pyg.nn",
    ("dgl", "stock"): "dgl.nn",
    ("dgl", "edgeless"): "edgeless.dgl.nn",
}

Build = Callable[..., torch.nn.Module]  # (class, features, heads, channels, dropout[, relations])


@dataclass(frozen=True)
class Layer:
    """A layer that both frameworks may have.

    Attributes:
        pyg, dgl: (class name, how to build it), or None where the framework has no such layer.
        self_loops: PyG's layer adds self loops, so DGL's graph gets them beforehand and all peers have the same edges.
        baseline: the layer's name in a file of peer figures.
        maps: the layer has a linear map of its own, and so decides how wide its output is.
        multiplies: PyG's layer multiplies by a sparse matrix if it gets one, which is faster than edge tensors.
        types: whether a layer over relations gets the types of "edges" or of "edges and nodes"; its build function then
            takes the graph's :class:`Relations` as well.
        has_heads: the output has heads.
        edge_features: the features per edge; 0: as many as the output has; None: edges have no features.
        group: the kind of message of a layer that the generator runs.
    """

    pyg: tuple[str, Build]
    dgl: Optional[tuple[str, Build]]
    self_loops: bool
    baseline: str
    multiplies: bool = False
    maps: bool = True
    types: Optional[str] = None
    has_heads: bool = False
    edge_features: Optional[int] = None
    group: Optional[str] = None

    @property
    def classes(self) -> list[str]:
        """The names of its classes, each once."""
        return list(dict.fromkeys(entry[0] for entry in (self.pyg, self.dgl) if entry is not None))


def _pyg_attention(cls: type, features: int, heads: int, channels: int, dropout: float) -> torch.nn.Module:
    return cls(features, channels, heads=heads, dropout=dropout)


def _dgl_attention(cls: type, features: int, heads: int, channels: int, dropout: float) -> torch.nn.Module:
    return cls(features, channels, num_heads=heads, attn_drop=dropout, allow_zero_in_degree=True)


def _dgl_dot(cls: type, features: int, heads: int, channels: int, dropout: float) -> torch.nn.Module:
    return cls(features, channels, num_heads=heads, allow_zero_in_degree=True)  # the layer has no dropout


def _wide(**options) -> Build:
    """A layer without heads, as wide as the heads together."""
    return lambda cls, features, heads, channels, dropout: cls(features, heads * channels, **options)


def _dgl_graph_conv(norm: str) -> Build:
    return _wide(norm=norm, allow_zero_in_degree=True)


def _dgl_sage(aggregator: str) -> Build:
    return lambda cls, features, heads, channels, dropout: cls(features, heads * channels, aggregator)


def _typed(cls: type, features: int, heads: int, channels: int, dropout: float, relations: Relations):
    return cls(features, heads * channels, relations.num_types)


def _rgat(cls: type, features: int, heads: int, channels: int, dropout: float, relations: Relations):
    return cls(features, channels, relations.num_types, heads=heads, dropout=dropout)


def _pyg_hgt(cls: type, features: int, heads: int, channels: int, dropout: float, relations: Relations):
    return cls(features, heads * channels, relations.metadata, heads=heads)  # the layer has no dropout


def _dgl_hgt(cls: type, features: int, heads: int, channels: int, dropout: float, relations: Relations):
    return cls(features, channels, heads, relations.num_node_types, relations.num_types, dropout=dropout)


def _agnn(**options) -> Build:
    return lambda cls, features, heads, channels, dropout: cls(**options)


def _gin(cls: type, features: int, heads: int, channels: int, dropout: float) -> torch.nn.Module:
    width = heads * channels
    perceptron = (torch.nn.Linear(features, width), torch.nn.BatchNorm1d(width), torch.nn.ReLU())
    return cls(torch.nn.Sequential(*perceptron, torch.nn.Linear(width, width)))


LAYERS = {
    "gatv2": Layer(("GATv2Conv", _pyg_attention), ("GATv2Conv", _dgl_attention), True, "GATv2Conv", has_heads=True),
    "gat": Layer(("GATConv", _pyg_attention), ("GATConv", _dgl_attention), True, "GATConv", has_heads=True),
    "transformer": Layer(
        ("TransformerConv", _pyg_attention), ("DotGatConv", _dgl_dot), False, "TransformerConv", has_heads=True
    ),
    "agnn": Layer(("AGNNConv", _agnn()), ("AGNNConv", _agnn(allow_zero_in_degree=True)), True, "AGNNConv", maps=False),
    "gcn": Layer(("GCNConv", _wide()), ("GraphConv", _dgl_graph_conv("both")), True, "GCNConv", True),
    "gcn-cached": Layer(
        ("GCNConv", _wide(cached=True)), ("GraphConv", _dgl_graph_conv("both")), True, "GCNConv(cached)", True
    ),
    # DGL has no such layer: its nearest lacks the product with the node's own features.
    "graphconv": Layer(("GraphConv", _wide()), ("GraphConv", _dgl_graph_conv("none")), False, "GraphConv", True),
    "sage-mean": Layer(("SAGEConv", _wide()), ("SAGEConv", _dgl_sage("mean")), False, "SAGEConv(mean)", True),
    "sage-max": Layer(("SAGEConv", _wide(aggr="max")), ("SAGEConv", _dgl_sage("pool")), False, "SAGEConv(max)", True),
    "gin": Layer(("GINConv", _gin), ("GINConv", _gin), False, "GINConv", True),
    "rgcn": Layer(("RGCNConv", _typed), ("RelGraphConv", _typed), False, "RGCNConv", types="edges"),
    "rgat": Layer(("RGATConv", _rgat), None, False, "RGATConv", types="edges", has_heads=True),
    "hgt": Layer(
        ("HGTConv", _pyg_hgt), ("HGTConv", _dgl_hgt), False, "HGTConv", types="edges and nodes", has_heads=True
    ),
}


# Layers that the generator runs (docs/design.md), all of PyG and as wide as their input -------------------------------

NARROW = 16  # features of an edge, if they are narrower than a node's
SUMS, CHANNELS, WIDE, NARROW_EDGES, PRODUCTS = GROUPS = (
    "pointwise sums and means",
    "softmax by channel, moments",
    "edge features of full width",
    "narrow edge features",
    "a product by edge",
)
# The degrees by which PNA scales its results; their values do not change the time.
_PNA = {
    "aggregators": ["mean", "min", "max", "std"],
    "scalers": ["identity", "amplification", "attenuation"],
    "deg": torch.arange(10),
}


def _generated(class_name: str, group: str, label: str, build: Build, edge_features: Optional[int] = None) -> Layer:
    return Layer((class_name, build), None, False, label, edge_features=edge_features, group=group)


def _edge_conv(aggr: str) -> Build:
    def build(cls: type, features: int, heads: int, channels: int, dropout: float) -> torch.nn.Module:
        from .own_perceptrons import perceptron

        return cls(perceptron(2 * features, heads * channels, heads * channels), aggr=aggr)

    return build


def _point_net(cls: type, features: int, heads: int, channels: int, dropout: float) -> torch.nn.Module:
    from .own_perceptrons import point_net

    return point_net(cls)(features, heads * channels)


def _edge_filter(cls: type, features: int, heads: int, channels: int, dropout: float) -> torch.nn.Module:
    from .own_perceptrons import edge_filter

    return edge_filter(cls)(features, heads * channels, NARROW)


def _gine(edge_features: Optional[int]) -> Build:
    def build(cls: type, features: int, heads: int, channels: int, dropout: float) -> torch.nn.Module:
        return cls(torch.nn.Linear(features, heads * channels), edge_dim=edge_features)

    return build


def _own_attention(cls: type, features: int, heads: int, channels: int, dropout: float) -> torch.nn.Module:
    from .own_attention import own_attention

    return own_attention(cls)(features, heads * channels, NARROW)


GENERATED = {
    "resgated": _generated("ResGatedGraphConv", SUMS, "ResGatedGraphConv", _wide()),
    "film": _generated("FiLMConv", SUMS, "FiLMConv", _wide()),
    "edge-sum": _generated("EdgeConv", SUMS, "EdgeConv(sum)", _edge_conv("sum")),
    "gen": _generated("GENConv", CHANNELS, "GENConv(softmax)", _wide(learn_t=True, num_layers=1), 0),
    "pna": _generated("PNAConv", CHANNELS, "PNAConv", _wide(**_PNA)),
    "gine": _generated("GINEConv", WIDE, "GINEConv", _gine(None), 0),
    "gine-16": _generated("GINEConv", NARROW_EDGES, "GINEConv(edge_dim=16)", _gine(NARROW), NARROW),
    "cg": _generated("CGConv", NARROW_EDGES, "CGConv(dim=16)", lambda cls, features, *_: cls(features, NARROW), NARROW),
    "own-attention": _generated("MessagePassing", NARROW_EDGES, "own attention", _own_attention, NARROW),
    "edge-max": _generated("EdgeConv", PRODUCTS, "EdgeConv(max)", _edge_conv("max")),
    "point-net": _generated("PointNetConv", PRODUCTS, "PointNetConv", _point_net),
    "edge-filter": _generated("MessagePassing", PRODUCTS, "edge filter", _edge_filter, NARROW),
}
EVERY_LAYER = {**LAYERS, **GENERATED}
DEMO_LAYERS = {**LAYERS, "own-attention": GENERATED["own-attention"]}


def make_layer(
    name: str,
    framework: str,
    side: str,
    features: int,
    heads: int,
    channels: int,
    dropout: float = 0.0,
    relations: Optional[Relations] = None,
) -> torch.nn.Module:
    """One side's layer, e.g. ("gatv2", "pyg", "edgeless") -> an edgeless.pyg.nn.GATv2Conv.

    Args:
        relations: the graph's types, for a layer over relations.

    Raises:
        AttributeError: edgeless has no such layer for this framework.
    """
    class_name, build = getattr(EVERY_LAYER[name], framework)
    cls = getattr(importlib.import_module(MODULES[framework, side]), class_name)
    types = () if EVERY_LAYER[name].types is None else (relations,)
    return build(cls, features, heads, channels, dropout, *types)


def make_graph(framework: str, edge_index: Tensor, num_nodes: int, self_loops: bool):
    """The graph argument of a layer: PyG's edge_index, or a DGLGraph.

    Args:
        self_loops: PyG's layer adds self loops; DGL's graph then gets them here, so that both have the same edges.
    """
    if framework == "pyg":
        return edge_index
    import dgl

    graph = dgl.graph((edge_index[0], edge_index[1]), num_nodes=num_nodes)
    return dgl.add_self_loop(dgl.remove_self_loop(graph)) if self_loops else graph


def make_input(name: str, framework: str, edge_index: Tensor, num_nodes: int, relations: Optional[Relations]):
    """The graph argument of :func:`call_layer`: the result of :func:`make_graph`, or a :class:`TypedInput`."""
    layer = EVERY_LAYER[name]
    if layer.types is None:
        return make_graph(framework, edge_index, num_nodes, layer.self_loops)
    with_nodes = layer.types == "edges and nodes"
    if framework == "dgl":
        return DGLEdges(edge_index, num_nodes, relations, with_nodes)
    if with_nodes:
        return PygDictionaries.of(edge_index, num_nodes, relations)
    return PygEdges(edge_index, num_nodes, relations.edge_type)


def call_layer(framework: str, layer: torch.nn.Module, x: Tensor, graph) -> Tensor:
    """The layer's result, ``[N, H * C]``; DGL's layers have their heads in a dimension of their own."""
    if isinstance(graph, TypedInput):
        return graph(layer, x)
    return layer(x, graph) if framework == "pyg" else layer(graph, x).flatten(1)
