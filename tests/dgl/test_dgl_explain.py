"""Which calls run fused, which go to the stock layer, and the words for it."""

from __future__ import annotations

import dgl
import dgl.nn as stock
import pytest
import torch
from dgl_cases import IN, LAYERS, assert_close, features, graph_named, hetero, layer_pair, run
from torch import nn

import edgeless
import edgeless.dgl.nn as fused
from edgeless.dgl import ops

EVERY_LAYER = pytest.mark.parametrize("layer", LAYERS)


@EVERY_LAYER
def test_plain_call_runs_fused(layer):
    graph = graph_named("random")
    _, ours = layer_pair(layer)
    explanation = edgeless.explain(ours, graph, features(graph), get_attention=True)
    assert explanation and str(explanation) == f"{layer} runs fused."


@EVERY_LAYER
def test_reference_backend_is_the_stock_forward(layer, monkeypatch):
    graph = graph_named("random")
    theirs, ours = layer_pair(layer)
    monkeypatch.setattr(type(ours), "_fused_forward", None)
    feat = features(graph)
    with edgeless.backend("reference"):
        assert not edgeless.explain(ours, graph, feat)
        assert_close(run(ours, graph, feat), run(theirs, graph, feat))


def _attention_hook(layer):
    layer.attn_drop.register_forward_hook(lambda module, args, out: out * 0.5)


def _other_slope(layer):
    layer.leaky_relu = nn.ELU()


def _other_dropout(layer):
    layer.attn_drop = nn.AlphaDropout(0.0)


CHANGED_INSIDE = {
    "hook on attn_drop": (_attention_hook, "attn_drop is not a plain Dropout"),
    "other leaky_relu": (_other_slope, "leaky_relu is not a plain LeakyReLU"),
    "other attn_drop": (_other_dropout, "attn_drop is not a plain Dropout"),
}


@pytest.mark.parametrize("layer", ("GATv2Conv", "GATConv"))
@pytest.mark.parametrize("change", CHANGED_INSIDE)
def test_what_the_user_changed_inside_goes_to_the_stock_layer(layer, change):
    graph = graph_named("random")
    feat = features(graph)
    change, reason = CHANGED_INSIDE[change]
    theirs, ours = layer_pair(layer)
    change(theirs)
    change(ours)
    assert_close(run(ours, graph, feat), run(theirs, graph, feat))
    explanation = edgeless.explain(ours, graph, feat)
    assert not explanation and reason in str(explanation)
    with edgeless.backend("fused"), pytest.raises(edgeless.NotFusedError) as error:
        ours(graph, feat)
    assert str(error.value) == str(explanation)


@pytest.mark.parametrize("layer", ("GATv2Conv", "GATConv"))
@pytest.mark.parametrize("value", (None, "a"))
def test_a_slope_that_is_no_number_meets_the_stock_layers_own_error(layer, value):
    graph = graph_named("random")
    theirs, ours = layer_pair(layer, negative_slope=value)
    with pytest.raises(TypeError) as want:
        theirs(graph, features(graph))
    with pytest.raises(TypeError) as error:
        ours(graph, features(graph))
    assert str(error.value).startswith(f"{want.value}\nedgeless: ")
    assert "leaky_relu is not a plain LeakyReLU of a number" in str(edgeless.explain(ours, graph, features(graph)))


def test_edge_weight_of_a_shape_that_only_the_stock_layer_knows():
    graph = graph_named("random")
    feat = features(graph)
    theirs, ours = layer_pair("GATConv")
    weight = torch.rand(1)
    assert_close(run(ours, graph, feat, edge_weight=weight), run(theirs, graph, feat, edge_weight=weight))


EDGE_WEIGHTS = {
    "edge_weight must have shape [E] = [300] for that, got [1]": torch.rand(1),
    "edge_weight is a list, not a Tensor": [1.0] * 300,
    "edge_weight is torch.complex64": torch.ones(300, dtype=torch.complex64),
}


@pytest.mark.parametrize("reason", EDGE_WEIGHTS)
def test_edge_weights_that_are_refused(reason):
    graph = graph_named("random")
    ours = layer_pair("GATConv")[1]
    assert reason in str(edgeless.explain(ours, graph, features(graph), edge_weight=EDGE_WEIGHTS[reason]))


def test_edge_weight_with_batch_dimensions_is_refused():
    graph = graph_named("random")
    ours = layer_pair("GATConv")[1]
    explanation = edgeless.explain(ours, graph, features(graph, batch=(2,)), edge_weight=torch.rand(300))
    assert "edge_weight comes with a feat of more than two dimensions" in str(explanation)


def _cases():
    """(id, layer options, graph, feat, words of explain) of input that the stock layers refuse."""
    random, isolated, bipartite = graph_named("random"), graph_named("isolated"), graph_named("bipartite")
    odd = dgl.heterograph({("u", "r", "u"): ([0], [1])}, {"u": 3, "v": 2})
    yield "zero in-degree", {"allow_zero_in_degree": False}, isolated, features(isolated), "nodes without in-edges"
    yield "rows", {}, random, torch.randn(7, IN), "feat has 7 rows for 40 nodes"
    yield "vector", {}, random, torch.randn(IN), "feat has shape [5]"
    yield "dtype", {}, random, torch.ones(40, IN, dtype=torch.int64), "feat is torch.int64"
    yield "not a tensor", {}, random, [[0.0] * IN] * 40, "feat is a list"
    yield "one for two", {}, bipartite, torch.randn(20, IN), "graph has 20 source and 11 destination nodes"
    yield "three", {}, random, (torch.randn(40, IN),) * 3, "feat is a tuple of 3"
    yield "device", {}, random, torch.randn(40, IN, device="meta"), "feat is on meta, but graph is on cpu"
    yield "edge types", {}, hetero(), torch.randn(9, IN), "graph has 3 edge types"
    yield "node types", {}, odd, torch.randn(3, IN), "graph has 2 node types"
    yield "no graph", {}, torch.ones(2, 3), torch.randn(40, IN), "graph is a Tensor, not a DGLGraph"


CASES = {name: case for name, *case in _cases()}


@EVERY_LAYER
@pytest.mark.parametrize("case", CASES)
def test_refused_input_meets_the_stock_layers_own_error(layer, case):
    options, graph, feat, reason = CASES[case]
    theirs, ours = layer_pair(layer, **options)
    explanation = edgeless.explain(ours, graph, feat)
    assert not explanation and reason in str(explanation)
    try:
        theirs(graph, feat)
        want = None
    except Exception as error:
        want = error
    if want is None:  # three features: the stock layers do not look at the third
        assert_close({"out": ours(graph, feat)}, {"out": theirs(graph, feat)})
        return
    with pytest.raises(type(want)) as error:
        ours(graph, feat)
    assert type(error.value) is type(want)
    assert _first_line(error.value) == _first_line(want)


def _first_line(error):
    """Without the clock that DGL's C++ errors begin with."""
    return str(error).split("\n")[0].split("] ", 1)[-1]


@EVERY_LAYER
def test_wrong_number_of_features_meets_the_same_error(layer):
    graph = graph_named("random")
    messages = []
    for module in layer_pair(layer):
        with pytest.raises(RuntimeError) as error:
            module(graph, torch.randn(40, IN + 1))
        messages.append(str(error.value))
    assert messages[1].startswith(f"{messages[0]}\nedgeless: The call was edgeless.{layer}(")


def test_a_report_counts_layers_and_functions():
    graph = graph_named("random")
    x = features(graph)
    edgeless.report(reset=True)
    layer = fused.SAGEConv(IN, 4, "lstm")
    layer(graph, x)
    fused.GATConv(IN, 4, 1, allow_zero_in_degree=True)(graph, x)
    ops.copy_u_sum(graph, x)
    ops.edge_softmax(graph, torch.randn(graph.num_edges(), 1))
    found = edgeless.report(reset=True).layers
    assert found["edgeless.dgl.nn.GATConv"].fused == 1
    assert found["edgeless.dgl.nn.SAGEConv"].stock == {"aggregator_type is lstm, which is no sum, mean or maximum": 1}
    assert found["edgeless.dgl.ops.copy_u_sum"].fused == 1
    assert list(found["edgeless.dgl.ops.edge_softmax"].stock) == [
        "logits is torch.float32 on the CPU, for which DGL's own kernel is made"
    ]


def test_explain_a_model():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = fused.SAGEConv(IN, 4, "mean"), fused.SAGEConv(4, 4, "lstm")

        def forward(self, graph, x):
            return self.b(graph, self.a(graph, x).relu())

    graph = graph_named("random")
    found = edgeless.explain(Net(), graph, features(graph), plan=True)
    assert [(name, said.fused) for name, said in found.calls] == [("a", True), ("b", False)]
    assert found.calls[0][1].plan and "aggregator_type is lstm" in str(found)


def test_a_layer_that_could_never_run_fused_is_kept():
    model = torch.nn.ModuleList([stock.SAGEConv(IN, 4, "lstm"), stock.SAGEConv(IN, 4, "mean")])
    report = edgeless.accelerate(model)
    assert [name for name, _, _ in report.swapped] == ["1"] and type(model[0]) is stock.SAGEConv
    assert report.kept[0][2] == (
        "no call of it would run fused, because aggregator_type is lstm, which is no sum, mean or maximum"
    )
