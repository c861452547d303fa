"""Fake kernels of the relational ops. The schemas are in ``core_cuda/library.cpp``, the gradients in
``core_cuda/relational/relational_autograd.cpp``.

A segment is the edges of one relation at one row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import opmath_dtype
from ._registration import if_known, register_fake


def widths(weight: Tensor) -> tuple[int, int]:
    """Returns the width of an input row and of the product, for dense and for block-diagonal matrices."""
    blocks = weight.size(1) if weight.dim() == 4 else 1
    return blocks * weight.size(-2), blocks * weight.size(-1)


typed_edges = torch.ops.edgeless.typed_edges
segment_tiles = torch.ops.edgeless.segment_tiles
pairs_of_edges = torch.ops.edgeless.pairs_of_edges
pair_walks = torch.ops.edgeless.pair_walks

# Constants of ``core_cuda/relational/tiling.h``: the work of a tile, in edges of segments (OF_TILE) or in segments of
# rows (OF_ROW_TILE), and the fixed work that each segment (OF_SEGMENT) or row (OF_ROW) adds.
OF_TILE, OF_SEGMENT = 576, 8
OF_ROW_TILE, OF_ROW = 1024, 16


def _wanted(tensors, needs):
    """Returns for each tensor a gradient of its shape if that is needed, else one without elements."""
    return [t.new_empty(t.shape if need else (0,)) for t, need in zip(tensors, needs)]


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
    return _wanted((y, x, alpha), needs)


@register_fake("edgeless::typed_edges")
def _typed_edges_fake(indptr, indices, edge_ids, types, num_types, cut):
    num_edges = indices.size(0)
    sizes = (num_types + 1, num_edges, num_edges + 1, num_edges, num_edges)
    if indptr.device.type == "cuda":
        parts = indptr.new_empty((indptr.size(0) + num_edges,))
    else:
        num_ends = if_known(lambda: _num_parts(indptr.size(0) - 1, num_edges, num_types) + 1)
        if num_ends is None:  # edges are unique (node, relation) pairs, counted at run time
            num_ends = torch.library.get_ctx().new_dynamic_size()
        parts = types.new_empty((num_ends, 2 + num_types), dtype=torch.int64)
    count = indptr.new_empty((1,), dtype=torch.int64, device="cpu")
    return (*(indptr.new_empty((size,)) for size in sizes), parts, count)


@register_fake("edgeless::typed_means")
def _typed_means_fake(type_ptr, rows, ptr, edge_ids, dtype):
    return rows.new_empty(rows.shape if edge_ids is None else edge_ids.shape, dtype=dtype)


@register_fake("edgeless::pairs_of_edges")
def _pairs_of_edges_fake(ptr, edge_ids):
    return edge_ids.new_empty(edge_ids.shape)


@register_fake("edgeless::segment_tiles")
def _segment_tiles_fake(type_ptr, rows, ptr, by_row, num_edges, split_hubs):
    num_types, segments = type_ptr.size(0) - 1, rows.size(0)
    num_rows = by_row.size(0) - 1 - segments
    tiles = (num_edges + OF_SEGMENT * segments) // OF_TILE + num_types + 1
    row_tiles, of_rows, parts = (segments + OF_ROW * num_rows + OF_ROW_TILE - 1) // OF_ROW_TILE + 1, 0, 0
    if split_hubs:  # the number of hubs is known at run time only
        row_tiles, of_rows, parts = (torch.library.get_ctx().new_dynamic_size() for _ in range(3))
    sizes = ((num_types + 1,), (tiles,), (row_tiles,), (of_rows,), (2, parts))
    return tuple(map(type_ptr.new_empty, sizes))


def _num_parts(rows, edges, types):
    """Computes ``num_typed_parts`` of ``core_cuda/relational/typed_edges.h``."""
    fewest = 8 if 8 * types <= edges else 1
    wanted = min(max(edges // (64 * max(types, 1)), fewest), 1024)
    return min(max((rows + edges) // 2048, 1), wanted)


@register_fake("edgeless::relational_sum")
def _relational_sum_fake(x, weight, edge_weight, by_dst, by_src, num_dst, out_dtype):
    width = widths(weight)[1]
    return x.new_empty((num_dst, width), dtype=out_dtype or x.dtype)


@register_fake("edgeless::pair_maps")
def _pair_maps_fake(k, v, k_weight, v_weight, k_scale, by_dst, by_src, joined):
    pairs = by_dst[3].size(0)
    return tuple(k.new_empty((pairs, widths(weight)[1])) for weight in (k_weight, v_weight))


@register_fake("edgeless::pair_maps_backward")
def _pair_maps_backward_fake(grad_keys, grad_values, k, v, k_weight, v_weight, k_scale, by_dst, by_src, needs):
    return _wanted((k, v, k_weight, v_weight, k_scale), needs)


@register_fake("edgeless::pair_maps_backward_over")
def _pair_maps_backward_over_fake(*args):
    return tuple(_pair_maps_backward_fake(*args))


@register_fake("edgeless::pair_dot_attention")
def _pair_dot_attention_fake(q, k, v, k_weight, v_weight, k_scale, by_dst, csr, coefficient, max_degrees=()):
    return q.new_empty((q.size(0), widths(v_weight)[1]))


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
    return _wanted((x, weight, x if edge_weight is None else edge_weight), needs)


@register_fake("edgeless::pair_walks")
def _pair_walks_fake(indptr, by_pair, pair_nodes, pair_of_edge, by_node, segments, segment_ptr, order):
    edges, pairs, segments, ends = (t.size(0) for t in (pair_of_edge, pair_nodes, order, indptr))
    sizes = (edges, edges, edges, segments, segments, segments + 1, edges, ends, pairs + segments, pairs + segments)
    return (*(indptr.new_empty((size,)) for size in sizes), indptr.new_empty((3,), dtype=torch.int64))


@register_fake("edgeless::pair_attention")
def _pair_attention_fake(
    x, weight, query, key, bias, walks, edge_ids, negative_slope, max_degrees=(), keep_sums=False, seed=None,
    dropout=0.0,
):  # fmt: skip
    types, depth, width = weight.shape
    nodes, pairs, segments = x.size(0), walks[1].size(0), walks[9].size(0)
    shapes = ((nodes, width), (pairs, width), (types, depth))
    numbers = [x.new_empty(shape, dtype=opmath_dtype(x.dtype)) for shape in ((segments,), (2, nodes))]
    sums = x.new_empty((nodes if keep_sums and bias is not None else 0, width))
    return (*map(x.new_empty, shapes), *numbers, sums)


@register_fake("edgeless::pair_attention_backward")
def _pair_attention_backward_fake(
    grad, out, values, vectors, queries, shift, x, weight, query, key, bias, walks, edge_ids,
    negative_slope, needs, max_degrees=(), seed=None, dropout=0.0,
):  # fmt: skip
    like = (x, weight, query, key, x if bias is None else bias)
    return [t.new_empty(t.shape if need else (0,)) for t, need in zip(like, needs)]


@register_fake("edgeless::pair_attention_backward_over")
def _pair_attention_backward_over_fake(*args, **options):
    return tuple(_pair_attention_backward_fake(*args, **options))
