"""The attention functions against plain PyTorch in float64, on every device: values, every gradient, every option, odd
shapes, rows of any strides; on CUDA also hubs over many blocks. What is true of them as ops is in test_attention_op.py.
"""

import contextlib
import itertools

import pytest
import torch
from attention_cases import (
    GRAPHS,
    OPTIONS,
    SCORES,
    TOLERANCE,
    assert_close,
    compare,
    error,
    exact,
    function_of,
    graph_of,
    in_its_own_precision,
    inputs_of,
    leaves_of,
    run,
)
from devices import EVERY_DEVICE, narrowed, poison, star, with_wide_indices

from edgeless import Graph, backend, functional, reference

# Widths of every number of lanes and of vectors per lane that plans choose on CUDA, whole vectors and tails.
SHAPES = [
    (1, 1), (4, 32), (8, 8), (3, 40), (2, 7), (1, 7), (1, 64), (2, 64), (2, 128), (8, 128), (5, 16), (1, 20),
    (7, 20), (4, 40), (2, 72), (1, 150), (3, 256), (1, 250), (1, 300), (2, 512), (1, 500), (33, 4), (40, 33),
]  # fmt: skip
HALF = [torch.bfloat16, torch.float16]


@EVERY_DEVICE
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("options", OPTIONS)
def test_double_equals_the_reference(score, kind, options, device):
    for index_dtype in (torch.int32, torch.int64):
        compare(device, score, graph_of(kind, index_dtype), 4, 8, OPTIONS[options], torch.float64)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("options", OPTIONS)
def test_every_option_goes_to_plain_pytorch_where_it_computes(score, options):
    graph = graph_of("square")
    given = inputs_of(score, graph, 2, 4, OPTIONS[options], torch.float64)
    with backend("reference"):
        found = run(functional, score, graph, *given)
    assert_close(found, run(functional, score, graph, *given), TOLERANCE[torch.float64])


@EVERY_DEVICE
@pytest.mark.parametrize("heads,channels", SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("score,options", [
    (score, options) for score in SCORES for options in ("plain", "dropout", "all")
])  # fmt: skip
def test_every_head_dim(score, heads, channels, dtype, options, device):
    if dtype == torch.float32 and score == "gatv2" and options == "all":
        options = "scale"  # a sum of three terms near the kink of the LeakyReLU may round to either side: see below
    too_wide = dtype == torch.float64 and device != "cpu" and channels > 256
    with pytest.raises(ValueError, match="up to 256 features") if too_wide else contextlib.nullcontext():
        compare(device, score, graph_of("square"), heads, channels, OPTIONS[options], dtype)


@EVERY_DEVICE
@pytest.mark.parametrize("heads,channels", SHAPES)
def test_gatv2_with_edges_in_single_precision(heads, channels, device):
    """As above, with inputs on a grid of 1/256: their sums are exact, so no rounding decides a sign."""
    graph = graph_of("square")
    args, tensors, rest = inputs_of("gatv2", graph, heads, channels, OPTIONS["all"], torch.float64)
    args = [((t.detach() * 256).round() / 256).float().requires_grad_() for t in args]
    tensors = {name: ((t.detach() * 256).round() / 256).float().requires_grad_() for name, t in tensors.items()}
    found = run(functional, "gatv2", graph, args, tensors, rest, device=device)
    assert_close(found, exact("gatv2", graph, args, tensors, rest), 1e-5)


@EVERY_DEVICE
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("heads,channels", [(4, 32), (3, 40), (2, 64), (8, 128), (1, 20), (2, 256)])
def test_rows_of_few_edges(score, heads, channels, device):
    """Two edges a row in the mean, and a hub in either direction; on CUDA these have kernels of their own."""
    gen = torch.Generator().manual_seed(6)
    src, dst = (torch.randint(0, 700, (1400,), generator=gen) for _ in range(2))
    dst[:200], src[200:400] = 3, 5
    graph = Graph.from_edge_index(torch.stack([src, dst]), 700, 700)
    compare(device, score, graph, heads, channels, (), torch.float32)


@EVERY_DEVICE
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_edge_features_of_many_rows(dtype, device):
    """On CUDA the sums over all rows, of which the gradient of edge_proj is made, are cut into parts."""
    gen = torch.Generator().manual_seed(8)
    edges = torch.randint(0, 9001, (2, 20_000), generator=gen)
    compare(device, "dot", Graph.from_edge_index(edges, 9001, 9001), 3, 12, OPTIONS["edges"], dtype)


@EVERY_DEVICE
@pytest.mark.parametrize("dtype,channels", [
    (torch.bfloat16, 1024), (torch.bfloat16, 700), (torch.float16, 1000), (torch.float16, 520), (torch.float64, 256),
])  # fmt: skip
def test_the_widest_heads(dtype, channels, device):
    for score in SCORES:
        compare(device, score, graph_of("bipartite"), 1, channels, (), dtype)


@pytest.mark.cuda
def test_heads_wider_than_any_kernel_are_named():
    graph = graph_of("square").to("cuda")
    x = torch.randn(40, 1, 1025, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="may take up to 1024 features .* got 1025"):
        functional.dot_attention(graph, x, x, x)


@EVERY_DEVICE
def test_values_of_another_width_than_keys(device):
    graph = graph_of("bipartite")
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for dim, channels in ((8, 32), (5, 16), (64, 3), (128, 8), (4, 200), (4, 3), (2, 4)):
            gen = torch.Generator().manual_seed(2)
            shapes = [(graph.num_dst, dim), (graph.num_src, dim), (graph.num_src, channels)]
            args = [torch.randn(n, 2, c, dtype=dtype, generator=gen).requires_grad_() for n, c in shapes]
            found = run(functional, "dot", graph, args, {}, {}, device=device)
            assert_close(found, exact("dot", graph, args, {}, {}), TOLERANCE[dtype])


@EVERY_DEVICE
def test_wide_indices(device):
    """Graphs of more than 2**31 edges have int64 arrays; any graph may be given so to the op."""
    graph = graph_of("hub")
    for score in SCORES:
        for dtype, channels in itertools.product((torch.float32, torch.bfloat16, torch.float64), (16, 4)):
            given = inputs_of(score, graph, 2, channels, (), dtype)
            found = run(functional, score, with_wide_indices(graph), *given, device=device)
            narrow = run(functional, score, graph, *given, device=device)
            bound = 2e-2 if dtype == torch.bfloat16 else 1e-5
            assert all(error(a, b) < bound for a, b in zip(found, narrow, strict=True))


# Precision -------------------------------------------------------------------------------------------------------


@EVERY_DEVICE
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("kind", ["square", "hub", "bipartite"])
def test_half_precision_errs_at_most_twice_as_much_as_torch(score, dtype, kind, device, monkeypatch):
    graph = graph_of(kind)
    for heads, channels in ((4, 32), (3, 7), (4, 4), (2, 3)):
        for options in ("plain", "all"):
            given = inputs_of(score, graph, heads, channels, OPTIONS[options], dtype)
            found = run(functional, score, graph, *given, device=device)
            with monkeypatch.context() as patch:
                patch.setattr(reference, "_prepare", in_its_own_precision)
                torchs = run(reference, score, graph, *given)
            for i, (a, b, c) in enumerate(zip(found, torchs, exact(score, graph, *given), strict=True)):
                assert error(a, c) <= 2 * error(b, c), (heads, channels, options, i)


@EVERY_DEVICE
@pytest.mark.parametrize("score", SCORES)
def test_float_output_of_half_inputs(score, device):
    """As under autocast: rows in bfloat16, output and its gradient in float32."""
    graph = graph_of("hub")
    for channels in (32, 12, 7, 4, 3):
        args, _, _ = inputs_of(score, graph, 4, channels, (), torch.bfloat16)
        found = run(functional, score, graph, args, {}, {"out_dtype": torch.float32}, device=device)
        wanted = exact(score, graph, args, {}, {})
        assert found[0].dtype == torch.float32
        assert error(found[0], wanted[0]) < 1e-5
        assert all(error(a, b) < 0.01 for a, b in zip(found[1:], wanted[1:], strict=True))


@EVERY_DEVICE
@pytest.mark.parametrize("dtype", HALF)
def test_edge_logits_of_gat_in_float32_are_not_rounded_to_its_values(dtype, device):
    graph, gen = graph_of("square").to(device), torch.Generator().manual_seed(3)
    values = torch.randn(graph.num_src, 2, 16, generator=gen).to(device, dtype)
    logits = torch.randn(graph.num_edges, 2, generator=gen).to(device).requires_grad_()
    constants = torch.zeros(graph.num_src, 2, device=device), torch.zeros(graph.num_dst, 2, device=device)
    grad = torch.randn(graph.num_dst, 2, 16, generator=gen).to(device, dtype).float()  # CUDA rounds it to the values'

    def results(values, *constants, of=functional):
        given = {"edge_attr": logits, "edge_proj": torch.eye(2, device=device)}
        given = {key: t.to(constants[0].dtype) for key, t in given.items()}
        out = of.gat_attention(graph, values, *constants, **given, out_dtype=constants[0].dtype)
        return out, torch.autograd.grad(out, logits, grad.to(out.dtype))[0]

    wanted = results(values.double(), *(t.double() for t in constants), of=reference)
    for found, want in zip(results(values, *constants), wanted, strict=True):
        assert (found - want).norm() <= 1e-5 * want.norm()


@EVERY_DEVICE
def test_large_logits_do_not_overflow(device):
    graph = graph_of("hub")
    q, k, v = (torch.randn(n, 2, 16) for n in (graph.num_dst, graph.num_src, graph.num_src))
    found = functional.dot_attention(graph.to(device), *(t.to(device) for t in (100 * q, 100 * k, v)))
    expected = reference.dot_attention(graph, 100 * q.double(), 100 * k.double(), v.double())
    assert torch.isfinite(found).all()
    assert error(found.cpu(), expected) < 1e-4  # logits of a few thousand carry an error of 1e-4 in float32


@EVERY_DEVICE
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("size", [1.0, 4e3, 3e5, 2e7])
def test_returned_weights_of_large_logits_sum_to_one(score, size, device):
    """The hub is one that a block of threads sums."""
    for kind in ("square", "hub"):
        graph = graph_of(kind)
        args, _, _ = inputs_of(score, graph, 2, 8, (), torch.float32)
        with torch.no_grad():
            for t in {"gat": args[1:], "dot": args[:1]}.get(score, args[2:]):
                t *= size
        args = [t.detach().to(device) for t in args]
        _, weights = function_of(score)(graph.to(device), *args, return_weights="softmax")
        sums = torch.zeros(graph.num_dst, 2).index_add_(0, graph.edge_index()[1], weights.cpu())
        has_edges = (graph.in_degrees() > 0)[:, None].expand(-1, 2)
        torch.testing.assert_close(sums, has_edges.float(), rtol=0, atol=2e-5)
        _, kept = function_of(score)(graph.to(device), *args, dropout=0.25, seed=3, return_weights="dropped")
        drawn = kept != 0
        assert 0.6 < drawn[weights > 0].float().mean() < 0.9
        torch.testing.assert_close(kept[drawn], weights[drawn] / 0.75)


@EVERY_DEVICE
@pytest.mark.parametrize("slope", [0.0, 1.0, 1.5, -0.3])
def test_any_negative_slope(slope, device):
    graph, rest = graph_of("square"), {"negative_slope": slope}
    for score in ("gatv2", "gat"):
        args, _, _ = inputs_of(score, graph, 2, 8, (), torch.float32)
        found = run(functional, score, graph, args, {}, rest, device=device)
        assert_close(found, exact(score, graph, args, {}, rest), 1e-5)


@EVERY_DEVICE
def test_zero_features_take_the_slope(device):
    """x_l + x_r = 0 everywhere: PyTorch's LeakyReLU has the slope as its derivative at 0."""
    graph = graph_of("square")
    for score in ("gatv2", "gat"):
        args, _, _ = inputs_of(score, graph, 2, 8, (), torch.float32)
        with torch.no_grad():
            for t in args[:2] if score == "gatv2" else args[1:]:
                t.zero_()
            if score == "gat":
                args[0].copy_(torch.randn(args[0].shape, generator=torch.Generator().manual_seed(1)))
        found = run(functional, score, graph, args, {}, {}, device=device)
        assert_close(found, exact(score, graph, args, {}, {}), 1e-5)


@EVERY_DEVICE
def test_nan_reaches_its_rows_and_no_others(device):
    edges = torch.stack([torch.arange(600) % 300, torch.arange(600) // 2])  # row r: sources 2r and 2r + 1, mod 300
    graph = Graph.from_edge_index(edges, 300, 300)
    touched = torch.zeros(300, dtype=torch.bool)
    touched[edges[1][edges[0] == 7]] = True
    for score in SCORES:
        args, _, _ = inputs_of(score, graph, 2, 8, (), torch.float32)
        args = [t.detach().to(device) for t in args]
        args[1 if score == "dot" else 0][7] = float("nan")
        nan = function_of(score)(graph.to(device), *args).cpu().isnan().flatten(1)
        assert torch.equal(nan.all(1), touched) and torch.equal(nan.any(1), touched)


# Gradients -------------------------------------------------------------------------------------------------------


@EVERY_DEVICE
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("options", ["plain", "all"])
def test_gradcheck(score, options, device):
    graph = Graph.from_edge_index(torch.tensor([[0, 1, 2, 2, 3, 3], [0, 0, 1, 2, 2, 2]]), 5, 4)
    args, tensors, rest = leaves_of(device, score, graph, 2, 3, OPTIONS[options], torch.float64)
    graph, names = graph.to(device), list(tensors)

    def call(*leaves):
        given = dict(zip(names, leaves[len(args) :], strict=True))
        return function_of(score)(graph, *leaves[: len(args)], **given, **rest)

    assert torch.autograd.gradcheck(call, [*args, *tensors.values()])


@pytest.mark.parametrize(
    "options",
    [{}, {"dropout": 0.3, "seed": 5}, {"edge_scale": torch.linspace(0.5, 1.5, 40)}],
    ids=["plain", "dropout", "weights"],
)
@pytest.mark.parametrize("score", ["dot", "gat"])
def test_the_score_of_a_single_neighbour_has_no_gradient(score, options):
    """Its weight is 1 whatever the score: a sum that is taken from the result instead would leave a rounding error."""
    graph = Graph.from_edge_index(torch.stack([torch.arange(40) % 7, torch.arange(40)]), 7, 40)
    q, k, v = (torch.randn(n, 2, 8, generator=torch.Generator().manual_seed(n)) for n in (40, 7, 8))
    if score == "dot":
        k.requires_grad_()
        out, wanted = functional.dot_attention(graph, q, k, v[:7], **options), k
    else:
        wanted = k[..., 0].clone().requires_grad_()
        out = functional.gat_attention(graph, v[:7], wanted, q[..., 0].clone(), **options)
    assert not torch.autograd.grad(out.square().sum(), wanted)[0].any()


@EVERY_DEVICE
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("options", ["plain", "all"])
def test_each_gradient_alone_is_the_same(score, options, device):
    """Passes that nobody asked for are left out; what is left must not change, but in the last bit on the CPU, where a
    row's sum of weighted gradients is taken from its result if its edges are not walked.
    """
    graph = graph_of("hub")
    args, tensors, rest = leaves_of(device, score, graph, 2, 8, OPTIONS[options], torch.float32)
    graph = graph.to(device)
    rest.pop("return_weights", None)
    leaves = [*args, *tensors.values()]

    def grads(wanted):
        given = [t.detach().requires_grad_(w) for t, w in zip(leaves, wanted, strict=True)]
        named = dict(zip(tensors, given[len(args) :], strict=True))
        out = function_of(score)(graph, *given[: len(args)], **named, **rest)
        return torch.autograd.grad(out.square().sum(), [t for t, w in zip(given, wanted, strict=True) if w])

    together = grads([True] * len(leaves))
    for i in range(len(leaves)):
        (alone,) = grads([i == j for j in range(len(leaves))])
        assert torch.equal(alone, together[i]) or (device == "cpu" and error(alone, together[i]) < 1e-6), i


@pytest.mark.cuda
@pytest.mark.parametrize("score", ["gatv2", "dot"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels", [8, 5])
@pytest.mark.parametrize("reverse", [False, True])
def test_gradients_of_parts_of_one_tensor_are_parts_of_one(score, dtype, channels, reverse):
    graph, heads, count = graph_of("square").to("cuda"), 3, 3 if score == "dot" else 2
    rows = torch.randn(graph.num_dst, count, heads, channels, device="cuda", dtype=dtype)
    parts = rows.flip(1).unbind(1) if reverse else rows.unbind(1)
    parts = [t.requires_grad_() for t in (parts[::-1] if reverse else parts)]
    alone = [t.detach().clone().requires_grad_() for t in parts]
    att = () if score == "dot" else (torch.randn(heads, channels, device="cuda", dtype=dtype),)
    results = []
    for leaves in (parts, alone):
        out = function_of(score)(graph, *leaves, *att)
        results.append(torch.autograd.grad(out, leaves, torch.ones_like(out) * out.detach()))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    storages = [len({t.untyped_storage().data_ptr() for t in grads}) for grads in results]
    assert storages == [1, count]
    starts = [[t.storage_offset() for t in tensors] for tensors in (parts, results[0])]
    assert sorted(range(count), key=starts[0].__getitem__) == sorted(range(count), key=starts[1].__getitem__)


# Inputs of all kinds ---------------------------------------------------------------------------------------------


def of_score(score, a, b, c, att, beta):
    """What a function takes, of three tensors of rows."""
    return {"gatv2": [a, b, att], "gat": [a, b[..., 0], c[..., -1]], "cosine": [a, b, beta], "dot": [a, b, c]}[score]


def assert_strides_do_not_matter(score, graph, args, **tensors):
    leaves = [t.detach().requires_grad_() for t in args]
    packed = [t.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for t in args]
    out = function_of(score)(graph, *leaves, **tensors)
    expected = function_of(score)(graph, *packed, **{name: t.contiguous() for name, t in tensors.items()})
    assert torch.equal(out, expected)
    found = torch.autograd.grad(out.sum(), leaves)  # an expanded gradient
    wanted = torch.autograd.grad((expected * torch.ones_like(expected)).sum(), packed)
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


@EVERY_DEVICE
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_strided_expanded_and_transposed_inputs(score, dtype, device):
    graph = graph_of("square").to(device)
    n, options = graph.num_src, {"dtype": dtype, "device": device}
    wide = torch.randn(n, 3 * 4 * 8, **options)
    slices = [wide[:, i * 32 : (i + 1) * 32].view(n, 4, 8) for i in range(3)]
    turned = torch.randn(8, 4, n, **options).permute(2, 1, 0)
    same = torch.randn(1, 4, 8, **options).expand(n, 4, 8)
    shifted = [torch.randn(n * 32 + 1, **options)[1:].view(n, 4, 8) for _ in range(3)]  # not on 16 bytes
    beta = torch.randn(8, dtype=torch.promote_types(dtype, torch.float32), device=device)[::2]
    scale = torch.rand(graph.num_edges, 1, **options).expand(-1, 4)
    for rows in (slices, (turned, same, slices[0]), shifted):
        args = of_score(score, *rows, torch.randn(8, 4, **options).t(), beta)
        assert_strides_do_not_matter(score, graph, args, edge_scale=scale)


@EVERY_DEVICE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("channels", [1, 3, 7, 13])
def test_odd_rows_of_any_strides(score, dtype, channels, device):
    """Rows that are no whole vectors are copied: whatever their strides, the bits are the same."""
    graph = graph_of("square").to(device)
    n, heads, options = graph.num_src, 3, {"dtype": dtype, "device": device}
    strided = torch.randn(2 * n, heads + 1, channels + 2, **options)[::2, 1:, 1:-1]
    transposed = torch.randn(channels, heads, n, **options).permute(2, 1, 0)
    expanded = torch.randn(1, heads, channels, **options).expand(n, -1, -1)
    beta = torch.ones(1, dtype=torch.promote_types(dtype, torch.float32), device=device)
    for rows in ((strided, transposed, expanded), (transposed, expanded, strided)):
        assert_strides_do_not_matter(score, graph, of_score(score, *rows, rows[2][0], beta))


@EVERY_DEVICE
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("heads,channels", [(8, 4), (3, 3), (2, 12), (3, 20), (4, 8), (5, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["bipartite", "hub"])
@pytest.mark.parametrize("options", ["plain", "dropout", "all"])
def test_narrow_heads(score, heads, channels, dtype, kind, options, device):
    """A lane has several edges at a time; with dropout, lanes of two heads or four vote, and those of five cannot."""
    compare(device, score, graph_of(kind), heads, channels, OPTIONS[options], dtype)


@EVERY_DEVICE
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("heads,channels", [(4, 64), (3, 40), (2, 200), (1, 340)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["bipartite", "hub"])
@pytest.mark.parametrize("options", ["dropout", "all"])
def test_long_rows_with_options(score, heads, channels, dtype, kind, options, device):
    """Batches are longer, and ids and arrays of the edges are asked for ahead of them."""
    if dtype == torch.float32 and score == "gatv2" and options == "all":
        options = "weights"  # see test_every_head_dim
    compare(device, score, graph_of(kind), heads, channels, OPTIONS[options], dtype)


@EVERY_DEVICE
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_edge_feature_whose_projection_begins_anywhere(dtype, device):
    """Its transpose is contiguous and is read as it is, in vectors where it begins on 16 bytes."""
    args, _, rest = inputs_of("gatv2", graph_of("square"), 4, 8, OPTIONS["dropout"], dtype)
    attr, proj = torch.randn(300, 1, dtype=dtype), torch.randn(4 * 8 + 1, dtype=dtype, device=device)
    graph, args, attr = graph_of("square").to(device), [t.to(device) for t in args], attr.to(device)
    at, aligned = proj[1:].view(4, 8, 1), proj[1:].clone().view(4, 8, 1)
    found, expected = (
        functional.gatv2_attention(graph, *args, edge_attr=attr, edge_proj=p, **rest) for p in (at, aligned)
    )
    assert torch.equal(found, expected)


@EVERY_DEVICE
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_many_rows_without_edges_in_either_direction(score, dtype, device):
    """Whole warps whose rows have no edge: what they add to the gradient of the attention vector is 0, not garbage."""
    src, dst = torch.randint(40, (2, 60), generator=torch.Generator().manual_seed(1)) * 97
    compare(device, score, Graph.from_edge_index(torch.stack([src, dst]), 4000, 4000), 4, 32, (), dtype)


@EVERY_DEVICE
def test_rows_without_edges_are_zero_and_get_no_gradient(device):
    graph = Graph.from_edge_index(torch.tensor([[0], [1]]), 3, 4)
    for score in SCORES:
        args, _, _ = leaves_of(device, score, graph, 2, 4, (), torch.float32)
        poison(device)
        out = function_of(score)(graph.to(device), *args)
        assert out[[0, 2, 3]].eq(0).all() and out[1].ne(0).any()
        grads = torch.autograd.grad(out.square().sum(), args)
        assert all(torch.isfinite(g).all() for g in grads)


# Dropout ---------------------------------------------------------------------------------------------------------


@EVERY_DEVICE
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_dropout_rate_scale_and_mask(p, device):
    graph = graph_of("hub")
    for score in SCORES:
        args, _, _ = leaves_of(device, score, graph, 6, 4, (), torch.float32)
        call = function_of(score)
        _, kept = call(graph.to(device), *args, dropout=p, seed=-9, return_weights="dropped")
        _, full = call(graph.to(device), *args, return_weights="softmax")
        mask = reference.dropout_mask(-9, graph.num_edges, 6, p)
        assert abs(mask.float().mean().item() - (1 - p)) < 0.01
        scale = 1 / (1 - p) if p < 1 else 0.0
        torch.testing.assert_close(kept.cpu(), torch.where(mask, full.cpu() * scale, 0.0))


@EVERY_DEVICE
def test_dropout_follows_torchs_generator(device):
    graph = graph_of("square")
    args, _, _ = leaves_of(device, "gat", graph, 2, 4, (), torch.float32)
    graph, call = graph.to(device), functional.gat_attention
    torch.manual_seed(1)
    first, second = call(graph, *args, dropout=0.5), call(graph, *args, dropout=0.5)
    torch.manual_seed(1)
    assert torch.equal(first, call(graph, *args, dropout=0.5)) and not torch.equal(first, second)


@EVERY_DEVICE
def test_dropout_is_keyed_on_the_original_edge(device):
    """The same edges in another order, with ids that say so, lose the same edges."""
    ids = torch.randperm(400, generator=torch.Generator().manual_seed(0))
    edge_index = graph_of("bipartite").edge_index()
    graph = Graph.from_edge_index(edge_index.to(device), 50, 40)
    shuffled = Graph.from_edge_index(edge_index[:, ids].to(device), 50, 40)
    args, _, _ = leaves_of(device, "gat", graph, 2, 4, (), torch.float32)
    _, a = functional.gat_attention(graph, *args, dropout=0.5, seed=4, return_weights="dropped")
    _, b = functional.gat_attention(shuffled, *args, dropout=0.5, seed=4, return_weights="dropped")
    assert torch.equal(a.cpu() == 0, ~reference.dropout_mask(4, 400, 2, 0.5))
    assert torch.equal(b.cpu() == 0, ~reference.dropout_mask(4, 400, 2, 0.5))


# The same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("score", SCORES)
def test_bitwise_the_same_from_run_to_run_and_for_any_number_of_threads(score):
    graph = graph_of("hub")
    args, tensors, rest = inputs_of(score, graph, 4, 16, OPTIONS["all"], torch.float32)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 2, 3):
            torch.set_num_threads(threads)
            results.append(run(functional, score, graph, args, tensors, rest))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.cuda
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", ["plain", "all"])
def test_bitwise_the_same_in_twenty_runs(score, dtype, options):
    graph = star(60_000)
    given = inputs_of(score, graph, 4, 32, OPTIONS[options], dtype)
    first = run(functional, score, graph, *given, device="cuda")
    for _ in range(19):
        again = run(functional, score, graph, *given, device="cuda")
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def results_of_every_score():
    found, graph = [], graph_of("hub")
    for score in SCORES:
        for heads, channels in ((4, 32), (3, 7)):
            for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
                given = inputs_of(score, graph, heads, channels, OPTIONS["all"], dtype)
                found += [x.detach() for x in run(functional, score, graph, *given)]
    return found


@pytest.mark.parametrize("capability", ["baseline", "avx2"])
def test_lower_instruction_sets_agree(capability):
    with narrowed(capability):
        found = results_of_every_score()
    for x, y in zip(found, results_of_every_score(), strict=True):
        tolerance = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[x.dtype]
        assert error(x, y) < tolerance


# Hubs on CUDA, over many blocks ----------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("options", ["plain", "all"])
def test_hubs_over_many_blocks(score, options):
    graph = star()
    args, tensors, rest = inputs_of(score, graph, 2, 16, OPTIONS[options], torch.float64)
    rest.pop("return_weights", None)
    found = run(functional, score, graph, args, tensors, rest, device="cuda")
    assert_close(found, exact(score, graph, args, tensors, rest), 1e-9)
    if options == "plain":
        single = [t.detach().float().requires_grad_() for t in args]
        found = run(functional, score, graph, single, {}, rest, device="cuda")
        assert_close(found, exact(score, graph, single, {}, rest), 1e-5)


def rows_of_many_lengths():
    """Hubs that end soon after the cut of a block, by chance: what is left may not fill the block's sub-warps."""
    gen = torch.Generator().manual_seed(4)
    degrees = torch.randint(0, 3000, (200,), generator=gen)
    dst = torch.arange(200).repeat_interleave(degrees)
    src = torch.randint(0, 200, dst.shape, generator=gen)
    return Graph.from_edge_index(torch.stack([src, dst]), 200, 200)


@pytest.mark.cuda
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("heads,channels", [(4, 32), (1, 256), (8, 8), (1, 4), (5, 44), (1, 88)])
@pytest.mark.parametrize("dtype,bound", [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_hubs_of_many_lengths(score, heads, channels, dtype, bound):
    graph = rows_of_many_lengths()
    given = inputs_of(score, graph, heads, channels, (), dtype)
    found = run(functional, score, graph, *given, device="cuda")
    for a, b in zip(found, exact(score, graph, *given, device="cuda"), strict=True):
        if len(b) == graph.num_src:  # a wrong row hides among the others
            a, b = a.double().flatten(1), b.flatten(1)
            size = b.norm(dim=1).mean()
            assert ((a - b).norm(dim=1) <= bound * (b.norm(dim=1) + size)).all()


@pytest.mark.cuda
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("channels", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_more_rows_than_lanes(score, channels, dtype):
    """Narrow rows have a lane or two each then, where otherwise each lane has an edge of its own."""
    gen, rows = torch.Generator().manual_seed(6), 250_000
    edges = torch.randint(0, rows, (2, 400_000), generator=gen)
    edges[1, :30_000] = 7
    compare("cuda", score, Graph.from_edge_index(edges, rows, rows), 1, channels, (), dtype)
