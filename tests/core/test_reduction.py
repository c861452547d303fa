"""Min and max over in-neighbours against plain PyTorch in float64, on every device: ties, NaN, fills, widths of the
argument, gradients. On CUDA also hubs over many blocks, streams and graph capture.
"""

import pytest
import torch
from attention_cases import GRAPHS, assert_close, error, graph_of
from devices import (
    EVERY_DEVICE,
    EVERY_WAY,
    arrays_of,
    assert_same_bits,
    leaves_on,
    poison,
    star,
    with_wide_indices,
)
from saved import saved_by

import edgeless
from edgeless import Graph, functional

TIES = ("first", "shared", "scatter")
BOUND = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # one rounding of the sum


def features(graph, width, dtype=torch.float64, ties=False, seed=0):
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(graph.num_src, width, dtype=torch.float64, generator=gen)
    return ((x.round() + 0.0) if ties else x).to(dtype).requires_grad_()


def grad_of(out, x):
    gen = torch.Generator().manual_seed(4)
    return torch.randn(out.shape, dtype=torch.float64, generator=gen).to(x.dtype)


def ours(device, graph, x, reduce, **options):
    """Output and gradient on the device, where the graph may be already."""
    poison(device)
    leaf = x.detach().to(device).requires_grad_()
    out = functional.neighbor_reduce(graph.to(device), leaf, reduce, **options)
    return [t.detach().cpu() for t in (out, *torch.autograd.grad(out, [leaf], grad_of(out, x).to(device)))]


def exactly(graph, x, reduce, **options):
    """The same in float64."""
    leaf = x.detach().double().requires_grad_()
    with edgeless.backend("reference"):
        out = functional.neighbor_reduce(graph, leaf, reduce, **options)
    return [out, *torch.autograd.grad(out, [leaf], grad_of(out, x).double())]


def both(device, graph, x, reduce, handle=None, **options):
    """On the device with its own ``handle`` of the graph, where one is given, and in float64."""
    return ours(device, handle or graph, x, reduce, **options), exactly(graph, x, reduce, **options)


@EVERY_DEVICE
@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("reduce", ["min", "max"])
@pytest.mark.parametrize("ties", TIES)
def test_every_graph_and_rule(kind, reduce, ties, device):
    for index_dtype in (torch.int32, torch.int64):
        graph = graph_of(kind, index_dtype)
        for width in (1, 7, 24, 100):
            for tied in (False, True):
                found, expected = both(device, graph, features(graph, width, ties=tied), reduce, ties=ties)
                assert torch.equal(found[0], expected[0])
                assert_close(found[1:], expected[1:], 1e-12)


@EVERY_DEVICE
@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("width", [5, 40, 256, 520])  # 5: the gradient is sent, else gathered
@pytest.mark.parametrize("ties", TIES)
def test_other_dtypes(dtype, width, ties, device):
    for kind in ("hub", "square"):
        graph = graph_of(kind)
        handle = graph.to(device)
        handle.max_in_degree  # noqa: B018  a narrow argument
        for tied in (False, True):
            for reduce in ("min", "max"):
                x = features(graph, width, dtype, ties=tied)
                expected = exactly(graph, x, reduce, ties=ties)
                for given in (graph, handle) if handle is not graph else (graph,):
                    found = ours(device, given, x, reduce, ties=ties)
                    assert torch.equal(found[0], expected[0].to(dtype))  # one of the inputs: no rounding
                    # CUDA adds whole numbers; the CPU adds the shares of as many edges, in float32.
                    many = device == "cpu" and dtype == torch.float32 and ties != "first"
                    assert_close(found[1:], expected[1:], 1e-5 if many else BOUND[dtype])


@EVERY_DEVICE
@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize("dtype", BOUND)
def test_rows_of_high_degree(ties, dtype, device):
    """The gradient is sent."""
    gen = torch.Generator().manual_seed(2)
    graph = Graph.from_edge_index(torch.randint(0, 40, (2, 40 * 200), generator=gen), 40, 40)
    for tied in (False, True):
        found, expected = both(device, graph, features(graph, 264, dtype, ties=tied), "max", ties=ties)
        assert torch.equal(found[0], expected[0].to(dtype))
        assert_close(found[1:], expected[1:], BOUND[dtype])


@EVERY_DEVICE
def test_wide_indices(device):
    graph = graph_of("hub")
    wide = with_wide_indices(graph.to(device))
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for ties in TIES:
            found, expected = both(device, graph, features(graph, 20, dtype, ties=True), "max", wide, ties=ties)
            assert torch.equal(found[0], expected[0].to(dtype))
            assert_close(found[1:], expected[1:], 8e-3)


@EVERY_DEVICE
@pytest.mark.parametrize("reduce", ["min", "max"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_nan_and_infinities(reduce, dtype, device):
    graph = Graph.from_edge_index(torch.tensor([[0, 1, 2, 3, 4, 0, 1], [0, 0, 1, 1, 2, 3, 0]]), 5, 5)
    x = torch.tensor([[1.0], [float("nan")], [-float("inf")], [float("inf")], [-float("inf")]], dtype=dtype)
    with edgeless.backend("reference"):
        wanted = functional.neighbor_reduce(graph, x, reduce, ties="scatter")
    for ties in TIES:
        found = functional.neighbor_reduce(graph.to(device), x.to(device), reduce, ties=ties)
        torch.testing.assert_close(found.cpu(), wanted, equal_nan=True)
    leaf = x.to(device).requires_grad_()
    out = functional.neighbor_reduce(graph.to(device), leaf, reduce, ties="first")
    (grad,) = torch.autograd.grad(out[0].sum(), leaf)
    assert grad.flatten().tolist() == [0, 1, 0, 0, 0]  # the first NaN takes it


@EVERY_DEVICE
def test_gradients_that_are_not_finite(device):
    graph = Graph.from_edge_index(torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 2, 3, 4, 5]]), 3, 6).to(device)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for ties in TIES:
            x = torch.ones(3, 2, device=device, dtype=dtype).requires_grad_()
            out = functional.neighbor_reduce(graph, x, "max", ties=ties)
            inf, nan = float("inf"), float("nan")
            grad = torch.tensor([[inf, 1], [1, 2], [1, 3], [inf, 4], [-inf, nan], [2, 0.5]], device=device, dtype=dtype)
            (found,) = torch.autograd.grad(out, x, grad)
            expected = torch.tensor([[inf, 6], [nan, nan], [2, 0.5]], dtype=dtype)
            torch.testing.assert_close(found.cpu(), expected, equal_nan=True)


@EVERY_DEVICE
def test_gradients_of_many_magnitudes(device):
    """Whole numbers carry the sums: beside a gradient of 1e6 the small ones keep their digits."""
    graph = graph_of("hub")  # 225 edges a row: sent
    x = features(graph, 40, torch.float32)
    scale = torch.logspace(-6, 6, 40)
    moved = x.detach().to(device).requires_grad_()
    out = functional.neighbor_reduce(graph.to(device), moved, "max", ties="first")
    (found,) = torch.autograd.grad(out, moved, scale.to(device).expand_as(out))
    with edgeless.backend("reference"):
        exact = x.detach().double().requires_grad_()
        expected = functional.neighbor_reduce(graph, exact, "max", ties="first")
    (wanted,) = torch.autograd.grad(expected, exact, scale.double().expand_as(expected))
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=1e-6, atol=0)


@EVERY_DEVICE
def test_fill_of_rows_without_edges(device):
    graph = Graph.from_edge_index(torch.tensor([[0], [1]]), 2, 3).to(device)
    out = functional.neighbor_reduce(graph, torch.ones(2, 4, device=device), "max", fill=-float("inf"))
    assert out[1].eq(1).all() and out[[0, 2]].eq(-float("inf")).all()


@EVERY_DEVICE
@pytest.mark.parametrize("degree,expected", [(256, torch.uint8), (257, torch.int16), (65536, torch.int16),
                                             (65537, torch.int32)])  # fmt: skip
def test_the_argument_is_as_narrow_as_the_degrees_allow(degree, expected, device):
    ends = torch.stack([torch.arange(degree), torch.zeros(degree, dtype=torch.int64)])
    graph = Graph.from_edge_index(ends.to(device))
    x = torch.zeros(degree, 3, device=device)
    x[-1] = 1.0  # the largest position there is
    x.requires_grad_()
    for times in range(3):  # on CUDA the first calls do not know the degree, nor wait
        out = functional.neighbor_reduce(graph, x, "max", ties="first")
        (grad,) = torch.autograd.grad(out[0].sum(), x)
        assert grad[-1].eq(1).all() and grad[:-1].eq(0).all()
        if times == 1 and device == "cuda":
            torch.cuda.synchronize()
    assert expected in [t.dtype for t in saved_by(lambda: functional.neighbor_reduce(graph, x, "max", ties="first"))]


@EVERY_DEVICE
@pytest.mark.parametrize("degree", [127, 128, 129])
@pytest.mark.parametrize("ties", ["shared", "scatter"])
def test_all_edges_of_a_row_share(degree, ties, device):
    ends = torch.stack([torch.arange(degree), torch.zeros(degree, dtype=torch.int64)])
    graph = Graph.from_edge_index(ends)
    handle = graph.to(device)
    handle.max_in_degree  # noqa: B018
    found, expected = both(device, graph, torch.zeros(degree, 3, dtype=torch.float64), "max", handle, ties=ties)
    assert_close(found, expected, 1e-12)


@EVERY_DEVICE
@pytest.mark.parametrize("ties", ["shared", "scatter"])
@pytest.mark.parametrize("degree", [4, 70, 20_000])  # 20,000: segments of a hub are merged
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parallel_edges_are_no_reason_to_share(ties, degree, dtype, device):
    """Row 0: parallel edges from node 1 alone have the maximum. Row 1: these, and one from node 2. Row 2: zeros."""
    gen = torch.Generator().manual_seed(8)
    low = torch.randint(10, 20, (degree,), generator=gen)
    sources = [torch.cat([low, torch.tensor(more)]) for more in ([1, 1, 1], [1, 1, 2], [3, 3])]
    sources = [row[torch.randperm(row.numel(), generator=gen)] for row in sources]
    rows = torch.repeat_interleave(torch.arange(3), torch.tensor([row.numel() for row in sources]))
    graph = Graph.from_edge_index(torch.stack([torch.cat(sources), rows]), 20, 3)
    x = torch.full((20, 9), -1.0, dtype=dtype)
    x[1:3], x[3] = 2.0, 0.0
    found, expected = both(device, graph, x, "max", ties=ties)
    assert_close(found, expected, 1e-12 if dtype == torch.float64 else 1e-6)
    if device == "cuda":  # the CPU counts sources and edges when it needs them
        moved, csr = x.to(device), list(graph.to(device).csr)
        _, _, tied = torch.ops.edgeless.neighbor_reduce(moved, csr, [], "max", 0.0, torch.int32, ties)
        assert tied.tolist() == [0, 1, 1 if ties == "scatter" else 0]


@EVERY_DEVICE
def test_gradcheck(device):
    graph = graph_of("square").to(device)
    (x,) = leaves_on(device, [features(graph, 3)])
    for ties in TIES:
        assert torch.autograd.gradcheck(lambda x: functional.neighbor_reduce(graph, x, "max", ties=ties), [x])  # noqa: B023


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


@EVERY_DEVICE
@pytest.mark.skipif(not hasattr(torch.library, "opcheck"), reason="torch.library.opcheck came with torch 2.4")
@pytest.mark.parametrize("ties", TIES)
def test_opcheck(ties, device):
    graph = graph_of("bipartite").to(device)
    csr, csc = arrays_of(graph)
    sample = (*leaves_on(device, [features(graph, 5)]), csr, csc, "max", 0.0, torch.uint8, ties)
    torch.library.opcheck(torch.ops.edgeless.neighbor_reduce, sample)


@EVERY_DEVICE
def test_strided_inputs(device):
    graph = graph_of("square").to(device)
    wide = torch.randn(40, 34, device=device)
    for x in (wide[:, 5:15], wide[:, ::2], wide.t()[:10].t(), wide[:1, :12].expand(40, 12)):
        x = x.detach().requires_grad_()
        out = functional.neighbor_reduce(graph, x, "min")
        expected = functional.neighbor_reduce(graph, x.contiguous(), "min")
        assert torch.equal(out, expected)
        grad = torch.ones((), device=device).expand_as(out)
        found = [torch.autograd.grad(o, x, g)[0] for o, g in ((out, grad), (expected, grad.contiguous()))]
        assert error(*found) < 1e-6


@EVERY_DEVICE
def test_compiles_whole(device):
    graph = graph_of("square").to(device)
    (x,) = leaves_on(device, [features(graph, 12)])
    torch._dynamo.reset()
    compiled = torch.compile(lambda g, x: functional.neighbor_reduce(g, x, "min"), fullgraph=True, backend="aot_eager")
    out, expected = compiled(graph, x), functional.neighbor_reduce(graph, x, "min")
    assert torch.equal(out, expected)
    assert_close(*([torch.autograd.grad(o.square().sum(), x)[0]] for o in (out, expected)), 1e-12)


@EVERY_DEVICE
def test_an_argument_of_another_type_is_refused(device):
    graph = graph_of("square").to(device)
    csr, _ = arrays_of(graph)
    with pytest.raises(ValueError, match="arg_dtype must be uint8, int16 or int32, got"):
        torch.ops.edgeless.neighbor_reduce(torch.zeros(40, 3, device=device), csr, [], "max", 0.0, torch.int64, "first")


@pytest.mark.parametrize("args,kwargs,message", [
    ((torch.zeros(49, 3), "max"), {}, r"x must have shape \[Ns, F\] = \[50, \*\], got \[49, 3\]"),
    ((torch.zeros(50, 3), "sum"), {}, "reduce must be one of 'min', 'max', got 'sum'"),
    ((torch.zeros(50, 3), "max"), {"ties": "last"}, "ties must be one of 'shared', 'first', 'scatter', got 'last'"),
])  # fmt: skip
def test_bad_input_is_named(args, kwargs, message):
    with pytest.raises(ValueError, match=message):
        functional.neighbor_reduce(graph_of("bipartite"), *args, **kwargs)


# On CUDA ---------------------------------------------------------------------------------------------------------


@pytest.mark.cuda
def test_nan_deep_in_a_hub():
    graph = star(50_000)
    x = torch.randn(graph.num_src, 24, dtype=torch.float32)
    row = int(graph.in_degrees().argmax())
    sources = graph.csr.indices[graph.csr.indptr[row] : graph.csr.indptr[row + 1]].long()
    for node in sources[30_000:30_003]:
        x[node, 3] = float("nan")
    leaf = x.to("cuda").requires_grad_()
    out = functional.neighbor_reduce(graph.to("cuda"), leaf, "max", ties="first")
    assert out[row, 3].isnan() and out[row].isnan().sum() == 1
    (grad,) = torch.autograd.grad(out[row, 3], leaf)
    first = sources[x[sources, 3].isnan()][0]
    assert grad[first, 3] == 1 and grad.abs().sum() == 1


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ties", TIES)
def test_bitwise_the_same_from_run_to_run(dtype, ties):
    graph = star(300_000)
    x = features(graph, 40, dtype, ties=True).detach()
    graph, results = graph.to("cuda"), []
    for _ in range(20):
        moved = x.to("cuda").requires_grad_()
        out = functional.neighbor_reduce(graph, moved, "max", ties=ties)
        grad = torch.linspace(-1, 1, out.numel(), device="cuda").view_as(out).to(dtype)
        results.append((out, *torch.autograd.grad(out, moved, grad)))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.fixture
def steps():
    """A step by each rule over a hub, as a function of its rows, and these."""
    graph = star(20_000)
    (x,), graph = leaves_on("cuda", [features(graph, 40, torch.float32, ties=True)]), graph.to("cuda")

    def step(x):
        results = []
        for ties in TIES:
            out = functional.neighbor_reduce(graph, x, "min", ties=ties)
            results += [out.detach(), *torch.autograd.grad(out.square().sum(), x)]
        return results

    return step, [x]


@pytest.mark.cuda
@EVERY_WAY
def test_streams_and_captures(way, steps):
    assert_same_bits(way, *steps)


@EVERY_DEVICE
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("kind", ["square", "hub", "no edges"])
def test_positions_of_edges(kind, index_dtype, device):
    graph = graph_of(kind)
    indptr, _, ids = (t if t is None else t.long() for t in graph.csr)
    places = torch.arange(graph.num_edges) - indptr[:-1].repeat_interleave(indptr.diff())
    expected = places if ids is None else torch.empty_like(places).scatter_(0, ids, places)
    csr = [t.to(device, index_dtype) for t in graph.csr if t is not None]
    found = torch.ops.edgeless.edge_positions(csr)
    assert found.dtype == torch.int32
    assert torch.equal(found.cpu().long(), expected)


@EVERY_DEVICE
@pytest.mark.parametrize("ties", ["first", "shared", "scatter"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_positions_are_kept_with_a_graph_in_use(dtype, ties, device):
    """Not with one that a GPU has seen once; the gradient is the same bit by bit."""
    gen = torch.Generator().manual_seed(2)
    edge_index = torch.randint(0, 25_000, (2, 40_000), generator=gen)
    graph = Graph.from_edge_index(edge_index.to(device), 25_000, 25_000)
    x = torch.randn(25_000, 16, generator=gen).to(device, dtype).requires_grad_()
    gradients = []
    for _ in range(6):
        out = functional.neighbor_reduce(graph, x, "max", ties=ties)
        gradients += torch.autograd.grad(out, [x], 2 * out.detach() + 1)
        if device == "cuda":
            assert len(gradients) > 1 or "positions" not in graph._formats
            torch.cuda.synchronize()
    assert graph._formats["positions"].shape == (40_000,)
    assert graph.csc_with_positions()[3] is graph._formats["positions"]
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)
    csr, csc = arrays_of(graph)
    assert len(csc) == 3
    out, arg, tied = torch.ops.edgeless.neighbor_reduce(x.detach(), csr, csc, "max", 0.0, torch.int32, ties)
    saved = 2 * out + 1, x.detach(), out, arg, tied, csr
    without = torch.ops.edgeless.neighbor_reduce_backward(*saved, csc, "max", ties)
    assert torch.equal(without, gradients[0])


@EVERY_DEVICE
@pytest.mark.parametrize("positions,message", [
    (torch.zeros(3, dtype=torch.int32), "positions of csc must have shape"),
    (torch.zeros(4, dtype=torch.int64), "positions of csc must be Int"),
    (torch.zeros(8, dtype=torch.int32)[::2], "positions of csc must be contiguous"),
])  # fmt: skip
def test_wrong_positions_are_named(positions, message, device):
    graph = Graph.from_edge_index(torch.tensor([[0, 1, 2, 0], [2, 1, 0, 1]]), 3, 3).to(device)
    csr, csc = arrays_of(graph)
    x = torch.ones(3, 8, device=device)
    out, arg, tied = torch.ops.edgeless.neighbor_reduce(x, csr, csc, "max", 0.0, torch.int32, "first")
    given = [*csc[:2], torch.arange(4, dtype=csc[0].dtype, device=device), positions.to(device)]
    if not positions.is_contiguous():
        given[3] = torch.zeros(8, dtype=torch.int32, device=device)[::2]
    with pytest.raises((ValueError, RuntimeError), match=message):
        torch.ops.edgeless.neighbor_reduce_backward(out, x, out, arg, tied, csr, given, "max", "first")


@pytest.mark.cuda
def test_positions_that_are_kept_are_used_in_a_capture():
    """There they are not made: they would be there only once the CUDA graph has run."""
    edge_index = torch.randint(0, 50, (2, 400), generator=torch.Generator().manual_seed(2)).cuda()
    graph = Graph.from_edge_index(edge_index, 50, 50)
    assert graph.max_in_degree > 0  # known, as of a graph in use
    csc = len(graph.csc_arrays(True))
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert len(graph.csc_with_positions()) == csc
    assert len(graph.csc_with_positions()) == csc + 1
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert len(graph.csc_with_positions()) == csc + 1
