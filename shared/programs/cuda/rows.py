"""Rows of shared memory, in which values of edges stand that products read or leave (see ``products.py``)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .parts import stored_type
from .tiles import PAD

MOST_AT_ONCE = 64  # columns of a product that are computed for all edges before any is written


@dataclass(eq=False)
class Rows:
    """A row of ``columns`` numbers for each edge of a window, and zeros up to ``padded``: when they are written, and
    read for the last time.
    ``own``: whether each lane reads only what it would write. ``slot``: where they stand.
    """

    columns: int
    name: str
    first: int
    last: int
    own: bool = True
    slot: int = -1
    fresh: bool = False  # whether nothing that is read at ``first`` may stand there
    readers: int = 0  # products that read them at ``last``
    dtype: torch.dtype = torch.float32

    @property
    def padded(self) -> int:
        """What products read of a row."""
        return padded(self.columns)

    @property
    def step(self) -> int:
        """The numbers from one row to the next."""
        return self.padded + PAD * 4 // self.dtype.itemsize

    @property
    def floats(self) -> int:
        """The floats that a row takes."""
        return self.step * self.dtype.itemsize // 4

    def at(self, edge: str) -> str:
        """The pointer to the row of an edge."""
        kind = stored_type(self.dtype)
        start = f"tile_rows + {self.name}"
        return f"{start if kind == 'float' else f'reinterpret_cast<{kind}*>({start})'} + ({edge}) * {self.step}"


def padded(count: int) -> int:
    """The columns or values of products of at least ``count``."""
    return 16 if count <= 16 else (count + 31) // 32 * 32


def is_alike(read: Rows, written: Rows) -> bool:
    """Whether each lane may write rows where it has read others."""
    return read.own and (read.columns, read.dtype) == (written.columns, written.dtype)


def allocate(every: Iterable[Rows], factors: dict[int, Rows]) -> list[int]:
    """Gives rows a slot, which is free where what it had is not read any more, and returns the floats of each slot.

    Args:
        factors: what products read, by the id of their results' rows.
    """
    slots: list[tuple[int, Rows]] = []  # the floats, and the rows that have it
    for rows in sorted(every, key=lambda r: r.first):
        for number, (floats, before) in enumerate(slots):
            free = before.last < rows.first
            if before.last == rows.first and not rows.fresh:  # written where it is read
                in_place = factors.get(id(rows)) is before and before.readers == 1
                in_place &= before.floats == rows.floats or rows.columns <= MOST_AT_ONCE
                free = in_place or is_alike(before, rows)
            if free:
                slots[number], rows.slot = (max(floats, rows.floats), rows), number
                break
        else:
            rows.slot = len(slots)
            slots.append((rows.floats, rows))
    return [floats for floats, _ in slots]
