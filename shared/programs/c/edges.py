"""The loops of a walk in C over the edges of a row: tiles of edges, rows prefetched for later ones, vectors."""

from __future__ import annotations

from typing import Any, Union

from ..lowering.items import Operand
from .loops import Accumulate, Buffer, EdgeResult, Let, Statement, Store
from .types import bytes_of
from .vectors import Vectors, accumulated, combined
from .winners import is_for_equals, list_text, written

_FLUSH = 1024  # edges after which a part's sums over edges are added to its larger ones, so that rounding stays small
_AHEAD, _MOST_LINES = 16, 8


class Edges:
    """What the writer of a walk has for edges; its subclass writes statements."""

    arranged: Any
    operands: dict[Operand, str]
    results: dict[EdgeResult, str]
    winners: list[Operand]
    sparse: list[Buffer]
    tile: int
    vector: int
    line: Any
    begin: Any
    end: Any
    at: Any
    let: Any
    expression: Any
    flush: Any
    statement: Any

    def edges(self, statements: list[Statement], first: bool) -> None:
        """A pass over the edges of a row."""
        if self.winners:
            self.winning_edges()
        else:
            self.begin(f"for (long p0 = begin; p0 < end; p0 += {self.tile})")
            self.line(f"const int u = end - p0 < {self.tile} ? (int)(end - p0) : {self.tile};")
            self.line(f"long j[{self.tile}], id[{self.tile}];")
            self.begin(f"for (int s = 0; s < {self.tile}; ++s)")  # those beyond the end repeat the last edge
            self.line("const long p = p0 + (s < u ? s : u - 1); j[s] = near_[p]; id[s] = ids ? ids[p] : p;")
            self.end()
            if first:
                self.prefetch()
        for statement in statements:
            self.edge_statement(statement, statements)
        if self.arranged.totals:
            self.line("since += u;")
            self.flush(f"since >= {_FLUSH}")
        self.end()

    def winning_edges(self) -> None:
        """Begins a loop over tiles of the edges that matter."""
        self.begin("for (long p0 = begin; p0 < end;)")
        self.line(f"long j[{self.tile}], id[{self.tile}]; int u = 0, several = dense;")
        self.begin(f"for (; p0 < end && u < {self.tile}; ++p0)")
        self.line(f"int wins = dense; const long next = p0 + {_AHEAD} < n_edge ? p0 + {_AHEAD} : p0;")
        self.line("j[u] = near_[p0]; id[u] = ids ? ids[p0] : p0;")
        near = [o for o in self.operands if o.kind == "near"]
        for operand in (o for o in near if o in self.winners):
            self.fetch(self.operands[operand], "(long)near_[next]", operand, 0)
        for operand in self.winners:
            self.line(f"wins |= el_wins(&{self.at(operand, '0', 'u')}, id[u], {operand.numel});")
        self.line("several |= wins >> 1;")
        self.begin("if (wins)")
        for operand in (o for o in near if o not in self.winners):
            self.fetch(self.operands[operand], "j[u]", operand, 0)
        self.line("++u;")
        self.end()
        self.end()
        self.line("if (!u) break;")
        self.line(f"for (int s = u; s < {self.tile}; ++s) j[s] = j[u - 1], id[s] = id[u - 1];")

    def edge_statement(self, statement: Statement, statements: list[Statement]) -> None:
        """A statement of an edge; of winning edges some are computed seldom, or for few elements."""
        into = written(statement) if self.winners else []
        seldom = bool(into) and all(is_for_equals(b, statements, self.winners) for b in into)
        if seldom:
            self.begin("if (several)")
        self.statement(statement)
        if seldom:
            self.end()
        for line in (line for b in into if b in self.sparse for line in list_text(b)):
            self.line(line)

    def prefetch(self) -> None:
        """Prefetches the rows that later edges will read and write."""
        ids = "(ids ? (long)ids[p] : p)"
        places = {"near": "(long)near_[p]", "edge": ids}
        rows = [(n, places[o.kind], o, 0) for o, n in self.operands.items() if o.kind in places]
        rows += [(name, ids, result, 1) for result, name in self.results.items()]
        if not rows:
            return
        self.begin(f"for (long p = p0 + {_AHEAD}; p < p0 + {_AHEAD + self.tile} && p < n_edge; ++p)")
        for name, place, of, writes in rows:
            if writes:
                self.line(f"if (!{name}_streams) {{")
            self.fetch(name, place, of, writes)
            if writes:
                self.line("}")
        self.end()

    def fetch(self, name: str, place: str, of: Union[Operand, EdgeResult], writes: int) -> None:
        """Prefetches a row, or its first cache lines."""
        size = of.numel * bytes_of(of.dtype)
        for k in range(min((size + 63) // 64, _MOST_LINES)):
            self.line(f"__builtin_prefetch((const char *){name} + {place} * {size} + {64 * k}, {writes});")

    # Loops by vectors -----------------------------------------------------------------------------------------------

    def vectors(self, vectors: Vectors, on_edges: bool) -> None:
        """The whole vectors of a loop."""
        loop, along, kind = vectors.loop, vectors.along, vectors.kind
        inside = on_edges and vectors.edges_inside
        if on_edges and not inside:
            self.begin("for (int s = 0; s < u; ++s)")
        for depth, level in enumerate(vectors.levels[:-1]):
            for let in () if inside else level:
                self.let(let)
            v = loop.vars[depth]
            step = f"{v.name} += {vectors.width}" if v is along else f"++{v.name}"
            self.begin(f"for (long {v.name} = 0; {v.name} < {vectors.extent if v is along else v.extent}; {step})")
        lets = [let for level in vectors.levels for let in level] if inside else vectors.levels[-1]
        varies = vectors.varies() if inside else set()
        for let in lets:
            if inside and let.name not in varies:
                self.vector_let(vectors, let)
        sums = [end for end in loop.ends if isinstance(end, Accumulate)]
        kept = inside and len({accumulated(end) for end in sums}) == len(sums)
        places = {id(end): f"*({kind} *)&{accumulated(end)}[{end.index.text()}]" for end in sums}
        for n, end in enumerate(sums) if kept else ():
            self.line(f"{kind} sum{n} = {places[id(end)]};")
        if inside:
            self.begin("for (int s = 0; s < u; ++s)")
        for let in lets:
            if not inside or let.name in varies:
                self.vector_let(vectors, let)
        for end in loop.ends:
            if isinstance(end, Store):
                at, value = f"&{self.at(end.into, end.index.text())}", vectors.value(end.value)
                if self.streams(end, vectors):
                    self.line(f"if ({self.results[end.into]}_streams) EL_STREAM({at}, {value});")
                    self.line("else")
                self.line(f"*({kind} *){at} = {value};")
            else:
                into = f"sum{sums.index(end)}" if kept else places[id(end)]
                self.line(f"{into} = {combined(end, into, vectors)};")
        if inside:
            self.end()
        for n, end in enumerate(sums) if kept else ():
            self.line(f"{places[id(end)]} = sum{n};")
        for _ in loop.vars:
            self.end()
        if on_edges and not inside:
            self.end()

    def streams(self, end: Store, vectors: Vectors) -> bool:
        """Whether the vectors that a loop stores are whole lines of a result by edge."""
        lines = [end.index.const, *(f for v, f in end.index.terms if v is not vectors.along), end.into.numel]
        whole = vectors.along.extent == vectors.extent and self.vector == 64
        return whole and isinstance(end.into, EdgeResult) and not any(n % vectors.width for n in lines)

    def vector_let(self, vectors: Vectors, let: Let) -> None:
        if let.name not in vectors.inner:
            self.let(let)
        elif let.op == "load":
            self.line(f"const {vectors.kind} {let.name} = *(const {vectors.kind} *)&{self.expression(let)};")
        else:
            self.line(f"const {vectors.type_of(let)} {let.name} = {vectors.expression(let)};")
