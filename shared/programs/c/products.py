"""Products of an item and a matrix, or of two items, by vectors whose sums stay in registers.

Compilers keep the sums of the plain loops in memory, which takes three times as long.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Optional, Union

import torch

from ..lowering.affine import Index, Var
from ..lowering.items import Operand
from .loops import Buffer, Let, Loop
from .types import bytes_of, scalar_type
from .vectors import of_an_edge, stride_of

_SUMS = {16: 8, 32: 8, 64: 16}  # by the bytes of a vector: how many are summed at a time, half of the CPU's registers


@dataclass
class Product:
    """A loop that multiplies an element of ``left`` by one of ``right``. Along the variable ``along``, the elements of
    ``right`` and the results are contiguous, and the element of ``left`` is the same.
    """

    left: Union[Operand, Buffer]
    left_index: Index
    right: Union[Operand, Buffer]
    right_index: Index
    along: Var
    dtype: torch.dtype
    size: int

    @property
    def vector(self) -> str:
        """The type of vectors."""
        return "el_vf" if self.dtype is torch.float32 else "el_vd"

    @property
    def width(self) -> int:
        """How many elements a vector has."""
        return self.size // bytes_of(self.dtype)


def single_products(loop: Loop, size: int) -> Optional[list[tuple[Loop, Product]]]:
    """A loop as loops that are a product each, or None if it is something else.

    Args:
        size: the bytes of a vector.
    """
    lets, found = {let.name: let for let in loop.body}, []
    for end in loop.ends:
        if loop.reduced:
            body = loop.body
        else:
            result = lets[end.value]
            body = [*(lets[a] for a in dict.fromkeys(result.args) if a in lets), result]
        each = Loop(loop.vars, loop.reduced, loop.op, loop.value, body, [end])
        found.append((each, product_of(each, size)))
    if any(product is None for _, product in found) or len({n.name for e, _ in found for n in e.body}) < len(lets):
        return None
    return found


def product_of(loop: Loop, size: int) -> Optional[Product]:
    """The product that a loop is, or None."""
    if len(loop.body) != 3 or len(loop.ends) != 1 or not loop.vars or loop.op not in ("", "add"):
        return None
    first, second, result = loop.body
    if result.op != "mul" or {first.name, second.name} != set(result.args) or loop.ends[0].value != result.name:
        return None
    along, index = loop.vars[-1], loop.ends[0].index
    if result.dtype not in (torch.float32, torch.float64) or along.extent < size // bytes_of(result.dtype):
        return None
    for left, right in ((first, second), (second, first)):
        strides = [stride_of(i, along) for i in (left.index, right.index, index)]
        if _is_load(left) and _is_load(right) and strides == [0, 1, 1]:
            return Product(left.args[0], left.index, right.args[0], right.index, along, result.dtype, size)
    return None


def _is_load(let: Let) -> bool:
    return let.op == "load" and let.dynamic is None and let.dtype.is_floating_point


def _plus(index: Index, along: Var, start: int) -> str:
    """The text of an index at ``along`` = ``start``."""
    factor = stride_of(index, along)
    rest = Index(tuple((v, f) for v, f in index.terms if v is not along), index.const)
    return (rest + factor * start).text()


def _blocks(product: Product, most: int) -> list[tuple[list[int], list[int]]]:
    """Splits columns into blocks: (starts of vectors, single columns)."""
    extent, width = product.along.extent, product.width
    whole = extent // width
    firsts = range(0, whole, most)
    blocks = [([v * width for v in range(first, min(first + most, whole))], []) for first in firsts]
    if extent % width:
        blocks.append(([], list(range(whole * width, extent))))
    return blocks


def product_text(loop: Loop, product: Product, tile: int, into: Callable, left: Callable, right: Callable) -> list[str]:
    """A product of each edge's item, reduced over the loop's reduced variables and stored.

    Args:
        into, left, right: functions from the index of an edge in its tile and an index to the text of an element.
    """
    kind, vector, most = scalar_type(product.dtype), product.vector, _SUMS[product.size]
    along, outer, index = product.along, loop.vars[:-1], loop.ends[0].index
    lines = []
    for vectors, singles in _blocks(product, most):
        count = len(vectors) or len(singles)
        edges = 1
        while edges * 2 <= tile and edges * 2 * count <= most:
            edges *= 2
        of, columns = (vector, vectors) if vectors else (kind, singles)
        cast = f"*({vector} *)&" if vectors else ""
        names = [[f"a{e}_{c}" for c in range(count)] for e in range(edges)]
        lines.append(f"for (int s = 0; s < u; s += {edges}) {{")
        lines += [_for(v) for v in outer]
        lines.append(f"  {of} " + ", ".join(f"{name} = {{0}}" for row in names for name in row) + ";")
        lines += [_for(v) for v in loop.reduced]
        shared = not of_an_edge(product.right)
        for c, start in enumerate(columns) if shared else ():
            lines.append(f"  const {of} w{c} = {cast}{right('s', _plus(product.right_index, along, start))};")
        for e in range(edges):
            lines.append(f"  {{ const {kind} l = {left(f's + {e}', product.left_index.text())};")
            for c, start in enumerate(columns):
                w = f"w{c}" if shared else cast + right(f"s + {e}", _plus(product.right_index, along, start))
                lines.append(f"    {names[e][c]} += l * ({w});")
            lines.append("  }")
        lines += ["}" for _ in loop.reduced]
        for e in range(edges):
            for c, start in enumerate(columns):
                lines.append(f"  {cast}{into(f's + {e}', _plus(index, along, start))} = {names[e][c]};")
        lines += ["}" for _ in outer]
        lines.append("}")
    return lines


def total_text(loop: Loop, product: Product, into: str, left: Callable, right: Callable) -> list[str]:
    """A product of two items, added to a sum over all edges; the loop has no reduced variables."""
    kind, vector, most = scalar_type(product.dtype), product.vector, _SUMS[product.size]
    along, index = product.along, loop.ends[0].index
    lines = [_for(v) for v in loop.vars[:-2]]
    rows = loop.vars[-2] if len(loop.vars) > 1 else None
    for vectors, singles in _blocks(product, most):
        of, columns = (vector, vectors) if vectors else (kind, singles)
        cast = f"*({vector} *)&" if vectors else ""
        together = _divisor(rows.extent, most // len(columns)) if rows is not None else 1
        if rows is not None:
            lines.append(f"for (long {rows.name} = 0; {rows.name} < {rows.extent}; {rows.name} += {together}) {{")

        sums = [(r, c, start) for r in range(together) for c, start in enumerate(columns)]
        places = {(r, c): f"{cast}{into}[{_plus(_moved(index, rows, r), along, start)}]" for r, c, start in sums}
        lines.append(f"{{ {of} " + ", ".join(f"a{r}_{c} = {places[r, c]}" for r, c, _ in sums) + ";")
        lines.append("for (int s = 0; s < u; ++s) {")
        for r in range(together):
            lines.append(f"  const {kind} l{r} = {left('s', _moved(product.left_index, rows, r).text())};")
        varies = rows is not None and stride_of(product.right_index, rows)
        for r, c, start in sums:
            if r == 0 or varies:
                place = _plus(_moved(product.right_index, rows, r), along, start)
                lines.append(f"  const {of} w{r}_{c} = {cast}{right('s', place)};")
            lines.append(f"  a{r}_{c} += l{r} * w{r if varies else 0}_{c};")
        lines.append("}")
        lines += [f"{places[r, c]} = a{r}_{c};" for r, c, _ in sums]
        lines.append("}" if rows is None else "} }")
    lines += ["}" for _ in loop.vars[:-2]]
    return lines


def is_listed(loop: Loop, product: Product) -> bool:
    """Whether a product goes over all elements of its left operand, once, and over one more variable."""
    others = [v for v in (*loop.vars, *loop.reduced) if v is not product.along]
    if [v.extent for v in others] != [product.left.numel]:
        return False
    return product.left_index == Index.of(others[0])


def listed_product_text(loop: Loop, product: Product, into: Callable, right: Callable) -> list[str]:
    """A product of each edge's item that has few elements, which are listed; see ``list_text`` of ``winners``."""
    name, (each,), index = product.left.name, loop.reduced, loop.ends[0].index
    lines = []
    for vectors, singles in _blocks(product, _SUMS[product.size]):
        of, columns = (product.vector, vectors) if vectors else (scalar_type(product.dtype), singles)
        cast = f"*({product.vector} *)&" if vectors else ""
        lines.append("for (int s = 0; s < u; ++s) {")
        lines.append(f"  {of} " + ", ".join(f"a{c} = {{0}}" for c in range(len(columns))) + ";")
        lines.append(f"  for (int q = 0; q < {name}_n[s]; ++q) {{")
        lines.append(f"    const long {each.name} = {name}_k[s][q];")
        for c, start in enumerate(columns):
            place = right("s", _plus(product.right_index, product.along, start))
            lines.append(f"    a{c} += {name}[s][{each.name}] * ({cast}{place});")
        lines.append("  }")
        for c, start in enumerate(columns):
            lines.append(f"  {cast}{into('s', _plus(index, product.along, start))} = a{c};")
        lines.append("}")
    return lines


def listed_total_text(loop: Loop, product: Product, into: str, right: Callable) -> list[str]:
    """A product of two items, the left one as above, added to a sum over all edges."""
    name, each, index = product.left.name, loop.vars[0], loop.ends[0].index
    lines = [f"for (int s = 0; s < u; ++s) for (int q = 0; q < {name}_n[s]; ++q) {{"]
    lines.append(f"  const long {each.name} = {name}_k[s][q];")
    for vectors, singles in _blocks(product, _SUMS[product.size]):
        cast = f"*({product.vector} *)&" if vectors else ""
        for start in vectors or singles:
            place = right("s", _plus(product.right_index, product.along, start))
            to = f"{cast}{into}[{_plus(index, product.along, start)}]"
            lines.append(f"  {to} += {name}[s][{each.name}] * ({cast}{place});")
    return [*lines, "}"]


def _moved(index: Index, rows: Optional[Var], step: int) -> Index:
    return index if rows is None else index + stride_of(index, rows) * step


def _divisor(extent: int, most: int) -> int:
    """The largest divisor of an extent that is at most ``most``."""
    return max(d for d in range(1, max(most, 1) + 1) if extent % d == 0)


def _for(v: Var) -> str:
    return f"for (long {v.name} = 0; {v.name} < {v.extent}; ++{v.name}) {{"
