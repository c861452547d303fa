"""SpMM and SDDMM against plain PyTorch: norms, weights, gradients, dtypes, graph shapes, determinism, bad input."""

import pytest
import torch
from test_attention import GRAPHS, assert_close, error, graph_of

import edgeless
from edgeless import Graph, functional, reference

WIDTHS = [(1,), (7,), (64,), (100,), (2, 40), (3, 2, 5)]


def leaf(*shape, dtype=torch.float64, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=gen).to(dtype).requires_grad_()


def both_ways(graph, x, weight, **options):
    """Output and gradients, fused and plain."""
    results = []
    for name in ("fused", "reference"):
        with edgeless.backend(name):
            out = functional.spmm(graph, x, weight, **options)
        leaves = [t for t in (x, weight) if t is not None]
        grad = leaf(*out.shape, dtype=out.dtype, seed=9).detach()
        results.append([out, *torch.autograd.grad(out, leaves, grad)])
    return results


@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("norm", ["none", "left", "right", "both"])
@pytest.mark.parametrize("weighted", [False, True])
def test_norms_on_every_graph(kind, norm, weighted):
    for index_dtype in (torch.int32, torch.int64):
        graph = graph_of(kind, index_dtype)
        weight = leaf(graph.num_edges) if weighted else None
        for reduce in ("sum", "mean"):
            assert_close(*both_ways(graph, leaf(graph.num_src, 20), weight, norm=norm, reduce=reduce), 1e-10)


@pytest.mark.parametrize("shape", WIDTHS)
@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_every_width(shape, dtype, tolerance):
    graph = graph_of("hub")
    x = leaf(graph.num_src, *shape, dtype=dtype)
    weights = [None, leaf(graph.num_edges, dtype=dtype)]
    if len(shape) == 2:
        weights.append(leaf(graph.num_edges, shape[0], dtype=dtype))
    for weight in weights:
        assert_close(*both_ways(graph, x, weight, norm="both"), tolerance)


def test_norm_both_is_the_symmetric_normalisation():
    graph = graph_of("square")
    src, dst = graph.edge_index()
    adjacency = torch.zeros(40, 40, dtype=torch.float64).index_put((dst, src), torch.tensor(1.0).double(), True)
    left, right = adjacency.sum(0).clamp(min=1) ** -0.5, adjacency.sum(1).clamp(min=1) ** -0.5
    x = leaf(40, 5)
    expected = right[:, None] * (adjacency @ (left[:, None] * x))
    assert_close([functional.spmm(graph, x, norm="both")], [expected], 1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_errs_at_most_twice_as_much_as_torch(dtype):
    graph = graph_of("hub")
    x, weight = leaf(graph.num_src, 33, dtype=dtype), leaf(graph.num_edges, dtype=dtype, seed=1)
    src, dst = graph.edge_index()

    def plain(x, weight):
        out = x.new_zeros(graph.num_dst, 33).index_add(0, dst, x[src] * weight[:, None])
        return [out, *torch.autograd.grad(out, [x, weight], torch.ones_like(out))]

    out = functional.spmm(graph, x, weight)
    assert out.dtype == dtype
    found = [out, *torch.autograd.grad(out, [x, weight], torch.ones_like(out))]
    exact = plain(*(t.detach().double().requires_grad_() for t in (x, weight)))
    for a, b, c in zip(found, plain(x, weight), exact, strict=True):
        assert error(a, c) <= 2 * error(b, c)


def test_scales_given_by_the_caller():
    graph = graph_of("bipartite")
    x, s, d = leaf(50, 6), leaf(50, seed=1).detach(), leaf(40, seed=2).detach()
    expected = d[:, None] * functional.spmm(graph, x * s[:, None])
    assert_close([functional.spmm(graph, x, src_scale=s, dst_scale=d)], [expected], 1e-12)


@pytest.mark.parametrize("shape", [(5,), (40,), (3, 16)])
def test_sddmm(shape):
    graph = graph_of("bipartite")
    a, b = leaf(40, *shape), leaf(50, *shape, seed=1)
    grad = leaf(graph.num_edges, *shape[:-1], seed=2).detach()
    found, expected = functional.sddmm_dot(graph, a, b), reference.sddmm_dot(graph, a, b)
    assert_close(
        [found, *torch.autograd.grad(found, [a, b], grad)],
        [expected, *torch.autograd.grad(expected, [a, b], grad)],
        1e-10,
    )


def test_sddmm_of_half_precision_in_float32():
    graph = graph_of("bipartite")
    a, b = leaf(40, 2, 16, dtype=torch.bfloat16), leaf(50, 2, 16, dtype=torch.bfloat16, seed=1)
    found = functional.sddmm_dot(graph, a, b, out_dtype=torch.float32)
    with edgeless.backend("reference"):
        plain = functional.sddmm_dot(graph, a, b, out_dtype=torch.float32)
    exact = functional.sddmm_dot(graph, a.float(), b.float())
    assert_close([found, plain], [exact, exact], 1e-6)
    grads = torch.autograd.grad(found.sum(), [a, b])
    assert all(grad.dtype == torch.bfloat16 for grad in grads)


def test_gradcheck_and_gradgradcheck():
    graph = Graph.from_edge_index(torch.tensor([[0, 1, 2, 2, 3, 3], [0, 0, 1, 2, 2, 2]]), 5, 4)
    x, weight = leaf(5, 2, 3), leaf(6, 2)

    def product(x, weight):
        return functional.spmm(graph, x, weight, norm="both")

    def sampled(a, b):
        return functional.sddmm_dot(graph, a, b)

    assert torch.autograd.gradcheck(product, [x, weight])
    assert torch.autograd.gradgradcheck(product, [x, weight])
    assert torch.autograd.gradcheck(sampled, [leaf(4, 3), leaf(5, 3)])
    assert torch.autograd.gradgradcheck(sampled, [leaf(4, 3), leaf(5, 3)])


def test_bitwise_the_same_for_any_number_of_threads():
    graph = graph_of("hub")
    x, weight = leaf(graph.num_src, 50, dtype=torch.float32), leaf(graph.num_edges, dtype=torch.float32)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            out = functional.spmm(graph, x, weight)
            results.append([out, *torch.autograd.grad(out.square().sum(), [x, weight])])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_strided_and_expanded_inputs():
    graph = graph_of("square")
    wide = torch.randn(40, 30, dtype=torch.float64)
    for x in (wide[:, 5:15], wide.t()[:10].t(), torch.randn(1, 10, dtype=torch.float64).expand(40, 10)):
        weight = torch.randn(1, dtype=torch.float64).expand(graph.num_edges)
        expected = functional.spmm(graph, x.contiguous(), weight.contiguous())
        assert torch.equal(functional.spmm(graph, x, weight), expected)


@pytest.mark.skipif(not hasattr(torch.library, "opcheck"), reason="torch.library.opcheck came with torch 2.4")
def test_opcheck():
    graph = graph_of("bipartite")
    csr, csc = ([t for t in c if t is not None] for c in (graph.csr, graph.csc))
    d, s = graph.degree_scale("dst", -0.5, torch.float64), graph.degree_scale("src", -0.5, torch.float64)
    x, weight = leaf(50, 2, 8), leaf(400, 2)
    torch.library.opcheck(torch.ops.edgeless.spmm, (x, weight, s, d, csr, csc, None))
    torch.library.opcheck(torch.ops.edgeless.spmm, (x.detach().bfloat16(), None, None, None, csr, [], torch.float32))
    torch.library.opcheck(torch.ops.edgeless.sddmm, (leaf(40, 2, 8), x, s, d, csr, csc))
    torch.library.opcheck(torch.ops.edgeless.spmm, (leaf(50, 8), leaf(400, 1), s, d, csr, csc, None))
    torch.library.opcheck(torch.ops.edgeless.sddmm, (leaf(40, 8), leaf(50, 8), s, d, csr, csc))


def test_rows_without_heads_in_inference_mode():
    graph = graph_of("bipartite")
    x = leaf(50, 8).detach()
    with torch.inference_mode():
        found = functional.spmm(graph, x, norm="both"), functional.sddmm_dot(graph, leaf(40, 8).detach(), x)
    wanted = functional.spmm(graph, x, norm="both"), functional.sddmm_dot(graph, leaf(40, 8).detach(), x)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_compiles_whole():
    graph = graph_of("square")
    x, weight = leaf(40, 12), leaf(graph.num_edges)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *a: functional.spmm(*a, norm="both"), fullgraph=True, backend="aot_eager")
    out, expected = compiled(graph, x, weight), functional.spmm(graph, x, weight, norm="both")
    assert_close([out], [expected], 1e-12)
    grads = [torch.autograd.grad(o.square().sum(), [x, weight]) for o in (out, expected)]
    assert_close(*grads, 1e-12)


@pytest.mark.parametrize("args,kwargs,message", [
    ((torch.zeros(49, 3),), {}, r"x must have shape \[Ns, ..., F\] = \[50, \*\], got \[49, 3\]"),
    ((torch.zeros(50),), {}, r"x must be a Tensor of shape \[Ns, ..., F\], got \[50\]"),
    ((torch.zeros(50, 3).long(),), {}, "x must be float32"),
    ((torch.zeros(50, 3), torch.zeros(399)), {}, r"weight must have shape \[E\] = \[400\], got \[399\]"),
    ((torch.zeros(50, 3), torch.zeros(400, 2)), {}, r"weight must have shape \[E\], or \[E, H\] with x of shape"),
    ((torch.zeros(50, 3),), {"norm": "sym"}, "norm must be one of 'none', 'left', 'right', 'both', got 'sym'"),
    ((torch.zeros(50, 3),), {"reduce": "max"}, "reduce must be one of 'sum', 'mean', got 'max'"),
    ((torch.zeros(50, 3),), {"norm": "both", "src_scale": torch.ones(50)}, "src_scale goes with norm 'none'"),
    ((torch.zeros(50, 3, device="meta"),), {}, "x must be on the graph's device cpu, got meta"),
])  # fmt: skip
def test_bad_input_is_named(args, kwargs, message):
    with pytest.raises(ValueError, match=message):
        functional.spmm(graph_of("bipartite"), *args, **kwargs)
