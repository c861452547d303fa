"""Every path of the CPU's min/max kernels: lengths of rows, widths, both ways of the gradient, stores around caches.

The truth is made here from scatters over all edges; gradients of whole numbers make the sums exact.
"""

import pytest
import torch
from saved import saved_by

from edgeless import Graph, functional

LENGTHS = (0, 1, 2, 31, 32, 33, 255, 256, 257, 280, 281, 511, 512, 513)
WAYS = ("gather", "scatter")


def graph_with(lengths, num_src=300, seed=0, sorted_edges=False, dtype=torch.int64):
    """Rows of these lengths, in this order; the edges are shuffled unless ``sorted_edges``."""
    gen = torch.Generator().manual_seed(seed)
    dst = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    src = torch.randint(num_src, (len(dst),), generator=gen)
    if not sorted_edges:
        order = torch.randperm(len(dst), generator=gen)
        src, dst = src[order], dst[order]
    return Graph.from_edge_index(torch.stack([src, dst]).to(dtype), num_src, len(lengths))


def arrays(compressed):
    return [t for t in compressed if t is not None]


def position_dtype(graph):
    longest = graph.max_in_degree
    return torch.uint8 if longest <= 2**8 else torch.int16 if longest <= 2**16 else torch.int32


def ours(graph, x, grad, reduce, ties, way):
    x = x.detach().requires_grad_()
    csc = arrays(graph.csc) if way == "gather" else []
    op = torch.ops.edgeless.neighbor_reduce
    out, arg, tied = op(x, arrays(graph.csr), csc, reduce, 0.0, position_dtype(graph), ties)
    (grad_x,) = torch.autograd.grad(out, x, grad)
    return out.detach(), arg, grad_x


def truth(graph, x, grad, reduce, ties):
    """Values, first positions and the gradient, in float64."""
    x, grad = x.double(), grad.double()
    indptr, indices = graph.csr.indptr.long(), graph.csr.indices.long()
    rows = torch.repeat_interleave(torch.arange(graph.num_dst), indptr.diff())
    position = (torch.arange(len(indices)) - indptr[rows]).unsqueeze(1).expand(-1, x.size(1))
    values, where = x[indices], rows.unsqueeze(1).expand(-1, x.size(1))
    out = torch.zeros(graph.num_dst, x.size(1), dtype=torch.float64)
    out.scatter_reduce_(0, where, values, "a" + reduce, include_self=False)
    best = (values == out[rows]) | values.isnan()
    first = torch.full(out.shape, 2**40).scatter_reduce_(0, where, torch.where(best, position, 2**40), "amin")
    first[indptr.diff() == 0] = 0
    if ties == "first":
        given = torch.where(position == first[rows], grad[rows], 0.0)
    else:
        equal = values == out[rows]
        count = torch.zeros_like(out).scatter_add_(0, where, equal.double())
        count += (out == 0) if ties == "scatter" else 0
        given = torch.where(equal, (grad / count)[rows], 0.0)
    return out, first, torch.zeros_like(x).index_add_(0, indices, given)


def numbers(rows, width, dtype=torch.float32, tied=False, seed=1):
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, dtype=torch.float64, generator=gen)
    return (x.round() if tied else x).to(dtype)


def whole_numbers(rows, width, dtype=torch.float32):
    gen = torch.Generator().manual_seed(2)
    return torch.randint(-3, 4, (rows, width), generator=gen).to(dtype)


def check(graph, x, reduce, ties, way):
    grad = whole_numbers(graph.num_dst, x.size(1), x.dtype)
    out, arg, grad_x = ours(graph, x, grad, reduce, ties, way)
    expected, first, expected_grad = truth(graph, x, grad, reduce, ties)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=0, equal_nan=True)
    at = arg.long() & 0xFFFF if arg.dtype == torch.int16 else arg.long()
    assert torch.equal(at, first)
    if ties == "first":
        assert torch.equal(grad_x.double(), expected_grad)
    else:
        error = (grad_x.double() - expected_grad).norm() / expected_grad.norm().clamp(min=1e-30)
        assert error < {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[x.dtype]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reduce", ["min", "max"])
@pytest.mark.parametrize("ties", ["first", "shared", "scatter"])
def test_lengths_of_rows(way, reduce, ties):
    for index_dtype in (torch.int32, torch.int64):
        for lengths in (LENGTHS, [n for n in LENGTHS if n <= 256], [0] * 100 + [3, 1] * 50):
            for sorted_edges in (False, True):
                graph = graph_with(lengths, dtype=index_dtype, sorted_edges=sorted_edges)
                for tied in (False, True):
                    check(graph, numbers(300, 37, tied=tied), reduce, ties, way)


@pytest.mark.parametrize("way", WAYS)
def test_a_long_row_and_a_busy_source(way, every_capability):
    graph = graph_with([70_000, 5, 0, 9_000], num_src=20)  # rows over many parts, and sources of thousands of edges
    for width in (16, 21):
        for ties in ("first", "shared"):
            for tied in (False, True):
                check(graph, numbers(20, width, torch.float64, tied), "max", ties, way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_widths(way, dtype, every_capability):
    graph = graph_with([40, 0, 1, 7, 300, 5], num_src=30)
    for width in (*range(1, 71), 127, 128, 129, 200):
        for ties in ("first", "scatter"):
            check(graph, numbers(30, width, dtype), "max" if width % 2 else "min", ties, way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_nan_and_infinities_anywhere(way, dtype, every_capability):
    graph = graph_with([*LENGTHS, 3000], num_src=1200)
    for width in (5, 40):
        for value in (float("nan"), float("inf"), -float("inf")):
            for reduce in ("min", "max"):
                x = numbers(1200, width, dtype)
                gen = torch.Generator().manual_seed(7)
                x[torch.rand(x.shape, generator=gen) < 0.003] = value
                check(graph, x, reduce, "first", way)
                if value == value:
                    check(graph, x, reduce, "shared", way)
    x = torch.full((1200, 33), -float("inf"), dtype=dtype)  # nothing beats the start
    check(graph, x, "max", "first", way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("width,ties", [(128, "scatter"), (120, "first")])  # of whole cache lines, and not
def test_results_larger_than_the_caches(way, width, ties):
    graph = graph_with([1, 2, 3, 0] * 20_000, num_src=80_000)  # 80,000 * 120 * 4 bytes are more than 32 MiB
    x = numbers(80_000, width)
    x[5, 7] = 0.0
    check(graph, x, "max", ties, way)


@pytest.mark.parametrize("way", WAYS)
def test_signed_zeros_are_equal(way, every_capability):
    graph = Graph.from_edge_index(torch.tensor([[0, 1, 1, 0], [0, 0, 1, 1]]), 2, 2)
    x = torch.tensor([[0.0], [-0.0]]).expand(-1, 20).contiguous()
    for reduce in ("min", "max"):
        out, arg, _ = ours(graph, x, torch.ones(2, 20), reduce, "first", way)
        assert arg.eq(0).all() and out[0].signbit().eq(False).all() and out[1].signbit().all()


@pytest.mark.parametrize("way", WAYS)
def test_strided_inputs(way):
    graph = graph_with([40, 3, 0, 300], num_src=30)
    wide = numbers(30, 100)
    check(graph, wide[:, 11:61], "max", "shared", way)
    gradient = whole_numbers(4, 90)[:, 3:53]
    found = ours(graph, wide[:, :50], gradient, "max", "first", way)[2]
    assert torch.equal(found.double(), truth(graph, wide[:, :50], gradient, "max", "first")[2])


@pytest.mark.parametrize("way", WAYS)
def test_bitwise_the_same_for_any_number_of_threads(way):
    graph = graph_with([700, 30, 5000] + [20] * 500, num_src=60)
    x, before, results = numbers(60, 100, tied=True), torch.get_num_threads(), []
    grad = numbers(graph.num_dst, 100, seed=9)
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            for ties in ("first", "shared", "scatter"):
                results.append(ours(graph, x, grad, "max", ties, way))
    finally:
        torch.set_num_threads(before)
    for i, other in enumerate(results):
        assert all(torch.equal(a, b) for a, b in zip(results[i % 3], other, strict=True))


@pytest.mark.parametrize("num_src,degree,gathers", [(12_000, 1, False), (25_000, 2, True), (25_000, 3, False),
                                                     (300_000, 16, True), (300_000, 17, False)])  # fmt: skip
def test_the_gradient_is_gathered_where_degrees_are_low_and_sources_many(num_src, degree, gathers):
    graph = graph_with([degree] * 20, num_src=num_src)
    x = numbers(num_src, 3).requires_grad_()
    saved = saved_by(lambda: functional.neighbor_reduce(graph, x, "max", ties="first"))
    assert any(t.data_ptr() == graph.csc.indptr.data_ptr() for t in saved) == gathers


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ties", ["shared", "scatter"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [3, 40])
def test_shares_of_16_bits_are_summed_in_float32(dtype, ties, way, width):
    graph = graph_with([4] * 60 + [2] * 60, num_src=20)
    x = torch.ones(20, width, dtype=dtype)  # equal maxima, whose shares are exact
    grad = torch.randint(1, 100, (120, width), generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = truth(graph, x, grad, "max", ties)[2]
    assert torch.equal(ours(graph, x, grad, "max", ties, way)[2], expected.to(dtype))


def test_a_transpose_that_does_not_fit_is_named():
    graph = graph_with([3, 4], num_src=10)
    x = numbers(10, 4).requires_grad_()
    other = arrays(graph_with([3, 5], num_src=10).csc)
    op = torch.ops.edgeless.neighbor_reduce
    out = op(x, arrays(graph.csr), other, "max", 0.0, torch.uint8, "first")[0]
    with pytest.raises(ValueError, match="neighbor_reduce_backward: indices of csc must have 7 elements, got 8"):
        out.sum().backward()


@pytest.mark.parametrize("width", [1, 3, 8, 21, 64, 77])
@pytest.mark.parametrize("reduce", ["min", "max"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_without_a_gradient_the_extrema_alone_are_computed(width, reduce, dtype):
    graph = graph_with((*LENGTHS, 40_000))  # whose last row many parts share
    x = torch.randn(300, width, generator=torch.Generator().manual_seed(1)).round(decimals=1).to(dtype)
    for place, value in ((5, torch.nan), (6, torch.inf), (7, -torch.inf)):
        x[place, 0] = value
    given = x.clone().requires_grad_()
    want = functional.neighbor_reduce(graph, given, reduce, ties="scatter", fill=2.5)
    assert want.grad_fn is not None
    with torch.no_grad():
        found = [functional.neighbor_reduce(graph, given, reduce, ties=ties, fill=2.5) for ties in ("scatter", "first")]
    found.append(functional.neighbor_reduce(graph, x, reduce, fill=2.5))
    for out in found:
        torch.testing.assert_close(out, want.detach(), rtol=0, atol=0, equal_nan=True)
    out, arg, tied = torch.ops.edgeless.neighbor_reduce(x, arrays(graph.csr), [], reduce, 2.5, torch.bool, "scatter")
    assert arg.numel() == tied.numel() == 0 and out.shape == want.shape
