"""Layers over relations of DGL on CUDA, against the stock layers."""

import dgl
import dgl.nn as stock
import pytest
import torch
from dgl_cases import graph_named
from parity_on_cuda import assert_compiles_on_cuda, assert_parity_on_cuda

import edgeless.dgl
import edgeless.dgl.nn as fused

pytestmark = pytest.mark.cuda
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
RELATIONS, NODE_TYPES = 5, 3
REGULARIZERS = [{}, {"regularizer": "basis", "num_bases": 3}, {"regularizer": "bdd", "num_bases": 2}]
WIDTHS = [(64, 64), (6, 4)]


def pair(name, *args, **options):
    torch.manual_seed(1)
    theirs, ours = (getattr(package, name)(*args, **options) for package in (stock, fused))
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def types_of(count, kinds, seed=31):
    return torch.randint(kinds, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("kind", ["random", "hub"])
@pytest.mark.parametrize(
    "options",
    [*REGULARIZERS, {"layer_norm": True}],
)
def test_rel_graph_conv(options, kind, widths, dtype):
    graph = graph_named(kind)
    count = graph.num_edges()
    inputs = [graph, draw(graph.num_nodes(), widths[0]), types_of(count, RELATIONS - 1)]
    layers = pair("RelGraphConv", *widths, RELATIONS, **options)
    assert_parity_on_cuda(*layers, inputs, dtype)
    assert_parity_on_cuda(*layers, [*inputs, draw(count, 1, seed=3).abs()], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("use_norm", [False, True])
def test_hgt(use_norm, heads, dtype):
    graph = graph_named("random")
    layers = pair("HGTConv", 24, 16, heads, NODE_TYPES, RELATIONS, dropout=0.0, use_norm=use_norm)
    types = types_of(graph.num_nodes(), NODE_TYPES, 1), types_of(graph.num_edges(), RELATIONS - 1)
    assert_parity_on_cuda(*layers, (graph, draw(graph.num_nodes(), 24), *types), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize(
    "options", [{}, {"regularizer": "basis", "num_bases": 3}, {"regularizer": "bdd", "num_bases": 2}]
)
def test_typed_linear(options, widths, dtype):
    layers = pair("TypedLinear", *widths, RELATIONS, **options)
    assert_parity_on_cuda(*layers, (draw(700, widths[0]), types_of(700, RELATIONS - 1)), dtype)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["RelGraphConv", "HGTConv", "TypedLinear"])
def test_compiled(name, backend, fresh_dynamo):
    graph = graph_named("random")
    handle, x, etypes = (
        edgeless.dgl.to_graph(graph),
        draw(graph.num_nodes(), 64),
        types_of(graph.num_edges(), RELATIONS),
    )
    ntypes = types_of(graph.num_nodes(), NODE_TYPES, 1)
    arguments, inputs = {
        "RelGraphConv": ((64, 32, RELATIONS), (handle, x, etypes)),
        "HGTConv": ((64, 32, 2, NODE_TYPES, RELATIONS, 0.0), (handle, x, ntypes, etypes)),
        "TypedLinear": ((64, 32, NODE_TYPES), (x, ntypes)),
    }[name]
    assert_compiles_on_cuda(pair(name, *arguments)[1], inputs, backend)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name,options", [("GraphConv", {"norm": "both"}), ("SAGEConv", {"aggregator_type": "mean"})])
def test_hetero_graph_conv(name, options, dtype):
    sizes, edges = {"a": 200, "b": 130}, {}
    for i, (source, destination) in enumerate(("ab", "ba", "aa", "bb")):
        ends = [types_of(900, sizes[kind] - 1, seed=2 * i + j) for j, kind in enumerate((source, destination))]
        edges[source, f"r{i}", destination] = tuple(ends)
    torch.manual_seed(1)
    theirs, ours = (
        package.HeteroGraphConv({key[1]: getattr(package, name)(24, 64, **options) for key in edges})
        for package in (stock, fused)
    )
    ours.load_state_dict(theirs.state_dict())
    inputs = {kind: draw(size, 24) for kind, size in sizes.items()}
    assert_parity_on_cuda(theirs, ours, (dgl.heterograph(edges, sizes), inputs), dtype)
