"""The text of the products that :mod:`edgeless.programs.cuda_products` finds: phases of statements for the edges of a
window, and what core_cuda/programs/edge_products.cuh computes between them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .cuda_parts import stored_type
from .cuda_products import EdgeProduct, EdgeProducts, Phase, Staged
from .cuda_rows import padded

WARPS = 4  # of a block
SM_BYTES, MOST_SHARED = 224 << 10, 92 << 10  # of shared memory; of a block's, as in cuda_text
MOST_AHEAD = 64  # registers of a phase's loads


class ProductText:
    """The lines of a functor that compute a pass's products by edge.

    Args:
        products: what is computed.
        parameter_bytes: of shared memory in front of what products need.
        segment_bytes: of shared memory for the results of a block's threads.
    """

    def __init__(self, products: EdgeProducts, parameter_bytes: int, segment_bytes: int):
        self.products, self.writer = products, products.writer
        self.bytes = (parameter_bytes + 15) // 16 * 16
        self.segment_bytes = segment_bytes
        self.room = MOST_SHARED - segment_bytes
        self.constants: list[str] = []
        self.fills: list[str] = []
        self.members: list[str] = []
        self.choose: list[str] = []
        self.own: list[str] = []
        self.begin: list[str] = []
        self.put: list[str] = []
        self.close: list[str] = []
        self.finish: list[tuple[str, int]] = []  # with the columns of its parts
        self.start: list[str] = []
        self.registers = self.floats = self.least_registers = 0
        self.edges = 32  # of a warp at once

    @property
    def shared_bytes(self) -> int:
        """Of dynamic shared memory in a block."""
        return self.bytes + WARPS * self.floats * 4

    def write(self, output: Callable) -> None:
        """Writes the lines; ``output`` is not needed, since the last phase writes all results by edge."""
        products, sub_warp = self.products, self.products.writer.tiles.sub_warp
        slots = products.allocate()
        of_edge = WARPS * 4 * sum(slots)
        matrices = self.place_matrices(of_edge)
        room = self.bytes + self.segment_bytes
        if SM_BYTES // (room + 32 * of_edge) < min(3, SM_BYTES // (room + 16 * of_edge)):
            self.edges = 16
        at, starts = 0, []
        for floats in slots:
            starts.append(at)
            at += self.edges * floats
        self.floats = at
        every = [s.rows for s in products.staged.values()] + [p.rows for p in products.products.values()]
        self.constants += [f"{rows.name} = {starts[rows.slot]}" for rows in every]
        of_sub_warp = self.edges * sub_warp // 32
        lines, finish = ["__syncwarp();"], {}
        for number, phase in enumerate(products.phases):
            if number == products.of_seldom:
                lines.append("bool seldom = false;")
            lines += self.phase(phase, [s for s in products.staged.values() if s.phase == number], of_sub_warp)
            if number == products.of_seldom:
                multiply = [self.multiply(p, matrices[p]) for p in products.products.values() if p.seldom]
                again = self.phase(products.seldom, products.anew, of_sub_warp)
                inner = ["__syncwarp();", *multiply, "__syncwarp();", *again]
                lines += ["if (__any_sync(kFullWarp, seldom)) {", *(f"  {line}" for line in inner), "}"]
            outers = [o for o in products.outers.values() if o.step == 3 * number + 1]
            lines.append("__syncthreads();" if outers else "__syncwarp();")
            for outer in outers:
                rows, columns = padded(outer.left.numel), padded(outer.right.numel)
                left, right = (products.staged[id(item)].rows for item in (outer.left, outer.right))
                name = self.writer.name("a")
                self.members.append(f"BlockTotals<{rows}, {columns}> {name};")
                self.registers += rows * columns // 128
                rests = ", ".join(str(rest).lower() for rest in outer.rests)
                first = [rows.at("0").replace("tile_rows", "rows_of_block") for rows in (left, right)]
                lines += [
                    "{ float* const rows_of_block = tile_rows - threadIdx.x / 32 * kRowsOfWarp;",
                    f"{name}.template add<{self.edges}, {rests}>({', '.join(first)}, kRowsOfWarp); }}",
                ]
                finish[id(outer)] = name
            if outers:
                lines.append("__syncthreads();")
            for product in products.products.values():
                if product.phase == number and not product.seldom:
                    lines.append(self.multiply(product, matrices[product]))
            lines.append("__syncwarp();")
        self.finish = [(finish[id(outer)], outer.total.columns) for outer in products.outers.values()]
        self.constants.append(f"kRowsOfWarp = {self.floats}")
        self.members += [f"EdgesOfWindow<I, {sub_warp}> window;", "float* tile_rows; int place_ = 0;"]
        self.choose = [
            f"if (b % {of_sub_warp} == 0) {{",
            *(f"  {line}" for line in lines),
            "}",
            f"place_ = threadIdx.x % 32 / {sub_warp} * {of_sub_warp} + b % {of_sub_warp};",
        ]
        self.start = ["tile_rows = reinterpret_cast<float*>(shared + " + f"{self.bytes}) + threadIdx.x / 32 * "
                      "kRowsOfWarp;"]  # fmt: skip
        self.own = ["window.next(index, position, static_cast<const I*>(args.graph.indptr));"]
        indptr = "static_cast<const I*>(args.graph.indptr)"
        self.begin = [f"window.start(own_row, position, last, {indptr}, this->template sub_warp<false>());"]
        widest = max((padded(p.item.numel) for p in products.products.values()), default=0)
        self.least_registers = 84 + self.registers + widest // 2 * (self.edges // 16 if widest <= 64 else 1)

    @property
    def in_step(self) -> bool:
        """Whether the warps of a block wait for each other."""
        return bool(self.products.outers)

    def phase(self, phase: Phase, staged: list[Staged], of_sub_warp: int) -> list[str]:
        """The statements for the edges of a sub-warp, and what they leave in rows."""
        sub_warp = self.products.writer.tiles.sub_warp
        lanes = self.writer.lanes
        inside = "" if sub_warp == lanes else "if (inside) "
        ahead = max(n for n in (8, 4, 2, 1) if n <= of_sub_warp and (n == 1 or phase.words * n <= MOST_AHEAD))
        text = " ".join([*phase.lines, *phase.load, *(name for s in staged for name in s.names)])

        def given(name: str) -> str:
            return f"__shfl_sync(kFullWarp, {name}, b + v + u, {sub_warp})"

        loads, puts = [f"const int64_t near = near_[u] = {given('window.near')};"], []
        names = ["near_"]
        for name, value in (("own_", "window.row"), ("id_", "own_id")):
            if f"{name}[u]" in text:
                names.append(name)
                loads.append(f"{name}[u] = {given(value)};")
        if any(s.summed for s in staged):
            names.append("counts_")
            loads.append(f"counts_[u] = {given('static_cast<int>(window.exists)')};")
        for each in staged:
            rows = each.rows
            values = [f"counts_[u] ? {x} : 0" if each.summed else x for x in each.names]
            place = self.writer.place(self.products.own_table(rows.columns)[:, :1], len(values))
            kind = stored_type(rows.dtype)
            if kind != "float":
                values = [f"stored<{kind}>({x})" for x in values]
            puts.append(
                f"{inside}{{ const {kind} x[{len(values)}] = {{{', '.join(values)}}}; "
                f"keep_values({rows.at('place_ + u')} + {place}, x); }}"
            )
            if rows.padded > rows.columns:
                puts.append(
                    f"if (inside) {{ for (int i = {rows.columns} + vector; i < {rows.padded}; i += {lanes}) "
                    f"({rows.at('place_ + u')})[i] = stored<{kind}>(0.0f); }}"
                )
        return [
            f"for (int v = 0; v < {of_sub_warp}; v += {ahead}) {{",
            f"  constexpr int kBatch = {ahead}; constexpr bool kWhole = true;",
            f"  place_ = threadIdx.x % 32 / {sub_warp} * {of_sub_warp} + v;",
            f"  int64_t {', '.join(f'{name}[kBatch]' for name in names)};",
            *(f"  {array}" for array in phase.arrays),
            "#pragma unroll",
            "  for (int u = 0; u < kBatch; ++u) {",
            *(f"    {line}" for line in [*loads, *phase.load]),
            "  }",
            "#pragma unroll",
            "  for (int u = 0; u < kBatch; ++u) {",
            *(f"    {line}" for line in [*phase.lines, *puts]),
            "  }",
            "}",
        ]

    def multiply(self, product: EdgeProduct, matrix: str) -> str:
        """The call that computes a product."""
        rests = ", ".join(str(rest).lower() for rest in product.rests)
        left = self.products.staged[id(product.values)].rows
        sizes = f"{self.edges}, {left.padded}, {product.rows.padded}"
        call = f"multiply_rows<{sizes}, {rests}>" if left.dtype is torch.float32 else f"multiply_half_rows<{sizes}>"
        return f"{call}({left.at('0')}, {matrix}, {product.rows.at('0')});"

    def place_matrices(self, of_edge: int) -> dict[EdgeProduct, str]:
        """The products' matrices: in shared memory if there is room beside the rows and no product is seldom needed,
        else as they are.
        """
        texts, known = {}, {}
        for product in self.products.products.values():
            matrix, columns, depth = product.matrix, product.item.numel, product.values.numel
            rows = self.products.staged[id(product.values)].rows.dtype
            kind, key = stored_type(matrix.operand.dtype), (matrix.key, rows)
            sizes = f"{columns}, {depth}, {padded(columns)}, {padded(depth)}"
            size = rows.itemsize * padded(columns) * padded(depth)
            if key not in known and not product.seldom and self.bytes + size + 16 * of_edge <= self.room:
                name, fill = (
                    ("MatrixInOrder", "fill_floats") if rows.itemsize == 4 else ("HalvesInOrder", "fill_halves")
                )
                at = f"reinterpret_cast<{stored_type(rows)}*>(shared + {self.bytes})"
                known[key] = f"{name}{{{at if rows.itemsize == 4 else f'shared + {self.bytes}'}}}"
                self.fills.append(f"{fill}<{sizes}>({self.pointer(product)}, {matrix.column}, {matrix.feature}, {at});")
                self.bytes += size
            as_it_is = f"MatrixAsItIs<{kind}, {matrix.column}, {matrix.feature}, {matrix.start % 4}, {sizes}>"
            texts[product] = known.get(key) or f"{as_it_is}{{{self.pointer(product)}}}"
        return texts

    def pointer(self, product: EdgeProduct) -> str:
        return f"{self.writer.pointer(product.matrix.operand)} + {product.matrix.start}"
