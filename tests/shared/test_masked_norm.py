"""Norms of masked rows against torch's own of the real rows, first and second derivatives too."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from edgeless import padding
from edgeless.padding import BatchNorm1d, real_rows
from edgeless.padding.masked_norm import RealRows, normalize, normalize_by_ops


def arguments(affine, seed=0):
    made = torch.Generator().manual_seed(seed)
    rows = torch.randn(20, 3, generator=made, dtype=torch.float64, requires_grad=True)
    weight, bias = (torch.randn(3, generator=made, dtype=torch.float64, requires_grad=True) for _ in range(2))
    mask = torch.rand(20, generator=made) < 0.7
    return (rows, weight, bias) if affine else (rows, None, None), mask


@pytest.mark.parametrize("norm", [normalize, normalize_by_ops])
@pytest.mark.parametrize("affine", [True, False])
def test_real_rows_are_those_of_torch(norm, affine):
    (rows, weight, bias), mask = arguments(affine)
    out, mean, variance = norm(rows, RealRows(mask, torch.float64), weight, bias, 1e-5)
    expected = nn.functional.batch_norm(rows[mask], None, None, weight, bias, True, eps=1e-5)
    assert torch.allclose(out[mask], expected, rtol=1e-12, atol=1e-13)
    assert torch.allclose(mean, rows[mask].mean(0)) and torch.allclose(variance, rows[mask].var(0, unbiased=False))
    assert not mean.requires_grad and not variance.requires_grad
    wanted, cotangent = [t for t in (rows, weight, bias) if t is not None], torch.randn_like(expected)
    mine = torch.autograd.grad(out[mask], wanted, cotangent)
    for one, other in zip(mine, torch.autograd.grad(expected, wanted, cotangent), strict=True):
        assert torch.allclose(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("affine", [True, False])
def test_derivatives(affine):
    given, mask = arguments(affine)
    wanted = [t for t in given if t is not None]

    def of(*tensors):
        weight, bias = tensors[1:] if affine else (None, None)
        return normalize(tensors[0], RealRows(mask, torch.float64), weight, bias, 1e-5)[0]

    assert torch.autograd.gradcheck(of, wanted) and torch.autograd.gradgradcheck(of, wanted)
    for place in range(len(wanted)):  # with some that need no gradient
        some = [t.detach().requires_grad_(i == place) for i, t in enumerate(wanted)]
        assert torch.autograd.gradcheck(of, some) and torch.autograd.gradgradcheck(of, some)


def test_numbers_of_padding_are_not_read():
    (rows, weight, bias), mask = arguments(True)
    real, other = RealRows(mask, torch.float64), rows.detach().clone()
    other[~mask] = 1e30
    other.requires_grad_()
    out, again = (normalize(x, real, weight, bias, 1e-5)[0] for x in (rows, other))
    assert torch.equal(out[mask], again[mask])
    out[mask].square().sum().backward(), again[mask].square().sum().backward()
    assert torch.equal(rows.grad[mask], other.grad[mask])


class Launches(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view and func.__name__.partition(".")[0] not in (
            "empty",
            "empty_like",
            "_unsafe_view",
        )
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_norm_without_a_read_is_the_one_of_the_cpu_in_few_launches(momentum, monkeypatch):
    rows, mask = torch.randn(40, 5), torch.arange(40) < 29
    mine, theirs = BatchNorm1d(5, momentum=momentum), BatchNorm1d(5, momentum=momentum)
    with real_rows(nodes=mask):
        expected = [theirs(rows + place) for place in range(3)]
    monkeypatch.setattr(padding.BatchNorm1d, "_of_rows", padding.BatchNorm1d._of_mask)
    counts = []
    with real_rows(nodes=mask):
        for place, theirs_out in enumerate(expected):
            x = (rows + place).requires_grad_()
            with Launches() as launches:
                out = mine(x)
                out.backward(torch.ones_like(out))
            counts.append(launches.count)
            assert torch.allclose(out, theirs_out, rtol=1e-5, atol=1e-6)
    assert all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(mine.buffers(), theirs.buffers(), strict=True))
    assert counts[1] <= (27 if momentum else 33), counts
