"""RelGraphConv, HGTConv and TypedLinear on random graphs and blocks, against the stock layers: results, gradients,
refusals. The stock layers get int64 ids.
"""

from __future__ import annotations

import dgl
import dgl.nn as stock
import pytest
import torch
from dgl_random_cases import DGLCall
from drawn import DENSE, drawn

import edgeless.dgl.nn as fused

PACKAGES = {"stock": stock, "fused": fused}
IN, OUT, NODE_TYPES = 6, 4, 3
REGULARIZERS = ({}, {"regularizer": "basis", "num_bases": 3}, {"regularizer": "bdd", "num_bases": 2})


class OverRelations(DGLCall):
    """A call of RelGraphConv or HGTConv."""

    def draw(self):
        self.ids, self.type_ids = (self.one_of((torch.int64, torch.int32)) for _ in range(2))
        self.num_relations = self.one_of((5, 2, 1, 9))
        self.num_dst = self.one_of((6, 15, 2, 1))
        self.num_src = self.num_dst + self.one_of((0, 0, 5))
        self.kind = "handle" if self.num_src == self.num_dst and self.seldom() else ""
        self._draw_edges()
        self.tensors["x"] = self.randn(self.num_src, IN)
        self.forms["x"] = self.one_of(DENSE)
        if self.seldom():
            self.others["x"] = self.one_of(self.dtypes)
        flags = {name: self.one_of((True, False)) for name in ("bias", "self_loop", "layer_norm", "use_norm")}
        if self.name == "HGTConv":
            self.ntypes = self.randint(NODE_TYPES, self.num_src)
            if self.presorted:
                self.ntypes = self.ntypes.sort().values
            self.shape = (self.one_of((3, 4, 1)), self.one_of((2, 1)))
            norm = flags["use_norm"] and self.shape != (1, 1)  # LayerNorm of one number is 0
            self.options = {"dropout": self.dropout(), "use_norm": norm}
            return
        self.options = {
            **self.one_of(REGULARIZERS),
            **{name: flags[name] for name in ("bias", "self_loop", "layer_norm")},
            "activation": self.one_of((None, torch.tanh)),
            "dropout": self.dropout(),
        }
        # LayerNorm undoes the scale of a single row.
        if self.often() and not (flags["layer_norm"] and 1 in (self.num_src, self.ends.size(1))):
            self.tensors["norm"] = self.randn(self.ends.size(1), 1).abs()
            if self.seldom():
                self.others["norm"] = self.one_of(self.dtypes)

    def _draw_edges(self):
        """At least one: the stock layers take no graph without. Several between two nodes; some nodes have none."""
        count = self.one_of((7, 40, 40, 1))
        self.ends = torch.stack((self.randint(self.num_src, count), self.randint(self.num_dst, count)))
        if not self.often():
            self.ends[self.one_of((0, 1)), : count // 2] = 0  # a hub
        self.etypes = self.randint(self.num_relations, count)
        self.presorted = self.seldom()
        if self.presorted:
            self.etypes = self.etypes.sort().values

    def make(self, package):
        package = PACKAGES[package]
        if self.name == "HGTConv":
            return package.HGTConv(IN, *self.shape, NODE_TYPES, self.num_relations, **self.options)
        return package.RelGraphConv(IN, OUT, self.num_relations, **self.options)

    def call(self, package, layer, tensors):
        ids, type_ids = (torch.int64,) * 2 if package == "stock" else (self.ids, self.type_ids)
        (src, dst), etypes = self.ends.to(ids), self.etypes.to(type_ids)
        if self.num_src == self.num_dst:
            graph = dgl.graph((src, dst), num_nodes=self.num_dst)
        else:
            graph = dgl.create_block((src, dst), num_src_nodes=self.num_src, num_dst_nodes=self.num_dst)
        graph = self.as_given(package, graph)
        if self.name == "HGTConv":
            return layer(graph, tensors["x"], self.ntypes.to(type_ids), etypes, presorted=self.presorted)
        return layer(graph, tensors["x"], etypes, tensors.get("norm"), presorted=self.presorted)


class TypedMap(DGLCall):
    """A call of TypedLinear."""

    def draw(self):
        self.ids, self.num_types = self.one_of((torch.int64, torch.int32)), self.one_of((4, 1, 9))
        count = self.one_of((30, 7, 1))
        self.types = self.randint(self.num_types, count)
        self.is_sorted = self.seldom()
        if self.is_sorted:
            self.types = self.types.sort().values
        self.options = self.one_of(REGULARIZERS)
        self.tensors["x"] = self.randn(count, IN)
        if self.backend != "reference":  # the stock layer takes views of blocks
            self.forms["x"] = self.one_of(DENSE)
        if self.seldom():
            self.others["x"] = self.one_of(self.dtypes)

    def make(self, package):
        return PACKAGES[package].TypedLinear(IN, OUT, self.num_types, **self.options)

    def call(self, package, layer, tensors):
        types, x = self.types.to(torch.int64 if package == "stock" else self.ids), tensors["x"]
        if package == "stock":
            x = x.contiguous()
        return layer(x, types, sorted_by_type=self.is_sorted)


LAYERS = {"RelGraphConv": OverRelations, "HGTConv": OverRelations, "TypedLinear": TypedMap}


@pytest.mark.parametrize("name", LAYERS)
def test_random_calls(name):
    @drawn(25)
    def check(rng):
        LAYERS[name](name, rng).check()

    check()
