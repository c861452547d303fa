"""Arranges the items of a walk into the loops that :mod:`edgeless.programs.c.loops` defines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Optional, Union

import torch

from ..lowering.affine import Index, Split, Var, flat, strides_of
from ..lowering.items import (
    Assemble,
    Draw,
    Folded,
    Item,
    Map,
    NotLowered,
    Number,
    Operand,
    Reduce,
    RowRead,
)
from ..lowering.lower import Lowered, Total
from .loops import (
    Accumulate,
    Arranged,
    Buffer,
    DrawLoop,
    Dynamic,
    EdgeResult,
    Fold,
    Loop,
    Pass,
    Statement,
    Store,
    TotalArray,
)
from .scalars import Conflict, Needed, Open, Scalars, core_of, is_cheap

End = Callable[[Index, str, "Open"], Union[Store, Accumulate]]


def arrange(lowered: Lowered) -> Arranged:
    """Arranges a lowered walk into loops.

    Raises:
        NotLowered: an index cannot be written.
    """
    arrays: set[Item] = set()
    while True:
        try:
            return _Arranger(lowered, arrays).run()
        except Needed as error:
            if error.items <= arrays:
                raise NotLowered("its loops cannot be arranged") from None
            arrays |= error.items


class _Scope:
    """The statements of an edge in a pass, or of a row after one."""

    def __init__(self, kind: str):
        self.kind = kind
        self.statements: list[Union[Open, DrawLoop]] = []
        self.made: dict[Item, tuple[Buffer, int]] = {}  # item -> its array, and the last statement that writes it

    def finished(self) -> list[Statement]:
        """The statements, after removing computations that occur twice."""
        uses: dict[Item, set] = {}
        parents: dict[Item, set] = {}
        for opened in self.statements:
            for item, parent, index in opened.uses if isinstance(opened, Open) else ():
                uses.setdefault(item, set()).add((opened.place, index))
                parents.setdefault(item, set()).add(parent)
        many = {item for item, found in uses.items() if len(found) > 1 and not is_cheap(item)}
        if many:
            raise Needed({item for item in many if any(parent not in many for parent in parents[item])})
        return [s.loop if isinstance(s, Open) else s for s in self.statements]


class _Arranger(Scalars):
    def __init__(self, lowered: Lowered, arrays: set[Item]):
        super().__init__(arrays)
        self.lowered = lowered
        self.buffers: list[Buffer] = []
        self.stages: dict[Item, int] = {}
        self.scope = _Scope("row")

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
        _name_variables([*first, *(s for each in passes for s in (*each.edge, *each.row))])
        arrays = [a for _, a in totals]
        winners = low.winners if len(passes) == 1 else []
        return Arranged(low.end, low.operands, first, passes, arrays, [r for _, r in by_edge], self.buffers, winners)

    # What there is --------------------------------------------------------------------------------------------------

    def reached(self) -> tuple[list[Folded], list[Item]]:
        """The folds that the sinks depend on, and the items of the row that its edges read."""
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
        """The pass in which an edge's item is computed; for a row's item, the number of passes before it."""
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
        """The statements that compute the row's items that edges read, after this many passes."""
        self.scope = _Scope("row")
        for core in map(core_of, reads):
            if self.stage(core) == stage and not isinstance(core, (Operand, Folded, Number)):
                self.root(core)
        return self.scope.finished()

    def total(self, total: Total, array: TotalArray) -> None:
        def end(index: Index, value: str, opened: Open) -> Accumulate:
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
        buffer.sparse = _is_sparse(item)
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
            opened = Open(kept, reduced)
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
        """Writes a statement over the elements of an item, into an existing loop if one fits.

        Args:
            end: makes the loop's end from an index, a scalar and the loop.
            joins: whether it may share a loop.
            at: maps an index to the offset in the array that the end writes; by default the offset in the item.
            made: the item's own array, if the item becomes one.
        """
        if item.numel == 0:
            raise NotLowered("an item without elements")
        refined: dict[int, list[int]] = {}

        def write(opened: Open, variables: Optional[Sequence[Var]]) -> None:
            nest = _nest(item.shape, refined, variables) if variables is not None else _nest(item.shape, refined)
            index = [_index(each) for each in nest]
            value = self.value(item, index, opened, inside=made is not None)
            opened.loop.ends.append(end(flat(index, item.shape) if at is None else at(index), value, opened))
            if made is not None and opened.place >= 0:
                self.scope.made[item] = made, opened.place
                opened.named["array", item, tuple(index)] = value

        while True:  # a trial run makes all arrays that the statement reads
            nest = _nest(item.shape, refined)
            variables = [v for each in nest for v in each if v.extent > 1]
            trial = Open(variables)
            try:
                write(trial, variables)
                break
            except Split as split:
                _refine(refined, nest, split)
        first = max((self.scope.made[read][1] for read in trial.reads), default=0)
        for place in range(first, len(self.scope.statements)) if joins else ():
            opened = self.scope.statements[place]
            if isinstance(opened, Open) and opened.joins and opened.extents == trial.extents:
                before = len(opened.loop.body), len(opened.uses), dict(opened.named), set(opened.reads)
                try:
                    write(opened, opened.loop.vars)
                    return
                except Conflict:
                    del opened.loop.body[before[0] :], opened.uses[before[1] :]
                    opened.named, opened.reads = before[2:]
        opened = Open(variables, place=len(self.scope.statements), joins=joins)
        self.scope.statements.append(opened)
        write(opened, variables)


def _is_sparse(item: Item) -> bool:
    """Whether an item is a share of an extremum, times something."""
    item = core_of(item)
    if not isinstance(item, Map):
        return False
    factors = {"mul": item.args, "div": item.args[:1], "neg": item.args}.get(item.op, ())
    return item.usual is not None or any(map(_is_sparse, factors))


# Loop nests ---------------------------------------------------------------------------------------------------------


def _nest(
    shape: Sequence[int], refined: dict[int, list[int]], given: Optional[Sequence[Var]] = None
) -> list[list[Var]]:
    """The variables of each dim, outermost first: new ones, or the given ones where an extent is above 1."""
    source = iter(given or ())
    return [
        [next(source) if given is not None and n > 1 else Var(n) for n in refined.get(dim, [extent])]
        for dim, extent in enumerate(shape)
    ]


def _index(variables: Sequence[Var]) -> Index:
    total = Index()
    for v in variables:
        total = total * v.extent + Index.of(v)
    return total


def _name_variables(statements: Sequence[Statement]) -> None:
    """Numbers the loops' variables in a fixed order, so that equal walks have equal texts."""
    variables = [v for s in statements if isinstance(s, Loop) for v in (*s.vars, *s.reduced)]
    for number, variable in enumerate(dict.fromkeys(variables)):
        variable.name = f"i{number}"


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
