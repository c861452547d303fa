"""Random HeteroConvs over layers of one kind or of several, against the stock ones: results, gradients, refusals."""

from __future__ import annotations

import pytest
import torch
import torch_geometric.nn as stock
from devices import EVERY_DEVICE
from drawn import DENSE, DrawnCall, drawn
from pyg_cases import features, random_edges
from torch_geometric import EdgeIndex

import edgeless.pyg.nn as fused

PACKAGES = {"stock": stock, "fused": fused}
OUT = 4


class Case(DrawnCall):
    """One call. Mostly all relations have layers of one kind and options, which may be one sum."""

    def draw(self):
        self.ids = self.one_of((torch.int64, torch.int32))
        self.width = self.one_of((6, 6, 1))
        self.sizes = {key: self.one_of((5, 12, 1)) for key in ("a", "b", "c")[: self.one_of((3, 2, 1))]}
        number = self.one_of((5, 4, 3, 9, 1))
        types = [(self.one_of(self.sizes), f"to{i}", self.one_of(self.sizes)) for i in range(number)]
        self.is_sorted = not self.often()
        self.edges = {key: self._edges(self.sizes[key[0]], self.sizes[key[2]]) for key in types if not self.seldom()}
        kind, alike = self._kind(), self.often()
        self.layers = {key: kind if alike or self.often() else self._kind() for key in types}
        self.aggr = self.one_of(("sum",) * 4 + ("mean", "max", "min", "cat", None))
        self.tensors |= {key: self.randn(size, self.width) for key, size in self.sizes.items()}
        self.forms = {key: self.one_of(DENSE) for key in self.sizes}
        if self.seldom():
            self.others[self.one_of(self.sizes)] = self.one_of(self.dtypes)
        self.weighted = not any(name in ("SAGEConv", "GINConv") for name, _ in self.layers.values()) and self.seldom()
        if self.weighted:
            self.tensors |= {key: self.randn(edges.size(1)).abs() + 0.1 for key, edges in self.edges.items()}

    def _kind(self):
        """A layer's name and options."""
        name = self.one_of(("SAGEConv", "SAGEConv", "GraphConv", "GraphConv", "GINConv", "GATv2Conv"))
        flow = {"flow": "target_to_source"} if self.seldom() else {}
        aggr = self.one_of(("mean", "sum", "add", "max", "min") * 2 + ("mul", "median"))
        if name == "SAGEConv":
            options = {"normalize": self.seldom(), "project": not self.is_smooth and self.seldom()}
            return name, {"aggr": aggr, "root_weight": self.often(), "bias": self.often(), **options, **flow}
        if name == "GraphConv":
            return name, {"aggr": aggr, "bias": self.often(), **flow}
        if name == "GINConv":
            return name, {"aggr": aggr, "train_eps": True, **flow}
        return name, {"heads": 1, "add_self_loops": False, "negative_slope": 1.0, "bias": self.often(), **flow}

    def _edges(self, num_src, num_dst):
        count = self.one_of((7, 40, 7, 40, 1, 0))
        edges = torch.stack((self.randint(num_src, count), self.randint(num_dst, count)))
        return edges[:, edges[0].argsort(stable=True)] if self.is_sorted else edges

    def make(self, package):
        package, convs = PACKAGES[package], {}
        for key, (name, options) in self.layers.items():
            if name == "GINConv":
                convs[key] = package.GINConv(torch.nn.Linear(self.width, OUT), **options)
            else:
                convs[key] = getattr(package, name)((self.width, self.width), OUT, **options)
        return package.HeteroConv(convs, aggr=self.aggr)

    def call(self, package, layer, tensors):
        edges = {
            key: e.to(self.device, torch.int64 if package == "stock" else self.ids) for key, e in self.edges.items()
        }
        if self.is_sorted:
            edges = {
                key: EdgeIndex(e, sparse_size=(self.sizes[key[0]], self.sizes[key[2]]), sort_order="row")
                for key, e in edges.items()
            }
        x = {key: tensors[key] for key in self.sizes}
        if not self.weighted:
            return layer(x, edges)
        name = "edge_attr_dict" if "GATv2Conv" in {name for name, _ in self.layers.values()} else "edge_weight_dict"
        return layer(x, edges, **{name: {key: tensors[key] for key in edges}})


@EVERY_DEVICE
def test_random_calls(device):
    @drawn(25)
    def check(rng):
        Case("HeteroConv", rng).check(device)

    check()


@pytest.mark.parametrize("name", ["SAGEConv", "GraphConv"])
def test_flow_within_many_relations(name):
    """Each layer sums the way that it says; between two types of nodes only from the sources to the destinations."""
    types = [("a", f"to{i}", "a") for i in range(5)]
    edges = {key: random_edges(9, 9, 30, seed=i) for i, key in enumerate(types)}
    flows = ["source_to_target", "target_to_source", "target_to_source", "source_to_target", "source_to_target"]
    convs = [
        {key: getattr(package, name)(6, OUT, flow=flow) for key, flow in zip(types, flows, strict=True)}
        for package in (stock, fused)
    ]
    theirs, ours = stock.HeteroConv(convs[0]).double(), fused.HeteroConv(convs[1]).double()
    ours.load_state_dict(theirs.state_dict())
    x = {"a": features(9, 6, torch.float64)}
    torch.testing.assert_close(ours(x, edges)["a"], theirs(x, edges)["a"])
