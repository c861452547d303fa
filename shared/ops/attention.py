"""The attention ops: fake kernels and autograd, side by side. Schemas stand in ``core_cuda/library.cpp``.

Tensors saved for backward are the inputs, the output and the logsumexp: nothing of the size of the edge set.
"""

from __future__ import annotations

import torch

from ._registration import below_autograd, register_autograd_kernel, register_fake

_ops = torch.ops.edgeless
_NUM_INPUTS = 7  # dst, src, value, att, edge_attr, edge_proj, edge_scale


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of softmax statistics, of parameters and of all arithmetic for rows stored in ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# Fake kernels ----------------------------------------------------------------------------------------------------


@register_fake("edgeless::attention")
def _attention_fake(
    dst, src, value, att, edge_attr, edge_proj, edge_scale, csr, csc, seed, score, coefficient, dropout, out_dtype
):
    channels = src.size(2) if value is None else value.size(2)
    out = dst.new_empty((dst.size(0), dst.size(1), channels), dtype=out_dtype or dst.dtype)
    return out, dst.new_empty((dst.size(0), dst.size(1)), dtype=statistics_dtype(dst.dtype))


@register_fake("edgeless::attention_backward")
def _attention_backward_fake(grad_out, grad_weights, out, logsumexp, *rest):
    inputs, needs = rest[:_NUM_INPUTS], rest[-1]
    some = inputs[0]
    return [t.new_empty(t.shape) if need and t is not None else some.new_empty((0,)) for t, need in zip(inputs, needs)]


@register_fake("edgeless::attention_weights")
def _attention_weights_fake(
    logsumexp, dst, src, att, edge_attr, edge_proj, csr, csc, seed, score, coefficient, dropout
):
    return dst.new_empty((csr[1].size(0), dst.size(1)), dtype=statistics_dtype(dst.dtype))


# Autograd --------------------------------------------------------------------------------------------------------


def _grads(found, needs):
    return tuple(g if need else None for g, need in zip(found, needs))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *args):
        inputs, (csr, csc, seed, score, coefficient, dropout, _) = args[:_NUM_INPUTS], args[_NUM_INPUTS:]
        with below_autograd():
            out, logsumexp = _ops.attention(*args)
        ctx.save_for_backward(out, logsumexp, *inputs, seed, *csr, *csc)
        ctx.sizes = (len(csr), len(csc))
        ctx.options = (score, coefficient, dropout)
        ctx.mark_non_differentiable(logsumexp)
        ctx.set_materialize_grads(False)
        return out, logsumexp

    @staticmethod
    def backward(ctx, grad_out, _):
        rest = (None,) * _NUM_INPUTS  # csr, csc, seed and the options
        if grad_out is None:
            return (None,) * _NUM_INPUTS + rest
        out, logsumexp, *saved = ctx.saved_tensors
        inputs, seed, indices = saved[:_NUM_INPUTS], saved[_NUM_INPUTS], saved[_NUM_INPUTS + 1 :]
        needs = list(ctx.needs_input_grad[:_NUM_INPUTS])
        csr, csc = indices[: ctx.sizes[0]], indices[ctx.sizes[0] :]
        found = _ops.attention_backward(
            grad_out, None, out, logsumexp, *inputs, csr, csc, seed, *ctx.options, False, needs
        )
        return _grads(found, needs) + rest


class _AttentionWeights(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logsumexp, dst, src, att, edge_attr, edge_proj, csr, csc, seed, score, coefficient, dropout):
        args = (logsumexp, dst, src, att, edge_attr, edge_proj, csr, csc, seed, score, coefficient, dropout)
        with below_autograd():
            weights = _ops.attention_weights(*args)
        ctx.save_for_backward(logsumexp, dst, src, att, edge_attr, edge_proj, seed, *csr, *csc)
        ctx.sizes = (len(csr), len(csc))
        ctx.options = (score, coefficient, dropout)
        return weights

    @staticmethod
    def backward(ctx, grad_weights):
        logsumexp, dst, src, att, edge_attr, edge_proj, seed, *indices = ctx.saved_tensors
        csr, csc = indices[: ctx.sizes[0]], indices[ctx.sizes[0] :]
        _, need_dst, need_src, need_att, need_attr, need_proj = ctx.needs_input_grad[:6]
        needs = [need_dst, need_src, False, need_att, need_attr, need_proj, False]
        dropped = ctx.options[2] > 0
        found = _ops.attention_backward(
            None, grad_weights, None, logsumexp, dst, src, None, att, edge_attr, edge_proj, None,
            csr, csc, seed, *ctx.options, dropped, needs,
        )  # fmt: skip
        d_dst, d_src, _, d_att, d_attr, d_proj, _ = _grads(found, needs)
        return (None, d_dst, d_src, d_att, d_attr, d_proj) + (None,) * 6


class _AttentionBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *args):
        with below_autograd():
            return tuple(_ops.attention_backward(*args))

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError(
            "edgeless: attention can be differentiated once only (double backward is not implemented); "
            'for second derivatives run under `with edgeless.backend("reference")`'
        )


def _attention_backward(*args):
    if torch.is_grad_enabled():
        return list(_AttentionBackward.apply(*args))
    with below_autograd():
        return _ops.attention_backward(*args)


def _attention(*args):
    if torch.is_grad_enabled():
        return _Attention.apply(*args)
    with below_autograd():
        return _ops.attention(*args)


register_autograd_kernel("attention", _attention)
register_autograd_kernel("attention_weights", lambda *args: _AttentionWeights.apply(*args))
register_autograd_kernel("attention_backward", _attention_backward)
