"""HGTConv of DGL against the stock layer."""

import copy
import re

import dgl.nn as stock
import pytest
import torch
from dgl_cases import GRAPHS, assert_close, features, graph_named, random_graph

import edgeless
import edgeless.dgl.nn as fused

IN, NODE_TYPES, EDGE_TYPES = 6, 3, 4
SQUARE = [
    name
    for name in GRAPHS
    if not name.startswith("bipartite") and name not in ("no_edges", "zero_nodes", "empty_relation")
]


def types_of(number, kinds, seed, dtype=torch.int64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(kinds, (number,), generator=generator).to(dtype)


def inputs_of(graph, dtype=torch.float32, width=IN):
    x = features(graph, dtype, pair=False, sizes=(width, width)).detach()
    return x, types_of(graph.num_src_nodes(), NODE_TYPES, 1), types_of(graph.num_edges(), EDGE_TYPES - 1, 2)


def layer_pair(in_size=IN, head_size=4, heads=2, dtype=torch.float32, **options):
    options = {"dropout": 0.0, **options}
    theirs = stock.HGTConv(in_size, head_size, heads, NODE_TYPES, EDGE_TYPES, **options)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)
    ours = fused.HGTConv(in_size, head_size, heads, NODE_TYPES, EDGE_TYPES, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs.to(dtype), ours.to(dtype)


def run(layer, graph, x, ntype, etype, **kwargs):
    leaves = {"x": x.detach().clone().requires_grad_(), **dict(layer.named_parameters())}
    out = layer(graph, leaves["x"], ntype, etype, **kwargs)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(23), dtype=torch.float64)
    grads = torch.autograd.grad((out.double() * weight).sum(), list(leaves.values()), allow_unused=True)
    return {"out": out.detach(), **{f"grad of {name}": grad for name, grad in zip(leaves, grads, strict=True)}}


def run_fused(layer, *inputs, **kwargs):
    with edgeless.backend("fused"):
        return run(layer, *inputs, **kwargs)


@pytest.mark.parametrize("kind", SQUARE)
@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_graph(kind, idtype, dtype):
    graph = graph_named(kind, idtype)
    theirs, ours = layer_pair(dtype=dtype)
    inputs = inputs_of(graph, dtype)
    assert_close(run_fused(ours, graph, *inputs), run(theirs, graph, *inputs))


@pytest.mark.parametrize("in_size,head_size,heads", [(6, 6, 1), (8, 2, 4), (5, 3, 2)])
@pytest.mark.parametrize("use_norm", [False, True])
def test_heads_widths_and_norms(in_size, head_size, heads, use_norm):
    graph = random_graph()
    theirs, ours = layer_pair(in_size, head_size, heads, use_norm=use_norm)
    x, ntype, etype = inputs_of(graph, width=in_size)
    assert_close(run_fused(ours, graph, x, ntype, etype), run(theirs, graph, x, ntype, etype))
    assert_close(run_fused(ours, graph, x, ntype.int(), etype.int()), run(theirs, graph, x, ntype, etype))


@pytest.mark.parametrize("kind", SQUARE)
def test_keys_and_values_in_turn(kind, monkeypatch):
    """As where no gradient is asked for and they are large: the values of pairs behind the keys."""
    taken = []
    monkeypatch.setattr(edgeless.functional.pair_maps, "_takes_turns", lambda *_: taken.append(1) or True)
    graph = graph_named(kind, torch.int32)
    theirs, ours = layer_pair()
    inputs = inputs_of(graph)
    with torch.no_grad(), edgeless.backend("fused"):
        torch.testing.assert_close(ours(graph, *inputs), theirs(graph, *inputs))
    assert taken == [1]


def test_sorted_nodes_and_edges():
    graph = random_graph()
    theirs, ours = layer_pair()
    x, ntype, etype = inputs_of(graph)
    ntype, etype = ntype.sort().values, etype.sort().values
    expected = run(theirs, graph, x, ntype, etype, presorted=True)
    assert_close(run_fused(ours, graph, x, ntype, etype, presorted=True), expected)


def test_dropout():
    graph = random_graph()
    theirs, ours = layer_pair(dropout=0.5)
    results = []
    for call, layer in ((run_fused, ours), (run, theirs)):
        torch.manual_seed(1)
        results.append(call(layer, graph, *inputs_of(graph)))
    assert_close(*results)


def test_bfloat16_errs_at_most_twice_as_much():
    graph = random_graph()
    theirs, ours = layer_pair(dtype=torch.bfloat16)
    x, *types = inputs_of(graph, torch.bfloat16)
    exact = run(copy.deepcopy(theirs).double(), graph, x.double(), *types)
    found, stocks = run_fused(ours, graph, x, *types), run(theirs, graph, x, *types)
    for key, want in exact.items():
        errors = [float((t[key].double() - want).norm() / want.norm()) for t in (found, stocks)]
        assert found[key].dtype == stocks[key].dtype and errors[0] <= 2 * errors[1] + 1e-6, (key, errors)


def test_an_edgeless_graph():
    graph = random_graph()
    theirs, ours = layer_pair()
    inputs = inputs_of(graph)
    expected = run(theirs, graph, *inputs)
    assert_close(run_fused(ours, edgeless.dgl.to_graph(graph), *inputs), expected)


def test_bitwise_the_same_from_run_to_run():
    graph = random_graph()
    _, ours = layer_pair()
    first, second = (run_fused(ours, graph, *inputs_of(graph)) for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("form", ["handle", "graph"])
def test_compiled(form, fresh_dynamo):
    graph = random_graph()
    theirs, ours = layer_pair()
    inputs = inputs_of(graph)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=form == "handle")
    found = run_fused(compiled, edgeless.dgl.to_graph(graph) if form == "handle" else graph, *inputs)
    found = {name.replace("_orig_mod.", ""): tensor for name, tensor in found.items()}
    assert_close(found, run(theirs, graph, *inputs))


def test_seeded_initialisation_and_accelerate():
    torch.manual_seed(3)
    theirs = stock.HGTConv(IN, 4, 2, NODE_TYPES, EDGE_TYPES)
    torch.manual_seed(3)
    ours = fused.HGTConv(IN, 4, 2, NODE_TYPES, EDGE_TYPES)
    for (key, mine), (other, value) in zip(ours.state_dict().items(), theirs.state_dict().items(), strict=True):
        assert key == other and torch.equal(mine, value)
    edgeless.accelerate(theirs)
    assert type(theirs) is fused.HGTConv
    graph = random_graph()
    assert edgeless.explain(theirs, graph, *inputs_of(graph))


def test_refusals_and_errors_are_said_in_words():
    graph = random_graph()
    _, ours = layer_pair()
    x, ntype, etype = inputs_of(graph)
    for inputs, words in (
        ((graph, x, ntype[1:], etype), r"the types have shape \[39\]"),
        ((graph, x, ntype, etype[1:]), r"etypes is not an int64 or int32 Tensor of shape \[E\] = \[300\]"),
        ((graph, x[:, 1:], ntype, etype), r"x has shape \[40, 5\], not \[N, 6\]"),
        ((graph, x.double(), ntype, etype), "x is torch.float64"),
        ((graph, (x, x), ntype, etype), "x is a pair"),
    ):
        assert re.search(words, str(edgeless.explain(ours, *inputs))), words
    wrong = etype.clone()
    wrong[4] = EDGE_TYPES
    with pytest.raises(IndexError, match="edge_type has id 4 at position 4"):
        ours(graph, x, ntype, wrong)


def test_node_types_are_sorted_once_and_edits_are_seen():
    graph = random_graph()
    theirs, ours = layer_pair()
    x, ntype, etype = inputs_of(graph)
    for _ in range(2):
        assert_close(run_fused(ours, graph, x, ntype, etype), run(theirs, graph, x, ntype, etype))
    assert edgeless.cache_info().hits >= 2  # of node types and edge types
    ntype[:7] = 2
    assert_close(run_fused(ours, graph, x, ntype, etype), run(theirs, graph, x, ntype, etype))


def test_training_behind_a_validation_in_inference_mode():
    graph = random_graph()
    theirs, ours = layer_pair()
    inputs = inputs_of(graph)
    with torch.inference_mode():
        ours(graph, *inputs)
    assert_close(run_fused(ours, graph, *inputs), run(theirs, graph, *inputs))


def test_node_types_out_of_range_are_named():
    graph = random_graph()
    _, ours = layer_pair()
    x, ntype, etype = inputs_of(graph)
    ntype[5] = NODE_TYPES
    with pytest.raises(IndexError, match="HGTConv: ntype has id 3 at position 5, expected 0 <= id < T = 3"):
        ours(graph, x, ntype, etype)


def test_a_skip_of_another_dtype():
    graph = random_graph()
    theirs, ours = layer_pair()
    for layer in (theirs, ours):
        layer.skip.data = layer.skip.data.double()
    inputs = inputs_of(graph)
    expected, found = run(theirs, graph, *inputs), run_fused(ours, graph, *inputs)
    for key, want in expected.items():
        assert found[key].dtype == want.dtype
        assert_close({key: found[key].float()}, {key: want.float()})


def test_gradients_stand_where_keys_and_values_were():
    graph = graph_named("hub", torch.int64)
    theirs, ours = layer_pair()
    inputs = inputs_of(graph)
    with torch.profiler.profile() as profile:
        found = run_fused(ours, graph, *inputs)
    ops = {event.key for event in profile.key_averages()}
    assert {"edgeless::attention_backward_into", "edgeless::pair_maps_backward_over"} <= ops
    assert_close(found, run(theirs, graph, *inputs))
