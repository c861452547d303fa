"""Sums over all edges in a pass on CUDA, which lanes keep in registers until their block ends."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ..lowering.items import Item, NotLowered, Reduce, Reshape
from .parts import Total, Value

if TYPE_CHECKING:
    from .code import _Writer


def total_of_lanes(writer: _Writer, item: Item) -> tuple[Total, Value]:
    """Registers for a sum over all edges: each lane sums its own elements, or its part of the elements of all lanes."""
    n, lanes, per = item.numel, writer.lanes, writer.per
    tables = []
    if n % (lanes * per) == 0:
        outer = n // (lanes * per)
        tables.append(
            (np.arange(outer)[:, None] * lanes * per + np.arange(per)).reshape(1, -1) + np.arange(lanes)[:, None] * per
        )
    if n % lanes == 0:
        tables.append(np.arange(n).reshape(lanes, -1))
    if n <= 64:
        shared = _shared_by_lanes(writer, item)
        if shared is not None:
            return shared
        tables.append(np.arange(n)[None, :])
    table, value = writer.spread(item, tables)
    places = np.zeros((n, 2), np.int64)
    for lane in range(table.shape[0]):
        for column in range(table.shape[1]):
            places[table[lane, column]] = column, lane
    return Total(item, table.shape[1], places), value


def _shared_by_lanes(writer: _Writer, item: Item):
    """A sum that also reduces within the item: each lane sums its part, and the host adds up the lanes' parts."""
    base = item
    while isinstance(base, Reshape):
        base = base.base
    lanes = writer.lanes
    if not isinstance(base, Reduce) or base.op != "add" or lanes == 1:
        return None
    extents = [base.base.shape[d] if d in base.dims else 1 for d in range(len(base.base.shape))]
    inner = math.prod(extents)
    if inner % lanes:
        return None
    strides = [math.prod(base.base.shape[d + 1 :]) for d in range(len(extents))]
    offsets = np.zeros(1, np.int64)
    for extent, stride in zip(extents, strides):
        offsets = (offsets[:, None] + np.arange(extent) * stride).ravel()
    starts = np.zeros(1, np.int64)
    for d, (extent, stride) in enumerate(zip(base.base.shape, strides)):
        starts = (starts[:, None] + np.arange(1 if d in base.dims else extent) * stride).ravel()
    at = (offsets.reshape(lanes, -1)[:, :, None] + starts[None, None, :]).reshape(lanes, -1)
    saved = writer.snapshot()
    try:
        value = writer.combined(base, writer.value(base.base, at), len(starts))
    except NotLowered:
        writer.restore(saved)
        return None
    places = np.stack([np.arange(len(starts)), np.full(len(starts), -1)], 1)
    return Total(item, len(starts), places), value
