"""Single-head attention over unique (source, relation) rows, from node features to the layer's result: one op, and so
one node of autograd.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from ..autocast import autocasts
from ..checks import COMPUTED_IN_FLOAT32, compiling
from ..graph.handle import Graph
from ..graph.typed import TypedGraph
from ..ops.graph import csr_transpose, index_dtype
from ..ops.relational import pair_walks
from .checks import runs_reference
from .projection import PLAIN
from .whole_rows import lacking, longer, longer_matrices, shorter

# Most edges of a segment; one thread reduces it.
CUT = 16
# Bytes of the widest row that a sub-warp holds: 32 lanes of 16 bytes.
_MOST_BYTES = 512


class Walks(NamedTuple):
    """The index arrays of the op's kernels, for a typed graph whose sources and destinations are the same nodes.

    A *pair* is a unique (source, type), as in :attr:`TypedGraph.compact`. A *segment* is at most ``CUT`` edges
    of one destination and type; segments are numbered by destination, and by type within a destination.

    ``arrays``, each group a CSR unless stated otherwise:

    - pairs by type: offsets, sources;
    - edges by destination: indptr, pairs, segments;
    - edges by pair: indptr, destinations, segments;
    - segments by destination: indptr, types;
    - segments by type: indptr, destinations, segment numbers;
    - edges by segment: indptr, their positions in the order by pair;
    - the rows that the gradient of a node sums: indptr, rows, indices of their weights. A row is that of a pair of the
      node or, numbered after all pairs, that of the type of one of its segments.

    ``max_degrees``: the largest row of the edges by destination, of the edges by pair, and of the gradient's sums.
    """

    arrays: list[Tensor]
    max_degrees: list[int]


def walks(graph: TypedGraph) -> Walks:
    """The index arrays of ``graph``, built once and kept with it."""
    return graph.format("walks over pairs", _build)


def _build(graph: TypedGraph) -> Walks:
    pairs, edges = graph.compact
    csr, csc, by_node = graph.graph.csr, edges.csc, pairs.graph.csc
    type_ptr, rows, ptr, _, edge_ids, by_row = graph._sorted(csr, CUT)
    if by_row.dim() == 1:  # on CUDA
        segment_ptr, order = by_row[: csr.indptr.numel()], by_row[csr.indptr.numel() :][: rows.numel()]
    else:
        numbers = torch.arange(rows.numel() + 1, dtype=rows.dtype)
        segment_ptr, order, _ = csr_transpose(numbers, rows, None, graph.num_dst)
    made = pair_walks(
        csr.indptr, [csc.indptr, csc.edge_ids], pairs.graph.csr.indices, graph.pair_of_edge(), list(by_node[:2]),
        [type_ptr, rows, ptr, edge_ids], segment_ptr, order,
    )  # fmt: skip
    edge_pairs, edge_segments, pair_segments, types, numbers, begins, places, *sums, longest = made
    arrays = [
        pairs._formats["offsets"], pairs.graph.csr.indices,
        csr.indptr, edge_pairs, edge_segments,
        csc.indptr, csc.indices, pair_segments,
        segment_ptr.clone(), types,
        type_ptr, rows, numbers,
        begins, places,
        *sums,
    ]  # fmt: skip
    return Walks([t.contiguous() for t in arrays], longest.tolist())


def edge_ids(graph: TypedGraph) -> list[Tensor]:
    """Ids of the edges in :func:`walks`' orders by destination and by pair, ``[E]`` each, kept with the graph."""

    def build(graph):
        by_pair, places = graph.compact.edges.csc.edge_ids.contiguous(), walks(graph).arrays[14]
        return [by_pair[places], by_pair]

    return graph.format("ids of walks over pairs", build)


def pair_attention(
    graph: TypedGraph,
    x: Tensor,
    weight: Tensor,
    query: Tensor,
    key: Tensor,
    bias: Optional[Tensor],
    negative_slope: float,
    dropout: float = 0.0,
    seed: Optional[Tensor] = None,
) -> Tensor:
    r"""Additive attention over edges whose values are source rows times the matrix of the edge's type.

    .. math:: o_i = \sum_{e = (j, i)} \mathrm{softmax}_e(\mathrm{LeakyReLU}(q^\top W_r^\top x_i + k^\top W_r^\top x_j))
        \, W_r^\top x_j + b

    Args:
        graph: sources and destinations are the same nodes; see :func:`fits`.
        x: ``[N, K]``.
        weight: ``[R, K, M]``.
        query, key: ``[M, 1]``.
        bias: ``[M]`` or None.
        dropout: probability of dropping a softmax weight.
        seed: int64 ``[1]``, seeds the dropout mask, which is drawn per edge id.

    Returns:
        ``[N, M]`` of x's dtype, differentiable any number of times.
    """
    arrays, degrees = walks(graph)
    ids = edge_ids(graph) if dropout else []
    short_in, short_out = lacking(x.device, x.dtype, weight)
    if short_in or short_out:
        x, weight, bias = longer(x, short_in), longer_matrices(weight, short_in, short_out), longer(bias, short_out)
        query, key = longer_matrices(query, short_out, 0), longer_matrices(key, short_out, 0)
    out, *_ = torch.ops.edgeless.pair_attention(
        x, weight, query, key, bias, arrays, ids, negative_slope, degrees, seed=seed, dropout=dropout
    )
    return shorter(out, short_out)


def fits(graph: TypedGraph, x: Tensor, weight: Tensor, others: tuple) -> bool:
    """Whether to call :func:`pair_attention`: on CUDA, where it supports these tensors. ``others``: its other tensors,
    each or None. On the CPU the op works too, but its separate ops are faster (fb15k forward, 85 ms against 127 ms).
    """
    if not x.is_cuda or compiling() or runs_reference("pair_attention", x.device, "pair_attention"):
        return False
    dtype = x.dtype
    for t in (x, weight, *others):
        if t is not None and (type(t) not in PLAIN or t.dtype is not dtype or t.device != x.device):
            return False
    if dtype not in COMPUTED_IN_FLOAT32 or weight.dim() != 3 or autocasts("cuda") or type(graph.graph) is not Graph:
        return False
    if not 0 < weight.size(2) * x.element_size() <= _MOST_BYTES or not x.size(1):
        return False
    if not graph.num_edges or graph.num_src != graph.num_dst or graph.graph.index_dtype is not torch.int32:
        return False
    return index_dtype(2 * graph.num_edges + graph.num_types, 0, 0) is torch.int32
