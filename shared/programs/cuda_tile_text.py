"""The text of the products that :mod:`edgeless.programs.cuda_tiles` finds and core_cuda/programs/tiles.cuh computes."""

from __future__ import annotations

from collections.abc import Callable

from .cuda_parts import stored_type
from .cuda_tiles import PAD, Matrix, Rows, Tiles, rest, row_of

WARPS, EDGES = 4, 16  # of a block, of a tile


class TileText:
    """The lines of a functor that compute a pass's products, if it has some.

    Args:
        tiles: what is computed.
        parameter_bytes: of shared memory in front of what products need.
    """

    def __init__(self, tiles: Tiles, parameter_bytes: int):
        self.tiles, self.writer = tiles, tiles.writer
        self.bytes = (parameter_bytes + 15) // 16 * 16
        self.floats = 0  # of a warp
        self.constants: list[str] = []
        self.fills: list[str] = []
        self.matrices: dict[tuple, str] = {}
        self.put: list[str] = []  # what lanes write for each edge
        self.members: list[str] = []
        self.own: list[str] = []
        self.begin: list[str] = []
        self.choose: list[str] = []
        self.close: list[str] = []
        self.finish: list[tuple[str, int]] = []  # with the columns of its parts
        self.registers = 0

    in_step = False  # warps do not wait for each other
    least_registers = 0

    def write(self, output: Callable) -> None:
        """Writes the lines; ``output`` makes a pointer to a result by edge."""
        tiles = self.tiles
        if not tiles.used:
            return
        for product in tiles.products:
            self.place(product.rows)
        free = [product.rows for product in tiles.products if product.rows.own]
        self.rows: dict[int, Rows] = {}
        for key, (rows, names, _) in tiles.staged.items():
            taken = next((r for r in free if r.columns == rows.columns), None)
            if taken is None:
                self.place(rows)
            else:  # what a lane has read of the product is not needed any more
                free.remove(taken)
            self.rows[key] = taken or rows
            place = self.writer.place(tiles.own_table(rows.columns)[:, :1], len(names))
            self.put.append(
                f"{self.inside}{{ const float x[{len(names)}] = {{{', '.join(names)}}}; "
                f"keep_values({row_of(self.rows[key])} + {place}, x); }}"
            )
        self.opening()
        if not tiles.staged:
            return
        self.closing(output)

    @property
    def inside(self) -> str:
        """The condition that a lane has values of the row."""
        return "" if self.tiles.sub_warp == self.writer.lanes else "if (inside) "

    def place(self, rows: Rows) -> None:
        self.constants.append(f"{rows.name} = {self.floats}")
        self.floats += EDGES * (rows.columns + PAD)

    def opening(self) -> None:
        """The products of features, in front of the first batch of a tile."""
        sub_warp = self.tiles.sub_warp
        lines, loads = [], []
        for each in self.tiles.features:
            kind = stored_type(each.operand.dtype)
            self.members.append(f"TileFeatures<{kind}, {each.count}, {each.operand.numel}> {each.name};")
            loads.append(f"{each.name}.load({self.writer.pointer(each.operand)} + {each.start}, tile.ahead);")
            self.registers += each.count // 2
        for each in self.tiles.features:
            if each.kept:
                self.constants.append(f"k_{each.name} = {self.floats}")
                self.floats += EDGES * (each.count + PAD)
                lines.append(f"{each.name}.keep(tile_rows + k_{each.name});")
        for product in self.tiles.products:
            columns, features = product.rows.columns, product.features
            matrix = self.matrix(product.matrix, columns, features.count, "features")
            lines.append(
                f"multiply_features<{rest(features.operand)}, {rest(product.matrix.operand)}, {columns}>("
                f"{features.name}, {matrix}, tile_rows + {product.rows.name});"
            )
        lines = [
            "__syncwarp();",
            f"if (tile.starts(own_id, b)) {{ {' '.join(loads)} }}",
            "tile.open(b);",
            *lines,
            "tile.look_ahead(own_id, next_id);",
            *loads,
            "__syncwarp();",
        ]
        self.members += [f"TileOfWarp<{sub_warp}> tile;", "float* tile_rows; int place_ = 0;"]
        self.choose = [
            f"if (b % {sub_warp // 2} == 0) {{",
            *(f"  {line}" for line in lines),
            "}",
            "place_ = tile.place(b);",
        ]
        self.registers -= 8

    def closing(self, output: Callable) -> None:
        """The products of what lanes have computed, behind the last batch of a tile."""
        tiles, half = self.tiles, self.tiles.sub_warp // 2
        lines = ["tile.count += count;", f"if ((b + kBatch) % {half} != 0 && !last) return;"]
        lines.append(f"if (!__all_sync(kFullWarp, tile.count == {half})) {{")
        for key, (rows, names, _) in tiles.staged.items():
            place = self.writer.place(tiles.own_table(rows.columns)[:, :1], len(names))
            lines.append(
                f"  clear_missing<{len(names)}, {rows.columns}>(tile_rows + {self.rows[key].name}, {place}, inside, "
                "tile);"
            )
        lines += ["}", "__syncwarp();"]
        for gradient, item in tiles.gradients:
            lines.append(f"{{ TileGradients<{gradient.count}> sums;")
            for values, matrix in gradient.terms:
                columns = values.numel
                text = self.matrix(matrix, columns, gradient.count, "columns")
                lines.append(
                    f"  sums.template multiply_columns<{rest(matrix.operand)}, {rest(values)}, {columns}>("
                    f"tile_rows + {self.rows[id(values)].name}, {text});"
                )
            lines.append(f"  sums.store({output(item)}, tile, tile.existing()); }}")
        for outer, total in tiles.outers:
            columns, features = outer.values.numel, outer.features
            name = self.writer.name("a")
            self.members.append(f"TileTotals<{columns}, {features.count}> {name};")
            self.registers += total.item.numel // 32
            lines.append(
                f"{name}.template add<{rest(outer.values)}, {rest(features.operand)}>("
                f"tile_rows + {self.rows[id(outer.values)].name}, tile_rows + k_{features.name});"
            )
            self.finish.append((name, total.columns))
        self.close = lines

    def matrix(self, matrix: Matrix, columns: int, features: int, by: str) -> str:
        """The pointer to a matrix in shared memory."""
        key = id(matrix.operand), matrix.start, matrix.column, matrix.feature, by
        if key not in self.matrices:
            self.matrices[key] = f"reinterpret_cast<const float*>(shared + {self.bytes})"
            self.fills.append(
                f"fill_by_{by}<{columns}, {features}>({self.writer.pointer(matrix.operand)} + {matrix.start}, "
                f"{matrix.column}, {matrix.feature}, reinterpret_cast<float*>(shared + {self.bytes}));"
            )
            self.bytes += 4 * columns * features
        return self.matrices[key]

    @property
    def shared_bytes(self) -> int:
        """Of dynamic shared memory in a block."""
        return self.bytes + (WARPS * self.floats * 4 if self.tiles.used else 0)

    @property
    def start(self) -> list[str]:
        """What the functor's constructor does."""
        if not self.tiles.used:
            return []
        return [f"tile_rows = reinterpret_cast<float*>(shared + {self.bytes}) + threadIdx.x / 32 * {self.floats};"]
