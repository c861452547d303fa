"""SpMM and SDDMM: each is the other's gradient, so both can be differentiated as often as one likes."""

from __future__ import annotations

import torch

from ._registration import below_autograd, register_autograd_kernel, register_fake
from .attention import statistics_dtype

_ops = torch.ops.edgeless


@register_fake("edgeless::spmm")
def _spmm_fake(x, weight, src_scale, dst_scale, csr, csc, out_dtype):
    return x.new_empty((csr[0].size(0) - 1, x.size(1), x.size(2)), dtype=out_dtype or x.dtype)


@register_fake("edgeless::sddmm")
def _sddmm_fake(dst, src, src_scale, dst_scale, csr, csc):
    return src.new_empty((csr[1].size(0), src.size(1)), dtype=statistics_dtype(src.dtype))


class _SpMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, src_scale, dst_scale, csr, csc, out_dtype):
        with below_autograd():
            out = _ops.spmm(x, weight, src_scale, dst_scale, csr, csc, out_dtype)
        needs_x = weight is not None and ctx.needs_input_grad[1]
        ctx.save_for_backward(x if needs_x else None, weight, src_scale, dst_scale, *csr, *csc)
        ctx.sizes = (len(csr), len(csc))
        ctx.dtype = x.dtype
        return out

    @staticmethod
    def backward(ctx, grad):
        x, weight, src_scale, dst_scale, *indices = ctx.saved_tensors
        csr, csc = indices[: ctx.sizes[0]], indices[ctx.sizes[0] :]
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = _ops.spmm(grad, weight, dst_scale, src_scale, csc, csr, None).to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = _ops.sddmm(grad, x, src_scale, dst_scale, csr, csc)
        return grad_x, grad_weight, None, None, None, None, None


class _SDDMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx, dst, src, src_scale, dst_scale, csr, csc):
        with below_autograd():
            products = _ops.sddmm(dst, src, src_scale, dst_scale, csr, csc)
        ctx.save_for_backward(dst, src, src_scale, dst_scale, *csr, *csc)
        ctx.sizes = (len(csr), len(csc))
        return products

    @staticmethod
    def backward(ctx, grad):
        dst, src, src_scale, dst_scale, *indices = ctx.saved_tensors
        csr, csc = indices[: ctx.sizes[0]], indices[ctx.sizes[0] :]
        grad_dst = grad_src = None
        if ctx.needs_input_grad[0]:
            grad_dst = _ops.spmm(src, grad, src_scale, dst_scale, csr, csc, None).to(dst.dtype)
        if ctx.needs_input_grad[1]:
            grad_src = _ops.spmm(dst, grad, dst_scale, src_scale, csc, csr, None).to(src.dtype)
        return grad_dst, grad_src, None, None, None, None


def _spmm(*args):
    if torch.is_grad_enabled():
        return _SpMM.apply(*args)
    with below_autograd():
        return _ops.spmm(*args)


def _sddmm(*args):
    if torch.is_grad_enabled():
        return _SDDMM.apply(*args)
    with below_autograd():
        return _ops.sddmm(*args)


register_autograd_kernel("spmm", _spmm)
register_autograd_kernel("sddmm", _sddmm)
