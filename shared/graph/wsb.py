"""Weighted sparse blocks (WSB): windows of 32 rows, and the distinct columns of a window in blocks of 16.

A sum over neighbours is bound by reading their rows. Many edges of a window share a source, whose row is then read once
for all of them; tensor cores add it to the rows that have it. The format follows blocked sparse formats for tensor
cores; windows have 32 rows, since the saving grows with the window. One radix sort of the edges and a few scans build
it, on CPU and GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .. import _C
from .formats import CSC, CSC_ROWS, CSR, HeldByCore

if TYPE_CHECKING:
    from .handle import Graph

__all__ = ["COLUMNS", "DOT_HEADS", "HEIGHT", "LEAST_EDGES", "Blocks", "WsbFormat", "blocks_of", "edges_a_row"]

COLUMNS = 16  # columns of a block
HEIGHT = 32  # rows of a window; 64 cost tensor cores more work than they save in reading (decision 0033)
_ROWS = 16  # a 32-bit word holds the bits of 16 rows for two columns
DOT_HEADS = (32, 64, 128)  # features per head for which there are kernels of dot product attention
LEAST_EDGES = 1 << 20  # edges of a graph from which "auto" may choose blocks
_SAMPLE = 256  # windows that edges_a_row samples
_LARGE = 4  # a window is large if it has more than this many times the mean number of blocks


class Blocks(NamedTuple):
    """The blocks of one direction's edges, as int32 tensors.

    Attributes:
        first: ``[windows + 1]``, the first block of every window.
        order: ``[windows]``, the order in which kernels start windows: those with very many blocks first, so that they
            do not end last.
        columns: ``[blocks, 16]``. Unused entries repeat a column of their block and have no bits.
        bits: ``[blocks, 4, 2, 2]``. Bit ``16 c + r`` of ``[:, q, m, p]``: row ``16 m + r`` of the window has
            column ``4 q + 2 p + c`` of the block.
    """

    first: Tensor
    order: Tensor
    columns: Tensor
    bits: Tensor


def blocks_of(indptr: Tensor, indices: Tensor, num_columns: int) -> Blocks:
    """The blocks of a CSR.

    Args:
        indptr: ``[N + 1]``, int32 or int64.
        indices: ``[E]`` of the same dtype, with ``E == indptr[-1]``. A row may have a column several times; the window
            then lists the column as often.
        num_columns: exclusive upper bound of the column ids.
    """
    device, num_rows = indices.device, indptr.numel() - 1
    num_windows = -(-num_rows // HEIGHT)
    # Window, column and row within the window form one sort key per edge.
    keys = torch.repeat_interleave(torch.arange(num_rows, device=device), indptr.diff())
    row = keys % HEIGHT
    keys = keys.div_(HEIGHT, rounding_mode="floor").mul_(num_columns).add_(indices).mul_(HEIGHT).add_(row)
    keys = keys.sort().values
    of_column, row = keys // HEIGHT, keys % HEIGHT
    copies = _copies_before(keys)
    if copies is not None:
        order = (of_column * (int(copies.max()) + 1) + copies).sort(stable=True).indices
        of_column, row, copies = of_column[order], row[order], copies[order]
    begins = torch.ones_like(keys, dtype=torch.bool)
    begins[1:] = of_column[1:] != of_column[:-1]
    if copies is not None:
        begins[1:] |= copies[1:] != copies[:-1]
    kept = begins.nonzero().squeeze(1)
    windows, columns = of_column[kept] // max(num_columns, 1), of_column[kept] % max(num_columns, 1)
    tiles, of_kept = HEIGHT // _ROWS, begins.cumsum(0) - 1
    counts = torch.bincount(windows, minlength=num_windows)
    num_blocks = (counts + COLUMNS - 1) // COLUMNS
    first = _from_zero(num_blocks)
    total = int(first[-1])
    has = torch.zeros(kept.numel(), tiles, dtype=torch.bool, device=device)
    has[of_kept, row // _ROWS] = True
    place = first[windows] * COLUMNS + _places(windows, _from_zero(counts), *has.unbind(1))
    listed = columns.new_zeros(total * COLUMNS)
    listed[place] = columns
    # Unused entries repeat the first column of their block, so that reading its row hits the cache.
    gap = torch.ones(total * COLUMNS, dtype=torch.bool, device=device)
    gap[place] = False
    gap = gap.nonzero().squeeze(1)
    listed[gap] = listed[gap // COLUMNS * COLUMNS]
    at = place[of_kept]
    pair = at % COLUMNS // 2
    word = ((at // COLUMNS * 4 + pair // 2) * tiles + row // _ROWS) * 2 + pair % 2
    bits = torch.zeros(total * tiles * COLUMNS // 2, dtype=torch.int64, device=device)
    bits.index_add_(0, word, torch.ones_like(row) << at % 2 * _ROWS + row % _ROWS)
    return Blocks(
        first.int(),
        _order(num_blocks).int(),
        listed.int().view(total, COLUMNS),
        bits.int().view(total, 4, tiles, 2),
    )


def _places(windows: Tensor, first: Tensor, has_upper: Tensor, has_lower: Tensor) -> Tensor:
    """The position of every column in the list of its window.

    Columns that only the upper sixteen rows use fill blocks of their own, each next to a block of columns that only the
    lower rows use. The two warps of a window, sixteen rows each, then have work at the same time and neither multiplies
    an empty half. Columns that do not fill such a block, and columns of both halves, follow.

    Args:
        windows: the window of every column, sorted.
        first: the position in ``windows`` of each window's first column.
    """

    def rank(chosen):
        before = _from_zero(chosen)
        return before[:-1] - before[first[:-1]][windows], before[first].diff()[windows]

    both = has_upper & has_lower
    (upper, num_upper), (lower, num_lower), (shared, _) = rank(~has_lower), rank(~has_upper), rank(both)
    of_upper, of_lower = num_upper // COLUMNS, num_lower // COLUMNS
    paired = torch.minimum(of_upper, of_lower)
    rest_upper, rest_lower = num_upper % COLUMNS, num_lower % COLUMNS
    rest = (of_upper + of_lower) * COLUMNS

    def place(rank, blocks, beside, behind):
        block, within = rank // COLUMNS, rank % COLUMNS
        block = torch.where(block < paired, 2 * block + beside, paired + block)
        return torch.where(rank < blocks * COLUMNS, block * COLUMNS + within, rest + behind + rank - blocks * COLUMNS)

    alone = torch.where(has_upper, place(upper, of_upper, 0, 0), place(lower, of_lower, 1, rest_upper))
    return torch.where(both, rest + rest_upper + rest_lower + shared, alone)


def _order(num_blocks: Tensor) -> Tensor:
    """Large windows first, by size; the others in their order, since nearby windows share sources in the cache."""
    # Compares without a division, which a GPU may round differently.
    large = num_blocks * num_blocks.numel() > _LARGE * num_blocks.sum()
    return torch.where(large, num_blocks, 0).sort(descending=True, stable=True).indices


def _copies_before(keys: Tensor) -> Tensor | None:
    """For each key of a sorted list, the number of equal keys before it; None if all differ."""
    same = keys[1:] == keys[:-1]
    if not bool(same.any()):
        return None
    places = torch.arange(keys.numel(), device=keys.device)
    begins = torch.zeros_like(keys)
    begins[1:] = places[1:].masked_fill(same, 0)
    return places - begins.cummax(0).values


def _from_zero(counts: Tensor) -> Tensor:
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def _edges_of(indptr: Tensor, windows: Tensor) -> tuple[Tensor, Tensor]:
    """For every edge of some windows, the index of its window in ``windows`` and its index in the CSR."""
    ends = torch.stack([windows, windows + 1]).mul_(HEIGHT).clamp_(max=indptr.numel() - 1)
    first, last = indptr[ends].long()
    counts = last - first
    of_edge = torch.repeat_interleave(torch.arange(len(windows), device=indptr.device), counts)
    return of_edge, torch.arange(of_edge.numel(), device=indptr.device) + (last - counts.cumsum(0))[of_edge]


def num_listed(indptr: Tensor, indices: Tensor, num_columns: int, windows: Tensor) -> Tensor:
    """The number of columns that :func:`blocks_of` lists for some windows, ``[len(windows)]``. Waits for the GPU."""
    of_edge, at = _edges_of(indptr, windows)
    row = torch.searchsorted(indptr, at.to(indptr.dtype), right=True) - 1
    keys = (of_edge * num_columns + indices[at]) * HEIGHT + row % HEIGHT
    edges, copies = torch.unique(keys, return_counts=True)  # a multi-edge lists its column once per copy
    columns, of_pair = torch.unique_consecutive(edges // HEIGHT, return_inverse=True)
    listed = torch.zeros_like(columns).scatter_reduce_(0, of_pair, copies, "amax")
    counts = torch.zeros(len(windows), dtype=torch.long, device=indptr.device)
    return counts.index_add_(0, columns // max(num_columns, 1), listed)


def edges_a_row(indptr: Tensor, indices: Tensor, num_columns: int) -> float:
    """Edges per row of x that windows read, estimated from up to 256 windows. Waits for the GPU."""
    num_rows = indptr.numel() - 1
    num_windows = -(-num_rows // HEIGHT)
    num_sampled = min(num_windows, _SAMPLE)
    sampled = torch.arange(num_sampled, device=indptr.device) * num_windows // max(num_sampled, 1)
    of_edge, at = _edges_of(indptr, sampled)
    rows = torch.unique(of_edge * num_columns + indices[at]).numel()
    return of_edge.numel() / max(rows, 1)


class WsbFormat(HeldByCore):
    """The blocks kept with a graph, built per direction when an op first needs them."""

    def __init__(self):
        super().__init__(_C.KeptBlocks())
        self._seen: dict[float, tuple] = {}  # least reuse -> the graph's formats that were examined for it
        self._reuse: dict[tuple[int, int], float] = {}
        self._made: set[tuple[int, int]] = set()
        self._given: dict[tuple[int, int], Blocks] = {}

    def take(self, graph: Graph, given: dict[tuple[int, int], Blocks]) -> None:
        """Keeps existing blocks, keyed by the addresses of the CSR arrays that they were built from."""
        self._given = given
        try:
            self.make(graph)
        finally:
            self._given = {}

    def make(self, graph: Graph) -> None:
        """Builds the blocks of every direction whose arrays the graph has, whether or not they are profitable."""
        self.learn(graph, 0.0)

    def knows(self, graph: Graph, least: float) -> bool:
        """Returns whether :meth:`learn` has already examined all formats of the graph."""
        return self._seen.get(least) == tuple(graph._formats)

    def learn(self, graph: Graph, least: float) -> None:
        """Builds the blocks of every direction whose arrays the graph has. Waits for the GPU.

        Args:
            graph: the graph that keeps this format.
            least: least edges per gathered row for which to build blocks, where memory allows. 0: the user chose
                blocks, so they are built in any case, and out of memory is an error.
        """
        formats = graph._formats
        for key in (CSR, CSC, CSC_ROWS):
            if key in formats:
                self._learn_side(*formats[key][:2], graph.num_src if key == CSR else graph.num_dst, least)
        self._seen[least] = tuple(formats)

    def _learn_side(self, indptr: Tensor, indices: Tensor, num_columns: int, least: float) -> None:
        place = indptr.data_ptr(), indices.data_ptr()  # unique, since the graph keeps these tensors alive
        if place in self._made:
            return
        if place not in self._reuse:
            large = indices.numel() >= LEAST_EDGES
            self._reuse[place] = edges_a_row(indptr, indices, num_columns) if large else 0.0
        if self._reuse[place] < least or int(indptr[-1]) != indices.numel():
            return
        try:
            blocks = self._given.get(place) or blocks_of(indptr, indices, num_columns)
        except torch.OutOfMemoryError:
            if least == 0:
                raise
            self._reuse[place] = 0.0
            return
        self._made.add(place)
        self.held.add(indptr, indices, list(blocks), self._reuse[place])
