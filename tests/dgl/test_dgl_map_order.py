"""Layers that map and sum in another order than the stock layers: outputs and all gradients are theirs."""

from __future__ import annotations

import dgl
import pytest
import torch
from devices import EVERY_DEVICE, OnGPU
from dgl_cases import assert_close, features, graph_named, run, run_fused, sum_pair
from torch import nn

import edgeless

# Without a gradient of x: stock maps first, and it pays to sum first.
KINDS = {
    **{f"GraphConv {norm}": ("GraphConv", (13, 9), {"norm": norm}) for norm in ("none", "left", "right", "both")},
    "GraphConv bare": ("GraphConv", (13, 9), {"bias": False}),
    "SAGEConv mean": ("SAGEConv", (13, 9, "mean"), {}),
    "SAGEConv mean bare": ("SAGEConv", (13, 9, "mean"), {"bias": False}),
    "SAGEConv gcn": ("SAGEConv", (13, 9, "gcn"), {"activation": torch.tanh}),
}
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
NETWORKS = {
    "linear": lambda: nn.Linear(13, 3),
    "without bias": lambda: nn.Linear(13, 3, bias=False),
    "perceptron": lambda: nn.Sequential(nn.Linear(13, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 5)),
}


def of_kind(kind, dtype):
    name, args, options = KINDS[kind]
    return sum_pair(name, args, dtype, **options)


def weights_of(graph, dtype):
    generator = torch.Generator().manual_seed(9)
    return torch.rand(graph.num_edges(), generator=generator, dtype=torch.float64).to(dtype)


def fused_on(device, layer, graph, feat, **inputs):
    """What :func:`run_fused` gives of the layer on that device."""
    found = run_fused(OnGPU(layer) if device == "cuda" else layer, graph.to(device), feat, **inputs)
    return {name: None if t is None else t.cpu() for name, t in found.items()}


@EVERY_DEVICE
@EVERY_KIND
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
@pytest.mark.parametrize("graph", ("random", "isolated", "multi_edges", "hub", "bipartite", "block", "sampled_block"))
@pytest.mark.parametrize("weighted", (False, True))
def test_features_without_gradient_are_summed_first(kind, graph, weighted, dtype, device, changed):
    graph = graph_named(graph)
    theirs, ours = of_kind(kind, dtype)
    feat = features(graph, dtype, sizes=(13, 13))
    inputs = {"edge_weight": weights_of(graph, dtype)} if weighted else {}
    want = run(theirs, graph, feat, feat_grads=False, **inputs)
    assert_close(fused_on(device, ours, graph, feat, feat_grads=False, **inputs), want)
    assert changed == [True]


@pytest.mark.parametrize("sparse", (False, True))
def test_weights_of_the_call(sparse, changed):
    graph = graph_named("random")
    theirs, ours = sum_pair("GraphConv", (13, 9), torch.float64, weight=False)
    x, weight = features(graph, torch.float64, sizes=(13, 13)), torch.randn(13, 9, dtype=torch.float64)
    weight = weight.to_sparse() if sparse else weight
    want = run(theirs, graph, x, feat_grads=False, weight=weight)
    assert_close(run_fused(ours, graph, x, feat_grads=False, weight=weight), want)
    assert changed == ([] if sparse else [False])  # weights without gradient: mapped first, no more is gathered


@pytest.mark.parametrize("aggregator", ("mean", "gcn"))
def test_sparse_features_of_destinations_are_mapped(aggregator):
    graph = graph_named("bipartite")
    theirs, ours = sum_pair("SAGEConv", (13, 9, aggregator), torch.float64)
    x, x_dst = features(graph, torch.float64, sizes=(13, 13))
    feat = (x, x_dst.detach().to_sparse())
    assert_close(run_fused(ours, graph, feat, feat_grads=False), run(theirs, graph, feat, feat_grads=False))


@EVERY_KIND
def test_features_with_gradient_are_mapped_first_in_a_square_graph(kind, changed):
    graph = graph_named("random")
    theirs, ours = of_kind(kind, torch.float64)
    feat = features(graph, torch.float64, sizes=(13, 13))
    assert_close(run_fused(ours, graph, feat), run(theirs, graph, feat))
    assert changed == [False]


@EVERY_KIND
def test_few_destinations_are_mapped_rather_than_many_sources(kind, changed):
    """Though features have gradients: that of the map then has few rows as well."""
    name, args, options = KINDS[kind]
    generator = torch.Generator().manual_seed(3)
    src, dst = torch.randint(300, (400,), generator=generator), torch.randint(8, (400,), generator=generator)
    graph = dgl.create_block((src, dst), 300, 8)
    theirs, ours = sum_pair(name, (600, 80, *args[2:]), torch.float64, **options)
    feat = features(graph, torch.float64, sizes=(600, 600))
    assert_close(run_fused(ours, graph, feat), run(theirs, graph, feat))
    assert changed == [True]


@EVERY_DEVICE
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("aggregator", ("sum", "mean"))
@pytest.mark.parametrize("graph", ("random", "isolated", "block"))
@pytest.mark.parametrize("weighted", (False, True))
def test_what_a_gin_begins_with(network, aggregator, graph, weighted, device, changed):
    graph = graph_named(graph)
    args = (NETWORKS[network](), aggregator)
    theirs, ours = sum_pair("GINConv", args, torch.float64, init_eps=0.3, learn_eps=True, activation=torch.tanh)
    feat = features(graph, torch.float64, sizes=(13, 13))
    inputs = {"edge_weight": weights_of(graph, torch.float64)} if weighted else {}
    assert_close(fused_on(device, ours, graph, feat, **inputs), run(theirs, graph, feat, **inputs))
    assert changed == [True]
    for mine, other in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(mine.cpu(), other)


@pytest.mark.parametrize("kind", ("GraphConv both", "SAGEConv mean", "SAGEConv gcn", "GINConv"))
def test_bfloat16_errs_at_most_twice_as_much(kind, changed):
    graph = graph_named("random")
    errors = {}
    for seed in range(3):
        if kind == "GINConv":
            theirs, ours = sum_pair(kind, (nn.Linear(13, 3), "sum"), torch.bfloat16)
        else:
            theirs, ours = of_kind(kind, torch.bfloat16)
        feat = features(graph, torch.bfloat16, sizes=(13, 13), seed=seed)
        rough, found = run(theirs, graph, feat, feat_grads=False), run_fused(ours, graph, feat, feat_grads=False)
        truth = run(theirs.double(), graph, feat.double(), feat_grads=False)
        for name, want in truth.items():
            pair = torch.stack([(found[name] - want).norm(), (rough[name] - want).norm()]).square()
            errors[name] = errors.get(name, 0) + pair
    assert changed and all(changed)
    for name, pair in errors.items():
        mine, other = pair.sqrt().tolist()
        assert mine <= 2 * other, f"{name}: {mine} for {other}"


def test_what_hangs_on_the_map_sees_what_the_stock_layer_gives_it(changed):
    graph = graph_named("random")
    _, sage = of_kind("SAGEConv mean", torch.float32)
    _, gin = sum_pair("GINConv", (nn.Linear(13, 3), "sum"), torch.float32)
    seen = []
    sage.fc_neigh.register_forward_hook(lambda module, args, out: seen.append(args[0]))
    gin.apply_func.register_forward_hook(lambda module, args, out: seen.append(args[0]))
    feat = features(graph, sizes=(13, 13)).detach()
    with edgeless.backend("fused"):
        sage(graph, feat)
        gin(graph, feat)
    assert torch.equal(seen[0], feat) and not torch.equal(seen[1], feat)
    assert not changed


def test_a_gin_whose_epsilon_has_another_dtype_than_its_network_is_the_stock_layers_error(changed):
    """Sums of promoted features do not fit the network, in whichever order it would be narrower."""
    graph = graph_named("random")
    theirs, ours = sum_pair("GINConv", (nn.Linear(13, 3), "sum"))
    feat = features(graph, sizes=(13, 13))
    for layer in (theirs, ours):
        layer.eps.data = layer.eps.double()
        with edgeless.backend("fused"), pytest.raises(RuntimeError, match="dtype"):
            layer(graph, feat)
    assert not changed
