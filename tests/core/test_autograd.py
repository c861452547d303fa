"""The ops' autograd: what is kept, what hooks and checkpoints do to it, what is asked for and what is refused."""

import pytest
import torch
import torch.utils.checkpoint
from attention_cases import assert_close, graph_of
from saved import saved_by
from torch.autograd import forward_ad

import edgeless
from edgeless import TypedGraph, functional

GRAPH = graph_of("square")


def rows(*shape, dtype=torch.float64, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=gen).to(dtype).requires_grad_()


def attention(x, att, **options):
    return functional.gatv2_attention(GRAPH, x, x, att, **options)


def weights(x, att):
    return attention(x, att, return_weights="dropped", dropout=0.5, seed=3)[1]


def weighted(x, weight):
    return functional.spmm(GRAPH, x, weight)


def products(x, y):
    return functional.sddmm_dot(GRAPH, x, y)


def largest(x, _):
    return functional.neighbor_reduce(GRAPH, x, "max", ties="shared")


def inputs_of(call):
    n = GRAPH.num_src
    second = {weighted: (GRAPH.num_edges,), products: (n, 2, 4)}.get(call, (2, 4))
    return rows(*((n, 8) if call is largest else (n, 2, 4))), rows(*second, seed=1)


CALLS = (attention, weights, weighted, products, largest)
calls = pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)


def gradients(call, x, y):
    out = call(x, y)
    return torch.autograd.grad(out, [x, y], torch.ones_like(out), allow_unused=call is largest)


def same(found, expected):
    return all(a is b or torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def shapes(call):
    return [tuple(t.shape) for t in saved_by(call)]


def test_attention_keeps_nodes_and_the_graph_alone():
    x, att = inputs_of(attention)
    n, edges = GRAPH.num_src, GRAPH.num_edges
    direction = [(n + 1,), (edges,), (edges,)]
    node = [(n, 2, 4), (2, n, 2)]  # the output, the softmax's statistics
    no_ids = direction[:2]  # nobody asks which edge is which, but for dropout
    assert shapes(lambda: attention(x, att)) == [*node, (n, 2, 4), (n, 2, 4), (2, 4), *no_ids, *no_ids]
    dropped = shapes(lambda: attention(x, att, dropout=0.5))
    assert dropped == [*node, (n, 2, 4), (n, 2, 4), (2, 4), (1,), *direction, *direction]
    assert shapes(lambda: attention(x.detach(), att)) == [*node, (n, 2, 4), (n, 2, 4), (2, 4), *no_ids]
    assert shapes(lambda: attention(x.detach(), att.detach())) == []


def test_a_sum_keeps_its_rows_for_the_weights_alone():
    x, weight = inputs_of(weighted)
    kept = saved_by(lambda: weighted(x, weight))
    assert kept[0].data_ptr() == x.data_ptr() and kept[1].data_ptr() == weight.data_ptr()
    assert all(t.data_ptr() != x.data_ptr() for t in saved_by(lambda: weighted(x, weight.detach())))
    assert all(not t.is_floating_point() for t in saved_by(lambda: weighted(x, None)))


@calls
def test_hooks_move_what_is_saved(call):
    x, y = inputs_of(call)
    expected = gradients(call, x, y)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
        assert same(gradients(call, x, y), expected)


@calls
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_computes_the_same(call, reentrant):
    x, y = inputs_of(call)
    expected = gradients(call, x, y)
    out = torch.utils.checkpoint.checkpoint(call, x, y, use_reentrant=reentrant)
    if reentrant:
        out.backward(torch.ones_like(out))
        found = (x.grad, y.grad)
    else:
        found = torch.autograd.grad(out, [x, y], torch.ones_like(out), allow_unused=call is largest)
    assert same(found, expected)


@calls
def test_only_what_is_asked_for_is_computed(call):
    x, y = inputs_of(call)
    both = gradients(call, x, y)
    for which in range(1 if call is largest else 2):
        for others_require_grad in (True, False):
            pair = [x, y]
            if not others_require_grad:
                pair[1 - which] = pair[1 - which].detach()
            out = call(*pair)
            assert same(torch.autograd.grad(out, pair[which], torch.ones_like(out)), [both[which]])


@calls
def test_nothing_is_recorded_without_gradients(call):
    x, y = inputs_of(call)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert saved_by(lambda: call(x, y)) == []
            assert not call(x, y).requires_grad
    assert not call(x.detach(), y.detach()).requires_grad


@calls
def test_a_second_backward_needs_the_graph_retained(call):
    x, y = inputs_of(call)
    out = call(x, y)
    out.sum().backward(retain_graph=True)
    out.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()


@calls
def test_an_edit_before_the_backward_is_an_error(call):
    x, y = inputs_of(call)
    leaf, x = x, x * 1
    out = call(x, y)
    with torch.no_grad():
        x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), leaf)


def in_forward_mode(function, x, tangent):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, tangent))).tangent


def squares(function):
    return lambda x: function(x).square().sum()


def backward(function, x, create_graph=False):
    return torch.autograd.grad(squares(function)(x), x, create_graph=create_graph)[0]


def backward_twice(function, x, _):
    return torch.autograd.grad(backward(function, x, True).sum(), x)[0]


def along(function, x, tangent):
    return torch.autograd.functional.jvp(function, x, tangent)[1]


# (of torch.func or in forward mode, the same by backwards)
TRANSFORMS = {
    "grad": (lambda f, x, tangent: torch.func.grad(squares(f))(x), lambda f, x, tangent: backward(f, x)),
    "grad of grad": (
        lambda f, x, tangent: torch.func.grad(lambda x: torch.func.grad(squares(f))(x).sum())(x),
        backward_twice,
    ),
    "jvp": (lambda f, x, tangent: torch.func.jvp(f, (x,), (tangent,))[1], along),
    "vmap": (
        lambda f, x, tangent: torch.func.vmap(f)(torch.stack((x, tangent))),
        lambda f, x, tangent: torch.stack((f(x), f(tangent))),
    ),
    "forward mode": (in_forward_mode, along),
}


def kernels_of_types(x, w):
    types = torch.arange(x.size(0)) % w.size(0)
    return functional.gather_mm(x, w, types) + functional.segment_mm(x, w, torch.bincount(types, minlength=w.size(0)))


def of_relations(x, w):
    typed = TypedGraph(GRAPH, torch.arange(GRAPH.num_edges) % w.size(0), w.size(0))
    return functional.relational_sum(typed, x, w, reduce="mean")


def normalized(x, weight):
    return functional.spmm(GRAPH, x, weight, norm="both")


MATRICES = {kernels_of_types: (3, 8, 5), of_relations: (3, 8, 5)}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("call", [*CALLS, normalized, *MATRICES], ids=lambda call: call.__name__)
def test_transforms_see_the_reference(monkeypatch, call, transform):
    monkeypatch.setitem(globals(), "GRAPH", graph_of("square"))  # of which nothing is derived yet
    x, y = (rows(GRAPH.num_src, 8), rows(*MATRICES[call], seed=1)) if call in MATRICES else inputs_of(call)
    y = rows(GRAPH.num_edges, seed=1) if call is normalized else y
    of_func, by_backwards = TRANSFORMS[transform]
    of_one = {"x": (lambda x: call(x, y.detach()), x), "y": (lambda y: call(x.detach(), y), y)}
    for function, leaf in list(of_one.values())[: 1 if call is largest else 2]:
        tangent = torch.randn_like(leaf)
        found = of_func(function, leaf.detach(), tangent)
        with edgeless.backend("reference"):
            expected = by_backwards(function, leaf, tangent)
        assert_close([found], [expected.detach()], 1e-10)
    with edgeless.backend("fused"):
        with forward_ad.dual_level(), pytest.raises(edgeless.NotFusedError, match="a transform of torch.func"):
            call(x, y)
        kept = call(x, y)  # with what was derived of the graph in the transform
    with edgeless.backend("reference"):
        assert_close([kept], [call(x, y)], 1e-10)


def test_the_statistics_of_the_softmax_have_no_gradient():
    x, att = inputs_of(attention)
    csr, csc = list(GRAPH.csr), list(GRAPH.csc)
    op = torch.ops.edgeless.attention
    out, stats = op(x, x, None, att, None, None, None, csr, csc, None, "gatv2", 0.2, 0.0, None)
    assert out.requires_grad and not stats.requires_grad


@calls
@pytest.mark.skipif(not hasattr(torch._dynamo.config, "compiled_autograd"), reason="needs compiled autograd")
def test_the_backward_compiles(call):
    torch._dynamo.reset()
    x, y = inputs_of(call)
    call(x, y).square().sum().backward()
    want, x.grad, y.grad = (x.grad, y.grad), None, None
    loss = call(x, y).square().sum()
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda: loss.backward(), backend="aot_eager")()
    assert same((x.grad, y.grad), want)


@pytest.mark.parametrize("score", ["gatv2", "cosine"])
def test_a_vector_of_the_rows_dtype_takes_no_node_of_its_own(score):
    x, vector = rows(40, 2, 8, dtype=torch.bfloat16), rows(2, *([8] if score == "gatv2" else []), dtype=torch.bfloat16)

    def call():
        return getattr(functional, f"{score}_attention")(GRAPH, x, x, vector)

    out = call()
    leaves = [fn.variable for fn, _ in out.grad_fn.next_functions if hasattr(fn, "variable")]
    assert score == "cosine" or any(leaf is vector for leaf in leaves)
    found = torch.autograd.grad(out.float().sum(), [x, vector])
    assert [t.dtype for t in found] == [torch.bfloat16] * 2
    wide = [t.detach().float().requires_grad_() for t in (x, vector)]
    exact = torch.autograd.grad(getattr(functional, f"{score}_attention")(GRAPH, wide[0], *wide).sum(), wide)
    assert all((a.float() - b).norm() <= 2e-2 * b.norm() for a, b in zip(found, exact, strict=True))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(call(), out)


COPYING = {  # op of (x, weight) in float32 that keeps bfloat16 copies of both
    "project": lambda x, weight, csr: torch.ops.edgeless.project(x, [weight], [None], 0, torch.bfloat16, [0])[0],
    "project_sum": lambda x, weight, csr: torch.ops.edgeless.project_sum([x, x], [weight] * 2, None, torch.bfloat16),
    "sum_layer": lambda x, weight, csr: torch.ops.edgeless.sum_layer(
        x, [weight] * 2, None, None, None, None, csr, csr, torch.bfloat16
    ),
}
