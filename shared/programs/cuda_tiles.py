"""Products of narrow edge features in a pass on CUDA, which warps compute for 16 edges at once on the tensor cores.

Three kinds of values are found among the items of a pass, whatever views and casts are between: features of the edge
times a matrix, sums over all edges of values times features, and gradients of features, which are sums of values times
matrices. What the lanes of an edge exchange with these products stands in rows of shared memory. The device's side is
core_cuda/programs/tiles.cuh.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import numpy as np
import torch

from .cuda_parts import EDGE, Total, Value
from .items import Item, Map, Operand, Reduce, Reshape, View
from .lane_tables import flat, runs_of, unflat

PAD = 4  # floats behind a row of shared memory
MOST_COLUMNS, MOST_FEATURES = 128, 64
MOST_SUMS = 2048  # of a sum over all edges, which a warp has in its registers
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(eq=False)
class Features:
    """The ``count`` features of an edge from ``start`` on; ``kept``: in shared memory too."""

    operand: Operand
    start: int
    count: int
    name: str
    kept: bool = False


@dataclass(eq=False)
class Matrix:
    """``[columns, features]`` of a parameter: the place of the first element, and the steps of both."""

    operand: Operand
    start: int
    column: int
    feature: int

    @property
    def key(self) -> tuple:
        """What it has in common with the same matrix, found anew."""
        return id(self.operand), self.start, self.column, self.feature


@dataclass(eq=False)
class Rows:
    """A row of ``columns`` floats for each edge of a tile; ``own``: each lane reads and writes its own part alone.
    ``name``: of the constant that says where they begin.
    """

    columns: int
    name: str
    own: bool = True


@dataclass(eq=False)
class Product:
    """Features times a matrix."""

    features: Features
    matrix: Matrix
    rows: Rows


@dataclass(eq=False)
class Outer:
    """A sum over all edges of ``values [columns]`` times features; ``places``: of the sum's elements, see tiles.cuh."""

    values: Item
    features: Features
    places: np.ndarray


@dataclass(eq=False)
class Gradient:
    """A gradient of ``count`` features: the sum of values times matrices."""

    terms: list[tuple[Item, Matrix]]
    count: int


def rest(item: Item) -> str:
    """Whether TF32 leaves a rest of an item's numbers, in C++."""
    return str(item.dtype is torch.float32).lower()


def follow(item: Item, table: np.ndarray) -> tuple[Item, np.ndarray]:
    """What an item is views and casts of, and the elements there."""
    while True:
        if isinstance(item, View):
            table = flat(item.at(unflat(table, item.shape)), item.base.shape, table.shape)
            item = item.base
        elif isinstance(item, Reshape):
            item = item.base
        elif isinstance(item, Map) and item.op == "cast" and {item.dtype, item.args[0].dtype} <= set(_FLOATS):
            item = item.args[0]
        else:
            return item, table


def factors_of(item: Item, table: np.ndarray) -> Optional[list[tuple[Item, np.ndarray]]]:
    """Both factors of a product, and the elements of them."""
    item, table = follow(item, table)
    if not (isinstance(item, Map) and item.op == "mul" and item.dtype in _FLOATS):
        return None
    return [follow(arg, table) for arg in item.args]


def _is(item: Item, kind: str) -> bool:
    return isinstance(item, Operand) and item.kind == kind and item.dtype in _FLOATS


def reduced_of(item: Item) -> Optional[tuple[list[tuple[Item, np.ndarray]], tuple[int, int]]]:
    """Of a sum of products the factors, whose elements are ``[elements, summands]``."""
    if not (isinstance(item, Reduce) and item.op == "add" and item.dtype in _FLOATS):
        return None
    order = [d for d in range(len(item.base.shape)) if d not in item.dims] + list(item.dims)
    places = np.arange(item.base.numel).reshape(item.base.shape).transpose(order).reshape(item.numel, -1)
    found = factors_of(item.base, places)
    return None if found is None else (found, places.shape)


def _steps(table: np.ndarray) -> Optional[tuple[int, int, int]]:
    """The first number of a table and the steps along both of its dims, if it is one."""
    start = int(table[0, 0])
    down, along = (int(t[1] - start) if len(t) > 1 else 0 for t in (table[:, 0], table[0]))
    rows, columns = (np.arange(n) for n in table.shape)
    same = (table == start + down * rows[:, None] + along * columns).all()
    return (start, down, along) if same else None


def _fits(columns: int, features: int) -> bool:
    return not columns % 32 and not features % 16 and columns <= MOST_COLUMNS and features <= MOST_FEATURES


class Tiles:
    """The products of a pass.

    Args:
        writer: has the pass's registers.
    """

    def __init__(self, writer):
        self.writer = writer
        self.features: list[Features] = []
        self.products: list[Product] = []
        self.found: dict[int, Optional[tuple]] = {}  # what a sum of products is made of, by the id of the item
        self.outers: list[tuple[Outer, Total]] = []
        self.gradients: list[tuple[Gradient, Item]] = []
        self.staged: dict[int, tuple[Rows, list[str], Item]] = {}  # by the id of the item

    @property
    def sub_warp(self) -> int:
        """The lanes of a sub-warp."""
        return max(4, 1 << (self.writer.lanes - 1).bit_length())

    @property
    def most_edges(self) -> int:
        """The most edges of a sub-warp that may be in flight: a tile's, if there are tiles."""
        return self.sub_warp // 2 if self.used else 4

    @property
    def used(self) -> bool:
        """Whether the pass has such products."""
        return bool(self.products or self.outers or self.gradients)

    # What there is ---------------------------------------------------------------------------------------------------

    def snapshot(self):
        return len(self.features), len(self.products), [(p, p.rows.own) for p in self.products]

    def restore(self, saved) -> None:
        features, products, owns = saved
        del self.features[features:], self.products[products:]
        for product, own in owns:
            product.rows.own = own

    def features_of(self, operand: Operand, start: int, count: int) -> Features:
        for known in self.features:
            if known.operand is operand and (known.start, known.count) == (start, count):
                return known
        self.writer.uses_id = True
        self.features.append(Features(operand, start, count, self.writer.name("e")))
        return self.features[-1]

    def matrix_of(self, param: Operand, table: np.ndarray) -> Optional[Matrix]:
        """A parameter's elements ``[columns, features]`` as a matrix."""
        base, places = self.writer.base_of(param)
        steps = _steps(places[table])
        return None if steps is None or base.dtype not in _FLOATS else Matrix(base, *steps)

    def _product(self, item: Reduce) -> Optional[tuple[Operand, int, int, Matrix]]:
        found = reduced_of(item)
        if found is None or self.writer.lanes > 32 or not _fits(*found[1]):
            return None
        factors, (columns, count) = found
        edge = [f for f in factors if _is(f[0], "edge")]
        param = [f for f in factors if _is(f[0], "param")]
        if not edge or not param:
            return None
        (operand, table), (weights, of) = edge[0], param[0]
        start = int(table[0, 0])
        if (table != start + np.arange(count)).any() or start % 4 or operand.numel % 4:
            return None
        matrix = self.matrix_of(weights, of)
        return None if matrix is None else (operand, start, count, matrix)

    def product(self, item: Reduce) -> Optional[Product]:
        """The product that an item is, if it is one."""
        if id(item) not in self.found:
            self.found[id(item)] = self._product(item)
        if self.found[id(item)] is None:
            return None
        operand, start, count, matrix = self.found[id(item)]
        features = self.features_of(operand, start, count)
        for known in self.products:
            if known.features is features and known.rows.columns == item.numel and _same(known.matrix, matrix):
                return known
        self.products.append(Product(features, matrix, self._rows(item.numel)))
        return self.products[-1]

    def _rows(self, columns: int) -> Rows:
        return Rows(columns, self.writer.name("kRows"))

    def own_table(self, columns: int) -> np.ndarray:
        """The elements of a row that each lane has, if all have equally many."""
        lanes = self.writer.lanes
        return np.arange(columns).reshape(lanes, -1) if columns % lanes == 0 else np.zeros((0, 0), np.int64)

    def value(self, product: Product, table: np.ndarray) -> Value:
        """Elements of a product."""
        rows, own, names = product.rows, self.own_table(product.rows.columns), []
        rows.own &= table.shape == own.shape and bool((table == own).all())
        for first, count in runs_of(table, rows.columns):
            name, place = self.writer.name("g"), self.writer.place(table[:, first : first + 1], count)
            self.writer.lines[EDGE].append(f"Loaded<float, {count}> {name}; {name}.near({row_of(rows)} + {place});")
            names += [f"{name}[{i}]" for i in range(count)]
        return Value(names, EDGE)

    # Results ---------------------------------------------------------------------------------------------------------

    def outer(self, item: Item) -> Optional[Outer]:
        """The outer product that is summed over all edges, if a total is one."""
        factors = factors_of(item, np.arange(item.numel))
        if factors is None or self.writer.lanes > 32:
            return None
        for (operand, of), (values, at) in (factors, factors[::-1]):
            if not _is(operand, "edge") or values.dtype not in _FLOATS:
                continue
            columns, start, count = values.numel, int(of.min()), int(of.max() - of.min()) + 1
            if columns * count != item.numel or not _fits(columns, count) or item.numel > MOST_SUMS:
                continue
            pairs = at * count + of - start
            if start % 4 or operand.numel % 4 or columns % self.writer.lanes or len(np.unique(pairs)) != item.numel:
                continue
            return Outer(values, self.features_of(operand, start, count), _places(at, of - start, count))
        return None

    def gradient(self, item: Item) -> Optional[Gradient]:
        """The gradient of features that an item by edge is, if it is one."""
        terms = self._terms(item)
        return None if terms is None else Gradient(terms, item.numel)

    def _terms(self, item: Item) -> Optional[list[tuple[Item, Matrix]]]:
        count = item.numel
        item, table = follow(item, np.arange(count))
        if (table != np.arange(count)).any() or item.numel != count or self.writer.lanes > 32:
            return None
        if isinstance(item, Map) and item.op == "add" and item.dtype in _FLOATS:
            both = [self._terms(arg) for arg in item.args]
            return None if None in both else both[0] + both[1]
        found = reduced_of(item)
        if found is None or not _fits(*found[1][::-1]):
            return None
        factors, (_, columns) = found
        for (weights, of), (values, at) in (factors, factors[::-1]):
            if not _is(weights, "param") or values.numel != columns or values.dtype not in _FLOATS:
                continue
            matrix = self.matrix_of(weights, of.T)
            if matrix is not None and (at == np.arange(columns)).all() and not columns % self.writer.lanes:
                return [(values, matrix)]
        return None

    def stage(self, item: Item) -> Rows:
        """The rows that lanes write an item's values to."""
        if id(item) not in self.staged:
            names = self.writer.value(item, self.own_table(item.numel)).names
            self.staged[id(item)] = self._rows(item.numel), names, item
        return self.staged[id(item)][0]

    def total(self, item: Item) -> Optional[Total]:
        """A sum over all edges, if it is an outer product."""
        outer = self.outer(item)
        if outer is None:
            return None
        outer.features.kept = True
        self.stage(outer.values)
        lanes = self.writer.lanes
        places = np.stack([outer.places // lanes, outer.places % lanes], 1)
        self.outers.append((outer, Total(item, item.numel // lanes, places, in_tiles=True)))
        return self.outers[-1][1]

    def result(self, item: Item) -> bool:
        """Whether an item by edge is a gradient of features, which is then computed as one."""
        gradient = self.gradient(item)
        if gradient is not None:
            for values, _ in gradient.terms:
                self.stage(values)
            self.gradients.append((gradient, item))
        return gradient is not None


def row_of(rows: Rows) -> str:
    """The row of edge ``u`` of a batch."""
    return f"tile_rows + {rows.name} + (place_ + u) * {rows.columns + PAD}"


def _same(a: Matrix, b: Matrix) -> bool:
    return a.key == b.key


def _places(column: np.ndarray, feature: np.ndarray, count: int) -> np.ndarray:
    """Where TileTotals::finish() of tiles.cuh leaves elements."""
    lane = column % 32 // 4 * 4 + feature % 8 // 2
    number = ((column // 32 * 2 + column % 4 // 2) * (count // 8) + feature // 8) * 4 + column % 2 * 2 + feature % 2
    return (number // 4 * 32 + lane) * 4 + number % 4
