"""Random layers over relations and types on random graphs, against the stock layers: results, gradients, refusals.

The stock layers get int64 ids, because of what torch does to the gradient of int32 ids.
"""

from __future__ import annotations

import pytest
import torch
import torch_geometric.nn as stock
from devices import EVERY_DEVICE
from drawn import DENSE, DrawnCall, drawn
from test_pyg_rgat import with_one_map
from torch_geometric import EdgeIndex

import edgeless
import edgeless.pyg.nn as fused

PACKAGES = {"stock": stock, "fused": fused}
OUT, EDGE_DIM = 6, 2
REGULARIZERS = ({}, {}, {"num_bases": 2}, {"num_blocks": 2})
RGCN_FORMS = ("features", "features", "pair", "pair", "ids", "none")


class Relational(DrawnCall):
    """A call of RGCNConv, FastRGCNConv or RGATConv."""

    def draw(self):
        self.ids, self.type_ids = (self.one_of((torch.int64, torch.int32)) for _ in range(2))
        self.num_relations = self.one_of((5, 2, 1, 9))
        self.in_width = self.one_of((4, 4, 20))
        # Features that are ids FastRGCNConv of PyG takes for numbers of nodes.
        form = self.one_of([form for form in RGCN_FORMS if self.name == "RGCNConv" or form != "ids"])
        self.form = "features" if self.name == "RGATConv" else form
        self.num_src = self.one_of((6, 15, 2, 1))
        self.num_dst = self.one_of((1, 4, 15)) if self.form == "pair" else self.num_src
        self.width = self._draw_features()
        self.kind = self.one_of(("tensor", "tensor", "edge_index", "graph", "typed"))
        if self.name == "FastRGCNConv" and self.form == "none" and self.kind == "edge_index":
            self.kind = "tensor"  # an EdgeIndex' ids are of a class of their own, which fails in PyG's look-up of rows
        square = self.num_src == self.num_dst and self.kind in ("tensor", "edge_index")
        flow = "target_to_source" if square and self.seldom() else "source_to_target"
        self._draw_edges()
        in_width = self.width[0] if self.form == "pair" else self.width
        regularizer = self.one_of(REGULARIZERS if in_width % 2 == 0 else REGULARIZERS[:-1])
        options = self._attention() if self.name == "RGATConv" else self._sum()
        self.options = {"flow": flow, **regularizer, "bias": self.often(), **options}
        self.default_dtype = self.one_of((self.default_dtype, self.default_dtype, torch.float32))
        if self.name == "RGATConv":  # whose stock layer makes ones of the default dtype
            self.default_dtype = self.dtype

    def _draw_features(self):
        """The width that the constructor is told."""
        width = self.in_width
        if self.form == "ids":
            self.number_of_ids = 9
            self.node_ids = self.randint(9, self.num_src)
            return 9
        if self.form == "none":
            return self.num_src
        self.tensors["x_src"] = self.randn(self.num_src, width)
        self.forms = {name: self.one_of(DENSE) for name in ("x_src", "x_dst")}
        if self.form == "pair":
            self.tensors["x_dst"] = self.randn(self.num_dst, width - 1)
            if self.one_of((True, False)):
                self.others["x_dst"] = self.one_of(self.dtypes)
            return width, width - 1
        return width

    def _draw_edges(self):
        """With pairs of nodes that have several edges, and nodes without one."""
        count = self.one_of((7, 40, 7, 40, 40, 1, 0))
        self.edges = torch.stack((self.randint(self.num_src, count), self.randint(self.num_dst, count)))
        if not self.often():
            self.edges[self.one_of((0, 1)), : count // 2] = 0  # a hub
        self.edge_type = self.randint(self.num_relations, count)

    def _sum(self):
        aggr = self.one_of(("mean", "mean", "add", "add", *(("max", "min") if self.name == "RGCNConv" else ())))
        return {"aggr": aggr, "root_weight": self.often()}

    def _attention(self):
        mode = self.one_of(({}, {}, {"attention_mode": "multiplicative-self-attention"}))
        self.return_attention = self.one_of((None, None, True)) if self.kind == "tensor" else None
        options = {
            **mode,
            "attention_mechanism": self.one_of(("across-relation", "within-relation")),
            "mod": self.one_of((None, None, "additive", "scaled", "f-additive", "f-scaled")),
            "heads": self.one_of((1, 1, 2)),
            "dim": self.one_of((1, 2)) if mode else 1,
            "concat": self.often(),
            "dropout": self.dropout(),
            "negative_slope": 1.0 if self.is_smooth else self.one_of((0.2, 0.2, -0.5)),
        }
        if self.is_smooth and options["mod"] == "scaled":  # its map of degrees has kinks
            options["mod"] = None
        if options["dropout"] and options["mod"]:
            options["dropout"] = 0.0
        if not self.often():
            options["edge_dim"] = EDGE_DIM
            self.tensors["edge_attr"] = self.randn(self.edges.size(1), EDGE_DIM)
        return options

    def make(self, package):
        return getattr(PACKAGES[package], self.name)(self.width, OUT, self.num_relations, **self.options)

    def call(self, package, layer, tensors):
        ids, type_ids = (torch.int64,) * 2 if package == "stock" else (self.ids, self.type_ids)
        edges, edge_type = self.edges.to(self.device, ids), self.edge_type.to(self.device, type_ids)
        x = tensors.get("x_src")
        if self.form == "pair":
            x = (x, tensors["x_dst"])
        elif self.form == "ids":
            x = self.node_ids.to(self.device)
        if self.kind == "edge_index":
            edges = EdgeIndex(edges, sparse_size=(self.num_src, self.num_dst))
        elif package == "fused" and self.kind in ("graph", "typed"):
            edges = edgeless.Graph.from_edge_index(edges, self.num_src, self.num_dst)
            if self.kind == "typed":
                edges, edge_type = edgeless.TypedGraph(edges, edge_type, self.num_relations), None
        if self.name != "RGATConv":
            return layer(x, edges, edge_type)
        return layer(x, edges, edge_type, tensors.get("edge_attr"), None, self.return_attention)

    def outcome(self, *args, **kwargs):
        found = super().outcome(*args, **kwargs)
        return found if isinstance(found, Exception) or self.name != "RGATConv" else with_one_map(found)


class HeteroTypes(DrawnCall):
    """What is drawn of layers that take a dictionary by types of nodes."""

    def draw_nodes(self):
        self.sizes = {key: self.one_of((5, 12, 1, 0)) for key in ("a", "b", "c")[: self.one_of((3, 2, 1))]}
        self.widths = {key: self.one_of((OUT, OUT, 3)) for key in self.sizes}
        self.tensors |= {key: self.randn(size, self.widths[key]) for key, size in self.sizes.items()}
        self.forms = {key: self.one_of(DENSE) for key in self.sizes}
        for key in self.sizes:
            if self.seldom() and self.seldom():
                self.others[key] = self.one_of(self.dtypes)


class HGT(HeteroTypes):
    """A call of HGTConv."""

    def draw(self):
        self.draw_nodes()
        self.ids = self.one_of((torch.int64, torch.int32))
        types = [(self.one_of(self.sizes), f"to{i}", self.one_of(self.sizes)) for i in range(self.one_of((5, 1, 2, 9)))]
        self.options = {"metadata": (list(self.sizes), types), "heads": self.one_of((1, 2, 3))}
        there = [key for key in types if self.often()] or types[:1]
        self.edges = {key: self._edges(self.sizes[key[0]], self.sizes[key[2]]) for key in there}

    def _edges(self, num_src, num_dst):
        count = self.one_of((7, 40, 7, 40, 40, 1, 0)) if num_src and num_dst else 0
        edges = torch.stack((self.randint(num_src, count), self.randint(num_dst, count)))
        if not self.often():
            edges[self.one_of((0, 1)), : count // 2] = 0
        return edges

    def make(self, package):
        return PACKAGES[package].HGTConv(self.widths, OUT, **self.options)

    def call(self, package, layer, tensors):
        ids = torch.int64 if package == "stock" else self.ids
        return layer(tensors, {key: edges.to(self.device, ids) for key, edges in self.edges.items()})


class TypedMap(DrawnCall):
    """A call of HeteroLinear."""

    dtypes = (*DrawnCall.dtypes, torch.float16)

    def draw(self):
        self.ids, self.num_types = self.one_of((torch.int64, torch.int32)), self.one_of((4, 1, 9))
        self.in_width, self.out_width = self.one_of((6, 1, 20)), self.one_of((4, 1, 20))
        count = self.one_of((30, 7, 1, 0))
        self.types = self.randint(self.num_types, count)
        is_sorted = self.seldom()
        if is_sorted:
            self.types = self.types.sort().values
        self.tensors["x"] = self.randn(count, self.in_width)
        self.forms["x"] = self.one_of(DENSE)
        self.options = {"bias": self.often(), "is_sorted": is_sorted}
        if self.seldom():
            self.others["x"] = self.one_of(self.dtypes)

    def make(self, package):
        return PACKAGES[package].HeteroLinear(self.in_width, self.out_width, self.num_types, **self.options)

    def call(self, package, layer, tensors):
        return layer(tensors["x"], self.types.to(self.device, torch.int64 if package == "stock" else self.ids))


class MapsByType(HeteroTypes):
    """A call of HeteroDictLinear."""

    dtypes = (*DrawnCall.dtypes, torch.float16)

    def draw(self):
        self.draw_nodes()
        self.bias = self.often()
        self.given = [key for key in self.sizes if self.often()]

    def make(self, package):
        return PACKAGES[package].HeteroDictLinear(dict(self.widths), 4, bias=self.bias)

    def call(self, package, layer, tensors):
        return layer({key: tensors[key] for key in self.given})


LAYERS = {
    **dict.fromkeys(("RGCNConv", "FastRGCNConv", "RGATConv"), Relational),
    "HGTConv": HGT,
    "HeteroLinear": TypedMap,
    "HeteroDictLinear": MapsByType,
}


@EVERY_DEVICE
@pytest.mark.parametrize("name", LAYERS)
def test_random_calls(name, device):
    @drawn(25)
    def check(rng):
        LAYERS[name](name, rng).check(device)

    check()
