"""Min and max over in-neighbours: fake kernels and autograd."""

from __future__ import annotations

import torch

from ._registration import below_autograd, register_autograd_kernel, register_fake

_ops = torch.ops.edgeless


@register_fake("edgeless::neighbor_reduce")
def _neighbor_reduce_fake(x, csr, csc, reduce, fill, arg_dtype, ties):
    rows = csr[0].size(0) - 1
    return (
        x.new_empty((rows, x.size(1))),
        x.new_empty((rows, x.size(1)), dtype=arg_dtype),
        x.new_empty((rows,), dtype=torch.uint8),
    )


@register_fake("edgeless::neighbor_reduce_backward")
def _neighbor_reduce_backward_fake(grad_out, x, out, arg, tied, csr, csc, reduce, ties, way="auto"):
    return x.new_empty(x.shape)


class _NeighborReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, csr, csc, reduce, fill, arg_dtype, ties):
        with below_autograd():
            out, arg, tied = _ops.neighbor_reduce(x, csr, csc, reduce, fill, arg_dtype, ties)
        ctx.save_for_backward(x, out, arg, tied, *csr, *csc)
        ctx.sizes = (len(csr), len(csc))
        ctx.options = (reduce, ties)
        ctx.mark_non_differentiable(arg, tied)
        ctx.set_materialize_grads(False)  # else zeros as large as arg
        return out, arg, tied

    @staticmethod
    def backward(ctx, grad_out, *_):
        if grad_out is None:
            return (None,) * 7
        x, out, arg, tied, *indices = ctx.saved_tensors
        csr, csc = indices[: ctx.sizes[0]], indices[ctx.sizes[0] :]
        grad_x = _ops.neighbor_reduce_backward(grad_out, x, out, arg, tied, csr, csc, *ctx.options)
        return grad_x, None, None, None, None, None, None


class _NeighborReduceBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *args):
        with below_autograd():
            return _ops.neighbor_reduce_backward(*args)

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError(
            "edgeless: neighbor_reduce can be differentiated once only (double backward is not implemented); "
            'for second derivatives run under `with edgeless.backend("reference")`'
        )


def _neighbor_reduce_backward(*args):
    if torch.is_grad_enabled():
        return _NeighborReduceBackward.apply(*args)
    with below_autograd():
        return _ops.neighbor_reduce_backward(*args)


def _neighbor_reduce(*args):
    if torch.is_grad_enabled():
        return _NeighborReduce.apply(*args)
    with below_autograd():
        return _ops.neighbor_reduce(*args)


register_autograd_kernel("neighbor_reduce", _neighbor_reduce)
register_autograd_kernel("neighbor_reduce_backward", _neighbor_reduce_backward)
