"""A layer over relations, from node features to its result: one op, and so one node of autograd."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from ..autocast import autocasts
from ..checks import opmath_dtype
from ..graph.typed import TypedGraph
from .checks import cast, runs_reference
from .projection import PLAIN, add_map
from .relational import edge_weights, fuses, relational_sum, segments_of, transforms, whole_matrices
from .whole_rows import blocks_of, lacking, longer, longer_matrices, shorter


def relational_layer(
    graph: TypedGraph,
    x: Tensor,
    weight: Tensor,
    edge_weight: Optional[Tensor] = None,
    *,
    own: Optional[Tensor] = None,
    root: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    reduce: str = "sum",
    out_dtype: torch.dtype,
) -> Tensor:
    """``relational_sum(graph, x, weight, edge_weight, reduce=reduce) + own @ root + bias``.

    Args:
        own: ``[Nd, K']``, the rows of the destinations; by default the first Nd rows of x, where they lie.
        root: ``[K', M]``.
        bias: ``[M]``.
        out_dtype: dtype of the result, in which its summands are added.

    Returns:
        ``[Nd, M]``.
    """
    if not _is_one_op(x, (weight, own, root, bias), edge_weight, out_dtype):
        out = relational_sum(graph, x, weight, edge_weight, reduce=reduce, out_dtype=out_dtype)
        return add_map(out, x[: graph.num_dst] if own is None and root is not None else own, root, bias)
    short_in, short_out = lacking(x.device, x.dtype, weight)
    if short_in or short_out:
        blocks, whole = blocks_of(weight), longer_matrices(weight, short_in, short_out)
        if root is not None:
            root = longer(root, short_out, blocks)
            root = root if own is not None else longer(root.t(), short_in, blocks).t()
        x, bias = longer(x, short_in, blocks), longer(bias, short_out, blocks)
        options = {"own": own, "root": root, "bias": bias, "reduce": reduce, "out_dtype": out_dtype}
        return shorter(relational_layer(graph, x, whole, edge_weight, **options), short_out, blocks)
    edge_weight = cast(edge_weight, opmath_dtype(x.dtype))
    graded = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    csr: list[Tensor] = []
    csc: list[Tensor] = []
    degrees: list[int] = []
    weight = whole_matrices(graph, weight, x.dtype)
    fused = fuses(graph, weight, x.dtype)
    if transforms(graph, weight, fused):
        pairs, edges = graph.compact
        edge_weight = edge_weights(graph, edge_weight, reduce, x.dtype)
        by_edge = edge_weight is not None
        by_dst, by_src = pairs.by_dst, pairs.by_src if graded else []
        csr, degrees = edges.csr_arrays(by_edge), edges.cached_max_degrees()
        csc = edges.csc_arrays(by_edge) if graded else csc
    else:
        by_dst, by_src, edge_weight = segments_of(graph, fused, reduce, edge_weight, graded, x.dtype)
    return torch.ops.edgeless.relational_layer(
        x, weight, edge_weight, own, root, bias, by_dst, by_src, csr, csc, graph.num_dst, out_dtype, degrees
    )


def _is_one_op(x: Tensor, others: tuple, edge_weight: Optional[Tensor], out_dtype: torch.dtype) -> bool:
    dtype = x.dtype
    if out_dtype is not dtype and out_dtype is not opmath_dtype(dtype):
        return False
    for t in others:
        if t is not None and (type(t) not in PLAIN or t.dtype is not dtype):
            return False
    if edge_weight is not None and edge_weight.requires_grad and torch.is_grad_enabled():
        return False
    return not autocasts(x.device.type) and not runs_reference("relational_layer", x.device, "relational_sum")
