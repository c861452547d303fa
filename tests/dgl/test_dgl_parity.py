"""Outputs and all gradients of the fused layers against the stock ones: graph shapes, options, dtypes."""

from __future__ import annotations

import dgl.nn as stock
import pytest
import torch
from dgl import DGLError
from dgl_cases import (
    GRAPHS,
    HEADS,
    IN,
    LAYERS,
    OUT,
    assert_close,
    features,
    graph_named,
    in_feats_for,
    layer_pair,
    options_for,
    run,
    run_fused,
    sum_pair,
)

import edgeless
import edgeless.dgl.nn as fused
from edgeless.dgl.convert import to_graph

DTYPES = pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
EVERY_LAYER = pytest.mark.parametrize("layer", LAYERS)


def check(layer, graph, feat, in_feats=None, dtype=torch.float32, inputs=None, train=False, **options):
    """Fused against stock; in training both start from the same random state."""
    theirs, ours = layer_pair(layer, in_feats or in_feats_for(feat), dtype=dtype, **options)
    inputs = inputs or {}
    torch.manual_seed(1)
    want = run(theirs.train(train), graph, feat, **inputs)
    torch.manual_seed(1)
    assert_close(run_fused(ours.train(train), graph, feat, **inputs), want)


@EVERY_LAYER
@DTYPES
@pytest.mark.parametrize("idtype", (torch.int32, torch.int64), ids=str)
@pytest.mark.parametrize("graph", GRAPHS)
def test_graph_shapes(layer, graph, idtype, dtype):
    graph = graph_named(graph, idtype)
    check(layer, graph, features(graph, dtype), dtype=dtype, inputs={"get_attention": True})


@EVERY_LAYER
@DTYPES
@pytest.mark.parametrize("graph", ("random", "bipartite", "block", "no_edges"))
@pytest.mark.parametrize("sizes", ((IN, IN), (IN, IN + 2), (IN, HEADS * OUT)))
@pytest.mark.parametrize("residual", (False, True))
def test_pairs_of_features(layer, graph, sizes, residual, dtype):
    graph = graph_named(graph)
    feat = features(graph, dtype, pair=True, sizes=sizes)
    check(layer, graph, feat, dtype=dtype, **options_for(layer, residual=residual))


@EVERY_LAYER
@DTYPES
def test_pair_of_features_for_a_single_number(layer, dtype):
    """With ``in_feats`` one number, GATv2Conv and GATConv project a pair; DotGatConv has no weights for it."""
    graph = graph_named("bipartite")
    feat = features(graph, dtype)
    if layer != "DotGatConv":
        check(layer, graph, feat, IN, dtype)
        return
    for module in layer_pair(layer, IN, dtype=dtype):
        with pytest.raises(AttributeError, match="fc_(src|dst)"):
            module(graph, feat)


OPTIONS = {
    "no_bias": {"bias": False},
    "no_bias_residual": {"bias": False, "residual": True},
    "residual": {"residual": True},
    "activation_function": {"activation": torch.tanh, "residual": True},
    "activation_module": {"activation": torch.nn.ELU()},
    "negative_slope": {"negative_slope": 0.7},
    "negative_slope_zero": {"negative_slope": 0.0},
    "negative_slope_negative": {"negative_slope": -0.5},
    "dropout_rates": {"feat_drop": 0.4, "attn_drop": 0.4},
}


@DTYPES
@pytest.mark.parametrize("layer", ("GATv2Conv", "GATConv"))
@pytest.mark.parametrize("graph", ("random", "block"))
@pytest.mark.parametrize("get_attention", (False, True))
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_in_eval(layer, graph, get_attention, options, dtype):
    graph = graph_named(graph)
    check(layer, graph, features(graph, dtype), dtype=dtype, inputs={"get_attention": get_attention}, **options)


@DTYPES
@pytest.mark.parametrize("graph", ("random", "block", "sampled_block"))
@pytest.mark.parametrize("options", ({}, {"residual": True}, {"bias": False}), ids=str)
def test_share_weights(graph, options, dtype):
    graph = graph_named(graph)
    check("GATv2Conv", graph, features(graph, dtype), dtype=dtype, share_weights=True, **options)


@DTYPES
@pytest.mark.parametrize("in_feats", (IN, (IN, IN)), ids=str)
def test_share_weights_with_pairs_of_features(in_feats, dtype):
    graph = graph_named("bipartite")
    check("GATv2Conv", graph, features(graph, dtype), in_feats, dtype, share_weights=True)


@DTYPES
@pytest.mark.parametrize("layer", ("GATv2Conv", "GATConv"))
@pytest.mark.parametrize("graph", ("random", "bipartite", "block"))
def test_feature_dropout_draws_the_stock_layers_mask(layer, graph, dtype):
    graph = graph_named(graph)
    check(layer, graph, features(graph, dtype), dtype=dtype, train=True, feat_drop=0.5, residual=True)


@DTYPES
@pytest.mark.parametrize("residual", (False, True))
@pytest.mark.parametrize("graph", ("random", "bipartite", "block"))
def test_identity_residual(graph, residual, dtype):
    graph = graph_named(graph)
    size = HEADS * OUT
    for layer in ("GATv2Conv", "GATConv"):
        check(layer, graph, features(graph, dtype, sizes=(size, size)), dtype=dtype, residual=residual)


@DTYPES
@pytest.mark.parametrize("get_attention", (False, True))
@pytest.mark.parametrize("graph", ("random", "bipartite", "block", "no_edges", "multi_edges"))
def test_gat_edge_weight(graph, get_attention, dtype):
    graph = graph_named(graph)
    weight = torch.randn(graph.num_edges(), dtype=dtype, requires_grad=True)
    inputs = {"edge_weight": weight, "get_attention": get_attention}
    check("GATConv", graph, features(graph, dtype), dtype=dtype, inputs=inputs)


@pytest.mark.parametrize("dtype", (torch.int64, torch.bool), ids=str)
def test_gat_edge_weight_of_integers(dtype):
    graph = graph_named("random")
    weight = torch.arange(graph.num_edges()).remainder(3).to(dtype)
    check("GATConv", graph, features(graph), inputs={"edge_weight": weight, "get_attention": True})


@DTYPES
@pytest.mark.parametrize("batch", ((2,), (1,), (2, 3)), ids=str)
@pytest.mark.parametrize("graph", ("random", "bipartite", "block", "isolated"))
@pytest.mark.parametrize("options", ({}, {"residual": True}, {"bias": False}), ids=str)
def test_gat_batch_dimensions(graph, batch, options, dtype):
    graph = graph_named(graph)
    feat = features(graph, dtype, batch=batch)
    check("GATConv", graph, feat, dtype=dtype, inputs={"get_attention": True}, **options)


@pytest.mark.parametrize("size", (1e2, 1e4, 1e6))
@EVERY_LAYER
def test_large_logits_of_nodes_that_are_alike(layer, size):
    """Equal weights that sum to one."""
    graph = graph_named("random")
    theirs, ours = layer_pair(layer)
    feat = (size * features(graph)[:1]).expand(graph.num_nodes(), IN)
    want = run(theirs.double(), graph, feat.double(), get_attention=True)
    have = run_fused(ours, graph, feat, get_attention=True)
    assert_close(*({name: found[name].float() for name in ("out", "attention")} for found in (have, want)))


@pytest.mark.parametrize("heads, channels", ((1, 1), (1, 7), (8, 8), (3, 33), (5, 1), (2, 64)))
@EVERY_LAYER
def test_heads_and_channels(layer, heads, channels):
    graph = graph_named("random")
    theirs, ours = layer_pair(layer, IN, channels, heads)
    feat = features(graph)
    inputs = {"get_attention": True}
    assert_close(run_fused(ours, graph, feat, **inputs), run(theirs, graph, feat, **inputs))


STRIDES = {
    "transposed": lambda x: x.detach().t().contiguous().t(),
    "every_second_row": lambda x: x.detach().repeat_interleave(2, 0)[::2],
    "columns_of_a_wider_one": lambda x: torch.cat((x.detach(), x.detach()), 1)[:, : x.size(1)],
    "expanded_row": lambda x: x.detach()[:1].expand_as(x),
    "expanded_column": lambda x: x.detach()[:, :1].expand_as(x),
}


@EVERY_LAYER
@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("graph", ("random", "bipartite", "block"))
def test_features_of_any_strides(layer, graph, strides):
    graph = graph_named(graph)
    view = STRIDES[strides]
    feat = features(graph, sizes=(HEADS * OUT,) * 2)
    feat = tuple(map(view, feat)) if isinstance(feat, tuple) else view(feat)
    theirs, ours = layer_pair(layer, in_feats_for(feat), **options_for(layer, residual=True))
    with torch.no_grad():
        want, have = theirs(graph, feat), ours(graph, feat)
    assert_close({"out": have}, {"out": want})


@EVERY_LAYER
def test_gradient_of_an_expanded_loss(layer):
    """``out.sum()`` hands the kernel a gradient with stride 0 everywhere."""
    graph = graph_named("random")
    grads = []
    for module in layer_pair(layer):
        feat = features(graph)
        module(graph, feat).sum().backward()
        grads.append({"grad of feat": feat.grad, **{f"grad of {n}": p.grad for n, p in module.named_parameters()}})
    assert_close(grads[1], grads[0])


@EVERY_LAYER
def test_gradient_only_of_the_attention_weights(layer):
    graph = graph_named("random")
    grads = []
    for module in layer_pair(layer):
        feat = features(graph)
        _, attention = module(graph, feat, get_attention=True)
        (attention**2).sum().backward()
        grads.append(feat.grad)
    assert_close({"grad of feat": grads[1]}, {"grad of feat": grads[0]})


@EVERY_LAYER
def test_frozen_parameters_and_features(layer):
    """Gradients come where they are asked for, whatever else does not ask."""
    graph = graph_named("bipartite")
    for wanting in ("feat", "parameters"):
        grads = []
        for module in layer_pair(layer, (IN, IN)):
            feat = features(graph)
            for f in feat:
                f.requires_grad_(wanting == "feat")
            module.requires_grad_(wanting == "parameters")
            module(graph, feat).pow(2).sum().backward()
            grads.append(
                {"src": feat[0].grad, "dst": feat[1].grad, **{n: p.grad for n, p in module.named_parameters()}}
            )
        assert_close(grads[1], grads[0])


@pytest.mark.parametrize("layer", LAYERS)
def test_a_pair_of_two_dtypes_is_the_stock_error(layer):
    """Sources and destinations meet in a kernel of DGL, which takes one dtype."""
    graph = graph_named("bipartite")
    feat = features(graph)
    for made in layer_pair(layer, (IN, IN)):
        made.fc_dst.double()
        with pytest.raises(DGLError, match="data type"):
            made(graph, (feat[0], feat[1].double()))


@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16, torch.int64), ids=str)
def test_edge_weights_of_gat_of_another_dtype(dtype):
    """DGL multiplies the attention by them, and takes what that promotes to where it is the features' dtype."""
    graph = graph_named("random")
    weight = torch.arange(graph.num_edges()).to(dtype)
    theirs, ours = layer_pair("GATConv")
    if dtype != torch.float64:
        assert_close(
            run_fused(ours, graph, features(graph), edge_weight=weight),
            run(theirs, graph, features(graph), edge_weight=weight),
        )
        return
    for made in (theirs, ours):
        with pytest.raises(DGLError, match="data type"):
            made(graph, features(graph), edge_weight=weight)


def test_agnn_takes_a_handle_without_the_kernels():
    """For one tensor of features, the stock layer looks for those of the destinations in the graph."""
    graph = graph_named("random")
    theirs, ours = stock.AGNNConv(allow_zero_in_degree=True), fused.AGNNConv(allow_zero_in_degree=True)
    with edgeless.backend("reference"):
        assert_close(run(ours, to_graph(graph), features(graph)), run(theirs, graph, features(graph)))


@pytest.mark.parametrize("out", (1, 7))
def test_a_bias_of_graph_conv_is_as_wide_as_torch_takes_it(out):
    """A layer without a weight has features of any width: one number is added to all of a row."""
    graph = graph_named("random")
    theirs, ours = sum_pair("GraphConv", (IN, out), weight=False)
    if out == 1:
        assert_close(run_fused(ours, graph, features(graph)), run(theirs, graph, features(graph)))
        return
    for made in (theirs, ours):
        with pytest.raises(RuntimeError, match="must match the size"):
            made(graph, features(graph))


def test_a_mean_with_narrower_destinations():
    """Their rows are added to the sum of the sources', which does not become as narrow as they are."""
    graph = graph_named("bipartite")
    theirs, ours = sum_pair("SAGEConv", ((IN, IN), 8, "gcn"), torch.float64)
    src, dst = (f.detach() for f in features(graph, torch.float64))
    feat = (src, dst.float())
    assert_close(run_fused(ours, graph, feat), run(theirs, graph, feat))


@pytest.mark.parametrize("norm", ("none", "left", "right", "both"))
@pytest.mark.parametrize("out", (3, 8))
def test_graph_conv_with_wider_destinations(norm, out):
    """DGL multiplies by the norm of destinations in the dtype of their features, which nothing else is made of."""
    graph = graph_named("bipartite")
    src, dst = (f.detach() for f in features(graph, torch.float64))
    theirs, ours = sum_pair("GraphConv", (IN, out), norm=norm, bias=False)
    feat = (src.float(), dst)
    found, wanted = ours(graph, feat), theirs(graph, feat)
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
