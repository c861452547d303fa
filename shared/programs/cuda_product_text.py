"""The text of the products that :mod:`edgeless.programs.cuda_products` finds: phases of statements for the edges of a
window, and what core_cuda/programs/edge_products.cuh computes between them.
"""

from __future__ import annotations

from collections.abc import Callable

from .cuda_products import EdgeProducts, Matrix, Phase, Staged
from .cuda_tiles import PAD

WARPS = 4  # of a block
SM_BYTES = 224 << 10  # of shared memory
MOST_AHEAD = 64  # registers of a phase's loads


class ProductText:
    """The lines of a functor that compute a pass's products by edge.

    Args:
        products: what is computed.
        parameter_bytes: of shared memory in front of what products need.
        piece_bytes: of shared memory for the results of a block's threads.
    """

    def __init__(self, products: EdgeProducts, parameter_bytes: int, piece_bytes: int):
        self.products, self.writer = products, products.writer
        self.bytes = (parameter_bytes + 15) // 16 * 16
        self.piece_bytes = piece_bytes
        self.constants: list[str] = []
        self.fills: list[str] = []
        self.matrices: dict[tuple, str] = {}
        self.members: list[str] = []
        self.choose: list[str] = []
        self.own: list[str] = []
        self.begin: list[str] = []
        self.put: list[str] = []
        self.close: list[str] = []
        self.finish: list[str] = []
        self.start: list[str] = []
        self.registers = self.floats = 0
        self.edges = 32  # of a warp at once

    @property
    def shared_bytes(self) -> int:
        """Of dynamic shared memory in a block."""
        return self.bytes + WARPS * self.floats * 4

    def write(self, output: Callable) -> None:
        """Writes the lines; ``output`` is not needed, since the last phase writes all results by edge."""
        products, team = self.products, self.products.writer.tiles.team
        slots = products.allocate()
        matrices = {p: self.matrix(p.matrix, p.item.numel, p.values.numel) for p in products.products.values()}
        of_edge = sum(columns + PAD for columns in slots)
        room = self.bytes + self.piece_bytes
        if SM_BYTES // (room + WARPS * 32 * 4 * of_edge) < min(3, SM_BYTES // (room + WARPS * 16 * 4 * of_edge)):
            self.edges = 16
        at, starts = 0, []
        for columns in slots:
            starts.append(at)
            at += self.edges * (columns + PAD)
        self.floats = at
        every = [s.rows for s in products.staged.values()] + [p.rows for p in products.products.values()]
        self.constants += [f"{rows.name} = {starts[rows.slot]}" for rows in every]
        of_team = self.edges * team // 32
        lines, finish = ["__syncwarp();"], {}
        for number, phase in enumerate(products.phases):
            lines += self.phase(phase, [s for s in products.staged.values() if s.phase == number], of_team)
            outers = [o for o in products.outers.values() if o.step == 3 * number + 1]
            lines.append("__syncthreads();" if outers else "__syncwarp();")
            for outer in outers:
                rows, columns = outer.left.numel, outer.right.numel
                left, right = (products.staged[id(item)].rows for item in (outer.left, outer.right))
                name = self.writer.name("a")
                self.members.append(f"BlockTotals<{rows}, {columns}> {name};")
                self.registers += rows * columns // 128
                rests = ", ".join(str(rest).lower() for rest in outer.rests)
                first = "tile_rows - threadIdx.x / 32 * kRowsOfWarp"
                lines.append(
                    f"{name}.template add<{self.edges}, {rests}>({first} + {left.name}, {first} + {right.name}, "
                    "kRowsOfWarp);"
                )
                finish[id(outer)] = name
            if outers:
                lines.append("__syncthreads();")
            for product in products.products.values():
                if product.phase == number:
                    rests = ", ".join(str(rest).lower() for rest in product.rests)
                    left = products.staged[id(product.values)].rows
                    lines.append(
                        f"multiply_rows<{self.edges}, {product.values.numel}, {product.item.numel}, {rests}>("
                        f"tile_rows + {left.name}, {matrices[product]}, tile_rows + {product.rows.name});"
                    )
            lines.append("__syncwarp();")
        self.finish = [finish[id(outer)] for outer in products.outers.values()]
        self.constants.append(f"kRowsOfWarp = {self.floats}")
        self.members += [f"EdgesOfWindow<I, {team}> window;", "float* tile_rows; int place_ = 0;"]
        self.choose = [
            f"if (b % {of_team} == 0) {{",
            *(f"  {line}" for line in lines),
            "}",
            f"place_ = threadIdx.x % 32 / {team} * {of_team} + b % {of_team};",
        ]
        self.start = ["tile_rows = reinterpret_cast<float*>(shared + " + f"{self.bytes}) + threadIdx.x / 32 * "
                      "kRowsOfWarp;"]  # fmt: skip
        self.own = ["window.next(index, position, static_cast<const I*>(args.graph.indptr));"]
        indptr = "static_cast<const I*>(args.graph.indptr)"
        self.begin = [f"window.start(own_row, position, last, {indptr}, this->template team<false>());"]
        widest = max((p.item.numel for p in products.products.values()), default=0)
        self.registers += min(widest, 64) // 8 * 4 * (self.edges // 16 if widest <= 64 else 1) // 2

    @property
    def in_step(self) -> bool:
        """Whether the warps of a block wait for each other."""
        return bool(self.products.outers)

    def phase(self, phase: Phase, staged: list[Staged], of_team: int) -> list[str]:
        """The statements for the edges of a sub-warp, and what they leave in rows."""
        team = self.products.writer.tiles.team
        inside = "" if team == self.writer.lanes else "if (inside) "
        ahead = max(n for n in (8, 4, 2, 1) if n <= of_team and (n == 1 or phase.words * n <= MOST_AHEAD))
        text = " ".join([*phase.lines, *phase.load, *(name for s in staged for name in s.names)])

        def given(name: str) -> str:
            return f"__shfl_sync(kFullWarp, {name}, b + v + u, {team})"

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
            puts.append(
                f"{inside}{{ const float x[{len(values)}] = {{{', '.join(values)}}}; "
                f"keep_values(tile_rows + {rows.name} + (place_ + u) * {rows.columns + PAD} + {place}, x); }}"
            )
        return [
            f"for (int v = 0; v < {of_team}; v += {ahead}) {{",
            f"  constexpr int kBatch = {ahead}; constexpr bool kWhole = true;",
            f"  place_ = threadIdx.x % 32 / {team} * {of_team} + v;",
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

    def matrix(self, matrix: Matrix, columns: int, depth: int) -> str:
        """The pointer to a matrix in shared memory."""
        key = id(matrix.operand), matrix.start, matrix.column, matrix.feature, columns, depth
        if key not in self.matrices:
            self.matrices[key] = f"reinterpret_cast<const float*>(shared + {self.bytes})"
            self.fills.append(
                f"fill_by_features<{columns}, {depth}>({self.writer.pointer(matrix.operand)} + {matrix.start}, "
                f"{matrix.column}, {matrix.feature}, reinterpret_cast<float*>(shared + {self.bytes}));"
            )
            self.bytes += 4 * columns * depth
        return self.matrices[key]
