"""Lowers a walk to items: what it computes for each edge and each row as expressions of scalars.

:func:`lower` is the first of two steps to code, common to all devices. The second,
:func:`edgeless.programs.c.loops.arrange`, makes loops of the items. An op that is not here raises
:class:`edgeless.programs.lowering.items.NotLowered`, and the interpreter runs the walk.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Optional, Union

import torch
from torch import Tensor
from torch.fx import Node

from ..front import ops
from ..front.rules import is_pointwise, name_of, shape_of, space_of, value_of
from ..front.spaces import EDGE, Sizes
from ..scheduling.schedule import Walk, is_fold, is_total
from . import items
from .items import (
    Draw,
    EdgeNumber,
    Folded,
    Item,
    NotLowered,
    Number,
    Operand,
    RowRead,
    apply,
    cast,
    expand,
    reshape,
)
from .scalar_ops import OPS, arguments_of, share, where

VIEWS: dict[str, Callable] = {}
Result = Union[Item, tuple]


@dataclass
class Total:
    """A sum of ``source`` over all edges, into an array of ``shape``.

    Attributes:
        source: an item of the edge.
        row: set where the source is added to one row of dim 0 only: an item with one element, the index of that row.
            The source's shape is then the array's without dim 0.
    """

    node: Node
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: Item
    row: Optional[Item] = None


@dataclass
class Lowered:
    """The items that a walk computes.

    Attributes:
        end: the end of the walk: the row of ``edge_index`` whose nodes own the rows.
        folds: ``(node, item, argument)`` for every sink that is a fold; ``argument`` is the item of an extremum's
            argument if it is read, else None, and ``item`` is always the fold itself.
        totals: the sinks that are sums over all edges.
        by_edge: ``(node, item)`` for every sink by edge.
        operands: the tensors that the walk reads, in order.
        winners: arguments of extrema, if only edges that they name, or that rows with equal extrema have, matter.
    """

    end: int
    folds: list[tuple[Node, Folded, Optional[Folded]]] = field(default_factory=list)
    totals: list[Total] = field(default_factory=list)
    by_edge: list[tuple[Node, Item]] = field(default_factory=list)
    operands: list[Operand] = field(default_factory=list)
    winners: list[Operand] = field(default_factory=list)


def lower(walk: Walk, sizes: Sizes, needed: set[Node], double: bool = False) -> Lowered:
    """Lowers a walk.

    Args:
        sizes: the sizes of the trace.
        needed: the nodes that some step or result reads; arguments of extrema are computed only if they are read.
        double: whether all floating-point values are float64, whatever their dtype in the trace.
    Raises:
        NotLowered: an op has no text.
    """
    return _Lowering(walk, sizes, needed, double).run()


def views(*names: str):
    """Registers how ops that move elements are lowered."""

    def register(function):
        VIEWS.update(dict.fromkeys(names, function))
        return function

    return register


class _Lowering:
    def __init__(self, walk: Walk, sizes: Sizes, needed: set[Node], double: bool):
        self.walk, self.sizes, self.needed, self.double = walk, sizes, needed, double
        self.result = Lowered(walk.end)
        self.made: dict[Node, Result] = {}
        self.operands: dict[tuple, Operand] = {}

    def run(self) -> Lowered:
        sinks = set(self.walk.sinks)
        for node in self.walk.ops:
            try:
                if is_total(node):
                    self.result.totals.append(self.total(node))
                    continue
                self.made[node] = self.op(node)
            except NotLowered:
                raise
            except Exception as error:
                raise NotLowered(f"{name_of(node)} ({type(error).__name__}: {error})") from error
            if node not in sinks:
                continue
            if is_fold(node):
                best, arg = self.made[node] if isinstance(self.made[node], tuple) else (self.made[node], None)
                wanted = arg is not None and self.reads_argument(node)
                self.result.folds.append((node, best, arg if wanted else None))
            else:
                if not isinstance(self.made[node], Item):
                    raise NotLowered(f"{name_of(node)} by edge")
                self.result.by_edge.append((node, self.made[node]))
        self.result.operands = list(self.operands.values())
        self.result.winners = self.winners()
        return self.result

    def winners(self) -> list[Operand]:
        """The arguments of extrema whose shares all results are sums of, if they are."""
        shares = [node for node in self.walk.ops if node.target is ops.share]
        found = [self.made.get(node.args[2]) for node in shares]
        apart = all(isinstance(a, Operand) and a.kind in ("own", "near") for a in found)
        by_edge = any(o.kind == "edge" and o.dtype.is_floating_point for o in self.result.operands)
        if not shares or not apart or by_edge or self.result.by_edge:
            return []
        return list(dict.fromkeys(found)) if vanish_with(shares, self.walk) else []

    def reads_argument(self, node: Node) -> bool:
        return any(u.target is operator.getitem and u.args[1] == 1 and u in self.needed for u in node.users)

    # Reading --------------------------------------------------------------------------------------------------------

    def item_shape(self, node: Node) -> tuple[int, ...]:
        """The item shape of a node's value."""
        shape, space = shape_of(node), space_of(node)
        if not space.rows:
            return shape
        return tuple(n // self.sizes.of(space.kind) if d == space.dim else n for d, n in enumerate(shape))

    def dtype(self, node: Node) -> torch.dtype:
        """The dtype of a node's value, or of the first of its values."""
        value = value_of(node)
        dtype = (value[0] if isinstance(value, (tuple, list)) else value).dtype
        return torch.float64 if self.double and dtype.is_floating_point else dtype

    def operand(self, node: Node, kind: str) -> Operand:
        """A tensor from outside of the walk."""
        if (node, kind) not in self.operands:
            space, value = space_of(node), value_of(node)
            if not isinstance(value, Tensor):
                raise NotLowered(f"{name_of(node)} as an operand")
            shape = shape_of(node) if kind == "param" else self.item_shape(node)
            self.operands[node, kind] = Operand(shape, self.dtype(node), node, kind, space.dim)
        return self.operands[node, kind]

    def on_edges(self, node: Node) -> Item:
        """A value as an op on edges reads it."""
        if node in self.made:
            return self.made[node]
        space = space_of(node)
        if space.is_ends:
            raise NotLowered("edge_index as a whole")
        if space.kind == EDGE:
            return self.operand(node, "edge")
        if space.rows:
            raise NotLowered("rows of nodes as a whole")
        return self.operand(node, "param")

    def on_rows(self, node: Node) -> Item:
        """A value as an op on the walk's rows reads it."""
        if node in self.made:
            return self.made[node]
        return self.operand(node, "own" if space_of(node).rows else "param")

    # Ops ------------------------------------------------------------------------------------------------------------

    def op(self, node: Node) -> Result:
        target, space = node.target, space_of(node)
        if target is ops.gather_rows:
            x, _, end, _ = node.args
            if end == self.walk.end:
                return RowRead(*_like(self.on_rows(x)), self.on_rows(x)) if x in self.made else self.operand(x, "own")
            if x in self.made:
                raise NotLowered("a gather of the walk's own results")
            return self.operand(x, "near")
        if target is ops.fold:
            source = self.on_edges(node.args[0])
            return Folded(*_like(source), source, node.args[-1])
        if target is ops.extremum:
            source = self.on_edges(node.args[0])
            best = Folded(*_like(source), source, node.args[-1])
            return best, Folded(source.shape, torch.int64, source, node.args[-1], best)
        if target is ops.share:
            edge_id = EdgeNumber((1,) * len(shape_of(node)), torch.int64, "id")
            return share(*(self.on_edges(a) for a in node.args[:3]), edge_id)
        if target is ops.dropout_scale:
            like, seed, _, key, p = node.args
            if space.dim != 0 or self.item_shape(like)[0] != 1:
                raise NotLowered("dropout of joined rows")
            return Draw(self.item_shape(node), self.dtype(node), self.operand(seed, "param"), key, p)
        if space.kind == EDGE and space.end is not None and name_of(node) in ("select", "unbind"):
            return self.ids_of(node)
        return self.compute(node, self.on_edges if space.kind == EDGE else self.on_rows)

    def ids_of(self, node: Node) -> Result:
        ids = [EdgeNumber((1,), torch.int64, "own" if end == self.walk.end else "near") for end in (0, 1)]
        return ids[space_of(node).end] if name_of(node) == "select" else tuple(ids)

    def compute(self, node: Node, read: Callable[[Node], Item]) -> Result:
        """An op whose operands are read by ``read``."""
        if node.target is operator.getitem:
            return read(node.args[0])[node.args[1]]
        name, value = name_of(node), value_of(node)

        def given(a: Any) -> Any:
            if isinstance(a, Node):
                return read(a)
            if isinstance(a, (list, tuple)):
                return type(a)(map(given, a))
            return a

        if name in VIEWS:
            return VIEWS[name](self, node, given)
        if is_pointwise(node) and name in OPS:
            return self.pointwise(node, name, given)
        if isinstance(value, Tensor) and space_of(node).fill is not None:
            return items.number(space_of(node).fill, self.dtype(node), self.item_shape(node))
        raise NotLowered(name)

    def pointwise(self, node: Node, name: str, given: Callable) -> Result:
        args, dtype = [self.number(given(a)) for a in node.args], self.dtype(node)
        common = dtype
        operands = [value_of(a) if isinstance(a, Node) else a for a in node.args if isinstance(a, (Node, int, float))]
        if len(operands) == 2:
            common = torch.result_type(*operands) if isinstance(operands[0], Tensor) else operands[1].dtype
        elif operands and isinstance(operands[0], Tensor):
            common = operands[0].dtype
        if self.double and common.is_floating_point:
            common = torch.float64
        args = arguments_of(name, tuple(args), dtype, common)
        if not any(isinstance(a, Item) for a in args):
            raise NotLowered(f"{name} of numbers")
        kwargs = {k: v for k, v in node.kwargs.items() if k in ("alpha", "value", "approximate", "rounding_mode")}
        kwargs |= {k: v for k, v in node.kwargs.items() if k in ("min", "max")}
        out = OPS[name](*args, **kwargs)
        shape = self.item_shape(node)
        return tuple(out) if isinstance(out, tuple) else expand(cast(out, dtype), shape)

    def number(self, a: Any) -> Any:
        """A number of the trace as an item; a multiple of a size of the trace becomes a multiple of the graph's."""
        if isinstance(a, bool) or not isinstance(a, (int, float)) or not a or a != a:
            return a
        for kind in ("edge", "source", "destination"):
            if abs(a) != float("inf") and a % self.sizes.of(kind) == 0:
                return Number((), torch.int64, int(a // self.sizes.of(kind)), kind)
        return a

    # Sums over all edges --------------------------------------------------------------------------------------------

    def total(self, node: Node) -> Total:
        name, value = name_of(node), value_of(node)
        if not isinstance(value, Tensor):
            raise NotLowered(f"{name} over all edges")
        shape = tuple(value.shape)
        if name == "embedding_dense_backward":
            grad, index, _, padding, _ = node.args
            return self.scattered(node, self.on_edges(grad), self.on_edges(index), 0, padding)
        if name in ("index_add", "index_put", "_index_put_impl_", "_unsafe_index_put"):
            if name == "index_add":
                _, dim, index, src = node.args[:4]
            else:
                dim, index = next((d, i) for d, i in enumerate(node.args[1]) if i is not None)
                src = node.args[2]
            return self.scattered(node, self.on_edges(src), self.on_edges(index), dim, -1)
        source = self.compute(node, self.on_edges)
        return Total(node, shape, self.dtype(node), reshape(source, shape))

    def scattered(self, node: Node, grad: Item, index: Item, dim: int, padding: int) -> Total:
        shape, dtype = tuple(value_of(node).shape), self.dtype(node)
        if index.numel != 1 or dim != 0:
            raise NotLowered(f"{name_of(node)} by several indices of an edge")
        rest, index = reshape(grad, shape[1:]), from_start(reshape(index, ()), shape[0])
        if padding >= 0:
            rest = where(expand(apply("eq", index, padding, dtype=torch.bool), rest.shape), 0, rest)
        return Total(node, shape, dtype, rest, index)


_LINEAR = (
    *("neg", "t", "transpose", "view", "_unsafe_view", "unsqueeze", "squeeze", "expand", "sum", "threshold_backward"),
)


def vanish_with(shares: list[Node], walk: Walk) -> bool:
    """Whether an edge whose shares are 0 adds 0 to all results of a walk, if all numbers are finite."""
    zero = set(shares)
    for node in walk.ops:
        name, args = name_of(node), node.args
        if node.target is ops.fold:
            vanishes = args[-1] == "sum" and args[0] in zero
        elif name in ("mul", "mm"):
            vanishes = any(a in zero for a in args)
        elif name in ("add", "sub"):
            vanishes = all(a in zero for a in args[:2])
        elif name == "div" or name in _LINEAR:
            vanishes = args[0] in zero
        else:
            continue
        if vanishes:
            zero.add(node)
    return all(sink in zero for sink in walk.sinks)


def from_start(index: Item, extent: int) -> Item:
    """Converts indices to int64, and negative ones, which count from the end, to indices from the start."""
    index = cast(index, torch.int64)
    return where(apply("lt", index, 0, dtype=torch.bool), apply("add", index, extent), index)


def _like(item: Item) -> tuple[tuple[int, ...], torch.dtype]:
    return item.shape, item.dtype


from . import lower_views  # noqa: E402, F401  registers the ops that move elements
