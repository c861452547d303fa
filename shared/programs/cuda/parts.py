"""The parts of the text of a pass on CUDA: registers, states of folds, sums over all edges, types and literals."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Optional

import numpy as np
import torch

from ..lowering.items import Folded, Item, NotLowered, Operand, RowRead
from .online import Online

HEADER = "programs/walk.cuh"
ONCE, ROW, EDGE, STORE = range(4)  # when a statement runs; STORE: when a row's results are written
MOST_REGISTERS = 512  # for one value
MOST_KEPT = 24  # values of parameters that a thread keeps; more of them are read from shared memory for every edge
SHARED_BYTES = 24 << 10  # for the parameters that a block copies to shared memory
BLOCK_BYTES = 47 << 10  # for these and the partial results of the block's threads
SEGMENT_BYTES = 352  # limit of a thread's partial result; a block keeps those of its 128 threads in shared memory

_STORED = {
    torch.float32: "float", torch.float64: "double", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16",
    torch.int64: "int64_t", torch.int32: "int32_t", torch.int16: "int16_t", torch.int8: "int8_t",
    torch.uint8: "uint8_t", torch.bool: "uint8_t",
}  # fmt: skip
VIEWS = ("t", "transpose", "permute", "view", "_unsafe_view", "unsqueeze", "squeeze", "select", "slice", "detach")
_HALVES = (torch.float16, torch.bfloat16)


def stored_type(dtype: torch.dtype) -> str:
    """The C++ type of a dtype in memory."""
    if dtype not in _STORED:
        raise NotLowered(f"numbers of {dtype}")
    return _STORED[dtype]


def value_type(dtype: torch.dtype) -> str:
    """The C++ type of a dtype in arithmetic."""
    return "float" if dtype in _HALVES else "bool" if dtype is torch.bool else stored_type(dtype)


def literal(value, dtype: torch.dtype) -> str:
    """A literal in C++."""
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
    """The registers of a value at a table, one for each column, and when they are computed."""

    names: list[str]
    when: int


@dataclass
class State:
    """A fold over a row's edges in registers; ``first`` and ``top`` are set for an online sum."""

    name: str
    fold: Folded
    arg: Optional[Folded]
    table: np.ndarray
    first: list[str] = field(default_factory=list)  # for each column the register of ``top``
    top: Optional[State] = None  # the state of the maximum


@dataclass
class Total:
    """A sum over all edges. ``places`` has for each element of the result its column and lane; lane -1 means all lanes.
    ``in_tiles``: whether tensor cores compute it.
    """

    item: Item
    columns: int
    places: np.ndarray
    in_tiles: bool = False


class FunctorLines:
    """The lines of a functor that compute a pass's products on tensor cores, by where they stand in it.

    Args:
        parameter_bytes: shared memory for parameters, in front of the products' rows.

    Attributes:
        bytes: the shared memory in front of the warps' rows.
        floats: the shared memory of a warp's rows, in floats.
        finish: (call, columns of its parts) for each sum over all edges.
        registers, least_registers: the registers of a thread beside the others, and the least in all.
    """

    def __init__(self, parameter_bytes: int):
        self.bytes = (parameter_bytes + 15) // 16 * 16
        self.floats = self.registers = self.least_registers = 0
        self.constants: list[str] = []
        self.fills: list[str] = []
        self.members: list[str] = []
        self.own: list[str] = []
        self.choose: list[str] = []
        self.begin: list[str] = []
        self.put: list[str] = []  # after the statements of an edge
        self.close: list[str] = []
        self.finish: list[tuple[str, int]] = []


@dataclass
class Text:
    """The text of a kernel, and the tensors that its pointers refer to.

    Attributes:
        code: the text behind the header.
        reads: the operands and the folds of earlier stages that it reads.
        writes: items whose tensors are written: folds, results by edge, then the parts of totals.
        totals: the sums over all edges, with the places of their elements in the blocks' parts.
        vectors: the number of lanes that a row fills.
        carry: the bytes of a lane's partial result in the fix-up workspace.
        batch, blocks: the edges in flight, and the blocks that an SM holds.
        registers: the estimated registers of a thread.
        shared_bytes: the dynamic shared memory of a block.
        in_tiles: the number of results that tensor cores compute.
        by_products: whether the pass has products as in :mod:`edgeless.programs.cuda.products`.
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
    """The computation of one pass over the edges.

    Attributes:
        folds: folds over rows; the argument of an extremum follows the extremum.
        by_edge: results by edge.
        totals: sums over all edges.
        online: id of a fold that is computed together with a maximum -> its parts.
    """

    folds: list[Folded] = field(default_factory=list)
    by_edge: list[Item] = field(default_factory=list)
    totals: list[Item] = field(default_factory=list)
    online: dict[int, Online] = field(default_factory=dict)

    def apart(self) -> list[Stage]:
        """Splits the stage into sums over all edges and the rest, if it has both."""
        if not self.totals or not (self.folds or self.by_edge):
            return []
        return [Stage(self.folds, self.by_edge, [], self.online), Stage([], [], self.totals)]

    def halves(self) -> list[Stage]:
        """Splits the stage into two with about half of the results; empty if it cannot be split."""
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
        """The number of elements that are spread over lanes, and the bytes of an element."""
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
