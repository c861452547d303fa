"""Random layers on random input of every kind, against the stock layer: results, gradients and refusals.

The stock layer gets int64 ids, because of what torch does to the gradient of int32 ids.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch_geometric.nn as stock
from devices import EVERY_DEVICE
from drawn import DENSE, FORMS, DrawnCall, drawn
from hypothesis import assume
from sum_cases import construct
from torch_geometric import EdgeIndex
from torch_geometric.nn import MLP
from torch_geometric.typing import WITH_TORCH_SPARSE, SparseTensor

import edgeless
import edgeless.pyg.nn as fused

PACKAGES = {"stock": stock, "fused": fused}
ATTENTION = ("GATConv", "GATv2Conv", "TransformerConv")
LAYERS = (*ATTENTION, "AGNNConv", "GCNConv", "SAGEConv", "GINConv", "GraphConv")
TAKES_PAIRS = {*ATTENTION, "SAGEConv", "GINConv", "GraphConv"}
TAKES_SIZE = ("GATConv", "SAGEConv", "GINConv", "GraphConv")
WEIGHTED = ("GCNConv", "GraphConv")
KINDS = ("tensor",) * 4 + ("graph",) * 2 + ("edge_index",) * 3 + ("coo", "csr")
if WITH_TORCH_SPARSE:  # by which PyG multiplies an EdgeIndex: one without edges ends the process there
    KINDS = ("tensor",) * 4 + ("graph",) * 2 + ("coo", "csr") + ("torch_sparse",) * 3
SPARSE = ("coo", "csr", "torch_sparse")
# The maps of the destinations' own features, which may have another dtype than those of the sources'.
OF_DESTINATIONS = {
    "GATConv": ("lin_dst", "res"),
    "GATv2Conv": ("lin_r", "res"),
    "TransformerConv": ("lin_query", "lin_skip", "lin_beta"),
    "SAGEConv": ("lin_r",),
    "GINConv": ("nn",),
    "GraphConv": ("lin_root",),
}
EDGE_DIM = 2


for _package in (stock, fused):  # PyG writes a class' propagate() for its first instance, which may not be fusible
    for _name in ("GCNConv", "SAGEConv", "GINConv", "GraphConv"):
        construct(_package, _name)


class Case(DrawnCall):
    """One layer and one call."""

    dtypes = (*DrawnCall.dtypes, torch.float16)

    def draw(self):
        self.in_width, self.out_width = self.one_of((3, 13, 13, 1)), self.one_of((2, 2, 6, 1))
        pairs = ("two", "two", "same", "source") if self.name in TAKES_SIZE or self.seldom() else ("two", "same")
        self.pair = self.one_of((None, None, *pairs)) if self.name in TAKES_PAIRS else None
        self.num_src = self.one_of((5, 8, 30, 5, 8, 30, 5, 2, 1, 0))
        self.num_dst = self.one_of((self.num_src, 4, 9, 1)) if self.pair in ("two", "source") else self.num_src
        self.kind, self.ids = self.one_of(KINDS), self.one_of((torch.int64, torch.int32))
        narrow = self.dtype in (torch.bfloat16, torch.float16)
        if (self.kind in SPARSE and narrow) or (self.kind == "torch_sparse" and self.autocast is not None):
            self.kind = "tensor"  # there are no products of sparse matrices of 16 bits
        is_list = self.kind in ("tensor", "edge_index") or self.seldom()  # else the stock layers refuse
        flow = "target_to_source" if self.kind != "graph" and is_list and self.seldom() else "source_to_target"
        self.options = {"flow": flow, **self._options()}
        self._draw_edges()
        self._draw_features()
        self.given = self._given()
        self._draw_other_dtypes()

    # The layer

    def _options(self):
        loops = {"add_self_loops": self.one_of((True, False))}
        if self.name == "AGNNConv":
            return loops
        if self.name == "GCNConv":
            options = {"normalize": self.often(), "improved": self.one_of((True, False)), **loops}
            if not options["normalize"]:
                options["add_self_loops"] = False
            aggr = self.one_of(("sum", "sum", "mean"))
            return {"cached": not self.often(), "bias": self.often(), "aggr": aggr, **options}
        if self.name not in ATTENTION:
            aggr = self.one_of(("sum", "mean", "max", "min", "mul"))
            if self.name == "GINConv":
                self.begins_with = self.one_of(("a map", "maps", "maps", "an MLP", "nothing"))
                self.hidden = self.one_of((1, 2, 6))
                return {"train_eps": self.often(), "eps": self.one_of((0.0, -0.7)), "aggr": aggr}
            options = {"aggr": aggr, "bias": self.often()}
            if self.name == "SAGEConv":
                options |= {"normalize": self.seldom(), "root_weight": self.often()}
                options["project"] = not self.is_smooth and self.seldom()
            return options
        options = {
            "heads": self.one_of((1, 2, np.int64(2))),
            "concat": self.often(),
            "bias": self.often(),
            "dropout": self.dropout(),
            "edge_dim": self.one_of((None, EDGE_DIM, 1)),
            "aggr": self.one_of(("sum", "sum", "sum", "mean")),
        }
        if self.name == "TransformerConv":
            return {**options, "beta": not self.often(), "root_weight": self.often()}
        fill = self.one_of(("mean", "add", "max", "min", "mul", 0.5))
        slope = 1.0 if self.is_smooth else self.one_of((0.2, 0.2, 1, -0.5))
        options |= {**loops, "fill_value": fill, "residual": not self.often(), "negative_slope": slope}
        return {**options, "share_weights": self.seldom()} if self.name == "GATv2Conv" else options

    def make(self, package):
        package = PACKAGES[package]
        if self.name == "AGNNConv":
            return package.AGNNConv(**self.options)
        if self.name == "GINConv":
            return package.GINConv(self._network(), **self.options)
        width = (self.in_width,) * 2 if self.pair else self.in_width
        return getattr(package, self.name)(width, self.out_width, **self.options)

    def _network(self):
        bend = torch.nn.Identity if self.is_smooth else torch.nn.ReLU
        first, last = (self.in_width, self.hidden), (self.hidden, self.out_width)
        if self.begins_with == "maps":
            return torch.nn.Sequential(torch.nn.Linear(*first), bend(), torch.nn.Linear(*last))
        if self.begins_with == "an MLP":
            return MLP([*first, self.out_width], norm=None, act=bend())
        return torch.nn.Linear(*first) if self.begins_with == "a map" else torch.nn.Sequential(torch.nn.Tanh())

    # The graph

    def _draw_edges(self):
        self.rows, self.cols = self.num_src, self.num_dst
        num_edges = self.one_of((6, 20, 60, 20, 60, 20, 1, 0)) if self.rows and self.cols else 0
        edges = torch.stack((self.randint(self.rows, num_edges), self.randint(self.cols, num_edges)))
        if not self.often():
            edges[self.one_of((0, 1)), : num_edges // 2] = 0  # a hub
        self.order, self.layout, self.sizes = None, "plain", None
        if self.kind == "edge_index":
            self.order = self.one_of((None, "row", "col"))
            self.sizes = self.one_of(((None, None), (self.rows, self.cols), (self.rows, None), (None, self.cols)))
            if self.order:
                edges = edges[:, edges[int(self.order == "col")].argsort(stable=True)]
        elif self.kind == "tensor":
            self.layout = self.one_of(("plain", "strided", "expanded"))
            if self.layout == "expanded" and num_edges:
                edges = edges[:, :1].repeat(1, num_edges)
        elif self.kind != "graph":
            edges = edges.flip(0).unique(dim=1).flip(0)
        self.edges = edges
        if self.kind in ("coo", "csr") or self.often():
            self.tensors["values"] = torch.ones(edges.size(1), dtype=torch.float64)
        if not self.often():
            self.tensors["values"] = self.randn(edges.size(1)).abs() + 0.1

    def edge_index(self, package, values):
        edges = self.edges.to(self.device, torch.int64 if package == "stock" else self.ids)
        if self.kind == "graph":
            if package == "stock":
                return edges
            return edgeless.Graph.from_edge_index(edges, self.rows, self.cols)
        if self.kind == "tensor":
            if self.layout == "strided":
                return edges.t().contiguous().t()
            return edges[:, :1].expand(2, edges.size(1)) if self.layout == "expanded" and edges.size(1) else edges
        if self.kind == "edge_index":
            return EdgeIndex(edges, sparse_size=self.sizes, sort_order=self.order)
        (src, dst), shape = edges, (self.cols, self.rows)
        if self.kind == "torch_sparse":
            return SparseTensor(row=dst.long(), col=src.long(), value=values, sparse_sizes=shape, is_sorted=True)
        if self.kind == "coo":
            return torch.sparse_coo_tensor(torch.stack((dst, src)), values, shape, is_coalesced=True)
        pointers = torch.zeros(self.cols + 1, dtype=torch.int64, device=self.device)
        pointers[1:] = torch.bincount(dst, minlength=self.cols).cumsum(0)
        return torch.sparse_csr_tensor(pointers.to(edges.dtype), src, values, shape)

    # The rest

    def _draw_features(self):
        self.tensors["x_src"] = self.randn(self.num_src, self.in_width)
        if self.pair == "two":
            self.tensors["x_dst"] = self.randn(self.num_dst, self.in_width)
        maps_first = self.name in (*ATTENTION, "GCNConv") and self.dtype in (torch.float32, torch.float64)
        forms = FORMS if maps_first or self.seldom() else DENSE
        self.forms = {name: self.one_of(forms) for name in ("x_src", "x_dst")}
        self.pair_of = self.one_of((tuple, list))

    def _given(self):
        given, num_edges = {}, self.edges.size(1)
        if self.name in ATTENTION:
            edge_dim = self.options["edge_dim"]
            if edge_dim and (self.name == "TransformerConv" or self.often()):
                attr = self.randn(num_edges, edge_dim)
                self.tensors["edge_attr"] = attr.squeeze(1) if edge_dim == 1 and not self.often() else attr
            given["return_attention_weights"] = self.one_of((None, True, False))
        elif self.name in WEIGHTED and self.one_of((True, False)):
            self.tensors["edge_weight"] = self.randn(num_edges).abs() + 0.1
        if self.name in TAKES_SIZE:
            size = (self.num_src, self.num_dst)
            forms = (
                *[None] * 8,
                size,
                size,
                list(size),
                torch.Size(size),
                tuple(map(np.int64, size)),
                tuple(map(torch.tensor, size)),
                (size[0], None),
                (None, size[1]),
                (size[0], size[1] + 1),
            )
            given["size"] = self.one_of(forms if self.kind != "graph" else (None, size))
        return given

    def _draw_other_dtypes(self):
        if self.pair == "two" and not self.often():
            other = self.one_of(self.dtypes)
            self.others["x_dst"] = other
            for name in OF_DESTINATIONS[self.name]:
                if self.autocast is None and not self.seldom():
                    self.others[name] = other
            if self.name == "GINConv":
                self.others["nn"] = torch.promote_types(self.dtype, other)
        for name in ("edge_attr", "edge_weight"):
            # Without edges, what the result promotes to has no part of theirs in GATConv of PyG.
            if name in self.tensors and self.edges.size(1) and self.seldom():
                self.others[name] = self.one_of(self.dtypes)
                if name == "edge_attr" and self.autocast is None:
                    self.others["lin_edge"] = self.others[name]
        if self.autocast is not None and self.seldom():
            self.others["x_src"] = self.one_of((torch.float32, torch.bfloat16))

    def call(self, package, layer, tensors):
        given, x = dict(self.given), tensors["x_src"]
        index = self.edge_index(package, tensors["values"].detach() if "values" in tensors else None)
        if self.kind == "graph" and package == "stock" and self.name in TAKES_SIZE:
            given["size"] = (self.num_src, self.num_dst)  # which a handle says itself
        if self.pair is not None:
            x = self.pair_of((x, {"two": tensors.get("x_dst"), "same": x, "source": None}[self.pair]))
        given |= {name: tensors[name] for name in ("edge_attr", "edge_weight") if name in tensors}
        return layer(x, index, **given)

    def as_plain(self):
        """Makes the graph a plain edge list, where errors of the stock layer with this kind are its own defects.

        An EdgeIndex sorted by column is multiplied as float32 with float64 features, or has other sizes than they; and
        of sparse matrices with more rows than columns the stock layer cannot add loops to the values.
        """
        if self.kind == "edge_index" and self.name in TAKES_SIZE:  # it has its own size
            self.given["size"] = (None, self.sizes[1]) if self.pair == "source" else None
        elif self.kind in SPARSE and self.name in TAKES_SIZE:  # as has a matrix
            self.given["size"] = (self.num_src, self.num_dst)
        defect = self.kind == "edge_index" or (self.name in ATTENTION and self.num_dst > self.num_src)
        self.kind = "tensor"
        return defect

    def outcome(self, package, exact=False, device="cpu"):
        found = super().outcome(package, exact, device)
        if package != "stock" or not isinstance(found, Exception):
            return found
        kind, given = self.kind, dict(self.given)
        with edgeless.backend(self.backend):
            ours = super().outcome("fused", device="cpu")
        if not isinstance(ours, Exception) and self.as_plain():
            found = super().outcome("stock", exact)
        self.kind, self.given = kind, given
        return found


def _names_an_id(error):
    return isinstance(error, IndexError) and "has id" in str(error)


@EVERY_DEVICE
@pytest.mark.parametrize("name", LAYERS)
def test_random_calls(name, device):
    @drawn(40)
    def check(rng):
        case = Case(name, rng)
        if device == "cuda":  # the dtype of returned ids is the same question on every device
            case.ids = torch.int64
            extremum = case.options.get("aggr") in ("min", "max")
            assume(not (extremum and case.kind in ("coo", "csr")))  # of which PyG knows none there
        case.check(device, stands_for_any=_names_an_id)

    check()
