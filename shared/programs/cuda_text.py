"""The functor of a generated pass: its states, its results, and the text around the statements that
:mod:`edgeless.programs.cuda_code` writes.
"""

from __future__ import annotations

from typing import Optional, Union

import numpy as np

from .cuda_code import _Writer
from .cuda_operands import TooMuchShared
from .cuda_parts import (
    BLOCK_BYTES,
    EDGE,
    ONCE,
    ROW,
    SEGMENT_BYTES,
    STORE,
    State,
    Text,
    stored_type,
    value_type,
)
from .cuda_product_text import ProductText
from .cuda_tile_text import TileText
from .cuda_totals import total_of_lanes
from .items import Folded, Item, NotLowered, View
from .lane_tables import flat, unflat
from .online import Online
from .ops import tolerance

NAMESPACE = "walk"  # replaced by one that tells texts apart
MOST_LINES = 1000  # for an edge
MOST_TOTALS = 128  # registers of sums over all edges
REGISTERS, THREADS = 65536, 128
MOST_FEW = 150  # registers that the estimate finds a tenth too many of
# Of shared memory: in a block, which has 99 KiB on some GPUs, and about 5 besides; on an SM of 228.
MOST_SHARED, SM_BYTES = 92 << 10, 220 << 10


def assemble_text(writer: _Writer) -> Text:
    """The text of a pass whose statements the writer writes."""
    stage = writer.stage
    writer.edge_products.find()
    states: list[State] = []
    for fold in sorted(stage.folds, key=lambda fold: id(fold) in stage.online):
        if id(fold) in stage.online:
            states.append(_online(writer, fold, stage.online[id(fold)], states))
        elif fold.best is None:
            states.append(_state(writer, fold, next((f for f in stage.folds if f.best is fold), None)))
    products = writer.edge_products
    tiles = writer.tiles
    by_edge = [
        (item, *writer.spread(item, writer.tables_of(item)))
        for item in stage.by_edge
        if products.used or not tiles.result(item)
    ]
    totals = []
    for item in stage.totals:
        outer = products.total(item) if products.used else tiles.total(item)
        totals.append(total_of_lanes(writer, item) if outer is None else (outer, None))
    if sum(t.columns for t, value in totals if value is not None) > MOST_TOTALS:
        raise NotLowered("sums over all edges of more registers than a thread has")
    return _Assembly(writer, states, by_edge, totals).text()


def _state(writer: _Writer, fold: Folded, arg: Optional[Folded]) -> State:
    table, value = writer.spread(fold.source, writer.tables_of(fold.source))
    name = writer.name("s")
    state = State(name, fold, arg, table, [])
    kind, lines = value_type(fold.dtype), writer.lines[EDGE]
    for i, x in enumerate(value.names):
        if fold.reduce in ("sum", "prod"):
            lines.append(f"{name}[{i}] {'+' if fold.reduce == 'sum' else '*'}= {x};")
        else:
            more = ">" if fold.reduce == "amax" else "<"
            if any(made.top is fold for made in writer.stage.online.values()):
                n = len(value.names)
                if i == 0:
                    lines.append(f"{kind} {name}less[{n}], {name}now[{n}];")
                best = f"{name}[{i}]"
                lines.append(f"add_exponential({kind}({x}), {best}, {name}less[{i}], {name}now[{i}]);")
            elif arg is None:
                lines.append(f"{{ const {kind} x = {x}; if (x {more} {name}[{i}] || x != x) {name}[{i}] = x; }}")
            else:
                writer.uses_id = True
                x = f"value_of(stored<{stored_type(fold.dtype)}>({x}))"  # equal is what is equal as it is stored
                taken = f"take_best<{_extreme(fold)}>({x}, id_[u], {name}[{i}], {name}at[{i}], {name}count[{i}]);"
                if writer.edge_products.used:  # most messages are worse
                    taken = f"if (!is_worse<{_extreme(fold)}>({x}, {name}[{i}])) {taken}"
                lines.append(taken)
    return state


def _extreme(fold: Folded) -> str:
    """The options of an extremum: whether it is a maximum, and whether edges within a tolerance count as equal."""
    return f"{str(fold.reduce == 'amax').lower()}, {str(tolerance(fold.dtype) > 0).lower()}"


def _online(writer: _Writer, fold: Folded, made: Online, states: list[State]) -> State:
    """A sum of exponentials beside their maximum."""
    top = next(s for s in states if s.fold is made.top)

    def way(table):
        logits = _base_table(made.weight, made.top.source, table)
        known = np.broadcast_to(top.table, (max(len(top.table), len(logits)), top.table.shape[1]))
        logits = np.broadcast_to(logits, (len(known), logits.shape[1]))
        columns = writer.columns_of(known, [str(i) for i in range(known.shape[1])], logits)
        return table, writer.value(made.source, table), [int(c) for c in columns]

    table, value, columns = writer.cheapest([lambda t=t: way(t) for t in writer.tables_of(fold)])
    name, lines = writer.name("s"), writer.lines[EDGE]
    for i, (x, c) in enumerate(zip(value.names, columns)):
        lines.append(f"{name}[{i}] = {name}[{i}] * {top.name}less[{c}] + {top.name}now[{c}] * {x};")
    return State(name, fold, None, table, columns, top)


def _base_table(item: Item, base: Item, table: np.ndarray) -> np.ndarray:
    """The table of the elements of ``base``, of which ``item`` is views."""
    while item is not base:
        if isinstance(item, View):
            table = flat(item.at(unflat(table, item.shape)), item.base.shape, table.shape)
        item = item.base
    return table


class _Assembly:
    def __init__(self, writer: _Writer, states, by_edge, totals):
        self.w, self.states, self.by_edge, self.totals = writer, states, by_edge, totals
        self.writes: list[Item] = []

    def output(self, item: Item, kind: Optional[str] = None) -> str:
        self.writes.append(item)
        return f"write<{kind or stored_type(item.dtype)}>({len(self.writes) - 1})"

    def text(self) -> Text:
        w, takes = self.w, self.w.lines[EDGE]
        for s in self.states:
            if id(s.fold) not in w.stage.online or w.stage.online[id(s.fold)].divisor is None:
                w.done[id(s.fold)] = s.table, [f"segment.{s.name}[{i}]" for i in range(s.table.shape[1])]
        stores = []
        for state in self.states:
            stores += self.store(state)
        for item, table, value in self.by_edge:
            w.uses_id = True
            takes += self.put(item, table, value.names, "id_[u]")
        registers = sum(len(s.table[0]) * (1 if s.arg is None else 3) for s in self.states)
        registers += sum(t.columns for t, value in self.totals if value is not None)
        if len(takes) > MOST_LINES:
            raise NotLowered(f"an edge takes {len(takes)} statements")
        most_lines = 1000 if w.tiles.used else 480
        most_edges = min(w.tiles.sub_warp // 2, 4) if w.edge_products.used else w.tiles.most_edges
        fits = [b for b in (4, 2, 1) if w.words * b <= 64 and len(takes) * b <= most_lines and b <= most_edges]
        batch = max(fits, default=1)
        if batch == 4 and w.tiles.used and w.tiles.most_edges >= 8 and w.words <= 4 and len(takes) * 8 <= most_lines:
            batch = 8  # a whole tile is loaded while its products are computed
        carry = sum(self.bytes_of(s) for s in self.states)
        if w.edge_products.used:
            products = ProductText(w.edge_products, w.shared_bytes, THREADS * carry)
        else:
            products = TileText(w.tiles, w.shared_bytes)
        products.write(self.output)
        takes += products.put
        finish, names = [], iter(products.finish)
        for total, value in self.totals:
            if value is None:
                name, columns = next(names)
                of_block = f", {columns * w.lanes}" if w.edge_products.used else ""
                finish.append(f"{name}.finish({self.output(total.item, 'float')}{of_block});")
                continue
            kind, name = value_type(total.item.dtype), w.name("a")
            if kind not in ("float", "double"):
                raise NotLowered("a sum of integers over all edges")
            w.members.append(f"{kind} {name}[{total.columns}];")
            w.lines[ONCE].extend(f"{name}[{i}] = 0;" for i in range(total.columns))
            takes += [f"{name}[{i}] += {x};" for i, x in enumerate(value.names)]
            finish.append(f"add_totals<{total.columns}>(*this, {name}, {self.output(total.item, kind)});")
        registers += 56 + w.words * batch + (w.kept_values if w.keep else 0) + min(len(takes) // 6, 64)
        registers = max(registers + products.registers, products.least_registers)
        if w.tiles.used and registers <= MOST_FEW:
            registers = int(0.9 * registers)
        shared = products.shared_bytes + THREADS * carry
        blocks = min(max(min(REGISTERS // (THREADS * registers), SM_BYTES // max(shared, 1)), 2), 8)
        if carry > SEGMENT_BYTES:
            raise NotLowered(f"a row's results of {carry} bytes in a lane")
        if w.shared_bytes and w.shared_bytes + THREADS * carry > BLOCK_BYTES:
            raise TooMuchShared("parameters beside results that shared memory has no room for")
        if shared > MOST_SHARED:
            raise NotLowered(f"products of edges that need {shared} bytes of shared memory")
        code = self.code(stores, finish, batch, products)
        in_tiles = len(w.tiles.outers) + len(w.tiles.gradients) + len(w.edge_products.outers)
        return Text(
            code, w.reads, self.writes, [t for t, _ in self.totals], w.lanes, max(carry, 1), batch,
            blocks, registers, products.shared_bytes, in_tiles, w.edge_products.used,
        )  # fmt: skip

    @staticmethod
    def bytes_of(state: State) -> int:
        size = 8 if value_type(state.fold.dtype) in ("double", "int64_t") else 4
        return state.table.shape[1] * (size + (12 if state.arg is not None else 0)) + 8

    def store(self, state: State) -> list[str]:
        n, p = state.table.shape[1], f"segment.{state.name}"
        fold = state.fold
        names = [f"{p}[{i}]" for i in range(n)]
        made = self.w.stage.online.get(id(fold))
        if made is not None and made.divisor is not None:
            below, kind = self.w.value(made.divisor, state.table), value_type(fold.dtype)
            names = [f"(empty ? {kind}(0) : {kind}({a} / {b}))" for a, b in zip(names, below.names)]
        lines = self.put(fold, state.table, names, "row")
        if state.arg is not None:
            args = [f"argument({p}at[{i}], {p}count[{i}])" for i in range(n)]
            lines += self.put(state.arg, state.table, args, "row")
        return lines

    def put(self, item: Item, table: np.ndarray, names: list[str], row: str) -> list[str]:
        """Writes elements of a row."""
        kind, target = stored_type(item.dtype), self.output(item)
        n = table.shape[1]
        runs = [(0, n)]
        if (table != table[:, :1] + np.arange(n)).any():
            raise NotLowered("a result whose elements a lane has apart")
        if item.numel % n or (table[:, 0] % n).any():
            runs = [(i, 1) for i in range(n)]
        lines = []
        for first, count in runs:
            values = ", ".join(f"stored<{kind}>({x})" for x in names[first : first + count])
            place = self.w.place(table[:, first : first + 1], count)
            lines.append(
                f"if ({self.w.writer_lanes(table)}) {{ const {kind} x[{count}] = {{{values}}}; "
                f"store_values({target} + {row} * int64_t({item.numel}) + {place}, x); }}"
            )
        return lines

    def code(self, stores: list[str], finish: list[str], batch: int, products: Union[TileText, ProductText]) -> str:
        w = self.w
        members = [f"{self.kind(s)} {s.name}[{s.table.shape[1]}];" for s in self.states]
        segments = list(members)
        begins, merges, pack, empty = [], [], [], []
        for s in self.states:
            n, k = s.table.shape[1], self.kind(s)
            start = {"sum": "0", "prod": "1", "amax": f"-{k}(INFINITY)", "amin": f"{k}(INFINITY)"}[s.fold.reduce]
            if s.fold.reduce in ("amax", "amin") and k not in ("float", "double"):
                raise NotLowered("an extremum of integers")
            extra = [] if s.arg is None else [f"{w.argument_type} {s.name}at[{n}];", f"int {s.name}count[{n}];"]
            members += extra
            segments += extra
            names = [s.name] if s.arg is None else [s.name, f"{s.name}at", f"{s.name}count"]
            for i in range(n):
                begins.append(f"{s.name}[{i}] = {start};")
                empty.append(f"segment.{s.name}[{i}] = {'1' if s.fold.reduce == 'prod' else '0'};")
                if s.arg is not None:
                    begins.append(f"{s.name}at[{i}] = 0; {s.name}count[{i}] = 0;")
                    empty.append(f"segment.{s.name}at[{i}] = 0; segment.{s.name}count[{i}] = 0;")
                pack += [f"segment.{name}[{i}] = {name}[{i}];" for name in names]
                merges.append(self.merge(s, i))
        online = [s for s in self.states if s.top is not None]
        for top in {id(s.top): s.top for s in online}.values():
            n, k = top.table.shape[1], self.kind(top)
            factors = [f"{k} {top.name}a[{n}], {top.name}b[{n}];"]
            name = top.name
            factors += [
                f"both_exponentials(segment.{name}[{i}], later.{name}[{i}], {name}a[{i}], {name}b[{i}]);"
                for i in range(n)
            ]
            merges = factors + merges
        keep = (
            "if (inside) *place<Segment>(slot) = segment;" if segments else ""
        )  # without a result there is no workspace
        if not segments:
            segments = ["char none;"]
        ids = "int64_t id_[kBatch];" if w.uses_id else ""
        knows_id = w.uses_id or any(phase.uses_id for phase in w.edge_products.phases)
        loads = []
        if w.uses_id:
            loads = ["id_[u] = __shfl_sync(kFullWarp, own_id, next + u, 1 << args.plan.sub_warp_log2);"]
        own, begin = ["own_id = next_id;", "next_id = id(after(position));", "next = 0;"] if knows_id else [], ""
        if knows_id or products.begin:
            first = [*(["next_id = id(position);"] if knows_id else []), *products.begin]
            begin = f"__device__ __forceinline__ void begin_walk(I position, I last) {{ {' '.join(first)} }}"
        own += products.own
        choose = [*(["next = b + kBatch;"] if knows_id else []), *products.choose]
        near = "int64_t near_[kBatch];"
        totals = sum(t.columns for t, _ in self.totals)
        constants = "".join(f"\n  static constexpr int {text};" for text in products.constants)
        lines = "\n    ".join
        closes = ""
        if products.close:
            body = lines(products.close)
            closes = f"__device__ __forceinline__ void close(int b, int count, bool last) {{\n    {body}\n  }}"
        args = f"WalkArgs<{max(len(w.reads), 1)}, {max(len(self.writes), 1)}>"
        return f"""namespace edgeless::cuda::programs::{NAMESPACE} {{
{chr(10).join(w.tables)}
using Args = {args};
template <class I>
struct Walk : Lane<Args> {{
  static constexpr int kBatch = {batch}, kTotals = {totals}, kShared = {products.shared_bytes};{constants}
  static constexpr bool kCheapEnd = false, kInStep = {str(products.in_step).lower()};
  struct Segment {{
    {lines(segments)}
  }};
  {lines([*w.members, *products.members])}
  {lines(members)}
  int64_t own_row = 0, own_id = 0, next_id = 0; int next = 0;
  {ids} {near}
  char* const shared;
  __device__ Walk(const Args& args, int vector, char* shared = nullptr) : Lane<Args>(args, vector), shared(shared) {{
    {lines([*w.starts, *products.start, *w.lines[ONCE]])}
  }}
  __device__ __forceinline__ void fill() const {{
    {lines([*w.fills, *products.fills])}
  }}
  {begin}
  __device__ __forceinline__ void own(I index, I position) {{
    {lines(own)}
  }}
  __device__ __forceinline__ void choose(int b) {{
    {lines(choose)}
  }}
  {closes}
  __device__ __forceinline__ void load(int u, I index, I position) {{
    const int64_t near = near_[u] = index;
    {lines([*loads, *w.load])}
  }}
  __device__ __forceinline__ void begin(int64_t row, int64_t) {{
    {lines(begins)}
    if (row >= args.graph.num_rows) return;
    own_row = row;
    {lines(w.lines[ROW])}
  }}
  template <bool kWhole>
  __device__ __forceinline__ void take_edge(int u) {{
    {lines(w.lines[EDGE])}
  }}
  __device__ __forceinline__ void take(int u, int64_t) {{ take_edge<false>(u); }}
  __device__ __forceinline__ void take_whole(int u, int64_t) {{ take_edge<true>(u); }}
  __device__ __forceinline__ Segment segment(int64_t, int64_t) const {{
    Segment segment;
    {lines(pack)}
    return segment;
  }}
  __device__ __forceinline__ void merge(Segment& segment, const Segment& later) const {{
    {lines(merges)}
  }}
  __device__ __forceinline__ void store(int64_t row, const Segment& segment, bool empty = false) const {{
    {lines([*w.lines[STORE], *stores])}
  }}
  __device__ __forceinline__ void store_empty(int64_t row) const {{
    Segment segment;
    {lines(empty)}
    store(row, segment, true);
  }}
  __device__ __forceinline__ void keep(int64_t slot, const Segment& segment) const {{
    {keep}
  }}
  __device__ __forceinline__ Segment kept(int64_t slot) const {{ return *place<Segment>(slot); }}
  __device__ __forceinline__ void finish() {{
    {lines(finish)}
  }}
}};
}}  // namespace edgeless::cuda::programs::{NAMESPACE}
"""

    @staticmethod
    def kind(state: State) -> str:
        return value_type(state.fold.dtype)

    @staticmethod
    def merge(s: State, i: int) -> str:
        a, b = f"segment.{s.name}", f"later.{s.name}"
        if s.top is not None:
            c = s.first[i]
            return f"{a}[{i}] = {a}[{i}] * {s.top.name}a[{c}] + {b}[{i}] * {s.top.name}b[{c}];"
        if s.fold.reduce in ("sum", "prod"):
            return f"{a}[{i}] {'+' if s.fold.reduce == 'sum' else '*'}= {b}[{i}];"
        more = ">" if s.fold.reduce == "amax" else "<"
        if s.arg is None:
            return f"if ({b}[{i}] {more} {a}[{i}] || {b}[{i}] != {b}[{i}]) {a}[{i}] = {b}[{i}];"
        pairs = f"{b}[{i}], {b}at[{i}], {b}count[{i}], {a}[{i}], {a}at[{i}], {a}count[{i}]"
        return f"merge_best<{_extreme(s.fold)}>({pairs});"
