"""Linear maps of one input as one op: against the modules, gradients, what keeps the modules' own path, bad input."""

import copy

import pytest
import torch
from torch import nn

from edgeless.functional import projection

ops = torch.ops.edgeless
# The last one is too wide for the CPU kernels, whose packed weights must fit a cache.
SHAPES = [
    (0, 3, (4,)),
    (1, 3, (4, 1)),
    (700, 16, (8, 24)),
    (5000, 33, (128, 7, 300)),
    (101, 700, (300, 100)),
    (101, 1100, (400, 100)),
]


def maps(features, widths, dtype=torch.float64, bias=True):
    torch.manual_seed(len(widths))
    return [nn.Linear(features, width, bias=bias and k != 1, dtype=dtype) for k, width in enumerate(widths)]


def rows(count, features, dtype=torch.float64):
    return torch.randn(count, features, dtype=dtype, generator=torch.Generator().manual_seed(0)).requires_grad_()


def run(x, linears):
    return ops.project(x, [lin.weight for lin in linears], [lin.bias for lin in linears])


def assert_same(found, expected, tolerance):
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert (a - b).norm() <= tolerance * b.norm().clamp(min=1e-30)


@pytest.mark.parametrize("count,features,widths", SHAPES)
@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_same_as_the_modules(count, features, widths, dtype, tolerance, every_capability):
    x, linears = rows(count, features, dtype), maps(features, widths, dtype)
    leaves = [x, *(p for lin in linears for p in lin.parameters())]
    outs, expected = run(x, linears), [lin(x) for lin in linears]
    assert_same(outs, expected, tolerance)
    grads = [torch.randn_like(out) for out in outs]
    assert_same(torch.autograd.grad(outs, leaves, grads), torch.autograd.grad(expected, leaves, grads), tolerance)


@pytest.mark.parametrize("features", [700, 1100])
def test_only_public_ops_of_torch(features):
    """Wide maps take torch's products; another build of torch need not have the private ops of this one."""
    x, linears = rows(600, features, torch.float32), maps(features, (500,), torch.float32)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run(x, linears)[0].sum().backward()
    names = {event.name for event in profile.events()}
    assert any(name.endswith("edgeless::project") for name in names)
    assert not [name for name in names if name.startswith(("mkldnn::", "aten::_mkl"))]


def test_in_another_dtype():
    x, linears = rows(30, 4, torch.float32), maps(4, (3, 2), torch.float32)
    weights, biases = [lin.weight for lin in linears], [lin.bias for lin in linears]
    parameters = [*weights, biases[0]]
    outs = ops.project(x, weights, biases, 0, torch.bfloat16)
    stock = [
        nn.functional.linear(*(None if t is None else t.bfloat16() for t in (x, w, b)))
        for w, b in zip(weights, biases, strict=True)
    ]
    assert all(out.dtype == torch.bfloat16 for out in outs)
    assert_same(outs, stock, 4e-3)
    grads = [torch.randn_like(out) for out in outs]
    found = torch.autograd.grad(outs, [x, *parameters], grads)
    assert all(g.dtype == torch.float32 for g in found)
    assert_same(found, torch.autograd.grad(stock, [x, *parameters], grads), 8e-3)
    with torch.inference_mode():
        assert_same(ops.project(x, weights, biases, 0, torch.bfloat16), stock, 4e-3)


@pytest.mark.parametrize("count", [0, 1, 9])
def test_results_in_heads(count):
    x, linears = rows(count, 4), maps(4, (6, 2, 8))
    weights, biases = [lin.weight for lin in linears], [lin.bias for lin in linears]
    leaves = [x, *(p for lin in linears for p in lin.parameters())]
    outs = ops.project(x, weights, biases, 0, None, [3, 0, 1])
    expected = [lin(x) for lin in linears]
    expected = [expected[0].view(count, 3, 2), expected[1], expected[2].view(count, 1, 8)]
    assert_same(outs, expected, 1e-12)
    grads = [torch.randn(*out.shape, 2, dtype=out.dtype)[..., 0] for out in outs]  # not contiguous
    assert_same(torch.autograd.grad(outs, leaves, grads), torch.autograd.grad(expected, leaves, grads), 1e-12)
    found = projection.project(x, *linears, heads=(3, 0, 1))  # the modules'
    assert_same(found, expected, 1e-12)


def test_rows_are_added_to_heads():
    x, row = rows(5, 12).detach().view(5, 3, 4).requires_grad_(), rows(1, 12)[0]
    assert torch.equal(ops.add_row(x, row), x.flatten(1) + row)
    assert torch.equal(projection.add_row_to_heads(x, row), x.flatten(1) + row)
    assert torch.equal(projection.add_row(x, row[:4]), x + row[:4])
    assert torch.autograd.gradcheck(ops.add_row, (x, row)) and torch.autograd.gradgradcheck(ops.add_row, (x, row))


@pytest.mark.parametrize(
    "heads,message",
    [([4], "one entry for each of the 2"), ([5, 0], "must divide the 6"), ([-1, 0], "must divide the 6")],
)
def test_heads_that_do_not_fit(heads, message):
    x, linears = rows(5, 4), maps(4, (6, 2))
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        ops.project(x, [lin.weight for lin in linears], [None, None], 0, None, heads)


def test_results_without_a_gradient_count_as_zero():
    x, linears = rows(50, 4), maps(4, (3, 2, 5))
    leaves = [x, *(p for lin in linears for p in lin.parameters())]
    found = torch.autograd.grad(run(x, linears)[2].sum(), leaves, materialize_grads=True)
    expected = torch.autograd.grad(linears[2](x).sum(), leaves, materialize_grads=True)
    assert_same(found, expected, 1e-12)


def test_strided_and_expanded_inputs(every_capability):
    linears = maps(6, (4, 3))
    for x in (rows(6, 40).t(), rows(40, 12)[:, ::2], rows(1, 6).expand(40, 6), rows(80, 6)[::2]):
        assert_same(run(x, linears), [lin(x) for lin in linears], 1e-12)
    x = rows(40, 6)
    out = run(x, linears)[0]
    (found,) = torch.autograd.grad(out.sum(), x)  # an expanded gradient
    assert_same([found], torch.autograd.grad(linears[0](x).sum(), x), 1e-12)


def test_gradients_of_gradients():
    x, linears = rows(5, 3), maps(3, (2, 2))
    parameters = [lin.weight for lin in linears] + [lin.bias for lin in linears if lin.bias is not None]

    def call(x, *parameters):
        return tuple(ops.project(x, parameters[:2], [*parameters[2:], None]))

    assert torch.autograd.gradcheck(call, (x, *parameters))
    assert torch.autograd.gradgradcheck(call, (x, *parameters))


def test_sum_of_maps():
    xs, weights = [rows(5, 3), rows(5, 2)], [rows(4, 3), rows(4, 2)]
    for bias in (None, rows(1, 4)[0]):
        leaves = [*xs, *weights, *([] if bias is None else [bias])]

        def call(a, b, v, w, bias=None):
            return ops.project_sum([a, b], [v, w], bias)

        expected = xs[0] @ weights[0].t() + xs[1] @ weights[1].t() + (0 if bias is None else bias)
        torch.testing.assert_close(call(*leaves), expected)
        assert torch.autograd.gradcheck(call, leaves) and torch.autograd.gradgradcheck(call, leaves)
        for k in range(len(leaves)):  # each on its own
            (found,) = torch.autograd.grad(call(*leaves).sum(), leaves[k])
            torch.testing.assert_close(found, torch.autograd.grad(expected.sum(), leaves[k], retain_graph=True)[0])


def test_sum_of_maps_refuses_what_does_not_fit():
    x = torch.ones(5, 3)
    for xs, weights, bias, message in (
        ([x], [], None, "one weight for each of one or more xs, got 0 and 1"),
        ([x, x], [torch.ones(4, 3)], None, "got 1 and 2"),
        ([x, torch.ones(4, 3)], [torch.ones(4, 3)] * 2, None, "xs must have shape"),
        ([x, x], [torch.ones(4, 3), torch.ones(5, 3)], None, "weights must have shape"),
        ([x, x.double()], [torch.ones(4, 3), torch.ones(4, 3).double()], None, "xs must be"),
        ([x], [torch.ones(4, 3)], torch.ones(3), "bias must have shape"),
    ):
        with torch.no_grad(), pytest.raises(ValueError, match=message):
            ops.project_sum(xs, weights, bias)
    for grad, needs, message in (
        (torch.ones(5, 3), [True] * 5, "grad must have shape"),
        (torch.ones(5, 4).double(), [True] * 5, "grad must be"),
        (torch.ones(5, 4), [True] * 4, "there must be 5 needs, got 4"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.project_sum_backward(grad, [x, x], [torch.ones(4, 3)] * 2, needs)


def test_opcheck():
    x, linears = rows(9, 4), maps(4, (3, 5))
    weights, biases = [lin.weight for lin in linears], [lin.bias for lin in linears]
    torch.library.opcheck(ops.project.default, (x, weights, biases))
    torch.library.opcheck(ops.project.default, (x, weights, biases, 0, None, [3, 0]))
    torch.library.opcheck(ops.add_row.default, (rows(9, 12).detach().view(9, 3, 4).requires_grad_(), rows(1, 12)[0]))
    torch.library.opcheck(ops.project_sum.default, ([x, rows(9, 4)], [weights[0], rows(3, 4)], biases[0]))
    torch.library.opcheck(ops.project_sum.default, ([x], weights[:1], None, torch.float32))
    both, grad = [t.detach() for t in (x, rows(9, 4))], torch.randn(9, 3, dtype=x.dtype)
    square = [t.detach() for t in (weights[0], rows(3, 4))]
    for needs in ([True] * 5, [False, True, True, False, False]):
        torch.library.opcheck(ops.project_sum_backward.default, (grad, both, square, needs))
    torch.library.opcheck(ops.project_sum_backward.default, (grad, both, square, [True] * 5, torch.float32, None))
    torch.library.opcheck(ops.add_row.default, (x, rows(1, 4)[0]))
    torch.library.opcheck(ops.column_sums.default, (x,))
    heads, vectors = rows(9, 12).detach().view(9, 3, 4).requires_grad_(), [rows(3, 4), rows(3, 4).detach()]
    torch.library.opcheck(ops.node_logits.default, (heads, vectors))
    args = ([torch.randn(9, 3, dtype=x.dtype), None], heads.detach(), [v.detach() for v in vectors])
    torch.library.opcheck(ops.node_logits_backward.default, (*args, [True, False, True]))
    torch.library.opcheck(ops.cast_all.default, ([x, *weights], torch.float32))
    detached = [w.detach() for w in weights]
    for needs in ([True] * 5, [False, True, False, False, True]):
        grads = [torch.randn(9, 3, dtype=x.dtype), None]
        torch.library.opcheck(ops.project_backward.default, (grads, x.detach(), detached, needs))


def test_sums_and_copies_of_rows():
    x, row = rows(5, 3), rows(1, 3)[0]
    assert torch.autograd.gradcheck(ops.add_row, (x, row)) and torch.autograd.gradgradcheck(ops.add_row, (x, row))
    assert torch.autograd.gradcheck(ops.column_sums, (x,)) and torch.autograd.gradgradcheck(ops.column_sums, (x,))
    halves = ops.cast_all([x, row], torch.float16)
    assert all(t.dtype == torch.float16 for t in halves)
    found = torch.autograd.grad([t.sum() for t in halves], [x, row])
    assert all(torch.equal(g, torch.ones_like(t)) and g.dtype == t.dtype for g, t in zip(found, (x, row), strict=True))
    (found,) = torch.autograd.grad(ops.cast_all([x, row], torch.float16)[1].sum(), [row])
    assert torch.equal(found, torch.ones_like(row))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_logits_of_nodes(count):
    x = rows(7, 12).detach().view(7, 3, 4).requires_grad_()
    vectors = [rows(3, 4) for _ in range(count)]

    def call(x, *vectors):
        return tuple(ops.node_logits(x, vectors))

    assert_same(call(x, *vectors), [(x * a).sum(-1) for a in vectors], 1e-12)
    assert torch.autograd.gradcheck(call, (x, *vectors)) and torch.autograd.gradgradcheck(call, (x, *vectors))
    (found,) = torch.autograd.grad(call(x, *vectors)[-1].sum(), [x])
    assert torch.equal(found, vectors[-1].expand(7, 3, 4))
    wide = call(x.detach().bfloat16(), *(a.float() for a in vectors))
    assert all(t.dtype == torch.float32 for t in wide)


def test_two_runs_are_the_same_bits():
    x, linears = rows(5000, 64, torch.float32), maps(64, (128, 128), torch.float32)
    once = [*run(x, linears), *torch.autograd.grad(sum(o.square().sum() for o in run(x, linears)), x)]
    again = [*run(x, linears), *torch.autograd.grad(sum(o.square().sum() for o in run(x, linears)), x)]
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


def test_bad_input():
    x, weight = rows(5, 3), rows(4, 3)
    for message, args in {
        "x must be [N, F], got shape [5, 3, 1]": (x.unsqueeze(2), [weight], [None]),
        "weights must have shape [4, 3], got [4, 2]": (x, [weight[:, :2]], [None]),
        "weights must hold at least one tensor, got none": (x, [], []),
        "weights must be Double, got Float": (x, [weight.float()], [None]),
        "biases must have shape [4], got [3]": (x, [weight], [x[0]]),
        "biases must have one entry for each of the 1 weights, got 2": (x, [weight], [None, None]),
        "joined must be 0 to 1, got 2": (x, [weight], [None], 2),
    }.items():
        with pytest.raises(ValueError, match=message.replace("[", r"\[").replace("]", r"\]")):
            ops.project(*args)
    for message, args in {
        r"node_logits: x must be \[N, H, C\], got shape \[5, 3\]": (x, [weight]),
        r"vectors must have shape \[3, 4\], got \[4, 3\]": (x.new_zeros(2, 3, 4), [weight]),
        r"vectors must be Double or Double, got Float": (x.new_zeros(2, 4, 3), [weight.float()]),
        r"vectors must hold at least one tensor": (x.new_zeros(2, 4, 3), []),
    }.items():
        with pytest.raises(ValueError, match=message):
            ops.node_logits(*args)
    with pytest.raises(ValueError, match=r"add_row: row must have shape \[3\], got \[5\]"):
        ops.add_row(x, x[:, 0])


# The choice between the op and the modules ------------------------------------------------------------------------


class Spy(torch.utils._python_dispatch.TorchDispatchMode):
    """Names of the ops that run."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.seen.append(op.name())
        return op(*args, **(kwargs or {}))


def ops_of(x, *linears, **kwargs):
    with Spy() as spy, torch.no_grad():
        projection.project(x, *linears, **kwargs)
    return spy.seen


def test_large_float32_takes_the_op(monkeypatch):
    (linear,) = maps(4, (8,), torch.float32)
    x = rows(100, 4, torch.float32)
    assert "edgeless::project" not in ops_of(x, linear)
    monkeypatch.setattr(projection, "_LEAST", 800)
    assert ops_of(x, linear) == ["edgeless::project"]
    assert "edgeless::project" not in ops_of(x[:99], linear)
    assert "edgeless::project" not in ops_of(x.double(), linear.double())


def test_few_rows_are_mapped_by_the_modules_without_a_look_at_them(monkeypatch):
    linears = [nn.Linear(4, 6), nn.Linear(4, 6)]
    monkeypatch.setattr(projection, "is_plain", None)  # would fail if it were asked
    x = rows(100, 4, torch.float32)
    a, b = projection.project(x, *linears, heads=(3, 0))
    assert torch.equal(a, linears[0](x).view(100, 3, 2)) and torch.equal(b, linears[1](x))
    many = rows(600, 4, torch.float32)  # whose results are as small
    for found, linear in zip(projection.project(many, *linears), linears, strict=True):
        assert torch.equal(found, linear(many))
    wide = nn.Linear(4, 900)
    with pytest.raises(TypeError, match="not callable"):
        projection.project(many, wide, wide)


def test_what_a_user_did_to_a_module_is_kept(monkeypatch):
    monkeypatch.setattr(projection, "_LEAST", 0)

    class Doubling(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    def hooked(hook):
        linear = maps(4, (8,), torch.float32)[0]
        getattr(linear, hook)(lambda *args: None)
        return linear

    overridden = maps(4, (8,), torch.float32)[0]
    overridden.forward = lambda x: x.new_zeros(len(x), 8)
    x = rows(10, 4, torch.float32)
    cases = [
        Doubling(4, 8),
        overridden,
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 8)),
        *map(hooked, ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook")),
    ]
    for linear in cases:
        assert "edgeless::project" not in ops_of(x, linear)
        assert torch.equal(projection.project(x, linear)[0], linear(x))
    for kind in ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"):
        handle = getattr(nn.modules.module, f"register_module_{kind}")(lambda *args: None)  # of all modules
        try:
            assert "edgeless::project" not in ops_of(x, nn.Linear(4, 8)), kind
        finally:
            handle.remove()
    with torch.autocast("cpu", torch.bfloat16):
        assert projection.project(x, nn.Linear(4, 8))[0].dtype == torch.bfloat16


def test_logits_are_those_of_the_projected_rows(monkeypatch):
    monkeypatch.setattr(projection, "_LEAST", 0)
    (linear,) = maps(16, (12,), torch.float32, bias=False)
    vectors = [torch.randn(1, 3, 4, requires_grad=True) for _ in range(2)]
    x = rows(300, 16, torch.float32)
    found = projection.project_with_logits(x, linear, *vectors)
    y = linear(x)
    expected = [y, *((y.view(-1, 3, 4) * a).sum(-1) for a in vectors)]
    assert_same(found, expected, 1e-5)
    leaves, grads = [x, linear.weight, *vectors], [torch.randn_like(t) for t in expected]
    assert_same(torch.autograd.grad(found, leaves, grads), torch.autograd.grad(expected, leaves, grads), 1e-5)
    assert projection.project_with_logits(x, nn.Linear(16, 12), *vectors) is None


def test_add_writes_only_what_is_its_own(monkeypatch):
    monkeypatch.setattr(projection, "_LEAST", 0)
    x, y = torch.ones(3, 2), torch.ones(3, 2)
    assert torch.equal(projection.add(x, y, own=False), torch.full((3, 2), 2.0)) and x.sum() == 6
    assert projection.add(x, y, own=True) is x and x.sum() == 12
    assert projection.add(x, y.double(), own=True).dtype == torch.float64


@pytest.mark.parametrize("features", [1, 5, 6, 7, 16, 31])
@pytest.mark.parametrize("width", [1, 15, 16, 17, 33, 48, 63, 64, 65, 130])
def test_every_tail_of_a_tile(features, width, every_capability):
    x, linears = rows(197, features, torch.float32), maps(features, (width, 3), torch.float32)
    leaves = [x, *(p for lin in linears for p in lin.parameters())]
    outs = run(x, linears)
    grads = [torch.randn_like(out) for out in outs]
    found = [*outs, *torch.autograd.grad(outs, leaves, grads)]
    exact = in_float64(x, linears, grads, lambda t: t)
    # Rounding is relative to the sum of the terms' sizes, whatever cancels.
    sizes = in_float64(x, linears, grads, torch.abs)
    for a, b, size in zip(found, exact, sizes, strict=True):
        assert ((a.double() - b).abs() <= 1e-6 * size).all()


def in_float64(x, linears, grads, change):
    wide = change(x.detach().double()).requires_grad_()
    copies = [copy.deepcopy(lin).double() for lin in linears]
    for parameter in (p for lin in copies for p in lin.parameters()):
        parameter.data = change(parameter.data)
    outs = [lin(wide) for lin in copies]
    leaves = [wide, *(p for lin in copies for p in lin.parameters())]
    return [*outs, *torch.autograd.grad(outs, leaves, [change(g.double()) for g in grads])]


def test_threads_change_no_bit():
    x, linears = rows(4001, 40, torch.float32), maps(40, (70, 20), torch.float32)
    leaves = [x, *(p for lin in linears for p in lin.parameters())]

    def once():
        outs = run(x, linears)
        return [*outs, *torch.autograd.grad(outs, leaves, [out.detach().cos() for out in outs])]

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = once()
        torch.set_num_threads(4)
        assert all(torch.equal(a, b) for a, b in zip(one, once(), strict=True))
    finally:
        torch.set_num_threads(before)


def test_a_bias_that_is_added_with_a_map_is_not_rounded_by_autocast():
    """Nor is its gradient: the bias is added outside the product."""
    bias = torch.tensor([1 + 2**-20, 3.0]).requires_grad_()
    out, x, weight = torch.zeros(600, 2), torch.zeros(600, 5), torch.ones(5, 2)
    with torch.autocast("cpu", torch.bfloat16):
        found = projection.add_map(out, x, weight, bias)
    assert torch.equal(found, bias.expand(600, 2))
    grad = torch.ones(600, 2) + torch.arange(600).unsqueeze(1) * 2**-12
    (have,) = torch.autograd.grad(found, bias, grad)
    torch.testing.assert_close(have.double(), grad.double().sum(0), rtol=1e-6, atol=0)
