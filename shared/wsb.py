"""Weighted sparse blocks (WSB): a graph's rows in windows, and the columns of a window in blocks of 16.

A sum over neighbours costs the reading of their rows. In the rows of a window many edges have a source in common; its
row is then read once for all of them, and tensor cores add it to those that have it. The format follows "block" formats
of sparse matrices for tensor cores; its windows are of 32 or 64 rows because what is saved grows with them. One radix
sort of the edges and a few scans make it, on either device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from . import _C
from .formats import CSC, CSC_ROWS, CSR

if TYPE_CHECKING:
    from .graph import Graph

__all__ = ["COLUMNS", "HEIGHT", "Blocks", "WsbFormat", "blocks_of"]

COLUMNS = 16  # of a block
HEIGHT = 32  # rows of a window; 64 make more work for tensor cores than they save in reading
_ROWS = 16  # of which a word holds the bits, of two columns
_LARGE = 4  # times the mean of a window's blocks


class Blocks(NamedTuple):
    """The edges of one direction. All are int32.

    Attributes:
        first: ``[windows + 1]``, a window's first block.
        order: ``[windows]``, in which they are begun: those of very many blocks first, so that they do not end last.
        columns: ``[blocks, 16]``. What a window's last block has too many repeats a column and has no bits.
        bits: ``[blocks, 4, height / 16, 2]``. Bit ``16 c + r`` of ``[:, q, m, p]``: row ``16 m + r`` of the window has
            column ``4 q + 2 p + c`` of the block.
    """

    first: Tensor
    order: Tensor
    columns: Tensor
    bits: Tensor


def blocks_of(indptr: Tensor, indices: Tensor, num_columns: int, height: int = HEIGHT) -> Blocks:
    """Blocks of a CSR.

    Args:
        indptr: ``[N + 1]``, int32 or int64.
        indices: ``[E]`` of the same dtype; all of it belongs to rows. A row may have a column several times: it stands
            in the list of its window as often.
        num_columns: ids are below it.
        height: rows of a window, 32 or 64.
    Raises:
        ValueError: another ``height``.
    """
    if height not in (32, 64):
        raise ValueError(f"blocks_of: height must be 32 or 64, got {height}")
    device, num_rows = indices.device, indptr.numel() - 1
    num_windows = -(-num_rows // height)
    # Window, column and row in the window are one number, by which the edges are sorted.
    rows = torch.repeat_interleave(torch.arange(num_rows, device=device), indptr.diff())
    keys = (rows // height * num_columns + indices) * height + rows % height
    keys = keys.sort().values
    of_column, row = keys // height, keys % height
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
    at, tiles = place[begins.cumsum(0) - 1], height // _ROWS
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


class WsbFormat:
    """The blocks that a graph keeps: of each direction, from the first time that an op asks for it."""

    def __init__(self):
        self.kept = _C.KeptBlocks()
        self.seen: tuple = ()
        self._places: set[tuple[int, int]] = set()

    def knows(self, graph: Graph) -> bool:
        """Whether :meth:`learn` has nothing to make."""
        return self.seen == tuple(graph._formats)

    def learn(self, graph: Graph) -> None:
        """Makes the blocks of every direction whose arrays the graph has by now. Waits for the GPU."""
        formats = graph._formats
        for key in (CSR, CSC, CSC_ROWS):
            if key not in formats:
                continue
            indptr, indices = formats[key][:2]
            place = indptr.data_ptr(), indices.data_ptr()  # of tensors that are kept, so nobody else's
            if place not in self._places and int(indptr[-1]) == indices.numel():
                self._places.add(place)
                num_columns = graph.num_src if key == CSR else graph.num_dst
                self.kept.add(indptr, indices, list(blocks_of(indptr, indices, num_columns)))
        self.seen = tuple(formats)

    def kept_tensors(self) -> list[Tensor]:
        """The tensors within."""
        return self.kept.kept_tensors()

    def num_formats(self) -> int:
        """For how many directions there are blocks."""
        return self.kept.num_entries()

    def _missing_bytes(self) -> int:
        return 0
