"""Random HeteroGraphConvs over layers of one kind or of several, against the stock ones: results and gradients."""

from __future__ import annotations

import dgl
import dgl.nn as stock
import torch
from dgl_random_cases import DGLCall
from drawn import DENSE, drawn

import edgeless.dgl.nn as fused

PACKAGES = {"stock": stock, "fused": fused}


class Case(DGLCall):
    """One call. Mostly all relations have layers of one kind and options, which may be one sum."""

    def draw(self):
        self.idtype = self.one_of((torch.int64, torch.int32))
        self.width, self.out = self.one_of((6, 6, 1)), self.one_of((4, 4, 9, 1))
        self.sizes = {key: self.one_of((5, 12, 1)) for key in ("a", "b", "c")[: self.one_of((3, 2, 1))]}
        number = self.one_of((5, 4, 3, 9, 1))
        self.types = [(self.one_of(self.sizes), f"to{i}", self.one_of(self.sizes)) for i in range(number)]
        self.graph = self._graph()
        kind, alike = self._kind(), self.often()
        self.layers = {key[1]: kind if alike or self.often() else self._kind() for key in self.types}
        self.aggregate = self.one_of(("sum",) * 4 + ("mean", "mean", "max", "min", "stack"))
        self.is_pair = self.graph.is_block and not self.often()
        self.tensors |= {key: self.randn(self.graph.num_src_nodes(key), self.width) for key in self.graph.srctypes}
        self.forms = {key: self.one_of(DENSE) for key in self.tensors}
        if self.seldom():
            self.others[self.one_of(self.graph.srctypes)] = self.one_of(self.dtypes)
        self.draw_weights()

    def _graph(self):
        edges = {}
        for source, etype, destination in self.types:
            count = self.one_of((7, 40, 1))
            ends = self.randint(self.sizes[source], count), self.randint(self.sizes[destination], count)
            edges[source, etype, destination] = ends
        graph = dgl.heterograph(edges, self.sizes, idtype=self.idtype)
        if self.often():
            return graph
        seeds = {key: torch.arange(0, size, 2, dtype=self.idtype) for key, size in self.sizes.items()}
        return dgl.to_block(dgl.in_subgraph(graph, seeds), seeds)

    def _kind(self):
        """A layer's name and options."""
        name = self.one_of(("GraphConv", "GraphConv", "SAGEConv", "SAGEConv", "GATConv", "GINConv"))
        bias, activation = {"bias": self.often()}, {"activation": torch.tanh if self.seldom() else None}
        if name == "GraphConv":
            norm = self.one_of(("none", "left", "right", "both"))
            return name, {"norm": norm, "weight": not self.seldom(), **bias, **activation}
        if name == "SAGEConv":
            aggregator = self.one_of(("mean", "mean", "gcn"))
            return name, {"aggregator_type": aggregator, "feat_drop": self.dropout(), **bias, **activation}
        if name == "GATConv":
            return name, {"num_heads": 1, "negative_slope": 1.0, **bias, **activation}
        return name, {"aggregator_type": self.one_of(("sum", "mean")), "learn_eps": True, **activation}

    def draw_weights(self):
        """Of edges, and those of layers that have none of their own."""
        self.by_layer = {}
        for key in self.types:
            name, options = self.layers[key[1]]
            given = self.by_layer.setdefault(key[1], {})
            if name == "GraphConv" and not options["weight"]:
                given["weight"] = f"weight of {key[1]}"
                self.tensors[given["weight"]] = self.randn(self.width, self.out)
            if self.seldom() and self.seldom():
                given["edge_weight"] = f"edge_weight of {key[1]}"
                self.tensors[given["edge_weight"]] = self.randn(self.graph.num_edges(key)).abs() + 0.1

    def make(self, package):
        package, mods = PACKAGES[package], {}
        for etype, (name, options) in self.layers.items():
            if name == "GINConv":
                mods[etype] = package.GINConv(torch.nn.Linear(self.width, self.out), **options)
            else:
                mods[etype] = getattr(package, name)(self.width, self.out, **options)
        return package.HeteroGraphConv(mods, aggregate=self.aggregate)

    def call(self, package, layer, tensors):
        x = {key: tensors[key] for key in self.graph.srctypes}
        if self.is_pair:
            x = (x, {key: x[key][: self.graph.num_dst_nodes(key)] for key in self.graph.dsttypes})
        given = {
            etype: {name: tensors[key] for name, key in names.items()}
            for etype, names in self.by_layer.items()
            if names
        }
        return layer(self.graph, x, mod_kwargs=given)


def test_random_calls():
    @drawn(25)
    def check(rng):
        Case("HeteroGraphConv", rng).check()

    check()
