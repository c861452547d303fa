"""Every way in which the gradient of min and max goes back on CUDA, each of them forced (docs/design.md)."""

import pytest
import torch
from test_attention import GRAPHS, assert_close, graph_of
from test_attention_cuda import poison, star
from test_reduction import TIES, features

import edgeless
from edgeless import Graph, functional
from edgeless.aggregation import _arg_dtype
from edgeless.functional_checks import arrays

pytestmark = pytest.mark.cuda
DEVICE = "cuda"
OWN = ("own-1", "own-2")  # owners of the sums in shared memory
WAYS = ("gather", "send", *OWN)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def allowed(way, width, dtype, ties, wide=False):
    """Whether a way takes such inputs: on the small graphs here, shared memory holds every sum."""
    if way == "send":
        return True
    if dtype == torch.float64 or (wide and way == "gather"):
        return False
    return width % 8 == 0 if way == "gather" else True


def backward(graph, x, grad, reduce, ties, way, forward=None):
    csr, csc = arrays(graph.csr), arrays(graph.csc)
    forward = forward or torch.ops.edgeless.neighbor_reduce(x, csr, [], reduce, 0.0, _arg_dtype(graph, ties), ties)
    poison()
    return torch.ops.edgeless.neighbor_reduce_backward(grad, x, *forward, csr, csc, reduce, ties, way)


def gradients(graph, width, dtype, seed=4):
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(graph.num_dst, width, dtype=torch.float64, generator=gen).to(dtype)


def wanted(graph, x, grad, reduce, ties):
    exact = x.detach().double().requires_grad_()
    with edgeless.backend("reference"):
        out = functional.neighbor_reduce(graph, exact, reduce, ties=ties)
    return torch.autograd.grad(out, exact, grad.double())[0]


def narrow(graph):
    moved = graph.to(DEVICE)
    moved.max_in_degree  # noqa: B018  a narrow argument
    return moved


def long_rows():
    """Rows around the windows of a histogram and the words of an argument."""
    gen = torch.Generator().manual_seed(3)
    lengths = torch.tensor([0, 1, 31, 32, 33, 255, 256, 257, 0, 511, 513, 3000, 2])
    dst = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    order = torch.randperm(len(dst), generator=gen)
    return Graph.from_edge_index(torch.stack([torch.randint(0, 300, dst.shape, generator=gen), dst])[:, order], 300, 13)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ties", TIES)
def test_every_graph(way, ties):
    for kind in (*GRAPHS, "long rows"):
        graph = long_rows() if kind == "long rows" else graph_of(kind)
        for moved in (graph.to(DEVICE), narrow(graph)):
            for tied in (False, True):
                for width in (5, 24, 264):
                    if not allowed(way, width, torch.float32, ties):
                        continue
                    x, grad = (
                        features(graph, width, torch.float32, ties=tied).detach(),
                        gradients(graph, width, torch.float32),
                    )
                    found = backward(moved, x.to(DEVICE), grad.to(DEVICE), "min", ties, way)
                    assert_close([found.cpu()], [wanted(graph, x, grad, "min", ties)], 1e-6)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_width_and_type(way, dtype):
    graph = long_rows()
    moved = narrow(graph)
    for width in (*range(1, 18), 31, 32, 33, 64, 100, 127, 128, 129, 255, 256, 257):
        for ties in ("first", "scatter"):
            if not allowed(way, width, dtype, ties):
                continue
            x, grad = features(graph, width, dtype).detach(), gradients(graph, width, dtype)
            found = backward(moved, x.to(DEVICE), grad.to(DEVICE), "max", ties, way)
            assert_close([found.cpu()], [wanted(graph, x, grad, "max", ties)], TOLERANCE[dtype])


@pytest.mark.parametrize("way", [w for w in WAYS if w != "gather"])
def test_wide_indices(way):
    graph = long_rows()
    moved = graph.to(DEVICE)
    wide = Graph(*[type(c)(*[None if t is None else t.long() for t in c]) for c in (moved.csr, moved.csc)], 300, 13)
    for ties in TIES:
        x, grad = features(graph, 20, torch.float32, ties=True).detach(), gradients(graph, 20, torch.float32)
        found = backward(wide, x.to(DEVICE), grad.to(DEVICE), "max", ties, way)
        assert_close([found.cpu()], [wanted(graph, x, grad, "max", ties)], 1e-6)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hubs_and_the_same_bits(way, dtype):
    graph = star()
    moved = narrow(graph)
    for ties in TIES:
        if not allowed(way, 40, dtype, ties):
            continue
        x, grad = features(graph, 40, dtype, ties=True).detach(), gradients(graph, 40, dtype)
        given = x.to(DEVICE), grad.to(DEVICE)
        found = [backward(moved, *given, "max", ties, way) for _ in range(5)]
        assert all(torch.equal(found[0], other) for other in found[1:])
        assert_close([found[0].cpu()], [wanted(graph, x, grad, "max", ties)], TOLERANCE[dtype])


@pytest.mark.parametrize("way", OWN)
@pytest.mark.parametrize("ties", TIES)
def test_sums_in_shared_memory_are_those_that_are_sent(way, ties):
    graph = star(100_000, 2000)
    moved = graph.to(DEVICE)
    for width in (3, 72):
        x, grad = (
            features(graph, width, torch.float32).detach().to(DEVICE),
            gradients(graph, width, torch.float32).to(DEVICE),
        )
        found = [backward(moved, x, grad * 1e-3, "min", ties, w) for w in (way, "send")]
        assert torch.equal(*found)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_many_magnitudes(way):
    graph = graph_of("hub")
    x = features(graph, 40, torch.float32).detach()
    grad = torch.logspace(-6, 6, 40).expand(graph.num_dst, 40).contiguous()
    found = backward(graph.to(DEVICE), x.to(DEVICE), grad.to(DEVICE), "max", "first", way)
    torch.testing.assert_close(found.cpu().double(), wanted(graph, x, grad, "max", "first"), rtol=1e-6, atol=0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ties", TIES)
def test_gradients_that_are_not_finite(way, ties):
    graph = Graph.from_edge_index(torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 2, 3, 4, 5]]), 3, 6).to(DEVICE)
    inf, nan = float("inf"), float("nan")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        if not allowed(way, 8, dtype, ties):
            continue
        x = torch.ones(3, 8, device=DEVICE, dtype=dtype)
        grad = torch.tensor([[inf, 1], [1, 2], [1, 3], [inf, 4], [-inf, nan], [2, 0.5]], device=DEVICE, dtype=dtype)
        found = backward(graph, x, grad.repeat(1, 4), "max", ties, way)
        expected = torch.tensor([[inf, 6], [nan, nan], [2, 0.5]], dtype=dtype).repeat(1, 4)
        torch.testing.assert_close(found.cpu(), expected, equal_nan=True)


@pytest.mark.parametrize("way", WAYS)
def test_nan_and_infinite_features(way):
    graph = long_rows()
    moved = narrow(graph)
    for value in (float("nan"), float("inf"), -float("inf")):
        x, grad = features(graph, 32, torch.float32).detach(), gradients(graph, 32, torch.float32)
        x[::17] = value
        csr = arrays(moved.csr)
        forward = torch.ops.edgeless.neighbor_reduce(
            x.to(DEVICE), csr, [], "max", 0.0, _arg_dtype(moved, "first"), "first"
        )
        rows = (moved.csr.indptr.diff() > 0).nonzero().flatten()
        at = forward[1].long() & 0xFFFF
        sources = moved.csr.indices[moved.csr.indptr[rows].long().unsqueeze(1) + at[rows]].long()
        expected = torch.zeros(300, 32, dtype=torch.float64, device=DEVICE)
        expected.scatter_add_(0, sources, grad.to(DEVICE).double()[rows])
        found = backward(moved, x.to(DEVICE), grad.to(DEVICE), "max", "first", way, forward)
        assert_close([found], [expected.float()], 1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_strided_gradients(way):
    graph = long_rows()
    x = features(graph, 24, torch.float32).detach().to(DEVICE)
    wide = torch.randn(24, 26, device=DEVICE)
    for grad in (wide[:13, :24], wide[:, :13].t(), wide[:1, :24].expand(13, 24), wide[0, 0].expand(13, 24)):
        found = [backward(graph.to(DEVICE), x, g, "max", "first", way) for g in (grad, grad.contiguous())]
        assert torch.equal(*found)


@pytest.mark.parametrize("way", WAYS)
def test_captured_in_a_cuda_graph_without_a_sync(way):
    graph = star(20_000)
    moved = narrow(graph)
    x, grad = features(graph, 40, torch.float32).detach().to(DEVICE), gradients(graph, 40, torch.float32).to(DEVICE)
    csr, csc = arrays(moved.csr), arrays(moved.csc)
    forward = torch.ops.edgeless.neighbor_reduce(x, csr, [], "max", 0.0, _arg_dtype(moved, "first"), "first")
    call = lambda: torch.ops.edgeless.neighbor_reduce_backward(grad, x, *forward, csr, csc, "max", "first", way)  # noqa: E731
    expected = call()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    captured = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(captured):
        found = call()
    found.fill_(float("nan"))
    captured.replay()
    assert torch.equal(found, expected)


def test_a_way_that_the_inputs_do_not_allow_is_refused():
    graph = graph_of("square").to(DEVICE)
    for way, width, dtype, ties in (
        ("gather", 5, torch.float32, "first"),
        ("own-1", 8, torch.float64, "first"),
        ("own-3", 8, torch.float32, "first"),
        ("any", 8, torch.float32, "first"),
    ):
        x = torch.zeros(40, width, device=DEVICE, dtype=dtype)
        grad = torch.zeros(graph.num_dst, width, device=DEVICE, dtype=dtype)
        with pytest.raises(ValueError, match=f"way must be one that these inputs allow, got '{way}'"):
            backward(graph, x, grad, "max", ties, way)
