"""SpMM and SDDMM against plain PyTorch in float64, on every device: norms, weights, gradients, dtypes, graph shapes,
strides, bad input. On CUDA also hubs over many blocks, streams, graph capture and 2**31 elements.
"""

import itertools

import pytest
import torch
from attention_cases import GRAPHS, assert_close, error, graph_of
from devices import (
    EVERY_DEVICE,
    EVERY_WAY,
    MEMORY_FOR_2_TO_THE_31,
    arrays_of,
    assert_same_bits,
    leaves_on,
    narrowed,
    poison,
    star,
    with_wide_indices,
)

import edgeless
from edgeless import Graph, functional, reference
from edgeless.functional.aggregation import sum_of_neighbors

# Widths for vectors of 16, 8 and 4 bytes and copies, whole and with tails; sub-warps of 8, 16 and 32 lanes; several
# feature tiles.
WIDTHS = [(1,), (7,), (24,), (64,), (66,), (100,), (260,), (512,), (1000,), (2, 40), (3, 2, 5), (4, 7), (8, 64)]
BOUND = {torch.float32: 1e-5, torch.float64: 1e-10, torch.bfloat16: 8e-3, torch.float16: 1e-3}  # of 16 bits a rounding


def leaf(*shape, dtype=torch.float64, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=gen).to(dtype).requires_grad_()


def both(device, graph, x, weight, **options):
    """Output and gradients on the device, and plain ones in float64."""
    poison(device)
    given = [t for t in (x, weight) if t is not None]
    leaves, exact = leaves_on(device, given), [t.detach().double().requires_grad_() for t in given]
    out = functional.spmm(graph.to(device), *leaves, **options)
    grad = leaf(*out.shape, seed=9).detach()
    found = [out, *torch.autograd.grad(out, leaves, grad.to(device, out.dtype))]
    with edgeless.backend("reference"):
        wanted = functional.spmm(graph, *exact, **options)
    return [t.detach().cpu() for t in found], [wanted, *torch.autograd.grad(wanted, exact, grad)]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype,width", [(torch.float32, 32), (torch.bfloat16, 64), (torch.float32, 1)])
@pytest.mark.parametrize("scaled", [False, True])
def test_weights_that_are_put_into_order(dtype, width, scaled):
    """So many weights and rows that these are read in order from memory of the sum's own, or ahead of rows."""
    gen = torch.Generator(device="cuda").manual_seed(2)
    nodes, edges = 140_000, 4_300_000
    ends = torch.randint(0, nodes, (2, edges), generator=gen, device="cuda")
    x, weight = (torch.randn(n, generator=gen, device="cuda") for n in ((nodes, width), (edges,)))
    x, scale = x.to(dtype), torch.rand(nodes, generator=gen, device="cuda") if scaled else None
    found = functional.spmm(Graph.from_edge_index(ends, nodes, nodes), x, weight, src_scale=scale)
    factors = weight.double() if scale is None else weight.double() * scale[ends[0]]
    exact = torch.zeros(nodes, width, dtype=torch.float64, device="cuda")
    for column in range(0, width, 8):  # a part of the edges' rows at a time
        rows = x[:, column : column + 8].double()[ends[0]] * factors[:, None]
        exact[:, column : column + 8].index_add_(0, ends[1], rows)
    assert error(found, exact) <= BOUND[found.dtype]


@EVERY_DEVICE
@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("norm", ["none", "left", "right", "both"])
@pytest.mark.parametrize("weighted", [False, True])
def test_norms_on_every_graph(kind, norm, weighted, device):
    for index_dtype in (torch.int32, torch.int64):
        graph = graph_of(kind, index_dtype)
        weight = leaf(graph.num_edges) if weighted else None
        for reduce in ("sum", "mean"):
            assert_close(*both(device, graph, leaf(graph.num_src, 20), weight, norm=norm, reduce=reduce), 1e-10)


@EVERY_DEVICE
@pytest.mark.parametrize("shape", WIDTHS)
@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("kind", ["hub", "square"])
def test_every_width(shape, dtype, kind, device):
    graph = graph_of(kind)
    x = leaf(graph.num_src, *shape, dtype=dtype)
    weights = [None, leaf(graph.num_edges, dtype=dtype, seed=1)]
    if len(shape) == 2:
        weights.append(leaf(graph.num_edges, shape[0], dtype=dtype, seed=2))
    for weight in weights:
        assert_close(*both(device, graph, x, weight, norm="both"), BOUND[dtype])
    assert_close(*both(device, graph, x, None), BOUND[dtype])


def test_norm_both_is_the_symmetric_normalisation():
    graph = graph_of("square")
    src, dst = graph.edge_index()
    adjacency = torch.zeros(40, 40, dtype=torch.float64).index_put((dst, src), torch.tensor(1.0).double(), True)
    left, right = adjacency.sum(0).clamp(min=1) ** -0.5, adjacency.sum(1).clamp(min=1) ** -0.5
    x = leaf(40, 5)
    expected = right[:, None] * (adjacency @ (left[:, None] * x))
    assert_close([functional.spmm(graph, x, norm="both")], [expected], 1e-12)


@EVERY_DEVICE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_errs_at_most_twice_as_much_as_torch(dtype, device):
    graph = graph_of("hub")
    given = [leaf(graph.num_src, 33, dtype=dtype), leaf(graph.num_edges, dtype=dtype, seed=1)]
    src, dst = graph.edge_index()

    def plain(x, weight):
        out = x.new_zeros(graph.num_dst, 33).index_add(0, dst, x[src] * weight[:, None])
        return [out, *torch.autograd.grad(out, [x, weight], torch.ones_like(out))]

    leaves = leaves_on(device, given)
    out = functional.spmm(graph.to(device), *leaves)
    assert out.dtype == dtype
    found = [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]
    exact = plain(*(t.detach().double().requires_grad_() for t in given))
    for a, b, c in zip(found, plain(*given), exact, strict=True):
        assert error(a.cpu(), c) <= 2 * error(b, c)


@EVERY_DEVICE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [64, 33])
def test_sums_that_leave_in_float32(dtype, width, device):
    graph = graph_of("hub")
    x = leaf(graph.num_src, width, dtype=dtype)
    found, expected = both(device, graph, x, None, norm="both", out_dtype=torch.float32)
    assert found[0].dtype == torch.float32
    assert error(found[0], expected[0]) < 1e-5


@EVERY_DEVICE
def test_wide_indices(device):
    graph = graph_of("hub").to(device)
    shapes = {torch.float32: (40,), torch.bfloat16: (7,), torch.float16: (66,), torch.float64: (3, 5)}
    for dtype, shape in shapes.items():
        results = []
        for g in (graph, with_wide_indices(graph)):
            x, weight = leaves_on(device, [leaf(50, *shape, dtype=dtype), leaf(g.num_edges, dtype=dtype, seed=1)])
            out = functional.spmm(g, x, weight, norm="both")
            results.append([out, *torch.autograd.grad(out.float().square().sum(), [x, weight])])
        bound = BOUND[dtype] if dtype.itemsize == 2 else 1e-6
        assert all(error(a, b) <= bound for a, b in zip(*results, strict=True))


@EVERY_DEVICE
def test_scales_given_by_the_caller(device):
    graph = graph_of("bipartite").to(device)
    x, s, d = (t.to(device) for t in (leaf(50, 6), leaf(50, seed=1).detach(), leaf(40, seed=2).detach()))
    expected = d[:, None] * functional.spmm(graph, x * s[:, None])
    assert_close([functional.spmm(graph, x, src_scale=s, dst_scale=d)], [expected], 1e-12)


@EVERY_DEVICE
@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("shape", [(5,), (40,), (3, 16), (200,), (520,), (2, 600), (1300,)])
def test_sddmm(dtype, shape, device):
    for kind in ("bipartite", "hub", "many empty rows", "no edges"):
        graph = graph_of(kind)
        given = [leaf(graph.num_dst, *shape, dtype=dtype), leaf(graph.num_src, *shape, dtype=dtype, seed=1)]
        grad = leaf(graph.num_edges, *shape[:-1], seed=2).detach()
        poison(device)
        leaves = leaves_on(device, given)
        found = functional.sddmm_dot(graph.to(device), *leaves)
        grads = torch.autograd.grad(found, leaves, grad.to(device, found.dtype))
        exact = [t.detach().double().requires_grad_() for t in given]
        expected = reference.sddmm_dot(graph, *exact)
        wanted = [expected, *torch.autograd.grad(expected, exact, grad)]
        assert_close([t.detach().cpu() for t in (found, *grads)], wanted, BOUND[dtype])


@EVERY_DEVICE
@pytest.mark.parametrize("edges", [100, 300_000, 600_000])
@pytest.mark.parametrize("shape", [(16,), (3, 20), (72,), (136,)])
def test_sddmm_of_many_edges(shape, edges, device):
    """Of which blocks on a GPU take more, the more there are; most are of one row."""
    graph = star(edges, 500).to(device)
    x, y = (leaf(500, *shape, dtype=torch.float32, seed=seed).detach().to(device) for seed in (1, 2))
    indptr, indices, ids = (t.long() for t in graph.csr)
    rows = torch.repeat_interleave(torch.arange(500, device=device), indptr.diff())
    wanted = torch.empty(edges, *shape[:-1], dtype=torch.float64, device=device)
    wanted[ids] = torch.einsum("i...f,j...f->ij...", x.double(), y.double())[rows, indices]
    assert_close([functional.sddmm_dot(graph, x, y)], [wanted], 1e-6)


@EVERY_DEVICE
def test_sddmm_of_half_precision_in_float32(device):
    graph = graph_of("bipartite").to(device)
    a, b = leaves_on(device, [leaf(40, 2, 16, dtype=torch.bfloat16), leaf(50, 2, 16, dtype=torch.bfloat16, seed=1)])
    found = functional.sddmm_dot(graph, a, b, out_dtype=torch.float32)
    with edgeless.backend("reference"):
        plain = functional.sddmm_dot(graph, a, b, out_dtype=torch.float32)
    exact = functional.sddmm_dot(graph, a.float(), b.float())
    assert_close([found, plain], [exact, exact], 1e-6)
    grads = torch.autograd.grad(found.sum(), [a, b])
    assert all(grad.dtype == torch.bfloat16 for grad in grads)


@EVERY_DEVICE
def test_gradcheck_and_gradgradcheck(device):
    graph = Graph.from_edge_index(torch.tensor([[0, 1, 2, 2, 3, 3], [0, 0, 1, 2, 2, 2]]), 5, 4).to(device)
    x, weight, a, b = leaves_on(device, [leaf(5, 2, 3), leaf(6, 2), leaf(4, 3), leaf(5, 3)])
    for function, leaves in (
        (lambda x, weight: functional.spmm(graph, x, weight, norm="both"), [x, weight]),
        (lambda a, b: functional.sddmm_dot(graph, a, b), [a, b]),
    ):
        assert torch.autograd.gradcheck(function, leaves)
        assert torch.autograd.gradgradcheck(function, leaves)


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


def sums_of_many_kinds():
    """Of all storage types, widths with and without tails, rows cut into parts, with and without weights."""
    found = []
    for kind, dtype, width in itertools.product(("hub", "many empty rows"), BOUND, (1, 5, 16, 23, 64, 100, 300)):
        graph = graph_of(kind)
        x, weight = leaf(graph.num_src, width, dtype=dtype), leaf(graph.num_edges, dtype=dtype, seed=1)
        found += [functional.spmm(graph, x).detach(), functional.spmm(graph, x, weight, norm="left").detach()]
    return found


@pytest.mark.parametrize("capability", ["baseline", "avx2"])
def test_lower_instruction_sets_agree(capability):
    with narrowed(capability):
        lower = sums_of_many_kinds()
    for found, expected in zip(lower, sums_of_many_kinds(), strict=True):
        assert error(found, expected) <= BOUND[found.dtype]


@EVERY_DEVICE
def test_strided_and_expanded_inputs(device):
    graph = graph_of("square").to(device)
    wide = torch.randn(40, 34, dtype=torch.float64, device=device)
    for x in (wide[:, 5:15], wide[:, ::2], wide.t()[:10].t(), wide[:1, :10].expand(40, 10)):
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            part = wide.to(dtype)[:, 3:13] if x.is_contiguous() else x.to(dtype)
            weight = torch.randn(1, dtype=dtype, device=device).expand(graph.num_edges)
            expected = functional.spmm(graph, part.contiguous(), weight.contiguous())
            assert error(functional.spmm(graph, part, weight), expected) < 1e-6
    heads = torch.randn(40, 2, 6, device=device).transpose(1, 2)  # [40, 6, 2]
    weight = torch.randn(graph.num_edges, 6, device=device)
    assert error(functional.spmm(graph, heads, weight), functional.spmm(graph, heads.contiguous(), weight)) < 1e-6
    x = torch.randn(40, 8, device=device, requires_grad=True)
    functional.spmm(graph, x).sum().backward()  # an expanded gradient
    assert error(x.grad, graph.out_degrees().unsqueeze(1).expand(40, 8)) < 1e-6


@EVERY_DEVICE
@pytest.mark.skipif(not hasattr(torch.library, "opcheck"), reason="torch.library.opcheck came with torch 2.4")
def test_opcheck(device):
    graph = graph_of("bipartite").to(device)
    csr, csc = arrays_of(graph)
    d, s = graph.degree_scale("dst", -0.5, torch.float64), graph.degree_scale("src", -0.5, torch.float64)
    x, weight, y, flat_x, flat_y, one = leaves_on(
        device, [leaf(50, 2, 8), leaf(400, 2), leaf(40, 2, 8), leaf(50, 8), leaf(40, 8), leaf(400, 1)]
    )
    torch.library.opcheck(torch.ops.edgeless.spmm, (x, weight, s, d, csr, csc, None))
    torch.library.opcheck(torch.ops.edgeless.spmm, (x.detach().bfloat16(), None, None, None, csr, [], torch.float32))
    torch.library.opcheck(torch.ops.edgeless.sddmm, (y, x, s, d, csr, csc))
    torch.library.opcheck(torch.ops.edgeless.spmm, (flat_x, one, s, d, csr, csc, None))
    torch.library.opcheck(torch.ops.edgeless.sddmm, (flat_y, flat_x, s, d, csr, csc))
    out = torch.empty(40, 2, 8, dtype=torch.float64, device=device)
    torch.library.opcheck(torch.ops.edgeless.spmm_into, (out, x.detach(), csr))


@EVERY_DEVICE
@pytest.mark.parametrize("kind", ["bipartite", "hub", "no edges"])
def test_a_sum_into_given_memory_is_the_same(kind, device):
    graph = graph_of(kind).to(device)
    csr, _ = arrays_of(graph)
    rows = graph.num_dst
    for dtype, wide in itertools.product(BOUND, (False, True)):
        for shape in ((0,), (1,), (5,), (24,), (512,), (2, 8)):
            x = leaf(graph.num_src, *shape, dtype=dtype).detach().to(device)
            kind = torch.float32 if wide and dtype.itemsize == 2 else dtype
            memory = torch.full((32 + 8 * rows * torch.Size(shape).numel(),), 171, dtype=torch.uint8, device=device)
            nbytes = rows * torch.Size(shape).numel() * kind.itemsize
            out = memory[16 : 16 + nbytes].view(kind).view(rows, *shape)
            assert torch.ops.edgeless.spmm_into(out, x, csr) is None
            assert torch.equal(out, torch.ops.edgeless.spmm(x, None, None, None, csr, [], kind))
            assert (memory[:16] == 171).all() and (memory[16 + nbytes :] == 171).all()


@EVERY_DEVICE
def test_memory_that_does_not_fit_is_named(device):
    csr, _ = arrays_of(graph_of("bipartite").to(device))
    x = torch.zeros(50, 3, device=device)
    for out, message in (
        (x.new_empty(40, 4), r"spmm_into: out must have shape \[40, 3\], got \[40, 4\]"),
        (x.new_empty(40, 1, 3), r"out must have shape \[40, 3\], got \[40, 1, 3\]"),
        (x.new_empty(40, 3).double(), "out must be Float or Float, got Double"),
        (x.new_empty(3, 40).t(), r"out must be contiguous, got strides \[1, 40\]"),
    ):
        with pytest.raises(ValueError, match=message):
            torch.ops.edgeless.spmm_into(out, x, csr)
    if device == "cuda":
        with pytest.raises(ValueError, match="out must begin at a whole number of 16 bytes, got address"):
            torch.ops.edgeless.spmm_into(x.new_empty(121)[1:].view(40, 3), x, csr)


@EVERY_DEVICE
def test_rows_without_heads_in_inference_mode(device):
    graph = graph_of("bipartite").to(device)
    y, x = (leaf(n, 8).detach().to(device) for n in (40, 50))
    with torch.inference_mode():
        found = functional.spmm(graph, x, norm="both"), functional.sddmm_dot(graph, y, x)
    wanted = functional.spmm(graph, x, norm="both"), functional.sddmm_dot(graph, y, x)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@EVERY_DEVICE
def test_compiles_whole(device):
    graph = graph_of("square").to(device)
    x, weight = leaves_on(device, [leaf(40, 12), leaf(graph.num_edges)])
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


def test_products_of_rows_of_two_precisions_are_refused_by_the_op():
    csr = list(Graph.from_edge_index(torch.tensor([[0, 1], [1, 0]])).csr)
    rows = torch.ones(2, 3)
    for dst, src in ((rows.double(), rows), (rows, rows.double())):
        with pytest.raises(ValueError, match="sddmm: dst and src must both be float64 or neither"):
            torch.ops.edgeless.sddmm(dst, src, None, None, csr, [])
    found = torch.ops.edgeless.sddmm(rows.bfloat16(), rows, None, None, csr, [])
    assert found.dtype == torch.float32 and found.flatten().tolist() == [3, 3]


@pytest.mark.parametrize("rows", [2, 4])
def test_a_layers_sum_counts_the_rows(rows):
    """All else has been looked at by the layer."""
    graph = Graph.from_edge_index(torch.tensor([[0, 1, 2], [1, 0, 1]]), 3, 2)
    with pytest.raises(ValueError, match="spmm: x must have shape"):
        sum_of_neighbors(graph, torch.ones(rows, 5))


# On CUDA ---------------------------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [16, 512])
def test_bitwise_the_same_from_run_to_run(dtype, width):
    """A hub with in-edges over many blocks, and its transpose."""
    graph = star(300_000)
    x, results = leaf(graph.num_src, width, dtype=dtype), []
    weights = torch.linspace(-1, 1, graph.num_edges)
    for _ in range(20):
        leaves = leaves_on("cuda", [x, weights.requires_grad_()])
        out = functional.spmm(graph.to("cuda"), *leaves, norm="both")
        results.append([out, *torch.autograd.grad(out.float().square().sum(), leaves)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    with edgeless.backend("reference"), torch.no_grad():
        expected = functional.spmm(graph, x.double(), weights.double(), norm="both")
    assert error(results[0][0].cpu(), expected) < (1e-4 if dtype == torch.float32 else 1e-2)


@pytest.fixture
def steps():
    """A step of training over a hub, as a function of its rows, and these."""
    graph = star(20_000)
    given = [leaf(graph.num_src, 40, dtype=torch.float32), leaf(graph.num_edges, dtype=torch.float32, seed=1)]
    (x, weight), graph = leaves_on("cuda", given), graph.to("cuda")

    def step(x):
        out = functional.spmm(graph, x, weight, norm="both")
        return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, weight])]

    return step, [x]


@pytest.mark.cuda
@EVERY_WAY
def test_streams_and_captures(way, steps):
    assert_same_bits(way, *steps)


@pytest.mark.cuda
@MEMORY_FOR_2_TO_THE_31
def test_more_than_two_to_the_31_elements():
    nodes, width = 4_400_000, 512
    ends = torch.randint(nodes, (2, 1_000_000), device="cuda")
    ends[:, ::2] = nodes - 1 - ends[:, ::2] % 1000
    graph = Graph.from_edge_index(ends, nodes, nodes)
    x = torch.randn(nodes, width, device="cuda", dtype=torch.bfloat16)
    out = functional.spmm(graph, x)
    for row in (int(ends[1, 0]), int(ends[1, 1]), nodes - 1):
        expected = x[ends[0, ends[1] == row]].double().sum(0)
        assert error(out[row], expected) < 8e-3


@pytest.mark.cuda
def test_arrays_on_two_devices_are_refused():
    csr, _ = arrays_of(graph_of("square"))
    x = torch.randn(40, 1, 8, device="cuda")
    with pytest.raises(ValueError, match="csr must be on cuda:0, got cpu"):
        torch.ops.edgeless.spmm(x, None, None, None, csr, [], None)
