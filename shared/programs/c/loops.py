"""A walk as loops over scalars, which an emitter writes as text; :mod:`edgeless.programs.c.arrange` makes them.

A row of the walk's end is computed in passes over its edges, since a fold may need earlier folds of the same row: the
sum of a softmax needs the maximum. Each pass has statements for one edge and statements for the row after its edges. A
statement is a loop nest over the elements of an item. Its body assigns scalars, each once. Its end stores the elements
in small arrays of the edge or of the row, or accumulates them. Views have become indices. Only these items become
arrays: results of reductions, items made of parts, draws of dropout, and values that several loops would compute again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Optional, Union

import torch
from torch.fx import Node

from ..lowering.affine import Index, Var
from ..lowering.items import Draw, Operand


@dataclass(eq=False)
class Buffer:
    """A contiguous array of an ``"edge"``, of a ``"row"`` or, as ``"total"``, of the whole walk; a ``sparse`` one is 0
    but for few elements, shares of extrema.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    scope: str
    sparse: bool = False

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


@dataclass(eq=False)
class Fold:
    """A fold of a row's edges: ``"sum"``, ``"prod"``, ``"amax"`` or ``"amin"``.

    Attributes:
        best: the array that has the result after the pass; a row without edges has 0, or 1 for a product.
        argument: the array of an extremum's argument, int64, if it is read: the id of the only edge that has the
            extremum; minus the number of edges within its tolerance if several have it; 0 if there are no edges or the
            extremum is NaN.
        node: the sink that ``best`` is stored for, or None; ``argument`` belongs to the same sink.
    """

    op: str
    best: Buffer
    argument: Optional[Buffer] = None
    node: Optional[Node] = None


@dataclass(eq=False)
class TotalArray:
    """A sum over all edges: the sink and its array. Parts of the edges have arrays of their own, added in order."""

    node: Node
    array: Buffer


@dataclass(eq=False)
class EdgeResult:
    """A result by edge with ``numel`` elements per edge."""

    node: Node
    numel: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Dynamic:
    """A computed summand of an index: ``stride`` times the int64 scalar ``name``, which is below ``extent``."""

    name: str
    stride: int
    extent: int


@dataclass(frozen=True)
class Let:
    """A scalar: ``name`` is ``op`` of ``args``.

    ``op`` is a primitive of ``TEXTS``, whose args are names of scalars; ``"number"`` of (value, size), see
    :class:`~edgeless.programs.lowering.items.Number`; ``"edge"`` of (which), see
    :class:`~edgeless.programs.lowering.items.EdgeNumber`; or ``"load"`` of an :class:`Operand` or :class:`Buffer`, at
    ``index`` plus ``dynamic``.
    """

    name: str
    dtype: torch.dtype
    op: str
    args: tuple[Any, ...]
    index: Index = Index()
    dynamic: Optional[Dynamic] = None


@dataclass(frozen=True)
class Store:
    """Puts a scalar into an array, or a result by edge, at an index."""

    into: Union[Buffer, EdgeResult]
    index: Index
    value: str


@dataclass(frozen=True)
class Accumulate:
    """Adds a scalar to a fold or a total at an index."""

    into: Union[Fold, TotalArray]
    index: Index
    value: str
    dynamic: Optional[Dynamic] = None


@dataclass(eq=False)
class Loop:
    """A loop nest over ``vars``, outermost first, with ``ends`` behind the body.

    Where ``reduced`` is not empty, the body is inside of inner loops over these variables, the primitive ``op`` reduces
    ``value`` over them, and the only end stores the result under the name ``value``.
    """

    vars: tuple[Var, ...]
    reduced: tuple[Var, ...] = ()
    op: str = ""
    value: str = ""
    body: list[Let] = field(default_factory=list)
    ends: list[Union[Store, Accumulate]] = field(default_factory=list)


@dataclass(eq=False)
class DrawLoop:
    """Fills an array with factors of dropout; see :class:`edgeless.programs.lowering.items.Draw`."""

    into: Buffer
    draw: Draw


Statement = Union[Loop, DrawLoop]


@dataclass
class Pass:
    """A pass over a row's edges: statements of each edge, the folds that it finishes, then statements of the row."""

    edge: list[Statement] = field(default_factory=list)
    folds: list[Fold] = field(default_factory=list)
    row: list[Statement] = field(default_factory=list)


@dataclass
class Arranged:
    """A walk as loops.

    Attributes:
        operands: the tensors that the walk reads.
        first: statements of the row before the first pass.
        passes: the passes in order.
        totals, by_edge: the other sinks.
        buffers: all arrays of edges and rows except those of folds and totals.
        winners: see :class:`edgeless.programs.lowering.lower.Lowered`.
    """

    end: int
    operands: list[Operand]
    first: list[Statement]
    passes: list[Pass]
    totals: list[TotalArray]
    by_edge: list[EdgeResult]
    buffers: list[Buffer]
    winners: list[Operand] = field(default_factory=list)
