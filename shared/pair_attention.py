"""The attention of one head over pairs of a source and a type, from the features of nodes to the layer's result: as one
op, and so as one node of autograd.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from .autocast import autocasts
from .functional_checks import runs_reference
from .graph import Graph
from .graph_checks import COMPUTED_IN_FLOAT32, compiling
from .ops.graph import csr_transpose, index_dtype
from .ops.relational import pair_walks
from .projection import PLAIN
from .typed_graph import TypedGraph
from .whole_rows import lacking, longer, longer_matrices, shorter

# Edges of a piece, which one thread adds up.
CUT = 16
# Rows that a team of 32 lanes holds, 16 bytes a lane.
_MOST_BYTES = 512


class Walks(NamedTuple):
    """What the op walks, of a typed graph whose destinations are its sources.

    A *pair* is one of a source and a type, as in :attr:`TypedGraph.compact`. A *piece* is at most ``CUT`` edges of one
    destination and type; pieces are numbered by destination, and by type within one.

    ``arrays``: offsets of the types' pairs, and their sources; the edges by destination: indptr, pairs, pieces; by
    pair: indptr, destinations, pieces; the pieces by destination: indptr, types; by type: indptr, destinations, pieces;
    the edges of pieces: indptr, their positions by pair; and by node what its gradient sums, the rows of its pairs and,
    counted from behind the pairs, those of the types of its pieces: indptr, rows, their weights' places.
    ``max_degrees``: of the edges by destination, by pair, and of the sums.
    """

    arrays: list[Tensor]
    max_degrees: list[int]


def walks(graph: TypedGraph) -> Walks:
    """Those of ``graph``, kept with it."""
    return graph.format("walks over pairs", _build)


def _build(graph: TypedGraph) -> Walks:
    pairs, edges = graph.compact
    csr, csc, by_node = graph.graph.csr, edges.csc, pairs.graph.csc
    type_ptr, rows, ptr, _, edge_ids, by_row = graph._sorted(csr, CUT)
    if by_row.dim() == 1:  # on CUDA
        piece_ptr, order = by_row[: csr.indptr.numel()], by_row[csr.indptr.numel() :][: rows.numel()]
    else:
        numbers = torch.arange(rows.numel() + 1, dtype=rows.dtype)
        piece_ptr, order, _ = csr_transpose(numbers, rows, None, graph.num_dst)
    made = pair_walks(
        csr.indptr, [csc.indptr, csc.edge_ids], pairs.graph.csr.indices, graph.pair_of_edge(), list(by_node[:2]),
        [type_ptr, rows, ptr, edge_ids], piece_ptr, order,
    )  # fmt: skip
    edge_pairs, edge_pieces, pair_pieces, types, numbers, begins, places, *sums, longest = made
    arrays = [
        pairs._formats["offsets"], pairs.graph.csr.indices,
        csr.indptr, edge_pairs, edge_pieces,
        csc.indptr, csc.indices, pair_pieces,
        piece_ptr.clone(), types,
        type_ptr, rows, numbers,
        begins, places,
        *sums,
    ]  # fmt: skip
    return Walks([t.contiguous() for t in arrays], longest.tolist())


def edge_ids(graph: TypedGraph) -> list[Tensor]:
    """``[E]`` twice: the ids of the edges by destination and by pair as :func:`walks` has them, kept with the graph."""

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
    r"""Additive attention over the edges, whose values are products with the matrices of types.

    .. math:: o_i = \sum_{e = (j, i)} \mathrm{softmax}_e(\mathrm{LeakyReLU}(q^\top W_r^\top x_i + k^\top W_r^\top x_j))
        \, W_r^\top x_j + b

    Args:
        graph: the destinations are the sources; see :func:`fits`.
        x: ``[N, K]``.
        weight: ``[R, K, M]``.
        query, key: ``[M, 1]``.
        bias: ``[M]`` or None.
        dropout: of the softmax's weights, with this probability.
        seed: int64 ``[1]``, of the dropout mask, which is drawn by the edges' ids.

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
    """Whether :func:`pair_attention` is to be called, ``others`` being its other tensors or None.

    On CUDA, where the op takes them. On the CPU it takes all, but there what it is made of is faster apart (fb15k,
    forward, 85 ms and 127).
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
