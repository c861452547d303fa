"""Fake kernels of the linear maps and their helpers. The schemas are in ``core_cuda/library.cpp``, the gradients in
``core_cuda/projection``.
"""

from __future__ import annotations

import torch

from ._registration import register_fake


@register_fake("edgeless::project")
def _project_fake(x, weights, biases, joined=0, dtype=None, heads=()):
    outs = [x.new_empty((x.size(0), weight.size(0)), dtype=dtype or x.dtype) for weight in weights]
    return [out.view(out.size(0), n, out.size(1) // n) if n else out for out, n in zip(outs, heads or [0] * len(outs))]


@register_fake("edgeless::project_backward")
def _project_backward_fake(grads, x, weights, needs, x_dtype=None, map_dtype=None):
    like = [x, *weights, *(weight[:, 0] for weight in weights)]
    dtypes = [x_dtype, *[map_dtype] * (2 * len(weights))]
    return [x.new_empty(t.shape if need else (0,), dtype=dtype) for t, need, dtype in zip(like, needs, dtypes)]


@register_fake("edgeless::project_sum")
def _project_sum_fake(xs, weights, bias, dtype=None):
    return xs[0].new_empty((xs[0].size(0), weights[0].size(0)), dtype=dtype or xs[0].dtype)


@register_fake("edgeless::project_sum_backward")
def _project_sum_backward_fake(grad, xs, weights, needs, x_dtype=None, map_dtype=None):
    dtypes = [x_dtype] * len(xs) + [map_dtype] * (len(weights) + 1)
    like = [*xs, *weights, weights[0][:, 0]]
    return [grad.new_empty(t.shape if need else (0,), dtype=dtype) for t, need, dtype in zip(like, needs, dtypes)]


@register_fake("edgeless::project_onto")
def _project_onto_fake(to, x, weight, bias):
    return None


@register_fake("edgeless::add_row")
def _add_row_fake(x, row):
    return x.new_empty((x.size(0), row.size(0)))


@register_fake("edgeless::column_sums")
def _column_sums_fake(x):
    return x.new_empty((x.size(1),))


@register_fake("edgeless::cast_all")
def _cast_all_fake(tensors, dtype, side_by_side=False):
    return [t.new_empty(t.shape, dtype=dtype) for t in tensors]


@register_fake("edgeless::node_logits")
def _node_logits_fake(x, vectors):
    dtype = torch.promote_types(x.dtype, vectors[0].dtype)
    return [x.new_empty(x.shape[:2], dtype=dtype) for _ in vectors]


@register_fake("edgeless::node_logits_backward")
def _node_logits_backward_fake(grads, x, vectors, needs, more=None):
    return [t.new_empty(t.shape if need else (0,)) for t, need in zip((x, *vectors), needs)]
