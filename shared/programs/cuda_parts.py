"""What the text of a pass on CUDA is made of: registers, states of folds, sums over all edges, types and numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Optional

import numpy as np
import torch

from .items import Folded, Item, NotLowered, Operand, RowRead
from .online import Online

HEADER = "programs/walk.cuh"
ONCE, ROW, EDGE, STORE = range(4)  # when a statement runs; the last, where a row's results are written
MOST_REGISTERS = 512  # of one value
MOST_KEPT = 24  # values of parameters that a thread keeps; more of them are read from shared memory for every edge
SHARED_BYTES = 24 << 10  # of such parameters in a block
BLOCK_BYTES = 47 << 10  # of these and of the results of its threads
SEGMENT_BYTES = 352  # a block keeps those of its 128 threads in shared memory

_STORED = {
    torch.float32: "float", torch.float64: "double", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16",
    torch.int64: "int64_t", torch.int32: "int32_t", torch.int16: "int16_t", torch.int8: "int8_t",
    torch.uint8: "uint8_t", torch.bool: "uint8_t",
}  # fmt: skip
VIEWS = ("t", "transpose", "permute", "view", "_unsafe_view", "unsqueeze", "squeeze", "select", "slice", "detach")
_HALVES = (torch.float16, torch.bfloat16)


def stored_type(dtype: torch.dtype) -> str:
    """The type of a dtype's numbers in memory."""
    if dtype not in _STORED:
        raise NotLowered(f"numbers of {dtype}")
    return _STORED[dtype]


def value_type(dtype: torch.dtype) -> str:
    """The type that numbers are computed in."""
    return "float" if dtype in _HALVES else "bool" if dtype is torch.bool else stored_type(dtype)


def literal(value, dtype: torch.dtype) -> str:
    """A number in C++."""
    if dtype is torch.bool:
        return "true" if value else "false"
    if not dtype.is_floating_point:
        return f"({int(value)}{'LL' if dtype is torch.int64 else ''})"
    kind = value_type(dtype)
    if math.isinf(value) or math.isnan(value):
        number = "NAN" if math.isnan(value) else "INFINITY"
        return f"({'-' if value == -math.inf else ''}{kind}({number}))"
    return f"({float(np.float32(value)).hex()}f)" if kind == "float" else f"({float(value).hex()})"


@dataclass
class Value:
    """The registers of a value at a table, one for each column, and how often they are computed."""

    names: list[str]
    when: int


@dataclass
class State:
    """A fold over a row's edges in registers; ``first`` and ``top`` are those of an online sum."""

    name: str
    fold: Folded
    arg: Optional[Folded]
    table: np.ndarray
    first: list[str] = field(default_factory=list)  # for each column that of ``top``
    top: Optional[State] = None  # of an online sum


@dataclass
class Total:
    """A sum over all edges: ``places`` has for each element of the result its column and lane, or lane -1: all.
    ``in_tiles``: computed by tensor cores.
    """

    item: Item
    columns: int
    places: np.ndarray
    in_tiles: bool = False


@dataclass
class Text:
    """The text of a kernel, and what its pointers are.

    Attributes:
        code: behind the header.
        reads: operands and folds of earlier stages.
        writes: items whose tensors are written: folds, results by edge, then the parts of totals.
        totals: how the parts of each total make it.
        vectors: lanes that a row fills.
        carry: bytes of a lane's partial result.
        batch, blocks: edges in flight, blocks that an SM holds.
        registers: of a thread, about.
        shared_bytes: of dynamic shared memory in a block.
        in_tiles: results that tensor cores compute.
        by_products: whether the pass has products as in :mod:`edgeless.programs.cuda_products`.
    """

    code: str
    reads: list[Item]
    writes: list[Item]
    totals: list[Total]
    vectors: int
    carry: int
    batch: int
    blocks: int
    registers: int
    shared_bytes: int
    in_tiles: int
    by_products: bool


@dataclass
class Stage:
    """What one pass over the edges computes.

    Attributes:
        folds: of rows; the argument of an extremum after the extremum.
        by_edge: results by edge.
        totals: sums over all edges.
        online: of the folds that are computed beside a maximum, by their id, what they are made of.
    """

    folds: list[Folded] = field(default_factory=list)
    by_edge: list[Item] = field(default_factory=list)
    totals: list[Item] = field(default_factory=list)
    online: dict[int, Online] = field(default_factory=dict)

    def apart(self) -> list[Stage]:
        """Sums over all edges and all else as two stages, if there is both."""
        if not self.totals or not (self.folds or self.by_edge):
            return []
        return [Stage(self.folds, self.by_edge, [], self.online), Stage([], [], self.totals)]

    def halves(self) -> list[Stage]:
        """The same as two stages; none if that cannot be."""
        if self.apart():
            return self.apart()
        if self.folds and self.by_edge:
            return [Stage(self.folds, [], [], self.online), Stage([], self.by_edge)]
        middle = len(self.totals) // 2
        return [Stage([], [], self.totals[:middle]), Stage([], [], self.totals[middle:])] if middle else []

    def sources(self) -> list[Item]:
        """The items that are computed for each edge."""
        folds = [self.online[id(f)].source if id(f) in self.online else f.source for f in self.folds]
        return [*folds, *self.by_edge, *self.totals]

    def frame(self) -> tuple[int, int]:
        """The elements that are spread over lanes, and the bytes of one."""
        sinks = [item.numel for item in self.sources()]
        seen, operands, stack = set(), [], list(self.sources())
        while stack:
            item = stack.pop()
            if id(item) in seen:
                continue
            seen.add(id(item))
            if isinstance(item, Operand) and item.kind != "param":
                operands.append(item)
            stack.extend([item.row] if isinstance(item, RowRead) else [] if isinstance(item, Folded) else item.parts())
        folds = [fold.numel for fold in self.folds]
        width = max([*folds, *(o.numel for o in operands if o.kind != "edge")] or [o.numel for o in operands] or sinks)
        sizes = [o.dtype.itemsize for o in operands if o.numel == width and o.kind != "own"]
        return width, min(sizes or [4])
