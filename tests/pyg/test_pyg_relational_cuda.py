"""Layers over relations of PyG on CUDA, against the stock layers."""

import pytest
import torch
import torch_geometric.nn as stock
from parity_on_cuda import assert_compiles_on_cuda, assert_parity_on_cuda
from pyg_cases import GRAPHS, features, random_edges
from torch_geometric.nn.dense.linear import HeteroLinear

import edgeless
import edgeless.pyg.nn as fused

pytestmark = pytest.mark.cuda
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
RELATIONS = 5
SUMS = [("RGCNConv", "mean"), ("RGCNConv", "add"), ("RGCNConv", "max"), ("FastRGCNConv", "mean")]
WIDTHS = [(64, 32), (6, 4)]  # of which tensor cores take the first


def pair(name, *args, **options):
    torch.manual_seed(1)
    theirs = getattr(stock, name, HeteroLinear)(*args, **options)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    ours = getattr(fused, name)(*args, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def large():
    """Several tiles of a relation, a hub on either side, and relations of few edges."""
    edges = random_edges(300, 300, 2500)
    edges[1, :800], edges[0, 800:1300] = 3, 8
    return edges, 300, 300


def types_of(graph):
    count = graph[0].size(1)
    return torch.randint(RELATIONS - 1, (count,), generator=torch.Generator().manual_seed(31))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("options", [{}, {"num_bases": 3}, {"num_blocks": 2}, {"root_weight": False, "bias": False}])
@pytest.mark.parametrize(
    "name,aggr", [("RGCNConv", "mean"), ("RGCNConv", "add"), ("RGCNConv", "max"), ("FastRGCNConv", "mean")]
)
def test_rgcn(name, aggr, options, widths, dtype):
    for graph in (large(), GRAPHS["random"], GRAPHS["bipartite"], GRAPHS["no_edges"]):
        edges, num_src, num_dst = graph
        x = features(num_src, widths[0])
        x = x if num_src == num_dst else (x, features(num_dst, widths[0], seed=2))
        layers = pair(name, widths[0], widths[1], RELATIONS, aggr=aggr, **options)
        assert_parity_on_cuda(*layers, (x, edges, types_of(graph)), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bases", [None, 2])
def test_rgcn_without_features(bases, dtype):
    graph = large()
    assert_parity_on_cuda(
        *pair("RGCNConv", 300, 64, RELATIONS, num_bases=bases), (None, graph[0], types_of(graph)), dtype
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("heads", [1, 2, 3, 8])
@pytest.mark.parametrize("mechanism", ["across-relation", "within-relation"])
@pytest.mark.parametrize("options", [{}, {"mod": "additive"}, {"num_bases": 2, "concat": False}, {"edge_dim": 3}])
def test_rgat(options, mechanism, heads, widths, dtype):
    for graph in (large(), GRAPHS["random"]):
        inputs = [features(graph[1], widths[0]), graph[0], types_of(graph)]
        if "edge_dim" in options:
            inputs.append(features(graph[0].size(1), 3, seed=4))
        layers = pair("RGATConv", *widths, RELATIONS, heads=heads, attention_mechanism=mechanism, **options)
        assert_parity_on_cuda(*layers, inputs, dtype)


def test_rgat_of_one_op_drops_what_several_ops_drop(monkeypatch):
    edges, num_nodes, _ = large()
    layer = pair("RGATConv", 64, 64, RELATIONS, dropout=0.6)[1].to("cuda")
    x, grad = (features(num_nodes, 64, seed=seed).to("cuda", torch.float32) for seed in (0, 1))
    inputs = x.requires_grad_(), edges.to("cuda"), types_of((edges,)).to("cuda")
    assert "pair_attention, forward" in str(edgeless.explain(layer, *inputs, plan=True))

    def run():
        torch.manual_seed(7)
        out = layer(*inputs)
        return [out, *torch.autograd.grad(out, [x, layer.weight, layer.q, layer.k, layer.bias], grad)]

    one = run()
    monkeypatch.setattr("edgeless.pyg.nn.rgat_conv.fits", lambda *_: False)
    assert "pair_attention" not in str(edgeless.explain(layer, *inputs, plan=True))
    for found, expected in zip(one, run(), strict=True):
        assert float((found - expected).norm() / expected.norm()) <= 1e-5


SIZES = {"a": 300, "b": 130, "c": 7}
TYPES = [("a", "to", "b"), ("b", "to", "a"), ("a", "to", "a"), ("b", "by", "a"), ("a", "of", "c")]


def heterogeneous(width):
    edges = {key: random_edges(SIZES[key[0]], SIZES[key[-1]] - 1, 900, seed=i) for i, key in enumerate(TYPES)}
    edges[TYPES[0]][1, :400] = 2
    return {key: features(size, width, seed=i) for i, (key, size) in enumerate(SIZES.items())}, edges


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize("width", [64, 24])
def test_hgt(width, heads, dtype):
    layers = pair("HGTConv", width, 64, (list(SIZES), TYPES), heads)
    assert_parity_on_cuda(*layers, heterogeneous(width), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.parametrize("widths", WIDTHS)
def test_hetero_linear(widths, is_sorted, dtype):
    types = types_of((torch.zeros(2, 700), 0, 0))
    types = types.sort().values if is_sorted else types
    layers = pair("HeteroLinear", *widths, RELATIONS, is_sorted=is_sorted)
    assert_parity_on_cuda(*layers, (features(700, widths[0]), types), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["SAGEConv", "GraphConv"])
def test_hetero_conv(name, dtype):
    torch.manual_seed(1)
    theirs, ours = (
        package.HeteroConv({key: getattr(package, name)((24, 24), 64) for key in TYPES}) for package in (stock, fused)
    )
    ours.load_state_dict(theirs.state_dict())
    assert_parity_on_cuda(theirs, ours, heterogeneous(24), dtype)


@pytest.mark.parametrize("name", ["RGCNConv", "RGATConv"])
def test_a_captured_graph_gives_what_the_call_does(name):
    graph = large()
    layer = pair(name, 64, 64, RELATIONS)[1].cuda()
    x, edges, types = features(graph[1], 64).cuda().requires_grad_(), graph[0].cuda(), types_of(graph).cuda()

    def step():
        out = layer(x, edges, types)
        # RGATConv has parameters that only a `mod` uses.
        grads = torch.autograd.grad(out.square().sum(), [x, *layer.parameters()], allow_unused=True)
        return [out, *(grad for grad in grads if grad is not None)]

    with edgeless.backend("fused"):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                expected = step()
        torch.cuda.current_stream().wait_stream(side)
        expected, captured = [t.clone() for t in expected], torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            found = step()
    captured.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize(
    "name,options",
    [("RGCNConv", {}), ("RGCNConv", {"aggr": "max"}), ("RGATConv", {}), ("RGATConv", {"heads": 8}), ("HGTConv", {})],
)
def test_compiled(name, options, backend, fresh_dynamo):
    if name == "HGTConv":
        layer, inputs = pair(name, 64, 64, (list(SIZES), TYPES), 2)[1], heterogeneous(64)
    else:
        graph = large()
        layer, inputs = pair(name, 64, 32, RELATIONS, **options)[1], (features(300, 64), graph[0], types_of(graph))
    assert_compiles_on_cuda(layer, inputs, backend)
