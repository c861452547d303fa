"""RGATConv on small graphs, where it multiplies every node by every relation's matrix, against the stock layer."""

import gc
import re
import weakref

import pytest
import torch
from pyg_cases import GRAPHS, assert_close, edge_features, features, run, run_fused
from test_pyg_rgat import IN, MULTIPLICATIVE, OUT, SQUARE, R, assert_parity, layer_pair, types_of

import edgeless
from edgeless import TypedGraph
from edgeless.pyg import every_pair
from edgeless.pyg.nn import rgat_conv


@pytest.fixture(autouse=True)
def every_graph_is_small(monkeypatch):
    for name in ("_MOST_VALUES", "_MOST_OF_ONE_HEAD", "_MOST_PER_EDGE"):
        monkeypatch.setattr(every_pair, name, 1 << 40)


@pytest.fixture
def taken(monkeypatch):
    """The calls that multiplied every pair."""
    calls, real = [], rgat_conv.every_product
    monkeypatch.setattr(rgat_conv, "every_product", lambda *given: calls.append(1) or real(*given))
    return calls


@pytest.mark.parametrize("kind", SQUARE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("heads", [1, 3])
def test_every_graph(kind, dtype, heads, taken):
    assert_parity(GRAPHS[kind], dtype, heads=heads)
    assert bool(taken) == bool(GRAPHS[kind][0].size(1))  # a graph without edges takes no products for an edge


@pytest.mark.parametrize("mod", [None, "additive", "scaled", "f-additive", "f-scaled"])
@pytest.mark.parametrize("bases", [None, 3])
@pytest.mark.parametrize("heads,concat,bias", [(1, True, True), (2, True, False), (2, False, True)])
def test_every_option(mod, bases, heads, concat, bias, taken):
    graph, dtype = GRAPHS["random"], torch.float64
    options = {"mod": mod, "num_bases": bases, "heads": heads, "concat": concat, "bias": bias}
    assert_parity(graph, dtype, **options)
    assert_parity(graph, dtype, attention=True, **options)
    for edge_attr in (edge_features(graph, 3, dtype), edge_features(graph, 1, dtype).flatten()):
        width = 3 if edge_attr.dim() == 2 else 1
        assert_parity(graph, dtype, edge_dim=width, edge_attr=edge_attr, **options)
    assert len(taken) == 4


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("ids,types", [(torch.int32, torch.int64), (torch.int64, torch.int32)])
def test_flows_and_dtypes_of_ids(flow, ids, types, taken):
    edge_index, *_ = GRAPHS["random"]
    theirs, ours = layer_pair(torch.float64, flow=flow)
    edge_type = types_of((edge_index,))
    expected = run(theirs, theirs, features(40, IN, torch.float64), edge_index, edge_type)
    assert_close(run_fused(ours, features(40, IN, torch.float64), edge_index.to(ids), edge_type.to(types)), expected)
    assert taken


def test_dropout_draws_the_same_mask_as_on_large_graphs(monkeypatch):
    graph = GRAPHS["random"]
    _, ours = layer_pair(torch.float64, dropout=0.4)
    inputs = features(40, IN, torch.float64), graph[0], types_of(graph)
    found = []
    for pays in (rgat_conv.pays, lambda *_: False):
        monkeypatch.setattr(rgat_conv, "pays", pays)
        torch.manual_seed(3)
        found.append(ours.train()(*inputs))
    torch.testing.assert_close(*found)
    torch.manual_seed(4)
    assert not torch.allclose(ours(*inputs), found[0])


@pytest.mark.parametrize(
    "options", [MULTIPLICATIVE, {"attention_mechanism": "within-relation"}, {"num_blocks": 2}], ids=str
)
def test_other_options_search_for_pairs(options, taken):
    assert_parity(GRAPHS["random"], torch.float64, **options)
    assert not taken


def test_other_inputs_search_for_pairs(taken):
    edge_index, edge_type = GRAPHS["random"][0], types_of(GRAPHS["random"])
    _, ours = layer_pair()
    x, typed = features(40, IN), TypedGraph.from_edge_index(edge_index, edge_type, R, 40, 40)
    with edgeless.backend("fused"):
        ours(x, typed)
        ours(x, typed.graph, edge_type)
        with torch.autocast("cpu"):
            ours(x, edge_index, edge_type)
        ours.bfloat16()(x.bfloat16(), edge_index, edge_type)
    assert not taken


def test_only_small_graphs_do_so(monkeypatch):
    edge_index, edge_type = torch.zeros(2, 10, dtype=torch.int64), torch.zeros(10, dtype=torch.int64)
    limits = {"_MOST_VALUES": 10 * 4 * 6, "_MOST_OF_ONE_HEAD": 10 * 4 * 2, "_MOST_PER_EDGE": 4}
    for name, limit in limits.items():
        monkeypatch.setattr(every_pair, name, limit)
    pays = every_pair.pays
    assert pays(edge_index, edge_type, 10, 4, 2, 3) and pays(edge_index, edge_type, 10, 4, 1, 2)
    assert not pays(edge_index, edge_type, 10, 4, 2, 4) and not pays(edge_index, edge_type, 10, 4, 1, 3)
    assert not pays(edge_index[:, :9], edge_type[:9], 10, 4, 2, 3)
    assert not pays(edge_index.to("meta"), edge_type.to("meta"), 10, 4, 2, 3)


@pytest.mark.parametrize("where,value", [((0, 3), 40), ((0, 3), -1), ((1, 2), 40), ((1, 2), -1), (None, R), (None, -1)])
def test_ids_out_of_range_are_named(where, value):
    edge_index, edge_type = GRAPHS["random"][0].clone(), types_of(GRAPHS["random"])
    if where is None:
        edge_type[5], name, position = value, "edge_type", 5
    else:
        edge_index[where], name, position = value, f"edge_index[{where[0]}]", where[1]
    _, ours = layer_pair()
    with edgeless.backend("fused"), pytest.raises(IndexError, match=re.escape(name)) as raised:
        ours(features(40, IN), edge_index, edge_type)
    assert f"id {value} at position {position}" in str(raised.value)


def test_graphs_are_kept_until_the_types_are_written_over_or_freed():
    edge_index, edge_type = GRAPHS["random"][0].clone(), types_of(GRAPHS["random"])
    theirs, ours = layer_pair(torch.float64)
    x = features(40, IN, torch.float64)
    edgeless.clear_cache()
    for _ in range(2):
        torch.testing.assert_close(ours(x, edge_index, edge_type), theirs(x, edge_index, edge_type))
    assert edgeless.cache_info()[:3] == (1, 1, 1)
    edge_type[0] = (edge_type[0] + 1) % R
    torch.testing.assert_close(ours(x, edge_index, edge_type), theirs(x, edge_index, edge_type))
    edge_index[0, 0] = (edge_index[0, 0] + 1) % 40
    torch.testing.assert_close(ours(x, edge_index, edge_type), theirs(x, edge_index, edge_type))
    other = edge_index.flip(1).clone()
    torch.testing.assert_close(ours(x, other, edge_type), theirs(x, other, edge_type))
    alive = weakref.ref(edge_type)
    del edge_type
    gc.collect()
    assert alive() is None and edgeless.cache_info().graphs == 0


def test_second_derivatives_and_batches_of_gradients():
    graph = GRAPHS["random"]
    theirs, ours = layer_pair(torch.float64)
    edge_type = types_of(graph)
    grads = features(3 * 40, 2 * OUT, torch.float64, seed=29).view(3, 40, -1)
    found = []
    for layer in (ours, theirs):
        x = features(40, IN, torch.float64).requires_grad_()
        wanted = [x, layer.q, layer.k, layer.weight]
        out = layer(x, graph[0], edge_type)
        batch = [torch.stack([torch.autograd.grad(out, one, g, retain_graph=True)[0] for g in grads]) for one in wanted]
        if layer is ours:
            batched = torch.autograd.grad(out, wanted, grads, retain_graph=True, is_grads_batched=True)
            for a, b in zip(batched, batch, strict=True):
                torch.testing.assert_close(a, b)
        (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        found.append([*batch, *torch.autograd.grad(first.square().sum(), wanted)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


def test_the_same_bits_in_every_run():
    graph = GRAPHS["random"]
    _, ours = layer_pair()
    runs = [run_fused(ours, features(40, IN), graph[0].clone(), types_of(graph)) for _ in range(3)]
    for other in runs[1:]:
        assert all(value is other[key] is None or torch.equal(value, other[key]) for key, value in runs[0].items())
