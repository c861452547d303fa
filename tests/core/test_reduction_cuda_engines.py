"""Every engine by which the gradient of min and max goes back on CUDA, each of them forced (docs/design.md)."""

import itertools

import pytest
import torch
from attention_cases import GRAPHS, assert_close, graph_of
from devices import poison, star
from test_reduction import TIES, features

import edgeless
from edgeless import _C, Graph, functional
from edgeless.choices.scoped import block
from edgeless.functional.aggregation import _arg_dtype

pytestmark = pytest.mark.cuda
DEVICE = "cuda"
SHARED = ("shared_scatter", "cluster_scatter")  # sums in shared memory
ENGINES = ("gather", "scatter", *SHARED)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def allowed(engine, width, dtype, ties, wide=False):
    """Whether an engine takes such inputs: on the small graphs here, shared memory holds every sum."""
    if engine == "scatter":
        return True
    if dtype == torch.float64 or (wide and engine == "gather"):
        return False
    return width % 8 == 0 if engine == "gather" else True


def forced(engine):
    """All gradients of extrema go back by this one."""
    return block(_C.gradient_choice, engine)


def backward(graph, x, grad, reduce, ties, engine, forward=None):
    csr, csc = graph.csr_arrays(True), graph.csc_arrays(True)
    forward = forward or torch.ops.edgeless.neighbor_reduce(x, csr, [], reduce, 0.0, _arg_dtype(graph, ties), ties)
    poison(DEVICE)
    with forced(engine):
        return torch.ops.edgeless.neighbor_reduce_backward(grad, x, *forward, csr, csc, reduce, ties)


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


def taken(graph, forward, grad):
    """What every source takes where one edge takes an element, in float64: the argument names the edge."""
    indptr, indices = graph.csr.indptr.long(), graph.csr.indices.long()
    rows = (indptr.diff() > 0).nonzero().flatten()
    at = forward[1].long() & 0xFFFF if forward[1].dtype == torch.int16 else forward[1].long()
    sources = indices[indptr[rows].unsqueeze(1) + at[rows]]
    total = torch.zeros(graph.num_src, grad.size(1), dtype=torch.float64, device=grad.device)
    return total.scatter_add_(0, sources, grad.double()[rows])


def long_rows():
    """Rows around the windows of a histogram and the words of an argument."""
    gen = torch.Generator().manual_seed(3)
    lengths = torch.tensor([0, 1, 31, 32, 33, 255, 256, 257, 0, 511, 513, 3000, 2])
    dst = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    order = torch.randperm(len(dst), generator=gen)
    return Graph.from_edge_index(torch.stack([torch.randint(0, 300, dst.shape, generator=gen), dst])[:, order], 300, 13)


@pytest.mark.parametrize("engine,ties", list(itertools.product(ENGINES, TIES)))
def test_every_graph(engine, ties):
    dtype = torch.float32
    for kind in (*GRAPHS, "long rows"):
        graph = long_rows() if kind == "long rows" else graph_of(kind)
        for moved in (graph.to(DEVICE), narrow(graph)):
            for tied in (False, True):
                for width in (5, 24, 264):
                    if not allowed(engine, width, dtype, ties):
                        continue
                    x, grad = (
                        features(graph, width, dtype, ties=tied).detach(),
                        gradients(graph, width, dtype),
                    )
                    found = backward(moved, x.to(DEVICE), grad.to(DEVICE), "min", ties, engine)
                    assert_close([found.cpu()], [wanted(graph, x, grad, "min", ties)], TOLERANCE[dtype])


@pytest.mark.parametrize(
    "engine,dtype",
    [(w, d) for w in ENGINES for d in TOLERANCE if any(allowed(w, 8, d, ties) for ties in ("first", "scatter"))],
)
def test_every_width_and_type(engine, dtype):
    graph = long_rows()
    moved = narrow(graph)
    for width in (*range(1, 18), 31, 32, 33, 64, 100, 127, 128, 129, 255, 256, 257):
        for ties in ("first", "scatter"):
            if not allowed(engine, width, dtype, ties):
                continue
            x, grad = features(graph, width, dtype).detach(), gradients(graph, width, dtype)
            found = backward(moved, x.to(DEVICE), grad.to(DEVICE), "max", ties, engine)
            assert_close([found.cpu()], [wanted(graph, x, grad, "max", ties)], TOLERANCE[dtype])


@pytest.mark.parametrize("engine", [w for w in ENGINES if w != "gather"])
def test_wide_indices(engine):
    graph = long_rows()
    moved = graph.to(DEVICE)
    wide = Graph(*[type(c)(*[None if t is None else t.long() for t in c]) for c in (moved.csr, moved.csc)], 300, 13)
    for ties in TIES:
        x, grad = features(graph, 20, torch.float32, ties=True).detach(), gradients(graph, 20, torch.float32)
        found = backward(wide, x.to(DEVICE), grad.to(DEVICE), "max", ties, engine)
        assert_close([found.cpu()], [wanted(graph, x, grad, "max", ties)], TOLERANCE[torch.float32])


@pytest.mark.parametrize(
    "engine,dtype", [(w, d) for w in ENGINES for d in (torch.float32, torch.bfloat16) if allowed(w, 40, d, "first")]
)
def test_hubs_and_the_same_bits(engine, dtype):
    graph = star()
    moved = narrow(graph)
    for ties in TIES:
        if not allowed(engine, 40, dtype, ties):
            continue
        x, grad = features(graph, 40, dtype, ties=True).detach(), gradients(graph, 40, dtype)
        given = x.to(DEVICE), grad.to(DEVICE)
        found = [backward(moved, *given, "max", ties, engine) for _ in range(5)]
        assert all(torch.equal(found[0], other) for other in found[1:])
        assert_close([found[0].cpu()], [wanted(graph, x, grad, "max", ties)], TOLERANCE[dtype])


@pytest.mark.parametrize("engine", SHARED)
@pytest.mark.parametrize("ties", TIES)
def test_sums_in_shared_memory_are_those_that_are_sent(engine, ties):
    graph = star(100_000, 2000)
    moved = graph.to(DEVICE)
    for width in (3, 72):
        x, grad = (
            features(graph, width, torch.float32).detach().to(DEVICE),
            gradients(graph, width, torch.float32).to(DEVICE),
        )
        found = [backward(moved, x, grad * 1e-3, "min", ties, w) for w in (engine, "scatter")]
        assert torch.equal(*found)


@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_of_many_magnitudes(engine):
    graph = graph_of("hub")
    dtype = torch.float32
    x = features(graph, 40, dtype).detach()
    grad = torch.logspace(-6, 6, 40).expand(graph.num_dst, 40).contiguous().to(dtype)
    found = backward(graph.to(DEVICE), x.to(DEVICE), grad.to(DEVICE), "max", "first", engine)
    torch.testing.assert_close(
        found.cpu().double(), wanted(graph, x, grad, "max", "first"), rtol=TOLERANCE[dtype], atol=0
    )


@pytest.mark.parametrize("engine,ties", list(itertools.product(ENGINES, TIES)))
def test_gradients_that_are_not_finite(engine, ties):
    graph = Graph.from_edge_index(torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 2, 3, 4, 5]]), 3, 6).to(DEVICE)
    inf, nan = float("inf"), float("nan")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        if not allowed(engine, 8, dtype, ties):
            continue
        x = torch.ones(3, 8, device=DEVICE, dtype=dtype)
        grad = torch.tensor([[inf, 1], [1, 2], [1, 3], [inf, 4], [-inf, nan], [2, 0.5]], device=DEVICE, dtype=dtype)
        found = backward(graph, x, grad.repeat(1, 4), "max", ties, engine)
        expected = torch.tensor([[inf, 6], [nan, nan], [2, 0.5]], dtype=dtype).repeat(1, 4)
        torch.testing.assert_close(found.cpu(), expected, equal_nan=True)


@pytest.mark.parametrize("engine", ENGINES)
def test_nan_and_infinite_features(engine):
    graph = long_rows()
    moved = narrow(graph)
    dtype = torch.float32
    for value in (float("nan"), float("inf"), -float("inf")):
        x, grad = features(graph, 32, dtype).detach(), gradients(graph, 32, dtype)
        x[::17] = value
        csr = moved.csr_arrays(True)
        forward = torch.ops.edgeless.neighbor_reduce(
            x.to(DEVICE), csr, [], "max", 0.0, _arg_dtype(moved, "first"), "first"
        )
        expected = taken(moved, forward, grad.to(DEVICE))
        found = backward(moved, x.to(DEVICE), grad.to(DEVICE), "max", "first", engine, forward)
        assert_close([found], [expected.float()], TOLERANCE[dtype])


@pytest.mark.parametrize("engine", ENGINES)
def test_strided_gradients(engine):
    graph = long_rows()
    dtype = torch.float32
    x = features(graph, 24, dtype).detach().to(DEVICE)
    wide = torch.randn(24, 26, device=DEVICE).to(dtype)
    for grad in (wide[:13, :24], wide[:, :13].t(), wide[:1, :24].expand(13, 24), wide[0, 0].expand(13, 24)):
        found = [backward(graph.to(DEVICE), x, g, "max", "first", engine) for g in (grad, grad.contiguous())]
        assert torch.equal(*found)


@pytest.mark.parametrize("engine", ENGINES)
def test_captured_in_a_cuda_graph_without_a_sync(engine):
    graph = star(20_000)
    moved = narrow(graph)
    dtype = torch.float32
    x, grad = features(graph, 40, dtype).detach().to(DEVICE), gradients(graph, 40, dtype).to(DEVICE)
    csr, csc = moved.csr_arrays(True), moved.csc_arrays(True)
    forward = torch.ops.edgeless.neighbor_reduce(x, csr, [], "max", 0.0, _arg_dtype(moved, "first"), "first")

    def call():
        with forced(engine):
            return torch.ops.edgeless.neighbor_reduce_backward(grad, x, *forward, csr, csc, "max", "first")

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


def test_an_engine_that_the_inputs_do_not_allow_is_refused():
    graph = graph_of("square").to(DEVICE)
    for engine, width, dtype, ties in (
        ("gather", 5, torch.float32, "first"),
        ("gather", 8, torch.float64, "first"),
        ("shared_scatter", 8, torch.float64, "first"),
    ):
        x = torch.zeros(40, width, device=DEVICE, dtype=dtype)
        grad = torch.zeros(graph.num_dst, width, device=DEVICE, dtype=dtype)
        with pytest.raises(ValueError, match=f"engine must be one that these inputs allow, got '{engine}'"):
            backward(graph, x, grad, "max", ties, engine)


def rows_of(lengths, num_src, source=None, ids=True):
    """Rows of these lengths, every other edge from ``source`` if there is one; edges are shuffled with ``ids``."""
    gen = torch.Generator().manual_seed(6)
    src = torch.randint(0, num_src, (sum(lengths),), generator=gen)
    if source is not None:
        src[::2] = source
    indptr = torch.tensor([0, *lengths]).cumsum(0)
    edge_ids = torch.randperm(len(src), generator=gen) if ids else None
    return Graph.from_csr(indptr, src, num_src, edge_ids=edge_ids).to(DEVICE)


def random_numbers(rows, width, dtype, seed=8):
    gen = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(rows, width, generator=gen, device=DEVICE).to(dtype)


def assert_taken(graph, width, dtype):
    """Gathered, equal to what the argument says, for every type of the argument, and the same bits again."""
    engine = "gather"
    x, grad = random_numbers(graph.num_src, width, dtype), random_numbers(graph.num_dst, width, dtype, seed=9)
    longest = int(graph.in_degrees().max())
    for arg in (torch.uint8, torch.int16, torch.int32):
        if longest > 2 ** (8 * arg.itemsize):
            continue
        forward = torch.ops.edgeless.neighbor_reduce(x, graph.csr_arrays(True), [], "max", 0.0, arg, "first")
        found = [backward(graph, x, grad, "max", "first", engine, forward) for _ in range(3)]
        assert_close([found[0]], [taken(graph, forward, grad)], TOLERANCE[dtype])
        assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


ROWS = {
    "short rows": ([0, 1, 2, 3, 4, 5, 0, 0, 7, 8, 9, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256] * 8, 90),
    "rows like most": ([20, 18, 0, 25, 19, 17] * 60, 300),
    "long rows": ([1023, 0, 1024, 1025, 2048, 1, 2049, 3500, 3], 400),
    "a hub": ([2, 70_000, 0, 5, 200], 400),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [8, 128, 136, 512, 520, 1032])
@pytest.mark.parametrize("kind", ROWS)
def test_rows_of_every_width(kind, width, dtype):
    assert_taken(rows_of(*ROWS[kind]), width, dtype)


@pytest.mark.parametrize("kind", ROWS)
def test_rows_of_edges_without_ids(kind):
    lengths, num_src = ROWS[kind]
    graph = rows_of(lengths, num_src, ids=False)
    assert graph.csr.edge_ids is None
    for dtype in (torch.float16, torch.float32):
        assert_taken(graph, 264, dtype)
        assert_taken(graph.reverse(), 264, dtype)  # whose transpose has none


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [72, 256, 640])
def test_rows_of_a_source_with_most_edges(width, dtype):
    """Its segments are kept by many blocks and merged."""
    assert_taken(rows_of([40] * 4000, 50, source=17), width, dtype)
