"""The op of a layer that adds up neighbours against the ops that it is made of."""

import pytest
import torch

from edgeless import Graph, functional
from edgeless.functional.layer import sum_layer as python_layer

NODES, FEATURES, OUT = 11, 5, 4
ops = torch.ops.edgeless


def graph_of(nodes=NODES, edges=50):
    gen = torch.Generator().manual_seed(3)
    return Graph.from_edge_index(torch.randint(0, max(nodes, 1), (2, edges), generator=gen), nodes, nodes)


def inputs(bias=True, nodes=NODES, dtype=torch.float64):
    gen = torch.Generator().manual_seed(1)
    shapes = [(nodes, FEATURES), (OUT, FEATURES), (OUT, FEATURES), *([(OUT,)] * bias)]
    return [torch.randn(s, generator=gen, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def weights_of(graph, dtype=torch.float64):
    return torch.randn(graph.num_edges, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)


def layer(given, graph, weight=None, reduce="sum", dtype=None):
    x, first, own, *bias = given
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    scale = graph.degree_scale("dst", -1.0, kind) if reduce == "mean" else None
    by_edge = None if weight is None else weight.unsqueeze(1)
    bias = bias[0] if bias else None
    return ops.sum_layer(x, [first, own], bias, by_edge, None, scale, list(graph.csr), list(graph.csc), dtype)


def parts(given, graph, weight=None, reduce="sum"):
    x, first, own, *bias = given
    out = functional.spmm(graph, x, weight, reduce=reduce) @ first.t() + x @ own.t()
    return out + bias[0] if bias else out


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_values_and_gradients(bias, weighted, reduce):
    graph, given = graph_of(), inputs(bias)
    weight = weights_of(graph) if weighted else None
    found, want = layer(given, graph, weight, reduce), parts(given, graph, weight, reduce)
    torch.testing.assert_close(found, want, rtol=1e-10, atol=1e-12)
    grad = torch.randn_like(want)
    for a, b in zip(*(torch.autograd.grad(t, given, grad) for t in (found, want)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    assert "SumLayer" in found.grad_fn.name()
    with torch.no_grad():
        assert torch.equal(layer(given, graph, weight, reduce), found)


@pytest.mark.parametrize("which", range(4))
def test_only_what_needs_a_gradient_gets_one(which):
    graph, given = graph_of(), inputs()
    want = torch.autograd.grad(parts(given, graph).square().sum(), given)
    given = [t.detach().requires_grad_(i == which) for i, t in enumerate(given)]
    (found,) = torch.autograd.grad(layer(given, graph).square().sum(), given[which])
    torch.testing.assert_close(found, want[which], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("nodes,edges", [(0, 0), (1, 0), (4, 0)])
def test_empty_graphs(nodes, edges):
    graph, given = graph_of(nodes, edges), inputs(nodes=nodes)
    found, want = layer(given, graph), parts(given, graph)
    torch.testing.assert_close(found, want)
    torch.testing.assert_close(*(torch.autograd.grad(t.sum(), given) for t in (found, want)))


@pytest.mark.parametrize("weighted", [True, False])
def test_first_and_second_derivatives(weighted):
    graph, given = graph_of(5, 12), inputs(nodes=5)
    weight = weights_of(graph) if weighted else None

    def call(*given):
        return layer(given, graph, weight)

    assert torch.autograd.gradcheck(call, given)
    assert torch.autograd.gradgradcheck(call, given)


def test_rounds_as_the_parts_do():
    graph, given = graph_of(), inputs(dtype=torch.float32)
    x, first, own, bias = given
    found = layer(given, graph, dtype=torch.bfloat16)
    want = ops.project_sum([functional.spmm(graph, x), x], [first, own], bias, torch.bfloat16)
    assert torch.equal(found, want)
    for a, b in zip(*(torch.autograd.grad(t.float().sum(), given) for t in (found, want)), strict=True):
        torch.testing.assert_close(a, b)


def test_is_traced_through():
    graph, given = graph_of(), inputs()
    compiled = torch.compile(lambda *given: layer(given, graph), fullgraph=True, backend="aot_eager")
    found, want = compiled(*given), parts(given, graph)
    torch.testing.assert_close(found, want)
    torch.testing.assert_close(*(torch.autograd.grad(t.sum(), given) for t in (found, want)))


@pytest.mark.skipif(not hasattr(torch.library, "opcheck"), reason="torch.library.opcheck came with torch 2.4")
@pytest.mark.parametrize("weighted", [True, False])
def test_opcheck(weighted):
    graph, (x, first, own, bias) = graph_of(), inputs()
    by_edge = weights_of(graph).unsqueeze(1) if weighted else None
    args = (x, [first, own], bias, by_edge, None, None, list(graph.csr), list(graph.csc), None)
    torch.library.opcheck(ops.sum_layer.default, args)


def test_bad_input():
    graph, (x, first, own, bias) = graph_of(), inputs()
    arrays = list(graph.csr), list(graph.csc)
    with pytest.raises(ValueError, match="weights must be 2, got 1"):
        ops.sum_layer(x, [first], bias, None, None, None, *arrays, None)
    weight = weights_of(graph).unsqueeze(1).requires_grad_()
    with pytest.raises(ValueError, match="edge_weight must not need a gradient"):
        ops.sum_layer(x, [first, own], bias, weight, None, None, *arrays, None)
    with pytest.raises(ValueError, match="src_scale must have shape"):
        ops.sum_layer(x, [first, own], bias, None, torch.ones(3, dtype=x.dtype), None, *arrays, None)


def of_layer(graph, x, linears, reduce="sum", weight=None):
    out = python_layer(graph, x, *linears, reduce=reduce, weight=weight)
    want = linears[0](functional.spmm(graph, x, weight, reduce=reduce)) + linears[1](x)
    return out, want


def two_maps(out=OUT, features=FEATURES, dtype=torch.float32, bias=(True, False)):
    torch.manual_seed(7)
    return [torch.nn.Linear(features, out, bias=has, dtype=dtype) for has in bias]


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("bias", [(True, False), (False, False)])
def test_few_rows_on_the_cpu(reduce, bias):
    graph, x, linears = graph_of(), inputs(dtype=torch.float32)[0], two_maps(bias=bias)
    found, want = of_layer(graph, x, linears, reduce)
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)
    assert "SumLayer" in found.grad_fn.name()
    given = [x, *(p for linear in linears for p in linear.parameters())]
    grad = torch.randn_like(want)
    for a, b in zip(*(torch.autograd.grad(t, given, grad) for t in (found, want)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    (only,) = torch.autograd.grad(of_layer(graph, x.detach(), linears, reduce)[0], [linears[1].weight], grad)
    torch.testing.assert_close(only, grad.t() @ x.detach(), rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(of_layer(graph, x, linears, reduce)[0], found)


def test_what_separate_ops_do_on_the_cpu():
    """Everything but small maps of plain float32 rows among the nodes of one graph, without weights."""
    graph, x = graph_of(), inputs(dtype=torch.float32)[0]
    weight = torch.ones(graph.num_edges)
    assert of_layer(graph, x, two_maps(), weight=weight)[0] is None
    assert of_layer(graph, x.double(), two_maps(dtype=torch.float64))[0] is None
    assert of_layer(graph, x, two_maps(bias=(True, True)))[0] is None
    hooked = two_maps()
    hooked[1].register_forward_hook(lambda *_: None)
    assert of_layer(graph, x, hooked)[0] is None
    with torch.autocast("cpu"):
        assert python_layer(graph, x, *two_maps()) is None
    assert python_layer(graph, x[:5], *two_maps()) is None
    one, other = two_maps(), two_maps(out=OUT + 1)
    assert python_layer(graph, x, one[0], other[1]) is None
    assert python_layer(graph, x, *two_maps(features=FEATURES + 1)) is None
    assert python_layer(graph_of(nodes=1 << 14), torch.ones(1 << 14, 8), *two_maps(features=8)) is None
    assert python_layer(graph_of(nodes=1 << 14), torch.ones(1 << 14, 7), *two_maps(features=7)) is not None
