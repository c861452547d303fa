"""Loops over elements of items by the vectors of GCC and Clang.

A compiler makes vectors of plain loops too, but it goes over all elements of an edge before the next edge. Here a
vector's edges come one after the other: what they add to stays in a register, and values of the row are loaded once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

import torch

from ..lowering.affine import Index, Var
from ..lowering.items import Operand
from ..lowering.scalar_texts import TEXTS
from .loops import Accumulate, Buffer, EdgeResult, Fold, Let, Loop, Store, TotalArray
from .types import bytes_of

# Selects by bits: GCC would compile a conditional expression to branches that load only the chosen operand.
SELECTS = {
    "where": "el_where{m}({0}, {1}, {2})",
    "max": "el_where{m}(({0} > {1}) | ({0} != {0}), {0}, {1})",
    "min": "el_where{m}(({0} < {1}) | ({0} != {0}), {0}, {1})",
}
_ALIKE = (  # ops whose text is the same for scalars and vectors
    *("add", "sub", "mul", "div", "neg", "abs", "lt", "le", "gt", "ge", "eq", "ne", "and", "or", "xor"),
    *("exp", "log", "log1p", "tanh", "sqrt"),
)
_TEXTS = {**{op: TEXTS[op] for op in _ALIKE}, **SELECTS, "not": "~{0}"}
_SELECT_OF_BOOLS = "(({0} & {1}) | (~{0} & {2}))"
_CHEAP = ("number", "edge", "load", "cast", "neg", "add", "sub", "mul")
_STREAMED = 128  # bytes of a row
_MOST_GUARDED = 80.0  # below which exp is finite in float32


def levels_of(loop: Loop) -> list[list[Let]]:
    """The scalars of a loop by how many of its variables they need, outermost first."""
    order = [*loop.vars, *loop.reduced]
    place = {v: d for d, v in enumerate(order)}
    depths: dict[str, int] = {}
    levels: list[list[Let]] = [[] for _ in range(len(order) + 1)]
    for let in loop.body:
        needs = [place[v] + 1 for v in let.index.variables]
        needs += [depths[a] for a in let.args if isinstance(a, str) and a in depths]
        needs += [depths[let.dynamic.name]] if let.dynamic else []
        depths[let.name] = max(needs, default=0)
        levels[depths[let.name]].append(let)
    return levels


def stride_of(index: Index, along: Var) -> int:
    """How far an index goes where a variable goes by 1."""
    return dict(index.terms).get(along, 0)


def of_an_edge(memory: Any) -> bool:
    """Whether memory differs from edge to edge of a row."""
    if isinstance(memory, Operand):
        return memory.kind in ("near", "edge")
    return isinstance(memory, EdgeResult) or (isinstance(memory, Buffer) and memory.scope == "edge")


@dataclass
class Vectors:
    """A loop that vectors can compute.

    Attributes:
        dtype: of its elements.
        along: the variable along vectors, the loop's last.
        width: how many elements a vector has.
        levels: the loop's scalars, see :func:`levels_of`; those of the last level are vectors.
        edges_inside: whether edges may go inside of the loop, since little is computed more than once then.
    """

    loop: Loop
    dtype: torch.dtype
    along: Var
    width: int
    levels: list[list[Let]]
    edges_inside: bool

    def __post_init__(self) -> None:
        self.lets = {let.name: let for let in self.loop.body}
        self.inner = {let.name for let in self.levels[-1]}
        self.users: dict[str, list[Any]] = {}
        for let in self.loop.body:
            for arg in {a for a in let.args if isinstance(a, str) and a in self.lets}:
                self.users.setdefault(arg, []).append(let)
        for end in self.loop.ends:
            self.users.setdefault(end.value, []).append(end)

    @property
    def kind(self) -> str:
        """The type of vectors."""
        return "el_vf" if self.dtype is torch.float32 else "el_vd"

    @property
    def mark(self) -> str:
        """What the functions of vectors have behind their names."""
        return self.kind[2:]

    @property
    def extent(self) -> int:
        """How many elements along the variable are in whole vectors."""
        return self.along.extent // self.width * self.width

    def type_of(self, let: Let) -> str:
        """The type of a let of the last level."""
        if let.dtype is torch.bool:
            return "el_vi" if self.dtype is torch.float32 else "el_vl"
        return self.kind

    def varies(self) -> set[str]:
        """The names of what differs from edge to edge."""
        found: set[str] = set()
        for let in self.loop.body:
            own = (let.op == "edge" and let.args[0] != "own") or (let.op == "load" and of_an_edge(let.args[0]))
            named = any(a in found for a in let.args if isinstance(a, str))
            if own or named or (let.dynamic is not None and let.dynamic.name in found):
                found.add(let.name)
        return found

    def value(self, name: str) -> str:
        """A value as a vector."""
        if name in self.inner:
            return name
        return f"el_{'mask' if self.lets[name].dtype is torch.bool else 'all'}{self.mark}({name})"

    def expression(self, let: Let) -> str:
        """What a let of the last level is, unless it is a load."""
        fused = self._gate(let)
        if fused is not None:
            return fused
        text = _SELECT_OF_BOOLS if let.op == "where" and let.dtype is torch.bool else _TEXTS[let.op]
        return text.format(*map(self.value, let.args), m=self.mark)

    # Sigmoid and softplus, of which the ops of ATen are made ---------------------------------------------------------

    def _gate(self, let: Let) -> Optional[str]:
        if let.op == "div" and self._is(let.args[0], 1):  # 1 / (1 + exp(-x))
            power = self._exp_plus_one(let.args[1])
            x = None if power is None else self.lets[power.args[0]]
            if x is not None and x.op == "neg" and len(self.users[power.name]) == 1:
                return f"el_sigmoid{self.mark}({self.value(x.args[0])})"
        if let.op == "div" and self.lets[let.args[0]].op == "mul":  # g * exp(x) / (exp(x) + 1)
            power, product = self._exp_plus_one(let.args[1]), self.lets[let.args[0]]
            same = power is not None and product.args[1] == power.name and len(self.users[product.name]) == 1
            if same and len(self.users[power.name]) == 2 and self._is_guarded(let, power.args[0]):
                return f"{self.value(product.args[0])} * el_sigmoid{self.mark}({self.value(power.args[0])})"
        if let.op == "log1p" and self.lets[let.args[0]].op == "exp" and len(self.users[let.args[0]]) == 1:
            x = self.lets[let.args[0]].args[0]
            if self._is_guarded(let, x):
                return f"el_softplus{self.mark}({self.value(x)})"
        return None

    def _is(self, name: str, number: float) -> bool:
        let = self.lets[name]
        return let.op == "number" and let.args == (number, None)

    def _exp_plus_one(self, name: str) -> Optional[Let]:
        """The exp of a sum of 1 and an exp that nothing else reads."""
        let = self.lets[name]
        if let.op != "add" or len(self.users[name]) != 1:
            return None
        others = [self.lets[a] for a in let.args if not self._is(a, 1)]
        return others[0] if len(others) == 1 and others[0].op == "exp" else None

    def _is_guarded(self, let: Let, x: str) -> bool:
        """Whether a value is read only where ``x`` is no larger than a number at which its exp is finite."""
        users = self.users.get(let.name, [])
        while len(users) == 1 and isinstance(users[0], Let) and users[0].op == "div" and users[0].args[0] == let.name:
            let, users = users[0], self.users.get(users[0].name, [])
        if len(users) != 1 or not isinstance(users[0], Let) or users[0].op != "where" or users[0].args[2] != let.name:
            return False
        test = self.lets[users[0].args[0]]
        bound = self.lets[test.args[1]] if test.op == "gt" and test.args[0] == x else None
        return bound is not None and bound.op == "number" and bound.args[0] <= _MOST_GUARDED


def vectors_of(loop: Loop, size: int) -> Optional[Vectors]:
    """A loop as one of vectors of ``size`` bytes, or None if vectors cannot compute it."""
    if loop.reduced or not loop.vars:
        return None
    levels, along = levels_of(loop), loop.vars[-1]
    lets = {let.name: let for let in loop.body}
    dtypes = {let.dtype for let in levels[-1]} | {lets[end.value].dtype for end in loop.ends}
    dtypes -= {torch.bool}
    if len(dtypes) != 1 or not dtypes <= {torch.float32, torch.float64}:
        return None
    (dtype,) = dtypes
    width = size // bytes_of(dtype)
    if along.extent < width or not all(_fits(let, along, dtype, lets) for let in levels[-1]):
        return None
    if not all(_takes(end, along, dtype, lets) for end in loop.ends):
        return None
    cheap = all(let.op in _CHEAP for level in levels[:-1] for let in level)
    memory = [let.args[0] for let in levels[-1] if let.op == "load"] + [end.into for end in loop.ends]
    return Vectors(loop, dtype, along, width, levels, cheap and not any(map(_is_streamed, memory)))


def _is_streamed(memory: Any) -> bool:
    """Whether wide rows by edge are read or written, which take the fewest pages and lines one after the other."""
    by_edge = isinstance(memory, EdgeResult) or (isinstance(memory, Operand) and memory.kind == "edge")
    return by_edge and memory.numel * bytes_of(memory.dtype) >= _STREAMED


def _fits(let: Let, along: Var, dtype: torch.dtype, lets: dict[str, Let]) -> bool:
    if let.op == "load":
        return let.dtype is dtype and stride_of(let.index, along) == 1 and not _is_dynamic_along(let, along, lets)
    named = all(lets[a].dtype in (dtype, torch.bool) for a in let.args)
    mixed = let.op not in ("where", "and", "or", "xor", "not") and any(lets[a].dtype is torch.bool for a in let.args)
    return let.op in _TEXTS and let.dtype in (dtype, torch.bool) and named and not mixed


def _is_dynamic_along(let: Let, along: Var, lets: dict[str, Let]) -> bool:
    if let.dynamic is None:
        return False
    stack = [let.dynamic.name]
    while stack:
        each = lets[stack.pop()]
        if along in each.index.variables:
            return True
        stack += [a for a in each.args if isinstance(a, str) and a in lets]
        stack += [each.dynamic.name] if each.dynamic else []
    return False


def _takes(end: Any, along: Var, dtype: torch.dtype, lets: dict[str, Let]) -> bool:
    if stride_of(end.index, along) != 1 or lets[end.value].dtype is not dtype:
        return False
    if isinstance(end, Store):
        return end.into.dtype is dtype
    into = end.into.best if isinstance(end.into, Fold) else end.into.array
    return into.dtype is dtype and end.dynamic is None and getattr(end.into, "argument", None) is None


def accumulated(end: Accumulate) -> str:
    """The name of the array that an end adds to."""
    return end.into.array.name if isinstance(end.into, TotalArray) else end.into.best.name


def combined(end: Accumulate, old: str, vectors: Vectors) -> str:
    """The text of an accumulated value with one more."""
    op = end.into.op if isinstance(end.into, Fold) else "sum"
    op = {"sum": "add", "prod": "mul", "amax": "max", "amin": "min"}[op]
    new = vectors.value(end.value)
    return _TEXTS[op].format(*((new, old) if op in ("max", "min") else (old, new)), m=vectors.mark)
