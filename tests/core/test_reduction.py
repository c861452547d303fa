"""Min and max over in-neighbours against plain PyTorch: ties, NaN, fills, widths of the argument, gradients."""

import pytest
import torch
from saved import saved_by
from test_attention import GRAPHS, assert_close, graph_of

import edgeless
from edgeless import Graph, functional

TIES = ("first", "shared", "scatter")


def features(graph, width, dtype=torch.float64, ties=False, seed=0):
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(graph.num_src, width, dtype=torch.float64, generator=gen)
    return ((x.round() + 0.0) if ties else x).to(dtype).requires_grad_()


def both_ways(graph, x, reduce, **options):
    results = []
    for name in ("fused", "reference"):
        with edgeless.backend(name):
            out = functional.neighbor_reduce(graph, x, reduce, **options)
        gen = torch.Generator().manual_seed(4)
        grad = torch.randn(out.shape, dtype=torch.float64, generator=gen).to(out.dtype)
        results.append([out, *torch.autograd.grad(out, [x], grad)])
    return results


@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("reduce", ["min", "max"])
@pytest.mark.parametrize("ties", TIES)
def test_every_graph_and_rule(kind, reduce, ties):
    for index_dtype in (torch.int32, torch.int64):
        graph = graph_of(kind, index_dtype)
        for width in (1, 7, 24, 100):
            for tied in (False, True):
                found, expected = both_ways(graph, features(graph, width, ties=tied), reduce, ties=ties)
                assert torch.equal(found[0], expected[0])
                assert_close(found[1:], expected[1:], 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype):
    graph = graph_of("hub")
    x = features(graph, 40, dtype)
    found, expected = both_ways(graph, x, "max", ties="first")
    assert torch.equal(found[0], expected[0])  # an extremum is one of the inputs: no rounding
    exact = both_ways(graph, x.detach().double().requires_grad_(), "max", ties="first")[1][1]
    tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]  # one rounding of the sum
    assert_close(found[1:], [exact], tolerance)


@pytest.mark.parametrize("reduce", ["min", "max"])
def test_nan_and_infinities(reduce):
    graph = Graph.from_edge_index(torch.tensor([[0, 1, 2, 3, 4, 0], [0, 0, 1, 1, 2, 3]]), 5, 5)
    x = torch.tensor([[1.0], [float("nan")], [-float("inf")], [float("inf")], [-float("inf")]])
    found, expected = (functional.neighbor_reduce(graph, x, reduce, ties=t) for t in ("first", "scatter"))
    with edgeless.backend("reference"):
        wanted = functional.neighbor_reduce(graph, x, reduce, ties="scatter")
    torch.testing.assert_close(found, wanted, equal_nan=True)
    torch.testing.assert_close(expected, wanted, equal_nan=True)


def test_fill_of_rows_without_edges():
    graph = Graph.from_edge_index(torch.tensor([[0], [1]]), 2, 3)
    out = functional.neighbor_reduce(graph, torch.ones(2, 4), "max", fill=-float("inf"))
    assert out[1].eq(1).all() and out[[0, 2]].eq(-float("inf")).all()


@pytest.mark.parametrize("degree,expected", [(256, torch.uint8), (257, torch.int16), (65536, torch.int16),
                                             (65537, torch.int32)])  # fmt: skip
def test_the_argument_is_as_narrow_as_the_degrees_allow(degree, expected):
    graph = Graph.from_edge_index(torch.stack([torch.arange(degree), torch.zeros(degree, dtype=torch.int64)]))
    x = torch.zeros(degree, 3)
    x[-1] = 1.0  # the largest position there is
    x.requires_grad_()
    assert expected in [t.dtype for t in saved_by(lambda: functional.neighbor_reduce(graph, x, "max", ties="first"))]
    out = functional.neighbor_reduce(graph, x, "max", ties="first")
    (grad,) = torch.autograd.grad(out[0].sum(), x)
    assert grad[-1].eq(1).all() and grad[:-1].eq(0).all()


def test_gradcheck_and_refused_double_backward():
    graph = graph_of("square")
    x = features(graph, 3)
    for ties in TIES:
        assert torch.autograd.gradcheck(lambda x: functional.neighbor_reduce(graph, x, "max", ties=ties), [x])  # noqa: B023
    out = functional.neighbor_reduce(graph, x, "max")
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once only"):
        grad.sum().backward()


def test_bitwise_the_same_for_any_number_of_threads():
    graph = graph_of("hub")
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for ties in TIES:
                x = features(graph, 50, torch.float32, ties=True)
                out = functional.neighbor_reduce(graph, x, "max", ties=ties)
                results.append((out, *torch.autograd.grad(out.square().sum(), x)))
    finally:
        torch.set_num_threads(before)
    for i, other in enumerate(results):
        assert all(torch.equal(a, b) for a, b in zip(results[i % 3], other, strict=True))


@pytest.mark.skipif(not hasattr(torch.library, "opcheck"), reason="torch.library.opcheck came with torch 2.4")
@pytest.mark.parametrize("ties", TIES)
def test_opcheck(ties):
    graph = graph_of("bipartite")
    csr, csc = ([t for t in c if t is not None] for c in (graph.csr, graph.csc))
    sample = (features(graph, 5), csr, csc, "max", 0.0, torch.uint8, ties)
    torch.library.opcheck(torch.ops.edgeless.neighbor_reduce, sample)


def test_compiles_whole():
    graph = graph_of("square")
    x = features(graph, 12)
    torch._dynamo.reset()
    compiled = torch.compile(lambda g, x: functional.neighbor_reduce(g, x, "min"), fullgraph=True, backend="aot_eager")
    out, expected = compiled(graph, x), functional.neighbor_reduce(graph, x, "min")
    assert torch.equal(out, expected)
    assert_close(*([torch.autograd.grad(o.square().sum(), x)[0]] for o in (out, expected)), 1e-12)


@pytest.mark.parametrize("args,kwargs,message", [
    ((torch.zeros(49, 3), "max"), {}, r"x must have shape \[Ns, F\] = \[50, \*\], got \[49, 3\]"),
    ((torch.zeros(50, 3), "sum"), {}, "reduce must be one of 'min', 'max', got 'sum'"),
    ((torch.zeros(50, 3), "max"), {"ties": "last"}, "ties must be one of 'shared', 'first', 'scatter', got 'last'"),
])  # fmt: skip
def test_bad_input_is_named(args, kwargs, message):
    with pytest.raises(ValueError, match=message):
        functional.neighbor_reduce(graph_of("bipartite"), *args, **kwargs)
