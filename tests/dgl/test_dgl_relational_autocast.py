"""Layers over relations of DGL under autocast: the dtypes of the stock layers, and at most twice their errors."""

import copy
import re

import dgl
import dgl.nn as stock
import pytest
import torch
from dgl_cases import random_graph

import edgeless
import edgeless.dgl.nn as fused
from edgeless.dgl import ops

IN, OUT, R, NODE_TYPES = 12, 16, 5, 3
DEVICES = [("cpu", torch.bfloat16)] + [
    pytest.param("cuda", dtype, marks=pytest.mark.cuda) for dtype in (torch.bfloat16, torch.float16)
]
REGULARIZERS = [{}, {"regularizer": "basis", "num_bases": 3}, {"regularizer": "bdd", "num_bases": 2}]


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def kinds(count, types, seed=31):
    return torch.randint(types, (count,), generator=torch.Generator().manual_seed(seed))


def results(layer, inputs, device, autocast=None):
    """Output and the gradients of floating inputs and parameters."""
    inputs = [t if t is None else t.to(device) for t in inputs]
    inputs = [t.detach().requires_grad_() if torch.is_tensor(t) and t.is_floating_point() else t for t in inputs]
    with torch.autocast(device, autocast, autocast is not None):
        out = layer.to(device)(*inputs)
    leaves = [t for t in inputs if torch.is_tensor(t) and t.requires_grad] + list(layer.parameters())
    grads = torch.autograd.grad(out, leaves, draw(*out.shape, seed=3).to(out))
    return [t.detach().cpu() for t in (out, *grads)]


def exact_inputs(inputs):
    return [t.double() if torch.is_tensor(t) and t.is_floating_point() else t for t in inputs]


def assert_as_good_as_stock(name, arguments, inputs, device, autocast, **options):
    """Errors are medians over draws."""
    theirs, ours = (getattr(package, name)(*arguments, **options) for package in (stock, fused))
    errors = []
    for seed in range(5):
        torch.manual_seed(seed)
        with torch.no_grad():
            for p in theirs.parameters():
                p.copy_(torch.randn(p.shape) * 0.4)
        ours.load_state_dict(theirs.state_dict())
        exact = results(copy.deepcopy(theirs).double(), exact_inputs(inputs), "cpu")
        with edgeless.backend("fused"):
            found = results(copy.deepcopy(ours), inputs, device, autocast)
        stocks = results(copy.deepcopy(theirs), inputs, device, autocast)
        assert [t.dtype for t in found] == [t.dtype for t in stocks]
        sides = [
            [float((t.double() - want).norm() / want.norm()) for t, want in zip(side, exact, strict=True)]
            for side in (found, stocks)
        ]
        errors.append(sides)
    mine, others = torch.tensor(errors).median(0).values
    assert (mine <= (2 * others).clamp_min(1e-6)).all(), (mine.tolist(), others.tolist())


@pytest.mark.parametrize("device,autocast", DEVICES)
@pytest.mark.parametrize("given", ["float32", "autocast"])
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        *REGULARIZERS, {"layer_norm": True}, {"layer_norm": True, "bias": False, "self_loop": False},
        {"bias": False}, {"self_loop": False}, {"self_loop": False, "bias": False, "activation": torch.tanh},
    ],
    ids=lambda options: str({key: getattr(value, "__name__", value) for key, value in options.items()}),
)  # fmt: skip
def test_rel_graph_conv(options, with_norm, given, device, autocast):
    graph = random_graph()
    x = draw(graph.num_nodes(), IN).to(autocast).to(autocast if given == "autocast" else torch.float32)
    norm = draw(graph.num_edges(), 1, seed=7).abs() if with_norm else None
    inputs = (graph, x, kinds(graph.num_edges(), R), norm)
    assert_as_good_as_stock("RelGraphConv", (IN, OUT, R), inputs, device, autocast, **options)


@pytest.mark.parametrize("device,autocast", DEVICES)
@pytest.mark.parametrize("given", ["float32", "autocast"])
@pytest.mark.parametrize("width", [IN, OUT])
@pytest.mark.parametrize("use_norm", [False, True])
def test_hgt_conv(use_norm, width, given, device, autocast):
    graph = random_graph()
    x = draw(graph.num_nodes(), width).to(autocast).to(autocast if given == "autocast" else torch.float32)
    inputs = (graph, x, kinds(graph.num_nodes(), NODE_TYPES, 1), kinds(graph.num_edges(), R))
    arguments = (width, OUT // 2, 2, NODE_TYPES, R, 0.0, use_norm)
    assert_as_good_as_stock("HGTConv", arguments, inputs, device, autocast)


@pytest.mark.parametrize("device,autocast", DEVICES)
@pytest.mark.parametrize("given", ["float32", "autocast"])
@pytest.mark.parametrize("options", REGULARIZERS, ids=str)
def test_typed_linear(options, given, device, autocast):
    x = draw(70, IN).to(autocast).to(autocast if given == "autocast" else torch.float32)
    assert_as_good_as_stock("TypedLinear", (IN, OUT, R), (x, kinds(70, R)), device, autocast, **options)


@pytest.mark.parametrize("device,autocast", DEVICES)
def test_products_of_ops(device, autocast):
    a, b, types = draw(70, IN).to(device), draw(R, IN, OUT, seed=1).to(device), kinds(70, R).sort().values.to(device)
    exact = torch.einsum("nk,nkm->nm", a.double(), b.double()[types])
    lengths = torch.bincount(types, minlength=R).cpu()
    with torch.autocast(device, autocast):
        for name, inputs, types_of_rows in (
            ("segment_mm", (a, b, lengths), {}),
            ("gather_mm", (a, b), {"idx_b": types}),
        ):
            with edgeless.backend("fused"):
                found = getattr(ops, name)(*inputs, **types_of_rows)
            expected = getattr(dgl.ops, name)(*inputs, **types_of_rows)
            assert found.dtype == expected.dtype == autocast
            mine, theirs = (((t.double() - exact).norm() / exact.norm()).item() for t in (found, expected))
            assert mine <= 2 * theirs, name


def test_float64_is_refused_in_words():
    """Autocast leaves it as it is."""
    graph = random_graph()
    x, etypes, ntypes = draw(40, IN).double(), kinds(graph.num_edges(), R), kinds(40, NODE_TYPES)
    norm = draw(graph.num_edges(), 1).double()
    with torch.autocast("cpu", torch.bfloat16):
        for layer, inputs in (
            (fused.RelGraphConv(IN, OUT, R).double(), (graph, x, etypes)),
            (fused.RelGraphConv(IN, OUT, R), (graph, x.float(), etypes, norm)),
            (fused.HGTConv(IN, OUT, 2, NODE_TYPES, R).double(), (graph, x, ntypes, etypes)),
            (fused.TypedLinear(IN, OUT, NODE_TYPES).double(), (x, ntypes)),
        ):
            assert re.search("autocast is on", str(edgeless.explain(layer, *inputs)))


@pytest.mark.parametrize("options", REGULARIZERS, ids=str)
@pytest.mark.parametrize("self_loop", [False, True])
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_the_dtype_of_what_is_left_out(bias, with_norm, self_loop, options):
    """A bias, a node's own features and the edges' norms each raise the result to float32 where they are there."""
    graph = random_graph()
    theirs, ours = (p.RelGraphConv(IN, OUT, R, bias=bias, self_loop=self_loop, **options) for p in (stock, fused))
    ours.load_state_dict(theirs.state_dict())
    norm = torch.rand(graph.num_edges(), 1) if with_norm else None
    inputs = (graph, draw(graph.num_nodes(), IN), kinds(graph.num_edges(), R), norm)
    with torch.autocast("cpu", torch.bfloat16), edgeless.backend("fused"):
        found = ours(*inputs)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = theirs(*inputs)
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.05)
