"""Arranges the items of a walk into loops; what loops are says :mod:`edgeless.programs.loops`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional, Union

import torch

from .affine import Index, NotAffine, Split, Var, flat, strides_of, unflat, var
from .items import (
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
from .loops import (
    Accumulate,
    Arranged,
    Buffer,
    DrawLoop,
    Dynamic,
    EdgeResult,
    Fold,
    Let,
    Loop,
    Pass,
    Statement,
    Store,
    TotalArray,
)
from .lower import Lowered, Total

_NONE = Index()
_ARRAYS = (Reduce, Assemble, Draw)  # always
End = Callable[[Index, str, "_Open"], Union[Store, Accumulate]]


def arrange(lowered: Lowered) -> Arranged:
    """Arranges a lowered walk into loops.

    Raises:
        NotLowered: an index cannot be written.
    """
    arrays: set[Item] = set()
    while True:
        try:
            return _Arranger(lowered, arrays).run()
        except _Needed as error:
            if error.items <= arrays:
                raise NotLowered("its loops cannot be arranged") from None
            arrays |= error.items


class _Needed(Exception):
    """Items that must become arrays."""

    def __init__(self, items: set[Item]):
        super().__init__()
        self.items = items


class _Conflict(Exception):
    """A loop cannot take another statement."""


def _is_cheap(item: Item) -> bool:
    """Whether computing it again costs nothing."""
    return not isinstance(item, Map) or (item.op in ("cast", "neg") and all(map(_is_leaf, item.args)))


def _is_leaf(item: Item) -> bool:
    return isinstance(item, (Number, Operand, EdgeNumber)) or (
        isinstance(item, (View, Reshape)) and _is_leaf(item.base)
    )


def _core(item: Item) -> Item:
    """What an item is a view of."""
    return _core(item.base) if isinstance(item, (View, Reshape)) else item


class _Open:
    """A loop that is being written.

    Attributes:
        place: its place among the scope's statements, or -1 for a trial.
        joins: whether other statements may join it.
        reads: the arrays of the scope that it reads.
        uses: the maps that it computes: (map, the map that reads it or None, index).
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


class _Scope:
    """The statements of an edge in a pass, or of a row after one."""

    def __init__(self, kind: str):
        self.kind = kind
        self.statements: list[Union[_Open, DrawLoop]] = []
        self.made: dict[Item, tuple[Buffer, int]] = {}  # array, and place of the last statement that writes it

    def finished(self) -> list[Statement]:
        """The statements, once nothing is computed twice."""
        uses: dict[Item, set] = {}
        parents: dict[Item, set] = {}
        for opened in self.statements:
            for item, parent, index in opened.uses if isinstance(opened, _Open) else ():
                uses.setdefault(item, set()).add((opened.place, index))
                parents.setdefault(item, set()).add(parent)
        many = {item for item, found in uses.items() if len(found) > 1 and not _is_cheap(item)}
        if many:
            raise _Needed({item for item in many if any(parent not in many for parent in parents[item])})
        return [s.loop if isinstance(s, _Open) else s for s in self.statements]


class _Arranger:
    def __init__(self, lowered: Lowered, arrays: set[Item]):
        self.lowered, self.arrays = lowered, arrays
        self.buffers: list[Buffer] = []
        self.folds: dict[Folded, Fold] = {}
        self.rows: dict[Item, Buffer] = {}  # items of the row that are arrays
        self.stages: dict[Item, int] = {}
        self.stack: list[Map] = []
        self.names = 0

    def run(self) -> Arranged:
        low = self.lowered
        totals = [(t, TotalArray(t.node, self.array(t.shape, t.dtype, "total"))) for t in low.totals]
        by_edge = [(i, EdgeResult(n, i.numel, i.dtype)) for n, i in low.by_edge]
        folds, reads = self.reached()
        for node, best, argument in low.folds:
            self.fold(best).node = node
            if argument is not None:
                self.fold(argument)
        for item in folds:
            self.fold(item)
        sources = [i.source for i in self.folds] + [i for t in low.totals for i in (t.source, t.row) if i is not None]
        last = max(self.stage(item) for item in [*sources, *(item for item, _ in by_edge)])
        first, passes = self.row_statements(0, reads), []
        for stage in range(last + 1):
            self.scope = _Scope("edge")
            done = [fold for i, fold in self.folds.items() if i.best is None and self.stage(i.source) == stage]
            for item, fold in self.folds.items():
                if fold in done and item.best is None:
                    self.place(item.source, lambda i, v, _, fold=fold: Accumulate(fold, i, v))
            for total, array in totals:
                if max(self.stage(i) for i in (total.source, total.row) if i is not None) == stage:
                    self.total(total, array)
            for item, result in by_edge:
                if self.stage(item) == stage:
                    self.place(item, lambda i, v, _, result=result: Store(result, i, v))
            edge = self.scope.finished()
            passes.append(Pass(edge, done, self.row_statements(stage + 1, reads)))
        arrays = [a for _, a in totals]
        return Arranged(low.end, low.operands, first, passes, arrays, [r for _, r in by_edge], self.buffers)

    # What there is --------------------------------------------------------------------------------------------------

    def reached(self) -> tuple[list[Folded], list[Item]]:
        """The folds that are reached, and the items of the row that its edges read."""
        low = self.lowered
        stack = [f.source for _, f, _ in low.folds] + [i for _, i in low.by_edge]
        stack += [i for t in low.totals for i in (t.source, t.row) if i is not None]
        seen: set[Item] = set()
        folds, reads = [], []
        while stack:
            item = stack.pop()
            if item in seen:
                continue
            seen.add(item)
            stack.extend(item.parts())
            if isinstance(item, RowRead):
                reads.append(item.row)
                stack.append(item.row)
            if isinstance(item, Folded):
                folds.append(item)
                stack.append(item.source)
        return folds[::-1], reads

    def stage(self, item: Item) -> int:
        """The pass in which an item of an edge is computed; for one of the row, the number of passes before it."""
        if item not in self.stages:
            parts = [item.row] if isinstance(item, RowRead) else item.parts()
            own = max(map(self.stage, parts), default=0)
            self.stages[item] = self.stage(item.source) + 1 if isinstance(item, Folded) else own
        return self.stages[item]

    def array(self, shape, dtype: torch.dtype, scope: str) -> Buffer:
        buffer = Buffer(f"b{len(self.buffers)}", tuple(shape), dtype, scope)
        self.buffers.append(buffer)
        return buffer

    def fold(self, item: Folded) -> Fold:
        best = item if item.best is None else item.best
        if best not in self.folds:
            self.folds[best] = Fold(best.reduce, self.array(best.shape, best.dtype, "fold"))
        fold = self.folds[best]
        if item.best is not None:
            fold.argument = fold.argument or self.array(item.shape, torch.int64, "fold")
            self.folds[item] = fold
        return fold

    # Statements -----------------------------------------------------------------------------------------------------

    def row_statements(self, stage: int, reads: list[Item]) -> list[Statement]:
        """The statements that compute what edges read of the row after this many passes."""
        self.scope = _Scope("row")
        for core in map(_core, reads):
            if self.stage(core) == stage and not isinstance(core, (Operand, Folded, Number)):
                self.root(core)
        return self.scope.finished()

    def total(self, total: Total, array: TotalArray) -> None:
        def end(index: Index, value: str, opened: _Open) -> Accumulate:
            if total.row is None:
                return Accumulate(array, index, value)
            row = self.value(total.row, [], opened)
            return Accumulate(array, index, value, Dynamic(row, total.source.numel, total.shape[0]))

        self.place(total.source, end)

    def root(self, item: Item) -> Buffer:
        """The array of an item, computed before the statement that is being written."""
        scope = self.scope
        if item in scope.made:
            return scope.made[item][0]
        if item in self.rows:
            return self.rows[item]
        stack, self.stack = self.stack, []
        buffer = self.array(item.shape, item.dtype, scope.kind)
        if isinstance(item, Draw):
            scope.statements.append(DrawLoop(buffer, item))
        elif isinstance(item, Assemble):
            for part in [] if item.fill is None else [item.fill]:
                self.place(part, lambda i, v, _: Store(buffer, i, v), joins=False)
            for part, starts, steps in item.pieces:
                self.piece(part, starts, steps, buffer)
        elif isinstance(item, Reduce):
            self.reduction(item, buffer)
        else:
            self.place(item, lambda i, v, _: Store(buffer, i, v), made=buffer)
        scope.made.setdefault(item, (buffer, len(scope.statements) - 1))
        if scope.kind == "row":
            self.rows[item] = buffer
        self.stack = stack
        return buffer

    def piece(self, part: Item, starts: Sequence[int], steps: Sequence[int], buffer: Buffer) -> None:
        strides = strides_of(buffer.shape)

        def place(index: list[Index]) -> Index:
            total = Index()
            for i, start, step, stride in zip(index, starts, steps, strides):
                total = total + (i * step + start) * stride
            return total

        self.place(part, lambda i, v, _: Store(buffer, i, v), joins=False, at=place)

    def reduction(self, item: Reduce, buffer: Buffer) -> None:
        refined: dict[int, list[int]] = {}
        while True:
            nest = _nest(item.base.shape, refined)
            index = [_index(variables) for variables in nest]
            reduced = [v for d in item.dims for v in nest[d] if v.extent > 1]
            kept = [v for variables in nest for v in variables if v.extent > 1 and v not in reduced]
            opened = _Open(kept, reduced)
            try:
                value = self.value(item.base, index, opened)
                break
            except Split as split:
                _refine(refined, nest, split)
        outer = [Index() if d in item.dims else i for d, i in enumerate(index)]
        opened.loop.op, opened.loop.value = item.op, value
        opened.loop.ends.append(Store(buffer, flat(outer, item.shape), value))
        opened.place = len(self.scope.statements)
        self.scope.statements.append(opened)

    def place(
        self,
        item: Item,
        end: End,
        joins: bool = True,
        at: Optional[Callable[[list[Index]], Index]] = None,
        made: Optional[Buffer] = None,
    ) -> None:
        """Writes a statement over the elements of an item, into a loop that is there if one fits.

        Args:
            end: makes the loop's end of an index, a scalar and the loop.
            joins: whether it may share a loop.
            at: the place of an index in the array that the end writes; by default that in the item.
            made: the item's own array, if it becomes one.
        """
        if item.numel == 0:
            raise NotLowered("an item without elements")
        refined: dict[int, list[int]] = {}

        def write(opened: _Open, variables: Optional[Sequence[Var]]) -> None:
            nest = _nest(item.shape, refined, variables) if variables is not None else _nest(item.shape, refined)
            index = [_index(each) for each in nest]
            value = self.value(item, index, opened, inside=made is not None)
            opened.loop.ends.append(end(flat(index, item.shape) if at is None else at(index), value, opened))
            if made is not None and opened.place >= 0:
                self.scope.made[item] = made, opened.place
                opened.named["array", item, tuple(index)] = value

        while True:  # a trial, which makes all arrays that it reads
            nest = _nest(item.shape, refined)
            variables = [v for each in nest for v in each if v.extent > 1]
            trial = _Open(variables)
            try:
                write(trial, variables)
                break
            except Split as split:
                _refine(refined, nest, split)
        first = max((self.scope.made[read][1] for read in trial.reads), default=0)
        for place in range(first, len(self.scope.statements)) if joins else ():
            opened = self.scope.statements[place]
            if isinstance(opened, _Open) and opened.joins and opened.extents == trial.extents:
                before = len(opened.loop.body), len(opened.uses), dict(opened.named), set(opened.reads)
                try:
                    write(opened, opened.loop.vars)
                    return
                except _Conflict:
                    del opened.loop.body[before[0] :], opened.uses[before[1] :]
                    opened.named, opened.reads = before[2:]
        opened = _Open(variables, place=len(self.scope.statements), joins=joins)
        self.scope.statements.append(opened)
        write(opened, variables)

    # Scalars --------------------------------------------------------------------------------------------------------

    def let(self, opened: _Open, key: Any, dtype: torch.dtype, op: str, args: tuple, index=_NONE, dynamic=None) -> str:
        if key not in opened.named:
            self.names += 1
            opened.named[key] = f"t{self.names}"
            opened.loop.body.append(Let(f"t{self.names}", dtype, op, args, index, dynamic))
        return opened.named[key]

    def load(self, memory: Union[Operand, Buffer], index: Index, opened: _Open, dynamic=None) -> str:
        return self.let(opened, (memory, index, dynamic), memory.dtype, "load", (memory,), index, dynamic)

    def value(self, item: Item, index: list[Index], opened: _Open, inside: bool = False) -> str:
        """The scalar that an item has at an index; ``inside`` computes it even if it is an array."""
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
                raise _Needed({item.base}) from None
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
        if {v for i in index for v in i.variables} != opened.all and not _is_cheap(item):
            raise _Needed({item})
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

    def element(self, item: Item, memory: Union[Operand, Buffer], place: Index, opened: _Open) -> str:
        """The scalar at a place of an item's memory."""
        while isinstance(item, (Reshape, RowRead)) and item not in self.arrays and item not in self.rows:
            item = item.base if isinstance(item, Reshape) else item.row
        if item in self.scope.made:
            opened.reads.add(item)
            if opened.place >= 0 and self.scope.made[item][1] == opened.place:
                index = [k for k in opened.named if k[0] == "array" and k[1] is item]
                for key in index:
                    if flat(key[2], item.shape) == place:
                        return opened.named[key]
                raise _Conflict
        return self.load(memory, place, opened)

    def looked_up(self, item: Lookup, index: list[Index], opened: _Open) -> str:
        base, at = item.at(index)
        memory = self.memory(item.base)
        if memory is None:
            raise _Needed({item.base})
        row = self.value(item.index, at, opened)
        dynamic = Dynamic(row, strides_of(item.base.shape)[item.dim], item.base.shape[item.dim])
        if item.base in self.scope.made:
            opened.reads.add(item.base)
            if opened.place == self.scope.made[item.base][1]:
                raise _Conflict
        return self.load(memory, flat(base, item.base.shape), opened, dynamic)


# Loop nests ---------------------------------------------------------------------------------------------------------


def _nest(
    shape: Sequence[int], refined: dict[int, list[int]], given: Optional[Sequence[Var]] = None
) -> list[list[Var]]:
    """The variables of each dim, outermost first: new ones, or the given ones where an extent is above 1."""
    source = iter(given or ())
    return [
        [next(source) if given is not None and n > 1 else var(n) for n in refined.get(dim, [extent])]
        for dim, extent in enumerate(shape)
    ]


def _index(variables: Sequence[Var]) -> Index:
    total = Index()
    for v in variables:
        total = total * v.extent + Index.of(v)
    return total


def _refine(refined: dict[int, list[int]], nest: list[list[Var]], split: Split) -> None:
    """Splits a variable of a nest into two."""
    for dim, variables in enumerate(nest):
        if split.variable in variables:
            extents = [v.extent for v in variables]
            place = variables.index(split.variable)
            extents[place : place + 1] = [extents[place] // split.inner, split.inner]
            refined[dim] = extents
            return
    raise NotLowered("a loop of another statement would be split")
