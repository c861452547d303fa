"""Sparse features: what the stock layers do with them, and which part of it stays fused."""

import dgl
import dgl.nn as stock
import pytest
import torch
from dgl_cases import IN, assert_close, features, graph_named, run

import edgeless
import edgeless.dgl.nn as fused
import edgeless.dgl.ops

FEWER, MORE = 3, 9  # than the features
LAYERS = {
    "GATConv": ("GATConv", (IN, FEWER, 2), True),
    "GATv2Conv": ("GATv2Conv", (IN, FEWER, 2), True),
    "DotGatConv": ("DotGatConv", (IN, FEWER, 2), True),
    "AGNNConv": ("AGNNConv", (), False),
    "GINConv": ("GINConv", (None, "sum"), False),
    "GraphConv to fewer": ("GraphConv", (IN, FEWER, "right"), True),
    "GraphConv to more": ("GraphConv", (IN, MORE, "right"), False),
    "SAGEConv mean to fewer": ("SAGEConv", (IN, FEWER, "mean"), True),
    "SAGEConv mean to more": ("SAGEConv", (IN, MORE, "mean"), False),
    "SAGEConv gcn to fewer": ("SAGEConv", (IN, FEWER, "gcn"), True),
    "SAGEConv pool": ("SAGEConv", (IN, MORE, "pool"), True),
}


@pytest.mark.parametrize("layout", (torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr, torch.Tensor.to_mkldnn))
@pytest.mark.parametrize("layer", LAYERS)
def test_features_that_are_not_dense(layer, layout):
    """In float32, whose large maps are an op of edgeless: linear maps are torch's, what comes after them is fused."""
    name, options, maps_first = LAYERS[layer]
    graph = dgl.add_self_loop(graph_named("random"))
    x = layout(features(graph).detach())
    theirs, ours = (getattr(package, name)(*options) for package in (stock, fused))
    ours.load_state_dict(theirs.state_dict())
    explanation = edgeless.explain(ours, graph, x)
    assert explanation.fused == (maps_first and x.layout is not torch._mkldnn)
    assert explanation.fused or f"feat has the layout {x.layout}" in explanation.reasons
    try:
        want = run(theirs, graph, x)
    except Exception as error:
        with pytest.raises(type(error)):
            run(ours, graph, x)
        return
    assert_close(run(ours, graph, x), want)


@pytest.mark.parametrize("op", ("copy_u_sum", "copy_u_max"))
def test_ops_leave_them_to_dgl(op):
    graph = graph_named("random")
    x = features(graph).detach().to_sparse()
    assert "x has the layout torch.sparse_coo" in str(edgeless.explain(getattr(edgeless.dgl.ops, op), graph, x))
