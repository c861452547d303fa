"""AGNNConv against the stock layer: outputs and all gradients, refusals, a user's handling."""

from __future__ import annotations

import copy
import inspect
import pickle

import dgl
import dgl.nn as stock
import pytest
import torch
from dgl_cases import GRAPHS, IN, assert_close, features, graph_named, hetero, run, run_fused

import edgeless
import edgeless.dgl.nn as fused
from edgeless.dgl import to_graph

DTYPES = pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)


def layers(dtype=torch.float32, init_beta=2.3, **options):
    """(stock layer, fused layer)."""
    options = {"allow_zero_in_degree": True, **options}
    return [module.AGNNConv(init_beta, **options).to(dtype) for module in (stock, fused)]


def check(graph, feat, dtype=torch.float32, **options):
    theirs, ours = layers(dtype, **options)
    assert_close(run_fused(ours, graph, feat), run(theirs, graph, feat))


# Numbers ---------------------------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("idtype", (torch.int32, torch.int64), ids=str)
@pytest.mark.parametrize("graph", GRAPHS)
def test_graph_shapes(graph, idtype, dtype):
    graph = graph_named(graph, idtype)
    check(graph, features(graph, dtype), dtype)


@DTYPES
@pytest.mark.parametrize("graph", ("random", "bipartite", "block", "no_edges", "relation", "self_loops"))
@pytest.mark.parametrize("batch", ((), (2,)), ids=str)
def test_pairs_of_features(graph, batch, dtype):
    """Also on a graph with one node type, where the stock layer takes the cosines from the second alone."""
    graph = graph_named(graph)
    check(graph, features(graph, dtype, pair=True, batch=batch), dtype)


@pytest.mark.parametrize("beta", (2.0**12, 2.0**20))
def test_large_logits(beta):
    """Features of two kinds: many logits are equal, and what they give to the gradients cancels, but for rounding."""
    graph = graph_named("random")
    theirs, ours = layers(init_beta=beta)
    feat = 2 * torch.eye(IN)[torch.arange(graph.num_nodes()) % 2]
    found, rough = run_fused(ours, graph, feat), run(theirs, graph, feat)
    truth = run(theirs.double(), graph, feat.double())
    for name in ("out", "grad of feat[0]"):
        error, stock_error = ((t[name].double() - truth[name]).norm() for t in (found, rough))
        assert error <= max(2 * stock_error, 1e-5 * truth[name].norm())


@DTYPES
@pytest.mark.parametrize("batch", ((2,), (1,), (2, 3), (5,)), ids=str)
@pytest.mark.parametrize("graph", ("random", "bipartite", "block", "isolated"))
def test_batch_dimensions(graph, batch, dtype):
    """Over a few problems, since in one of them the gradient of beta, a single number, may cancel to nothing."""
    graph = graph_named(graph)
    theirs, ours = layers(dtype)
    feats = [features(graph, dtype, batch=batch, seed=seed) for seed in range(4)]
    found = [run_fused(ours, graph, feat) for feat in feats], [run(theirs, graph, feat) for feat in feats]
    assert_close(*({name: torch.stack([t[name] for t in each]) for name in each[0]} for each in found))


@DTYPES
@pytest.mark.parametrize("beta", (0.0, 1, -1.5, 4.0))
@pytest.mark.parametrize("learn", (True, False))
def test_options(beta, learn, dtype):
    graph = graph_named("with_self_loops")
    check(graph, features(graph, dtype), dtype, init_beta=beta, learn_beta=learn, allow_zero_in_degree=False)


@pytest.mark.parametrize("width", (2, 7, 16, 33, 128))
def test_widths(width):
    graph = graph_named("random")
    check(graph, features(graph, sizes=(width, width)))


@pytest.mark.parametrize("training", (True, False))
def test_train_and_eval(training):
    graph = graph_named("random")
    theirs, ours = (layer.train(training) for layer in layers())
    assert_close(run_fused(ours, graph, features(graph)), run(theirs, graph, features(graph)))


def test_zero_rows():
    graph = graph_named("random")
    feat = features(graph, torch.float64).detach()
    feat[::3] = 0
    theirs, ours = layers(torch.float64)
    have, want = run_fused(ours, graph, feat), run(theirs, graph, feat)
    for rows in (feat.any(dim=1), ~feat.any(dim=1)):  # a zero row's gradient is 1e12 times the others'
        assert_close(*({**found, "grad of feat[0]": found["grad of feat[0]"][rows]} for found in (have, want)))


@pytest.mark.parametrize("graph", ("random", "bipartite", "block"))
def test_features_of_any_strides(graph):
    graph = graph_named(graph)
    for view in (
        lambda x: x.detach().t().contiguous().t(),
        lambda x: torch.cat((x.detach(), x.detach()), 1)[:, : x.size(1)],
        lambda x: x.detach()[:1].expand_as(x),
    ):
        feat = features(graph, torch.float64)
        feat = tuple(map(view, feat)) if isinstance(feat, tuple) else view(feat)
        theirs, ours = layers(torch.float64)
        with torch.no_grad(), edgeless.backend("fused"):
            assert_close({"out": ours(graph, feat)}, {"out": theirs(graph, feat)})


@pytest.mark.parametrize("graph", ("random", "hub", "bipartite", "block"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_sixteen_bit_error_is_at_most_twice_the_stock_layers(graph, dtype):
    """DGL has no float16 on the CPU: there an eighth of the stock layer's error in bfloat16 stands for its own."""
    graph = graph_named(graph)
    squares = {}
    for seed in range(4):
        feat = features(graph, torch.bfloat16, seed=seed)

        def cast(to, feat=feat):
            return tuple(f.to(to) for f in feat) if isinstance(feat, tuple) else feat.to(to)

        theirs, ours = layers(torch.bfloat16)
        rough = run(theirs, graph, feat)
        truth = run(theirs.double(), graph, cast(torch.float64))
        found = run_fused(ours.to(dtype), graph, cast(dtype))
        for name, want in truth.items():
            assert found[name].dtype == dtype
            errors = [(found[name] - want).norm(), (rough[name] - want).norm(), want.norm()]
            squares[name] = squares.get(name, 0) + torch.stack(errors).square()
    factor = 2 if dtype == torch.bfloat16 else 2 / 8
    for name, sums in squares.items():
        ours, theirs, size = sums.sqrt().tolist()
        assert ours <= max(factor * theirs, torch.finfo(dtype).eps / 2 * size), f"{name}: {ours}, stock {theirs}"


@pytest.mark.parametrize("graph", ("bipartite_relation", "block", "self_loops"))
@pytest.mark.parametrize("pair", (True, False))
def test_gradcheck(graph, pair):
    graph = graph_named(graph)
    feat = features(graph, torch.float64, pair=pair or None, batch=(2,))
    feats = feat if isinstance(feat, tuple) else (feat,)
    _, ours = layers(torch.float64)

    def call(beta, *feats):
        given = feats if isinstance(feat, tuple) else feats[0]
        return torch.func.functional_call(ours, {"beta": beta}, (graph, given))

    with edgeless.backend("fused"):
        assert torch.autograd.gradcheck(call, (ours.beta, *feats))


def test_two_runs_are_equal_bit_by_bit():
    graph = graph_named("hub")
    _, ours = layers()
    found = [run_fused(ours, graph, features(graph)) for _ in range(2)]
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


# Refusals --------------------------------------------------------------------------------------------------------


def _cases():
    """(layer options, graph, feat, words of explain) of what runs the stock layer."""
    random, isolated, bipartite = graph_named("random"), graph_named("isolated"), graph_named("bipartite")
    pair = (torch.randn(20, 2, IN), torch.randn(11, 1, IN))
    yield {"allow_zero_in_degree": False}, isolated, features(isolated), "nodes without in-edges"
    yield {}, random, torch.randn(7, IN), "feat has 7 rows for 40 nodes"
    yield {}, random, torch.randn(40), "feat has shape [40]"
    yield {}, random, torch.ones(40, IN, dtype=torch.int64), "feat is torch.int64"
    yield {}, bipartite, torch.randn(20, IN), "graph has 20 source and 11 destination nodes"
    yield {}, bipartite, pair, "feat is a pair of [20, 2, 5] torch.float32 and [11, 1, 5] torch.float32, which differ"
    yield {}, bipartite, (torch.randn(20, IN), torch.randn(11, IN).double()), "torch.float64, which differ"
    yield {"dtype": torch.float64}, random, features(random), "beta is torch.float64 and feat is torch.float32"
    yield {}, hetero(), torch.randn(9, IN), "graph has 3 edge types"


@pytest.mark.parametrize("options,graph,feat,reason", list(_cases()), ids=lambda v: v if isinstance(v, str) else "")
def test_refused_input_meets_the_stock_layer(options, graph, feat, reason):
    theirs, ours = layers(**options)
    explanation = edgeless.explain(ours, graph, feat)
    assert not explanation and reason in str(explanation)
    with edgeless.backend("fused"), pytest.raises(edgeless.NotFusedError) as error:
        ours(graph, feat)
    assert str(error.value) == str(explanation)
    try:
        want = theirs(graph, feat)
    except Exception as error:
        with pytest.raises(type(error)):
            ours(graph, feat)
    else:
        assert_close({"out": ours(graph, feat)}, {"out": want})


def test_allowing_zero_in_degree_later():
    graph = graph_named("isolated")
    theirs, ours = layers(allow_zero_in_degree=False)
    with pytest.raises(dgl.DGLError, match="0-in-degree"):
        ours(graph, features(graph))
    for layer in (theirs, ours):
        layer.set_allow_zero_in_degree(True)
    assert_close(run_fused(ours, graph, features(graph)), run(theirs, graph, features(graph)))


def test_reference_backend_is_the_stock_forward(monkeypatch):
    graph = graph_named("random")
    theirs, ours = layers()
    monkeypatch.setattr(type(ours), "_fused_forward", None)
    with edgeless.backend("reference"):
        assert_close(run(ours, graph, features(graph)), run(theirs, graph, features(graph)))


# What users do to a layer ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", ({}, {"init_beta": 3.0}, {"learn_beta": False}), ids=str)
def test_is_the_stock_layer(options):
    theirs, ours = (module.AGNNConv(**options) for module in (stock, fused))
    assert isinstance(ours, stock.AGNNConv) and type(ours).__init__ is type(theirs).__init__
    assert inspect.signature(type(ours).forward) == inspect.signature(type(theirs).forward)
    assert repr(ours) == f"edgeless.{theirs}" and theirs.state_dict() == ours.state_dict()
    assert len(list(theirs.parameters())) == len(list(ours.parameters()))
    theirs.load_state_dict(ours.state_dict()), ours.load_state_dict(theirs.state_dict())


@pytest.mark.parametrize("clone", (copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))))
def test_copies_are_fused(clone):
    graph = graph_named("random")
    _, ours = layers()
    ours(graph, features(graph))
    other = clone(ours)
    assert type(other) is type(ours)
    assert_close(run_fused(other, graph, features(graph)), run_fused(ours, graph, features(graph)))


def test_accelerate():
    graph = dgl.add_self_loop(graph_named("random"))
    model = torch.nn.ModuleList([stock.AGNNConv(1.5)])
    want = run(model[0], graph, features(graph))
    report = edgeless.accelerate(model)
    assert [new for _, _, new in report.swapped] == [fused.AGNNConv] and report.kept == []
    assert_close(run_fused(model[0], graph, features(graph)), want)


@pytest.mark.parametrize("block", (False, True))
def test_hetero_graph_conv(block):
    graph = hetero()
    if block:
        seeds = {"user": torch.tensor([1, 2, 5]), "game": torch.tensor([0, 4])}
        graph = dgl.to_block(dgl.in_subgraph(graph, seeds), seeds)
    feats = {n: torch.randn(graph.num_src_nodes(n), IN) for n in ("user", "game")}
    found = []
    for module in (stock, fused):
        leaves = {k: v.clone().requires_grad_() for k, v in feats.items()}
        convs = {e: module.AGNNConv(i + 1.0) for i, e in enumerate(("follows", "plays", "likes"))}
        with edgeless.backend("fused"):
            out = stock.HeteroGraphConv(convs, aggregate="sum")(graph, leaves)
        grads = torch.autograd.grad(sum((o * o).sum() for o in out.values()), leaves.values())
        found.append({**out, **{f"grad of {name}": grad for name, grad in zip(leaves, grads, strict=True)}})
    assert_close(found[1], found[0])


@pytest.mark.parametrize("form", ("handle", "graph"))
def test_compiled(form):
    graph = graph_named("random")
    theirs, ours = layers()
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=form == "handle")
    with edgeless.backend("fused"):
        found = run(compiled, to_graph(graph) if form == "handle" else graph, features(graph))
    found = {name.replace("_orig_mod.", ""): tensor for name, tensor in found.items()}
    assert_close(found, run(theirs, graph, features(graph)))
    torch._dynamo.reset()


def test_nothing_of_the_size_of_the_edges_is_allocated():
    graph = dgl.graph(tuple(torch.randint(50, (2, 20_000))), num_nodes=50)
    theirs, ours = layers()

    def largest(layer):
        layer(graph, features(graph)).sum().backward()  # builds the graph's handle
        with torch.profiler.profile(profile_memory=True) as profile:
            layer(graph, features(graph)).sum().backward()
        return max(event.cpu_memory_usage for event in profile.events())

    with edgeless.backend("fused"):
        mine = largest(ours)
    assert mine < graph.num_edges() * 4 <= largest(theirs)
