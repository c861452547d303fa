"""Min and max on CUDA: the suite of test_reduction.py, and what only a GPU can get wrong."""

import pytest
import torch
from saved import saved_by
from streams import on_a_late_stream
from test_attention import GRAPHS, assert_close, error, graph_of
from test_attention_cuda import poison, star
from test_reduction import TIES, features

import edgeless
from edgeless import Graph, functional

pytestmark = pytest.mark.cuda
DEVICE = "cuda"


def both(graph, x, reduce, moved_graph=None, **options):
    """Output and gradient on CUDA and on the CPU in float64."""
    poison()
    moved = x.detach().to(DEVICE).requires_grad_()
    out = functional.neighbor_reduce(moved_graph or graph.to(DEVICE), moved, reduce, **options)
    gen = torch.Generator().manual_seed(4)
    grad = torch.randn(out.shape, dtype=torch.float64, generator=gen).to(out.dtype)
    found = [out, *torch.autograd.grad(out, [moved], grad.to(DEVICE))]
    exact = x.detach().double().requires_grad_()
    with edgeless.backend("reference"):
        expected = functional.neighbor_reduce(graph, exact, reduce, **options)
    return [t.detach().cpu() for t in found], [expected, *torch.autograd.grad(expected, [exact], grad.double())]


@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("reduce", ["min", "max"])
@pytest.mark.parametrize("ties", TIES)
def test_every_graph_and_rule(kind, reduce, ties):
    for index_dtype in (torch.int32, torch.int64):
        graph = graph_of(kind, index_dtype)
        for width in (1, 7, 24, 100):
            for tied in (False, True):
                found, expected = both(graph, features(graph, width, ties=tied), reduce, ties=ties)
                assert torch.equal(found[0], expected[0])
                assert_close(found[1:], expected[1:], 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [5, 40, 256, 520])  # 5: the gradient is sent, else gathered
@pytest.mark.parametrize("ties", TIES)
def test_other_dtypes(dtype, width, ties):
    tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]  # one rounding of the sum
    for kind in ("hub", "square"):
        graph = graph_of(kind)
        moved = graph.to(DEVICE)
        moved.max_in_degree  # noqa: B018  a narrow argument
        for tied in (False, True):
            for reduce in ("min", "max"):
                for handle in (None, moved):
                    x = features(graph, width, dtype, ties=tied)
                    found, expected = both(graph, x, reduce, handle, ties=ties)
                    assert torch.equal(found[0], expected[0].to(dtype))
                    assert_close(found[1:], expected[1:], tolerance)


@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_high_degree(ties, dtype):
    """The gradient is sent."""
    gen = torch.Generator().manual_seed(2)
    graph = Graph.from_edge_index(torch.randint(0, 40, (2, 40 * 200), generator=gen), 40, 40)
    for tied in (False, True):
        found, expected = both(graph, features(graph, 264, dtype, ties=tied), "max", ties=ties)
        assert torch.equal(found[0], expected[0].to(dtype))
        assert_close(found[1:], expected[1:], {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype])


def test_wide_indices():
    graph = graph_of("hub")
    moved = graph.to(DEVICE)
    wide = Graph(*[type(c)(*[None if t is None else t.long() for t in c]) for c in (moved.csr, moved.csc)], 50, 40)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for ties in TIES:
            found, expected = both(graph, features(graph, 20, dtype, ties=True), "max", wide, ties=ties)
            assert torch.equal(found[0], expected[0].to(dtype))
            assert_close(found[1:], expected[1:], 8e-3)


@pytest.mark.parametrize("reduce", ["min", "max"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_nan_and_infinities(reduce, dtype):
    graph = Graph.from_edge_index(torch.tensor([[0, 1, 2, 3, 4, 0, 1], [0, 0, 1, 1, 2, 3, 0]]), 5, 5)
    x = torch.tensor([[1.0], [float("nan")], [-float("inf")], [float("inf")], [-float("inf")]], dtype=dtype)
    with edgeless.backend("reference"):
        wanted = functional.neighbor_reduce(graph, x, reduce, ties="scatter")
    for ties in TIES:
        found = functional.neighbor_reduce(graph.to(DEVICE), x.to(DEVICE), reduce, ties=ties)
        torch.testing.assert_close(found.cpu(), wanted, equal_nan=True)
    leaf = x.to(DEVICE).requires_grad_()
    out = functional.neighbor_reduce(graph.to(DEVICE), leaf, reduce, ties="first")
    (grad,) = torch.autograd.grad(out[0].sum(), leaf)
    assert grad.flatten().tolist() == [0, 1, 0, 0, 0]  # the first NaN takes it


def test_nan_deep_in_a_hub():
    graph = star(50_000)
    x = torch.randn(graph.num_src, 24, dtype=torch.float32)
    row = int(graph.in_degrees().argmax())
    sources = graph.csr.indices[graph.csr.indptr[row] : graph.csr.indptr[row + 1]].long()
    for node in sources[30_000:30_003]:
        x[node, 3] = float("nan")
    leaf = x.to(DEVICE).requires_grad_()
    out = functional.neighbor_reduce(graph.to(DEVICE), leaf, "max", ties="first")
    assert out[row, 3].isnan() and out[row].isnan().sum() == 1
    (grad,) = torch.autograd.grad(out[row, 3], leaf)
    first = sources[x[sources, 3].isnan()][0]
    assert grad[first, 3] == 1 and grad.abs().sum() == 1


def test_gradients_that_are_not_finite():
    graph = Graph.from_edge_index(torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 2, 3, 4, 5]]), 3, 6).to(DEVICE)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for ties in TIES:
            x = torch.ones(3, 2, device=DEVICE, dtype=dtype).requires_grad_()
            out = functional.neighbor_reduce(graph, x, "max", ties=ties)
            inf, nan = float("inf"), float("nan")
            grad = torch.tensor([[inf, 1], [1, 2], [1, 3], [inf, 4], [-inf, nan], [2, 0.5]], device=DEVICE, dtype=dtype)
            (found,) = torch.autograd.grad(out, x, grad)
            expected = torch.tensor([[inf, 6], [nan, nan], [2, 0.5]], dtype=dtype)
            torch.testing.assert_close(found.cpu(), expected, equal_nan=True)


def test_gradients_of_many_magnitudes():
    """Whole numbers carry the sums: beside a gradient of 1e6 the small ones keep their digits."""
    graph = graph_of("hub")  # 225 edges a row: sent
    x = features(graph, 40, torch.float32)
    scale = torch.logspace(-6, 6, 40)
    moved = x.detach().to(DEVICE).requires_grad_()
    out = functional.neighbor_reduce(graph.to(DEVICE), moved, "max", ties="first")
    (found,) = torch.autograd.grad(out, moved, scale.to(DEVICE).expand_as(out))
    with edgeless.backend("reference"):
        exact = x.detach().double().requires_grad_()
        expected = functional.neighbor_reduce(graph, exact, "max", ties="first")
    (wanted,) = torch.autograd.grad(expected, exact, scale.double().expand_as(expected))
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=1e-6, atol=0)


def test_fill_of_rows_without_edges():
    graph = Graph.from_edge_index(torch.tensor([[0], [1]]), 2, 3).to(DEVICE)
    out = functional.neighbor_reduce(graph, torch.ones(2, 4, device=DEVICE), "max", fill=-float("inf"))
    assert out[1].eq(1).all() and out[[0, 2]].eq(-float("inf")).all()


@pytest.mark.parametrize("degree,expected", [(256, torch.uint8), (257, torch.int16), (65536, torch.int16),
                                             (65537, torch.int32)])  # fmt: skip
def test_the_argument_is_as_narrow_as_the_degrees_allow(degree, expected):
    ends = torch.stack([torch.arange(degree), torch.zeros(degree, dtype=torch.int64)])
    graph = Graph.from_edge_index(ends.to(DEVICE))
    x = torch.zeros(degree, 3, device=DEVICE)
    x[-1] = 1.0  # the largest position there is
    x.requires_grad_()
    for times in range(3):  # the first calls do not know the degree and do not wait for it
        out = functional.neighbor_reduce(graph, x, "max", ties="first")
        (grad,) = torch.autograd.grad(out[0].sum(), x)
        assert grad[-1].eq(1).all() and grad[:-1].eq(0).all()
        if times == 1:
            torch.cuda.synchronize()
    assert expected in [t.dtype for t in saved_by(lambda: functional.neighbor_reduce(graph, x, "max", ties="first"))]


@pytest.mark.parametrize("degree", [127, 128, 129])
@pytest.mark.parametrize("ties", ["shared", "scatter"])
def test_all_edges_of_a_row_share(degree, ties):
    ends = torch.stack([torch.arange(degree), torch.zeros(degree, dtype=torch.int64)])
    graph = Graph.from_edge_index(ends)
    moved = graph.to(DEVICE)
    moved.max_in_degree  # noqa: B018
    found, expected = both(graph, torch.zeros(degree, 3, dtype=torch.float64), "max", moved, ties=ties)
    assert_close(found, expected, 1e-12)


@pytest.mark.parametrize("ties", ["shared", "scatter"])
@pytest.mark.parametrize("degree", [4, 70, 20_000])  # 20,000: pieces of a hub are merged
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parallel_edges_are_no_reason_to_share(ties, degree, dtype):
    """Row 0: parallel edges from node 1 alone have the maximum. Row 1: these, and one from node 2. Row 2: zeros."""
    gen = torch.Generator().manual_seed(8)
    low = torch.randint(10, 20, (degree,), generator=gen)
    sources = [torch.cat([low, torch.tensor(more)]) for more in ([1, 1, 1], [1, 1, 2], [3, 3])]
    sources = [row[torch.randperm(row.numel(), generator=gen)] for row in sources]
    rows = torch.repeat_interleave(torch.arange(3), torch.tensor([row.numel() for row in sources]))
    graph = Graph.from_edge_index(torch.stack([torch.cat(sources), rows]), 20, 3)
    x = torch.full((20, 9), -1.0, dtype=dtype)
    x[1:3], x[3] = 2.0, 0.0
    found, expected = both(graph, x, "max", ties=ties)
    assert_close(found, expected, 1e-12 if dtype == torch.float64 else 1e-6)
    _, _, tied = torch.ops.edgeless.neighbor_reduce(
        x.to(DEVICE), list(graph.to(DEVICE).csr), [], "max", 0.0, torch.int32, ties
    )
    assert tied.tolist() == [0, 1, 1 if ties == "scatter" else 0]


def test_gradcheck_and_refused_double_backward():
    graph = graph_of("square").to(DEVICE)
    x = features(graph, 3).detach().to(DEVICE).requires_grad_()
    for ties in TIES:
        assert torch.autograd.gradcheck(lambda x: functional.neighbor_reduce(graph, x, "max", ties=ties), [x])  # noqa: B023


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ties", TIES)
def test_bitwise_the_same_from_run_to_run(dtype, ties):
    graph = star(300_000)
    x = features(graph, 40, dtype, ties=True).detach()
    graph, results = graph.to(DEVICE), []
    for _ in range(20):
        moved = x.to(DEVICE).requires_grad_()
        out = functional.neighbor_reduce(graph, moved, "max", ties=ties)
        grad = torch.linspace(-1, 1, out.numel(), device=DEVICE).view_as(out).to(dtype)
        results.append((out, *torch.autograd.grad(out, moved, grad)))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def forward_backward(graph, x):
    results = []
    for ties in TIES:
        out = functional.neighbor_reduce(graph, x, "min", ties=ties)
        # Detached: a graph kept alive keeps the leaf's node on the stream that it was made on, which breaks a capture.
        results += [out.detach(), *torch.autograd.grad(out.square().sum(), x)]
    return results


def sample(graph):
    x = features(graph, 40, torch.float32, ties=True).detach().to(DEVICE).requires_grad_()
    graph = graph.to(DEVICE)
    return graph, x, forward_backward(graph, x)


def test_no_host_sync():
    graph, x, expected = sample(star(20_000))
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = forward_backward(graph, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_runs_on_the_current_stream():
    graph, x, expected = sample(star(20_000))
    found = on_a_late_stream(x, lambda late: forward_backward(graph, late))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_captured_in_a_cuda_graph():
    graph, x, expected = sample(star(20_000))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        forward_backward(graph, x)
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        found = forward_backward(graph, x)
    for t in found:
        t.detach().fill_(float("nan"))
    captured.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("ties", TIES)
def test_opcheck(ties):
    graph = graph_of("bipartite").to(DEVICE)
    csr, csc = ([t for t in c if t is not None] for c in (graph.csr, graph.csc))
    sample = (features(graph, 5).detach().to(DEVICE).requires_grad_(), csr, csc, "max", 0.0, torch.uint8, ties)
    torch.library.opcheck(torch.ops.edgeless.neighbor_reduce, sample)


def test_strided_inputs():
    graph = graph_of("square").to(DEVICE)
    wide = torch.randn(40, 34, device=DEVICE)
    for x in (wide[:, 5:15], wide[:, ::2], wide.t()[:10].t(), wide[:1, :12].expand(40, 12)):
        x = x.detach().requires_grad_()
        out = functional.neighbor_reduce(graph, x, "min")
        expected = functional.neighbor_reduce(graph, x.contiguous(), "min")
        assert torch.equal(out, expected)
        grad = torch.ones((), device=DEVICE).expand_as(out)
        found = [torch.autograd.grad(o, x, g)[0] for o, g in ((out, grad), (expected, grad.contiguous()))]
        assert error(*found) < 1e-6


def test_compiles_whole():
    graph = graph_of("square").to(DEVICE)
    x = features(graph, 12).detach().to(DEVICE).requires_grad_()
    torch._dynamo.reset()
    compiled = torch.compile(lambda g, x: functional.neighbor_reduce(g, x, "min"), fullgraph=True, backend="aot_eager")
    out, expected = compiled(graph, x), functional.neighbor_reduce(graph, x, "min")
    assert torch.equal(out, expected)
    assert_close(*([torch.autograd.grad(o.square().sum(), x)[0]] for o in (out, expected)), 1e-12)


def test_an_argument_of_another_type_is_refused():
    graph = graph_of("square").to(DEVICE)
    csr = [t for t in graph.csr if t is not None]
    with pytest.raises(ValueError, match="arg_dtype must be uint8, int16 or int32, got"):
        torch.ops.edgeless.neighbor_reduce(torch.zeros(40, 3, device=DEVICE), csr, [], "max", 0.0, torch.int64, "first")
