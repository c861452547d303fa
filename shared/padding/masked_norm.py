"""Normalises rows by the mean and variance of some of them, whose number only the device knows."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

__all__ = ["RealRows", "normalize"]


class RealRows:
    """The rows that statistics are computed from, given their mask ``[R]``."""

    def __init__(self, mask: Tensor, dtype: torch.dtype):
        self.mask = mask.unsqueeze(1)
        count = mask.sum().to(dtype)
        self.share = 1 / count
        self.unbiased = count / (count - 1)
        self.shares = torch.where(self.mask, self.share, 0)  # the weight of every row in a mean
        self._zero = count.new_zeros(())  # a Python number would need a launch for each use

    def only(self, rows: Tensor) -> Tensor:
        """``rows`` with zeros in rows that are not real."""
        return torch.where(self.mask, rows, self._zero)


def normalize(
    rows: Tensor, real: RealRows, weight: Optional[Tensor], bias: Optional[Tensor], eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the rows ``[R, C]``, normalised, and the mean and the biased variance ``[C]`` of the real ones.

    Args:
        rows: ``[R, C]``.
        real: the real rows, in the dtype of ``rows``.
        weight, bias: ``[C]``, or None.
    """
    return _Norm.apply(rows, real, weight, bias, eps)


def normalize_by_ops(rows: Tensor, real: RealRows, weight: Optional[Tensor], bias: Optional[Tensor], eps: float):
    """Like :func:`normalize`, by ops that torch differentiates twice and compiles, in many more launches."""
    mean = real.only(rows).sum(0) * real.share
    centred = rows - mean
    variance = real.only(centred).square().sum(0) * real.share
    out = centred * torch.rsqrt(variance + eps)
    return out if weight is None else out * weight + bias, mean.detach(), variance.detach()


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, real: RealRows, weight: Optional[Tensor], bias: Optional[Tensor], eps: float):
        mean = real.only(rows).sum(0).mul_(real.share)
        centred = rows - mean
        variance = real.only(centred).square_().sum(0).mul_(real.share)
        inverse = (variance + eps).rsqrt_()
        scale = inverse if weight is None else (inverse * weight).to(rows.dtype)
        out = centred * scale if bias is None else torch.addcmul(bias, centred, scale)
        ctx.save_for_backward(rows, weight, bias, centred, inverse, scale)
        ctx.real, ctx.eps = real, eps
        ctx.mark_non_differentiable(mean, variance)
        ctx.set_materialize_grads(False)
        return out, mean, variance

    @staticmethod
    def backward(ctx, grad: Optional[Tensor], *_):
        if grad is None:
            return None, None, None, None, None
        rows, weight, bias, centred, inverse, scale = ctx.saved_tensors
        if torch.is_grad_enabled():  # for a second derivative
            wanted = [t for t, needed in zip((rows, weight, bias), _needed(ctx)) if needed]
            out, *_ = normalize_by_ops(rows, ctx.real, weight, bias, ctx.eps)
            found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
            of_rows, of_weight, of_bias = [next(found) if needed else None for needed in _needed(ctx)]
            return of_rows, None, of_weight, of_bias, None
        sums = grad.sum(0)
        products = (grad * centred).sum(0).mul_(inverse)
        of_rows = None
        if ctx.needs_input_grad[0]:
            # A real row also gets gradients through the mean and the variance; the sums and products are over all rows.
            through = torch.addcmul(sums, centred, products * inverse)
            of_rows = torch.addcmul(grad, through, ctx.real.shares, value=-1).mul_(scale)
        return of_rows, None, *(None if weight is None else (products, sums)[i] for i in range(2)), None


def _needed(ctx) -> tuple[bool, bool, bool]:
    return ctx.needs_input_grad[0], ctx.needs_input_grad[2], ctx.needs_input_grad[3]
