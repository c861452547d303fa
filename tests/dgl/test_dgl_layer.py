"""Layers of small graphs are one node of autograd on CUDA, as PyG's are, and give what their parts give.

The op of a layer runs on the CPU as well, where layers ask for it only to sum few rows: here the tests do.
"""

import pytest
import torch
from devices import DEVICES
from dgl_cases import GRAPHS, TOLERANCE, assert_close, graph_named
from torch.utils.checkpoint import checkpoint

import edgeless
import edgeless.dgl.nn as fused
import edgeless.functional.layer
from edgeless.dgl import to_graph
from edgeless.dgl.nn import _layer, sageconv

FEATURES, CHANNELS, HEADS = 8, 4, 3
ALLOWED = {"allow_zero_in_degree": True}
WHOLE = {
    "GATConv": {},
    "GATConv-plain": {"bias": False},
    "GATConv-options": {"negative_slope": 0.5, "feat_drop": 0.3, "attn_drop": 0.4},
    "GATv2Conv": {},
    "GATv2Conv-plain": {"bias": False},
    "GATv2Conv-shared": {"share_weights": True},
    "GATv2Conv-options": {"negative_slope": 0.5, "feat_drop": 0.3, "attn_drop": 0.4},
    "DotGatConv": {},
    "SAGEConv": {},
    "SAGEConv-plain": {"bias": False},
}
# Each with what its forward is given beside graph and features.
IN_PARTS = {
    "GATConv-residual": ({"residual": True}, {}),
    "GATConv-attention": ({}, {"get_attention": True}),
    "GATConv-weight": ({}, {"edge_weight": 1}),
    "GATv2Conv-residual": ({"residual": True}, {}),
    "GATv2Conv-attention": ({}, {"get_attention": True}),
    "DotGatConv-attention": ({}, {"get_attention": True}),
    "SAGEConv-gcn": ({"aggregator_type": "gcn"}, {}),
    "SAGEConv-pool": ({"aggregator_type": "pool"}, {}),
    "SAGEConv-narrow": ({"out_feats": 2}, {}),
    "SAGEConv-weight": ({}, {"edge_weight": 1}),
}
SQUARE = ("zero_nodes", "no_edges", "isolated", "hub", "multi_edges", "self_loops", "random", "relation", "batched")


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    """A device on which a layer may be one op."""
    if request.param == "cpu":

        def is_one_op(graph, x, writes_over=False):
            return x.size(0) == graph.num_src == graph.num_dst

        def fits(x, weights, others):
            given = [t for t in (*weights, *others) if t is not None]
            return x.dim() == 2 and all(t.dtype == x.dtype for t in given)

        monkeypatch.setattr(edgeless.functional.layer, "_is_one_op", is_one_op)
        monkeypatch.setattr(edgeless.functional.layer, "fits", fits)
    return request.param


@pytest.fixture
def by_parts(monkeypatch):
    """A function behind whose call every layer is called in parts."""

    def forbid():
        for module, function in ((_layer, "attention_layer"), (sageconv, "sum_layer")):
            monkeypatch.setattr(module, function, lambda *_, **__: None)

    return forbid


def make(name, options, device="cpu", dtype=torch.float64):
    """A layer whose parameters are all random."""
    kind = name.partition("-")[0]
    torch.manual_seed(0)
    if kind == "SAGEConv":
        layer = fused.SAGEConv(**{"in_feats": FEATURES, "out_feats": 16, "aggregator_type": "mean", **options})
    else:
        layer = getattr(fused, kind)(FEATURES, CHANNELS, HEADS, **ALLOWED, **options)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return layer.to(device, dtype)


def features(rows, device="cpu", dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, FEATURES, generator=generator, dtype=torch.float64)
    return x.to(device, dtype).requires_grad_()


def handle(name, device="cpu"):
    return to_graph(graph_named(name)).to(device)


def is_whole(out):
    return "AttentionLayer" in out.grad_fn.name() or "SumLayer" in out.grad_fn.name()


def run(layer, graph, x, call=None, **given):
    """Output and gradients, from the same random state."""
    torch.manual_seed(2)
    out = (call or layer)(graph, x, **given)
    grads = torch.autograd.grad(out, [x, *layer.parameters()], torch.cos(out.detach()))
    return {"out": out, **{f"grad {i}": grad for i, grad in enumerate(grads)}}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("graph", SQUARE)
@pytest.mark.parametrize("name", WHOLE)
def test_is_one_node_and_equals_its_parts(name, graph, dtype, device, by_parts):
    graph, layer = handle(graph, device), make(name, WHOLE[name], device, dtype)
    x = features(graph.num_src, device, dtype)
    found = run(layer, graph, x)
    assert is_whole(found["out"])
    node = found["out"].grad_fn
    if not (layer.feat_drop.p if hasattr(layer, "feat_drop") else 0.0):
        assert {f.name() for f, _ in node.next_functions if f} == {"torch::autograd::AccumulateGrad"}
    by_parts()
    want = run(layer, graph, x)
    assert not is_whole(want["out"])
    assert_close(found, want)


@pytest.mark.parametrize("name", WHOLE)
def test_a_graph_of_dgl_is_one_node(name, device):
    if device != "cpu":
        pytest.skip("DGL's own graphs are on the CPU")
    assert is_whole(make(name, WHOLE[name])(GRAPHS["random"](), features(40)))


@pytest.mark.parametrize("name", ["GATConv", "GATv2Conv", "SAGEConv"])
def test_the_activation_stands_behind_the_node(name, device, by_parts):
    layer, graph, x = make(name, {"activation": torch.tanh}, device), handle("random", device), features(40, device)
    found = run(layer, graph, x)
    assert found["out"].grad_fn.name() == "TanhBackward0"
    by_parts()
    assert_close(found, run(layer, graph, x))


def test_a_weight_of_the_edges_belongs_to_the_node(device, by_parts):
    layer, graph, x = make("SAGEConv", {}, device), handle("random", device), features(40, device)
    weight = torch.rand(graph.num_edges, 1, device=device, dtype=x.dtype)
    found = run(layer, graph, x, edge_weight=weight)
    assert is_whole(found["out"])
    by_parts()
    assert_close(found, run(layer, graph, x, edge_weight=weight))


def test_a_pair_for_one_set_of_nodes_is_one_node(device, by_parts):
    """DotGatConv then projects the second of them alone."""
    if device != "cpu":
        pytest.skip("DGL's own graphs are on the CPU")
    layer = fused.DotGatConv((FEATURES, FEATURES), CHANNELS, HEADS, **ALLOWED).double()
    graph, feat = GRAPHS["random"](), (features(40), features(40))
    results = []
    for _ in range(2):
        out = layer(graph, feat)
        grads = torch.autograd.grad(out.sin().sum(), [feat[1], layer.fc_dst.weight])
        results.append({"out": out, "grad of feat": grads[0], "grad of weight": grads[1]})
        by_parts()
    assert is_whole(results[0]["out"]) and not is_whole(results[1]["out"])
    assert_close(*results)


@pytest.mark.parametrize("name", IN_PARTS)
def test_other_calls_are_made_in_parts(name, device):
    options, given = IN_PARTS[name]
    layer, graph, x = make(name, options, device), handle("random", device), features(40, device)
    if "edge_weight" in given:
        given = {"edge_weight": torch.rand(graph.num_edges, device=device, dtype=x.dtype, requires_grad=True)}
    found = layer(graph, x, **given)
    assert not is_whole(found[0] if isinstance(found, tuple) else found)


@pytest.mark.parametrize("name", ["GATConv", "GATv2Conv", "DotGatConv", "SAGEConv"])
def test_blocks_and_hooked_maps_are_called_in_parts(name, device):
    layer = make(name, {}, device)
    if device == "cpu":
        block = graph_named("block")
        assert not is_whole(layer(block, features(block.num_src_nodes())))
    linear = next(module for module in layer.modules() if type(module) is torch.nn.Linear)
    called = []
    linear.register_forward_hook(lambda *_: called.append(1))
    assert not is_whole(layer(handle("random", device), features(40, device))) and called


@pytest.mark.parametrize("name", WHOLE)
def test_a_write_over_the_result_trains(name, device, by_parts):
    layer, graph, x = make(name, WHOLE[name], device), handle("random", device), features(40, device)

    def written(graph, x):
        out = layer(graph, x)
        assert is_whole(out)
        out[0] = 0
        return out.relu_()

    found = run(layer, graph, x, written)
    by_parts()
    assert_close(found, run(layer, graph, x, lambda *given: layer(*given).index_fill(0, _first(x), 0).relu()))


def _first(x):
    return torch.zeros(1, dtype=torch.int64, device=x.device)


@pytest.mark.parametrize("name", WHOLE)
def test_a_backward_may_be_run_again(name, device):
    layer, graph, x = make(name, WHOLE[name], device), handle("random", device), features(40, device)
    out = layer(graph, x)
    inputs = [x, *layer.parameters()]
    first, second, last = (
        torch.autograd.grad(out, inputs, torch.cos(out.detach()), retain_graph=retain) for retain in (True, True, False)
    )
    for a, b, c in zip(first, second, last, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(c, a, rtol=1e-10, atol=1e-12)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, inputs, torch.cos(out.detach()))


@pytest.mark.parametrize("name", WHOLE)
def test_second_derivatives_are_those_of_the_parts(name, device, by_parts):
    layer, graph, x = make(name, WHOLE[name], device).eval(), handle("random", device), features(40, device)
    inputs = [x, *layer.parameters()]

    def of_the_gradients():
        first = torch.autograd.grad(layer(graph, x).square().sum(), inputs, create_graph=True)
        second = torch.autograd.grad(sum(grad.square().sum() for grad in first), inputs)
        return {f"grad {i}": grad for i, grad in enumerate(second)}

    found = of_the_gradients()
    by_parts()
    assert_close(found, of_the_gradients())


@pytest.mark.parametrize("name", WHOLE)
def test_under_hooks_of_saved_tensors_and_checkpoints(name, device):
    layer, graph, x = make(name, WHOLE[name], device), handle("random", device), features(40, device)
    want = run(layer, graph, x)
    seen = []

    def pack(t):
        seen.append(t)
        return t.cpu().clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t.to(device)):
        found = run(layer, graph, x)
    assert is_whole(found["out"]) and seen
    assert_close(found, want)
    found = run(layer, graph, x, lambda *given: checkpoint(layer, *given, use_reentrant=False))
    assert_close(found, want)


@pytest.mark.parametrize("name", ["GATConv", "GATv2Conv", "SAGEConv"])
def test_without_gradients(name, device):
    layer, graph, x = make(name, {}, device), handle("random", device), features(40, device)
    want = layer(graph, x)
    with torch.no_grad():
        assert torch.equal(layer(graph, x), want)
    with torch.inference_mode():
        assert torch.equal(layer(graph, x), want)


@pytest.mark.parametrize("name", WHOLE)
def test_the_dtype_under_autocast(name, device, monkeypatch):
    """That of the rounded rows, as of DGL's kernels; only GATConv adds its bias in float32 behind them."""
    monkeypatch.setattr(edgeless.functional.layer, "rounds", lambda xs: True)
    monkeypatch.setattr(edgeless.functional.layer, "cuda_autocast_dtype", lambda: torch.bfloat16)
    layer, graph = make(name, WHOLE[name], device, torch.float32), handle("random", device)
    found = run(layer, graph, features(40, device, torch.float32))
    assert is_whole(found["out"])
    adds_bias = name.startswith("GATConv") and layer.bias is not None
    assert found.pop("out").dtype == (torch.float32 if adds_bias else torch.bfloat16)
    assert all(grad.dtype == torch.float32 for grad in found.values())


@pytest.mark.cuda
@pytest.mark.parametrize("name", WHOLE)
def test_autocast_rounds_as_in_parts(name, by_parts):
    """At most twice the error of the parts, against the same call in float32."""
    layer, graph = make(name, WHOLE[name], "cuda", torch.float32), handle("random", "cuda")
    x = features(40, "cuda", torch.float32)

    def rounded(*given):
        with torch.autocast("cuda", torch.bfloat16):
            return layer(*given)

    found = run(layer, graph, x, rounded)
    assert is_whole(found["out"])
    by_parts()
    parts, exact = run(layer, graph, x, rounded), run(layer, graph, x)
    for name, right in exact.items():
        assert found[name].dtype == parts[name].dtype, name
        mine, theirs = (((side[name] - right).norm() / right.norm()).item() for side in (found, parts))
        assert mine <= max(2 * theirs, torch.finfo(torch.bfloat16).eps), (name, mine, theirs)


def large(name, options):
    nodes = 1 << 16
    torch.manual_seed(0)
    layer = getattr(fused, name)(256, 128, 2, **ALLOWED, **options).cuda()
    x = torch.randn(nodes, 256, device="cuda", requires_grad=True)
    return (
        layer,
        edgeless.Graph.from_edge_index(torch.randint(0, nodes, (2, 4 * nodes), device="cuda"), nodes, nodes),
        x,
    )


@pytest.mark.cuda
def test_gradients_of_a_large_graph_take_the_place_of_its_rows(by_parts):
    """In units of the layer's input: beside that gradient stands that of the destinations' rows, since the memory of
    the result is the user's.
    """
    layer, graph, x = large("GATv2Conv", {})
    grad = torch.randn(len(x), 2, 128, device="cuda")

    def taken():
        out = layer(graph, x)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        grads = torch.autograd.grad(out, [x, *layer.parameters()], grad)
        return (torch.cuda.max_memory_allocated() - before) / x.nbytes, is_whole(out), grads

    taken()  # the graph and its transpose are kept
    over, whole, found = taken()
    by_parts()
    elsewhere, in_parts, want = taken()
    assert whole and not in_parts
    assert over < 1.2 and elsewhere > 1.9
    for a, b in zip(found, want, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()


@pytest.mark.cuda
@pytest.mark.parametrize("name,options", [("GATConv", {}), ("GATv2Conv", {"share_weights": True}), ("DotGatConv", {})])
def test_large_graphs_whose_rows_are_read_to_the_end_are_called_in_parts(name, options):
    layer, graph, x = large(name, options)
    assert not is_whole(layer(graph, x))
