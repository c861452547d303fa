"""Random layers on random graphs and features of every kind, against the stock layer: results, gradients, refusals."""

from __future__ import annotations

import dgl
import dgl.nn as stock
import pytest
import torch
from dgl_random_cases import DGLCall
from drawn import DENSE, FORMS, drawn

import edgeless.dgl.nn as fused

PACKAGES = {"stock": stock, "fused": fused}
ATTENTION = ("GATConv", "GATv2Conv", "DotGatConv")
LAYERS = (*ATTENTION, "AGNNConv", "GraphConv", "SAGEConv", "GINConv")
WEIGHTED = ("GATConv", "GraphConv", "SAGEConv", "GINConv")
# The maps of the destinations' own features, which may have another dtype than those of the sources'.
OF_DESTINATIONS = {"GATConv": ("fc_dst", "res_fc"), "GATv2Conv": ("fc_dst", "res_fc"), "DotGatConv": ("fc_dst",)}
OF_DESTINATIONS |= {"SAGEConv": ("fc_self",), "GINConv": ("apply_func",)}
WIDTHS = ((2, 2), (4, 4), (13, 13), (4, 3), (1, 1))


class Case(DGLCall):
    """One layer and one call."""

    sparse_gradients = True

    def draw(self):
        self.kind = self.one_of(("homogeneous", "homogeneous", "bipartite", "block", "handle"))
        self.idtype = self.one_of((torch.int64, torch.int32))
        self.graph = self._graph()
        self.is_pair = self.kind == "bipartite" or self.one_of((True, False))
        self.widths, self.out = self.one_of(WIDTHS), self.one_of((3, 1, 6))
        if self.name in ("AGNNConv", "GINConv") or not self.is_pair:
            self.widths = self.widths[:1] * 2
        self.options = self._options()
        self._draw_features()
        self.flags = self._draw_inputs()
        if self.name == "AGNNConv":  # else only beta's gradient, perhaps all noise
            self.wanted = {"feat", "feat_dst"}

    def _graph(self):
        num_src = self.one_of((6, 9, 30, 6, 9, 30, 2, 1, 0))
        num_dst = self.one_of((4, 9, 1)) if self.kind == "bipartite" else num_src
        many = (8, 25, 60) if num_src > 2 else (3,)  # among few nodes, softmax has no gradient but rounding
        num_edges = self.one_of((*many, *many, 1, 0)) if num_src and num_dst else 0
        ends = [self.randint(num_src, num_edges), self.randint(num_dst, num_edges)]
        if not self.often():
            ends[self.one_of((0, 1))][: num_edges // 2] = 0  # a hub
        src, dst = ends
        if self.kind in ("bipartite", "handle"):  # a handle's graph has two types of nodes for DGL
            sizes = {"a": num_src, "b": num_dst}
            return dgl.heterograph({("a", "r", "b"): (src, dst)}, sizes, idtype=self.idtype)
        graph = dgl.graph((src, dst), num_nodes=num_src, idtype=self.idtype)
        if self.kind == "block":
            seeds = torch.arange(0, num_src, 2, dtype=self.idtype)
            graph = dgl.to_block(dgl.in_subgraph(graph, seeds), seeds)
        return graph

    def _options(self):
        loose, bent = {"allow_zero_in_degree": not self.seldom()}, {"activation": self.one_of((None, None, torch.tanh))}
        if self.name == "AGNNConv":
            return {**loose, "init_beta": self.one_of((1.0, -0.4)), "learn_beta": self.often()}
        if self.name == "GINConv":
            self.begins_with = self.one_of(("a map", "maps", "nothing"))
            aggregator = self.one_of(("sum", "mean", *self._maximum("max")))
            return {
                "aggregator_type": aggregator,
                "learn_eps": self.often(),
                "init_eps": self.one_of((0, -0.7)),
                **bent,
            }
        if self.name == "SAGEConv":
            pool = () if self.is_smooth else self._maximum("pool")
            aggregators = ("mean", "mean", "gcn", "gcn", "lstm", *pool)
            self.has_norm = self.seldom()
            options = {"aggregator_type": self.one_of(aggregators), "bias": self.often()}
            return {**options, "feat_drop": self.dropout(), **bent}
        if self.name == "GraphConv":
            norm = self.one_of(("none", "left", "right", "both"))
            return {"norm": norm, "bias": self.often(), "weight": self.often(), **loose, **bent}
        options = {"num_heads": self.one_of((1, 2)), **loose}
        if self.name == "DotGatConv":
            return options
        residual = not self.often() and self.graph.num_src_nodes() > 0  # which the stock layer cannot reshape
        slope = 1.0 if self.is_smooth else self.one_of((0.2, 0.2, 1, -0.5))
        options |= {"residual": residual, "bias": self.often(), "negative_slope": slope, **bent}
        options |= {"feat_drop": self.dropout(), "attn_drop": self.dropout()}
        if self.name == "GATv2Conv":
            options["share_weights"] = not self.often()
        return options

    def _maximum(self, name):
        """Not without edges, where DGL gives source 0 a gradient."""
        return (name,) if self.graph.num_edges() else ()

    def make(self, package):
        package = PACKAGES[package]
        if self.name == "AGNNConv":
            return package.AGNNConv(**self.options)
        if self.name == "GINConv":
            linear = torch.nn.Linear(self.widths[0], self.out)
            networks = {"a map": linear, "maps": torch.nn.Sequential(linear, torch.nn.Tanh()), "nothing": None}
            return package.GINConv(networks[self.begins_with], **self.options)
        width = self.widths if self.is_pair and self.name != "GraphConv" else self.widths[0]
        if self.name == "SAGEConv" and self.has_norm:
            return package.SAGEConv(width, self.out, norm=torch.nn.LayerNorm(self.out), **self.options)
        return getattr(package, self.name)(width, self.out, **self.options)

    def _draw_features(self):
        self.tensors["feat"] = self.randn(self.graph.num_src_nodes(), self.widths[0])
        self.is_same = self.kind in ("homogeneous", "handle") and self.widths[0] == self.widths[1] and not self.often()
        if self.is_pair and not self.is_same:
            self.tensors["feat_dst"] = self.randn(self.graph.num_dst_nodes(), self.widths[1])
            if not self.often():
                other = self.one_of(self.dtypes)
                self.others["feat_dst"] = other
                self.others |= {name: other for name in OF_DESTINATIONS.get(self.name, ()) if self.often()}
        elif self.name == "GINConv" and self.seldom():  # and epsilon has that of the layer
            self.others["feat"] = self.one_of(self.dtypes)
            self.others["apply_func"] = torch.promote_types(self.dtype, self.others["feat"])
        forms = FORMS if self.dtype in (torch.float32, torch.float64) else DENSE
        self.forms = {name: self.one_of(forms) for name in ("feat", "feat_dst")}

    def _draw_inputs(self):
        if self.name in WEIGHTED and not self.often():
            weight = self.randn(self.graph.num_edges())
            self.tensors["edge_weight"] = weight if self.name == "GATConv" or self.often() else weight.unsqueeze(1)
            if self.seldom():
                self.others["edge_weight"] = self.one_of(self.dtypes)
        if self.name == "GraphConv" and not self.options["weight"] and self.often():
            self.tensors["weight"] = self.randn(self.widths[0], self.out)
        return {"get_attention": True} if self.name in ATTENTION and not self.often() else {}

    def call(self, package, layer, tensors):
        feat = tensors["feat"]
        if self.is_pair:
            feat = (feat, feat if self.is_same else tensors["feat_dst"])
        given = {name: tensors[name] for name in ("edge_weight", "weight") if name in tensors}
        return layer(self.as_given(package, self.graph, self.is_pair), feat, **given, **self.flags)

    def check(self):
        """Where DGL cannot take sparse features of GraphConv, since a block and the norm of sources are too much for
        torch there, they are dense.
        """
        if self.name == "GraphConv" and isinstance(self.outcome("stock"), Exception):
            self.forms = {}
        super().check()


@pytest.mark.parametrize("name", LAYERS)
def test_random_calls(name):
    @drawn(40)
    def check(rng):
        Case(name, rng).check()

    check()
