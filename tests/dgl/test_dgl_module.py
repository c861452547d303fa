"""What a user's code does to a layer besides calling it."""

from __future__ import annotations

import copy
import inspect
import io
import pickle

import dgl
import dgl.nn as stock
import pytest
import torch
from dgl_cases import (
    IN,
    LAYERS,
    assert_close,
    features,
    graph_named,
    hetero,
    layer_pair,
    options_for,
    run,
    run_fused,
)
from torch import nn

import edgeless
import edgeless.dgl.nn as fused
from edgeless.dgl import to_graph

EVERY_LAYER = pytest.mark.parametrize("layer", LAYERS)


class Model(nn.Module):
    """Two stock layers, one twice in the tree, something that is no graph layer, and one that edgeless has not."""

    def __init__(self):
        super().__init__()
        self.first = stock.GATv2Conv(IN, 4, 2, residual=True)
        self.layers = nn.ModuleList([stock.GATConv(8, 4, 2), stock.DotGatConv(8, 3, 1), stock.TAGConv(3, 3)])
        self.again = self.first
        self.norm = nn.LayerNorm(3)

    def forward(self, graph, x):
        x = self.first(graph, x).flatten(1).relu()
        x = self.layers[0](graph, x).flatten(1).relu()
        return self.norm(self.layers[2](graph, self.layers[1](graph, x).flatten(1)))


@EVERY_LAYER
def test_is_the_stock_layer_with_its_signature(layer):
    ours, theirs = getattr(fused, layer), getattr(stock, layer)
    assert issubclass(ours, theirs) and ours.__name__ == theirs.__name__
    assert ours.__init__ is theirs.__init__
    assert inspect.signature(ours.forward) == inspect.signature(theirs.forward)


@pytest.mark.parametrize(
    "layer, in_feats, options",
    [
        ("GATv2Conv", IN, {}),
        ("GATv2Conv", (IN, 3), {"residual": True}),
        ("GATv2Conv", IN, {"share_weights": True, "bias": False}),
        ("GATConv", IN, {"residual": True}),
        ("GATConv", (IN, 3), {"bias": False}),
        ("DotGatConv", IN, {}),
        ("DotGatConv", (IN, 3), {}),
    ],
)
def test_seeded_initialisation_and_repr_are_the_stock_layers(layer, in_feats, options):
    modules = []
    for module in (stock, fused):
        torch.manual_seed(4)
        modules.append(getattr(module, layer)(in_feats, 4, 2, **options))
    states = [m.state_dict() for m in modules]
    assert list(states[0]) == list(states[1])
    assert all(torch.equal(a, b) for a, b in zip(*(s.values() for s in states), strict=True))
    assert f"edgeless.{modules[0]}" == repr(modules[1])
    if hasattr(modules[0], "reset_parameters"):
        for m in modules:
            torch.manual_seed(9)
            m.reset_parameters()
        assert all(torch.equal(a, b) for a, b in zip(modules[0].parameters(), modules[1].parameters(), strict=True))


@EVERY_LAYER
def test_state_dicts_load_both_ways(layer):
    theirs, ours = layer_pair(layer)
    for source, target in ((theirs, ours), (ours, theirs)):
        with torch.no_grad():
            for p in source.parameters():
                p.add_(1)
        assert str(target.load_state_dict(source.state_dict())) == "<All keys matched successfully>"
        assert all(torch.equal(a, b) for a, b in zip(source.parameters(), target.parameters(), strict=True))


@EVERY_LAYER
@pytest.mark.parametrize("how", ("deepcopy", "pickle", "save"))
def test_copies_give_the_same_and_are_fused(layer, how):
    graph = graph_named("random")
    _, ours = layer_pair(layer, **options_for(layer, residual=True, activation=torch.tanh))
    feat = features(graph)
    ours(graph, feat)  # a layer that has been used copies as well as a new one
    if how == "deepcopy":
        other = copy.deepcopy(ours)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(ours))
    else:
        file = io.BytesIO()
        torch.save(ours, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert type(other) is type(ours)
    assert_close(run_fused(other, graph, feat), run_fused(ours, graph, feat))


@EVERY_LAYER
def test_hooks_and_subclasses_of_the_user(layer):
    graph = graph_named("random")
    theirs, ours = layer_pair(layer)

    class Mine(getattr(fused, layer)):
        def forward(self, graph, feat, *args, **kwargs):
            return 2 * super().forward(graph, feat, *args, **kwargs)

    ours.__class__ = Mine
    calls = []
    ours.register_forward_hook(lambda module, args, out: calls.append(out.shape))
    feat = features(graph)
    with edgeless.backend("fused"):
        out = ours(graph, feat)
    assert_close({"out": out}, {"out": 2 * theirs(graph, feat)})
    assert calls == [out.shape]


@pytest.mark.parametrize("layer", ("GATv2Conv", "GATConv"))
def test_normalised_and_parametrised_weights(layer):
    graph = graph_named("random")
    feat = features(graph)
    for module in layer_pair(layer):
        torch.manual_seed(2)
        nn.utils.parametrizations.weight_norm(module.fc_src if layer == "GATv2Conv" else module.fc)
        name = "attn" if layer == "GATv2Conv" else "attn_l"
        nn.utils.parametrize.register_parametrization(module, name, nn.Tanh())
        out = module(graph, feat)
        want = out if module.__class__.__mro__[1] is getattr(stock, layer) else want  # noqa: F821
    assert edgeless.explain(module, graph, feat)
    assert_close({"out": out}, {"out": want})


@EVERY_LAYER
def test_nothing_of_the_size_of_the_edges_is_allocated(layer):
    """With 400 edges a node, the largest allocation of a forward and backward pass has no room for [E, H] floats."""
    graph = dgl.graph(tuple(torch.randint(50, (2, 20_000))), num_nodes=50)
    theirs, ours = layer_pair(layer, **options_for(layer, attn_drop=0.5))
    feat = features(graph)
    with edgeless.backend("fused"):
        ours(graph, feat).sum().backward()  # builds the graph's handle
        largest = _largest_allocation(lambda: ours(graph, feat).sum().backward())
    limit = graph.num_edges() * 3 * 4
    assert largest < limit <= _largest_allocation(lambda: theirs(graph, feat).sum().backward())


def _largest_allocation(call):
    with torch.profiler.profile(profile_memory=True) as profile:
        call()
    return max(event.cpu_memory_usage for event in profile.events())


# Heterographs ----------------------------------------------------------------------------------------------------


def hetero_convs(layer, **options):
    """(stock, fused) HeteroGraphConv with a layer for every relation of ``hetero()``."""
    convs = []
    for module in (stock, fused):
        torch.manual_seed(6)
        layers = {e: getattr(module, layer)((IN, IN), 4, 2, **options) for e in ("follows", "plays", "likes")}
        if layer == "DotGatConv":  # no set_allow_zero_in_degree in DGL, so HeteroGraphConv cannot ask for it
            for each in layers.values():
                each._allow_zero_in_degree = True
        convs.append(stock.HeteroGraphConv(layers, aggregate="sum"))
    return convs


def run_hetero(conv, graph, feats, call=None):
    leaves = {k: v.clone().requires_grad_() for k, v in feats.items()}
    out = conv(graph, leaves)
    loss = sum((o * o).sum() for o in out.values())
    named = {**leaves, **dict(conv.named_parameters())}
    grads = torch.autograd.grad(loss, named.values(), allow_unused=True)
    return {**out, **{f"grad of {name}": grad for name, grad in zip(named, grads, strict=True)}}


@EVERY_LAYER
@pytest.mark.parametrize("block", (False, True))
def test_hetero_graph_conv(layer, block):
    graph = hetero()
    if block:
        seeds = {"user": torch.tensor([1, 2, 5]), "game": torch.tensor([0, 4])}
        graph = dgl.to_block(dgl.in_subgraph(graph, seeds), seeds)
    feats = {n: torch.randn(graph.num_src_nodes(n), IN) for n in ("user", "game")}
    theirs, ours = hetero_convs(layer)
    want = run_hetero(theirs, graph, feats)
    with edgeless.backend("fused"):
        assert_close(run_hetero(ours, graph, feats), want)


def test_a_container_of_relations_is_accelerated_and_explained():
    graph = hetero()
    feats = {n: torch.randn(graph.num_nodes(n), IN) for n in ("user", "game")}
    theirs, _ = hetero_convs("GATConv")
    ours = copy.deepcopy(theirs)
    swapped = [name for name, _, _ in edgeless.accelerate(ours).swapped]
    assert swapped == ["", "mods.follows", "mods.plays", "mods.likes"]  # the container itself first
    with edgeless.backend("fused"):
        assert_close(run_hetero(ours, graph, feats), run_hetero(theirs, graph, feats))
    assert edgeless.explain(ours, graph, feats)
    sources = (feats["user"], feats["game"])
    assert edgeless.explain(ours.mods["plays"], graph["plays"], sources)


@EVERY_LAYER
def test_allowing_zero_in_degree_later(layer):
    graph, theirs, ours = graph_named("isolated"), *layer_pair(layer, allow_zero_in_degree=False)
    assert hasattr(ours, "set_allow_zero_in_degree") == hasattr(theirs, "set_allow_zero_in_degree")
    feat = features(graph)
    with pytest.raises(dgl.DGLError):
        ours(graph, feat)
    if layer != "DotGatConv":
        ours.set_allow_zero_in_degree(True)
        theirs.set_allow_zero_in_degree(True)
        assert_close(run_fused(ours, graph, feat), run(theirs, graph, feat))


# accelerate ------------------------------------------------------------------------------------------------------


def test_accelerate_swaps_what_it_can_and_says_so():
    graph = dgl.add_self_loop(graph_named("random"))
    torch.manual_seed(3)
    model = Model().double()
    x = torch.randn(graph.num_nodes(), IN, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters = list(model.parameters())
    want = run(copy.deepcopy(model), graph, x)

    report = edgeless.accelerate(model)
    assert [(name, new) for name, _, new in report.swapped] == [
        ("first", fused.GATv2Conv),
        ("layers.0", fused.GATConv),
        ("layers.1", fused.DotGatConv),
        ("layers.2", fused.TAGConv),
    ]
    assert report.generated == ["layers.2"] and report.kept == []
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert_close(run(model, graph, x), want)

    before = [p.detach().clone() for p in model.first.parameters()]
    model(graph, x).square().sum().backward()
    optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, model.first.parameters(), strict=True))
    assert edgeless.accelerate(model).swapped == []


def test_accelerate_generates_subclasses_unless_it_must_not(monkeypatch):
    class Mine(stock.GATConv):
        def forward(self, graph, feat):
            return -super().forward(graph, feat)

    monkeypatch.setenv("EDGELESS_GENERATE", "off")
    model, graph = nn.Sequential(Mine(IN, 4, 2)), dgl.add_self_loop(graph_named("random"))
    report = edgeless.accelerate(model)
    assert report.swapped == [] and report.kept[0][1] is Mine
    monkeypatch.setenv("EDGELESS_GENERATE", "on")
    want = run(copy.deepcopy(model[0]), graph, features(graph))
    assert edgeless.accelerate(model).generated == ["0"] and isinstance(model[0], Mine)
    assert_close(run(model[0], graph, features(graph)), want)


# torch.compile ---------------------------------------------------------------------------------------------------


def graph_breaks(module, graph, feat):
    """Compiles and runs ``module`` forward and backward; returns its results and how often the trace broke."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    found = run(torch.compile(module, backend="aot_eager"), graph, feat, get_attention=True)
    return found, sum(torch._dynamo.utils.counters["graph_break"].values())


@EVERY_LAYER
def test_compiled_layer_gives_the_same(layer):
    graph = graph_named("random")
    feat = features(graph)
    theirs, ours = layer_pair(layer)
    found, _ = graph_breaks(ours, graph, feat)
    assert_close(_plain_names(found), run(theirs, graph, feat, get_attention=True))


def test_compiled_stock_layer_breaks_more_often():
    graph = graph_named("random")
    theirs, ours = layer_pair("GATConv")
    assert graph_breaks(ours, graph, features(graph))[1] < graph_breaks(theirs, graph, features(graph))[1]


@EVERY_LAYER
def test_compiled_layer_is_traced_anew_only_once_for_new_sizes(layer):
    """The second size makes the trace dynamic, and that serves all others, as sampled blocks need it."""
    _, ours = layer_pair(layer)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(ours, backend="aot_eager")
    traces = []
    for size in (40, 50, 61, 77, 90):
        graph = dgl.rand_graph(size, 5 * size + 3)
        compiled(graph, features(graph)).sum().backward()
        traces.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    torch._dynamo.reset()
    assert traces[1:] == [traces[1]] * 4


@EVERY_LAYER
def test_compiled_with_an_explicit_graph_in_one_piece(layer):
    graph = graph_named("random")
    feat = features(graph)
    theirs, ours = layer_pair(layer)
    handle = to_graph(graph)
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    assert_close(_plain_names(run(compiled, handle, feat)), run(theirs, graph, feat))


def _plain_names(found):
    return {name.replace("_orig_mod.", ""): tensor for name, tensor in found.items()}
