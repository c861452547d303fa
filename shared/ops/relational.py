"""Typed products: fake kernels. Schemas: ``core_cuda/library.cpp``, gradients: ``relational_autograd.cpp``."""

from __future__ import annotations

import torch
from torch import Tensor

from ._registration import if_known, register_fake


def widths(weight: Tensor) -> tuple[int, int]:
    """Of a row that is multiplied, and of the product, for whole and for block-diagonal matrices."""
    blocks = weight.size(1) if weight.dim() == 4 else 1
    return blocks * weight.size(-2), blocks * weight.size(-1)


typed_edges = torch.ops.edgeless.typed_edges


@register_fake("edgeless::typed_mm")
def _typed_mm_fake(x, weight, offsets, rows):
    return x.new_empty((x.size(0), weight.size(2)))


@register_fake("edgeless::typed_outer")
def _typed_outer_fake(x, y, offsets, rows):
    return x.new_empty((offsets.size(0) - 1, x.size(1), y.size(1)))


@register_fake("edgeless::typed_linear")
def _typed_linear_fake(x, weight, bias, offsets):
    return x.new_empty((x.size(0), weight.size(1)))


@register_fake("edgeless::typed_sums")
def _typed_sums_fake(x, offsets):
    return x.new_empty((offsets.size(0) - 1, x.size(1)))


@register_fake("edgeless::typed_blend")
def _typed_blend_fake(y, x, alpha, offsets, rows):
    return y.new_empty(y.shape)


@register_fake("edgeless::typed_blend_backward")
def _typed_blend_backward_fake(grad, y, x, alpha, offsets, rows, needs):
    return [t.new_empty(t.shape if need else (0,)) for t, need in zip((y, x, alpha), needs)]


@register_fake("edgeless::typed_edges")
def _typed_edges_fake(indptr, indices, edge_ids, types, num_types, cut):
    num_edges = indices.size(0)
    sizes = (num_types + 1, num_edges, num_edges + 1, num_edges, num_edges)
    if indptr.device.type == "cuda":
        parts = indptr.new_empty((indptr.size(0) + num_edges,))
    else:
        num_ends = if_known(lambda: _num_parts(indptr.size(0) - 1, num_edges, num_types) + 1)
        if num_ends is None:  # of pairs, which are counted when the program runs
            num_ends = torch.library.get_ctx().new_dynamic_size()
        parts = types.new_empty((num_ends, 2 + num_types), dtype=torch.int64)
    return (*(indptr.new_empty((size,)) for size in sizes), parts)


@register_fake("edgeless::typed_means")
def _typed_means_fake(type_ptr, rows, ptr, edge_ids, dtype):
    return edge_ids.new_empty(edge_ids.shape, dtype=dtype)


def _num_parts(rows, edges, types):
    """``num_typed_parts`` of ``core_cuda/relational/typed_edges.h``."""
    fewest = 8 if 8 * types <= edges else 1
    wanted = min(max(edges // (64 * max(types, 1)), fewest), 1024)
    return min(max((rows + edges) // 2048, 1), wanted)


@register_fake("edgeless::relational_sum")
def _relational_sum_fake(x, weight, edge_weight, by_dst, by_src, num_dst, out_dtype):
    width = widths(weight)[1]
    return x.new_empty((num_dst, width), dtype=out_dtype or x.dtype)


@register_fake("edgeless::relational_layer")
def _relational_layer_fake(
    x, weight, edge_weight, own, root, bias, by_dst, by_src, csr, csc, num_dst, out_dtype, max_degrees=()
):
    return _relational_sum_fake(x, weight, edge_weight, by_dst, by_src, num_dst, out_dtype)


@register_fake("edgeless::relational_layer_backward")
def _relational_layer_backward_fake(
    grad, x, weight, edge_weight, own, root, by_dst, by_src, csr, csc, needs, max_degrees=()
):
    shapes = (x.shape, weight.shape, *(None if t is None else t.shape for t in (own, root)), (grad.size(1),))
    return [x.new_empty(shape if need else (0,)) for shape, need in zip(shapes, needs)]


@register_fake("edgeless::relational_sum_backward")
def _relational_sum_backward_fake(grad, x, weight, edge_weight, by_dst, by_src, needs):
    like = (x, weight, x if edge_weight is None else edge_weight)
    return [t.new_empty(t.shape if need else (0,)) for t, need in zip(like, needs)]


@register_fake("edgeless::pair_attention")
def _pair_attention_fake(x, weight, query, key, bias, walks, negative_slope, max_degrees=(), keep_sums=False):
    types, depth, width = weight.shape
    nodes, pairs, pieces = x.size(0), walks[1].size(0), walks[9].size(0)
    shapes = ((nodes, width), (pairs, width), (types, depth))
    numbers = [x.new_empty((size,), dtype=torch.float32) for size in (pieces, nodes)]
    sums = x.new_empty((nodes if keep_sums and bias is not None else 0, width))
    return (*map(x.new_empty, shapes), *numbers, sums)


@register_fake("edgeless::pair_attention_backward")
def _pair_attention_backward_fake(
    grad, out, values, vectors, queries, shift, x, weight, query, key, bias, walks, negative_slope, needs,
    max_degrees=(),
):  # fmt: skip
    like = (x, weight, query, key, x if bias is None else bias)
    return [t.new_empty(t.shape if need else (0,)) for t, need in zip(like, needs)]
