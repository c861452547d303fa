"""Attention dropout: its mask is not the stock layer's, so its rate, its scale and its use are tested."""

from __future__ import annotations

import dgl.function as fn
import pytest
import torch
from dgl_cases import IN, features, graph_named, layer_pair, run_fused

import edgeless

WITH_DROPOUT = pytest.mark.parametrize("layer", ("GATv2Conv", "GATConv"))


def call(layer, graph, feat, seed=0, **inputs):
    torch.manual_seed(seed)
    with edgeless.backend("fused"):
        return layer(graph, feat, get_attention=True, **inputs)


@WITH_DROPOUT
@pytest.mark.parametrize("p", (0.1, 0.5, 0.9))
def test_rate_and_scale(layer, p):
    """Every weight is dropped or scaled by 1 / (1 - p); the number dropped is within 5 standard deviations of p."""
    graph = graph_named("random")
    _, ours = layer_pair(layer, heads=7, attn_drop=p)
    feat = features(graph)
    kept = call(ours.eval(), graph, feat)[1]
    ours.train()
    zeros, total = 0, 0
    for seed in range(10):
        dropped = call(ours, graph, feat, seed)[1]
        mask = dropped == 0
        assert torch.allclose(dropped[~mask], kept[~mask] / (1 - p), rtol=1e-5)
        zeros, total = zeros + mask.sum().item(), total + mask.numel()
    assert abs(zeros - p * total) <= 5 * (total * p * (1 - p)) ** 0.5


@WITH_DROPOUT
def test_heads_and_edges_are_dropped_independently(layer):
    graph = graph_named("random")
    _, ours = layer_pair(layer, heads=8, attn_drop=0.5)
    mask = (call(ours.train(), graph, features(graph))[1].squeeze(-1) == 0).double()
    centred = mask - mask.mean(0)
    correlation = (centred.t() @ centred) / (centred.norm(dim=0).unsqueeze(0) * centred.norm(dim=0).unsqueeze(1))
    off_diagonal = correlation[~torch.eye(8, dtype=torch.bool)]
    assert off_diagonal.abs().max() < 5 / graph.num_edges() ** 0.5


@WITH_DROPOUT
def test_output_is_the_sum_weighed_by_the_returned_weights(layer):
    """Aggregating with DGL by the weights that came back, dropped ones included, gives the layer's own output."""
    graph = graph_named("random")
    _, ours = layer_pair(layer, attn_drop=0.5, dtype=torch.float64, bias=False)
    feat = features(graph, torch.float64)
    out, weights = call(ours.train(), graph, feat)
    fc = ours.fc_src if layer == "GATv2Conv" else ours.fc
    with graph.local_scope():
        graph.srcdata["x"] = fc(feat).view(feat.size(0), *out.shape[1:])
        graph.edata["w"] = weights
        graph.update_all(fn.u_mul_e("x", "w", "m"), fn.sum("m", "out"))
        assert torch.allclose(graph.dstdata["out"], out, rtol=1e-12)


@WITH_DROPOUT
def test_gradients_see_the_same_mask(layer):
    """The derivative along a direction, by finite differences with the random state held, is the gradient's."""
    graph = graph_named("random")
    _, ours = layer_pair(layer, attn_drop=0.5, dtype=torch.float64)
    ours.train()
    feat = features(graph, torch.float64)
    direction = torch.randn_like(feat)
    call(ours, graph, feat)[0].pow(2).sum().backward()
    step = 1e-6
    ahead, behind = (call(ours, graph, feat.detach() + s * direction)[0].pow(2).sum() for s in (step, -step))
    assert torch.isclose((feat.grad * direction).sum(), (ahead - behind) / (2 * step), rtol=1e-6)


@WITH_DROPOUT
def test_random_state_decides(layer):
    graph = graph_named("random")
    _, ours = layer_pair(layer, attn_drop=0.5)
    feat = features(graph)
    first, again, other = (call(ours.train(), graph, feat, seed)[1] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first == 0, other == 0)


@WITH_DROPOUT
def test_two_calls_in_one_step_draw_two_masks(layer):
    graph = graph_named("random")
    _, ours = layer_pair(layer, attn_drop=0.5)
    ours.train()
    feat = features(graph)
    masks = [ours(graph, feat, get_attention=True)[1] == 0 for _ in range(2)]
    assert not torch.equal(*masks)


@WITH_DROPOUT
def test_everything_dropped(layer):
    graph = graph_named("random")
    _, ours = layer_pair(layer, attn_drop=1.0)
    found = run_fused(ours.train(), graph, features(graph), get_attention=True)
    assert found["attention"].count_nonzero() == 0
    assert all(t.isfinite().all() for t in found.values())


@WITH_DROPOUT
def test_the_submodule_decides_whether_to_drop(layer):
    """As in the stock layer: Monte Carlo dropout puts only the Dropout modules into training mode."""
    graph = graph_named("random")
    _, ours = layer_pair(layer, attn_drop=0.5)
    ours.eval()
    ours.attn_drop.train()
    assert (call(ours, graph, features(graph))[1] == 0).any()
    ours.attn_drop.p = 0.0
    assert (call(ours, graph, features(graph))[1] > 0).all()


def test_gat_returns_dropped_weights_times_edge_weight():
    graph = graph_named("random")
    _, ours = layer_pair("GATConv", IN, attn_drop=0.5)
    ours.train()
    feat, scale = features(graph), torch.rand(graph.num_edges())
    plain, scaled = call(ours, graph, feat)[1], call(ours, graph, feat, edge_weight=scale)[1]
    assert torch.allclose(scaled, plain * scale.view(-1, 1, 1))
