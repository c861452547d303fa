"""What users do to GCN, SAGE, GIN and GraphConv, and what sends these layers to the stock path."""

import copy
import inspect
import pickle

import pytest
import torch
import torch_geometric.nn as stock
from pyg_cases import GRAPHS, IN, assert_close, node_features, random_edges, run, run_fused
from sum_cases import (
    PAIRS,
    SPARSE,
    SUMS,
    WEIGHTED,
    as_sparse,
    construct,
    distinct,
    sum_pair,
    weights_of,
)
from test_pyg_fallback import assert_falls_back
from torch._dynamo.testing import CompileCounterWithBackend
from torch_geometric.nn.aggr import MeanAggregation, SumAggregation

import edgeless
import edgeless.pyg.nn as fused

GRAPH = GRAPHS["random"]
OPTIONS = {
    "GCNConv": ({}, {"bias": False}, {"cached": True}),
    "SAGEConv": ({}, {"project": True, "bias": False}, {"root_weight": False, "aggr": "max"}),
    "GINConv": ({}, {"train_eps": True, "eps": 0.5}),
    "GraphConv": ({}, {"bias": False, "aggr": "max"}),
}
CASES = [(name, options) for name in SUMS for options in OPTIONS[name]]


def _seeded(package, name, seed, *args, **options):
    torch.manual_seed(seed)
    return construct(package, name, *args, **options)


@pytest.mark.parametrize("name,options", CASES)
def test_seeded_initialisation_state_and_repr(name, options):
    theirs, ours = (_seeded(package, name, 3, **options) for package in (stock, fused))
    assert list(theirs.state_dict()) == list(ours.state_dict()) and repr(ours) == f"edgeless.{theirs}"
    torch.manual_seed(9), theirs.reset_parameters()
    torch.manual_seed(9), ours.reset_parameters()
    for a, b in zip(theirs.state_dict().values(), ours.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    ours.load_state_dict(theirs.state_dict(), strict=True)


@pytest.mark.parametrize("name", SUMS)
def test_signatures(name):
    for method in ("__init__", "forward"):
        theirs, ours = (inspect.signature(getattr(getattr(p, name), method)) for p in (stock, fused))
        assert [(p.name, p.default, p.kind) for p in theirs.parameters.values()] == [
            (p.name, p.default, p.kind) for p in ours.parameters.values()
        ]


@pytest.mark.parametrize("name", ("GCNConv", "SAGEConv", "GraphConv"))
@pytest.mark.parametrize("in_channels", (-1, (-1, -1)))
def test_lazy_layers(name, in_channels):
    if in_channels != -1 and name == "GCNConv":
        pytest.skip("GCNConv takes no pairs")
    x = node_features(GRAPH, pair=in_channels != -1)
    theirs, ours = (getattr(package, name)(in_channels, 4) for package in (stock, fused))
    torch.manual_seed(4)
    want = theirs(x, GRAPH[0])
    torch.manual_seed(4)
    with edgeless.backend("fused"):
        torch.testing.assert_close(ours(x, GRAPH[0]), want)


@pytest.mark.parametrize("clone", (lambda layer: pickle.loads(pickle.dumps(layer)), copy.deepcopy, copy.copy))
@pytest.mark.parametrize("name,options", CASES)
def test_copies(name, options, clone):
    theirs, ours = sum_pair(name, **options)
    inputs = (node_features(GRAPH), GRAPH[0])
    ours(*inputs)
    other = clone(ours)
    assert type(other) is type(ours)
    assert_close(run_fused(other, *inputs), run(theirs, theirs, *inputs))


@pytest.mark.parametrize("name", SUMS)
def test_torchscript_takes_the_stock_layer(name):
    theirs, ours = sum_pair(name, **({"cached": True} if name == "GCNConv" else {}))
    ours(node_features(GRAPH), GRAPH[0])
    scripted = torch.jit.script(ours)
    torch.testing.assert_close(scripted(node_features(GRAPH), GRAPH[0]), theirs(node_features(GRAPH), GRAPH[0]))


@pytest.mark.parametrize("name", SUMS)
def test_accelerate(name):
    layer = construct(stock, name)
    model = torch.nn.ModuleList([layer])
    inputs = (node_features(GRAPH), GRAPH[0])
    want = layer(*inputs)
    report = edgeless.accelerate(model)
    assert [(n, new) for n, _, new in report.swapped] == [("0", getattr(fused, name))] and model[0] is layer
    with edgeless.backend("fused"):
        torch.testing.assert_close(layer(*inputs), want)


@pytest.mark.parametrize("model", ("GCN", "GraphSAGE", "GIN"))
def test_basic_models(model):
    theirs = getattr(stock, model)(IN, 8, 2, 3, act="tanh")
    ours = copy.deepcopy(theirs)
    assert len(edgeless.accelerate(ours).swapped) == 2
    assert_close(run_fused(ours, node_features(GRAPH), GRAPH[0]), run(theirs, theirs, node_features(GRAPH), GRAPH[0]))


def test_hetero_conv():
    sides = {("a", "to", "b"): GRAPHS["bipartite"][0], ("b", "to", "a"): GRAPHS["bipartite"][0].flip(0)}
    x_a, x_b = node_features(GRAPHS["bipartite"])
    theirs = stock.HeteroConv({key: stock.SAGEConv((IN, IN), 4, aggr="max") for key in sides})
    ours = copy.deepcopy(theirs)
    edgeless.accelerate(ours)
    with edgeless.backend("fused"):
        have = ours({"a": x_a, "b": x_b}, sides)
    for key, want in theirs({"a": x_a, "b": x_b}, sides).items():
        torch.testing.assert_close(have[key], want)


# torch.compile ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ("graph", "tensor"))
@pytest.mark.parametrize("name,options", (("GCNConv", {}), ("SAGEConv", {"aggr": "max"}), ("GraphConv", {})))
def test_compiles_to_a_whole_graph(name, options, form, fresh_dynamo):
    theirs, ours = sum_pair(name, dtype=torch.float64, **options)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ours, fullgraph=True, backend=counter)
    for i in range(4):
        graph = (random_edges(40 + 3 * i, 40 + 3 * i, 100 + 17 * i, seed=i), 40 + 3 * i, 40 + 3 * i)
        x = node_features(graph, torch.float64)
        index = edgeless.Graph.from_edge_index(*graph) if form == "graph" else graph[0]
        with edgeless.backend("fused"):
            have = run(compiled, ours, x, index)
        assert_close(have, run(theirs, theirs, x, graph[0]))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("form", ("graph", "tensor"))
@pytest.mark.parametrize("name", WEIGHTED)
def test_compiles_with_weights(name, form, fresh_dynamo):
    graph = GRAPHS["self_loops"]
    theirs, ours = sum_pair(name, dtype=torch.float64)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    index = edgeless.Graph.from_edge_index(*graph) if form == "graph" else graph[0]
    inputs = (node_features(graph, torch.float64), index, weights_of(graph, torch.float64))
    assert_close(run(compiled, ours, *inputs), run(theirs, theirs, inputs[0], graph[0], inputs[2]))


# What falls back ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("aggr", ("mul", "median", "softmax", "lstm", ["sum", "mean"]))
def test_other_aggregations(name, aggr):
    if name != "SAGEConv" and aggr in ("lstm", ["sum", "mean"]):
        pytest.skip("only SAGEConv knows their widths")
    theirs, ours = sum_pair(name, aggr=aggr)
    edges = GRAPH[0][:, GRAPH[0][1].argsort()]
    assert_falls_back(theirs, ours, "and the kernels know sum, mean, max, min", node_features(GRAPH), edges)


def test_gcn_takes_no_extrema():
    theirs, ours = sum_pair("GCNConv", aggr="max")
    assert_falls_back(
        theirs, ours, "aggr_module is MaxAggregation() and the kernels know sum, mean", node_features(GRAPH), GRAPH[0]
    )


@pytest.mark.parametrize("aggr", (SumAggregation(), MeanAggregation()))
def test_aggregation_modules(aggr):
    theirs, ours = sum_pair("SAGEConv", aggr=aggr)
    x = node_features(GRAPH)
    assert edgeless.explain(ours, x, GRAPH[0])
    torch.testing.assert_close(ours(x, GRAPH[0]), theirs(x, GRAPH[0]))
    matrix = as_sparse("csr", distinct(GRAPH), weights_of(distinct(GRAPH)))  # without its product, values mean nothing
    assert_falls_back(theirs, ours, "the layer's fuse is off", x, matrix)


def test_extrema_of_weighted_messages():
    x, weights = node_features(GRAPH), weights_of(GRAPH)
    theirs, ours = sum_pair("GraphConv", aggr="max")
    assert_falls_back(
        theirs, ours, "aggr_module is MaxAggregation() and the messages are weighted", x, GRAPH[0], weights
    )
    matrix = as_sparse("csr", distinct(GRAPH), weights_of(distinct(GRAPH)))
    for name in PAIRS:
        theirs, ours = sum_pair(name, aggr="max")
        assert_falls_back(theirs, ours, "the messages are weighted", x, matrix)


@pytest.mark.parametrize("name", WEIGHTED)
def test_weights_of_other_dtypes(name):
    x, weights = node_features(GRAPH), weights_of(GRAPH)
    theirs, ours = sum_pair(name)
    if name == "GraphConv":
        assert_falls_back(theirs, ours, "not a plain floating tensor", x, GRAPH[0], (weights * 5).long())
    else:
        reason = "edge_weight is torch.float64 and the features are torch.float32"
        assert_falls_back(theirs, ours, reason, x, GRAPH[0], weights.double())
    for weight in (weights[:-1], weights.repeat(2)):
        assert "edge_weight does not have the shape [E] = [300]" in str(edgeless.explain(ours, x, GRAPH[0], weight))
        for layer in (theirs, ours):
            with pytest.raises((RuntimeError, ValueError, IndexError)):
                layer(x, GRAPH[0], weight)


@pytest.mark.parametrize("kind", SPARSE)
def test_sparse_values_of_another_dtype_and_under_autocast(kind):
    graph = distinct(GRAPH)
    x = node_features(GRAPH, torch.float64)
    theirs, ours = sum_pair("GCNConv", dtype=torch.float64)
    matrix = as_sparse(kind, graph, weights_of(graph))
    assert "torch.float32 and the features are torch.float64" in str(edgeless.explain(ours, x, matrix))
    with torch.autocast("cpu", torch.bfloat16):
        assert "autocast is on" in str(edgeless.explain(ours, x.float(), as_sparse(kind, graph, weights_of(graph))))


@pytest.mark.parametrize("name", SUMS)
def test_hooks_and_overrides(name):
    theirs, ours = sum_pair(name)
    for layer in (theirs, ours):
        layer.register_message_forward_hook(lambda module, inputs, output: output.relu())
    assert_falls_back(theirs, ours, "a message passing hook is registered", node_features(GRAPH), GRAPH[0])

    class Own(getattr(fused, name)):
        def message_and_aggregate(self, adj_t, x, edge_weight=None):
            raise NotImplementedError

    layer = construct(stock, name)
    layer.__class__ = Own
    assert "message_and_aggregate() is overridden" in str(edgeless.explain(layer, node_features(GRAPH), GRAPH[0]))


def test_batches_of_features():
    """The stock layers take [B, N, F] too."""
    theirs, ours = sum_pair("GCNConv")
    x = torch.randn(2, 40, IN)
    assert_falls_back(theirs, ours, "not a plain floating tensor of two dimensions", x, GRAPH[0])


# Errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SUMS)
def test_ids_out_of_range(name):
    _, ours = sum_pair(name)
    for bad in ([[0, 40], [1, 2]], [[0, 1], [1, -1]]):
        with pytest.raises(IndexError, match=r"edge_index\[[01]\]"):
            ours(node_features(GRAPH), torch.tensor(bad))


def test_gcn_takes_no_pair():
    _, ours = sum_pair("GCNConv")
    with pytest.raises(ValueError, match="does not support bipartite"):
        ours(node_features(GRAPHS["bipartite"]), GRAPHS["bipartite"][0])


def test_gcn_takes_no_rectangular_graph():
    _, ours = sum_pair("GCNConv")
    handle = edgeless.Graph.from_edge_index(*GRAPHS["bipartite"])
    with pytest.raises(ValueError, match=r"GCNConv: edge_index must have as many sources as destinations, got Graph"):
        ours(node_features(GRAPHS["bipartite"])[0], handle)


@pytest.mark.parametrize("name", PAIRS)
def test_sizes_that_do_not_fit(name):
    theirs, ours = sum_pair(name)
    x, edge_index = node_features(GRAPHS["bipartite"]), GRAPHS["bipartite"][0]
    for size in ((19, 11), (20, 12)):
        assert "size is" in str(edgeless.explain(ours, x, edge_index, size=size))
        for layer in (theirs, ours):
            with pytest.raises(ValueError, match="but expected size"):
                layer(x, edge_index, size=size)


@pytest.mark.parametrize("name,options,op", (("GCNConv", {}, "spmm"), ("SAGEConv", {"aggr": "max"}, "neighbor_reduce")))
def test_a_build_without_their_kernels(name, options, op, monkeypatch):
    """A device may have the kernels for attention and not yet those for sums or extrema."""
    theirs, ours = sum_pair(name, **options)
    monkeypatch.setitem(edgeless.choices.backends._KERNELS, ("cpu", op), f"this build has no kernels for {op}")
    assert_falls_back(theirs, ours, f"no kernels for {op}", node_features(GRAPH), GRAPH[0])
