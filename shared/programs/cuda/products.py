"""Products by edge in a pass on CUDA: tensor cores multiply values that lanes have computed for an edge by a parameter.

The statements of an edge run in phases. For all edges of a warp's window, lanes write the operands of products to rows
of shared memory. Then the warp multiplies these rows, and the next phase reads the results from rows. The last phase
folds, as in any pass. Sums over all edges of the product of two such values are matrix products of rows as well. The
kernel code is core_cuda/programs/edge_products.cuh; :mod:`product_text` writes the text.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Optional

import numpy as np
import torch

from ..lowering.items import Draw, EdgeNumber, Folded, Item, Map, Operand, Reduce, RowRead
from .lane_tables import runs_of
from .parts import EDGE, Total, Value, stored_type
from .rows import Rows, allocate, is_alike, padded
from .tiles import _FLOATS, Matrix, factors_of, follow, reduced_of

if TYPE_CHECKING:
    from .code import _Writer

LEAST, MOST = 16, 128  # bounds of the columns, and of the values of an edge
WARPS = 4


@dataclass(eq=False)
class Staged:
    """An item that lanes write to rows; ``names`` are its registers."""

    item: Item
    phase: int
    rows: Rows
    names: list[str] = field(default_factory=list)
    summed: bool = False  # a sum over all edges reads it, so rows beyond the sub-warp's edges must be zero


@dataclass(eq=False)
class EdgeProduct:
    """``[depth]`` values of an edge times a matrix ``[columns, depth]``; ``rests``: whether rounding to TF32 leaves a
    remainder.
    """

    item: Reduce
    values: Item
    matrix: Matrix
    rests: tuple[bool, bool]
    phase: int = 0
    rows: Optional[Rows] = None
    seldom: bool = False  # True if only few edges need it

    @property
    def halves(self) -> Optional[torch.dtype]:
        """The 16-bit type in which the product may be computed, or None."""
        return self.item.dtype if self.item.dtype.itemsize == 2 and self.values.numel > 16 else None


@dataclass(eq=False)
class Outer:
    """A sum over all edges of one value times another; ``places``: the indices of its elements in the blocks' parts."""

    left: Item
    right: Item
    rests: tuple[bool, bool]
    dtype: torch.dtype
    places: np.ndarray
    total: Optional[Total] = None
    step: int = 0


@dataclass(eq=False)
class Phase:
    """The statements of an edge before a product: its loads, and the arrays that hold them for several edges."""

    lines: list[str] = field(default_factory=list)
    load: list[str] = field(default_factory=list)
    arrays: list[str] = field(default_factory=list)
    memo: dict = field(default_factory=dict)
    words: int = 0
    uses_id: bool = False


class EdgeProducts:
    """The products by edge of a pass.

    Args:
        writer: the writer with the pass's registers.
    """

    def __init__(self, writer: _Writer):
        self.writer, self.wanted = writer, True
        self.products: dict[int, EdgeProduct] = {}  # id() of an item -> its product
        self.staged: dict[int, Staged] = {}  # id() of an item -> its rows
        self.outers: dict[int, Outer] = {}  # id() of a total -> its outer product
        self.phases: list[Phase] = []
        self.choices: dict[int, Map] = {}  # id of an item -> the item, if it usually needs no product
        self.of_seldom: Optional[int] = None  # the phase of the seldom needed products
        self.users: list[Staged] = []  # rows of the values that depend on them
        self.seldom, self.anew = Phase(), []  # the statements for edges that need them
        self._levels: dict[int, int] = {}
        self._by_edge: dict[int, bool] = {}

    @property
    def used(self) -> bool:
        """True if the pass has such products."""
        return bool(self.products or self.outers)

    # What there is ---------------------------------------------------------------------------------------------------

    def find(self) -> None:
        """Finds the products, and writes the statements that compute their operands."""
        stage, lanes = self.writer.stage, self.writer.lanes
        if lanes > 32 or not self.wanted:
            return
        for item in _reached(stage.sources()):
            if isinstance(item, Reduce):
                found = self._product(item)
                if found is not None:
                    self.products[id(item)] = found
        outers = {id(item): self._outer(item) for item in stage.totals}
        outers = {key: outer for key, outer in outers.items() if outer is not None}
        if not self._are_computed(outers):
            self.products = {}
            return
        self.outers = outers
        self._find_seldom()
        for product in self.products.values():
            if not product.seldom:
                product.phase = self.level(product.values)
            self.stage(product.values)
        for outer in outers.values():
            for item in (outer.left, outer.right):
                self.stage(item).summed = True
        self._choose_dtypes()
        count = max(s.phase for s in self.staged.values()) + 1
        self.phases = [Phase() for _ in range(count)]
        for number in range(count):
            for staged in self.staged.values():
                if staged.phase == number:
                    with self.phase(number):
                        staged.names = self.writer.value(staged.item, self.own_table(staged.item.numel)).names
            if number == self.of_seldom:
                self._write_seldom(number)
            for outer in outers.values():
                both = [self.staged[id(item)] for item in (outer.left, outer.right)]
                if max(s.phase for s in both) == number:
                    outer.step = 3 * number + 1
                    for s in both:
                        s.rows.last, s.rows.own = max(s.rows.last, outer.step), False
            for product in self.products.values():
                if product.phase == number and not product.seldom:
                    step, rows = 3 * number + 2, self.staged[id(product.values)].rows
                    rows.readers = rows.readers + 1 if rows.last == step else 1
                    rows.last, rows.own = step, False
                    product.rows = Rows(product.item.numel, self.writer.name("kRows"), step, step)

    def _choose_dtypes(self) -> None:
        """Lets rows hold 16-bit values if all products that read them are computed in that type."""
        for key, staged in self.staged.items():
            kinds = {p.halves for p in self.products.values() if id(p.values) == key}
            kinds |= {o.dtype for o in self.outers.values() if key in (id(o.left), id(o.right))}
            if len(kinds) == 1 and (kind := kinds.pop()) is not None and kind.itemsize == 2:
                staged.rows.dtype = kind

    def _find_seldom(self) -> None:
        """Finds products that items seldom need: shares of extrema need theirs only where edges are equal. They are
        computed only for windows in which an edge needs them.
        """
        stage = self.writer.stage
        found = [i for i in _reached(stage.sources()) if isinstance(i, Map) and i.usual is not None]
        late = [item for item in found if self.level(item) and not any(map(self.level, item.usual))]
        self.choices = {id(item): item for item in late}
        self._levels = {}
        read = [p.values for p in self.products.values()] + [o for x in self.outers.values() for o in (x.left, x.right)]
        leaves = {id(item) for item in read}
        last = [item for item in stage.sources() if id(item) not in self.outers]
        needed = {id(i) for i in _reached([*last, *read], self._without_seldom)}
        seldom = [p for key, p in self.products.items() if key not in needed]
        users = [i for i in read if self._chooses(i, leaves - {id(i)})]
        levels = {self.level(item) for item in users}
        fits = len(levels) == 1 and all(self.level(p.values) <= min(levels) for p in seldom)
        if not seldom or not fits or any(self._chooses(i, leaves) for i in last):
            self.choices = {}
            self._levels = {}
            return
        for product in seldom:
            product.seldom = True
        self.of_seldom = min(levels)
        self.users = [self.stage(item) for item in {id(i): i for i in users}.values()]
        for staged in self.users:
            staged.rows.fresh = True

    def _without_seldom(self, item: Item) -> list[Item]:
        return list(item.usual) if id(item) in self.choices else item.parts()

    def _chooses(self, item: Item, leaves: set[int]) -> bool:
        """Returns whether an item depends on one of the choices other than through rows."""
        if id(item) in leaves:
            return False
        of = _reached([item], lambda i: [p for p in i.parts() if id(p) not in leaves and id(p) not in self.products])
        return any(id(i) in self.choices for i in of)

    def _write_seldom(self, number: int) -> None:
        """Writes the statements of a phase that few edges need, with the products that they read."""
        step = 3 * number + 0.5
        for product in self.products.values():
            if product.seldom:
                product.rows = Rows(product.item.numel, self.writer.name("kRows"), step, step)
                rows = self.staged[id(product.values)].rows
                rows.last, rows.own = max(rows.last, step), False
        choices, self.choices = self.choices, {}
        with self.phase(number, self.seldom):
            for staged in self.users:
                names = self.writer.value(staged.item, self.own_table(staged.item.numel)).names
                self.anew.append(Staged(staged.item, number, staged.rows, names, staged.summed))
        self.choices = choices

    def _are_computed(self, outers: dict[int, Outer]) -> bool:
        """Returns whether there are products besides those that :mod:`tiles` computes, of edge features and their
        gradients.
        """
        if any(not (_is_feature(o.left) or _is_feature(o.right)) for o in outers.values()):
            return True
        by_edge = self.writer.stage.by_edge
        items = [i for item in self.writer.stage.sources() for i in (self._terms(item) if item in by_edge else [item])]
        found = [self.products[id(i)] for i in _reached(items) if id(i) in self.products]
        return any(not _is_feature(p.values) for p in found)

    def _terms(self, item: Item) -> list[Item]:
        """The factors of the products in a sum of products."""
        base, _ = follow(item, np.arange(item.numel))
        if isinstance(base, Map) and base.op == "add":
            return [term for arg in base.args for term in self._terms(arg)]
        return [self.products[id(base)].values if id(base) in self.products else item]

    def level(self, item: Item) -> int:
        """The phase in which an item can be computed."""
        if id(item) not in self._levels:
            product = self.products.get(id(item))
            if product is not None:
                found = self.level(product.values) + 1
            elif isinstance(item, (RowRead, Folded)):
                found = 0
            else:
                found = max(map(self.level, self._without_seldom(item)), default=0)
            self._levels[id(item)] = found
        return self._levels[id(item)]

    def is_by_edge(self, item: Item) -> bool:
        """Returns whether an item differs from edge to edge of a row."""
        if id(item) not in self._by_edge:
            if isinstance(item, (Draw, EdgeNumber)):
                found = True
            elif isinstance(item, Operand):
                found = item.kind in ("near", "edge")
            else:
                found = not isinstance(item, (RowRead, Folded)) and any(map(self.is_by_edge, item.parts()))
            self._by_edge[id(item)] = found
        return self._by_edge[id(item)]

    def _product(self, item: Reduce) -> Optional[EdgeProduct]:
        found = reduced_of(item)
        if found is None:
            return None
        factors, (columns, depth) = found
        if min(columns, depth) < LEAST or max(columns, depth) > MOST or depth % self.writer.lanes:
            return None
        for (weights, of), (values, at) in (factors, factors[::-1]):
            if not (isinstance(weights, Operand) and weights.kind == "param" and self._fits(values)):
                continue
            matrix = self.writer.tiles.matrix_of(weights, of)
            if matrix is not None and values.numel == depth and (at == np.arange(depth)).all():
                return EdgeProduct(item, values, matrix, (_rest(item, values), _rest(weights)))
        return None

    def _fits(self, values: Item) -> bool:
        return values.dtype in _FLOATS and self.is_by_edge(values)

    def _outer(self, item: Item) -> Optional[Outer]:
        factors = factors_of(item, np.arange(item.numel))
        if factors is None:
            return None
        for (left, at), (right, of) in (factors, factors[::-1]):
            rows, columns = left.numel, right.numel
            if rows * columns != item.numel or left is right or min(rows, columns) <= LEAST:
                continue
            if max(rows, columns) > MOST or rows % self.writer.lanes or columns % self.writer.lanes:
                continue
            both = self._fits(left) and self._fits(right)
            if both and len(np.unique(at * columns + of)) == item.numel:
                rests = _rest(item, left), _rest(item, right)
                return Outer(left, right, rests, item.dtype, _places(at, of, padded(rows), padded(columns)))
        return None

    def stage(self, item: Item) -> Staged:
        """The rows that an item is written to."""
        if id(item) not in self.staged:
            step = 3 * self.level(item)
            rows = Rows(item.numel, self.writer.name("kRows"), step, step)
            self.staged[id(item)] = Staged(item, self.level(item), rows)
        return self.staged[id(item)]

    def own_table(self, columns: int) -> np.ndarray:
        """The table of the elements of a row that each lane writes."""
        return np.arange(columns).reshape(self.writer.lanes, -1)

    # Values ----------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def phase(self, number: int, phase: Optional[Phase] = None) -> Iterator[None]:
        """Writes the statements that are made in the ``with`` block to a phase."""
        writer, phase = self.writer, phase or self.phases[number]
        saved = writer.memo, writer.lines[EDGE], writer.load, writer.words, writer.arrays, writer.uses_id
        writer.memo, writer.lines[EDGE], writer.load, writer.words = phase.memo, phase.lines, phase.load, phase.words
        writer.arrays, writer.uses_id, writer.phase = phase.arrays, phase.uses_id, number
        try:
            yield
        finally:
            phase.memo, phase.words, phase.uses_id, writer.phase = writer.memo, writer.words, writer.uses_id, None
            writer.memo, writer.lines[EDGE], writer.load, writer.words, writer.arrays, writer.uses_id = saved

    def value(self, item: Item, table: np.ndarray) -> Optional[Value]:
        """Loads elements of an item from its rows; None if it has no rows."""
        product, staged = self.products.get(id(item)), self.staged.get(id(item))
        now = len(self.phases) if self.writer.phase is None else self.writer.phase
        if staged is not None and staged.phase < now and staged.rows.dtype in (item.dtype, torch.float32):
            rows = staged.rows
        elif product is not None and product.rows is not None:
            rows = product.rows
        else:
            return None
        if rows.last < 3 * now:
            rows.last, rows.own = 3 * now, True
        rows.own &= rows.columns % self.writer.lanes == 0 and np.array_equal(table, self.own_table(rows.columns))
        names = []
        for first, count in runs_of(table, rows.step):
            name, place = self.writer.name("g"), self.writer.place(table[:, first : first + 1], count)
            kind = stored_type(rows.dtype)
            at = f"{rows.at('place_ + u')} + {place}"
            self.writer.lines[EDGE].append(f"Loaded<{kind}, {count}> {name}; {name}.near({at});")
            names += [f"value_of({name}[{i}])" for i in range(count)]
        return Value(names, EDGE)

    def total(self, item: Item) -> Optional[Total]:
        """A sum over all edges, if it is a product of rows."""
        outer = self.outers.get(id(item))
        if outer is None:
            return None
        lanes = self.writer.lanes
        places = np.stack([outer.places // lanes, outer.places % lanes], 1)
        columns = -(-padded(outer.left.numel) * padded(outer.right.numel) // lanes)
        outer.total = Total(item, (columns + 3) // 4 * 4, places, in_tiles=True)
        return outer.total

    def allocate(self) -> list[int]:
        """Gives all rows a slot, and returns the floats of each slot's rows."""
        products = list(self.products.values())
        seldom = [p.rows for p in products if p.seldom]
        every = [s.rows for s in self.staged.values()] + [p.rows for p in products]
        within = None
        if len(seldom) == len(self.users) == 1 and is_alike(seldom[0], self.users[0].rows):
            within = self.users[0].rows  # they are written where they are read
            every.remove(seldom[0])
        slots = allocate(every, {id(p.rows): self.staged[id(p.values)].rows for p in products if not p.seldom})
        if within is not None:
            seldom[0].slot = within.slot
        return slots

    def chooses(self, item: Map) -> bool:
        """Returns whether an item is computed by its usual case."""
        return id(item) in self.choices


def _is_feature(item: Item) -> bool:
    return isinstance(item, Operand) and item.kind == "edge"


def _rest(*items: Item) -> bool:
    """Returns whether rounding to TF32 leaves a remainder for values of all these items."""
    return all(item.dtype is torch.float32 for item in items)


def _reached(items: list[Item], parts: Callable[[Item], list[Item]] = lambda item: item.parts()) -> list[Item]:
    """The items of an edge that other items depend on, in the order of their computation."""
    order: list[Item] = []
    seen: set[int] = set()
    stack = [(item, False) for item in items]
    while stack:
        item, done = stack.pop()
        if done:
            order.append(item)
        elif id(item) not in seen:
            seen.add(id(item))
            stack.append((item, True))
            if not isinstance(item, (RowRead, Folded)):
                stack += [(part, False) for part in parts(item)]
    return order


def _places(row: np.ndarray, column: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """The indices at which BlockTotals::finish() of edge_products.cuh writes elements."""
    parts = 4 if rows % 128 == 0 else 2 if rows % 64 == 0 else 1
    height, width = rows // parts, columns * parts // WARPS
    warp = column // width * parts + row // height
    row, column = row % height, column % width
    four = (row // 32 * 2 + row % 4 // 2) * (width // 8) + column // 8
    lane, number = row % 32 // 4 * 4 + column % 8 // 2, row % 2 * 2 + column % 2
    return ((warp * (height * width // 128) + four) * 32 + lane) * 4 + number
