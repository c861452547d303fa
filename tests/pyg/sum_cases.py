"""Layers that take sums or extrema of neighbours: pairs of upstream and fused layer, and their inputs."""

from __future__ import annotations

import torch
import torch_geometric.nn as stock
from pyg_cases import GRAPHS, IN, OUT, assert_close, features, node_features, run, run_fused
from torch_geometric.typing import WITH_TORCH_SPARSE, SparseTensor

import edgeless.pyg.nn as fused

SUMS = ("GCNConv", "SAGEConv", "GINConv", "GraphConv")
PAIRS = ("SAGEConv", "GINConv", "GraphConv")  # take source and destination features
WEIGHTED = ("GCNConv", "GraphConv")  # take edge_weight
SQUARE = [name for name, (_, num_src, num_dst) in GRAPHS.items() if num_src == num_dst]
SPARSE = ("torch_sparse", "coo", "csr") if WITH_TORCH_SPARSE else ("coo", "csr")


def graphs_of(name):
    return SQUARE if name == "GCNConv" else list(GRAPHS)


def construct(package, name, in_channels=IN, out_channels=OUT, **options):
    """A layer; GINConv gets the multilayer perceptron of its paper."""
    if name != "GINConv":
        return getattr(package, name)(in_channels, out_channels, **options)
    width = in_channels if isinstance(in_channels, int) else in_channels[0]
    mlp = torch.nn.Sequential(torch.nn.Linear(width, 6), torch.nn.ReLU(), torch.nn.Linear(6, out_channels))
    return package.GINConv(mlp, **options)


def sum_pair(name, in_channels=IN, out_channels=OUT, dtype=torch.float32, seed=5, **options):
    """(upstream layer, fused layer) with equal parameters, none of them zero."""
    theirs = construct(stock, name, in_channels, out_channels, **options)
    ours = construct(fused, name, in_channels, out_channels, **options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)
    ours.load_state_dict(theirs.state_dict())
    return theirs.to(dtype), ours.to(dtype)


def weights_of(graph, dtype=torch.float32):
    """Positive weights ``[E]``: the square roots of GCN's degrees stay real."""
    return features(graph[0].size(1), 1, torch.float64, seed=19).squeeze(1).abs().add(0.1).to(dtype)


def with_ties(x):
    """``x`` with many equal entries, zeros among them; one tensor or a pair."""
    return tuple(map(with_ties, x)) if isinstance(x, tuple) else (x * 1.5).round()


def distinct(graph):
    """The graph without multi-edges, sorted by destination: the order in which a sparse matrix stores its values."""
    edge_index = graph[0].flip(0).unique(dim=1).flip(0).contiguous()
    return edge_index, graph[1], graph[2]


def as_sparse(kind, graph, values=None, dtype=torch.float32):
    """The transposed adjacency matrix of a graph sorted by :func:`distinct`."""
    (src, dst), num_src, num_dst = graph
    if kind == "torch_sparse":
        return SparseTensor(row=dst, col=src, value=values, sparse_sizes=(num_dst, num_src), is_sorted=True)
    values = torch.ones(src.numel(), dtype=dtype) if values is None else values
    matrix = torch.sparse_coo_tensor(torch.stack((dst, src)), values, (num_dst, num_src), is_coalesced=True)
    if kind == "coo":
        return matrix
    rows = torch.zeros(num_dst + 1, dtype=torch.int64)
    rows[1:] = torch.bincount(dst, minlength=num_dst).cumsum(0)
    return torch.sparse_csr_tensor(rows, src, values, (num_dst, num_src))


def assert_same(theirs, ours, *inputs, tolerance=None, **kwargs):
    """Asserts that the fused layer's outputs and gradients are the upstream layer's."""
    assert_close(run_fused(ours, *inputs, **kwargs), run(theirs, theirs, *inputs, **kwargs), tolerance)


def assert_sum_parity(name, graph, *, dtype=torch.float32, weighted=False, ties=False, pair=None, **options):
    """:func:`assert_same` on one of the graphs."""
    x = node_features(graph, dtype, pair)
    x = with_ties(x) if ties else x
    if isinstance(x, tuple) and name != "GINConv":
        options.setdefault("in_channels", (IN, IN))
    inputs = (x, graph[0], weights_of(graph, dtype)) if weighted else (x, graph[0])
    assert_same(*sum_pair(name, dtype=dtype, **options), *inputs)
