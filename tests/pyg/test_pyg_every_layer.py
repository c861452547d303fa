"""What is true of every layer of PyG: see every_layer.py."""

import pytest
import torch
import torch_geometric.nn as stock
from devices import EVERY_DEVICE
from every_layer import (
    CHANGES,
    Case,
    assert_changes_are_seen,
    assert_gradients_have_memory_of_their_own,
    assert_results_may_be_written_over,
    assert_trains_alike,
    layers_of,
    pair_of,
)
from pyg_cases import features, random_edges

import edgeless
import edgeless.pyg.nn as fused
from edgeless.choices.backends import LAYERS

NODES, IN, OUT, EDGE_DIM, RELATIONS = 12, 6, 4, 3, 3
X = features(NODES, IN, torch.float64)
EDGES = random_edges(NODES, NODES, 50)
ATTR = features(50, EDGE_DIM, torch.float64, seed=3)
WEIGHTS = ATTR[:, 0].abs() + 0.1
TYPES = torch.arange(50) % RELATIONS
GROUPS = torch.tensor([0, 3, 3, 8, NODES])

# Of nodes of two types; several relations lead to each.
SIZES = {"a": NODES, "b": 7}
KEYS = [("a", "to", "b"), ("b", "to", "a"), ("a", "of", "a"), ("a", "by", "a"), ("b", "of", "b")]
X_DICT = {key: features(size, IN, torch.float64, seed=size) for key, size in SIZES.items()}
EDGE_DICT = {key: random_edges(SIZES[key[0]], SIZES[key[2]], 30, seed=i) for i, key in enumerate(KEYS)}


def hetero(make):
    return Case(lambda m: m.HeteroConv({key: make(m) for key in KEYS}), (X_DICT, EDGE_DICT))


def mlp(*widths):
    return torch.nn.Sequential(torch.nn.Linear(*widths[:2]), torch.nn.Tanh(), torch.nn.Linear(*widths[1:]))


CASES = {
    "AGNNConv": Case(lambda m: m.AGNNConv(), (X, EDGES)),
    "FastRGCNConv": Case(lambda m: m.FastRGCNConv(IN, OUT, RELATIONS), (X, EDGES, TYPES)),
    "GATConv": Case(lambda m: m.GATConv(IN, OUT, 2), (X, EDGES)),
    "GATConv with all": Case(
        lambda m: m.GATConv(IN, OUT, 2, edge_dim=EDGE_DIM, residual=True), (X, EDGES, ATTR, None, True)
    ),
    "GATConv of a pair": Case(lambda m: m.GATConv((IN, IN), OUT, 2, concat=False), ((X, X + 1), EDGES)),
    "GATv2Conv": Case(lambda m: m.GATv2Conv(IN, OUT, 2), (X, EDGES)),
    "GATv2Conv with all": Case(
        lambda m: m.GATv2Conv(IN, OUT, 2, edge_dim=EDGE_DIM, residual=True), (X, EDGES, ATTR, True)
    ),
    "GATv2Conv of one map": Case(lambda m: m.GATv2Conv(IN, OUT, 2, share_weights=True, bias=False), (X, EDGES)),
    "GCNConv": Case(lambda m: m.GCNConv(IN, OUT), (X, EDGES, WEIGHTS)),
    "GCNConv to more": Case(lambda m: m.GCNConv(IN, 9, bias=False), (X, EDGES)),
    "GINConv": Case(lambda m: m.GINConv(mlp(IN, 3, OUT), train_eps=True), (X, EDGES)),
    "GINConv of an MLP": Case(lambda m: m.GINConv(stock.MLP([IN, 3, OUT])), (X, EDGES)),
    "GINConv, max": Case(lambda m: m.GINConv(mlp(IN, 8, OUT), aggr="max"), (X, EDGES)),
    "GPSConv": Case(lambda m: m.GPSConv(IN, m.GINConv(mlp(IN, 3, IN)), norm="layer_norm"), (X, EDGES)),
    "GraphConv": Case(lambda m: m.GraphConv(IN, OUT), (X, EDGES, WEIGHTS)),
    "GraphConv, max": Case(lambda m: m.GraphConv((IN, IN), 9, aggr="max"), ((X, X + 1), EDGES)),
    "HGTConv": Case(lambda m: m.HGTConv(IN, OUT, (list(SIZES), KEYS), 2), (X_DICT, EDGE_DICT)),
    "HGTConv with skips": Case(lambda m: m.HGTConv(IN, IN, (list(SIZES), KEYS), 2), (X_DICT, EDGE_DICT)),
    "HeteroConv of GATConv": hetero(lambda m: m.GATConv((IN, IN), OUT, add_self_loops=False)),
    "HeteroConv of GraphConv": hetero(lambda m: m.GraphConv((IN, IN), OUT)),
    "HeteroConv of SAGEConv": hetero(lambda m: m.SAGEConv((IN, IN), OUT)),
    "HeteroConv of SAGEConv without roots": hetero(lambda m: m.SAGEConv((IN, IN), OUT, root_weight=False)),
    "HeteroConv of SAGEConv without anything": hetero(
        lambda m: m.SAGEConv((IN, IN), OUT, root_weight=False, bias=False)
    ),
    "HeteroDictLinear": Case(lambda m: m.HeteroDictLinear(IN, OUT, list(SIZES)), (X_DICT,)),
    "HeteroLinear": Case(lambda m: m.HeteroLinear(IN, OUT, RELATIONS), (X, TYPES[:NODES])),
    "MaxAggregation": Case(lambda m: m.MaxAggregation(), (X, None, GROUPS)),
    "MinAggregation": Case(lambda m: m.MinAggregation(), (X, None, GROUPS)),
    "RGATConv": Case(lambda m: m.RGATConv(IN, OUT, RELATIONS, bias=False), (X, EDGES, TYPES)),
    "RGATConv with all": Case(
        lambda m: m.RGATConv(IN, OUT, RELATIONS, num_bases=2, heads=2, edge_dim=EDGE_DIM), (X, EDGES, TYPES, ATTR)
    ),
    "RGCNConv": Case(lambda m: m.RGCNConv(IN, OUT, RELATIONS, num_bases=2), (X, EDGES, TYPES)),
    "RGCNConv, max": Case(lambda m: m.RGCNConv(IN, OUT, RELATIONS, aggr="max"), (X, EDGES, TYPES)),
    "SAGEConv": Case(lambda m: m.SAGEConv(IN, OUT), (X, EDGES)),
    "SAGEConv to more": Case(lambda m: m.SAGEConv(IN, 9, normalize=True), (X, EDGES)),
    "SAGEConv, max": Case(lambda m: m.SAGEConv((IN, IN), OUT, aggr="max", project=True), ((X, X + 1), EDGES)),
    "TransformerConv": Case(lambda m: m.TransformerConv(IN, OUT, 2), (X, EDGES)),
    "TransformerConv with all": Case(
        lambda m: m.TransformerConv(IN, OUT, 2, edge_dim=EDGE_DIM, beta=True), (X, EDGES, ATTR, True)
    ),
}
CALL_NO_MODULES = ("FastRGCNConv", "HeteroLinear", "MaxAggregation", "MinAggregation")
every_layer = pytest.mark.parametrize("name", CASES)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def test_every_layer_has_a_case_that_runs_fused():
    found = set().union(*(layers_of(case, stock) for case in CASES.values()))
    with_kernels = {cls for cls, ours in LAYERS.items() if not hasattr(ours, "_runs_generated")}
    assert {cls for cls in with_kernels if cls.__module__.startswith("torch_geometric.")} <= found
    for name, case in CASES.items():
        said = edgeless.explain(pair_of(case, stock, fused)[1], *case.inputs)
        assert said, f"{name}: {said}"


@EVERY_DEVICE
@every_dtype
@every_layer
def test_gradients_have_memory_of_their_own(name, dtype, device):
    assert_gradients_have_memory_of_their_own(CASES[name], stock, fused, device, dtype)


@EVERY_DEVICE
@every_dtype
@every_layer
def test_accumulated_and_clipped_steps_are_those_of_the_stock_layer(name, dtype, device):
    assert_trains_alike(CASES[name], stock, fused, device, dtype)


@EVERY_DEVICE
@every_layer
def test_results_may_be_written_over(name, device):
    assert_results_may_be_written_over(CASES[name], stock, fused, device)


@EVERY_DEVICE
@pytest.mark.parametrize("way", CHANGES)
@every_layer
def test_a_change_of_a_module_inside_is_seen(name, way, device):
    called = assert_changes_are_seen(CASES[name], stock, fused, way, device, torch.float64)
    assert called or name in CALL_NO_MODULES
