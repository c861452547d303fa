"""RelGraphConv and HGTConv on random graphs and blocks, against the stock layers in float64: results, gradients,
refusals. The stock layers get int64 ids.
"""

from __future__ import annotations

import dgl
import dgl.nn as stock
import pytest
import test_dgl_hgt
import test_dgl_relational
import torch
from dgl_cases import assert_close
from drawn import Drawn, assert_alike

import edgeless
import edgeless.dgl.nn as fused

LAYERS = ("RelGraphConv", "HGTConv")
IN, NODE_TYPES = 6, 3
REGULARIZERS = tuple(test_dgl_relational.REGULARIZERS.values())


class Case(Drawn):
    """One layer and one call, drawn from a seed."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.name = self.one_of(LAYERS)
        self.ids, self.type_ids = (self.one_of((torch.int64, torch.int32)) for _ in range(2))
        self.num_relations = self.one_of((1, 2, 5, 9))
        self.backend = self.one_of(("auto", "auto", "reference"))
        self.num_dst = self.one_of((1, 2, 6, 15))
        self.num_src = self.num_dst + self.one_of((0, 0, 5))
        self.ends = self._edges()
        num_edges = self.ends.size(1)
        self.x = torch.randn(self.num_src, IN, generator=self.generator, dtype=torch.float64)
        self.etypes = torch.randint(self.num_relations, (num_edges,), generator=self.generator)
        self.presorted = self.one_of((True, False, False))
        if self.presorted:
            self.etypes = self.etypes.sort().values
        flags = {name: self.one_of((True, False)) for name in ("bias", "self_loop", "layer_norm", "use_norm")}
        if self.name == "HGTConv":
            self.ntypes = torch.randint(NODE_TYPES, (self.num_src,), generator=self.generator)
            if self.presorted:
                self.ntypes = self.ntypes.sort().values
            self.shape = (self.one_of((1, 3, 4)), self.one_of((1, 2)))
            norm = flags["use_norm"] and self.shape != (1, 1)  # LayerNorm of one number is 0
            self.options = {"dropout": 0.0, "use_norm": norm}
            return
        weights = torch.rand(num_edges, 1, generator=self.generator, dtype=torch.float64)
        self.norm = self.one_of((None, weights))
        if flags["layer_norm"] and 1 in (self.num_src, num_edges):  # LayerNorm undoes the scale of a single row
            self.norm = None
        self.options = {
            **self.one_of(REGULARIZERS),
            **{name: flags[name] for name in ("bias", "self_loop", "layer_norm")},
            "activation": self.one_of((None, torch.tanh)),
        }

    def _edges(self):
        """At least one: the stock layers take no graph without. Several between two nodes; some nodes have none."""
        count = self.one_of((1, 7, 40))
        ends = [torch.randint(n, (count,), generator=self.generator) for n in (self.num_src, self.num_dst)]
        if self.one_of((True, False)):
            ends[self.one_of((0, 1))][: count // 2] = 0  # a hub
        return torch.stack(ends)

    def graph(self, ids):
        src, dst = self.ends.to(ids)
        if self.num_src == self.num_dst:
            return dgl.graph((src, dst), num_nodes=self.num_dst)
        return dgl.create_block((src, dst), num_src_nodes=self.num_src, num_dst_nodes=self.num_dst)

    def outcome(self, package, ids, type_ids):
        graph, etypes = self.graph(ids), self.etypes.to(type_ids)
        try:
            if self.name == "HGTConv":
                layer = package.HGTConv(IN, *self.shape, NODE_TYPES, self.num_relations, **self.options)
                layer = test_dgl_relational.draw(layer).double()
                rest = (self.ntypes.to(type_ids), etypes)
                return test_dgl_hgt.run(layer, graph, self.x, *rest, presorted=self.presorted)
            layer = package.RelGraphConv(IN, test_dgl_relational.OUT, self.num_relations, **self.options)
            layer = test_dgl_relational.draw(layer).double()
            return test_dgl_relational.run(layer, graph, self.x, etypes, self.norm, presorted=self.presorted)
        except Exception as error:
            return error

    def __str__(self):
        graph = (self.num_src, self.num_dst, self.ends.tolist(), self.etypes.tolist(), self.ids, self.type_ids)
        return f"{self.name} {self.options} presorted={self.presorted} {self.backend} {graph}"


def check(seed):
    case = Case(seed)
    want = case.outcome(stock, torch.int64, torch.int64)
    with edgeless.backend(case.backend):
        have = case.outcome(fused, case.ids, case.type_ids)
    assert_alike(case, have, want, assert_close)


@pytest.mark.parametrize("seed", range(4))
def test_random_calls(seed):
    for i in range(30):
        check(seed * 30 + i)
