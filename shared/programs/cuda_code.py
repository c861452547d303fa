"""Walks as CUDA: the text of the functor that core_cuda/programs/walk.cuh runs, written from items.

The elements of a value are spread over the lanes of a sub-warp. A value is computed at a table ``[lanes, n]``, which
says which of its elements each lane computes in its n registers; one row stands for all lanes alike. A table of a
result gives tables of its operands, through views as well, so that only operands in memory, and sums across lanes, know
about lanes. What a table has twice is computed once.

A statement runs as rarely as its operands allow: once for a thread, at the start of a row, or for an edge. Operands
that edges gather are loaded for several edges ahead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from .affine import strides_of
from .cuda_operands import Registers, TooManyKept, TooMuchShared
from .cuda_parts import (
    EDGE,
    MOST_REGISTERS,
    ONCE,
    ROW,
    Stage,
    Text,
    Value,
    literal,
    stored_type,
    value_type,
)
from .cuda_products import EdgeProducts
from .cuda_tiles import Tiles
from .items import (
    Assemble,
    Draw,
    EdgeNumber,
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
from .lane_tables import distinct, flat, group_of, unflat
from .scalar_texts import TEXTS


def write(stage: Stage, by_lanes: bool = False) -> Text:
    """The text of a pass, with as many values to a lane as loads of 16 bytes have, or more where lanes are too few.

    Args:
        by_lanes: whether each lane computes its part of products by edge alone.
    Raises:
        NotLowered: it cannot be written.
    """
    width, size = stage.frame()
    error = None
    for per in _divisors(width, max(16 // size, 1)):
        for keep, share in ((True, False), (False, True), (False, False)):
            writer = _Writer(stage, width // per, per, keep, share)
            writer.edge_products.wanted = not by_lanes
            try:
                return writer.text()
            except (TooManyKept, TooMuchShared):
                continue
            except NotLowered as found:
                error = error or found
                break
    raise error or NotLowered("more registers than a thread has")


def _divisors(width: int, best: int) -> list[int]:
    """Values of a lane, the best first, then more, so that a row fits into one sub-warp, then fewer."""
    found = [n for n in range(1, width + 1) if width % n == 0]
    first = max(n for n in found if best % n == 0)
    return [first, *(n for n in found if first < n <= 16), *(n for n in reversed(found) if n < first)]


class _Writer(Registers):
    """Values that are computed, and the text of all."""

    def __init__(self, *args):
        super().__init__(*args)
        self.tiles, self.edge_products = Tiles(self), EdgeProducts(self)

    @property
    def argument_type(self) -> str:
        """That of the edge that an extremum comes from."""
        return "I" if self.edge_products.used else "int64_t"

    def snapshot(self):
        return super().snapshot(), self.tiles.snapshot()

    def restore(self, saved) -> None:
        super().restore(saved[0])
        self.tiles.restore(saved[1])

    # Values ----------------------------------------------------------------------------------------------------------

    def value(self, item: Item, table: np.ndarray) -> Value:
        """The registers of an item at a table."""
        if table.shape[0] > 1 and (table == table[:1]).all():
            table = table[:1]
        firsts, places = distinct(table)
        if len(firsts) < table.shape[1]:
            found = self.value(item, table[:, firsts])
            return Value([found.names[p] for p in places], found.when)
        if table.shape[1] > MOST_REGISTERS:
            raise NotLowered(f"a value of {table.shape[1]} registers")
        if self.share and isinstance(item, Operand) and item.kind == "param":
            return self._operand(item, table)
        key = (id(item), table.shape, table.tobytes())
        if key not in self.memo:
            self.kept.append(item)
            found = self.edge_products.value(item, table)
            self.memo[key] = found or getattr(self, f"_{type(item).__name__.lower()}")(item, table)
        return self.memo[key]

    def _number(self, item: Number, table: np.ndarray) -> Value:
        text = literal(item.value, item.dtype)
        if item.size is not None:
            place = ("source", "destination", "edge").index(item.size)
            text = f"({value_type(item.dtype)}({item.value!r}) * args.sizes[{place}])"
        return Value([text] * table.shape[1], ONCE)

    def _map(self, item: Map, table: np.ndarray) -> Value:
        if self.edge_products.chooses(item):
            condition, usual = (self.value(each, table) for each in item.usual)
            self.lines[EDGE] += [f"seldom |= !({name});" for name in condition.names]
            return usual
        args = [self.value(arg, table) for arg in item.args]
        kind = value_type(item.dtype)
        of = item.args[-1].dtype if item.op != "cast" else item.dtype
        double = "" if of is torch.float64 else "f"
        texts = [
            TEXTS[item.op].format(*names, m=double, type=kind, stored=stored_type(item.dtype))
            for names in zip(*(a.names for a in args), strict=True)
        ]
        if item.op == "div" and kind == "float":
            above, below = args
            if above.when == EDGE and below.when <= ROW and not isinstance(item.args[1], Number):
                below = self.reciprocals(below)
                texts = [f"{a} * {b}" for a, b in zip(above.names, below.names)]
            else:
                texts = [f"__fdividef({a}, {b})" for a, b in zip(above.names, below.names)]
        return self.let(max(a.when for a in args), kind, texts)

    def reciprocals(self, value: Value) -> Value:
        """One over a value that is the same for all edges of a row, computed as rarely."""
        key = ("reciprocals", *value.names)
        if key not in self.memo:
            self.memo[key] = self.let(value.when, "float", [f"1.0f / {name}" for name in value.names])
        return self.memo[key]

    def _view(self, item: View, table: np.ndarray) -> Value:
        return self.value(item.base, flat(item.at(unflat(table, item.shape)), item.base.shape, table.shape))

    def _reshape(self, item: Reshape, table: np.ndarray) -> Value:
        return self.value(item.base, table)

    def _rowread(self, item: RowRead, table: np.ndarray) -> Value:
        return self.value(item.row, table)

    def _edgenumber(self, item: EdgeNumber, table: np.ndarray) -> Value:
        if item.which == "own" and self.phase is None:
            return Value(["own_row"] * table.shape[1], ROW)
        if item.which == "id":
            self.uses_id = True
        return Value([f"{item.which}_[u]"] * table.shape[1], EDGE)

    def _draw(self, item: Draw, table: np.ndarray) -> Value:
        seed = self.value(item.seed, np.zeros((1, 1), np.int64)).names[0]
        self.uses_id = True
        kind, zero = value_type(item.dtype), literal(0.0, item.dtype)
        scale = literal(1 / (1 - item.p) if item.p < 1 else 0.0, item.dtype)
        drawn: dict[bytes, str] = {}
        texts = []
        for c in range(table.shape[1]):
            column = table[:, c : c + 1]
            group = (column // 4).tobytes()
            if group not in drawn:
                drawn[group] = self.name("t")
                at = self.place(column // 4, 1)
                self.lines[EDGE].append(
                    f"const Philox4 {drawn[group]} = philox({seed}, id_[u], {at} + {item.key << 24}u);"
                )
            lane = column % 4
            draw = f".lane[{lane[0, 0]}]" if (lane == lane[0]).all() else f".of({self.place(lane, 1)})"
            texts.append(f"{drawn[group]}{draw} >= {int(item.p * 2**32)}ULL ? {scale} : {zero}")
        return self.let(EDGE, kind, texts)

    def _assemble(self, item: Assemble, table: np.ndarray) -> Value:
        index = unflat(table, item.shape)
        owner = np.full(table.shape, -1)
        inner = np.zeros(table.shape, np.int64)
        for number, (piece, starts, steps) in enumerate(item.pieces):
            at, inside = [], np.ones(table.shape, bool)
            for i, start, step, extent in zip(index, starts, steps, piece.shape):
                place = (i - start) // step
                inside &= (i >= start) & ((i - start) % step == 0) & (place < extent)
                at.append(np.clip(place, 0, max(extent - 1, 0)))
            owner = np.where(inside, number, owner)
            inner = np.where(inside, flat(at, piece.shape, table.shape), inner)
        if item.fill is None and (owner < 0).any():
            raise NotLowered("an array that its parts do not fill")
        parts: dict[int, list[tuple[int, str]]] = {}
        values: dict[int, Value] = {}
        for number in np.unique(owner):
            mine = owner == number
            columns = np.flatnonzero(mine.any(0))
            if number < 0:
                values[number] = Value([literal(item.fill.value, item.dtype)] * len(columns), ONCE)
            else:
                at = inner[:, columns]
                rows = mine[:, columns].argmax(0)
                at = np.where(mine[:, columns], at, at[rows, np.arange(len(columns))])
                values[number] = self.value(item.pieces[number][0], at)
            for i, c in enumerate(columns):
                parts.setdefault(int(c), []).append((int(number), values[number].names[i]))
        texts = []
        for c in range(table.shape[1]):
            text = parts[c][0][1]
            for number, name in parts[c][1:]:
                text = f"({self.among(owner[:, c] == number)} ? {name} : {text})"
            texts.append(text)
        when = max(v.when for v in values.values())
        if all(len(p) == 1 for p in parts.values()):
            return Value(texts, when)
        return self.let(when, value_type(item.dtype), texts)

    def among(self, lanes: np.ndarray) -> str:
        """The condition that a lane is one of these."""
        found = np.flatnonzero(lanes)
        if len(found) == found[-1] - found[0] + 1:
            return f"(some >= {found[0]} && some <= {found[-1]})"
        if len(lanes) > 32:
            raise NotLowered("parts of an array that alternate over a wide row")
        return f"({sum(1 << int(lane) for lane in found):#x}u >> some & 1)"

    def _lookup(self, item: Lookup, table: np.ndarray) -> Value:
        base = item.base
        while isinstance(base, Reshape) and base.shape == base.base.shape:
            base = base.base
        if not isinstance(base, Operand) or base.kind != "param":
            raise NotLowered("a lookup in something that is computed")
        at, of = item.at(unflat(table, item.shape))
        index = self.value(item.index, flat(of, item.index.shape, table.shape))
        start, pointer = flat(at, base.shape, table.shape), self.pointer(base)
        extent, stride = base.shape[item.dim], math.prod(base.shape[item.dim + 1 :])
        texts = []
        for c in range(table.shape[1]):
            place = self.place(start[:, c : c + 1], 1)
            texts.append(f"value_of(__ldg({pointer} + {place} + within({index.names[c]}, {extent}) * {stride}))")
        return self.let(index.when, value_type(base.dtype), texts)

    # Sums over items -------------------------------------------------------------------------------------------------

    def _reduce(self, item: Reduce, table: np.ndarray) -> Value:
        product = None if self.edge_products.used else self.tiles.product(item)
        if product is not None:
            return self.tiles.value(product, table)
        base = item.base
        extents = [base.shape[d] for d in item.dims]
        strides = strides_of(base.shape)
        offsets = np.zeros(1, np.int64)
        for d, extent in zip(item.dims, extents):
            offsets = (offsets[:, None] + np.arange(extent) * strides[d]).ravel()
        starts = flat(unflat(table, item.shape), base.shape, table.shape)  # reduced dims have index 0
        ways = [self._in_lane]
        if self.lanes > 1 and len(offsets) > 4:
            ways += [self._across, self._shared_out]
        return self.cheapest([lambda way=way: way(item, starts, offsets) for way in ways])

    def cheapest(self, ways: Sequence[Callable]):
        """The result of the way that writes the least, of those that can be written."""
        if len(ways) == 1:
            return ways[0]()
        best, errors, saved = None, [], self.snapshot()
        for way in ways:
            try:
                way()
            except NotLowered as found:
                errors.append(found)
            else:
                if best is None or self.cost() < best[0]:
                    best = self.cost(), way
            self.restore(saved)
        if best is None:
            raise next((e for e in errors if isinstance(e, (TooManyKept, TooMuchShared))), errors[0])
        return best[1]()

    def cost(self) -> int:
        """About how much an edge costs so far."""
        exchanges = sum("lanes_" in line for line in self.lines[EDGE])
        return self.extra + 8 * len(self.load) + len(self.lines[EDGE]) + 10 * exchanges + len(self.lines[ROW]) // 8

    def _in_lane(self, item: Reduce, starts: np.ndarray, offsets: np.ndarray) -> Value:
        """Each lane reduces all that its elements are made of."""
        count = starts.shape[1]
        at = (starts[:, None, :] + offsets[None, :, None]).reshape(starts.shape[0], -1)
        return self.combined(item, self.value(item.base, at), count)

    def combined(self, item: Reduce, found: Value, count: int) -> Value:
        kind = value_type(item.dtype)
        texts = found.names[:count]
        for r in range(1, len(found.names) // count):
            step = [self.both(item.op, t, found.names[r * count + c], kind) for c, t in enumerate(texts)]
            last = r + 1 == len(found.names) // count
            if last or item.op != "add":
                texts = self.let(found.when, kind, step).names
            else:
                texts = self.let(found.when, kind, step).names if found.when == EDGE else step
        return Value(list(texts), found.when)

    @staticmethod
    def both(op: str, a: str, b: str, kind: str) -> str:
        if op in ("add", "mul"):
            return f"{a} {'+' if op == 'add' else '*'} {b}"
        return TEXTS[op].format(a, b)

    def _across(self, item: Reduce, starts: np.ndarray, offsets: np.ndarray) -> Value:
        """The lanes that need an element reduce it together."""
        if self.lanes > 32:
            raise NotLowered("a sum over a row of several sub-warps")
        lanes, count, whole = self.lanes, len(offsets), starts.shape[0] == 1
        group = lanes
        if not whole:
            group = group_of(starts)
            if group < 2 or group & (group - 1) or lanes % group:
                raise NotLowered("a sum across lanes that do not lie together")
            whole = group == lanes
        if count % group:
            raise NotLowered(f"a sum of {count} over {group} lanes")
        share = count // group
        mine = offsets.reshape(group, share)[np.arange(lanes) % group]  # [lanes, share]
        starts = np.broadcast_to(starts, (lanes, starts.shape[1]))
        at = (starts[:, None, :] + mine[:, :, None]).reshape(lanes, -1)
        found = self.combined(item, self.value(item.base, at), starts.shape[1])
        kind = value_type(item.dtype)
        if kind not in ("float", "double"):
            raise NotLowered("a reduction of integers across lanes")
        if whole and group & (group - 1):  # lanes outside of the row take part
            group = 1 << (lanes - 1).bit_length()
        identity = {"add": "0", "mul": "1", "max": "-INFINITY", "min": "INFINITY"}[item.op]
        masked = [name if lanes == group else f"inside ? {name} : {kind}({identity})" for name in found.names]
        when = max(found.when, ROW)
        sub_warp = f"sub_warp<{'kWhole' if when == EDGE else 'false'}>()"
        return self.let(when, kind, [f"lanes_{item.op}<{group}>({m}, {sub_warp})" for m in masked])

    def _shared_out(self, item: Reduce, starts: np.ndarray, offsets: np.ndarray) -> Value:
        """Each lane reduces its part of all elements of all lanes, which then exchange them for their own."""
        lanes, count = self.lanes, len(offsets)
        if lanes > 32 or lanes & (lanes - 1) or lanes < 4 or starts.shape[0] == 1 or count % lanes or item.op != "add":
            raise NotLowered("elements that lanes cannot exchange")
        whole = starts.reshape(1, -1)  # of lane 0, of lane 1, ...
        mine = offsets.reshape(lanes, -1)
        at = (whole[:, None, :] + mine[:, :, None]).reshape(lanes, -1)
        found = self.combined(item, self.value(item.base, at), whole.shape[1])
        kind, name = value_type(item.dtype), self.name("x")
        if found.when != EDGE or kind not in ("float", "double") or whole.shape[1] > 64:
            raise NotLowered("elements that lanes cannot exchange")
        self.lines[EDGE] += [
            f"{kind} {name}[{whole.shape[1]}] = {{{', '.join(found.names)}}};",
            f"shares_add<{lanes}>({name}, sub_warp<kWhole>());",
        ]
        self.extra += 3 * whole.shape[1]
        return Value([f"{name}[{i}]" for i in range(starts.shape[1])], EDGE)

    # Results ---------------------------------------------------------------------------------------------------------

    def tables_of(self, item: Item) -> Iterable[np.ndarray]:
        """Tables by which lanes may hold all elements of an item."""
        n, lanes = item.numel, self.lanes
        if n % lanes == 0:
            yield np.arange(n).reshape(lanes, -1)
        elif lanes % n == 0:
            yield (np.arange(lanes) * n // lanes)[:, None]
        if n <= 64:
            yield np.arange(n)[None, :]

    def spread(self, item: Item, tables: Iterable[np.ndarray]) -> tuple[np.ndarray, Value]:
        """A value at the table at which it costs the least."""
        tables = list(tables)
        if not tables:
            raise NotLowered(f"a result of {item.numel} elements for {self.lanes} lanes")
        return self.cheapest([lambda table=table: (table, self.value(item, table)) for table in tables])

    def writer_lanes(self, table: np.ndarray) -> str:
        """The condition by which a lane writes its elements, of which others may have copies."""
        if table.shape[0] == 1:
            return "vector == 0"
        if self.lanes > table[:, 0].max() + 1 and table.shape[1] == 1:
            return f"inside && vector % {self.lanes // (int(table.max()) + 1)} == 0"
        return "inside"

    def text(self) -> Text:
        from .cuda_text import assemble_text

        return assemble_text(self)
