"""Every reason for which a graph or a weight is not taken: one call for each, and the words of explain."""

from __future__ import annotations

import ast
import inspect

import pytest
import torch
from pyg_cases import GRAPHS, IN, OUT, features
from torch_geometric import EdgeIndex
from torch_geometric.nn.aggr import MeanAggregation
from torch_geometric.utils import to_torch_coo_tensor

import edgeless
import edgeless.pyg.nn as fused
from edgeless.pyg import convert, neighbors

EDGES = GRAPHS["random"][0]
X, ONE = features(40), torch.ones(EDGES.size(1))
COO = to_torch_coo_tensor(EDGES.flip(0), size=(40, 40))
UNCOALESCED = torch.sparse_coo_tensor(EDGES.flip(0), ONE, (40, 40), is_coalesced=False, check_invariants=True)
BY_COL = EDGES[:, EDGES[1].argsort(stable=True)]
NO_LOOPS = {"add_self_loops": False}


def with_values(values):
    """A matrix with these values in place of its own."""
    return torch.sparse_coo_tensor(COO.indices(), values, (40, 40, *values.shape[1:]), is_coalesced=True)


def gat(*inputs, **options):
    return fused.GATConv(IN, OUT, **options), inputs


def graph_conv(*inputs, **options):
    return fused.GraphConv(IN, OUT, **options), inputs


def changed(name, value, *inputs):
    layer, given = graph_conv(*inputs)
    setattr(layer, name, value)
    return layer, given


# Words of the reason -> calls for which it is given.
CASES = {
    "edge_index is not an int64 or int32 tensor of shape [2, E]": [
        lambda: gat(X, EDGES.float()), lambda: gat(X, EDGES[0]), lambda: gat(X, EDGES[:1])
    ],
    "flow 'target_to_source' is combined with different numbers of sources and destinations": [
        lambda: gat((X, X[:39]), EDGES % 39, flow="target_to_source", **NO_LOOPS)
    ],
    "the EdgeIndex has other sizes than the node features": [
        lambda: gat(X, EdgeIndex(EDGES, sparse_size=(41, 40))), lambda: gat(X, EdgeIndex(EDGES, sparse_size=(40, 41)))
    ],
    "flow 'target_to_source' is not defined for a sparse matrix": [
        lambda: gat(X, COO, flow="target_to_source", **NO_LOOPS)
    ],
    "edge_index has the layout torch.sparse_csc": [lambda: gat(X, COO.to_sparse_csc(), **NO_LOOPS)],
    "edge_index is a sparse matrix that is not coalesced": [
        lambda: gat(X, UNCOALESCED, **NO_LOOPS), lambda: graph_conv(X, UNCOALESCED)
    ],
    "edge_index is not a matrix of shape [num_dst, num_src]": [
        lambda: gat(X[:39], COO, **NO_LOOPS), lambda: gat((X, X[:39]), COO, **NO_LOOPS),
        lambda: gat((X[:39], X), COO, **NO_LOOPS),
    ],
    "self loops are added to a sparse matrix with features": [
        lambda: gat(X, with_values(torch.ones(COO._nnz(), 2)), edge_dim=2),
        lambda: gat(X, COO, edge_dim=1, fill_value=torch.ones(1)),
    ],
    "size is (40, 41) and the features have the sizes": [lambda: graph_conv(X, EDGES, None, (40, 41))],
    "size is (41, 40) and the features have the sizes": [lambda: graph_conv(X, EDGES, None, (41, 40))],
    "the layer's fuse is off, which changes what it means": [lambda: changed("fuse", False, X, COO)],
    "aggr is 'add' and aggr_module is": [lambda: changed("aggr_module", MeanAggregation(), X, COO)],
    "the stock layer then takes no notice of its flow": [
        lambda: graph_conv(X, EdgeIndex(BY_COL, sparse_size=(40, 40), sort_order="col"), flow="target_to_source")
    ],
    "has as many destinations as its largest id says": [
        lambda: graph_conv((X, None), EdgeIndex(BY_COL, sort_order="col"))
    ],
    "and the messages are weighted": [lambda: graph_conv(X, EDGES, ONE, aggr="max")],
    "edge_weight: not a plain floating tensor on the device of the features": [
        lambda: graph_conv(X, EDGES, ONE.long()), lambda: graph_conv(X, EDGES, ONE.to("meta"))
    ],
    "the values of edge_index have 2 dimensions": [lambda: graph_conv(X, with_values(torch.ones(COO._nnz(), 1)))],
    "the values of edge_index are torch.float64 and the features are torch.float32": [
        lambda: graph_conv(X, with_values(torch.ones(COO._nnz(), dtype=torch.float64)))
    ],
    "edge_weight does not have the shape [E] = [300]": [
        lambda: graph_conv(X, EDGES, ONE[1:]), lambda: graph_conv(X, EDGES, ONE.view(1, -1))
    ],
    "edge_weight is torch.float64 and the features are torch.float32": [lambda: graph_conv(X, EDGES, ONE.double())],
}  # fmt: skip
AUTOCAST = {"autocast is on and edge_index is a torch.sparse matrix": [lambda: graph_conv(X, COO)]}
# Reasons that no call here can have.
ELSEWHERE = (
    "the SparseTensor has another shape than [num_dst, num_src]",  # needs torch_sparse
    "the stock layer does not add self loops with edge features to a SparseTensor",
    "autocast is on and ",  # the same
    "a DistGraph has in-edges and the layer's flow is 'target_to_source'",  # needs a partition
)


def reasons_of(*functions):
    """The text of every reason that these functions give, a list of its constant parts."""
    for function in functions:
        source = inspect.getsource(function)
        for node in ast.walk(ast.parse(source.replace("\n    ", "\n").lstrip())):
            given = node.value if isinstance(node, ast.Return) else None
            if isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "append":
                given = node.args[0]
            parts = given.values if isinstance(given, ast.JoinedStr) else [given]
            texts = [p.value for p in parts if isinstance(p, ast.Constant) and isinstance(p.value, str)]
            if texts:
                yield texts


def said(case):
    layer, inputs = case()
    found = edgeless.explain(layer, *inputs)
    assert not found.fused
    return "; ".join(found.reasons)


@pytest.mark.parametrize("words", CASES)
def test_every_call_says_why(words):
    for case in CASES[words]:
        assert words in said(case)


def test_under_autocast():
    for words, cases in AUTOCAST.items():
        with torch.autocast("cpu"):
            assert all(words in said(case) for case in cases)


def test_the_same_calls_without_the_reason_run_fused():
    for layer, inputs in (gat(X, EDGES), gat(X, COO, **NO_LOOPS), graph_conv(X, EDGES, ONE), graph_conv(X, COO)):
        assert edgeless.explain(layer, *inputs).fused


def test_every_reason_has_a_call():
    kinds = convert.EdgeList, convert.SortedEdgeList, convert.SparseMatrix, convert.SparseStorage, convert.Part
    of_sums = [getattr(neighbors.NeighborReduction, f"_{name}_refusal{s}") for name, s in (
        ("reduction", "s"), ("size", ""), ("weight", ""),
    )]  # fmt: skip
    every = [*CASES, *AUTOCAST, *ELSEWHERE]
    missing = [
        parts
        for parts in reasons_of(*(kind.refusal for kind in kinds), *of_sums)
        if not any(words in part or part.strip() in words for words in every for part in parts if len(part) > 8)
    ]
    assert not missing, "no call has these reasons"
