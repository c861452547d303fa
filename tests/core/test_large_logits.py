"""Logits up to 1e6, which float32 knows to 0.06: weights still sum to one, gradients are as right as PyTorch's.

Most inputs stand on a grid, so that logits are exact in float32, many are equal, and others differ by a little: then
PyTorch's own error is that of small logits. CUDA's logits are in base 2, and so rounded: there gradients are those of
float64, see docs/decisions/0007, and outputs as exact as PyTorch's for inputs that stand on no grid.
"""

import pytest
import torch
from attention_cases import (
    OPTIONS,
    SCORES,
    assert_close,
    error,
    exact,
    function_of,
    graph_of,
    in_its_own_precision,
    inputs_of,
    run,
)
from devices import EVERY_DEVICE, poison, star

from edgeless import Graph, functional, reference

SIZES = [0, 12, 20]  # of the logits: powers of two
SHAPES = [(1, 1), (4, 32), (8, 8), (3, 20), (3, 40), (2, 7), (1, 64), (1, 160), (2, 520)]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


def on_the_grid(score, graph, heads, channels, power, options, dtype, sign=1):
    """As test_attention.inputs_of, with logits near sign * 2**power (0: small ones) that float32 holds exactly."""
    gen = torch.Generator().manual_seed(power)
    large = sign * 2.0**power if power else 0.0

    def draw(*shape, step=1.0):
        return step * torch.randint(-1, 2, shape, dtype=torch.float64, generator=gen)

    ns, nd, e = graph.num_src, graph.num_dst, graph.num_edges
    tensors, rest = {}, {}
    values = torch.randn(ns, heads, channels, dtype=torch.float64, generator=gen)
    if "edges" in options and score != "cosine":
        tensors["edge_attr"] = draw(e, 3)
        tensors["edge_proj"] = {"gat": draw(heads, 3), "dot": draw(heads, channels, 3, step=0.5)}.get(
            score, draw(heads, channels, 3, step=4.0)
        )
    if score == "gatv2":  # the first channel makes the logits large, the others small differences
        x_l, x_r = draw(ns, heads, channels, step=4.0), draw(nd, heads, channels, step=4.0)
        att = draw(heads, channels, step=0.25)
        att[:, 0] = sign * 2.0 ** (power // 2)
        x_l[..., 0], x_r[..., 0] = 2.0 ** (power // 2), 0
        args = [x_l, x_r, att]
        rest["negative_slope"] = 0.25
    elif score == "gat":
        args = [values, draw(ns, heads) + large, draw(nd, heads)]
        rest["negative_slope"] = 0.25
    elif score == "cosine":
        rows = [torch.nn.functional.one_hot(torch.randint(0, min(3, channels), (n, heads), generator=gen), channels)
                for n in (ns, nd)]  # fmt: skip
        args = [*(2.0 * r.double() for r in rows), torch.full((heads,), large or 2.0, dtype=torch.float64)]
    else:
        query, key = draw(nd, heads, channels), draw(ns, heads, channels, step=0.5)
        query[..., 0] = 2.0 ** (power // 2)
        key[..., 0] = large / 2.0 ** (power // 2)
        args = [query, key, values]
        rest["scale"] = 1.0
        if "edges" in options:
            tensors["edge_proj"][:, 0] = 0
    if "scale" in options:
        tensors["edge_scale"] = torch.randn(e, heads, dtype=torch.float64, generator=gen)
    if "dropout" in options:
        rest.update(dropout=0.4, seed=123)
    if "weights" in options:
        rest["return_weights"] = "dropped" if "dropout" in options else "softmax"

    def leaf(t):
        return t.to(dtype).requires_grad_()

    return [leaf(t) for t in args], {name: leaf(t) for name, t in tensors.items()}, rest


def compare(score, graph, heads, channels, power, options, dtype, monkeypatch, sign=1):
    inputs = on_the_grid(score, graph, heads, channels, power, options, dtype, sign)
    tensors = inputs[1]
    found = run(functional, score, graph, *inputs)
    wanted = exact(score, graph, *inputs)
    with monkeypatch.context() as patch:
        patch.setattr(reference, "_prepare", in_its_own_precision)
        torchs = run(reference, score, graph, *inputs)
    if score == "gatv2" and power:  # in the first channel of its gradients little is left but rounding
        first, last = len(found) - len(tensors) - 3, len(found) - len(tensors)
        for results in (found, torchs, wanted):
            results[first:last] = [t[..., 1:] for t in results[first:last]]
    for i, (a, b, c) in enumerate(zip(found, torchs, wanted, strict=True)):
        limit = max(TOLERANCE[dtype], 2 * error(b, c))
        assert error(a, c) <= limit, f"tensor {i}: {error(a, c):.1e}, torch {error(b, c):.1e}"


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("options", ["plain", "edges", "dropout", "weights", "all"])
@pytest.mark.parametrize("power", SIZES)
@pytest.mark.parametrize("score", SCORES)
def test_as_exact_as_torch(score, power, options, dtype, monkeypatch):
    for kind in ("square", "hub", "many empty rows"):
        compare(score, graph_of(kind), 4, 8, power, OPTIONS[options], dtype, monkeypatch)


@pytest.mark.parametrize("heads,channels", SHAPES)
@pytest.mark.parametrize("score", SCORES)
def test_every_head_dim(score, heads, channels, monkeypatch):
    """Returned weights take other kernels than the forward pass does: their logits must be the same bits."""
    graph = graph_of("square")
    for options in ("plain", "weights", "all"):
        compare(score, graph, heads, channels, 20, OPTIONS[options], torch.float32, monkeypatch)


@pytest.mark.parametrize("score", ["gatv2", "gat", "dot"])
def test_far_below_zero(score, monkeypatch):
    for options in ("plain", "all"):
        graph = graph_of("square")
        compare(score, graph, 2, 8, 20, OPTIONS[options], torch.float32, monkeypatch, sign=-1)


def scattered(score, graph, size, heads, channels, dtype, seed):
    """Inputs anywhere, with logits of about `size`."""
    gen = torch.Generator().manual_seed(seed)

    def draw(*shape, scale=1.0):
        return (scale * torch.randn(shape, dtype=torch.float64, generator=gen)).to(graph.device, dtype).requires_grad_()

    ns, nd = graph.num_src, graph.num_dst
    if score == "gatv2":
        return [draw(ns, heads, channels, scale=size), draw(nd, heads, channels, scale=size), draw(heads, channels)]
    if score == "gat":
        return [draw(ns, heads, channels), draw(ns, heads, scale=size), draw(nd, heads, scale=size)]
    if score == "cosine":
        return [draw(ns, heads, channels), draw(nd, heads, channels), draw(heads, scale=size)]
    query, key = draw(nd, heads, channels, scale=size**0.5), draw(ns, heads, channels, scale=size**0.5)
    return [query, key, draw(ns, heads, channels)]


@EVERY_DEVICE
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [4e3, 3e5, 1e6])
@pytest.mark.parametrize("score", SCORES)
def test_weights_sum_to_one(score, size, dtype, device):
    for kind in ("square", "hub"):
        graph = graph_of(kind).to(device)
        dst = graph.edge_index()[1]
        for heads, channels in ((4, 32), (2, 7), (1, 64), (1, 160)):
            args = scattered(score, graph, size, heads, channels, dtype, 1)
            with torch.no_grad():
                weights = getattr(functional, f"{score}_attention")(
                    graph, *args, return_weights="softmax", out_dtype=torch.promote_types(dtype, torch.float32)
                )[1]
            sums = weights.new_zeros(graph.num_dst, heads).index_add(0, dst, weights)[dst.unique()]
            assert (sums - 1).abs().max() <= (1e-10 if dtype == torch.float64 else 1e-5)


@EVERY_DEVICE
@pytest.mark.parametrize("size", [1e4, 1e6])
@pytest.mark.parametrize("score", ["gat", "dot"])
def test_what_values_get_is_what_came(score, size, device):
    """Weights sum to one, so the gradients of values add up to those of the output."""
    graph = graph_of("hub").to(device)
    for heads, channels in ((4, 32), (2, 7), (1, 160)):
        args = scattered(score, graph, size, heads, channels, torch.float32, 2)
        out = getattr(functional, f"{score}_attention")(graph, *args)
        grad = torch.randn_like(out)
        (found,) = torch.autograd.grad(out, args[0 if score == "gat" else 2], grad)
        reached = graph.edge_index()[1].unique()
        assert error(found.double().sum(0), grad[reached].double().sum(0)) <= 1e-5


@EVERY_DEVICE
def test_four_equal_edges(device):
    graph = Graph.from_edge_index(torch.tensor([[0, 1, 2, 3], [0, 0, 0, 0]], device=device), 4, 1)
    for size in (4e3, 3e5, 1e6, 2e7, 1e30):
        query = torch.full((1, 1, 8), (size / 8) ** 0.5, device=device)
        weights = functional.dot_attention(
            graph, query, query.expand(4, 1, 8), torch.ones(4, 1, 8, device=device), scale=1.0, return_weights="softmax"
        )[1]
        assert (weights - 0.25).abs().max() <= 1e-6


@EVERY_DEVICE
@pytest.mark.parametrize("power", [0, 20])
def test_logits_that_are_not_finite(power, device):
    """Minus infinity takes no weight; where every logit is that, or one is NaN or plus infinity, the row is NaN."""
    graph = Graph.from_edge_index(
        torch.tensor([[0, 1, 0, 1, 0, 1, 0, 1], [0, 0, 1, 1, 2, 2, 3, 3]], device=device), 2, 5
    )
    inf, nan = float("inf"), float("nan")
    source = torch.tensor([[1.0], [2.0]], device=device) * 2.0**power
    target = torch.tensor([[0.0], [-inf], [nan], [inf], [0.0]], device=device)
    value = torch.ones(2, 1, 8, device=device)
    out = functional.gat_attention(graph, value, source, target, negative_slope=1.0)[:, 0, 0]
    assert out[0] == 1 and out[1:4].isnan().all() and out[4] == 0
    source[0] = -inf
    out, weights = functional.gat_attention(graph, value, source, target, negative_slope=1.0, return_weights="softmax")
    assert out[0, 0, 0] == 1 and weights[:2, 0].tolist() == [0, 1]


# Gradients on every device -----------------------------------------------------------------------------------------


def with_large_logits(score, given, size, of_rows):
    """Inputs of :func:`inputs_of` whose logits are of this size, but near each other, in the rows of destinations that
    ``of_rows`` [num_dst] names, and small in the others. GATv2's have large terms there, which cancel.
    """
    args, tensors, rest = given
    on = of_rows.to(args[0].dtype)[:, None]
    with torch.no_grad():
        if score == "dot":
            q, k, _ = args
            k[:, :, 0] = 4
            q[:, :, 0] = on * size * q.size(2) ** 0.5 / 4
        elif score == "gatv2":
            x_l, x_r, att = args
            x_l[:, :, 0], att[:, 0] = 8, size / 8
            x_r[:, :, 0] = (on - 1) * 8 + 2**-20
        elif score == "gat":
            args[2] += on * size
        else:  # rows that are nearly parallel
            x, x_dst, beta = args
            for t in (x, x_dst):
                t /= size**0.5
                t[:, :, 0] = 1
            beta.fill_(size)
        if score in ("dot", "gatv2") and "edge_proj" in tensors:
            tensors["edge_proj"][:, 0] = 0
    return [t.detach().requires_grad_() for t in args], tensors, rest


def well_conditioned(score, channels):
    """What of results may be compared: of the channel that makes GATv2's logits large, gradients are sums over a row
    that are zero, times that size.
    """

    def keep(t):
        return t.narrow(t.shape.index(channels), 1, channels - 1) if score == "gatv2" and channels in t.shape else t

    return lambda found: [keep(t) for t in found]


@EVERY_DEVICE
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("size", [4e3, 3e5, 1e6, 2e7])
def test_gradients_of_large_logits(score, options, size, device, monkeypatch):
    """Near PyTorch's own error in float32, or below it: on CUDA the backward makes such rows in float64."""
    for kind, channels, every in (("square", 9, 3), ("square", 250, 2), ("bipartite", 48, 1), ("hub", 8, 2)):
        graph = graph_of(kind)
        given = inputs_of(score, graph, 3, channels, OPTIONS[options], torch.float32)
        given = with_large_logits(score, given, size, torch.arange(graph.num_dst) % every == 0)
        poison(device)
        found = run(functional, score, graph, *given, device=device)
        wanted = exact(score, graph, *given)
        with monkeypatch.context() as patch:
            patch.setattr(reference, "_prepare", in_its_own_precision)
            torchs = run(reference, score, graph, *given)
        outs = 2 if "weights" in OPTIONS[options] else 1
        made_exact = device != "cpu" and score != "cosine"  # whose norms are rounded
        keep = well_conditioned(score, channels)
        for i, (a, b, c) in enumerate(zip(keep(found), keep(torchs), keep(wanted), strict=True)):
            bound = 1e-5 if made_exact and i >= outs else max(2e-5, 4 * error(b, c))
            assert error(a, c) <= bound, (kind, channels, every, i, error(a, c), error(b, c))


@pytest.mark.cuda
@pytest.mark.parametrize("score", SCORES)
def test_gradients_of_large_logits_of_hubs_over_many_blocks(score):
    graph = star(30_000, 500)
    given = inputs_of(score, graph, 2, 12, (), torch.float32)
    given = with_large_logits(score, given, 1e5 if score != "cosine" else 500, torch.arange(500) % 4 == 3)
    found, again = (run(functional, score, graph, *given, device="cuda") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    wanted = exact(score, graph, *given, device="cuda")
    keep = well_conditioned(score, 12)
    assert_close(keep(found[1:]), keep(wanted[1:]), 1e-5 if score != "cosine" else 1e-4)


@pytest.mark.cuda
@pytest.mark.parametrize("score", SCORES)
def test_nan_goes_where_it_belongs(score):
    """The backward on CUDA knows rows of large logits by a NaN of its own."""
    graph = graph_of("bipartite")
    args, _, _ = inputs_of(score, graph, 2, 8, (), torch.float32)
    leaves = [t.detach().cuda().requires_grad_() for t in args]
    exacts = [t.detach().double().requires_grad_() for t in args]
    grad = torch.randn(graph.num_dst, 2, 8)
    grad[graph.edge_index()[1, 0]] = float("nan")
    found = torch.autograd.grad(function_of(score)(graph.to("cuda"), *leaves), leaves, grad.cuda())
    wanted = torch.autograd.grad(function_of(score, reference)(graph, *exacts), exacts, grad.double())
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a.isnan().cpu(), b.isnan())
        assert error(a.cpu().nan_to_num(0), b.nan_to_num(0)) < 1e-5
