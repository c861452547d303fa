"""Weighted sparse blocks (WSB): a graph's rows in windows, and the columns of a window in blocks of 16.

A sum over neighbours costs the reading of their rows. In the rows of a window many edges have a source in common; its
row is then read once for all of them, and tensor cores add it to those that have it. The format follows "block" formats
of sparse matrices for tensor cores; its windows are of 32 rows, because what is saved grows with them. One radix
sort of the edges and a few scans make it, on either device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from . import _C
from .formats import CSC, CSC_ROWS, CSR, HeldByCore

if TYPE_CHECKING:
    from .graph import Graph

__all__ = ["COLUMNS", "DOT_HEADS", "HEIGHT", "LEAST_EDGES", "Blocks", "WsbFormat", "blocks_of", "edges_a_row"]

COLUMNS = 16  # of a block
HEIGHT = 32  # rows of a window; 64 make more work for tensor cores than they save in reading (decision 0033)
_ROWS = 16  # of which a word holds the bits, of two columns
DOT_HEADS = (32, 64, 128)  # features of a head for which there are kernels of dot product attention
LEAST_EDGES = 1 << 20  # of a graph for which they are taken unasked
_SAMPLE = 256  # windows that are looked at
_LARGE = 4  # times the mean of a window's blocks


class Blocks(NamedTuple):
    """The edges of one direction. All are int32.

    Attributes:
        first: ``[windows + 1]``, a window's first block.
        order: ``[windows]``, in which they are begun: those of very many blocks first, so that they do not end last.
        columns: ``[blocks, 16]``. What a window's last block has too many repeats a column and has no bits.
        bits: ``[blocks, 4, 2, 2]``. Bit ``16 c + r`` of ``[:, q, m, p]``: row ``16 m + r`` of the window has
            column ``4 q + 2 p + c`` of the block.
    """

    first: Tensor
    order: Tensor
    columns: Tensor
    bits: Tensor


def blocks_of(indptr: Tensor, indices: Tensor, num_columns: int) -> Blocks:
    """Blocks of a CSR.

    Args:
        indptr: ``[N + 1]``, int32 or int64.
        indices: ``[E]`` of the same dtype; all of it belongs to rows. A row may have a column several times: it stands
            in the list of its window as often.
        num_columns: ids are below it.
    """
    device, num_rows = indices.device, indptr.numel() - 1
    num_windows = -(-num_rows // HEIGHT)
    # Window, column and row in the window are one number, by which the edges are sorted.
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
    # In gaps a column that the window has: it is read from the cache.
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
    """Where each of a window's columns stands in its list.

    Columns that only the upper sixteen rows have come in blocks of their own, each beside one of columns that only the
    lower rows have, so that two warps with sixteen rows each have work at the same time and none for nothing. What
    fills no block, and what both have, follows.

    Args:
        windows: of every column, sorted.
        first: of each window, its first column's position in ``windows``.
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
    """Large windows first, by size. The others as they lie: near windows share sources, which the cache then has."""
    # Without a division, which a GPU may round in another way.
    large = num_blocks * num_blocks.numel() > _LARGE * num_blocks.sum()
    return torch.where(large, num_blocks, 0).sort(descending=True, stable=True).indices


def _copies_before(keys: Tensor) -> Tensor | None:
    """How many equal ones stand before each in a sorted list; None if all differ."""
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
    """The edges of some windows: whose they are, as a place in ``windows``, and where they are in the CSR."""
    ends = torch.stack([windows, windows + 1]).mul_(HEIGHT).clamp_(max=indptr.numel() - 1)
    first, last = indptr[ends].long()
    counts = last - first
    of_edge = torch.repeat_interleave(torch.arange(len(windows), device=indptr.device), counts)
    return of_edge, torch.arange(of_edge.numel(), device=indptr.device) + (last - counts.cumsum(0))[of_edge]


def num_listed(indptr: Tensor, indices: Tensor, num_columns: int, windows: Tensor) -> Tensor:
    """How many columns :func:`blocks_of` lists for some windows, ``[len(windows)]``. Waits for the GPU."""
    of_edge, at = _edges_of(indptr, windows)
    row = torch.searchsorted(indptr, at.to(indptr.dtype), right=True) - 1
    keys = (of_edge * num_columns + indices[at]) * HEIGHT + row % HEIGHT
    edges, copies = torch.unique(keys, return_counts=True)  # multi-edges list their column as often
    columns, of_pair = torch.unique_consecutive(edges // HEIGHT, return_inverse=True)
    listed = torch.zeros_like(columns).scatter_reduce_(0, of_pair, copies, "amax")
    counts = torch.zeros(len(windows), dtype=torch.long, device=indptr.device)
    return counts.index_add_(0, columns // max(num_columns, 1), listed)


def edges_a_row(indptr: Tensor, indices: Tensor, num_columns: int) -> float:
    """How many edges share a row of x that is read, counted in some windows alone. Waits for the GPU."""
    num_rows = indptr.numel() - 1
    num_windows = -(-num_rows // HEIGHT)
    num_sampled = min(num_windows, _SAMPLE)
    sampled = torch.arange(num_sampled, device=indptr.device) * num_windows // max(num_sampled, 1)
    of_edge, at = _edges_of(indptr, sampled)
    rows = torch.unique(of_edge * num_columns + indices[at]).numel()
    return of_edge.numel() / max(rows, 1)


class WsbFormat(HeldByCore):
    """The blocks that a graph keeps: of each direction, from the first time that an op asks for it."""

    def __init__(self):
        super().__init__(_C.KeptBlocks())
        self._seen: dict[float, tuple] = {}  # by the least reuse that was wanted
        self._reuse: dict[tuple[int, int], float] = {}
        self._made: set[tuple[int, int]] = set()
        self._given: dict[tuple[int, int], Blocks] = {}

    def take(self, graph: Graph, given: dict[tuple[int, int], Blocks]) -> None:
        """Keeps blocks that are there already, by the addresses of the arrays that they are of."""
        self._given = given
        try:
            self.make(graph)
        finally:
            self._given = {}

    def make(self, graph: Graph) -> None:
        """Makes the blocks of every direction whose arrays the graph has by now, whether or not they pay."""
        self.learn(graph, 0.0)

    def knows(self, graph: Graph, least: float) -> bool:
        """Whether :meth:`learn` has nothing to do."""
        return self._seen.get(least) == tuple(graph._formats)

    def learn(self, graph: Graph, least: float) -> None:
        """Makes the blocks of every direction whose arrays the graph has by now. Waits for the GPU.

        Args:
            graph: whose store this is in.
            least: edges a gathered row from which blocks are wanted, where memory allows. 0: they were asked for, so
                they are made in any case.
        """
        formats = graph._formats
        for key in (CSR, CSC, CSC_ROWS):
            if key in formats:
                self._learn_side(*formats[key][:2], graph.num_src if key == CSR else graph.num_dst, least)
        self._seen[least] = tuple(formats)

    def _learn_side(self, indptr: Tensor, indices: Tensor, num_columns: int, least: float) -> None:
        place = indptr.data_ptr(), indices.data_ptr()  # of tensors that the graph keeps, so nobody else's
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
