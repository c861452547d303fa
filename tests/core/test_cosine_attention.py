"""What is particular to cosine attention, on every device: norms near nothing, no x_dst, forms of beta. The rest is in
test_attention.py.
"""

import pytest
import torch
import torch.nn.functional as F
from attention_cases import (
    TOLERANCE,
    assert_close,
    error,
    exact,
    graph_of,
    in_its_own_precision,
    inputs_of,
    raised,
    run,
)
from devices import EVERY_DEVICE

from edgeless import Graph, functional, reference

cosine = functional.cosine_attention


def results(call, graph, leaves, device="cpu", **options):
    """Output and gradients, computed on the device; None among the leaves stays None."""
    leaves = [None if t is None else t.detach().to(device).requires_grad_() for t in leaves]
    out = call(graph.to(device), *leaves, **options)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    given = [t for t in leaves if t is not None]
    return [t.detach().cpu() for t in (out, *torch.autograd.grad(out, given, grad.to(device, out.dtype)))]


def rows(n, heads=2, channels=8, dtype=torch.float64, seed=0):
    return torch.randn(n, heads, channels, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


@EVERY_DEVICE
@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("eps", [1e-12, 1.5])
@pytest.mark.parametrize("heads,channels", [(3, 5), (2, 8), (3, 40), (1, 128), (1, 250)])
def test_rows_shorter_than_eps(dtype, tolerance, eps, heads, channels, device):
    """Zero rows, rows below the clamp and above it: values and gradients are those of F.normalize."""
    graph = graph_of("square")
    x, x_dst = rows(40, heads, channels, seed=1), rows(40, heads, channels, seed=2)
    for t in (x, x_dst):
        t[::5] = 0
        t[1::5] *= 0.1
        t[2::5] *= eps * 1e-3
    for given in ((x, x_dst), (x, None)):
        leaves = [None if t is None else t.to(dtype) for t in given]
        found = results(cosine, graph, leaves, device, beta=3.0, eps=eps)
        doubled = [None if t is None else t.double() for t in leaves]
        expected = results(reference.cosine_attention, graph, doubled, beta=3.0, eps=eps)
        for a, b in zip(found, expected, strict=True):
            assert torch.isfinite(a).all()
            short = b.norm(dim=-1) > 1e3  # rows whose gradient is that of a division by eps
            assert error(a[short], b[short]) <= tolerance and error(a[~short], b[~short]) <= tolerance


@EVERY_DEVICE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("channels", [32, 64, 128])
def test_short_rows_in_half_precision(dtype, channels, device):
    """On and off the tensor cores. The short rows are not so short that their gradients leave the type."""
    graph, x = graph_of("square"), rows(40, 2, channels, seed=1)
    x[::5] = 0
    x[1::5] *= 0.05
    x = x.to(dtype)
    found = results(cosine, graph, [x], device, beta=3.0, eps=2.0)
    wanted = results(reference.cosine_attention, graph, raised([x]), beta=3.0, eps=2.0)
    assert all(torch.isfinite(t).all() for t in found)
    assert_close(found, wanted, TOLERANCE[dtype])


def test_a_gradient_through_the_clamp_is_that_of_a_division_by_eps():
    graph = Graph.from_edge_index(torch.tensor([[0, 1, 2], [0, 0, 0]]), 3, 1)
    x = torch.zeros(3, 1, 4, dtype=torch.float64)
    x[0], x[1] = 1.0, 0.25
    x_dst = torch.tensor([1.0, 2.0, -1.0, 0.5], dtype=torch.float64).view(1, 1, 4)
    leaf, plain = (x.clone().requires_grad_() for _ in range(2))
    cosine(graph, leaf, x_dst, 2.0, eps=2.5).square().sum().backward()
    logits = (plain.squeeze(1) / 2.5) @ (2.0 * x_dst.flatten() / 2.5)
    (logits.softmax(0) @ plain.squeeze(1)).square().sum().backward()
    assert_close([leaf.grad], [plain.grad], 1e-12)


@EVERY_DEVICE
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"dropout": 0.4, "seed": 5}])
@pytest.mark.parametrize("kind", ["square", "no nodes"])
@pytest.mark.parametrize("channels", [7, 64])
def test_one_tensor_for_both_sides(dtype, options, kind, channels, device):
    """Whose norms and padded copy are made once."""
    graph = graph_of(kind)
    x, beta = rows(graph.num_src, 2, channels, dtype), torch.tensor([1.7], dtype=dtype)
    found = results(lambda g, x, b: cosine(g, x, None, b, **options), graph, [x, beta], device)
    if device == "cpu":
        apart = results(lambda g, x, b: cosine(g, x, x, b, **options), graph, [x, beta], device)
        assert all(torch.equal(a, b) for a, b in zip(found, apart, strict=True))
    copied = results(lambda g, x, b: cosine(g, x, x.clone(), b, **options), graph, [x, beta], device)
    assert all(torch.equal(a, b) for a, b in zip(found, copied, strict=True))
    wanted = results(lambda g, x, b: reference.cosine_attention(g, x, None, b, **options), graph, raised([x, beta]))
    assert_close(found, wanted, TOLERANCE[dtype])


@EVERY_DEVICE
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_beta_of_zero_has_its_gradient(dtype, device):
    graph = graph_of("hub")
    given = inputs_of("cosine", graph, 3, 16, (), dtype)
    with torch.no_grad():
        given[0][2].zero_()
    found = run(functional, "cosine", graph, *given, device=device)
    assert_close(found, exact("cosine", graph, *given), TOLERANCE[dtype])


def gradient_of_beta(call, draw, beta, dtype, device):
    """Over rows of positive numbers, whose cosines are near 0.75."""
    gen = torch.Generator().manual_seed(draw)
    nodes, edges = 600, 60_000
    graph = Graph.from_edge_index(torch.randint(0, nodes, (2, edges), generator=gen), nodes, nodes)
    x, grad = torch.rand(nodes, 1, 64, generator=gen), torch.randn(nodes, 1, 64, generator=gen)
    leaf = torch.tensor([beta], dtype=dtype, device=device, requires_grad=True)
    out = call(graph.to(device), x.to(device, dtype), beta=leaf)
    return torch.autograd.grad(out, leaf, grad.to(device, dtype))[0].item()


@EVERY_DEVICE
@pytest.mark.parametrize("beta", [-1.0, 1e-3, 1.3, 20.0])
def test_the_gradient_of_beta_where_all_cosines_are_alike(device, beta):
    """It is a sum of what cancels. Over eight draws it errs no more than PyTorch's own in float32."""
    mine, torchs = 0.0, 0.0
    for draw in range(8):
        wanted = gradient_of_beta(reference.cosine_attention, draw, beta, torch.float64, "cpu")
        mine += abs(gradient_of_beta(cosine, draw, beta, torch.float32, device) - wanted)
        torchs += abs(gradient_of_beta(reference.cosine_attention, draw, beta, torch.float32, "cpu") - wanted)
    assert mine <= torchs


def test_forms_of_beta():
    graph = graph_of("bipartite")
    x, x_dst = rows(50), rows(40, seed=3)
    number, one = cosine(graph, x, x_dst, 1.3), cosine(graph, x, x_dst, torch.tensor([1.3], dtype=torch.float64))
    assert_close([number], [one], 1e-14)
    assert torch.equal(one, cosine(graph, x, x_dst, torch.full((2,), 1.3, dtype=torch.float64)))
    per_head = cosine(graph, x, x_dst, torch.tensor([1.3, -4.0], dtype=torch.float64))
    assert torch.equal(one[:, 0], per_head[:, 0]) and not torch.equal(one[:, 1], per_head[:, 1])
    assert torch.equal(cosine(graph, x, x_dst), cosine(graph, x, x_dst, 1))
    mean = cosine(graph, x, x_dst, 0.0)
    expected = functional.spmm(graph, x.flatten(1), reduce="mean").view_as(mean)
    assert_close([mean], [expected], 1e-12)


def test_is_dot_attention_of_unit_rows():
    """What runs where the score has no kernel."""
    graph = graph_of("hub")
    leaves = [rows(50), rows(40, seed=4)]

    def composed(graph, x, x_dst):
        return functional.dot_attention(graph, 2.0 * F.normalize(x_dst, dim=-1), F.normalize(x, dim=-1), x, scale=1.0)

    found = results(lambda g, x, x_dst: cosine(g, x, x_dst, 2.0), graph, leaves)
    assert_close(found, results(composed, graph, leaves), 1e-12)


@EVERY_DEVICE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_with_one_tensor(dtype, device, monkeypatch):
    graph = graph_of("square")
    given = [rows(40, dtype=dtype), torch.tensor([2.5], dtype=dtype)]
    found = results(lambda g, x, b: cosine(g, x, None, b), graph, given, device)
    assert found[0].dtype == dtype
    assert cosine(graph.to(device), given[0].to(device), beta=given[1].to(device).float()).dtype == torch.float32

    def plain(graph, x, beta):
        return reference.cosine_attention(graph, x, None, beta)

    wanted = results(plain, graph, raised(given))
    with monkeypatch.context() as patch:
        patch.setattr(reference, "_prepare", in_its_own_precision)
        torchs = results(plain, graph, given)
    for a, b, c in zip(found, torchs, wanted, strict=True):
        assert error(a, c) <= 2 * error(b, c)


def test_a_single_neighbour_gets_no_gradient_through_its_weight():
    """The weight is 1 whatever the norms: what is left is the value's gradient, exactly."""
    for dtype in (torch.float32, torch.float64):
        graph = Graph.from_edge_index(torch.tensor([[3, 1, 2], [0, 1, 2]]), 4, 3)
        x, x_dst = rows(4, dtype=dtype).requires_grad_(), rows(3, dtype=dtype, seed=1).requires_grad_()
        out = cosine(graph, x, x_dst, 5.0)
        grad = torch.randn_like(out)
        grad_x, grad_dst = torch.autograd.grad(out, (x, x_dst), grad)
        assert torch.equal(grad_x[[3, 1, 2]], grad) and not grad_x[0].any() and not grad_dst.any()


def bad_calls():
    x, x_dst = torch.randn(50, 2, 8), torch.randn(40, 2, 8)
    yield (x[:49], x_dst), {}, r"x must have shape \[Ns, H, C\] = \[50, \*, \*\], got \[49, 2, 8\]"
    yield (x, x), {}, r"x_dst must have shape \[Nd, H, C\] = \[40, 2, 8\], got \[50, 2, 8\]"
    yield (x,), {}, "x_dst must be a Tensor for a graph with 50 source and 40 destination nodes, got None"
    yield (x, x_dst, torch.ones(3)), {}, r"beta must have shape \[1\] or \[H\] = \[2\], got \[3\]"
    yield (x, x_dst, torch.tensor(1.0)), {}, r"beta must have shape \[1\] or \[H\] = \[2\], got \[\]"
    yield (x, x_dst, "1"), {}, "beta must be a number or a Tensor, got str"
    yield (x, x_dst, torch.ones(1, dtype=torch.int64)), {}, "beta must be float32, .*, got torch.int64"
    yield (x, x_dst, torch.ones(1, device="meta")), {}, "beta must be on the graph's device cpu, got meta"
    yield (x, x_dst), {"eps": -1.0}, "eps must not be negative, got -1.0"
    yield (x, x_dst), {"edge_scale": torch.ones(399)}, r"edge_scale must have shape .* = \[400\], got \[399\]"
    yield (x, x_dst), {"dropout": 2.0}, r"dropout must lie in \[0, 1\], got 2.0"


@pytest.mark.parametrize("args,options,message", list(bad_calls()))
def test_bad_input_is_named(args, options, message):
    graph = graph_of("bipartite")  # 50 sources, 40 destinations, 400 edges
    with pytest.raises(ValueError, match=f"cosine_attention: {message}"):
        cosine(graph, *args, **options)


@pytest.mark.parametrize("change,message", [
    ({"att": None}, "att belongs to the scores 'gatv2' and 'cosine'"),
    ({"att": torch.zeros(2, 8)}, r"att must have shape"),
    ({"src": torch.zeros(5, 2, 3)}, "src must have shape"),
    ({"value": torch.zeros(5, 2, 8)}, "the score 'cosine' takes no value"),
    ({"edge_attr": torch.zeros(0, 3), "edge_proj": torch.zeros(2, 8, 3)}, "the score 'cosine' takes no edge_attr"),
    ({"coefficient": -1.0}, "coefficient, the least norm, must not be negative, got -1"),
])  # fmt: skip
def test_the_op_itself_guards_its_memory(change, message):
    given = {
        "dst": torch.zeros(4, 2, 8), "src": torch.zeros(5, 2, 8), "value": None, "att": torch.ones(2, 1),
        "edge_attr": None, "edge_proj": None, "edge_scale": None,
        "csr": [torch.zeros(5, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)], "csc": [], "seed": None,
        "score": "cosine", "coefficient": 1e-12, "dropout": 0.0, "out_dtype": None,
    }  # fmt: skip
    torch.ops.edgeless.attention(*given.values())
    given.update(change)
    with pytest.raises((ValueError, RuntimeError), match=message):
        torch.ops.edgeless.attention(*given.values())
