"""Items: the values that a program computes for one edge or one row, as expressions of scalars.

The item shape of a value is its shape, where the extent of the rows' dimension is the number of rows that a view has
joined there, normally 1. All dimensions keep their positions, so ops use the same dims and broadcast alike. Items are
expressions, and only some become arrays; :mod:`edgeless.programs.c.loops` decides which.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Optional, Union

import torch
from torch.fx import Node

from .affine import Index


class NotLowered(Exception):
    """Raised where no code can be generated for a walk; the text names the op or the reason."""


@dataclass(eq=False)
class Item:
    """A value of one edge or row: an item ``shape`` and a ``dtype``."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def parts(self) -> list[Item]:
        """The items that this one is computed from."""
        return []


@dataclass(eq=False)
class Operand(Item):
    """A tensor from outside of the walk.

    Attributes:
        node: the node whose value the tensor is.
        kind: ``"param"`` for a tensor that is read as a whole. The rows of the others are read: those of ``"own"`` at
            the walk's row, of ``"near"`` at the other end of the edge, of ``"edge"`` at the edge's id.
        dim: the dimension of the rows; a row's elements are contiguous in the order of the item shape.
    """

    node: Node
    kind: str
    dim: int = 0


@dataclass(eq=False)
class Number(Item):
    """A constant; if ``size`` is set, times the number of sources, destinations or edges that it names."""

    value: Union[int, float, bool]
    size: Optional[str] = None


@dataclass(eq=False)
class EdgeNumber(Item):
    """An int64 of an edge: ``"id"``, or the id of its node at the ``"own"`` or ``"near"`` end."""

    which: str


@dataclass(eq=False)
class Map(Item):
    """A primitive of :data:`edgeless.programs.lowering.scalar_texts.TEXTS` applied elementwise to items of one shape.
    ``usual``: a condition that nearly always holds, and the simpler item that equals this one where it holds.
    """

    op: str
    args: tuple[Item, ...]
    usual: Optional[tuple[Item, Item]] = None

    def parts(self) -> list[Item]:
        return list(self.args)


@dataclass(eq=False)
class View(Item):
    """The elements of ``base`` at other indices: ``at`` maps an index of the view to an index of the base."""

    base: Item
    at: Callable[[list[Index]], list[Index]]

    def parts(self) -> list[Item]:
        return [self.base]


@dataclass(eq=False)
class Reshape(Item):
    """The elements of ``base`` in the same order in another shape."""

    base: Item

    def parts(self) -> list[Item]:
        return [self.base]


@dataclass(eq=False)
class Reduce(Item):
    """``base`` reduced over ``dims``, which stay with extent 1: ``"add"``, ``"mul"``, ``"max"`` or ``"min"``."""

    op: str
    base: Item
    dims: tuple[int, ...]

    def parts(self) -> list[Item]:
        return [self.base]


@dataclass(eq=False)
class Assemble(Item):
    """An array made of parts ``(item, starts, steps)``: element ``p`` of a part has the index ``starts + p * steps``.
    Later parts overwrite earlier ones. ``fill`` is the value of all other elements, None if there are none.
    """

    pieces: list[tuple[Item, tuple[int, ...], tuple[int, ...]]]
    fill: Optional[Number]

    def parts(self) -> list[Item]:
        return [piece for piece, *_ in self.pieces]


@dataclass(eq=False)
class Lookup(Item):
    """The elements of ``base`` whose index in ``dim`` is computed. ``at`` maps an index of the result to the index in
    ``base``, with 0 in ``dim``, and the index in ``index``, whose element is the index in ``dim``.
    """

    base: Item
    dim: int
    index: Item
    at: Callable[[list[Index]], tuple[list[Index], list[Index]]]

    def parts(self) -> list[Item]:
        return [self.base, self.index]


@dataclass(eq=False)
class Draw(Item):
    """The factors of dropout, as in :func:`edgeless.programs.front.ops.scale_rows`.

    Element ``w`` is 0 if lane ``w % 4`` of Philox, whose counter is (edge id, ``w // 4 + (key << 24)``), is less than
    ``int(p * 2**32)``, else ``1 / (1 - p)``.
    """

    seed: Operand
    key: int
    p: float

    def parts(self) -> list[Item]:
        return [self.seed]


@dataclass(eq=False)
class Folded(Item):
    """An item of a row: ``source`` reduced over the edges of the row. Rows without edges have 0, or 1 for ``"prod"``.

    Attributes:
        reduce: ``"sum"``, ``"prod"``, ``"amax"`` or ``"amin"``.
        best: set for the argument of an extremum (int64, see :func:`edgeless.programs.front.ops.argument_rows`): the
            extremum itself.
    """

    source: Item
    reduce: str
    best: Optional[Folded] = None


@dataclass(eq=False)
class RowRead(Item):
    """An item of the row that an edge of the row reads."""

    row: Item


# Builders -----------------------------------------------------------------------------------------------------------


def number(value: Any, dtype: torch.dtype, shape: Sequence[int] = ()) -> Number:
    """A number as an item."""
    return Number(tuple(shape), dtype, value)


def cast(item: Item, dtype: torch.dtype) -> Item:
    """An item in another dtype."""
    if item.dtype is dtype:
        return item
    if isinstance(item, Number) and item.size is None:
        value = bool(item.value) if dtype is torch.bool else item.value
        return Number(item.shape, dtype, float(value) if dtype.is_floating_point else value)
    if dtype is torch.bool:
        return Map(item.shape, torch.bool, "ne", (item, number(0, item.dtype, item.shape)))
    return Map(item.shape, dtype, "cast", (item,))


def reshape(item: Item, shape: Sequence[int]) -> Item:
    """An item's elements in another shape."""
    shape = tuple(shape)
    if item.shape == shape:
        return item
    if isinstance(item, Number):
        return Number(shape, item.dtype, item.value, item.size)
    if isinstance(item, Reshape):
        return reshape(item.base, shape)
    return Reshape(shape, item.dtype, item)


def expand(item: Item, shape: Sequence[int]) -> Item:
    """An item broadcast to a shape."""
    shape = tuple(shape)
    if item.shape == shape:
        return item
    if isinstance(item, Number):
        return Number(shape, item.dtype, item.value, item.size)
    first, base = len(shape) - len(item.shape), item.shape
    if first >= 0 and all(b in (1, n) for b, n in zip(base, shape[first:])):
        return View(
            shape, item.dtype, item, lambda i: [Index() if n == 1 else i[first + d] for d, n in enumerate(base)]
        )
    raise NotLowered(f"a broadcast of {list(base)} to {list(shape)}")


def broadcast(*items: Item) -> list[Item]:
    """Items broadcast together."""
    shape = torch.broadcast_shapes(*(item.shape for item in items))
    return [expand(item, shape) for item in items]


def apply(op: str, *args: Any, dtype: Optional[torch.dtype] = None) -> Item:
    """Applies a primitive to items, which are broadcast, and to numbers, which get the dtype of the first item.

    Args:
        dtype: the dtype of the result; by default that of the first item.
    """
    first = next(a for a in args if isinstance(a, Item))
    items = broadcast(*(a if isinstance(a, Item) else cast(number(a, torch.float64), first.dtype) for a in args))
    return Map(items[0].shape, dtype or first.dtype, op, tuple(items))


def reduce(op: str, item: Item, dims: Sequence[int], keep: bool = True) -> Item:
    """An item reduced over dims, which stay with extent 1 if ``keep``."""
    dims = tuple(sorted(d % max(len(item.shape), 1) for d in dims))
    shape = tuple(1 if d in dims else n for d, n in enumerate(item.shape))
    if item.numel == 0:
        raise NotLowered("a reduction of nothing")
    out = item if all(item.shape[d] == 1 for d in dims) else Reduce(shape, item.dtype, op, item, dims)
    return out if keep else reshape(out, [n for d, n in enumerate(shape) if d not in dims])


def permute(item: Item, order: Sequence[int]) -> Item:
    """An item with its dims in another order."""
    order = list(order)
    places = [order.index(d) for d in range(len(order))]
    return View(tuple(item.shape[d] for d in order), item.dtype, item, lambda i: [i[p] for p in places])


def narrow(item: Item, dim: int, start: int, length: int, step: int = 1) -> Item:
    """Every ``step``-th element of a dim from ``start``."""
    shape = tuple(length if d == dim else n for d, n in enumerate(item.shape))
    if shape == item.shape and step == 1:
        return item
    return View(shape, item.dtype, item, lambda i: [x * step + start if d == dim else x for d, x in enumerate(i)])


def product(a: Item, b: Item) -> Item:
    """``[..., I, K]`` times ``[..., K, J]``."""
    lead, (rows, inner), columns = a.shape[:-2], a.shape[-2:], b.shape[-1]
    shape = (*lead, rows, columns, inner)
    left = View(shape, a.dtype, a, lambda i: [*i[:-3], i[-3], i[-1]])
    right = View(shape, b.dtype, b, lambda i: [*i[:-3], i[-1], i[-2]])
    return reduce("add", Map(shape, a.dtype, "mul", (left, right)), [len(shape) - 1], keep=False)
