"""Writes a walk as a function in C.

The function gets pointers and sizes and knows nothing of torch. Rows are cut into a fixed number of parts of about
equal work, which threads take in turn; sums over all edges are kept for each part and added in the order of the parts.
So the number of threads changes no bit. Within a row, edges are taken a tile of eight at a time: each statement runs
for all edges of a tile before the next one does, so that products read a matrix once for several edges.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Optional, Union

import torch

from ..front.ops import tolerance
from ..lowering.affine import Var
from ..lowering.items import NotLowered, Operand
from ..lowering.scalar_texts import TEXTS
from .driver import driver_text, parts_of
from .edges import Edges
from .loops import Accumulate, Arranged, Buffer, DrawLoop, EdgeResult, Fold, Let, Loop, Statement, Store, TotalArray
from .prelude import prelude
from .products import (
    Product,
    is_listed,
    listed_product_text,
    listed_total_text,
    product_text,
    single_products,
    total_text,
)
from .types import bytes_of, literal, memory_type, scalar_type, suffix
from .vectors import SELECTS, levels_of, vectors_of
from .winners import TEXT, finite_text

_TILE, _TILE_BYTES, _MOST_BYTES = 8, 48 << 10, 1 << 19


@dataclass
class CText:
    """A walk in C.

    Attributes:
        text: the text of a function ``int walk(void **pointers, const long *numbers)``, which returns 1 if an index is
            out of range, else 0.
        arranged: the loops, which give the order of the pointers: indptr, indices and ids (or NULL), the operands, for
            each fold with a node its result and its argument if it has one, the results by edge, the totals, workspace.
        workspace: the bytes of the workspace.
        parts: the number of parts into which rows are cut, and so the largest number of threads.

    ``numbers`` holds the numbers of rows, sources, destinations, edges and threads.
    """

    text: str
    arranged: Arranged
    workspace: int
    parts: int = 1


def c_code(arranged: Arranged, wide: bool, vector: int = 32) -> CText:
    """Writes a walk.

    Args:
        wide: whether ids are int64; else they are int32.
        vector: the bytes of a vector: 16, 32 or 64.
    Raises:
        NotLowered: the walk has a dtype or a size that is not supported.
    """
    return _Writer(arranged, wide, vector).run()


class _Writer(Edges):
    def __init__(self, arranged: Arranged, wide: bool, vector: int):
        self.arranged, self.wide, self.vector = arranged, wide, vector
        self.lines: list[str] = []
        self.depth = 1
        self.operands = {operand: f"x{i}" for i, operand in enumerate(arranged.operands)}
        self.winners = arranged.winners
        self.sparse = [b for b in arranged.buffers if b.sparse and b.scope == "edge"] if self.winners else []
        self.results = {result: f"r{i}" for i, result in enumerate(arranged.by_edge)}
        self.folds = [fold for each in arranged.passes for fold in each.folds]
        per_edge = sum(b.numel * bytes_of(b.dtype) for b in arranged.buffers if b.scope == "edge")
        self.tile = _TILE
        while self.tile > 1 and self.tile * per_edge > _TILE_BYTES:
            self.tile //= 2
        rows = sum(b.numel * max(bytes_of(b.dtype), 16) for b in arranged.buffers if b.scope != "total")
        if self.tile * per_edge + rows > _MOST_BYTES:
            raise NotLowered("arrays of an edge that are too large")

    def run(self) -> CText:
        offsets, offset = {}, 0
        for total in self.arranged.totals:
            offsets[total] = offset
            offset += 2 * ((bytes_of(total.array.dtype) * total.array.numel + 63) // 64 * 64)
        body = self.part(offsets, offset)
        ids = f"typedef {'long' if self.wide else 'int'} el_index;"
        head, dense = [prelude(self.vector), ids], "1"
        if self.winners:
            places = {name: place for name, _, place in self.pointers()}
            head, dense = [*head, TEXT, *finite_text(self.arranged, self.operands, places)], "!el_finite(P, N)"
        text = "\n".join([*head, *body, *driver_text(offsets, offset, 3 + len(self.pointers()), dense)])
        return CText(text + "\n", self.arranged, parts_of(offset) * offset, parts_of(offset))

    # Text -----------------------------------------------------------------------------------------------------------

    def line(self, text: str) -> None:
        self.lines.append("  " * self.depth + text)

    def begin(self, text: str) -> None:
        self.line(text + " {")
        self.depth += 1

    def end(self) -> None:
        self.depth -= 1
        self.line("}")

    # One part of the rows -------------------------------------------------------------------------------------------

    def part(self, offsets: dict, size: int) -> list[str]:
        self.lines = ["static int el_part(void **P, const long *N, long first, long last, char *W, const int dense) {"]
        self.line("const long n_source = N[1], n_destination = N[2], n_edge = N[3]; int bad = 0; long since = 0;")
        self.line("const long *ptr = P[0]; const el_index *near_ = P[1], *ids = P[2];")
        for name, what, operand in self.pointers():
            self.line(f"{what} *{name} = P[{operand}];")
        for array, offset in offsets.items():
            name, kind = array.array.name, memory_type(array.array.dtype)
            step = (bytes_of(array.array.dtype) * array.array.numel + 63) // 64 * 64
            self.line(f"{kind} *{name} = ({kind} *)(W + {offset}), *{name}_all = ({kind} *)(W + {offset + step});")
        if size:
            self.line(f"memset(W, 0, {size});")
        for result, name in self.results.items():
            size = result.numel * bytes_of(result.dtype)
            self.line(f"const int {name}_streams = el_streams({name}, n_edge * {size});")
        for b in self.arranged.buffers:
            kind = memory_type(b.dtype)
            if b.scope == "edge":
                self.line(f"{kind} {b.name}[{self.tile}][{b.numel}] __attribute__((aligned(64)));")
                self.line(f"memset({b.name}, 0, sizeof {b.name});")
                if b in self.sparse:
                    self.line(f"int {b.name}_n[{self.tile}], {b.name}_k[{self.tile}][{b.numel + 1}];")
            elif b.scope in ("row", "fold"):
                self.line(f"{kind} {b.name}[{b.numel}] __attribute__((aligned(64)));")
        for fold in self.folds:
            if fold.argument is not None:
                self.line(f"int {fold.best.name}_n[{fold.best.numel}], {fold.best.name}_p[{fold.best.numel}];")
        self.begin("for (long i = first; i < last; ++i)")
        self.line("const long begin = ptr[i], end = ptr[i + 1];")
        for operand, name in self.operands.items():
            if operand.kind == "own":
                self.line(f"const {memory_type(operand.dtype)} *{name}_i = {name} + i * {operand.numel};")
        for statement in self.arranged.first:
            self.statement(statement)
        for number, each in enumerate(self.arranged.passes):
            for fold in each.folds:
                self.start(fold)
            if each.edge:
                self.edges(each.edge, number == 0)
            for fold in each.folds:
                self.finish(fold)
            for statement in each.row:
                self.statement(statement)
        self.end()
        self.flush("1")
        if self.results:
            self.line("EL_FENCE();")
        self.line("return bad;")
        self.lines.append("}")
        return self.lines

    def pointers(self) -> list[tuple[str, str, int]]:
        """(name, type, index) of the pointers behind those of the graph."""
        found = [(name, f"const {memory_type(operand.dtype)}") for operand, name in self.operands.items()]
        for fold in self.folds:
            if fold.node is not None:
                found.append((f"{fold.best.name}_out", memory_type(fold.best.dtype)))
                if fold.argument is not None:
                    found.append((f"{fold.argument.name}_out", "long"))
        found += [(name, memory_type(result.dtype)) for result, name in self.results.items()]
        return [(name, kind, 3 + i) for i, (name, kind) in enumerate(found)]

    def flush(self, condition: str) -> None:
        if not self.arranged.totals:
            return
        self.begin(f"if ({condition})")
        self.line("since = 0;")
        for array in self.arranged.totals:
            name = array.array.name
            self.line(f"for (long k = 0; k < {array.array.numel}; ++k)")
            self.line(f"  {name}_all[k] += {name}[k], {name}[k] = 0;")
        self.end()

    # Folds ----------------------------------------------------------------------------------------------------------

    def start(self, fold: Fold) -> None:
        name, kind = fold.best.name, fold.best.dtype
        if fold.op in ("sum", "prod"):
            value = literal(fold.op == "prod", kind)
        elif kind.is_floating_point:
            value = literal(-math.inf if fold.op == "amax" else math.inf, kind)
        else:
            value = literal(torch.iinfo(kind).max if fold.op == "amin" else -torch.iinfo(kind).max, kind)
        count = f"{name}_n[k] = 0; {name}_p[k] = 0;" if fold.argument is not None else ""
        self.line(f"for (int k = 0; k < {fold.best.numel}; ++k) {{ {name}[k] = {value}; {count} }}")

    def finish(self, fold: Fold) -> None:
        name, n = fold.best.name, fold.best.numel
        if fold.op in ("amax", "amin"):
            self.line(f"if (begin == end) for (int k = 0; k < {n}; ++k) {name}[k] = 0;")
        if fold.argument is not None:
            self.begin(f"for (int k = 0; k < {n}; ++k)")
            self.line(f"const int count = begin < end && {name}[k] == {name}[k] ? {name}_n[k] : 1;")
            self.line(f"const long at = begin + {name}_p[k];")
            self.line(f"{fold.argument.name}[k] = count & 1 ? -(long)(count >> 1) : (ids ? (long)ids[at] : at);")
            self.end()
        if fold.node is not None:
            for b in filter(None, (fold.best, fold.argument)):
                self.line(f"memcpy({b.name}_out + i * {n}, {b.name}, sizeof {b.name});")

    # Statements -----------------------------------------------------------------------------------------------------

    def statement(self, statement: Statement) -> None:
        if isinstance(statement, DrawLoop):
            self.draw(statement)
            return
        products = single_products(statement, self.vector) if self.on_edges(statement) else None
        texts = [self.product(*each) for each in products or ()]
        if texts and all(texts):
            for line in (line for text in texts for line in text):
                self.line(line)
            return
        on_edges, start = self.on_edges(statement), 0
        vectors = vectors_of(statement, self.vector)
        if vectors is not None:
            self.vectors(vectors, on_edges)
            start = vectors.extent
            if start == vectors.along.extent:
                return
        if on_edges:
            self.begin("for (int s = 0; s < u; ++s)")
        self.loop(statement, start)
        if on_edges:
            self.end()

    def on_edges(self, loop: Loop) -> bool:
        end = loop.ends[0]
        return not (isinstance(end, Store) and isinstance(end.into, Buffer) and end.into.scope == "row")

    def product(self, loop: Loop, product: Product) -> list[str]:
        """A product by vectors, or nothing."""
        end = loop.ends[0]
        left = lambda s, i: self.at(product.left, i, s)  # noqa: E731
        right = lambda s, i: self.at(product.right, i, s)  # noqa: E731
        if isinstance(end, Store) and isinstance(end.into, Buffer):
            into = lambda s, i: self.at(end.into, i, s)  # noqa: E731
            if product.left in self.sparse and is_listed(loop, product):
                return listed_product_text(loop, product, into, right)
            return product_text(loop, product, self.tile, into, left, right)
        if isinstance(end, Accumulate) and isinstance(end.into, TotalArray) and end.dynamic is None:
            if product.left in self.sparse and is_listed(loop, product):
                return listed_total_text(loop, product, end.into.array.name, right)
            return total_text(loop, product, end.into.array.name, left, right)
        return []

    def draw(self, statement: DrawLoop) -> None:
        draw, into = statement.draw, statement.into
        keep = f"{literal(1, into.dtype)} / {literal(1 - draw.p, into.dtype)}" if draw.p < 1 else literal(0, into.dtype)
        self.begin("for (int s = 0; s < u; ++s)")
        self.begin(f"for (long g = 0; g < {(into.numel + 3) // 4}; ++g)")
        self.line("unsigned long lanes[4];")
        key = draw.key << 24
        self.line(f"el_philox(*{self.operands[draw.seed]}, id[s], g + {key}L, lanes);")
        self.line(f"for (long k = 0; k < 4 && 4 * g + k < {into.numel}; ++k)")
        threshold = int(draw.p * 2**32)
        self.line(f"  {into.name}[s][4 * g + k] = lanes[k] >= {threshold}ul ? {keep} : {literal(0, into.dtype)};")
        self.end()
        self.end()

    def at(self, memory: Union[Operand, Buffer, EdgeResult], index: str, s: str = "s") -> str:
        """The text of an element of memory; ``s`` is the index of the edge in its tile."""
        if isinstance(memory, EdgeResult):
            return f"({self.results[memory]} + id[{s}] * {memory.numel})[{index}]"
        if isinstance(memory, Buffer):
            return f"{memory.name}[{s}][{index}]" if memory.scope == "edge" else f"{memory.name}[{index}]"
        name = self.operands[memory]
        if memory.kind == "param":
            return f"{name}[{index}]"
        if memory.kind == "own":
            return f"{name}_i[{index}]"
        return f"({name} + {'j' if memory.kind == 'near' else 'id'}[{s}] * {memory.numel})[{index}]"

    def loop(self, loop: Loop, start: int = 0) -> None:
        """A loop over elements, of the last variable from ``start``."""
        order = [*loop.vars, *loop.reduced]
        levels = levels_of(loop)
        kept, kind = len(loop.vars), ""
        if loop.reduced:
            dtype = next(let.dtype for let in loop.body if let.name == loop.value)
            kind = scalar_type(dtype)
        for depth in range(len(order) + 1):
            if depth:
                v = order[depth - 1]
                if depth == len(order) and v.extent > 1:
                    self.pragma(loop, v)
                first = start if depth == len(loop.vars) else 0
                self.begin(f"for (long {v.name} = {first}; {v.name} < {v.extent}; ++{v.name})")
            for let in levels[depth]:
                self.let(let)
            if loop.reduced and depth == kept:
                self.line(f"{kind} sum = {self.identity(loop.op, dtype)};")
        if loop.reduced:
            self.line(f"sum = {TEXTS[loop.op].format('sum', loop.value, m='')};")
            for _ in loop.reduced:
                self.end()
        for end in loop.ends:
            self.loop_end(end, "sum" if loop.reduced else None)
        for _ in loop.vars:
            self.end()

    def pragma(self, loop: Loop, v: Var) -> None:
        """Lets the compiler vectorise the innermost loop, which has no dependences."""
        scattered = any(isinstance(end, Accumulate) and end.dynamic for end in loop.ends)
        if loop.reduced:
            if loop.op in ("add", "mul"):
                self.line(f'_Pragma("omp simd reduction({"+" if loop.op == "add" else "*"}:sum)")')
        elif not scattered and not any(let.dynamic for let in loop.body):
            self.line('_Pragma("omp simd")')

    def identity(self, op: str, dtype: torch.dtype) -> str:
        if op in ("add", "mul"):
            return literal(op == "mul", dtype)
        if dtype.is_floating_point:
            return literal(-math.inf if op == "max" else math.inf, dtype)
        return literal(-torch.iinfo(dtype).max if op == "max" else torch.iinfo(dtype).max, dtype)

    def let(self, let: Let) -> None:
        self.line(f"const {scalar_type(let.dtype)} {let.name} = {self.expression(let)};")

    def expression(self, let: Let) -> str:
        if let.op == "number":
            value, size = let.args
            if size is not None:
                return f"({scalar_type(let.dtype)})({value}L * n_{size})"
            return literal(value, let.dtype)
        if let.op == "edge":
            return {"id": "id[s]", "own": "i", "near": "j[s]"}[let.args[0]]
        if let.op == "load":
            index = let.index.text()
            if let.dynamic is not None:
                name, extent = let.dynamic.name, let.dynamic.extent
                self.line(f"bad |= (unsigned long){name} >= {extent}ul;")
                index += f" + ((unsigned long){name} < {extent}ul ? {name} : 0) * {let.dynamic.stride}"
            return self.at(let.args[0], index)
        text = SELECTS.get(let.op, TEXTS[let.op]) if let.dtype.is_floating_point else TEXTS[let.op]
        return text.format(*let.args, m=suffix(let.dtype), type=scalar_type(let.dtype))

    def loop_end(self, end: Union[Store, Accumulate], value: Optional[str]) -> None:
        value = value or end.value
        index = end.index.text()
        if isinstance(end, Store):
            self.line(f"{self.at(end.into, index)} = {value};")
        elif isinstance(end.into, TotalArray):
            if end.dynamic is not None:
                name, extent = end.dynamic.name, end.dynamic.extent
                self.line(f"bad |= (unsigned long){name} >= {extent}ul;")
                index += f" + ((unsigned long){name} < {extent}ul ? {name} : 0) * {end.dynamic.stride}"
            self.line(f"{end.into.array.name}[{index}] += {value};")
        else:
            self.accumulate(end.into, index, value)

    def accumulate(self, fold: Fold, index: str, value: str) -> None:
        at = f"{fold.best.name}[{index}]"
        if fold.op in ("sum", "prod"):
            self.line(f"{at} {'+' if fold.op == 'sum' else '*'}= {value};")
            return
        sign = ">" if fold.op == "amax" else "<"
        if fold.argument is None:
            op = "max" if fold.op == "amax" else "min"
            text = SELECTS[op] if fold.best.dtype.is_floating_point else TEXTS[op]
            self.line(f"{at} = {text.format(value, at, m=suffix(fold.best.dtype))};")
            return
        # n: twice the number of edges within the tolerance of the extremum, plus 1 if several equal it.
        n, p, m = f"{fold.best.name}_n[{index}]", f"{fold.best.name}_p[{index}]", suffix(fold.best.dtype)
        least = literal(tolerance(fold.best.dtype), fold.best.dtype)
        self.line(f"{{ const int more = ({value} {sign} {at}) | ({value} != {value}), same = {value} == {at};")
        self.line(f"  const int near = fabs{m}({value} - {at}) < {least} * fabs{m}({at});")
        kept = f"({n} & ((more - 1) | (-near & -2)))"  # a larger extremum keeps the count of edges within its tolerance
        self.line(f"  {n} = ({kept} + ((more | same | near) << 1)) | same;")
        self.line(f"  {at} = el_where{m}(more, {value}, {at});")
        self.line(f"  {p} = more | same ? (int)(p0 - begin) + s : {p}; }}")
