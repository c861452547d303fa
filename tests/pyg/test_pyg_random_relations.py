"""Random layers over relations on random graphs, against the stock layers in float64: results, gradients, refusals.

The stock layers get int64 ids, because of what torch does to the gradient of int32 ids.
"""

from __future__ import annotations

import pytest
import test_pyg_hgt
import torch
import torch_geometric.nn as stock
from drawn import Drawn, assert_alike
from pyg_cases import assert_close, run
from test_pyg_rgat import with_one_map

import edgeless
import edgeless.pyg.nn as fused

LAYERS = ("RGCNConv", "FastRGCNConv", "RGATConv", "HGTConv")
IN, OUT, EDGE_DIM = 4, 6, 2
REGULARIZERS = ({}, {}, {"num_bases": 2}, {"num_blocks": 2})


class Case(Drawn):
    """One layer and one call, drawn from a seed."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.name = self.one_of(LAYERS)
        self.ids = self.one_of((torch.int64, torch.int32))
        self.num_relations = self.one_of((1, 2, 5, 9))
        self.backend = self.one_of(("auto", "auto", "reference"))
        if self.name == "HGTConv":
            self._draw_hgt()
        else:
            self._draw()

    def edges(self, num_src, num_dst):
        """With pairs of nodes that have several edges, and nodes without one."""
        count = self.one_of((0, 1, 7, 40)) if num_src and num_dst else 0
        ends = [torch.randint(n or 1, (count,), generator=self.generator) for n in (num_src, num_dst)]
        if self.one_of((True, False)):
            ends[self.one_of((0, 1))][: count // 2] = 0  # a hub
        return torch.stack(ends)

    # RGCNConv and RGATConv

    def _draw(self):
        forms = {
            "RGCNConv": ("features", "pair", "ids", "none"),
            "FastRGCNConv": ("features", "pair", "none"),  # where features are ids it takes numbers of nodes for them
            "RGATConv": ("features",),
        }
        form = self.one_of(forms[self.name])
        num_src = self.one_of((1, 2, 6, 15))
        num_dst = self.one_of((1, 4, 15)) if form == "pair" else num_src
        self.width = IN if form == "features" else (IN, IN - 1) if form == "pair" else 9 if form == "ids" else num_src
        if form == "pair":
            self.x = (self.randn(num_src, IN), self.randn(num_dst, IN - 1))
        elif form == "ids":
            self.x = torch.randint(9, (num_src,), generator=self.generator)
        else:
            self.x = self.randn(num_src, IN) if form == "features" else None
        self.edge_index = self.edges(num_src, num_dst)
        num_edges = self.edge_index.size(1)
        self.edge_type = torch.randint(self.num_relations, (num_edges,), generator=self.generator)
        self.given, regularizer = {}, self.one_of(REGULARIZERS)
        if self.name != "RGATConv":
            aggr = self.one_of(("mean", "add", "max") if self.name == "RGCNConv" else ("mean", "add"))
            more = {"root_weight": self.one_of((True, False)), "bias": self.one_of((True, False))}
            self.options = {**regularizer, "aggr": aggr, **more}
            return
        mode = self.one_of(({}, {"attention_mode": "multiplicative-self-attention"}))
        self.options = {
            **regularizer,
            **mode,
            "attention_mechanism": self.one_of(("across-relation", "within-relation")),
            "mod": self.one_of((None, None, "additive", "scaled", "f-additive", "f-scaled")),
            "heads": self.one_of((1, 1, 2)),
            "dim": self.one_of((1, 2)) if mode else 1,
            "concat": self.one_of((True, False)),
            "bias": self.one_of((True, False)),
        }
        if self.one_of((True, False, False)):
            self.options["edge_dim"] = EDGE_DIM
            self.given["edge_attr"] = self.randn(num_edges, EDGE_DIM)

    # HGTConv

    def _draw_hgt(self):
        sizes = {key: self.one_of((1, 5, 12)) for key in ("a", "b", "c")[: self.one_of((1, 2, 3))]}
        types = [(self.one_of(sizes), f"to{i}", self.one_of(sizes)) for i in range(self.num_relations)]
        widths = {key: self.one_of((OUT, OUT, 3)) for key in sizes}
        self.width, self.options = widths, {"metadata": (list(sizes), types), "heads": self.one_of((1, 2))}
        self.x = {key: self.randn(size, widths[key]) for key, size in sizes.items()}
        there = [key for key in types if self.one_of((True, True, False))] or types[:1]
        self.edge_index = {key: self.edges(sizes[key[0]], sizes[key[2]]) for key in there}

    # Both

    def layer(self, package):
        torch.manual_seed(3)
        options = dict(self.options)
        more = [options.pop("metadata")] if self.name == "HGTConv" else [self.num_relations]
        layer = getattr(package, self.name)(self.width, OUT, *more, **options)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in layer.parameters():
                # Small, lest a softmax rounds to 0: to such a weight f-additive adds 1 in our layer alone.
                parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
        return layer.double()

    def outcome(self, package, ids):
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)  # the stock layers' zeros are of the default dtype
        try:
            layer = self.layer(package)
            if self.name == "HGTConv":
                return test_pyg_hgt.run(layer, self.x, {key: e.to(ids) for key, e in self.edge_index.items()})
            rest = (self.edge_index.to(ids), self.edge_type.to(ids))
            found = run(lambda x, **given: layer(x, *rest, **given), layer, self.x, **self.given)
            return with_one_map(found) if self.name == "RGATConv" else found
        except Exception as error:
            return error
        finally:
            torch.set_default_dtype(default)

    def __str__(self):
        graph = self.edge_index if self.name == "HGTConv" else (self.edge_index.tolist(), self.edge_type.tolist())
        return f"{self.name} {self.width} {self.options} {self.ids} {self.backend} {graph}"


def check(seed):
    case = Case(seed)
    want = case.outcome(stock, torch.int64)
    with edgeless.backend(case.backend):
        have = case.outcome(fused, case.ids)
    assert_alike(case, have, want, assert_close)


@pytest.mark.parametrize("seed", range(6))
def test_random_calls(seed):
    for i in range(30):
        check(seed * 30 + i)
