"""Derivatives of gradients: those of plain PyTorch, for every op and as often as one likes."""

import gc
import weakref

import pytest
import torch
from attention_cases import OPTIONS, SCORES, function_of, graph_of, in_its_own_precision, leaves_of, raised
from derivatives import assert_same_derivatives, derivatives
from devices import EVERY_DEVICE, moved
from test_attention_layer import KINDS, flat, inputs, layer, parts
from test_attention_layer import graph_of as layer_graph
from test_autograd import CALLS, COPYING, attention, inputs_of, largest
from test_pair_attention import SLOPE, operands
from test_pair_attention import typed as typed_square
from test_pair_maps import NAMES, made, plain
from test_pair_maps import inputs as map_inputs
from test_relational_layer import inputs as relational_inputs
from test_relational_layer import order  # noqa: F401  a fixture
from test_relational_layer import parts as relational_parts
from test_relational_sum import typed
from test_sum_layer import inputs as sum_inputs
from test_sum_layer import layer as sum_layer
from test_sum_layer import parts as sum_parts
from test_typed_rows import blend_inputs, offsets_of, plain_blend, shuffled, types_of
from torch.utils.checkpoint import checkpoint

import edgeless
from edgeless import Graph, functional, reference
from edgeless.functional.pair_attention import pair_attention
from edgeless.functional.relational_layer import relational_layer

ops = torch.ops.edgeless


def leaf(*shape, seed=0, dtype=torch.float64):
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=gen).to(dtype).requires_grad_()


def by_kernels_and_plainly(call, leaves, highest=2):
    """``call()`` by the kernels and by plain PyTorch."""
    with edgeless.backend("fused"):
        found = derivatives(call(), leaves, highest)
    with edgeless.backend("reference"):
        want = derivatives(call(), leaves, highest)
    return found, want


# Attention -------------------------------------------------------------------------------------------------------


@EVERY_DEVICE
@pytest.mark.parametrize("kind", ["bipartite", "square", "no edges", "many empty rows"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("score", SCORES)
def test_attention(score, options, kind, device):
    graph = graph_of(kind)
    args, tensors, rest = leaves_of(device, score, graph, 2, 4, OPTIONS[options], torch.float64)
    graph, leaves = graph.to(device), [*args, *tensors.values()]
    found, want = by_kernels_and_plainly(lambda: function_of(score)(graph, *args, **tensors, **rest), leaves)
    assert_same_derivatives(found, want)


@EVERY_DEVICE
@pytest.mark.parametrize("score", SCORES)
def test_attention_is_differentiated_as_often_as_one_likes(score, device):
    graph = graph_of("square")
    args, tensors, rest = leaves_of(device, score, graph, 1, 3, OPTIONS["all"], torch.float64)
    graph, leaves = graph.to(device), [*args, *tensors.values()]
    found, want = by_kernels_and_plainly(lambda: function_of(score)(graph, *args, **tensors, **rest), leaves, highest=4)
    assert_same_derivatives(found, want)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("score", SCORES)
def test_gradgradcheck_of_attention(score, options):
    graph = Graph.from_edge_index(torch.tensor([[0, 1, 2, 2, 3, 3, 0], [1, 1, 1, 0, 0, 2, 2]]), 4, 4)
    args, tensors, rest = leaves_of("cpu", score, graph, 2, 3, OPTIONS[options], torch.float64)

    def call(*leaves):
        named = dict(zip(tensors, leaves[len(args) :], strict=True))
        return function_of(score)(graph, *leaves[: len(args)], **named, **rest)

    with edgeless.backend("fused"):
        assert torch.autograd.gradgradcheck(call, (*args, *tensors.values()))


@pytest.mark.parametrize("return_weights", [None, "softmax", "dropped"])
def test_the_mask_of_dropout_is_that_of_the_forward(return_weights):
    """Of edges that have ids."""
    graph = graph_of("bipartite")
    assert graph.csr.edge_ids is not None
    x_l, x_r, att = leaf(50, 3, 4), leaf(40, 3, 4, seed=1), leaf(3, 4, seed=2)
    for rate in (0.4, 1.0):
        found = []
        for name in ("fused", "reference"):
            seed = torch.tensor([91])
            options = {"dropout": rate, "seed": seed, "return_weights": return_weights}
            with edgeless.backend(name):
                outs = functional.gatv2_attention(graph, x_l, x_r, att, **options)
            outs = outs if isinstance(outs, tuple) else (outs,)
            loss = sum((out.pow(3) / 3 + out.square()).sum() for out in outs)
            (grad,) = torch.autograd.grad(loss, x_l, create_graph=True)
            second = torch.autograd.grad(grad.square().sum(), [x_l, x_r, att], allow_unused=True)
            found.append([torch.zeros(()) if t is None else t for t in (grad.detach(), *second)])
        if rate < 1 or return_weights == "softmax":
            assert_same_derivatives(*found)
        else:
            assert not any(t.any() for of in found for t in of)


@pytest.mark.parametrize("size", [1e2, 1e3])
@pytest.mark.parametrize("score", SCORES)
def test_large_logits(score, size):
    graph = graph_of("square")
    args, _, rest = leaves_of("cpu", score, graph, 2, 4, ("weights",), torch.float64)
    last = {"gat": 1, "dot": 0}.get(score, 2)
    with torch.no_grad():
        args[last].mul_(size)
    found, want = by_kernels_and_plainly(lambda: function_of(score)(graph, *args, **rest), args)
    assert all(torch.isfinite(t).all() for t in found)
    assert_same_derivatives(found, want, 1e-6)


def test_the_cosine_of_rows_of_zeros():
    """Whose norm has no derivative: they are divided by the least one."""
    graph = graph_of("square")
    x = leaf(40, 2, 4)
    with torch.no_grad():
        x[3] = 0
    first = torch.autograd.grad(functional.cosine_attention(graph, x, eps=0.5).square().sum(), x, create_graph=True)[0]
    (second,) = torch.autograd.grad(first.square().sum(), x)
    assert torch.isfinite(second).all()
    plainly = functional.cosine_attention(graph, x, eps=0.5)
    step = torch.zeros_like(x)
    step[3] = leaf(2, 4, seed=4).detach() * 1e-6

    def penalty(x):
        x = x.detach().requires_grad_()
        out = functional.cosine_attention(graph, x, eps=0.5).square().sum()
        return torch.autograd.grad(out, x)[0].square().sum()

    change = (penalty(x + step) - penalty(x - step)) / 2
    assert plainly.requires_grad and abs(float((second * step).sum() - change)) <= 1e-5 * abs(float(change))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("score", SCORES)
def test_16_bits_err_at_most_twice_as_much_as_plain_arithmetic(score, dtype, monkeypatch):
    graph = graph_of("square")
    args, tensors, rest = leaves_of("cpu", score, graph, 2, 8, OPTIONS["all"], dtype)
    leaves = [*args, *tensors.values()]
    with torch.no_grad():
        for t in leaves:
            t.mul_(0.3)  # within the range of float16
    wide = raised(leaves)

    def of(module, given):
        named = dict(zip(tensors, given[len(args) :], strict=True))
        return function_of(score, module)(graph, *given[: len(args)], **named, **rest)

    exact = derivatives(of(reference, wide), wide)
    found = derivatives(of(functional, leaves), leaves)
    monkeypatch.setattr(reference, "_prepare", in_its_own_precision)
    own = derivatives(of(reference, leaves), leaves)
    for have, plainly, want in zip(found, own, exact, strict=True):
        assert have.dtype == dtype
        errors = [float((t.double() - want).norm()) for t in (have, plainly)]
        rounding = torch.finfo(dtype).eps * float(want.norm())
        assert errors[0] <= 2 * errors[1] + rounding, errors


# Extrema and relations -------------------------------------------------------------------------------------------


@EVERY_DEVICE
@pytest.mark.parametrize("kind", ["bipartite", "square", "no edges", "many empty rows"])
@pytest.mark.parametrize("ties", ["first", "shared", "scatter"])
@pytest.mark.parametrize("reduce", ["min", "max"])
def test_extrema(reduce, ties, kind, device):
    graph = graph_of(kind).to(device)
    for tied in (False, True):
        x = leaf(graph.num_src, 5).detach()
        x = (x.round() if tied else x).to(device).requires_grad_()
        call = lambda: functional.neighbor_reduce(graph, x, reduce, ties=ties)  # noqa: B023, E731
        # The gradient is linear in that of the output alone, whose derivative a power makes.
        found, want = by_kernels_and_plainly(lambda: call().pow(3) + 2 * call(), [x], highest=3)  # noqa: B023
        assert_same_derivatives(found, want)


def test_an_extremum_whose_features_are_written_over():
    """The first of equal extrema is known, whatever becomes of the features; rules that share look at them again."""
    graph = graph_of("square")
    for ties in ("first", "shared"):
        x = leaf(40, 5)
        rows = x * 1
        out = functional.neighbor_reduce(graph, rows, "max", ties=ties)
        (grad,) = torch.autograd.grad(out.pow(3).sum(), rows, create_graph=True)
        want = torch.autograd.grad(grad.square().sum(), x, retain_graph=True)
        with torch.no_grad():
            rows.zero_()
        if ties == "first":
            assert torch.equal(torch.autograd.grad(grad.square().sum(), x)[0], want[0])
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.grad(grad.square().sum(), x)


@pytest.mark.parametrize("kind", ["square", "bipartite", "no edges", "hub"])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("which", ["aggregate", "transform"])
@pytest.mark.parametrize("blocks", [False, True])
def test_sums_over_relations(kind, reduce, which, blocks):
    graph = typed(kind)
    x, w, edge_weight = leaf(graph.num_src, 6), leaf(5, 6, 4, seed=1), leaf(graph.num_edges, seed=2)
    if blocks:
        w = leaf(5, 2, 3, 2, seed=1)
    for weight in (None, edge_weight):
        call = lambda: functional.relational_sum(graph, x, w, weight, reduce=reduce, order=which)  # noqa: B023, E731
        leaves = [x, w] if weight is None else [x, w, weight]
        assert_same_derivatives(*by_kernels_and_plainly(call, leaves, highest=3))


def test_gradgradcheck_of_sums():
    graph = edgeless.TypedGraph.from_edge_index(
        torch.tensor([[0, 1, 2, 2, 3], [1, 1, 1, 0, 2]]), torch.tensor([0, 1, 0, 2, 2]), 4, 4, 4
    )
    call = lambda *given: functional.relational_sum(graph, *given)  # noqa: E731
    assert torch.autograd.gradgradcheck(call, (leaf(4, 3), leaf(4, 3, 2, seed=1), leaf(5, seed=2)))
    x = leaf(4, 3)
    for ties in ("first", "shared", "scatter"):
        extremum = lambda x: functional.neighbor_reduce(graph.graph, x, "max", ties=ties).pow(3)  # noqa: B023, E731
        assert torch.autograd.gradgradcheck(extremum, x)


@pytest.mark.parametrize("kind", ["square", "bipartite"])
def test_keys_and_values_of_pairs(kind):
    graph, given = typed(kind), map_inputs(typed(kind), width=4, out=6)
    leaves = [given[name] for name in NAMES]
    want = derivatives(made(graph, **given, function=plain), leaves, 3)
    assert_same_derivatives(derivatives(made(graph, **given), leaves, 3), want)


def plain_pair_attention(graph, x, weight, query, key, bias, kept):
    (src, dst), types = graph.graph.edge_index(), graph.edge_type.long()
    own, values = (torch.einsum("ek,ekm->em", x[at], weight[types]) for at in (dst, src))
    logits = torch.nn.functional.leaky_relu(own @ query + values @ key, SLOPE)
    shares = torch.zeros(graph.num_edges, 1, dtype=x.dtype).to(x)
    for node in dst.unique():
        shares = torch.where(
            (dst == node).unsqueeze(1), logits.where(dst.unsqueeze(1) == node, -torch.inf).softmax(0), shares
        )
    out = torch.zeros(len(x), values.size(1), dtype=x.dtype).to(x).index_add(0, dst, kept * shares * values)
    return out if bias is None else out + bias


@EVERY_DEVICE
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("bias", [True, False])
def test_attention_over_pairs(bias, dropout, device):
    """In double; on CUDA, where the op takes none, in single, against the same in double."""
    graph = typed_square(12, 60, 3)
    given = moved(operands(graph, 5, 4, bias=bias)[:5], device)
    kept = torch.ones(60, 1, dtype=torch.float64, device=device)
    if dropout:
        kept = reference.dropout_mask(31, 60, 1, dropout).to(kept) / (1 - dropout)
    placed = typed_square(12, 60, 3, device=device)
    seed = torch.tensor([31], device=device) if dropout else None
    exact = [None if t is None else t.requires_grad_() for t in given]
    want = derivatives(plain_pair_attention(placed, *exact, kept), [t for t in exact if t is not None], 3)
    if device == "cuda":
        given = [None if t is None else t.detach().float().requires_grad_() for t in given]
    leaves = [t for t in given if t is not None]
    found = derivatives(pair_attention(placed, *given, SLOPE, dropout, seed), leaves, 3)
    if device == "cuda":
        assert_same_derivatives([t.double() for t in found], want, 1e-4)
    else:
        assert_same_derivatives(found, want)


def test_blends():
    offsets = offsets_of("plain")
    y, x, alpha = blend_inputs(offsets, 6, torch.float64)
    rows, types = shuffled(offsets)
    for given, of_rows in ((rows, types), (None, types_of(offsets))):
        found = derivatives(ops.typed_blend(y, x, alpha, offsets, given), [y, x, alpha], 3)
        assert_same_derivatives(found, derivatives(plain_blend(y, x, alpha, of_rows), [y, x, alpha], 3))


# Layers of one op ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("row,biases", [(True, True), (False, False)])
@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_attention(kind, by_head, row, biases, dropout):
    graph, given = layer_graph(), inputs(kind, row, biases)
    found = derivatives(layer(kind, given, graph, dropout, by_head=by_head).flatten(1), flat(*given), 3)
    assert_same_derivatives(found, derivatives(parts(kind, given, graph, dropout), flat(*given), 3))


@pytest.mark.parametrize("kind", KINDS)
def test_a_last_backward_between_a_first_and_a_second_derivative(kind):
    """It writes over what the node saved."""
    graph, given = layer_graph(), inputs(kind)
    found = []
    for between in (False, True):
        out = layer(kind, given, graph)
        grad = torch.ones_like(out)
        first = torch.autograd.grad(out, flat(*given), grad, create_graph=True)
        if between:
            torch.autograd.grad(out, flat(*given), grad)
        found.append(torch.autograd.grad(sum(t.square().sum() for t in first), flat(*given), allow_unused=True))
    assert all(a is b or torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert sum(a is not None for a in found[0]) > 1


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.endswith("shared")])
def test_layers_of_attention_that_round(kind):
    """As under autocast: rows and parameters are copies in bfloat16."""
    graph, given, exact = layer_graph(), inputs(kind, dtype=torch.float32), inputs(kind)
    with torch.no_grad():
        for t in (*flat(*given), *flat(*exact)):
            t.mul_(0.3)
    out = layer(kind, given, graph, dtype=torch.bfloat16, out_dtype=torch.float32)
    found, want = derivatives(out, flat(*given)), derivatives(parts(kind, exact, graph), flat(*exact))
    for a, b in zip(found, want, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() <= 0.05 * b.norm() + 0.02, (a - b).norm() / b.norm()


@pytest.mark.parametrize("bias", [True, False])
def test_layers_of_relations(bias, order):  # noqa: F811
    for kind, own in (("square", False), ("bipartite", True)):
        graph = typed(kind)
        given = relational_inputs(graph, own=own, bias=bias, k=4, m=6)
        for weight in (None, leaf(graph.num_edges, seed=5).detach()):
            found = relational_layer(graph, **given, edge_weight=weight, out_dtype=torch.float64)
            want = relational_parts(graph, **given, edge_weight=weight)
            leaves = list(given.values())
            assert_same_derivatives(derivatives(found, leaves, 3), derivatives(want, leaves, 3))


@pytest.mark.parametrize("op", COPYING)
def test_copies_know_what_they_are_made_of(op):
    """Rounded copies of features and weights; the gradient of the output is a constant here."""
    graph = Graph.from_edge_index(torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]), 3, 3)  # its own transpose
    x, weight = leaf(3, 5, dtype=torch.float32), leaf(4, 5, seed=1, dtype=torch.float32)
    out = COPYING[op](x, weight, list(graph.csr)).float()
    x64, w64 = raised([x, weight])
    of_rows = {"project": x64, "project_sum": 2 * x64, "sum_layer": functional.spmm(graph, x64) + x64}[op]
    for call, exact in (
        (lambda t: t.sum(), lambda t: t.sum()),
        (lambda t: t.square().sum(), lambda t: t.square().sum()),
    ):
        first = torch.autograd.grad(call(out), [x, weight], create_graph=True)
        want = torch.autograd.grad(exact(of_rows @ w64.t()), [x64, w64], create_graph=True)
        found = torch.autograd.grad(sum(t.square().sum() for t in first), [x, weight], retain_graph=True)
        wanted = torch.autograd.grad(sum(t.square().sum() for t in want), [x64, w64], retain_graph=True)
        for a, b in zip((*first, *found), (*want, *wanted), strict=True):
            assert a.dtype == torch.float32 and (a - b).norm() <= 0.03 * b.norm()


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_layers_of_sums(reduce):
    graph, given = layer_graph(11), sum_inputs()
    found = derivatives(sum_layer(given, graph, reduce=reduce), given, 3)
    assert_same_derivatives(found, derivatives(sum_parts(given, graph, reduce=reduce), given, 3))


# What is around a backward ---------------------------------------------------------------------------------------

every_call = pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)


@every_call
def test_first_derivatives_have_the_same_bits(call):
    x, y = inputs_of(call)
    leaves = [x] if call is largest else [x, y]
    out = call(x, y)
    loss = out.square().sum()
    kept = torch.autograd.grad(loss, leaves, retain_graph=True)
    again = torch.autograd.grad(loss, leaves, create_graph=True)
    assert all(torch.equal(a, b) and b.requires_grad for a, b in zip(kept, again, strict=True))


@every_call
@pytest.mark.parametrize("around", ["hooks", "checkpoint"])
def test_hooks_and_checkpoints(call, around):
    x, y = inputs_of(call)
    leaves = [x] if call is largest else [x, y]
    cubed = lambda x, y: call(x, y).pow(3)  # noqa: E731
    want = derivatives(cubed(x, y), leaves)
    if around == "checkpoint":
        found = derivatives(checkpoint(cubed, x, y, use_reentrant=False), leaves)
    else:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
            found = derivatives(cubed(x, y), leaves)
    assert_same_derivatives(found, want, 1e-12)


def test_inputs_that_are_made_of_each_other():
    """A derivative by an input is not that by what is made of it."""
    graph, x = graph_of("square"), leaf(40, 2, 4)
    call = lambda: functional.dot_attention(graph, x, 2 * x, x * x)  # noqa: E731
    assert_same_derivatives(*by_kernels_and_plainly(call, [x], highest=3))
    call = lambda: functional.gat_attention(graph, x, x.sum(2), x.square().sum(2))  # noqa: E731
    assert_same_derivatives(*by_kernels_and_plainly(call, [x], highest=3))


def test_derivatives_by_some_of_the_inputs():
    """Forces and penalties: by positions first, by parameters then."""
    graph, x, att = graph_of("square"), leaf(40, 2, 4), leaf(2, 4, seed=1)
    found = []
    for name in ("fused", "reference"):
        with edgeless.backend(name):
            out = functional.gatv2_attention(graph, x, x, att)
        (forces,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        found.append([forces.detach(), *torch.autograd.grad(forces.square().sum(), att)])
    assert_same_derivatives(*found)


def test_a_backward_of_everything():
    """loss.backward() behind a penalty, into leaves' .grad, and an input that was changed in between."""
    graph, x, att = graph_of("square"), leaf(40, 2, 4), leaf(2, 4, seed=1)
    for name in ("fused", "reference"):
        x.grad = att.grad = None
        with edgeless.backend(name):
            out = functional.gatv2_attention(graph, x, x, att)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (out.square().sum() + grad.square().sum()).backward()
        found = [x.grad, att.grad] if name == "fused" else found  # noqa: F821
    assert_same_derivatives(found, [x.grad, att.grad])
    (grad,) = torch.autograd.grad(functional.gatv2_attention(graph, x, x, att).sum(), x, create_graph=True)
    with torch.no_grad():
        att.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        grad.sum().backward()


def test_under_autocast():
    """Where second derivatives are taken within it, their arithmetic is that of the forward all the same."""
    graph, x, att = graph_of("square"), leaf(40, 2, 4, dtype=torch.float32), leaf(2, 4, seed=1, dtype=torch.float32)
    edges = leaf(graph.num_edges, 3, seed=2, dtype=torch.float32), leaf(2, 4, 3, seed=3, dtype=torch.float32)
    leaves = [x, att, *edges]
    call = lambda: functional.gatv2_attention(graph, x, x, att, edge_attr=edges[0], edge_proj=edges[1])  # noqa: E731
    want = derivatives(call(), leaves)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = derivatives(call(), leaves)
    assert_same_derivatives(found, want, 1e-5)


def test_nothing_stays_behind():
    x, att = inputs_of(attention)
    (grad,) = torch.autograd.grad(attention(x, att).square().sum(), x, create_graph=True)
    node = weakref.ref(x)
    torch.autograd.grad(grad.square().sum(), [x, att])
    del x, att, grad
    gc.collect()
    assert node() is None
