"""RelGraphConv, TypedLinear and the typed products of dgl.ops against the stock ones."""

import copy
import re

import dgl
import dgl.nn as stock
import pytest
import torch
from dgl_cases import GRAPHS, assert_close, features, graph_named, random_graph

import edgeless
import edgeless.dgl.nn as fused
from edgeless.checks import INTEGERS
from edgeless.dgl import ops

IN, OUT, R = 6, 4, 5
REGULARIZERS = {
    "plain": {},
    "basis": {"regularizer": "basis", "num_bases": 3},
    "bdd": {"regularizer": "bdd", "num_bases": 2},
}


def types_of(graph, dtype=torch.int64):
    generator = torch.Generator().manual_seed(31)
    return torch.randint(R - 1, (graph.num_edges(),), generator=generator).to(dtype)


def draw(layer):
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)
    return layer


def layer_pair(dtype=torch.float32, **options):
    theirs, ours = draw(stock.RelGraphConv(IN, OUT, R, **options)), fused.RelGraphConv(IN, OUT, R, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs.to(dtype), ours.to(dtype)


def run(layer, graph, feat, etypes, norm=None, **kwargs):
    leaves = {"feat": feat.detach().clone().requires_grad_()}
    if norm is not None:
        leaves["norm"] = norm = norm.detach().clone().requires_grad_()
    out = layer(graph, leaves["feat"], etypes, norm, **kwargs)
    leaves.update(layer.named_parameters())
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(23), dtype=torch.float64)
    grads = torch.autograd.grad((out.double() * weight).sum(), leaves.values(), allow_unused=True)
    return {"out": out.detach(), **{f"grad of {name}": g for name, g in zip(leaves, grads, strict=True)}}


def run_fused(layer, *inputs, **kwargs):
    with edgeless.backend("fused"):
        return run(layer, *inputs, **kwargs)


def source_features(graph, dtype=torch.float32):
    return features(graph, dtype, pair=False, sizes=(IN, IN)).detach()


def norm_of(graph, dtype=torch.float32):
    return torch.rand(graph.num_edges(), 1, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("kind", [name for name in GRAPHS if name != "no_edges" and name != "zero_nodes"])
@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_graph(kind, idtype, dtype):
    graph = graph_named(kind, idtype)
    if graph.num_edges() == 0:
        pytest.skip("the stock layer takes no graph without edges")
    loops = graph.num_src_nodes() >= graph.num_dst_nodes()
    theirs, ours = layer_pair(dtype, self_loop=loops)
    feat, etypes = source_features(graph, dtype), types_of(graph)
    for norm in (None, norm_of(graph, dtype)):
        assert_close(run_fused(ours, graph, feat, etypes, norm), run(theirs, graph, feat, etypes, norm))


@pytest.mark.parametrize("kind", ["no_edges", "zero_nodes"])
def test_graphs_without_edges(kind):
    graph = GRAPHS[kind]()
    _, ours = layer_pair()
    feat = source_features(graph)
    with edgeless.backend("fused"):
        out = ours(graph, feat, types_of(graph))
    assert torch.allclose(out, feat @ ours.loop_weight + ours.h_bias)


@pytest.mark.parametrize("regularizer", REGULARIZERS)
@pytest.mark.parametrize("options", [
    {}, {"bias": False}, {"self_loop": False}, {"layer_norm": True}, {"activation": torch.relu},
    {"bias": False, "self_loop": False}, {"layer_norm": True, "activation": torch.tanh, "self_loop": False},
])  # fmt: skip
def test_every_option(regularizer, options):
    graph = random_graph()
    theirs, ours = layer_pair(**REGULARIZERS[regularizer], **options)
    feat, etypes = source_features(graph), types_of(graph)
    for norm in (None, norm_of(graph)):
        assert_close(run_fused(ours, graph, feat, etypes, norm), run(theirs, graph, feat, etypes, norm))
    assert_close(run_fused(ours, graph, feat, etypes.int()), run(theirs, graph, feat, etypes))


def test_sorted_edges():
    graph = random_graph()
    theirs, ours = layer_pair()
    feat, etypes = source_features(graph), types_of(graph).sort().values
    expected = run(theirs, graph, feat, etypes, presorted=True)
    assert_close(run_fused(ours, graph, feat, etypes, presorted=True), expected)
    assert ours.presorted is True


def test_edges_that_are_not_sorted_as_promised():
    """The stock layer multiplies them by the weights of other relations; here the promise is not needed."""
    graph = random_graph()
    theirs, ours = layer_pair()
    feat, etypes = source_features(graph), types_of(graph)
    assert_close(run_fused(ours, graph, feat, etypes, presorted=True), run(theirs, graph, feat, etypes))


def test_norms_of_one_dimension_and_of_the_graph():
    """The documented shape of norm is [E], with which the stock layer fails; a norm in edata counts as well."""
    graph = random_graph()
    theirs, ours = layer_pair()
    feat, etypes, norm = source_features(graph), types_of(graph), norm_of(graph)
    expected = run(theirs, graph, feat, etypes, norm)
    assert torch.allclose(ours(graph, feat, etypes, norm.squeeze(1)), expected["out"], atol=1e-5)
    graph.edata["norm"] = norm
    assert_close(run_fused(ours, graph, feat, etypes), run(theirs, graph, feat, etypes))
    assert torch.allclose(ours(graph, feat, etypes), expected["out"], atol=1e-5)


def test_dropout():
    graph = random_graph()
    theirs, ours = layer_pair(dropout=0.5)
    feat, etypes = source_features(graph), types_of(graph)
    torch.manual_seed(1)
    expected = run(theirs, graph, feat, etypes)
    torch.manual_seed(1)
    assert_close(run_fused(ours, graph, feat, etypes), expected)


def test_bfloat16_errs_at_most_twice_as_much_as_its_products():
    graph = random_graph()
    theirs, ours = layer_pair(torch.bfloat16)
    feat, etypes = source_features(graph, torch.bfloat16), types_of(graph)
    exact = run(copy.deepcopy(theirs).double(), graph, feat.double(), etypes)
    found, stocks = run_fused(ours, graph, feat, etypes), run(theirs, graph, feat, etypes)
    for key, want in exact.items():
        errors = [float((t[key].double() - want).norm() / want.norm()) for t in (found, stocks)]
        assert found[key].dtype == stocks[key].dtype and errors[0] <= 2 * errors[1] + 1e-6, (key, errors)


def test_an_edgeless_graph():
    graph = random_graph()
    theirs, ours = layer_pair()
    feat, etypes = source_features(graph), types_of(graph)
    handle, expected = edgeless.dgl.to_graph(graph), run(theirs, graph, feat, etypes)
    assert_close(run_fused(ours, handle, feat, etypes), expected)
    with edgeless.backend("reference"):
        assert_close(run(ours, handle, feat, etypes), expected)


def test_types_are_looked_up_and_edits_are_seen():
    graph = random_graph()
    theirs, ours = layer_pair()
    graph.edata["t"] = types_of(graph)
    feat = source_features(graph)
    for _ in range(2):
        assert_close(run_fused(ours, graph, feat, graph.edata["t"]), run(theirs, graph, feat, graph.edata["t"]))
    assert edgeless.cache_info().hits == 2  # of the graph, and of the graph with types
    graph.edata["t"][3] = 4
    assert_close(run_fused(ours, graph, feat, graph.edata["t"]), run(theirs, graph, feat, graph.edata["t"]))


def test_bitwise_the_same_from_run_to_run():
    graph = random_graph()
    _, ours = layer_pair()
    inputs = (graph, source_features(graph), types_of(graph), norm_of(graph))
    first, second = run_fused(ours, *inputs), run_fused(ours, *inputs)
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_refusals_are_said_in_words():
    graph = random_graph()
    ours = layer_pair()[1]
    feat, etypes = source_features(graph), types_of(graph)
    for inputs, words in (
        ((graph, feat, etypes.tolist()), "etypes is a list"),
        ((graph, feat, etypes[1:]), r"etypes is not an int64 or int32 Tensor of shape \[E\] = \[300\]"),
        ((graph, feat[:, 1:], etypes), "feat has 5 features, and the layer takes 6"),
        ((graph, feat.double(), etypes), "feat is torch.float64"),
        ((graph, (feat, feat), etypes), "feat is a pair"),
        ((graph, feat, etypes, torch.ones(300, OUT)), r"norm is not a Tensor of shape \[E, 1\] or \[E\]"),
    ):
        assert re.search(words, str(edgeless.explain(ours, *inputs))), words


def test_a_relation_out_of_range_is_named():
    graph = random_graph()
    etypes = types_of(graph)
    etypes[9] = R
    with pytest.raises(IndexError, match="edge_type has id 5 at position 9, expected 0 <= id < num_types = 5"):
        layer_pair()[1](graph, source_features(graph), etypes)


def test_seeded_initialisation_and_state_are_the_stock_layers():
    for options in REGULARIZERS.values():
        torch.manual_seed(3)
        theirs = stock.RelGraphConv(IN, OUT, R, **options)
        torch.manual_seed(3)
        ours = fused.RelGraphConv(IN, OUT, R, **options)
        assert repr(ours).replace("edgeless.", "") == repr(theirs)
        for (key, mine), (other, value) in zip(ours.state_dict().items(), theirs.state_dict().items(), strict=True):
            assert key == other and torch.equal(mine, value)


def test_accelerate_turns_stock_layers():
    model = torch.nn.ModuleList([stock.RelGraphConv(IN, OUT, R), stock.TypedLinear(IN, OUT, R)])
    report = edgeless.accelerate(model)
    assert [new for _, _, new in report.swapped] == [fused.RelGraphConv, fused.TypedLinear, fused.TypedLinear]
    graph = random_graph()
    assert edgeless.explain(model[0], graph, source_features(graph), types_of(graph))


# TypedLinear and the functions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("regularizer", REGULARIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_typed_linear(regularizer, dtype):
    theirs = draw(stock.TypedLinear(IN, OUT, R, **REGULARIZERS[regularizer])).to(dtype)
    ours = fused.TypedLinear(IN, OUT, R, **REGULARIZERS[regularizer]).to(dtype)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(70, IN, dtype=dtype, requires_grad=True)
    types = torch.arange(70) % (R - 1)
    for of_rows, is_sorted in ((types, False), (types.sort().values, True)):
        results = []
        with edgeless.backend("fused"):
            found = ours(x, of_rows, is_sorted)
        for layer, out in ((ours, found), (theirs, theirs(x, of_rows, is_sorted))):
            leaves = [x, *layer.parameters()]
            grads = torch.autograd.grad(out.square().sum(), leaves)
            results.append(dict(zip(["out", *map(str, range(len(leaves)))], [out.detach(), *grads], strict=True)))
        assert_close(*results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_of_ops(dtype):
    a, b = torch.randn(70, IN, dtype=dtype), torch.randn(R, IN, OUT, dtype=dtype)
    types = torch.arange(70) % (R - 1)
    lengths = torch.bincount(types, minlength=R)
    results = []
    for module in (ops, dgl.ops):
        x, w = a.clone().requires_grad_(), b.clone().requires_grad_()
        out = {"gather": module.gather_mm(x, w, idx_b=types), "segment": module.segment_mm(x, w, lengths)}
        grads = torch.autograd.grad(sum(o.square().sum() for o in out.values()), [x, w])
        results.append({**{k: o.detach() for k, o in out.items()}, **dict(zip("xw", grads, strict=True))})
    assert_close(*results)
    assert edgeless.explain(ops.gather_mm, a, b, idx_b=types)
    assert edgeless.explain(ops.segment_mm, a, b, lengths)
    assert not edgeless.explain(ops.segment_mm, a, b.half(), lengths)
    with edgeless.backend("fused"), pytest.raises(edgeless.NotFusedError, match="x is torch.float"):
        ops.gather_mm(a, b.half(), idx_b=types)
    with pytest.raises(ValueError, match="lengths must add up to N = 70, got 71"):
        ops.segment_mm(a, b, lengths + torch.tensor([1, 0, 0, 0, 0]))
    for narrow in sorted(INTEGERS, key=str):  # also those that DGL's own function does not add up
        with edgeless.backend("fused"):
            assert torch.equal(ops.segment_mm(a, b, lengths.to(narrow)), ops.segment_mm(a, b, lengths))


@pytest.mark.parametrize("regularizer", REGULARIZERS)
@pytest.mark.parametrize("form", ["handle", "graph"])
def test_compiled_programs(form, regularizer, fresh_dynamo):
    graph = random_graph()
    theirs, ours = layer_pair(**REGULARIZERS[regularizer])
    inputs = source_features(graph), types_of(graph), norm_of(graph)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=form == "handle")
    found = run_fused(compiled, edgeless.dgl.to_graph(graph) if form == "handle" else graph, *inputs)
    found = {name.replace("_orig_mod.", ""): tensor for name, tensor in found.items()}
    assert_close(found, run(theirs, graph, *inputs))


@pytest.mark.parametrize("regularizer", REGULARIZERS)
def test_a_compiled_typed_linear(regularizer, fresh_dynamo):
    linear = draw(fused.TypedLinear(IN, OUT, R, **REGULARIZERS[regularizer]))
    x, types = torch.randn(70, IN), torch.arange(70) % (R - 1)
    expected = draw(stock.TypedLinear(IN, OUT, R, **REGULARIZERS[regularizer]))(x, types)
    with edgeless.backend("fused"):
        torch.testing.assert_close(torch.compile(linear, backend="aot_eager", fullgraph=True)(x, types), expected)
