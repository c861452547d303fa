"""The bodies of loops: the scalar that an item has at an index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Union

import torch

from ..lowering.affine import Index, NotAffine, Var, flat, strides_of, unflat
from ..lowering.items import (
    Assemble,
    Draw,
    EdgeNumber,
    Folded,
    Item,
    Lookup,
    Map,
    NotLowered,
    Number,
    Operand,
    Reduce,
    Reshape,
    RowRead,
    View,
)
from .loops import Buffer, Dynamic, Fold, Let, Loop

_NONE = Index()
_ARRAYS = (Reduce, Assemble, Draw)  # items of these classes always become arrays


class Needed(Exception):
    """Raised with items that must become arrays first."""

    def __init__(self, items: set[Item]):
        super().__init__()
        self.items = items


class Conflict(Exception):
    """Raised if a loop cannot contain another statement."""


def is_cheap(item: Item) -> bool:
    """Returns whether computing the item again costs nothing."""
    return not isinstance(item, Map) or (item.op in ("cast", "neg") and all(map(_is_leaf, item.args)))


def _is_leaf(item: Item) -> bool:
    return isinstance(item, (Number, Operand, EdgeNumber)) or (
        isinstance(item, (View, Reshape)) and _is_leaf(item.base)
    )


def core_of(item: Item) -> Item:
    """The item that an item is a view of."""
    return core_of(item.base) if isinstance(item, (View, Reshape)) else item


class Open:
    """A loop that is being written.

    Attributes:
        place: the loop's index among the scope's statements, or -1 for a trial.
        joins: whether other statements may join it.
        reads: the arrays of the scope that the loop reads.
        uses: the maps that the loop computes: (map, the map that reads it or None, index).
    """

    def __init__(self, variables: Sequence[Var], reduced: Sequence[Var] = (), place: int = -1, joins: bool = True):
        self.loop = Loop(tuple(variables), tuple(reduced))
        self.place, self.joins = place, joins and not reduced
        self.named: dict[Any, str] = {}
        self.uses: list[tuple] = []
        self.reads: set[Item] = set()
        self.all = {*variables, *reduced}

    @property
    def extents(self) -> list[int]:
        return [v.extent for v in self.loop.vars]


class Scalars:
    """Writes scalars into loops; its subclass makes arrays and loops.

    Attributes:
        arrays: items that are arrays.
        folds: the folds by item.
        rows: items of the row that are arrays by now.
        scope: the scope that statements are written to; ``scope.made`` has its arrays, with the index of the last
            statement that writes each.
    """

    scope: Any

    def __init__(self, arrays: set[Item]):
        self.arrays = arrays
        self.folds: dict[Folded, Fold] = {}
        self.rows: dict[Item, Buffer] = {}
        self.stack: list[Map] = []  # the maps that are being written, outermost first
        self.names = 0

    def root(self, item: Item) -> Buffer:
        """The array of an item, computed before the statement that is being written."""
        raise NotImplementedError

    def let(self, opened: Open, key: Any, dtype: torch.dtype, op: str, args: tuple, index=_NONE, dynamic=None) -> str:
        if key not in opened.named:
            self.names += 1
            opened.named[key] = f"t{self.names}"
            opened.loop.body.append(Let(f"t{self.names}", dtype, op, args, index, dynamic))
        return opened.named[key]

    def load(self, memory: Union[Operand, Buffer], index: Index, opened: Open, dynamic=None) -> str:
        return self.let(opened, (memory, index, dynamic), memory.dtype, "load", (memory,), index, dynamic)

    def value(self, item: Item, index: list[Index], opened: Open, inside: bool = False) -> str:
        """The scalar that an item has at an index; with ``inside`` it is computed even if the item is an array."""
        if isinstance(item, Number):
            key = ("number", item.dtype, repr(item.value), item.size)
            return self.let(opened, key, item.dtype, "number", (item.value, item.size))
        if isinstance(item, EdgeNumber):
            return self.let(opened, ("edge", item.which), item.dtype, "edge", (item.which,))
        if isinstance(item, RowRead):
            return self.value(item.row, index, opened)
        if not inside:
            memory = self.memory(item)
            if memory is not None:
                return self.element(item, memory, flat(index, item.shape), opened)
        if isinstance(item, Reshape):
            memory = self.memory(item.base)
            if memory is not None:
                return self.element(item.base, memory, flat(index, item.shape), opened)
            try:
                base = unflat(flat(index, item.shape), item.base.shape)
            except NotAffine:
                raise Needed({item.base}) from None
            return self.value(item.base, base, opened)
        if isinstance(item, View):
            try:
                base = item.at(index)
            except NotAffine:
                raise NotLowered("an index that is no sum") from None
            return self.value(item.base, base, opened)
        if isinstance(item, Lookup):
            return self.looked_up(item, index, opened)
        assert isinstance(item, Map), item
        key = (item, tuple(index))
        if key in opened.named:
            return opened.named[key]
        if {v for i in index for v in i.variables} != opened.all and not is_cheap(item):
            raise Needed({item})
        opened.uses.append((item, self.stack[-1] if self.stack else None, tuple(index)))
        self.stack.append(item)
        args = tuple(self.value(arg, index, opened) for arg in item.args)
        self.stack.pop()
        return self.let(opened, key, item.dtype, item.op, args)

    def memory(self, item: Item) -> Union[Operand, Buffer, None]:
        """The memory that has an item's elements in order, or None."""
        if isinstance(item, Operand):
            return item
        if isinstance(item, RowRead):
            return self.memory(item.row)
        if isinstance(item, Folded):
            fold = self.folds[item]
            return fold.best if item.best is None else fold.argument
        if isinstance(item, _ARRAYS) or item in self.arrays or item in self.rows:
            return self.root(item)
        return self.memory(item.base) if isinstance(item, Reshape) else None

    def element(self, item: Item, memory: Union[Operand, Buffer], place: Index, opened: Open) -> str:
        """The scalar at an offset of an item's memory."""
        while isinstance(item, (Reshape, RowRead)) and item not in self.arrays and item not in self.rows:
            item = item.base if isinstance(item, Reshape) else item.row
        if item in self.scope.made:
            opened.reads.add(item)
            if opened.place >= 0 and self.scope.made[item][1] == opened.place:
                index = [k for k in opened.named if k[0] == "array" and k[1] is item]
                for key in index:
                    if flat(key[2], item.shape) == place:
                        return opened.named[key]
                raise Conflict
        return self.load(memory, place, opened)

    def looked_up(self, item: Lookup, index: list[Index], opened: Open) -> str:
        base, at = item.at(index)
        memory = self.memory(item.base)
        if memory is None:
            raise Needed({item.base})
        row = self.value(item.index, at, opened)
        dynamic = Dynamic(row, strides_of(item.base.shape)[item.dim], item.base.shape[item.dim])
        if item.base in self.scope.made:
            opened.reads.add(item.base)
            if opened.place == self.scope.made[item.base][1]:
                raise Conflict
        return self.load(memory, flat(base, item.base.shape), opened, dynamic)
