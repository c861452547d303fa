"""Layers of small graphs are one node of autograd on CUDA, and give what their parts give."""

import pytest
import torch

import edgeless.pyg.nn as fused
from edgeless.pyg import conv, neighbors

pytestmark = pytest.mark.cuda
NODES, FEATURES = 600, 24
MAKE = {
    "gat": lambda **o: fused.GATConv(FEATURES, 8, heads=3, **o),
    "gatv2": lambda **o: fused.GATv2Conv(FEATURES, 8, heads=3, **o),
    "transformer": lambda **o: fused.TransformerConv(FEATURES, 8, heads=3, **o),
    "graphconv": lambda **o: fused.GraphConv(FEATURES, 16, **o),
    "sage": lambda **o: fused.SAGEConv(FEATURES, 16, **o),
}
WHOLE = [
    ("gat", {}),
    ("gat", {"bias": False}),
    ("gat", {"add_self_loops": False, "dropout": 0.5}),
    ("gatv2", {}),
    ("gatv2", {"bias": False, "share_weights": True}),
    ("transformer", {}),
    ("transformer", {"root_weight": False}),
    ("transformer", {"bias": False, "dropout": 0.5}),
    ("graphconv", {}),
    ("graphconv", {"aggr": "mean", "bias": False}),
    ("sage", {}),
    ("sage", {"aggr": "sum"}),
]
IN_PARTS = [
    ("gat", {"concat": False}),
    ("gat", {"residual": True}),
    ("gat", {"edge_dim": 4}),
    ("gatv2", {"concat": False}),
    ("transformer", {"beta": True}),
    ("transformer", {"concat": False}),
    ("graphconv", {"aggr": "max"}),
    ("sage", {"root_weight": False}),
]


def whole(out):
    node = out.grad_fn.name()
    return "AttentionLayer" in node or "SumLayer" in node


def make(name, options, dtype=torch.float32, nodes=NODES):
    torch.manual_seed(0)
    layer = MAKE[name](**options).to("cuda", dtype)
    x = torch.randn(nodes, FEATURES, device="cuda", dtype=dtype, requires_grad=True)
    return layer, x, torch.randint(0, nodes, (2, 4000), device="cuda")


def run(layer, x, edge_index, autocast):
    torch.manual_seed(1)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        out = layer(x, edge_index)
    inputs = [x, *layer.parameters()]  # a TransformerConv has lin_skip even where it does not use it
    grads = torch.autograd.grad(out, inputs, torch.cos(out.detach()), allow_unused=True)
    return [out, *(grad for grad in grads if grad is not None)]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name,options", WHOLE)
def test_equals_its_parts(name, options, dtype, autocast, monkeypatch):
    if autocast and dtype == torch.float64:
        pytest.skip("autocast leaves float64 alone")
    layer, *inputs = make(name, options, dtype)
    found = run(layer, *inputs, autocast)
    assert whole(found[0])
    for module, function in ((conv, "attention_layer"), (neighbors, "sum_layer")):
        monkeypatch.setattr(module, function, lambda *_, **__: None)
    expected = run(layer, *inputs, autocast)
    assert not whole(expected[0])
    tolerance = 2**-7 if autocast else 1e-5 if dtype == torch.float32 else 1e-12
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and a.is_contiguous()
        assert (a.double() - b.double()).norm() <= tolerance * b.double().norm() + 1e-12


@pytest.mark.parametrize("name,options", IN_PARTS)
def test_other_layers_are_called_in_parts(name, options):
    layer, x, edge_index = make(name, options)
    inputs = (x, edge_index, torch.randn(4000, 4, device="cuda")) if "edge_dim" in options else (x, edge_index)
    assert not whole(layer(*inputs))


@pytest.mark.parametrize("name", ["gat", "graphconv"])
def test_large_graphs_and_hooked_maps_are_called_in_parts(name):
    assert not whole(torch.nn.Module.__call__(*make(name, {}, nodes=1 << 15)))
    layer, x, edge_index = make(name, {})
    linear = layer.lin if name == "gat" else layer.lin_rel
    called = []
    linear.register_forward_hook(lambda *_: called.append(1))
    assert not whole(layer(x, edge_index)) and called


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", ["gatv2", "transformer"])
def test_gradients_of_a_large_graph_take_the_place_of_its_rows(name, autocast):
    """Of rows of 256 floats on either side of a layer, the backward gives back about as much as it takes.

    Under autocast the input's gradient stands there in both dtypes.
    """
    nodes, width = 1 << 16, 256
    kind = {"gatv2": fused.GATv2Conv, "transformer": fused.TransformerConv}[name]
    torch.manual_seed(0)
    layer = kind(width, width // 2, heads=2).cuda()
    x = torch.randn(nodes, width, device="cuda", requires_grad=True)
    edge_index = torch.randint(0, nodes, (2, 4 * nodes), device="cuda")
    grad = torch.randn(nodes, width, device="cuda")

    def taken(retain):
        """In units of such rows; the gradients."""
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            out = layer(x, edge_index)
        assert whole(out)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        grads = torch.autograd.grad(out, [x, *layer.parameters()], grad, retain_graph=retain)
        return (torch.cuda.max_memory_allocated() - before) / x.nbytes, grads

    taken(False)  # the graph and its transpose are kept
    (over, found), (elsewhere, expected) = taken(False), taken(True)
    assert over < (1.1 if autocast else 0.2) and elsewhere > 2.4
    names = ["x", *(name for name, _ in layer.named_parameters())]
    for name, a, b in zip(names, found, expected, strict=True):
        if name != "lin_key.bias":  # no softmax sees it: its gradient is made of rounding errors
            assert (a - b).norm() <= (2**-7 if autocast else 1e-5) * b.norm(), name


@pytest.mark.parametrize("name", ["gatv2", "transformer"])
def test_large_graphs_under_hooks_of_saved_tensors_are_called_in_parts(name):
    """As checkpoints are: what a hook has seen is not written over, and the parts take less memory then."""
    layer, x, edge_index = make(name, {}, nodes=1 << 15)
    assert whole(layer(x, edge_index))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        assert not whole(layer(x, edge_index))


def test_a_weight_with_a_gradient_is_called_in_parts():
    layer, x, edge_index = make("graphconv", {})
    weight = torch.rand(4000, device="cuda")
    assert whole(layer(x, edge_index, weight))
    out = layer(x, edge_index, weight.requires_grad_())
    assert not whole(out)
    assert torch.autograd.grad(out.sum(), weight)[0].abs().sum() > 0


def test_gradients_of_a_transformer_take_one_product_each():
    """The gradient of the skip connection stands beside the others: nothing is joined by a copy of all."""
    layer, *inputs = make("transformer", {})
    run(layer, *inputs, False)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        run(layer, *inputs, False)
        torch.cuda.synchronize()
    names = [e.name for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert not any("CatArray" in name for name in names), names


@pytest.mark.parametrize("name", ["gatv2", "graphconv"])
def test_twenty_runs_are_equal(name):
    layer, *inputs = make(name, {})
    first = run(layer, *inputs, False)
    for _ in range(19):
        assert all(torch.equal(a, b) for a, b in zip(run(layer, *inputs, False), first, strict=True))


@pytest.mark.parametrize("name", ["gat", "transformer", "sage"])
def test_is_captured_by_a_graph(name):
    layer, x, edge_index = make(name, {})
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(6):  # longer than it takes to ask for the longest rows
            expected = run(layer, x, edge_index, False)
            torch.cuda.synchronize()
        capture = torch.cuda.CUDAGraph()
        with torch.cuda.graph(capture, stream=stream):
            out = layer(x, edge_index)
            grads = torch.autograd.grad(out, [x, *layer.parameters()], torch.cos(out.detach()))
    capture.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip([out, *grads], expected, strict=True))
