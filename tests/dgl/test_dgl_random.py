"""Random layers on random graphs and features of every kind, against the stock layer in float64."""

from __future__ import annotations

import dgl
import dgl.nn as stock
import pytest
import torch
from dgl_cases import assert_close, run
from drawn import Drawn, assert_alike

import edgeless
import edgeless.dgl.nn as fused

ATTENTION = ("GATConv", "GATv2Conv", "DotGatConv")
LAYERS = (*ATTENTION, "AGNNConv", "GraphConv", "SAGEConv", "GINConv")
WEIGHTED = ("GATConv", "GraphConv", "SAGEConv", "GINConv")


class Case(Drawn):
    """One layer and one call, drawn from a seed."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.name = self.one_of(LAYERS)
        self.kind = self.one_of(("homogeneous", "homogeneous", "bipartite", "block"))
        self.idtype = self.one_of((torch.int64, torch.int32))
        self.graph = self._graph()
        self.is_pair = self.kind == "bipartite" or not self.often()
        self.widths = self.one_of(((2, 2), (4, 4), (5, 5), (4, 3)))
        if self.name in ("AGNNConv", "GINConv") or not self.is_pair:
            self.widths = self.widths[:1] * 2
        self.options = self._options()
        self.feat = self._feat()
        self.inputs = self._inputs()
        self.backend = self.one_of(("auto", "auto", "reference"))
        self.feat_grads = self.name == "AGNNConv" or self.often()  # else only beta's, perhaps all noise

    def _graph(self):
        num_src = self.one_of((0, 1, 2, 6, 6, 9))
        num_dst = self.one_of((1, 4, 9)) if self.kind == "bipartite" else num_src
        many = (8, 25) if num_src > 2 else (3,)  # among few nodes, softmax has no gradient but rounding
        num_edges = self.one_of((0, 1, *many)) if num_src and num_dst else 0
        src = torch.randint(num_src or 1, (num_edges,), generator=self.generator)
        dst = torch.randint(num_dst or 1, (num_edges,), generator=self.generator)
        if self.kind == "bipartite":
            sizes = {"a": num_src, "b": num_dst}
            return dgl.heterograph({("a", "r", "b"): (src, dst)}, sizes, idtype=self.idtype)
        graph = dgl.graph((src, dst), num_nodes=num_src, idtype=self.idtype)
        if self.kind == "block":
            seeds = torch.arange(0, num_src, 2, dtype=self.idtype)
            graph = dgl.to_block(dgl.in_subgraph(graph, seeds), seeds)
        return graph

    def _options(self):
        loose = {"allow_zero_in_degree": self.often()}
        if self.name == "AGNNConv":
            return loose
        if self.name == "GINConv":
            return {"aggregator_type": self.one_of(("sum", "mean", *self._maximum("max"))), "learn_eps": True}
        if self.name == "SAGEConv":
            aggregators = ("mean", "gcn", "gcn", "lstm", *self._maximum("pool"))
            return {"aggregator_type": self.one_of(aggregators), "bias": self.often()}
        if self.name == "GraphConv":
            norm = self.one_of(("none", "left", "right", "both"))
            return {"norm": norm, "bias": self.often(), "weight": self.often(), **loose}
        options = {"num_heads": self.one_of((1, 2)), **loose}
        if self.name == "DotGatConv":
            return options
        residual = not self.often() and self.graph.num_src_nodes() > 0  # which the stock layer cannot reshape
        options |= {"residual": residual, "bias": self.often(), "negative_slope": self.one_of((0.2, 1, -0.5))}
        if self.name == "GATv2Conv":
            options["share_weights"] = not self.often()
        return options

    def _maximum(self, name):
        """Not without edges, where DGL gives source 0 a gradient."""
        return (name,) if self.graph.num_edges() else ()

    def layer(self, package):
        torch.manual_seed(3)
        if self.name == "AGNNConv":
            layer = package.AGNNConv(**self.options)
        elif self.name == "GINConv":
            layer = package.GINConv(torch.nn.Linear(self.widths[0], 3), **self.options)
        else:
            width = self.widths if self.is_pair and self.name != "GraphConv" else self.widths[0]
            layer = getattr(package, self.name)(width, 3, **self.options)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        return layer.double()

    def _features(self, rows, width):
        form = self.one_of(("plain", "plain", "plain", "transposed", "expanded", "sliced", "coo", "csr"))
        x = self.randn(rows, width)
        if form == "transposed":
            return x.t().contiguous().t()
        if form == "expanded":
            return x[:1].expand(rows, width) if rows else x
        if form == "sliced":
            return torch.cat((x, x), 1)[:, 1 : 1 + width]
        return x.to_sparse() if form == "coo" else x.to_sparse_csr() if form == "csr" else x

    def _feat(self):
        x = self._features(self.graph.num_src_nodes(), self.widths[0])
        if not self.is_pair:
            return x
        same = self.kind == "homogeneous" and self.widths[0] == self.widths[1] and not self.often()
        return x, x if same else self._features(self.graph.num_dst_nodes(), self.widths[1])

    def _inputs(self):
        inputs = {}
        if self.name in WEIGHTED and not self.often():
            weight = self.randn(self.graph.num_edges())
            weight = weight.unsqueeze(1) if self.name != "GATConv" and not self.often() else weight
            inputs["edge_weight"] = weight.requires_grad_()
        if self.name in ATTENTION and not self.often():
            inputs["get_attention"] = True
        if self.name == "GraphConv" and not self.options["weight"] and self.often():
            inputs["weight"] = self.randn(self.widths[0], 3).requires_grad_()
        return inputs

    def __str__(self):
        feat = [(t.layout, tuple(t.shape)) for t in (self.feat if self.is_pair else [self.feat])]
        graph = (self.kind, self.idtype, self.graph.num_src_nodes(), self.graph.num_dst_nodes(), self.graph.num_edges())
        given = {k: tuple(v.shape) if isinstance(v, torch.Tensor) else v for k, v in self.inputs.items()}
        return f"{self.name} {self.options} graph={graph} feat={feat} {given} {self.backend} {self.feat_grads}"

    def as_dense(self):
        """Makes sparse features of GraphConv dense: a block and the norm of sources are too much for torch there."""
        feat = tuple(t.to_dense() for t in (self.feat if self.is_pair else (self.feat,)))
        self.feat = feat if self.is_pair else feat[0]
        return self.name == "GraphConv"

    def outcome(self, package):
        layer = self.layer(package)
        try:
            return run(layer, self.graph, self.feat, self.feat_grads, **self.inputs)
        except Exception as error:
            return error


def check(seed):
    case = Case(seed)
    want = case.outcome(stock)
    with edgeless.backend(case.backend):
        have = case.outcome(fused)
        if isinstance(want, Exception) and not isinstance(have, Exception) and case.as_dense():
            want, have = case.outcome(stock), case.outcome(fused)
    assert_alike(case, have, want, assert_close)


@pytest.mark.parametrize("seed", range(10))
def test_random_calls(seed):
    for i in range(30):
        check(seed * 30 + i)
