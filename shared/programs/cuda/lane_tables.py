"""Tables ``[lanes, n]``: which elements of an item each lane of a sub-warp has in its n registers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..lowering.affine import Index, strides_of


def distinct(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The index of the first occurrence of each distinct column, and for each column the index of its distinct one."""
    columns = np.ascontiguousarray(table.T)
    keys = columns.view(np.dtype((np.void, columns.itemsize * columns.shape[1]))).ravel()
    _, firsts, places = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(firsts)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return firsts[order], rank[places.ravel()]


def unflat(table: np.ndarray, shape: Sequence[int]) -> list[np.ndarray]:
    return [table // stride % extent for stride, extent in zip(strides_of(shape), shape)]


def flat(index: Sequence, shape: Sequence[int], like: tuple[int, ...]) -> np.ndarray:
    total = np.zeros(like, np.int64)
    for i, stride in zip(index, strides_of(shape)):
        total = total + (i.const if isinstance(i, Index) else i) * stride
    return total


def group_of(starts: np.ndarray) -> int:
    """The number of neighbouring lanes that have equal elements in all columns."""
    changes = np.flatnonzero((starts[1:] != starts[:-1]).any(1)) + 1
    group = int(changes[0]) if len(changes) else len(starts)
    for lane in range(len(starts)):
        if (starts[lane] != starts[lane // group * group]).any():
            return 1
    return group


def runs_of(table: np.ndarray, row: int) -> list[tuple[int, int]]:
    """Splits columns into runs (first, count) that are contiguous in memory and aligned as one vector. ``row`` is the
    number of elements of a row, 0 for a tensor without rows.
    """
    runs, first, columns = [], 0, table.shape[1]
    while first < columns:
        count = 1
        while first + count < columns and (table[:, first + count] == table[:, first] + count).all():
            count += 1
        aligned = math.gcd(count if count & (count - 1) == 0 else 1 << (count.bit_length() - 1), row or 1 << 20)
        for start in np.unique(table[:, first]):
            aligned = math.gcd(aligned, int(start)) if start else aligned
        runs.append((first, aligned))
        first += aligned
    return runs
