"""Numbers of the pairs of a node and a type: dot products of the nodes with vectors of the types, and the rows of pairs
handed to their edges.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from .aggregation import sddmm_dot
from .functional_checks import runs_reference
from .ops.attention import opmath_dtype
from .ops.graph import coo_to_csr
from .relational import relational_sum
from .typed_graph import TypedGraph

# Sampled products read a pair's row once for each head. Typed products read it once for all of them, but they have
# tiles of 64 columns to fill, and their gradient writes a row for every pair (the CPU's limit is measured).
_MOST_SAMPLED = {"cpu": 2, "cuda": 7}


def samples(x: Tensor, heads: int) -> bool:
    """Whether dot products with ``heads`` vectors of a type are sampled one by one rather than made as a matrix."""
    whole = heads * x.element_size() % 16 == 0  # else typed products on CUDA cannot use tensor cores
    return heads <= _MOST_SAMPLED.get(x.device.type, 0) or (x.is_cuda and not whole)


def end_products(graph: TypedGraph, x: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Dot products of the nodes at both ends of the edges with vectors of the edges' types, of each pair once.

    Args:
        graph: sources and destinations are the same N nodes.
        x: ``[N, K]``.
        vectors: ``[2 * R, H, K]``, of x's dtype: those for destinations, then those for sources.
    Returns:
        ``[pairs of graph.reversed.compact, H]`` and ``[pairs of graph.compact, H]``, 16-bit ones in float32.
        Differentiable in x and vectors.
    """
    dtype, heads = opmath_dtype(x.dtype), vectors.size(1)
    if samples(x, heads):
        types, counts = graph.ends
        rows = x.unsqueeze(1)
        rows = rows if heads == 1 else rows.expand(-1, heads, -1)
        return sddmm_dot(types, vectors, rows, out_dtype=dtype).split_with_sizes(counts)
    sides = zip((graph.reversed, graph), vectors.transpose(1, 2).chunk(2))
    return tuple(relational_sum(of.compact.pairs, x, w, out_dtype=dtype, order="aggregate") for of, w in sides)


class _Gather(torch.autograd.Function):
    """``x[index]``, whose gradient sums the rows in order: that of torch's own adds to them with atomics on CUDA."""

    @staticmethod
    def forward(ctx, x, index, indptr, members):
        ctx.num_rows = x.size(0)
        ctx.save_for_backward(index, indptr, members)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, grad):
        index, indptr, members = ctx.saved_tensors
        if indptr is None:
            indptr, _, members = coo_to_csr(index, index, ctx.num_rows, ctx.num_rows, False)
        back = []
        if torch.is_grad_enabled():  # the gradient is to be differentiated
            ends = torch.arange(index.size(0) + 1, dtype=indptr.dtype, device=index.device)
            back = [ends, index.to(indptr.dtype)]
        summed = torch.ops.edgeless.spmm(grad, None, None, None, [indptr, members], back, grad.dtype, [])
        return summed, None, None, None


def gather_rows(x: Tensor, index: Tensor, indptr: Optional[Tensor] = None, members: Optional[Tensor] = None) -> Tensor:
    """``x[index]``, with a gradient that is the same from run to run on every device.

    Args:
        x: ``[N, F]``.
        index: ``[E]``, int32 or int64, valid.
        indptr, members: ``[N + 1]`` and ``[E]``, where they are at hand: the places in index that hold row r are
            ``members[indptr[r]:indptr[r + 1]]``. The backward sorts index without them.
    """
    if not (torch.is_grad_enabled() and x.requires_grad) or runs_reference("gather_rows", x.device, "spmm"):
        return x.index_select(0, index)
    return _Gather.apply(x, index, indptr, members)


def to_edges(graph: TypedGraph, rows: Tensor) -> Tensor:
    """``[E, F]``: of every edge the row of its source's pair, from ``rows`` ``[pairs of graph.compact, F]``."""
    _, edges, pair_of_edge = graph.compact
    by_pair = edges.csc
    return gather_rows(rows, pair_of_edge, by_pair.indptr, by_pair.edge_ids)
