"""Ops on unique (node, relation) pairs: dot products of nodes with vectors of relations, and copies of the pairs' rows
to their edges.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import opmath_dtype
from ..graph.typed import TypedGraph
from .aggregation import sddmm_dot
from .checks import runs_reference
from .relational import relational_sum

# Most heads for sampled products (SDDMM), by measurement. They read a pair's row once per head. Typed products read it
# once for all heads, but their gradient writes a row per pair. On CUDA, typed products of 16-bit rows round their
# results, where sampled ones return float32; typed products of float64 have no tensor cores.
_MOST_SAMPLED = {"cpu": 2, "cuda": 7}
_MOST_SAMPLED_OF_FLOATS_ON_CUDA = 2


def samples(x: Tensor, heads: int) -> bool:
    """Returns whether dot products with ``heads`` vectors of a type run as sampled products rather than as a typed
    product.
    """
    if x.is_cuda and x.dtype == torch.float32:
        return heads <= _MOST_SAMPLED_OF_FLOATS_ON_CUDA
    return heads <= _MOST_SAMPLED.get(x.device.type, 0)


def end_products(graph: TypedGraph, x: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Dot products of both ends of the edges with vectors of the edges' types, computed once per unique (node, type).

    Args:
        graph: the destinations are the first of its sources, or all of them.
        x: ``[Ns, K]``.
        vectors: ``[2 * R, H, K]``, of x's dtype: vectors for destinations, then vectors for sources.
    Returns:
        ``[pairs of graph.reversed.compact, H]`` and ``[pairs of graph.compact, H]``; float32 for 16-bit rows.
        Differentiable in x and vectors.
    """
    dtype, heads = opmath_dtype(x.dtype), vectors.size(1)
    if samples(x, heads):
        types, counts = graph.ends
        rows = x.unsqueeze(1)
        rows = rows if heads == 1 else rows.expand(-1, heads, -1)
        return sddmm_dot(types, vectors, rows, out_dtype=dtype).split_with_sizes(counts)
    sides = zip((graph.reversed, graph), (x[: graph.num_dst], x), vectors.transpose(1, 2).chunk(2))
    return tuple(relational_sum(of.compact.pairs, x, w, out_dtype=dtype, order="aggregate") for of, x, w in sides)


def to_edges(graph: TypedGraph, rows: Tensor) -> Tensor:
    """``rows`` ``[pairs of graph.compact, F]`` gathered to edges, ``[E, F]``: the row of the edge's (source, type)."""
    pair_of_edge = graph.format("pair of edge", TypedGraph.pair_of_edge)
    if runs_reference("to_edges", rows.device, "spmm"):
        return rows.index_select(0, pair_of_edge)
    by_pair = graph.compact.edges.csc
    return torch.ops.edgeless.gather_rows(rows, pair_of_edge, by_pair.indptr, by_pair.edge_ids)
