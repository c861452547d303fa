"""Blocks of edges: whole rows, some :data:`BLOCK_EDGES` edges and at least one row. Rows are summed in the order of the
graph, so two runs give the same bits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ... import _C  # noqa: F401  registers the sum
from ...graph.handle import Graph
from ..front import ops
from ..front.spaces import Sizes

BLOCK_EDGES = 4096
_SUM, _SUMMED = torch.ops.edgeless.spmm.default, (torch.float32, torch.float64)  # faster than index_add_ on the CPU


class Block:
    """A few rows of a graph: ``count`` rows from ``start``, with their edges.

    Attributes:
        near: the node id at the other end of each edge, ``[e]``.
        own: the row of each edge, counted from ``start``, ``[e]`` int64.
    """

    __slots__ = ("start", "count", "edges", "near", "own", "_ids", "_slice", "_rows", "_csr")

    def __init__(self, arrays, start: int, stop: int):
        indptr, indices, ids = arrays
        self.start, self.count = start, stop - start
        first, last = int(indptr[start]), int(indptr[stop])
        self.edges = last - first
        self.near = indices[first:last]
        degrees = indptr[start + 1 : stop + 1] - indptr[start:stop]
        rows = torch.arange(self.count, device=indices.device)
        self.own = torch.repeat_interleave(rows, degrees, output_size=self.edges)
        self._ids = None if ids is None else ids[first:last]
        self._slice = slice(first, last)
        self._rows, self._csr = indptr[start : stop + 1], None

    @property
    def ids(self) -> Tensor:
        """The edge ids ``[e]`` int64."""
        if self._ids is None:
            return torch.arange(self._slice.start, self._slice.stop, device=self.near.device)
        return self._ids.long()

    def fold(self, src: Tensor, dim: int, reduce: str) -> Tensor:
        """The rows of edges ``src`` reduced into this block; see :func:`edgeless.programs.front.ops.fold_rows`."""
        fast = not src.is_cpu or (dim == 0 and src.dim() == 2 and src.size(1) > 2 and src.dtype in _SUMMED)
        if reduce == "sum" and fast and src.is_floating_point():
            return self.sum(src, dim)
        return ops.fold_rows(src, self.own, dim, self.count, reduce)

    def sum(self, src: Tensor, dim: int) -> Tensor:
        """The sums of rows of edges by SpMM: in a fixed order, where ``index_add_`` has atomics on CUDA."""
        if self._csr is None:
            rows = self._rows - self._rows[0]
            self._csr = [rows, torch.arange(self.edges, dtype=rows.dtype, device=rows.device)]
        by_row = src.movedim(dim, 0)
        flat = by_row.reshape(self.edges, math.prod(by_row.shape[1:])).contiguous()
        sums = _SUM(flat, None, None, None, self._csr, [], src.dtype, [])
        sums = ops.shaped(sums, [self.count, *by_row.shape[1:]])
        return sums.movedim(0, dim).clone() if dim else sums

    def by_edge(self, x: Tensor, dim: int) -> Tensor:
        """The rows of these edges in a tensor with a row for each edge."""
        if self._ids is None:
            return x.narrow(dim, self._slice.start, self.edges)
        return x.index_select(dim, self._ids)

    def rows(self, x: Tensor, dim: int, joined: int = 1) -> Tensor:
        """The rows of this block in a tensor by node, in which a view has made ``joined`` rows of each node."""
        return x.narrow(dim, self.start * joined, self.count * joined)


def blocks_of(graph: Graph, receiving: bool, edges: int):
    """The arrays of one direction of a graph, and the rows where its blocks begin and end, kept with the graph."""

    def build(_):
        indptr = (graph.csr if receiving else graph.csc).indptr.long()
        limits = torch.arange(edges, max(graph.num_edges, edges), edges, device=indptr.device)
        cuts = torch.unique(torch.searchsorted(indptr, limits, right=True) - 1)
        inner = [int(cut) for cut in cuts if 0 < cut < indptr.numel() - 1]
        return [0, *inner, indptr.numel() - 1]

    arrays = graph.csr if receiving else graph.csc
    return arrays, graph.format(("blocks", receiving, edges), build)


def sizes_of(graph: Graph, receiving: int) -> Sizes:
    """The sizes of a graph for a program; ``receiving`` is the row of ``edge_index`` with the receiving nodes."""
    return graph.format(("sizes", receiving), _sizes_by_sources if receiving else _sizes_by_destinations)


def _sizes_by_sources(graph: Graph) -> Sizes:
    return Sizes(graph.num_src, graph.num_dst, graph.num_edges)


def _sizes_by_destinations(graph: Graph) -> Sizes:
    return Sizes(graph.num_dst, graph.num_src, graph.num_edges)
