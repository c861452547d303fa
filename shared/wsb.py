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

__all__ = ["COLUMNS", "HEIGHT", "LEAST_EDGES", "PAYS", "Blocks", "WsbFormat", "blocks_of", "edges_a_row"]

COLUMNS = 16  # of a block
HEIGHT = 32  # rows of a window; 64 make more work for tensor cores than they save in reading (decision 0033)
_ROWS = 16  # of which a word holds the bits, of two columns
PAYS = 1.5  # edges a row that is read, from which sums over blocks are quicker (decision 0033)
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
    counts = torch.bincount(windows, minlength=num_windows)
    num_blocks = (counts + COLUMNS - 1) // COLUMNS
    first = _from_zero(num_blocks)
    total = int(first[-1])
    # Where a kept column stands: so far from its window's first as in the list without gaps.
    place = torch.arange(kept.numel(), device=device) - _from_zero(counts)[windows] + first[windows] * COLUMNS
    listed = columns.new_zeros(total * COLUMNS)
    listed[place] = columns
    # In gaps a column that the window has: it is read from the cache.
    gap = torch.ones(total * COLUMNS, dtype=torch.bool, device=device)
    gap[place] = False
    gap = gap.nonzero().squeeze(1)
    listed[gap] = listed[gap // COLUMNS * COLUMNS]
    at, tiles = place[begins.cumsum(0) - 1], HEIGHT // _ROWS
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


def _order(num_blocks: Tensor) -> Tensor:
    """Large windows first, by size. The others as they lie: near windows share sources, which the cache then has."""
    mean = num_blocks.sum() / max(num_blocks.numel(), 1)
    return torch.where(num_blocks > _LARGE * mean, num_blocks, 0).sort(descending=True, stable=True).indices


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


def edges_a_row(indptr: Tensor, indices: Tensor, num_columns: int) -> float:
    """How many edges share a row of x that is read, counted in some windows alone. Waits for the GPU."""
    num_rows = indptr.numel() - 1
    num_windows = -(-num_rows // HEIGHT)
    num_sampled = min(num_windows, _SAMPLE)
    sampled = torch.arange(num_sampled, device=indptr.device) * num_windows // max(num_sampled, 1)
    first, last = (indptr[(HEIGHT * w).clamp(max=num_rows)].long() for w in (sampled, sampled + 1))
    counts = last - first
    of_edge = torch.repeat_interleave(torch.arange(len(sampled), device=indptr.device), counts)
    at = torch.arange(of_edge.numel(), device=indptr.device) + (last - counts.cumsum(0))[of_edge]
    rows = torch.unique(of_edge * num_columns + indices[at]).numel()
    return of_edge.numel() / max(rows, 1)


class WsbFormat(HeldByCore):
    """The blocks that a graph keeps: of each direction, from the first time that an op asks for it."""

    def __init__(self):
        super().__init__(_C.KeptBlocks())
        # By whether somebody asked for blocks, else only those are made that pay.
        self._seen: dict[bool, tuple] = {}
        self._pays: dict[tuple[int, int], bool] = {}
        self._made: set[tuple[int, int]] = set()

    def knows(self, graph: Graph, asked: bool) -> bool:
        """Whether :meth:`learn` has nothing to do."""
        return self._seen.get(asked) == tuple(graph._formats)

    def learn(self, graph: Graph, asked: bool) -> None:
        """Makes the blocks of every direction whose arrays the graph has by now. Waits for the GPU.

        Args:
            graph: whose store this is in.
            asked: make them in any case; else where sums over them are quicker, and memory allows.
        """
        formats = graph._formats
        for key in (CSR, CSC, CSC_ROWS):
            if key in formats:
                self._learn_side(*formats[key][:2], graph.num_src if key == CSR else graph.num_dst, asked)
        self._seen[asked] = tuple(formats)

    def _learn_side(self, indptr: Tensor, indices: Tensor, num_columns: int, asked: bool) -> None:
        place = indptr.data_ptr(), indices.data_ptr()  # of tensors that the graph keeps, so nobody else's
        if place in self._made or (not asked and self._pays.get(place) is False):
            return
        if int(indptr[-1]) != indices.numel():
            self._pays[place] = False
            return
        if place not in self._pays:
            large = indices.numel() >= LEAST_EDGES
            self._pays[place] = large and edges_a_row(indptr, indices, num_columns) >= PAYS
        if not asked and not self._pays[place]:
            return
        try:
            blocks = blocks_of(indptr, indices, num_columns)
        except torch.OutOfMemoryError:
            if asked:
                raise
            self._pays[place] = False
            return
        self._made.add(place)
        self.held.add(indptr, indices, list(blocks), self._pays[place])
