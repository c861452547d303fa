"""Numbers of the pairs of a node and a type: dot products of the nodes with vectors of the types, and the rows of pairs
handed to their edges.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .aggregation import sddmm_dot
from .functional_checks import runs_reference
from .graph_checks import opmath_dtype
from .relational import relational_sum
from .typed_graph import TypedGraph

# Sampled products read a pair's row once for each head. Typed products read it once for all of them, but their gradient
# writes a row for every pair: limits are measured. On CUDA typed products of 16-bit rows round what they make, which
# sampled ones give in float32, and those of doubles have no tensor cores.
_MOST_SAMPLED = {"cpu": 2, "cuda": 7}
_MOST_SAMPLED_OF_FLOATS_ON_CUDA = 2


def samples(x: Tensor, heads: int) -> bool:
    """Whether dot products with ``heads`` vectors of a type are sampled one by one rather than made as a matrix."""
    if x.is_cuda and x.dtype == torch.float32:
        return heads <= _MOST_SAMPLED_OF_FLOATS_ON_CUDA
    return heads <= _MOST_SAMPLED.get(x.device.type, 0)


def end_products(graph: TypedGraph, x: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Dot products of the nodes at both ends of the edges with vectors of the edges' types, of each pair once.

    Args:
        graph: the destinations are the first of its sources, or all of them.
        x: ``[Ns, K]``.
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
    sides = zip((graph.reversed, graph), (x[: graph.num_dst], x), vectors.transpose(1, 2).chunk(2))
    return tuple(relational_sum(of.compact.pairs, x, w, out_dtype=dtype, order="aggregate") for of, x, w in sides)


def to_edges(graph: TypedGraph, rows: Tensor) -> Tensor:
    """``[E, F]``: of every edge the row of its source's pair, from ``rows`` ``[pairs of graph.compact, F]``."""
    pair_of_edge = graph.format("pair of edge", TypedGraph.pair_of_edge)
    if runs_reference("to_edges", rows.device, "spmm"):
        return rows.index_select(0, pair_of_edge)
    by_pair = graph.compact.edges.csc
    return torch.ops.edgeless.gather_rows(rows, pair_of_edge, by_pair.indptr, by_pair.edge_ids)
