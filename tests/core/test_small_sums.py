"""Sums of small linear maps on the CPU: when they are one op, and its gradients for few and for many rows."""

from itertools import product

import pytest
import torch
from test_projection import rows
from torch import nn

from edgeless.functional import projection


def test_sums_of_few_rows_are_one_op_where_the_maps_are_plain_and_small():
    def ops(xs, linears):
        out, want = projection.project_sum(xs, linears), sum(linear(x) for x, linear in zip(xs, linears, strict=True))
        torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
        return "ProjectSum" in out.grad_fn.name()

    x, y, z = (rows(100, width, torch.float32) for width in (4, 4, 5))
    first, second, third = nn.Linear(4, 6), nn.Linear(4, 6, bias=False), nn.Linear(5, 6, bias=False)
    assert ops((x, y), (first, second)) and ops((x, z), (first, third)) and ops((x, y, z), (first, second, third))
    assert ops((x, x), (second, second))
    assert not ops((x, y), (second, first))  # whose bias is the second's
    hooked = nn.Linear(4, 6, bias=False)
    hooked.register_forward_hook(lambda *_: None)
    assert not ops((x, y), (first, hooked))
    assert not ops((x.double(), y.double()), (nn.Linear(4, 6).double(), nn.Linear(4, 6, bias=False).double()))
    many = rows(100, 1311, torch.float32)  # 131,100 elements
    assert not ops((x, many), (first, nn.Linear(1311, 6, bias=False)))
    assert ops((x, many[:, :1310]), (first, nn.Linear(1310, 6, bias=False)))
    with pytest.raises(RuntimeError):
        projection.project_sum((x, y[:99]), (first, second))


@pytest.mark.parametrize("count", [100, 40_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_of_sums_of_few_and_of_many_rows(count, dtype):
    xs = [rows(count, width, dtype).requires_grad_() for width in (4, 5)]
    weights = [rows(6, width, dtype).requires_grad_() for width in (4, 5)]
    bias = rows(6, 1, dtype).flatten().requires_grad_()
    given = [*xs, *weights, bias]
    out = torch.ops.edgeless.project_sum(xs, weights, bias, None)
    want = xs[0] @ weights[0].t() + xs[1] @ weights[1].t() + bias
    grad = rows(count, 6, dtype).detach()

    def assert_near(a, b):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert (a - b).norm() <= (1e-5 if dtype == torch.float32 else 1e-10) * b.norm()

    assert_near(out, want)
    for which in ([0, 3], [1, 2, 4], range(5)):
        wanted = [given[i] for i in which]
        found, expected = (torch.autograd.grad(t, wanted, grad, retain_graph=True) for t in (out, want))
        for a, b in zip(found, expected, strict=True):
            assert_near(a, b)


@pytest.mark.parametrize("count", [10, 60_000])  # by the modules and by kernels
@pytest.mark.parametrize("maps", [1, 2, 3])
def test_every_bias_is_added(count, maps):
    for places in product((False, True), repeat=maps):
        linears = [nn.Linear(4, 20, bias=bias) for bias in places]
        xs = [rows(count, 4, torch.float32).detach() for _ in linears]
        found = projection.project_sum(xs, linears)
        torch.testing.assert_close(found, sum(linear(x) for x, linear in zip(xs, linears, strict=True)))
