"""SpMM and SDDMM on CUDA against plain PyTorch in float64: the suite of test_spmm.py, and what only a GPU
can get wrong: every kernel instance, slices, hubs over many blocks, streams, graph capture, syncs, 2**31 elements.
"""

import pytest
import torch
from streams import on_a_late_stream
from test_attention import GRAPHS, assert_close, error, graph_of
from test_attention_cuda import poison, star
from test_spmm import leaf

from edgeless import Graph, functional, reference

pytestmark = pytest.mark.cuda
DEVICE = "cuda"


def on_cuda(t):
    return None if t is None else t.detach().to(DEVICE).requires_grad_(t.requires_grad)


def both(graph, x, weight, **options):
    """Output and gradients on CUDA, and plain ones in float64 on the CPU."""
    poison()
    leaves = [t for t in (x, weight) if t is not None]
    moved = [on_cuda(t) for t in leaves]
    out = functional.spmm(graph.to(DEVICE), moved[0], moved[1] if weight is not None else None, **options)
    grad = leaf(*out.shape, seed=9).detach()
    found = [out, *torch.autograd.grad(out, moved, grad.to(DEVICE, out.dtype))]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    with edgeless_reference():
        wanted = functional.spmm(graph, exact[0], exact[1] if weight is not None else None, **options)
    return [t.detach().cpu() for t in found], [wanted, *torch.autograd.grad(wanted, exact, grad)]


def edgeless_reference():
    import edgeless

    return edgeless.backend("reference")


@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("norm", ["none", "left", "right", "both"])
@pytest.mark.parametrize("weighted", [False, True])
def test_norms_on_every_graph(kind, norm, weighted):
    for index_dtype in (torch.int32, torch.int64):
        graph = graph_of(kind, index_dtype)
        weight = leaf(graph.num_edges) if weighted else None
        for reduce in ("sum", "mean"):
            assert_close(*both(graph, leaf(graph.num_src, 20), weight, norm=norm, reduce=reduce), 1e-10)


# Widths for vectors of 16, 8 and 4 bytes and copies, whole and with tails; teams of 8, 16 and 32 lanes; several slices.
WIDTHS = [(1,), (7,), (24,), (64,), (66,), (100,), (260,), (512,), (1000,), (2, 40), (3, 2, 5), (4, 7), (8, 64)]
BOUND = {torch.float32: 1e-5, torch.float64: 1e-10, torch.bfloat16: 8e-3, torch.float16: 1e-3}


@pytest.mark.parametrize("shape", WIDTHS)
@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("kind", ["hub", "square"])
def test_every_width(shape, dtype, kind):
    graph = graph_of(kind)
    x = leaf(graph.num_src, *shape, dtype=dtype)
    weights = [None, leaf(graph.num_edges, dtype=dtype, seed=1)]
    if len(shape) == 2:
        weights.append(leaf(graph.num_edges, shape[0], dtype=dtype, seed=2))
    for weight in weights:
        assert_close(*both(graph, x, weight, norm="both"), BOUND[dtype])  # 16 bits: one rounding
    assert_close(*both(graph, x, None), BOUND[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [64, 33])
def test_sums_that_leave_in_float32(dtype, width):
    graph = graph_of("hub")
    x = leaf(graph.num_src, width, dtype=dtype)
    found, expected = both(graph, x, None, norm="both", out_dtype=torch.float32)
    assert found[0].dtype == torch.float32
    assert error(found[0], expected[0]) < 1e-5


def test_wide_indices():
    graph = graph_of("hub").to(DEVICE)
    wide = Graph(*[type(c)(*[None if t is None else t.long() for t in c]) for c in (graph.csr, graph.csc)], 50, 40)
    for shape, dtype in (
        ((40,), torch.float32),
        ((7,), torch.bfloat16),
        ((66,), torch.float16),
        ((3, 5), torch.float64),
    ):
        results = []
        for g in (graph, wide):
            x = leaf(50, *shape, dtype=dtype).detach().to(DEVICE).requires_grad_()
            weight = leaf(g.num_edges, dtype=dtype, seed=1).detach().to(DEVICE).requires_grad_()
            out = functional.spmm(g, x, weight, norm="both")
            results.append([out, *torch.autograd.grad(out.float().square().sum(), [x, weight])])
        bound = BOUND[dtype] if dtype.itemsize == 2 else 1e-6
        assert all(error(a, b) <= bound for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("shape", [(5,), (40,), (3, 16), (200,), (520,), (2, 600), (1300,)])
def test_sddmm(dtype, shape):
    for kind in ("bipartite", "hub", "many empty rows", "no edges"):
        graph = graph_of(kind)
        a, b = leaf(graph.num_dst, *shape, dtype=dtype), leaf(graph.num_src, *shape, dtype=dtype, seed=1)
        grad = leaf(graph.num_edges, *shape[:-1], seed=2).detach()
        poison()
        moved = [on_cuda(t) for t in (a, b)]
        found = functional.sddmm_dot(graph.to(DEVICE), *moved)
        grads = torch.autograd.grad(found, moved, grad.to(DEVICE, found.dtype))
        exact = [t.detach().double().requires_grad_() for t in (a, b)]
        expected = reference.sddmm_dot(graph, *exact)
        wanted = [expected, *torch.autograd.grad(expected, exact, grad)]
        assert_close([t.detach().cpu() for t in (found, *grads)], wanted, BOUND[dtype])


def test_gradcheck_and_gradgradcheck():
    graph = Graph.from_edge_index(torch.tensor([[0, 1, 2, 2, 3, 3], [0, 0, 1, 2, 2, 2]]), 5, 4).to(DEVICE)
    x, weight, a, b = (on_cuda(leaf(*s)) for s in ((5, 2, 3), (6, 2), (4, 3), (5, 3)))
    for function, leaves in (
        (lambda x, weight: functional.spmm(graph, x, weight, norm="both"), [x, weight]),
        (lambda a, b: functional.sddmm_dot(graph, a, b), [a, b]),
    ):
        assert torch.autograd.gradcheck(function, leaves)
        assert torch.autograd.gradgradcheck(function, leaves)


def test_strided_and_expanded_inputs():
    graph = graph_of("square").to(DEVICE)
    wide = torch.randn(40, 34, dtype=torch.float64, device=DEVICE)
    for x in (wide[:, 5:15], wide[:, ::2], wide.t()[:10].t(), wide[:1, :10].expand(40, 10)):
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            part = wide.to(dtype)[:, 3:13] if x.is_contiguous() else x.to(dtype)
            weight = torch.randn(1, dtype=dtype, device=DEVICE).expand(graph.num_edges)
            expected = functional.spmm(graph, part.contiguous(), weight.contiguous())
            assert error(functional.spmm(graph, part, weight), expected) < 1e-6
    heads = torch.randn(40, 2, 6, device=DEVICE).transpose(1, 2)  # [40, 6, 2]
    weight = torch.randn(graph.num_edges, 6, device=DEVICE)
    assert error(functional.spmm(graph, heads, weight), functional.spmm(graph, heads.contiguous(), weight)) < 1e-6
    x = torch.randn(40, 8, device=DEVICE, requires_grad=True)
    functional.spmm(graph, x).sum().backward()  # an expanded gradient
    assert error(x.grad, graph.out_degrees().unsqueeze(1).expand(40, 8)) < 1e-6


# A hub with in-edges over many blocks, and its transpose.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [16, 512])
def test_bitwise_the_same_from_run_to_run(dtype, width):
    graph = star(300_000)
    x = leaf(graph.num_src, width, dtype=dtype).detach()
    results = []
    for _ in range(20):
        moved = x.to(DEVICE).requires_grad_()
        weight = torch.linspace(-1, 1, graph.num_edges, device=DEVICE).requires_grad_()
        out = functional.spmm(graph.to(DEVICE), moved, weight, norm="both")
        results.append([out, *torch.autograd.grad(out.float().square().sum(), [moved, weight])])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    exact = x.double()
    with edgeless_reference():
        expected = functional.spmm(graph, exact, torch.linspace(-1, 1, graph.num_edges).double(), norm="both")
    assert error(results[0][0].cpu(), expected) < (1e-4 if dtype == torch.float32 else 1e-2)


def forward_backward(graph, x, weight):
    out = functional.spmm(graph, x, weight, norm="both")
    # Detached: a graph kept alive keeps the leaves' nodes on the stream that they were made on, which breaks a capture.
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, weight])]


def sample(graph):
    x = leaf(graph.num_src, 40, dtype=torch.float32).detach().to(DEVICE).requires_grad_()
    weight = leaf(graph.num_edges, dtype=torch.float32, seed=1).detach().to(DEVICE).requires_grad_()
    graph = graph.to(DEVICE)
    return graph, x, weight, forward_backward(graph, x, weight)


def test_no_host_sync():
    graph, x, weight, expected = sample(star(20_000))
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = forward_backward(graph, x, weight)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_runs_on_the_current_stream():
    graph, x, weight, expected = sample(star(20_000))
    found = on_a_late_stream(x, lambda late: forward_backward(graph, late, weight))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_captured_in_a_cuda_graph():
    graph, x, weight, expected = sample(star(20_000))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        forward_backward(graph, x, weight)
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        found = forward_backward(graph, x, weight)
    for t in found:
        t.detach().fill_(float("nan"))
    captured.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_opcheck():
    graph = graph_of("bipartite").to(DEVICE)
    csr, csc = ([t for t in c if t is not None] for c in (graph.csr, graph.csc))
    d, s = graph.degree_scale("dst", -0.5, torch.float64), graph.degree_scale("src", -0.5, torch.float64)
    x, weight = on_cuda(leaf(50, 2, 8)), on_cuda(leaf(400, 2))
    torch.library.opcheck(torch.ops.edgeless.spmm, (x, weight, s, d, csr, csc, None))
    torch.library.opcheck(torch.ops.edgeless.spmm, (x.detach().bfloat16(), None, None, None, csr, [], torch.float32))
    torch.library.opcheck(torch.ops.edgeless.sddmm, (on_cuda(leaf(40, 2, 8)), x, s, d, csr, csc))


def test_compiles_whole():
    graph = graph_of("square").to(DEVICE)
    x, weight = on_cuda(leaf(40, 12)), on_cuda(leaf(graph.num_edges))
    torch._dynamo.reset()
    compiled = torch.compile(lambda *a: functional.spmm(*a, norm="both"), fullgraph=True, backend="aot_eager")
    out, expected = compiled(graph, x, weight), functional.spmm(graph, x, weight, norm="both")
    assert_close([out], [expected], 1e-12)
    grads = [torch.autograd.grad(o.square().sum(), [x, weight]) for o in (out, expected)]
    assert_close(*grads, 1e-12)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory < 60 << 30, reason="needs 60 GB"
)
def test_more_than_two_to_the_31_elements():
    nodes, width = 4_400_000, 512
    ends = torch.randint(nodes, (2, 1_000_000), device=DEVICE)
    ends[:, ::2] = nodes - 1 - ends[:, ::2] % 1000
    graph = Graph.from_edge_index(ends, nodes, nodes)
    x = torch.randn(nodes, width, device=DEVICE, dtype=torch.bfloat16)
    out = functional.spmm(graph, x)
    for row in (int(ends[1, 0]), int(ends[1, 1]), nodes - 1):
        expected = x[ends[0, ends[1] == row]].double().sum(0)
        assert error(out[row], expected) < 8e-3


def test_arrays_on_two_devices_are_refused():
    csr = [t for t in graph_of("square").csr if t is not None]
    x = torch.randn(40, 1, 8, device=DEVICE)
    with pytest.raises(ValueError, match="csr must be on cuda:0, got cpu"):
        torch.ops.edgeless.spmm(x, None, None, None, csr, [], None)
