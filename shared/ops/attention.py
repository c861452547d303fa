"""Fake kernels of the attention ops, which give shapes and dtypes to tracers.

The schemas are in ``core_cuda/library.cpp``, the gradients in ``core_cuda/attention/attention_autograd.cpp``.
"""

from __future__ import annotations

import torch

from ..checks import opmath_dtype
from ._registration import register_fake

_NUM_INPUTS = 7  # dst, src, value, att, edge_attr, edge_proj, edge_scale


@register_fake("edgeless::attention")
def _attention_fake(
    dst, src, value, att, edge_attr, edge_proj, edge_scale, csr, csc, seed, score, coefficient, dropout, out_dtype, *_
):
    rows = src if value is None else value
    out = dst.new_empty((dst.size(0), dst.size(1), rows.size(2)), dtype=out_dtype or rows.dtype)
    parts = 1 if dst.is_cuda else 2
    return out, dst.new_empty((parts, dst.size(0), dst.size(1)), dtype=opmath_dtype(dst.dtype))


@register_fake("edgeless::attention_backward")
def _attention_backward_fake(grad_out, grad_weights, out, softmax_stats, *rest):
    # Seven arguments without gradients, csr the first, come between the inputs and the flags of needed gradients.
    inputs, needs = rest[:_NUM_INPUTS], rest[_NUM_INPUTS + 7]
    some = inputs[0]
    return [t.new_empty(t.shape) if need and t is not None else some.new_empty((0,)) for t, need in zip(inputs, needs)]


@register_fake("edgeless::attention_backward_into")
def _attention_backward_into_fake(
    into, grad_out, out, softmax_stats, dst, src, value, att, csr, csc, seed, score, coefficient, dropout, att_grad, *_
):
    return torch.empty_like(att) if att_grad and att is not None else dst.new_empty((0,))


@register_fake("edgeless::attention_weights")
def _attention_weights_fake(
    softmax_stats, dst, src, att, edge_attr, edge_proj, csr, csc, seed, score, coefficient, dropout
):
    return dst.new_empty((csr[1].size(0), dst.size(1)), dtype=opmath_dtype(dst.dtype))


@register_fake("edgeless::softmax_sum")
def _softmax_sum_fake(logits, value, csr, max_degrees=()):
    return value.new_empty((csr[0].size(0) - 1, *value.shape[1:]))


def _attention_program(*arguments):
    from ..programs.attention import attention_program  # imports the tracer, which takes long

    return attention_program(*arguments)


_IN_PYTHON = torch.library.Library("edgeless", "IMPL")
_IN_PYTHON.impl("attention_program", _attention_program, "CompositeImplicitAutograd")
