"""Attention dropout: the layers use the library's generator, so masks differ from stock but everything else agrees."""

import pytest
import torch
import torch.utils.checkpoint
from pyg_cases import GRAPHS, LAYERS, assert_close, edge_features, layer_pair, node_features, run, run_fused

import edgeless
from edgeless import reference
from edgeless.functional.dropout import seed_tensor

GRAPH = GRAPHS["self_loops"]
RATE = 0.4


def _mask(name, seed, edge_index, num_nodes):
    """The mask of the next fused call after ``torch.manual_seed(seed)``, in the order of the graph's edges."""
    graph = edgeless.Graph.from_edge_index(edge_index, num_nodes, num_nodes)
    num_edges = graph.num_edges if name == "TransformerConv" else graph.with_self_loops().num_edges
    torch.manual_seed(seed)
    drawn = seed_tensor(None, "cpu")
    return reference.dropout_mask(drawn, num_edges, 3, RATE)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("edge_dim", (None, 2))
@pytest.mark.parametrize("attention", (None, True))
def test_forward_and_backward_agree_with_the_stock_layer_under_the_same_mask(name, edge_dim, attention, monkeypatch):
    theirs, ours = layer_pair(name, dtype=torch.float64, dropout=RATE, edge_dim=edge_dim)
    x = node_features(GRAPH, torch.float64)
    attr = None if edge_dim is None else edge_features(GRAPH, edge_dim, torch.float64)
    inputs, kwargs = (x, GRAPH[0], attr), {"return_attention_weights": attention}
    mask = _mask(name, 5, *GRAPH[:2])
    assert 0 < mask.sum() < mask.numel()
    torch.manual_seed(5)
    have = run_fused(ours, *inputs, **kwargs)

    def dropout(alpha, p, training):
        assert p == RATE and training
        return alpha * mask / (1 - p)

    monkeypatch.setattr(torch.nn.functional, "dropout", dropout)
    assert_close(have, run(theirs, theirs, *inputs, **kwargs))


@pytest.mark.parametrize("name", ("GATv2Conv", "GATConv"))
@pytest.mark.parametrize("rate", (0.1, 0.6, 0.9))
def test_rate_and_scaling(name, rate):
    graph = GRAPHS["hub"]
    _, ours = layer_pair(name, heads=8, dropout=rate)
    dropped = []
    with torch.no_grad():
        for _ in range(8):
            ours.train()
            dropped.append(ours(node_features(graph), graph[0], return_attention_weights=True)[1][1])
        ours.eval()
        kept = ours(node_features(graph), graph[0], return_attention_weights=True)[1][1]
    zero = torch.stack([d == 0 for d in dropped]).double()
    sigma = (rate * (1 - rate) / zero.numel()) ** 0.5
    assert abs(float(zero.mean()) - rate) < 5 * sigma
    for d in dropped:
        torch.testing.assert_close(d[d != 0], (kept / (1 - rate))[d != 0])
    assert not torch.equal(dropped[0] == 0, dropped[1] == 0)


@pytest.mark.parametrize("name", LAYERS)
def test_reproducible(name):
    _, ours = layer_pair(name, dropout=0.5)
    x = node_features(GRAPHS["random"])

    def outputs(seed):
        torch.manual_seed(seed)
        return [ours(x, GRAPHS["random"][0]) for _ in range(2)]

    first, again, other = outputs(3), outputs(3), outputs(4)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    assert not torch.equal(first[0], first[1]) and not torch.equal(first[0], other[0])


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("reentrant", (True, False))
def test_checkpointing_repeats_the_mask(name, reentrant):
    _, ours = layer_pair(name, dropout=0.5)
    grads = []
    for checkpointed in (False, True):
        torch.manual_seed(2)
        x = node_features(GRAPHS["random"]).requires_grad_()
        if checkpointed:
            out = torch.utils.checkpoint.checkpoint(ours, x, GRAPHS["random"][0], use_reentrant=reentrant)
        else:
            out = ours(x, GRAPHS["random"][0])
        out.square().sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("name", LAYERS)
def test_everything_dropped(name):
    """With p = 1 only what does not come from neighbours is left, as in the stock layer."""
    theirs, ours = layer_pair(name, dropout=1.0)
    inputs = (node_features(GRAPHS["random"]), GRAPHS["random"][0])
    assert_close(run_fused(ours, *inputs), run(theirs, theirs, *inputs))


@pytest.mark.parametrize("name", LAYERS)
def test_transformer_returns_weights_before_dropout_and_gat_after(name):
    _, ours = layer_pair(name, dropout=0.5)
    inputs = (node_features(GRAPHS["random"]), GRAPHS["random"][0])
    weights = ours(*inputs, return_attention_weights=True)[1][1]
    assert bool((weights == 0).any()) == (name != "TransformerConv")


@pytest.mark.parametrize("name", LAYERS)
def test_eval_and_zero_rate_draw_nothing(name):
    x = node_features(GRAPHS["random"])
    for rate, training in ((0.5, False), (0.0, True)):
        _, ours = layer_pair(name, dropout=rate)
        ours.train(training)
        state = torch.get_rng_state()
        ours(x, GRAPHS["random"][0])
        assert torch.equal(state, torch.get_rng_state())
