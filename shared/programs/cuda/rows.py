"""Rows of shared memory for the operands and results of products by edge (see ``products.py``)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .parts import stored_type
from .tiles import PAD

MOST_AT_ONCE = 64  # columns of a product that are computed for all edges before any of them is written


@dataclass(eq=False)
class Rows:
    """A row of ``columns`` values for each edge of a window, and zeros up to ``padded``. ``first`` and ``last`` are the
    phases in which the rows are written and last read, ``own`` says whether each lane reads only the values that it
    would write, and ``slot`` is their memory.
    """

    columns: int
    name: str
    first: int
    last: int
    own: bool = True
    slot: int = -1
    fresh: bool = False  # True if rows that are read in phase ``first`` may not share the slot
    readers: int = 0  # the number of products that read them in phase ``last``
    dtype: torch.dtype = torch.float32

    @property
    def padded(self) -> int:
        """The columns of a row that products read."""
        return padded(self.columns)

    @property
    def step(self) -> int:
        """The number of values from one row to the next."""
        return self.padded + PAD * 4 // self.dtype.itemsize

    @property
    def floats(self) -> int:
        """The size of a row in floats."""
        return self.step * self.dtype.itemsize // 4

    def at(self, edge: str) -> str:
        """The text of the pointer to the row of an edge."""
        kind = stored_type(self.dtype)
        start = f"tile_rows + {self.name}"
        return f"{start if kind == 'float' else f'reinterpret_cast<{kind}*>({start})'} + ({edge}) * {self.step}"


def padded(count: int) -> int:
    """``count`` columns or values, rounded up to what products support."""
    return 16 if count <= 16 else (count + 31) // 32 * 32


def is_alike(read: Rows, written: Rows) -> bool:
    """Returns whether lanes may write rows to the slot of the rows that they read."""
    return read.own and (read.columns, read.dtype) == (written.columns, written.dtype)


def allocate(every: Iterable[Rows], factors: dict[int, Rows]) -> list[int]:
    """Assigns a slot to all rows; rows that are not read any more free their slot. Returns the floats of each slot.

    Args:
        factors: id of the rows of a product's result -> the rows that the product reads.
    """
    slots: list[tuple[int, Rows]] = []  # (floats, the rows that use the slot)
    for rows in sorted(every, key=lambda r: r.first):
        for number, (floats, before) in enumerate(slots):
            free = before.last < rows.first
            if before.last == rows.first and not rows.fresh:  # the rows are written where others are read
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
