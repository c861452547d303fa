"""The attention functions against plain PyTorch in float64: values, every gradient, every option, odd shapes."""

import itertools

import pytest
import torch

import edgeless
from edgeless import _C, Graph, functional, reference

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
SCORES = _C.SCORES  # of core_cuda/attention/score.h: a score without a kernel, or without a reference, fails below
SHAPES = [(1, 1), (4, 32), (8, 8), (3, 40), (2, 7), (1, 64), (2, 128), (5, 16), (1, 20)]
OPTIONS = {
    "plain": (),
    "edges": ("edges",),
    "scale": ("scale",),
    "dropout": ("dropout",),
    "weights": ("weights",),
    "all": ("edges", "scale", "dropout", "weights"),
}


def graph_of(kind: str, index_dtype=torch.int64) -> Graph:
    gen = torch.Generator().manual_seed(3)

    def draw(high, n):
        return torch.randint(0, high, (n,), generator=gen)

    src_nodes, dst_nodes = 50, 40
    if kind == "bipartite":  # multi-edges and isolated nodes among them
        src, dst = draw(50, 400), draw(30, 400)
    elif kind == "square":  # with self loops
        src_nodes = dst_nodes = 40
        src, dst = draw(40, 300), draw(40, 300)
        dst[:20] = src[:20]
    elif kind == "hub":  # one row over many parts
        src, dst = draw(50, 9000), draw(40, 9000)
        dst[torch.rand(9000, generator=gen) < 0.8] = 7
    elif kind == "no edges":
        src = dst = torch.empty(0, dtype=torch.int64)
    elif kind == "no nodes":
        src_nodes = dst_nodes = 0
        src = dst = torch.empty(0, dtype=torch.int64)
    elif kind == "many empty rows":
        src_nodes, dst_nodes = 5000, 6000
        src, dst = draw(5000, 40), draw(6000, 40)
    return Graph.from_edge_index(torch.stack([src, dst]).to(index_dtype), src_nodes, dst_nodes)


GRAPHS = ("bipartite", "square", "hub", "no edges", "no nodes", "many empty rows")


def inputs_of(score, graph, heads, channels, options, dtype):
    """Positional inputs and tensor options as leaves of ``dtype``, and the options that are no tensors."""
    gen = torch.Generator().manual_seed(5)

    def leaf(*shape, scale=1.0):
        return (scale * torch.randn(*shape, dtype=torch.float64, generator=gen)).to(dtype).requires_grad_()

    ns, nd, e = graph.num_src, graph.num_dst, graph.num_edges
    if score == "gatv2":
        args = [leaf(ns, heads, channels), leaf(nd, heads, channels), leaf(heads, channels, scale=channels**-0.5)]
    elif score == "gat":
        args = [leaf(ns, heads, channels), leaf(ns, heads), leaf(nd, heads)]
    elif score == "cosine":
        args = [leaf(ns, heads, channels), leaf(nd, heads, channels), leaf(heads, scale=2.0)]
    else:
        args = [leaf(nd, heads, channels), leaf(ns, heads, channels), leaf(ns, heads, channels)]
    tensors, rest = {}, {}
    if "edges" in options and score != "cosine":  # which has no edge features
        tensors["edge_attr"] = leaf(e, 5)
        tensors["edge_proj"] = leaf(heads, 5, scale=0.5) if score == "gat" else leaf(heads, channels, 5, scale=0.5)
    if "scale" in options:
        tensors["edge_scale"] = leaf(e, heads)
    if "dropout" in options:
        rest.update(dropout=0.4, seed=123)
    if "weights" in options:
        rest["return_weights"] = "dropped" if "dropout" in options else "softmax"
    return args, tensors, rest


def run(module, score, graph, args, tensors, rest, grads=None):
    """Outputs and the gradients of all leaves, as one flat list; draws the outputs' gradients where none are given."""
    outs = getattr(module, f"{score}_attention")(graph, *args, **tensors, **rest)
    outs = outs if isinstance(outs, tuple) else (outs,)
    if grads is None:
        gen = torch.Generator().manual_seed(11)
        grads = [torch.randn(o.shape, dtype=torch.float64, generator=gen) for o in outs]
    leaves = [*args, *tensors.values()]
    found = torch.autograd.grad(
        outs, leaves, [g.to(o.dtype) for g, o in zip(grads, outs, strict=True)], allow_unused=True
    )
    found = [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves, strict=True)]
    return [*outs, *found]


def raised(tensors, dtype=torch.float64):
    return [t.detach().to(dtype).requires_grad_() for t in tensors]


def error(a, b):
    scale = b.double().norm()
    return ((a.double() - b.double()).norm() / scale).item() if scale > 1e-12 else a.double().norm().item()


def assert_close(found, expected, tolerance):
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.shape == b.shape
        assert error(a, b) <= tolerance, f"tensor {i}: relative error {error(a, b):.2e} over {tolerance:.0e}"


def compare(score, graph, heads, channels, options, dtype):
    args, tensors, rest = inputs_of(score, graph, heads, channels, options, dtype)
    found = run(functional, score, graph, args, tensors, rest)
    expected = run(
        reference, score, graph, raised(args), dict(zip(tensors, raised(tensors.values()), strict=True)), rest
    )
    if dtype in TOLERANCE:
        assert_close(found, expected, TOLERANCE[dtype])
    return found, expected


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("options", OPTIONS)
def test_double_equals_the_reference(score, kind, options):
    for index_dtype in (torch.int32, torch.int64):
        compare(score, graph_of(kind, index_dtype), 4, 8, OPTIONS[options], torch.float64)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("heads,channels", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_head_dim(score, heads, channels, dtype):
    for options in ("plain", "all"):
        if dtype == torch.float32 and score == "gatv2" and options == "all":
            continue  # a sum of three terms near the kink of the LeakyReLU may round to either side: see below
        compare(score, graph_of("square"), heads, channels, OPTIONS[options], dtype)


@pytest.mark.parametrize("heads,channels", SHAPES)
def test_gatv2_with_edges_in_single_precision(heads, channels):
    """As above, with inputs on a grid of 1/256: their sums are exact, so no rounding decides a sign."""
    graph = graph_of("square")
    args, tensors, rest = inputs_of("gatv2", graph, heads, channels, OPTIONS["all"], torch.float64)
    grid = [(t.detach() * 256).round() / 256 for t in [*args, *tensors.values()]]
    single = [t.float().requires_grad_() for t in grid]
    double = [t.requires_grad_() for t in grid]
    n = len(args)
    found = run(functional, "gatv2", graph, single[:n], dict(zip(tensors, single[n:], strict=True)), rest)
    expected = run(reference, "gatv2", graph, double[:n], dict(zip(tensors, double[n:], strict=True)), rest)
    assert_close(found, expected, 1e-5)


def in_its_own_precision(tensors, dropout, seed, out_dtype):
    """In the place of reference._prepare: PyTorch's arithmetic in the dtype of the inputs."""
    return tensors, seed, out_dtype or tensors[0].dtype


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["square", "hub", "bipartite"])
def test_half_precision_errs_at_most_twice_as_much_as_torch(score, dtype, kind, monkeypatch):
    graph = graph_of(kind)
    for heads, channels in ((4, 32), (3, 7)):
        for options in ("plain", "all"):
            args, tensors, rest = inputs_of(score, graph, heads, channels, OPTIONS[options], dtype)
            found = run(functional, score, graph, args, tensors, rest)
            exact = run(
                reference, score, graph, raised(args), dict(zip(tensors, raised(tensors.values()), strict=True)), rest
            )
            with monkeypatch.context() as patch:
                patch.setattr(reference, "_prepare", in_its_own_precision)
                torchs = run(reference, score, graph, args, tensors, rest)
            for a, b, c in zip(found, torchs, exact, strict=True):
                assert error(a, c) <= 2 * error(b, c)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
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

    exact = results(values.double(), *(t.double() for t in constants), of=reference)
    for found, want in zip(results(values, *constants), exact, strict=True):
        assert (found - want).norm() <= 1e-5 * want.norm()


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("options", ["plain", "all"])
def test_gradcheck(score, options):
    graph = Graph.from_edge_index(torch.tensor([[0, 1, 2, 2, 3, 3], [0, 0, 1, 2, 2, 2]]), 5, 4)
    args, tensors, rest = inputs_of(score, graph, 2, 3, OPTIONS[options], torch.float64)
    names = list(tensors)

    def call(*leaves):
        given = dict(zip(names, leaves[len(args) :], strict=True))
        return getattr(functional, f"{score}_attention")(graph, *leaves[: len(args)], **given, **rest)

    assert torch.autograd.gradcheck(call, [*args, *tensors.values()])


@pytest.mark.parametrize("score", SCORES)
def test_each_gradient_alone_is_the_same(score):
    """Passes that nobody asked for are left out; what is left must not change."""
    graph = graph_of("hub")
    args, tensors, rest = inputs_of(score, graph, 2, 8, OPTIONS["all"], torch.float64)
    rest.pop("return_weights")
    leaves = [*args, *tensors.values()]
    call = getattr(functional, f"{score}_attention")

    def grads(wanted):
        given = [t.detach().requires_grad_(w) for t, w in zip(leaves, wanted, strict=True)]
        out = call(graph, *given[: len(args)], **dict(zip(tensors, given[len(args) :], strict=True)), **rest)
        return torch.autograd.grad(out.square().sum(), [t for t, w in zip(given, wanted, strict=True) if w])

    together = grads([True] * len(leaves))
    for i in range(len(leaves)):
        (alone,) = grads([i == j for j in range(len(leaves))])
        assert torch.equal(alone, together[i])


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


@pytest.mark.parametrize("score", SCORES)
def test_strided_expanded_and_transposed_inputs(score):
    graph = graph_of("square")
    n = graph.num_src
    wide = torch.randn(n, 3 * 4 * 8, dtype=torch.float64)
    slices = [wide[:, i * 32 : (i + 1) * 32].view(n, 4, 8) for i in range(3)]
    assert not slices[0].is_contiguous()
    turned = torch.randn(8, 4, n, dtype=torch.float64).permute(2, 1, 0)
    same = torch.randn(1, 4, 8, dtype=torch.float64).expand(n, 4, 8)
    for a, b, c in ((*slices,), (turned, same, slices[0])):
        if score == "gatv2":
            args = [a, b, torch.randn(8, 4, dtype=torch.float64).t()]
        elif score == "gat":
            args = [a, b[..., 0], c[..., 1]]
        elif score == "cosine":
            args = [a, b, torch.randn(8, dtype=torch.float64)[::2]]
        else:
            args = [a, b, c]
        scale = torch.rand(graph.num_edges, 1, dtype=torch.float64).expand(-1, 4)
        leaves = [t.detach().requires_grad_() for t in args]
        packed = [t.detach().contiguous().requires_grad_() for t in args]
        call = getattr(functional, f"{score}_attention")
        out = call(graph, *leaves, edge_scale=scale)
        expected = call(graph, *packed, edge_scale=scale.contiguous())
        assert torch.equal(out, expected)
        # an expanded gradient, as of out.sum()
        found = torch.autograd.grad(out.sum(), leaves)
        wanted = torch.autograd.grad((expected * torch.ones_like(expected)).sum(), packed)
        assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


def test_rows_without_edges_are_zero_and_get_no_gradient():
    graph = Graph.from_edge_index(torch.tensor([[0], [1]]), 3, 4)
    for score in SCORES:
        args, _, _ = inputs_of(score, graph, 2, 4, (), torch.float32)
        out = getattr(functional, f"{score}_attention")(graph, *args)
        assert out[[0, 2, 3]].eq(0).all() and out[1].ne(0).any()
        grads = torch.autograd.grad(out.square().sum(), args)
        assert all(torch.isfinite(g).all() for g in grads)


def test_large_logits_do_not_overflow():
    graph = graph_of("hub")
    q, k, v = (torch.randn(n, 2, 16) for n in (graph.num_dst, graph.num_src, graph.num_src))
    found = functional.dot_attention(graph, 100 * q, 100 * k, v)
    expected = reference.dot_attention(graph, 100 * q.double(), 100 * k.double(), v.double())
    assert torch.isfinite(found).all()
    assert error(found, expected) < 1e-4  # logits of a few thousand carry an error of 1e-4 in float32


def test_nan_reaches_its_rows_and_no_others():
    graph = Graph.from_edge_index(torch.tensor([[0, 1, 2, 0], [0, 0, 1, 2]]), 3, 3)
    q, k, v = torch.randn(3, 3, 1, 4).unbind(0)
    k[2] = float("nan")
    out = functional.dot_attention(graph, q, k, v)
    assert out[1].isnan().all() and not out[[0, 2]].isnan().any()


@pytest.mark.parametrize("score", SCORES)
def test_values_of_another_width_than_keys(score):
    if score != "dot":
        pytest.skip("keys and values are one tensor, or the key is a number")
    graph = graph_of("bipartite")
    for dim, channels in ((8, 32), (5, 16), (64, 3)):
        q = torch.randn(graph.num_dst, 2, dim, dtype=torch.float64, requires_grad=True)
        k = torch.randn(graph.num_src, 2, dim, dtype=torch.float64, requires_grad=True)
        v = torch.randn(graph.num_src, 2, channels, dtype=torch.float64, requires_grad=True)
        args = [q, k, v]
        assert_close(run(functional, "dot", graph, args, {}, {}), run(reference, "dot", graph, args, {}, {}), 1e-10)


# Dropout ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_dropout_rate_scale_and_mask(p):
    graph = graph_of("hub")
    args, _, _ = inputs_of("dot", graph, 6, 4, (), torch.float32)
    _, kept = functional.dot_attention(graph, *args, dropout=p, seed=9, return_weights="dropped")
    _, full = functional.dot_attention(graph, *args, return_weights="softmax")
    mask = reference.dropout_mask(9, graph.num_edges, 6, p)
    assert abs(mask.float().mean().item() - (1 - p)) < 0.01
    scale = 1 / (1 - p) if p < 1 else 0.0
    torch.testing.assert_close(kept, torch.where(mask, full * scale, 0.0))


def test_dropout_follows_torchs_generator():
    graph = graph_of("square")
    args, _, _ = inputs_of("gat", graph, 2, 4, (), torch.float32)
    call = functional.gat_attention
    torch.manual_seed(1)
    first, second = call(graph, *args, dropout=0.5), call(graph, *args, dropout=0.5)
    torch.manual_seed(1)
    assert torch.equal(first, call(graph, *args, dropout=0.5)) and not torch.equal(first, second)


def test_dropout_is_keyed_on_the_original_edge():
    """The same edges in another order, with ids that say so, lose the same edges."""
    ids = torch.randperm(400, generator=torch.Generator().manual_seed(0))
    edge_index = graph_of("bipartite").edge_index()
    graph = Graph.from_edge_index(edge_index, 50, 40)
    shuffled = Graph.from_edge_index(edge_index[:, ids], 50, 40)
    args, _, _ = inputs_of("gat", graph, 2, 4, (), torch.float32)
    _, a = functional.gat_attention(graph, *args, dropout=0.5, seed=4, return_weights="dropped")
    _, b = functional.gat_attention(shuffled, *args, dropout=0.5, seed=4, return_weights="dropped")
    assert torch.equal(a == 0, ~reference.dropout_mask(4, 400, 2, 0.5))
    assert torch.equal(b == 0, ~reference.dropout_mask(4, 400, 2, 0.5))


# As an op --------------------------------------------------------------------------------------------------------


def op_samples(grad: bool):
    graph = graph_of("bipartite")
    for score, options in itertools.product(SCORES, ("plain", "all")):
        args, tensors, rest = inputs_of(score, graph, 2, 8, OPTIONS[options], torch.float64)
        if not grad:
            args = [t.detach() for t in args]
            tensors = {k: t.detach() for k, t in tensors.items()}
        attr, proj, scale = (tensors.get(k) for k in ("edge_attr", "edge_proj", "edge_scale"))
        dropout = rest.get("dropout", 0.0)
        seed = torch.tensor([7]) if dropout else None
        csr, csc = ([t for t in c if t is not None] for c in (graph.csr, graph.csc))
        if score == "gatv2":
            dst, src, value, att = args[1], args[0], None, args[2]
        elif score == "gat":
            dst, src, value, att = args[2].unsqueeze(-1), args[1].unsqueeze(-1), args[0], None
            proj = None if proj is None else proj.unsqueeze(1)
        elif score == "cosine":
            dst, src, value, att = args[1], args[0], None, args[2].unsqueeze(1)
        else:
            dst, src, value, att = *args, None
        yield (dst, src, value, att, attr, proj, scale, csr, csc, seed, score, 0.3, dropout, None)


@pytest.mark.skipif(not hasattr(torch.library, "opcheck"), reason="torch.library.opcheck came with torch 2.4")
@pytest.mark.parametrize("grad", [False, True])
def test_opcheck(grad):
    for sample in op_samples(grad):
        torch.library.opcheck(torch.ops.edgeless.attention, sample)
        dst, src, value, att, attr, proj, scale, csr, csc, seed, *options = sample
        with torch.no_grad():
            out, stats = torch.ops.edgeless.attention(*sample)
        weights = (stats, dst, src, att, attr, proj, csr, csc, seed, *options[:3])
        torch.library.opcheck(torch.ops.edgeless.attention_weights, weights)
        if options[0] == "gat":  # the numbers of nodes without a dimension of their own
            flat = dst.squeeze(2), src.squeeze(2)
            torch.library.opcheck(torch.ops.edgeless.attention, (*flat, *sample[2:]))
            torch.library.opcheck(torch.ops.edgeless.attention_weights, (stats, *flat, *weights[3:]))
        detached = [None if t is None else t.detach() for t in sample[:7]]
        needs = [True] * 7
        backward = (torch.ones_like(out), None, out, stats, *detached, csr, csc, seed, *options[:3], False, needs)
        torch.library.opcheck(torch.ops.edgeless.attention_backward, backward)


@pytest.mark.parametrize("score", SCORES)
def test_double_backward_is_refused_in_words(score):
    graph = graph_of("square")
    args, _, _ = inputs_of(score, graph, 2, 4, (), torch.float64)
    out = getattr(functional, f"{score}_attention")(graph, *args)
    (grad,) = torch.autograd.grad(out.sum(), args[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once only"):
        grad.sum().backward()


def assert_compiles_whole(score, graph, args, tensors, rest):
    """Equal to eager, results and gradients, as one program."""

    def call(graph, args, tensors):
        return getattr(functional, f"{score}_attention")(graph, *args, **tensors, **rest)

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    leaves = [*args, *tensors.values()]

    def results(fn):
        out, weights = fn(graph, args, tensors)
        return [out, weights, *torch.autograd.grad((out.square().sum(), weights.square().sum()), leaves)]

    assert_close(results(compiled), results(call), 1e-12)


@pytest.mark.parametrize("score", SCORES)
def test_compiles_whole_and_equals_eager(score):
    graph = graph_of("square")
    args, tensors, rest = inputs_of(score, graph, 2, 8, OPTIONS["all"], torch.float64)
    assert_compiles_whole(score, graph, args, tensors, rest)


def test_a_new_number_of_edges_does_not_compile_again_and_again():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def call(graph, q, k, v):
        return functional.dot_attention(graph, q, k, v)

    for edges in (50, 60, 71, 83, 97):
        edge_index = torch.randint(0, 20, (2, edges))
        graph = Graph.from_edge_index(edge_index, 20, 20)
        q, k, v = torch.randn(3, 20, 2, 8, requires_grad=True).unbind(0)
        torch.testing.assert_close(call(graph, q, k, v), reference.dot_attention(graph, q, k, v))
    assert counter.frame_count <= 2


# Instruction sets ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capability", ["baseline", "avx2"])
def test_lower_instruction_sets_agree(capability, tmp_path):
    """The choice is made once a process, so the other one runs in a process of its own."""
    import os
    import subprocess
    import sys

    script = f"""
import sys, torch
sys.path.insert(0, {os.path.dirname(__file__)!r})
import test_attention as t
from edgeless import functional
results = []
for score in t.SCORES:
    for heads, channels in ((4, 32), (3, 7)):
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            args, tensors, rest = t.inputs_of(score, t.graph_of("hub"), heads, channels, t.OPTIONS["all"], dtype)
            results.append([x.detach() for x in t.run(functional, score, t.graph_of("hub"), args, tensors, rest)])
torch.save(results, sys.argv[1])
"""
    found = []
    for level in (capability, "native"):
        path = tmp_path / f"{level}.pt"
        env = {**os.environ, "EDGELESS_CPU_CAPABILITY": level}
        subprocess.run([sys.executable, "-c", script, str(path)], env=env, check=True, cwd=tmp_path)
        found.append(torch.load(path))
    for a, b in zip(*found, strict=True):
        for x, y in zip(a, b, strict=True):
            tolerance = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[x.dtype]
            assert error(x, y) < tolerance


# Bad input -------------------------------------------------------------------------------------------------------


def bad_calls():
    graph = graph_of("bipartite")  # 50 sources, 40 destinations, 400 edges

    def t(*shape, dtype=torch.float32):
        return torch.randn(*shape).to(dtype)

    x_l, x_r, att = t(50, 2, 8), t(40, 2, 8), t(2, 8)
    v2, gat, dot = functional.gatv2_attention, functional.gat_attention, functional.dot_attention
    yield v2, (graph, t(49, 2, 8), x_r, att), {}, r"x_l must have shape \[Ns, H, C\] = \[50, \*, \*\], got \[49, 2, 8\]"
    yield v2, (graph, x_l, t(50, 2, 8), att), {}, r"x_r must have shape \[Nd, H, C\] = \[40, 2, 8\], got \[50, 2, 8\]"
    yield v2, (graph, x_l, x_r, t(2, 4)), {}, r"att must have shape \[H, C\] = \[2, 8\], got \[2, 4\]"
    yield v2, (graph, x_l.long(), x_r, att), {}, "x_l must be float32, float64, bfloat16 or float16, got torch.int64"
    yield v2, (graph, [1.0], x_r, att), {}, "x_l must be a Tensor of shape"
    yield v2, (graph, x_l, x_r, att), {"edge_attr": t(400, 3)}, "edge_attr needs edge_proj as well"
    yield v2, (graph, x_l, x_r, att), {"edge_proj": t(2, 8, 3)}, "edge_proj needs edge_attr as well"
    yield (
        v2,
        (graph, x_l, x_r, att),
        {"edge_attr": t(399, 3), "edge_proj": t(2, 8, 3)},
        r"edge_attr must have shape \[E, De\] = \[400, \*\], got \[399, 3\]",
    )
    yield v2, (graph, x_l, x_r, att), {"edge_scale": t(399)}, r"edge_scale must have shape .* = \[400\], got \[399\]"
    yield v2, (graph, x_l, x_r, att), {"dropout": 1.5}, r"dropout must lie in \[0, 1\], got 1.5"
    yield v2, (graph, x_l, x_r, att), {"return_weights": "yes"}, "return_weights must be None, 'softmax' or 'dropped'"
    yield v2, (graph, x_l.to("meta"), x_r, att), {}, "x_l must be on the graph's device cpu, got meta"
    yield gat, (graph, x_l, t(50, 3), t(40, 2)), {}, r"a_l must have shape \[Ns, H\] = \[50, 2\], got \[50, 3\]"
    yield gat, (graph, x_l, t(50, 2), t(50, 2)), {}, r"a_r must have shape \[Nd, H\] = \[40, 2\], got \[50, 2\]"
    yield dot, (graph, x_r, x_r, x_l), {}, r"k must have shape \[Ns, H, D\] = \[50, 2, 8\], got \[40, 2, 8\]"
    yield (
        dot,
        (graph, x_r, x_l, t(50, 2, 4)),
        {"edge_attr": t(400, 3), "edge_proj": t(2, 8, 3)},
        r"v must have shape \[Ns, H, C\] = \[50, 2, 8\], got \[50, 2, 4\]",
    )


@pytest.mark.parametrize("call,args,kwargs,message", list(bad_calls()))
def test_bad_input_is_named(call, args, kwargs, message):
    with pytest.raises(ValueError, match=message):
        call(*args, **kwargs)


@pytest.mark.parametrize("change,message", [
    ({"dst": torch.zeros(4, 2, 3)}, "src must have shape"),
    ({"score": "sum"}, "score must be 'dot', 'gatv2', 'gat' or 'cosine', got 'sum'"),
    ({"csr": [torch.zeros(3, dtype=torch.int64)]}, "csr must hold"),
    ({"csr": [torch.zeros(4, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)]}, "indptr of csr must have 5"),
    ({"att": torch.zeros(2, 8)}, "att belongs to the scores 'gatv2' and 'cosine'"),
    ({"dropout": 0.5}, "dropout needs a seed"),
])  # fmt: skip
def test_the_op_itself_guards_its_memory(change, message):
    given = {
        "dst": torch.zeros(4, 2, 8), "src": torch.zeros(5, 2, 8), "value": None, "att": None, "edge_attr": None,
        "edge_proj": None, "edge_scale": None,
        "csr": [torch.zeros(5, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)], "csc": [], "seed": None,
        "score": "dot", "coefficient": 1.0, "dropout": 0.0, "out_dtype": None,
    }  # fmt: skip
    torch.ops.edgeless.attention(*given.values())
    given.update(change)
    with pytest.raises((ValueError, RuntimeError), match=message):
        torch.ops.edgeless.attention(*given.values())


def test_backend_reference_runs_without_the_kernels(monkeypatch):
    graph = graph_of("square")
    args, _, _ = inputs_of("dot", graph, 2, 4, (), torch.float64)
    with edgeless.backend("reference"):
        out = functional.dot_attention(graph, *args)
    (grad,) = torch.autograd.grad(out.sum(), args[:1], create_graph=True)
    grad.sum().backward()  # plain PyTorch differentiates as often as one likes
