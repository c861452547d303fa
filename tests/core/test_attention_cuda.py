"""The attention functions on CUDA against plain PyTorch in float64: the suite of test_attention.py, and what only a GPU
can get wrong: every kernel instance, hubs over many blocks, rows of any strides. What is true of them as ops is in
test_attention_cuda_op.py.
"""

import pytest
import torch
from test_attention import (
    GRAPHS,
    OPTIONS,
    SCORES,
    TOLERANCE,
    assert_close,
    error,
    graph_of,
    in_its_own_precision,
    inputs_of,
    raised,
    run,
)

from edgeless import Graph, functional, reference

pytestmark = pytest.mark.cuda
DEVICE = "cuda"


def to_cuda(tensors):
    return [t.detach().to(DEVICE).requires_grad_(t.requires_grad) for t in tensors]


def cuda_inputs(score, graph, heads, channels, options, dtype):
    args, tensors, rest = inputs_of(score, graph, heads, channels, options, dtype)
    return to_cuda(args), dict(zip(tensors, to_cuda(tensors.values()), strict=True)), rest


def poison():
    """Fills freed memory with NaN, so that a result that was never written shows."""
    blocks = [torch.full((n,), float("nan"), device=DEVICE) for n in (1 << 8, 1 << 12, 1 << 16, 1 << 20, 1 << 23)]
    del blocks


def compare(score, graph, heads, channels, options, dtype):
    args, tensors, rest = inputs_of(score, graph, heads, channels, options, dtype)
    poison()
    found = run_cuda(score, graph, args, tensors, rest)
    expected = run(
        reference, score, graph, raised(args), dict(zip(tensors, raised(tensors.values()), strict=True)), rest
    )
    if score == "cosine":
        # The gradient of beta, a number a head, is what is left of sums over rows that cancel, perhaps to nothing: its
        # error is seen against them.
        at, size = len(found) - len(tensors) - 1, size_of_beta_gradient(graph, args, tensors, rest)
        found[at], expected[at] = (torch.cat([t[at].double(), size]) for t in (found, expected))
    if dtype in TOLERANCE:
        assert_close(found, expected, TOLERANCE[dtype])
    return found, expected


def size_of_beta_gradient(graph, args, tensors, rest):
    """[H]: the sum of what the rows give to the gradient of the cosine's beta, less their signs."""
    x, x_dst, beta = raised(args)
    keys, query = (torch.nn.functional.normalize(t.detach(), dim=-1) for t in (x, x_dst))
    leaves = [query * beta.detach().unsqueeze(-1), keys, x]
    named = dict(zip(tensors, raised(tensors.values()), strict=True))
    found = run(reference, "dot", graph, [t.requires_grad_() for t in leaves], named, {**rest, "scale": 1.0})
    grad_query = found[2 if "return_weights" in rest else 1]
    return (grad_query * query).sum(-1).abs().sum(0)


def run_cuda(score, graph, args, tensors, rest):
    """As run() of test_attention.py, with inputs and outputs on the CPU and the function on the GPU."""
    moved, named = to_cuda(args), dict(zip(tensors, to_cuda(tensors.values()), strict=True))
    outs = getattr(functional, f"{score}_attention")(graph.to(DEVICE), *moved, **named, **rest)
    outs = outs if isinstance(outs, tuple) else (outs,)
    gen = torch.Generator().manual_seed(11)
    grads = [torch.randn(o.shape, dtype=torch.float64, generator=gen) for o in outs]
    leaves = [*moved, *named.values()]
    found = torch.autograd.grad(
        outs, leaves, [g.to(DEVICE, o.dtype) for g, o in zip(grads, outs, strict=True)], allow_unused=True
    )
    found = [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves, strict=True)]
    return [t.detach().cpu() for t in (*outs, *found)]


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("options", OPTIONS)
def test_double_equals_the_reference(score, kind, options):
    for index_dtype in (torch.int32, torch.int64):
        compare(score, graph_of(kind, index_dtype), 4, 8, OPTIONS[options], torch.float64)


# Widths that reach every kernel of the table in core_cuda/attention/cuda/plan.h, whole vectors and tails.
SHAPES = [
    (1, 1), (4, 32), (8, 8), (3, 40), (2, 7), (1, 7), (1, 64), (2, 64), (2, 128), (8, 128), (5, 16), (1, 20),
    (3, 256), (1, 250), (2, 512), (1, 500), (33, 4), (40, 33),
]  # fmt: skip


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("heads,channels", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", ["plain", "dropout", "all"])
def test_every_head_dim(score, heads, channels, dtype, options):
    graph = graph_of("square")
    if dtype == torch.float32:
        if score == "gatv2" and options == "all":
            return  # a sum of three terms near the kink of the LeakyReLU may round to either side: see below
        compare(score, graph, heads, channels, OPTIONS[options], dtype)
    else:
        found, expected = compare(score, graph, heads, channels, OPTIONS[options], dtype)
        bound = 0.02 if dtype == torch.bfloat16 else 0.003
        assert all(torch.isfinite(t).all() and error(t, e) < bound for t, e in zip(found, expected, strict=True))


def short_rows():
    """Two edges a row in the mean, and a hub in either direction that several teams share."""
    gen = torch.Generator().manual_seed(6)
    src, dst = (torch.randint(0, 700, (1400,), generator=gen) for _ in range(2))
    dst[:200], src[200:400] = 3, 5
    return Graph.from_edge_index(torch.stack([src, dst]), 700, 700)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("heads,channels", [(4, 32), (3, 40), (2, 64), (8, 128), (1, 20), (2, 256)])
def test_rows_of_few_edges(score, heads, channels):
    """In single precision these have kernels of their own."""
    compare(score, short_rows(), heads, channels, (), torch.float32)


@pytest.mark.parametrize("dtype,channels", [(torch.bfloat16, 1024), (torch.float16, 1000), (torch.float64, 256)])
def test_the_widest_heads(dtype, channels):
    for score in SCORES:
        found, expected = compare(score, graph_of("bipartite"), 1, channels, (), dtype)
        bound = {torch.bfloat16: 0.02, torch.float16: 0.003, torch.float64: 1e-10}[dtype]
        assert all(error(t, e) < bound for t, e in zip(found, expected, strict=True))


@pytest.mark.parametrize("heads,channels", SHAPES)
def test_gatv2_with_edges_in_single_precision(heads, channels):
    """As above, with inputs on a grid of 1/256: their sums are exact, so no rounding decides a sign."""
    graph = graph_of("square")
    args, tensors, rest = inputs_of("gatv2", graph, heads, channels, OPTIONS["all"], torch.float64)
    grid = [(t.detach() * 256).round() / 256 for t in [*args, *tensors.values()]]
    single = [t.float().requires_grad_() for t in grid]
    double = [t.requires_grad_() for t in grid]
    n = len(args)
    found = run_cuda("gatv2", graph, single[:n], dict(zip(tensors, single[n:], strict=True)), rest)
    expected = run(reference, "gatv2", graph, double[:n], dict(zip(tensors, double[n:], strict=True)), rest)
    assert_close(found, expected, 1e-5)


def test_wide_indices():
    """Graphs of more than 2**31 edges have int64 arrays; any graph may be given so to the op."""
    for score in SCORES:
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            graph = graph_of("hub").to(DEVICE)
            args, _, _ = cuda_inputs(score, graph, 2, 16, (), dtype)
            narrow = run(functional, score, graph, args, {}, {}, grads_like(score, graph, args))
            wide = Graph(
                *[type(c)(*[None if t is None else t.long() for t in c]) for c in (graph.csr, graph.csc)], 50, 40
            )
            found = run(functional, score, wide, args, {}, {}, grads_like(score, graph, args))
            bound = 2e-2 if dtype == torch.bfloat16 else 1e-5
            assert all(error(a, b) < bound for a, b in zip(found, narrow, strict=True))


def grads_like(score, graph, args):
    gen = torch.Generator().manual_seed(11)
    channels = args[0].shape[-1]
    return [torch.randn(graph.num_dst, args[0].shape[1], channels, generator=gen, dtype=torch.float64).to(DEVICE)]


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["square", "hub", "bipartite"])
def test_half_precision_errs_at_most_twice_as_much_as_torch(score, dtype, kind, monkeypatch):
    graph = graph_of(kind)
    for heads, channels in ((4, 32), (3, 7)):
        for options in ("plain", "all"):
            args, tensors, rest = inputs_of(score, graph, heads, channels, OPTIONS[options], dtype)
            found = run_cuda(score, graph, args, tensors, rest)
            exact = run(
                reference, score, graph, raised(args), dict(zip(tensors, raised(tensors.values()), strict=True)), rest
            )
            with monkeypatch.context() as patch:
                patch.setattr(reference, "_prepare", in_its_own_precision)
                torchs = run(reference, score, graph, args, tensors, rest)
            for i, (a, b, c) in enumerate(zip(found, torchs, exact, strict=True)):
                assert error(a, c) <= 2 * error(b, c), (heads, channels, options, i)


@pytest.mark.parametrize("score", SCORES)
def test_float_output_of_half_inputs(score):
    """As under autocast: rows in bfloat16, output and its gradient in float32."""
    graph = graph_of("hub")
    for channels in (32, 12, 7):
        args, _, _ = inputs_of(score, graph, 4, channels, (), torch.bfloat16)
        found = run_cuda(score, graph, args, {}, {"out_dtype": torch.float32})
        exact = run(reference, score, graph, raised(args), {}, {})
        assert found[0].dtype == torch.float32
        assert error(found[0], exact[0]) < 1e-5
        assert all(error(a, b) < 0.01 for a, b in zip(found[1:], exact[1:], strict=True))


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("options", ["plain", "all"])
def test_gradcheck(score, options):
    graph = Graph.from_edge_index(torch.tensor([[0, 1, 2, 2, 3, 3], [0, 0, 1, 2, 2, 2]]), 5, 4)
    args, tensors, rest = cuda_inputs(score, graph, 2, 3, OPTIONS[options], torch.float64)
    graph = graph.to(DEVICE)
    names = list(tensors)

    def call(*leaves):
        given = dict(zip(names, leaves[len(args) :], strict=True))
        return getattr(functional, f"{score}_attention")(graph, *leaves[: len(args)], **given, **rest)

    assert torch.autograd.gradcheck(call, [*args, *tensors.values()])


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("options", ["plain", "all"])
def test_each_gradient_alone_is_the_same(score, options):
    """Passes that nobody asked for are left out; what is left must not change."""
    graph = graph_of("hub")
    args, tensors, rest = cuda_inputs(score, graph, 2, 8, OPTIONS[options], torch.float32)
    graph = graph.to(DEVICE)
    rest.pop("return_weights", None)
    leaves = [*args, *tensors.values()]
    call = getattr(functional, f"{score}_attention")

    def grads(wanted):
        given = [t.detach().requires_grad_(w) for t, w in zip(leaves, wanted, strict=True)]
        out = call(graph, *given[: len(args)], **dict(zip(tensors, given[len(args) :], strict=True)), **rest)
        return torch.autograd.grad(out.square().sum(), [t for t, w in zip(given, wanted, strict=True) if w])

    together = grads([True] * len(leaves))
    for i in range(len(leaves)):
        (alone,) = grads([i == j for j in range(len(leaves))])
        assert torch.equal(alone, together[i]), i


@pytest.mark.parametrize("score", ["gatv2", "dot"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels", [8, 5])
@pytest.mark.parametrize("reverse", [False, True])
def test_gradients_of_parts_of_one_tensor_are_parts_of_one(score, dtype, channels, reverse):
    graph, heads, count = graph_of("square").to(DEVICE), 3, 3 if score == "dot" else 2
    rows = torch.randn(graph.num_dst, count, heads, channels, device=DEVICE, dtype=dtype)
    parts = rows.flip(1).unbind(1) if reverse else rows.unbind(1)
    parts = [t.requires_grad_() for t in (parts[::-1] if reverse else parts)]
    alone = [t.detach().clone().requires_grad_() for t in parts]
    att = () if score == "dot" else (torch.randn(heads, channels, device=DEVICE, dtype=dtype),)
    results = []
    for leaves in (parts, alone):
        out = getattr(functional, f"{score}_attention")(graph, *leaves, *att)
        results.append(torch.autograd.grad(out, leaves, torch.ones_like(out) * out.detach()))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    storages = [len({t.untyped_storage().data_ptr() for t in grads}) for grads in results]
    assert storages == [1, count]
    starts = [[t.storage_offset() for t in tensors] for tensors in (parts, results[0])]
    assert sorted(range(count), key=starts[0].__getitem__) == sorted(range(count), key=starts[1].__getitem__)


# Hubs ------------------------------------------------------------------------------------------------------------


def star(edges=300_000, leaves=5000):
    """One row of most edges, and a hub among the sources."""
    gen = torch.Generator().manual_seed(1)
    src = torch.randint(0, leaves, (edges,), generator=gen)
    dst = torch.where(torch.rand(edges, generator=gen) < 0.7, 3, torch.randint(0, leaves, (edges,), generator=gen))
    src = torch.where(torch.rand(edges, generator=gen) < 0.2, 17, src)
    return Graph.from_edge_index(torch.stack([src, dst]), leaves, leaves)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("options", ["plain", "all"])
def test_hubs_over_many_blocks(score, options):
    graph = star()
    args, tensors, rest = inputs_of(score, graph, 2, 16, OPTIONS[options], torch.float64)
    rest.pop("return_weights", None)
    found = run_cuda(score, graph, args, tensors, rest)
    expected = run(reference, score, graph, args, tensors, rest)
    assert_close(found, expected, 1e-9)
    if options == "plain":
        single = [t.detach().float().requires_grad_() for t in args]
        exact = run(reference, score, graph, raised(single), {}, rest)
        assert_close(run_cuda(score, graph, single, {}, rest), exact, 1e-5)


def rows_of_many_lengths():
    """Hubs that end soon after the cut of a block, by chance: what is left of them may not fill the block's teams."""
    gen = torch.Generator().manual_seed(4)
    degrees = torch.randint(0, 3000, (200,), generator=gen)
    dst = torch.arange(200).repeat_interleave(degrees)
    src = torch.randint(0, 200, dst.shape, generator=gen)
    return Graph.from_edge_index(torch.stack([src, dst]), 200, 200)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("heads,channels", [(4, 32), (1, 256), (8, 8), (1, 4)])
@pytest.mark.parametrize("dtype,bound", [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_hubs_of_many_lengths(score, heads, channels, dtype, bound):
    graph = rows_of_many_lengths()
    args, tensors, rest = inputs_of(score, graph, heads, channels, (), dtype)
    found = run_cuda(score, graph, args, tensors, rest)
    gen = torch.Generator().manual_seed(11)  # as in run_cuda
    grads = [torch.randn(graph.num_dst, heads, channels, dtype=torch.float64, generator=gen).to(DEVICE)]
    expected = run(reference, score, graph.to(DEVICE), to_cuda(raised(args)), {}, rest, grads)
    for a, b in zip(found, expected, strict=True):
        if len(b) == graph.num_src:  # a wrong row hides among the others
            a, b = a.double().flatten(1), b.cpu().flatten(1)
            size = b.norm(dim=1).mean()
            assert ((a - b).norm(dim=1) <= bound * (b.norm(dim=1) + size)).all()


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", ["plain", "all"])
def test_bitwise_the_same_in_twenty_runs(score, dtype, options):
    graph = star(60_000)
    args, tensors, rest = inputs_of(score, graph, 4, 32, OPTIONS[options], dtype)
    first = run_cuda(score, graph, args, tensors, rest)
    for _ in range(19):
        assert all(torch.equal(a, b) for a, b in zip(first, run_cuda(score, graph, args, tensors, rest), strict=True))


# Inputs of all kinds ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_strided_expanded_and_transposed_inputs(score, dtype):
    graph = graph_of("square").to(DEVICE)
    n, options = graph.num_src, {"dtype": dtype, "device": DEVICE}
    wide = torch.randn(n, 3 * 4 * 8, **options)
    slices = [wide[:, i * 32 : (i + 1) * 32].view(n, 4, 8) for i in range(3)]
    turned = torch.randn(8, 4, n, **options).permute(2, 1, 0)
    same = torch.randn(1, 4, 8, **options).expand(n, 4, 8)
    shifted = [torch.randn(n * 32 + 1, **options)[1:].view(n, 4, 8) for _ in range(3)]  # not on 16 bytes
    for a, b, c in ((*slices,), (turned, same, slices[0]), (*shifted,)):
        if score == "gatv2":
            args = [a, b, torch.randn(8, 4, **options).t()]
        elif score == "gat":
            args = [a, b[..., 0], c[..., 1]]
        elif score == "cosine":
            args = [a, b, torch.randn(8, dtype=torch.promote_types(dtype, torch.float32), device=DEVICE)[::2]]
        else:
            args = [a, b, c]
        scale = torch.rand(graph.num_edges, 1, **options).expand(-1, 4)
        leaves = [t.detach().requires_grad_() for t in args]
        packed = [t.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for t in args]
        call = getattr(functional, f"{score}_attention")
        out = call(graph, *leaves, edge_scale=scale)
        expected = call(graph, *packed, edge_scale=scale.contiguous())
        assert torch.equal(out, expected)
        found = torch.autograd.grad(out.sum(), leaves)  # an expanded gradient
        wanted = torch.autograd.grad((expected * torch.ones_like(expected)).sum(), packed)
        assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_many_rows_without_edges_in_either_direction(score, dtype):
    """Whole warps whose rows have no edge: what they add to the gradient of the attention vector is 0, not garbage."""
    src, dst = torch.randint(40, (2, 60), generator=torch.Generator().manual_seed(1)) * 97
    graph = Graph.from_edge_index(torch.stack([src, dst]), 4000, 4000)
    found, expected = compare(score, graph, 4, 32, (), dtype)
    assert all(torch.isfinite(t).all() for t in found)
    assert all(error(t, e) < 0.02 for t, e in zip(found, expected, strict=True))


def test_rows_without_edges_are_zero_and_get_no_gradient():
    graph = Graph.from_edge_index(torch.tensor([[0], [1]]), 3, 4)
    for score in SCORES:
        args, _, _ = cuda_inputs(score, graph, 2, 4, (), torch.float32)
        poison()
        out = getattr(functional, f"{score}_attention")(graph.to(DEVICE), *args)
        assert out[[0, 2, 3]].eq(0).all() and out[1].ne(0).any()
        grads = torch.autograd.grad(out.square().sum(), args)
        assert all(torch.isfinite(g).all() for g in grads)


@pytest.mark.parametrize("slope", [0.0, 1.0, 1.5, -0.3])
def test_any_negative_slope(slope):
    graph = graph_of("square")
    for score in ("gatv2", "gat"):
        args, _, rest = inputs_of(score, graph, 2, 8, (), torch.float32)
        found = run_cuda(score, graph, args, {}, {"negative_slope": slope})
        assert_close(found, run(reference, score, graph, raised(args), {}, {"negative_slope": slope}), 1e-5)


def test_zero_features_take_the_slope():
    """x_l + x_r = 0 everywhere: PyTorch's LeakyReLU has the slope as its derivative at 0."""
    graph = graph_of("square")
    for score in ("gatv2", "gat"):
        args, _, _ = inputs_of(score, graph, 2, 8, (), torch.float32)
        with torch.no_grad():
            for t in args[:2] if score == "gatv2" else args[1:]:
                t.zero_()
            if score == "gat":
                args[0].copy_(torch.randn(args[0].shape, generator=torch.Generator().manual_seed(1)))
        assert_close(run_cuda(score, graph, args, {}, {}), run(reference, score, graph, raised(args), {}, {}), 1e-5)


def test_large_logits_do_not_overflow():
    graph = graph_of("hub")
    q, k, v = (torch.randn(n, 2, 16) for n in (graph.num_dst, graph.num_src, graph.num_src))
    found = functional.dot_attention(graph.to(DEVICE), *(t.to(DEVICE) for t in (100 * q, 100 * k, v)))
    expected = reference.dot_attention(graph, 100 * q.double(), 100 * k.double(), v.double())
    assert torch.isfinite(found).all()
    assert error(found.cpu(), expected) < 1e-4  # logits of a few thousand carry an error of 1e-4 in float32


def test_nan_reaches_its_rows_and_no_others():
    edges = torch.stack([torch.arange(600) % 300, torch.arange(600) // 2])  # row r: sources 2r and 2r + 1, mod 300
    graph = Graph.from_edge_index(edges, 300, 300).to(DEVICE)
    touched = torch.zeros(300, dtype=torch.bool)
    touched[edges[1][edges[0] == 7]] = True
    for score in SCORES:
        args, _, _ = cuda_inputs(score, graph.to("cpu"), 2, 8, (), torch.float32)
        args = [t.detach() for t in args]
        args[1 if score == "dot" else 0][7] = float("nan")
        out = getattr(functional, f"{score}_attention")(graph, *args).cpu()
        assert torch.equal(out.isnan().flatten(1).all(1), touched) and torch.equal(
            out.isnan().flatten(1).any(1), touched
        )


def test_values_of_another_width_than_keys():
    graph = graph_of("bipartite")
    for dtype in (torch.float64, torch.float32):
        for dim, channels in ((8, 32), (5, 16), (64, 3), (128, 8), (4, 200)):
            gen = torch.Generator().manual_seed(2)
            shapes = [(graph.num_dst, dim), (graph.num_src, dim), (graph.num_src, channels)]
            args = [torch.randn(n, 2, c, dtype=dtype, generator=gen).requires_grad_() for n, c in shapes]
            found = run_cuda("dot", graph, args, {}, {})
            assert_close(found, run(reference, "dot", graph, raised(args), {}, {}), TOLERANCE[dtype])


def test_heads_wider_than_any_kernel_are_named():
    graph = graph_of("square").to(DEVICE)
    x = torch.randn(40, 1, 1025, device=DEVICE, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="may take up to 1024 features .* got 1025"):
        functional.dot_attention(graph, x, x, x)


# Dropout ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_the_dropout_mask_is_that_of_the_cpu(p):
    graph = graph_of("hub")
    for score in SCORES:
        args, _, _ = inputs_of(score, graph, 6, 4, (), torch.float64)
        options = {"dropout": p, "seed": -9, "return_weights": "dropped"}
        call = getattr(functional, f"{score}_attention")
        out, kept = call(graph, *args, **options)
        found, weights = call(graph.to(DEVICE), *to_cuda(args), **options)
        assert torch.equal(weights.cpu() == 0, kept == 0)
        assert error(weights.cpu(), kept) < 1e-12 and error(found.cpu(), out) < 1e-12


def test_dropout_follows_torchs_generator():
    graph = graph_of("square")
    args, _, _ = cuda_inputs("gat", graph, 2, 4, (), torch.float32)
    graph, call = graph.to(DEVICE), functional.gat_attention
    torch.manual_seed(1)
    first, second = call(graph, *args, dropout=0.5), call(graph, *args, dropout=0.5)
    torch.manual_seed(1)
    assert torch.equal(first, call(graph, *args, dropout=0.5)) and not torch.equal(first, second)


# Rows that are no whole vectors ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("channels", [1, 3, 7, 13])
def test_odd_rows_of_any_strides(score, dtype, channels):
    """The copies in whole vectors: same bits from contiguous, strided, transposed and expanded rows."""
    graph = graph_of("square").to(DEVICE)
    n, heads, options = graph.num_src, 3, {"dtype": dtype, "device": DEVICE}

    def rows(kind):
        if kind == "strided":
            return torch.randn(2 * n, heads + 1, channels + 2, **options)[::2, 1:, 1:-1]
        if kind == "transposed":
            return torch.randn(channels, heads, n, **options).permute(2, 1, 0)
        return torch.randn(1, heads, channels, **options).expand(n, -1, -1)

    for kinds in (("strided", "transposed", "expanded"), ("transposed", "expanded", "strided")):
        a, b, c = (rows(kind) for kind in kinds)
        if score == "gatv2":
            args = [a, b, c[0]]
        elif score == "gat":
            args = [a, b[..., 0], c[..., 0]]
        else:
            args = [a, b] if score == "cosine" else [a, b, c]
        call = getattr(functional, f"{score}_attention")
        leaves = [t.detach().requires_grad_() for t in args]
        packed = [t.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for t in args]
        out, expected = call(graph, *leaves), call(graph, *packed)
        assert torch.equal(out, expected)
        found = torch.autograd.grad(out.sum(), leaves)
        wanted = torch.autograd.grad((expected * torch.ones_like(expected)).sum(), packed)
        assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))
