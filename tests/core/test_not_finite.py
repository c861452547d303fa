"""Infinities and NaN in what is summed, compared, attended to and multiplied: results are those of plain PyTorch, and
what is not finite reaches those rows alone to which an edge takes it, forward and backward.
"""

import math

import pytest
import torch
from attention_cases import SCORES, function_of, inputs_of
from devices import EVERY_DEVICE, leaves_on

from edgeless import Graph, TypedGraph, functional, reference

SRC, DST, EDGES, TYPES = 40, 30, 300, 3
VALUES = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
EVERY_VALUE = pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
EVERY_DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
FIRST, SECOND = 3, 17  # sources that have something that is not finite


def edges():
    """Destinations from 25 on have no in-edges; some have one from both sources, some from none."""
    generator = torch.Generator().manual_seed(9)
    src, dst = (torch.randint(n, (EDGES,), generator=generator) for n in (SRC, 25))
    src[:8], dst[:8] = torch.tensor([FIRST, SECOND] * 4), torch.tensor([0, 0, 1, 2, 3, 3, 4, 5])
    return torch.stack((src, dst))


def reached(ends, *nodes):
    """``[DST]``: which destinations have an edge from one of these sources."""
    src, dst = ends
    found = torch.zeros(DST, dtype=torch.bool)
    found[dst[torch.isin(src, torch.tensor(nodes))]] = True
    return found


def draw(*sizes, dtype=torch.float64):
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(11), dtype=torch.float64).to(dtype)


def assert_same(have, want):
    """Equal where finite, to the dtype's rounding, and the same infinities and NaN elsewhere."""
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-5}.get(have.dtype, 8 * torch.finfo(have.dtype).eps)
    torch.testing.assert_close(have.cpu(), want, rtol=tolerance, atol=tolerance, equal_nan=True)


@EVERY_DEVICE
@EVERY_DTYPE
@EVERY_VALUE
@pytest.mark.parametrize("other", [1.0, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("width", [1, 5, 64])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_sums_and_means(reduce, weighted, width, other, value, dtype, device):
    """With weights among which there are zeros: nothing times infinity is NaN."""
    ends, x, weight = edges(), draw(SRC, width, dtype=dtype), None
    x[FIRST, -1], x[SECOND, -1] = value, other
    if weighted:
        weight = draw(EDGES, dtype=dtype)
        weight[::3] = 0
    graph = Graph.from_edge_index(ends, SRC, DST)
    scale = 1 / graph.in_degrees().clamp(min=1).double() if reduce == "mean" else None
    wide = torch.promote_types(dtype, torch.float32)
    want = reference.spmm(graph, x.to(wide), None if weight is None else weight.to(wide), None, scale).to(dtype)
    on = [None if t is None else t.to(device) for t in (x, weight)]
    have = functional.spmm(graph.to(device), *on, reduce=reduce)
    assert_same(have, want)
    assert want[~reached(ends, FIRST, SECOND)].isfinite().all()


@EVERY_DEVICE
@EVERY_VALUE
def test_gradients_of_sums(value, device):
    """What is not finite in the gradient of a destination goes to its sources, and to its edges' weights."""
    graph = Graph.from_edge_index(edges(), SRC, DST)
    x, weight, grad = draw(SRC, 5), draw(EDGES), draw(DST, 5)
    grad[3, 2] = value

    def grads(call, device):
        leaves = leaves_on(device, (x.clone().requires_grad_(), weight.clone().requires_grad_()))
        out = call(graph.to(device), *leaves)
        return torch.autograd.grad(out, leaves, grad.to(device))

    for have, want in zip(grads(functional.spmm, device), grads(reference.spmm, "cpu"), strict=True):
        assert_same(have, want)


@EVERY_DEVICE
@EVERY_DTYPE
@EVERY_VALUE
@pytest.mark.parametrize("other", [1.0, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("ties", ["shared", "first", "scatter"])
@pytest.mark.parametrize("reduce", ["min", "max"])
def test_extrema(reduce, ties, other, value, dtype, device):
    """Also the gradients; but of a NaN in PyTorch's functions that share a gradient nothing equals it."""
    ends, x = edges(), draw(SRC, 5)
    x[FIRST, 1], x[SECOND, 1] = value, other
    x = x.to(dtype)
    graph, weight = Graph.from_edge_index(ends, SRC, DST), draw(DST, 5).to(dtype)

    def run(module, device, dtype):
        leaf = x.to(device, dtype).requires_grad_()
        out = module.neighbor_reduce(graph.to(device), leaf, reduce, ties=ties)
        return out.detach(), torch.autograd.grad(out, leaf, weight.to(device, dtype))[0]

    have, want = run(functional, device, dtype), run(reference, "cpu", dtype)
    assert_same(have[0], want[0])
    if ties != "first" and (math.isnan(value) or math.isnan(other)):
        return
    assert_same(have[1], run(reference, "cpu", torch.float64)[1].to(dtype))


@EVERY_DEVICE
@EVERY_VALUE
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("channels", [1, 8, 40])
def test_attention_over_a_node_that_is_not_finite(score, channels, dtype, value, device):
    """Rows that it does not reach have the same bits as without it, in the results and in the gradients."""
    graph = Graph.from_edge_index(edges(), SRC, DST)
    args, _, _ = inputs_of(score, graph, 2, channels, (), dtype)
    which = 2 if score == "dot" else 0  # the values
    weight = draw(DST, 2, channels).to(dtype)
    weight[reached(edges(), FIRST)] = 0

    def run(poisoned):
        leaves = leaves_on(device, args)
        with torch.no_grad():
            if poisoned:
                leaves[which][FIRST] = value
        out = function_of(score)(graph.to(device), *leaves)
        grads = torch.autograd.grad(out, leaves, weight.to(device))
        return out.detach().cpu(), grads[which].cpu()

    (have, grad), (finite, of_finite) = run(True), run(False)
    away = ~reached(edges(), FIRST)
    assert torch.equal(have[away], finite[away])
    assert not have[reached(edges(), FIRST)].isfinite().flatten(1).all(1).any()
    others = ~torch.isin(torch.arange(SRC), edges()[0][reached(edges(), FIRST)[edges()[1]]])
    assert others.any()
    if device == "cuda" and dtype == torch.float32:  # a block that meets a NaN makes the rows of its range in double
        torch.testing.assert_close(grad[others], of_finite[others], rtol=1e-5, atol=1e-6)
    else:
        assert torch.equal(grad[others], of_finite[others])


@EVERY_DEVICE
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_edges_that_are_masked_by_logits_of_minus_infinity(dtype, device):
    """As masks are written: such an edge has the weight 0, as in PyTorch's softmax, unless all of a row have one."""
    graph = Graph.from_edge_index(edges(), SRC, DST)
    x, a_l, a_r = draw(SRC, 2, 4, dtype=dtype), draw(SRC, 2, dtype=dtype), draw(DST, 2, dtype=dtype)
    a_l[FIRST] = -math.inf

    def run(module, device):
        leaves = leaves_on(device, [t.clone().requires_grad_() for t in (x, a_l, a_r)])
        out, weights = module.gat_attention(graph.to(device), *leaves, return_weights="softmax")
        grads = torch.autograd.grad(out.sum() + (weights**2).sum(), leaves)
        return [t.detach() for t in (out, weights, *grads)]

    found = run(functional, device)
    assert found[1].cpu()[edges()[0] == FIRST].eq(0).all()
    for have, want in zip(found, run(reference, "cpu"), strict=True):
        assert_same(have, want)


@EVERY_DEVICE
@EVERY_VALUE
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("order", ["aggregate", "transform"])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("blocks", [1, 2])
def test_sums_over_relations(blocks, reduce, order, dtype, value, device):
    """Forward, and what is not finite in the gradient of a destination."""
    types = torch.randint(TYPES, (EDGES,), generator=torch.Generator().manual_seed(2))
    graph = TypedGraph(Graph.from_edge_index(edges(), SRC, DST), types, TYPES)
    sizes = (8, 16) if blocks == 1 else (blocks, 4, 8)
    x, weight, grad = draw(SRC, 8, dtype=dtype), draw(TYPES, *sizes, dtype=dtype), draw(DST, 16, dtype=dtype)
    x[FIRST, 2] = value

    def run(module, device, **options):
        leaves = leaves_on(device, [t.clone().requires_grad_() for t in (x, weight)])
        on = TypedGraph(graph.graph.to(device), types.to(device), TYPES)
        if module is reference and blocks > 1:  # which multiplies by the zeros beside the blocks
            parts = zip(leaves[0].chunk(blocks, 1), leaves[1].unbind(1), strict=True)
            out = torch.cat([module.relational_sum(on, *part, reduce=reduce) for part in parts], 1)
        else:
            out = module.relational_sum(on, *leaves, reduce=reduce, **options)
        return out.detach().cpu(), *torch.autograd.grad(out, leaves, grad.to(device))

    have, want = run(functional, device, order=order), run(reference, "cpu")
    away = ~reached(edges(), FIRST)
    assert have[0][away].isfinite().all() and want[0][away].isfinite().all()
    assert_same(have[0], want[0])
    assert_same(have[1].nan_to_num(0, 0, 0).cpu(), want[1].nan_to_num(0, 0, 0))
    assert torch.equal(have[1].cpu().isfinite(), want[1].isfinite())
    assert torch.equal(have[2].cpu().isfinite(), want[2].isfinite())


@EVERY_DEVICE
@EVERY_VALUE
@pytest.mark.parametrize("bias", [False, True])
def test_typed_products(bias, value, device):
    x, w = draw(30, 8), draw(TYPES, 8, 5)
    index = torch.randint(TYPES, (30,), generator=torch.Generator().manual_seed(2))
    x[4, 1] = value
    b = draw(TYPES, 5) if bias else None
    want = reference.gather_mm(x, w, index) + (0 if b is None else b[index])
    have = functional.gather_mm(x.to(device), w.to(device), index.to(device), None if b is None else b.to(device))
    assert_same(have, want)
    assert have.cpu().isfinite().all(1).sum() == 29
