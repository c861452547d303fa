"""What is true of every layer of DGL: see every_layer.py."""

import dgl
import dgl.nn as stock
import pytest
import torch
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
from torch import nn

import edgeless
import edgeless.dgl.nn as fused
from edgeless.choices.backends import LAYERS

NODES, IN, OUT, RELATIONS = 12, 6, 4, 3
SIZES = {"a": NODES, "b": 7}
KEYS = [("a", "leads", "b"), ("b", "back", "a"), ("a", "of", "a"), ("a", "by", "a"), ("b", "on", "b")]


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ends(num_src, num_dst, count, seed):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(n, (count,), generator=generator) for n in (num_src, num_dst))


GRAPH = dgl.add_self_loop(dgl.remove_self_loop(dgl.graph(ends(NODES, NODES, 50, 7), num_nodes=NODES)))
BIPARTITE = dgl.heterograph({("a", "to", "b"): ends(NODES, 7, 50, 7)}, SIZES)
HETERO = dgl.heterograph({key: ends(SIZES[key[0]], SIZES[key[2]], 30, i) for i, key in enumerate(KEYS)}, SIZES)
X, PAIR = draw(NODES, IN), (draw(NODES, IN), draw(7, IN, seed=1))
X_DICT = {"a": X, "b": PAIR[1]}
WEIGHTS = draw(GRAPH.num_edges(), seed=2).abs() + 0.1
TYPES, NODE_TYPES = torch.arange(GRAPH.num_edges()) % RELATIONS, torch.arange(NODES) % 2
ANY = {"allow_zero_in_degree": True}


def hetero(make, aggregate="sum"):
    def layer(m):
        return m.HeteroGraphConv({etype: make(m) for _, etype, _ in KEYS}, aggregate=aggregate)

    return Case(layer, (HETERO, X_DICT))


def mlp(*widths):
    return nn.Sequential(nn.Linear(*widths[:2]), nn.Tanh(), nn.Linear(*widths[1:]))


def sage(aggregator, out=OUT, norm=lambda: None):
    return Case(lambda m: m.SAGEConv(IN, out, aggregator, norm=norm(), activation=nn.Tanh()), (GRAPH, X))


CASES = {
    "AGNNConv": Case(lambda m: m.AGNNConv(), (GRAPH, X)),
    "DotGatConv": Case(lambda m: m.DotGatConv(IN, OUT, 2), (GRAPH, X)),
    "DotGatConv of a pair": Case(lambda m: m.DotGatConv((IN, IN), OUT, 2, **ANY), (BIPARTITE, PAIR, True)),
    "GATConv": Case(lambda m: m.GATConv(IN, OUT, 2), (GRAPH, X)),
    "GATConv with all": Case(
        lambda m: m.GATConv(IN, OUT, 2, residual=True, activation=nn.Tanh()), (GRAPH, X, WEIGHTS, True)
    ),
    "GATConv of a pair": Case(lambda m: m.GATConv((IN, IN), OUT, 2, **ANY), (BIPARTITE, PAIR)),
    "GATv2Conv": Case(lambda m: m.GATv2Conv(IN, OUT, 2), (GRAPH, X)),
    "GATv2Conv with all": Case(
        lambda m: m.GATv2Conv(IN, OUT, 2, residual=True, activation=nn.Tanh()), (GRAPH, X, True)
    ),
    "GATv2Conv of one map": Case(lambda m: m.GATv2Conv(IN, OUT, 2, share_weights=True, bias=False), (GRAPH, X)),
    "GINConv": Case(lambda m: m.GINConv(mlp(IN, 3, OUT), "sum", learn_eps=True), (GRAPH, X)),
    "GINConv, max": Case(lambda m: m.GINConv(mlp(IN, 8, OUT), "max", activation=nn.Tanh()), (GRAPH, X)),
    "GraphConv": Case(lambda m: m.GraphConv(IN, OUT), (GRAPH, X, None, WEIGHTS)),
    "GraphConv to more": Case(lambda m: m.GraphConv(IN, 9, activation=nn.Tanh()), (GRAPH, X)),
    "HGTConv": Case(lambda m: m.HGTConv(IN, 2, 2, 2, RELATIONS, 0.0, use_norm=True), (GRAPH, X, NODE_TYPES, TYPES)),
    "HGTConv with skips": Case(lambda m: m.HGTConv(IN, 3, 2, 2, RELATIONS, 0.0), (GRAPH, X, NODE_TYPES, TYPES)),
    "HeteroGraphConv of GATConv": hetero(lambda m: m.GATConv((IN, IN), OUT, 1, **ANY)),
    "HeteroGraphConv of GraphConv": hetero(lambda m: m.GraphConv(IN, OUT, **ANY)),
    "HeteroGraphConv of GraphConv without biases": hetero(lambda m: m.GraphConv(IN, OUT, bias=False, **ANY)),
    "HeteroGraphConv of SAGEConv": hetero(lambda m: m.SAGEConv(IN, OUT, "mean")),
    "HeteroGraphConv of SAGEConv, mean": hetero(lambda m: m.SAGEConv(IN, OUT, "mean"), "mean"),
    "RelGraphConv": Case(
        lambda m: m.RelGraphConv(IN, OUT, RELATIONS, "basis", 2, activation=nn.Tanh()), (GRAPH, X, TYPES)
    ),
    "RelGraphConv with a norm": Case(lambda m: m.RelGraphConv(IN, OUT, RELATIONS, layer_norm=True), (GRAPH, X, TYPES)),
    "SAGEConv": sage("mean"),
    "SAGEConv to more": sage("mean", 9, lambda: nn.LayerNorm(9)),
    "SAGEConv, gcn": sage("gcn"),
    "SAGEConv, pool": sage("pool"),
    "TypedLinear": Case(lambda m: m.TypedLinear(IN, OUT, RELATIONS), (X, TYPES[:NODES])),
}
CALL_NO_MODULES = ("AGNNConv", "GraphConv", "TypedLinear")
every_layer = pytest.mark.parametrize("name", CASES)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def test_every_layer_has_a_case_that_runs_fused():
    found = set().union(*(layers_of(case, stock) for case in CASES.values()))
    with_kernels = {cls for cls, ours in LAYERS.items() if not hasattr(ours, "_runs_generated")}
    assert {cls for cls in with_kernels if cls.__module__.startswith("dgl.")} <= found
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


@pytest.mark.parametrize("of_the_instance", [False, True])
@pytest.mark.parametrize("name", ["HGTConv", "RelGraphConv"])
def test_another_message_is_heeded(name, of_the_instance):
    pair = pair_of(CASES[name], stock, fused)
    for layer in pair:
        own = layer.message
        change = {"message": lambda *args, own=own: {key: 2 * value for key, value in own(args[-1]).items()}}
        if of_the_instance:
            vars(layer).update(change)
        else:
            layer.__class__ = type("Changed", (type(layer),), change)
    theirs, ours = pair
    inputs = CASES[name].inputs
    assert "message() is overridden" in str(edgeless.explain(ours, *inputs))
    torch.testing.assert_close(ours(*inputs), theirs(*inputs))
