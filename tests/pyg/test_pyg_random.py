"""Random layers on random input of every kind, against the stock layer in float64: results, gradients and refusals.

The stock layer gets int64 ids, because of what torch does to the gradient of int32 ids.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch_geometric.nn as stock
from drawn import Drawn, assert_alike
from pyg_cases import assert_close, run
from sum_cases import construct
from torch_geometric import EdgeIndex
from torch_geometric.typing import WITH_TORCH_SPARSE, SparseTensor

import edgeless
import edgeless.pyg.nn as fused

ATTENTION = ("GATConv", "GATv2Conv", "TransformerConv")
LAYERS = (*ATTENTION, "AGNNConv", "GCNConv", "SAGEConv", "GINConv", "GraphConv")
TAKES_PAIRS = {*ATTENTION, "SAGEConv", "GINConv", "GraphConv"}
TAKES_SIZE = ("GATConv", "SAGEConv", "GINConv", "GraphConv")
KINDS = (
    "tensor",
    "tensor",
    "edge_index",
    "edge_index",
    "coo",
    "csr",
    *(("torch_sparse",) if WITH_TORCH_SPARSE else ()),
)
IN, OUT, EDGE_DIM = 3, 2, 2


for _package in (stock, fused):  # PyG writes a class' propagate() for its first instance, which may not be fusible
    for _name in ("GCNConv", "SAGEConv", "GINConv", "GraphConv"):
        construct(_package, _name)


class Case(Drawn):
    """One layer and one call, drawn from a seed."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.name = self.one_of(LAYERS)
        self.pair = self.one_of((None, None, "two", "same", "source")) if self.name in TAKES_PAIRS else None
        self.num_src = self.one_of((0, 1, 2, 5, 5, 8, 8))
        self.num_dst = self.one_of((self.num_src, 1, 4, 9)) if self.pair in ("two", "source") else self.num_src
        self.options = self._options()
        self.kind, self.ids = self.one_of(KINDS), self.one_of((torch.int64, torch.int32))
        self._draw_edges()
        self.backend = self.one_of(("auto", "auto", "reference"))
        self.given = self._inputs()

    # The layer

    def _options(self):
        flow = self.one_of(("source_to_target",) * 3 + ("target_to_source",))
        loops = {"add_self_loops": self.one_of((True, False))}
        if self.name == "AGNNConv":
            return {"flow": flow, **loops}
        if self.name == "GCNConv":
            options = {"normalize": self.often(), "improved": not self.often(), **loops}
            if not options["normalize"]:
                options["add_self_loops"] = False
            return {"flow": flow, "cached": not self.often(), "bias": self.often(), **options}
        if self.name not in ATTENTION:
            aggr = self.one_of(("sum", "mean", "max", "min", "mul"))
            options = {"train_eps": True} if self.name == "GINConv" else {"bias": self.often()}
            if self.name == "SAGEConv":
                options |= {"normalize": not self.often(), "root_weight": self.often(), "project": not self.often()}
            return {"flow": flow, "aggr": aggr, **options}
        options = {
            "flow": flow,
            "heads": self.one_of((1, 2, np.int64(2))),
            "concat": self.often(),
            "bias": self.often(),
        }
        options["edge_dim"] = self.one_of((None, EDGE_DIM, 1))
        options["aggr"] = self.one_of(("sum", "sum", "sum", "mean"))
        if self.name == "TransformerConv":
            return {**options, "beta": not self.often(), "root_weight": self.often()}
        fill = self.one_of(("mean", "add", "max", "min", "mul", 0.5))
        return {**options, **loops, "fill_value": fill, "residual": not self.often()}

    def layer(self, package):
        torch.manual_seed(3)
        if self.name == "AGNNConv":
            layer = package.AGNNConv(**self.options)
        else:
            width = (IN, IN) if self.pair and self.name != "GINConv" else IN
            layer = construct(package, self.name, width, OUT, **self.options)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        return layer.double()

    # The graph

    def _draw_edges(self):
        self.rows, self.cols = self.num_src, self.num_dst
        num_edges = self.one_of((0, 1, 6, 20)) if self.rows and self.cols else 0
        src = torch.randint(self.rows or 1, (num_edges,), generator=self.generator)
        dst = torch.randint(self.cols or 1, (num_edges,), generator=self.generator)
        edges = torch.stack((src, dst))
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
        else:
            edges = edges.flip(0).unique(dim=1).flip(0)
        self.edges = edges
        self.values = self.one_of((None, None, self.randn(edges.size(1)).abs() + 0.1))

    def edge_index(self, ids):
        edges = self.edges.to(ids)
        if self.kind == "tensor":
            if self.layout == "strided":
                return edges.t().contiguous().t()
            return edges[:, :1].expand(2, edges.size(1)) if self.layout == "expanded" and edges.size(1) else edges
        if self.kind == "edge_index":
            return EdgeIndex(edges, sparse_size=self.sizes, sort_order=self.order)
        (src, dst), shape = edges, (self.cols, self.rows)
        if self.kind == "torch_sparse":
            return SparseTensor(row=dst.long(), col=src.long(), value=self.values, sparse_sizes=shape, is_sorted=True)
        values = torch.ones(src.numel(), dtype=torch.float64) if self.values is None else self.values
        if self.kind == "coo":
            return torch.sparse_coo_tensor(torch.stack((dst, src)), values, shape, is_coalesced=True)
        pointers = torch.zeros(self.cols + 1, dtype=torch.int64)
        pointers[1:] = torch.bincount(dst, minlength=self.cols).cumsum(0)
        return torch.sparse_csr_tensor(pointers.to(ids), src, values, shape)

    # The rest

    def features(self, rows):
        x = self.randn(rows, IN)
        form = self.one_of(("plain", "plain", "plain", "transposed", "expanded", "sliced", "coo", "csr"))
        if form == "transposed":
            return x.t().contiguous().t()
        if form == "expanded":
            return x[:1].expand(rows, IN) if rows else x
        if form == "sliced":
            return torch.cat((x, x), 1)[:, 1 : 1 + IN]
        return x.to_sparse() if form == "coo" else x.to_sparse_csr() if form == "csr" else x

    def _inputs(self):
        x = self.features(self.num_src)
        if self.pair is not None:
            other = {"two": lambda: self.features(self.num_dst), "same": lambda: x, "source": lambda: None}[self.pair]()
            x = self.one_of((tuple, list))((x, other))
        given = {}
        num_edges = self.edges.size(1)
        if self.name in ATTENTION:
            edge_dim = self.options["edge_dim"]
            if edge_dim and (self.name == "TransformerConv" or self.often()):
                attr = self.randn(num_edges, edge_dim)
                given["edge_attr"] = attr.squeeze(1) if edge_dim == 1 and not self.often() else attr
            given["return_attention_weights"] = self.one_of((None, True, False))
        elif self.name in ("GCNConv", "GraphConv") and not self.often():
            given["edge_weight"] = self.randn(num_edges).abs() + 0.1
        if self.name in TAKES_SIZE:
            size = (self.num_src, self.num_dst)
            forms = (
                None,
                None,
                size,
                list(size),
                torch.Size(size),
                tuple(map(np.int64, size)),
                tuple(map(torch.tensor, size)),
                (size[0], None),
                (None, size[1]),
                (size[0], size[1] + 1),
            )
            given["size"] = self.one_of(forms)
        return x, given

    def __str__(self):
        x, given = self.given
        shapes = [(t.layout, tuple(t.shape)) if isinstance(t, torch.Tensor) else t for t in (x if self.pair else [x])]
        given = {k: tuple(v.shape) if isinstance(v, torch.Tensor) else v for k, v in given.items()}
        graph = (self.kind, self.ids, self.order, self.sizes, self.layout, tuple(self.edges.shape))
        return f"{self.name} {self.options} x={self.pair} {shapes} graph={graph} {given} {self.backend}"

    def as_plain(self):
        """Makes the graph a plain edge list, where errors of the stock layer with this kind are its own defects.

        An EdgeIndex sorted by column is multiplied as float32 with float64 features, or has other sizes than they; and
        of sparse matrices with more rows than columns the stock layer cannot add loops to the values.
        """
        if self.kind == "edge_index" and self.name in TAKES_SIZE:  # it has its own size
            self.given[1]["size"] = (None, self.sizes[1]) if self.pair == "source" else None
        defect = self.kind == "edge_index" or (self.name in ATTENTION and self.num_dst > self.num_src)
        self.kind = "tensor"
        return defect

    def outcome(self, package, ids):
        layer, (x, given) = self.layer(package), self.given
        index = self.edge_index(ids)

        def call(x, **kwargs):
            return layer(x, index, **kwargs)

        try:
            return run(call, layer, x, **given)
        except Exception as error:
            return error


def _names_an_id(error):
    return isinstance(error, IndexError) and "has id" in str(error)


def check(seed):
    case = Case(seed)
    want = case.outcome(stock, torch.int64)
    with edgeless.backend(case.backend):
        have = case.outcome(fused, case.ids)
    if isinstance(want, Exception) and not isinstance(have, Exception) and case.as_plain():
        want = case.outcome(stock, torch.int64)
    assert_alike(case, have, want, assert_close, stands_for_any=_names_an_id)


@pytest.mark.parametrize("seed", range(10))
def test_random_calls(seed):
    for i in range(30):
        check(seed * 30 + i)
