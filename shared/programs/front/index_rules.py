"""Rules of index ops, and their replacement by the generator's own ops: gathers from nodes to edges and folds back.

After :func:`normalise` a graph has no index tensors any more: only ``gather_rows``, ``fold`` and ``extremum`` go
between nodes and edges.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Optional

import torch
from torch.fx import Node

from . import ops
from .recording import Ops
from .rules import Inference, argument, from_front, is_tensor, name_of, rule, shape_of, space_of, value_of
from .spaces import EDGE, Argument, Space

_SUMS = {"scatter_add", "index_add"}


@rule("select")
def _select(infer: Inference, node: Node):
    space, dim = space_of(node.args[0]), from_front(node.args[1], len(shape_of(node.args[0])))
    if space.is_ends:
        if dim != 0:
            infer.refuse(node, "one edge is selected")
        return Space(EDGE, 0, end=node.args[2] % 2)
    if not space.rows:
        return Space()
    if dim == space.dim:
        if space.kind == EDGE:
            infer.refuse(node, "one edge is selected")
        return Space(local=False)
    return replace(space, dim=space.dim - (dim < space.dim), cross=None)


@rule("unbind")
def _unbind(infer: Inference, node: Node):
    space = space_of(node.args[0])
    dim = from_front(argument(node, 1, "dim", 0), len(shape_of(node.args[0])))
    if space.is_ends and dim == 0:
        return [Space(EDGE, 0, end=0), Space(EDGE, 0, end=1)]
    if space.rows and dim == space.dim:
        infer.refuse(node, "rows are split")
    return [Space(space.kind, space.dim - (space.rows and dim < space.dim)) for _ in value_of(node)]


def _looked_up(infer: Inference, node: Node, x: Node, dim: int, index: Node):
    """The space of the rows of ``x`` that an index selects, be it ``[E]`` node ids or any other index."""
    rows, by = space_of(x), space_of(index)
    dim = from_front(dim, len(shape_of(x)))
    if by.end is not None:
        if rows.kind != infer.sizes.side(by.end) or dim != rows.dim:
            infer.refuse(node, f"node ids index something else than rows of the nodes ({list(shape_of(x))})")
        if shape_of(x)[dim] != infer.sizes.of(rows.kind) or len(shape_of(index)) != 1:
            infer.refuse(node, "node ids index rows that were joined")
        return Space(EDGE, dim, cross=("gather", by.end))
    if by.kind == EDGE:
        if rows.rows:
            infer.refuse(node, "rows are taken by indices that were computed for each edge")
        return Space(EDGE, dim + by.dim)
    if rows.kind == EDGE and dim == rows.dim:
        infer.refuse(node, "edges are permuted or selected")
    if rows.kind == EDGE:
        return Space(EDGE, rows.dim + (len(shape_of(index)) - 1) * (dim < rows.dim))
    return None if rows.rows or by.rows else Space()


@rule("index_select")
def _index_select(infer: Inference, node: Node):
    return _looked_up(infer, node, *node.args[:3]) or infer.whole(node)


@rule("embedding")
def _embedding(infer: Inference, node: Node):
    return _looked_up(infer, node, node.args[0], 0, node.args[1]) or infer.whole(node)


@rule("embedding_dense_backward")
def _embedding_backward(infer: Inference, node: Node):
    return infer.total(EDGE) if space_of(node.args[1]).kind == EDGE else infer.whole(node)


def _indices(node: Node) -> list[tuple[int, Node]]:
    return [(dim, index) for dim, index in enumerate(node.args[1]) if index is not None]


@rule("index", "_unsafe_index")
def _index(infer: Inference, node: Node):
    used = _indices(node)
    mask = any(value_of(index).dtype in (torch.bool, torch.uint8) for _, index in used)
    if len(used) == 1 and not mask:
        return _looked_up(infer, node, node.args[0], *used[0]) or infer.whole(node)
    if any(space_of(a).kind == EDGE for a in node.all_input_nodes):
        infer.refuse(node, "edges are indexed by masks or by several indices")
    return infer.whole(node)


@rule("gather")
def _gather(infer: Inference, node: Node):
    x, dim, index = node.args[:3]
    space, dim = space_of(x), from_front(node.args[1], len(shape_of(x)))
    if space_of(index).kind != EDGE and space.kind != EDGE:
        return infer.whole(node)
    if space.kind != EDGE or dim == space.dim or shape_of(x)[space.dim] != shape_of(index)[space.dim]:
        infer.refuse(node, "elements are gathered across rows")
    return space.plain() if space_of(index).plain() == space.plain() else infer.refuse(node, "a gather mixes rows")


def _scattered(infer: Inference, node: Node, base: Node, dim: int, index: Node, src: Node, reduce: str):
    """The space of the result where rows of ``src`` are reduced into ``base`` by an index."""
    into, by, rows = space_of(base), space_of(index), space_of(src)
    dims = len(shape_of(base))
    dim = from_front(dim, dims)
    if by.end is not None:
        side, size = infer.sizes.side(by.end), infer.sizes.of(infer.sizes.side(by.end))
        if into.kind != side or into.dim != dim or shape_of(base)[dim] != size:
            infer.refuse(node, f"messages are reduced into {list(shape_of(base))}, which is no row for each node")
        whole = [n if d != dim else infer.sizes.edges for d, n in enumerate(shape_of(base))]
        one = name_of(node) in ("index_add", "index_put", "_index_put_impl_")
        if list(shape_of(src)) != whole or list(shape_of(index)) != ([infer.sizes.edges] if one else whole):
            infer.refuse(node, "messages are reduced in part")
        if rows.kind != EDGE or rows.dim != dim or (by.dim != dim and not one):
            infer.refuse(node, "messages are reduced in another dimension than theirs")
        if not (reduce == "sum" or into.fill == (1 if reduce == "prod" else 0)):
            infer.refuse(node, "messages are reduced into values that are there")
        return Space(side, dim, cross=("fold", by.end, reduce))
    if by.kind == EDGE:
        if not into.rows and into.fill == 0 and reduce == "sum":
            return infer.total(EDGE)
        if into.kind == EDGE and dim != into.dim and rows.plain() == into.plain() == by.plain():
            return into.plain()
        infer.refuse(node, "rows are reduced by indices that were computed for each edge")
    if EDGE in (rows.kind, into.kind):
        if not by.rows and dim != into.dim and rows.plain() == into.plain():
            return into.plain()
        infer.refuse(node, "rows of edges are scattered")
    return infer.whole(node)


@rule("scatter_add")
def _scatter_add(infer: Inference, node: Node):
    return _scattered(infer, node, *node.args[:4], "sum")


@rule("index_add")
def _index_add(infer: Inference, node: Node):
    if node.kwargs.get("alpha", 1) != 1:
        infer.refuse(node, "index_add has a factor")
    return _scattered(infer, node, *node.args[:4], "sum")


@rule("scatter_reduce")
def _scatter_reduce(infer: Inference, node: Node):
    reduce, self_too = node.args[4], argument(node, 5, "include_self", True)
    if reduce not in ("sum", "prod", *ops.EXTREMA) or self_too != (reduce in ("sum", "prod")):
        infer.refuse(node, f"scatter_reduce reduces by {reduce}, with values that are there")
    return _scattered(infer, node, *node.args[:4], reduce)


@rule("scatter")
def _scatter(infer: Inference, node: Node):
    if any(space_of(a).kind == EDGE for a in node.all_input_nodes):
        base, dim, index = node.args[:3]
        space = space_of(index).plain()
        if space_of(base).plain() == space and from_front(dim, len(shape_of(base))) != space.dim:
            src = node.args[3]
            if space_of(index).end is None and (not is_tensor(src) or space_of(src).plain() in (space, Space())):
                return space
        infer.refuse(node, "one of several messages is taken")
    return infer.whole(node)


@rule("index_put", "_index_put_impl_", "_unsafe_index_put")
def _index_put(infer: Inference, node: Node):
    used, adds = _indices(node), argument(node, 3, "accumulate", False)
    if adds and len(used) == 1 and value_of(used[0][1]).dtype == torch.int64:
        return _scattered(infer, node, node.args[0], *used[0], node.args[2], "sum")
    if any(space_of(a).kind == EDGE for a in node.all_input_nodes):
        infer.refuse(node, "edges are written by index")
    return infer.whole(node)


def normalise(module: Ops, arguments: list[Argument]) -> None:
    """Replaces the index ops of an annotated graph that go between nodes and edges by the generator's own ops.

    The first two placeholders are ``ends`` and ``ids``.
    """
    graph = module.graph
    ends, ids = (node for node, _ in zip(graph.nodes, range(2)))
    for node in list(graph.nodes):
        cross = None if node.op != "call_function" else space_of(node).cross
        if cross is None or cross[0] == "total" or node.target in (ops.gather_rows, ops.fold, ops.extremum):
            continue
        if node.target is operator.getitem:
            continue
        with graph.inserting_before(node):
            if cross[0] == "gather":
                new = _call(graph, node, ops.gather_rows, (node.args[0], ends, cross[1], space_of(node).dim))
            else:
                new = _fold(graph, node, ends, ids)
        node.replace_all_uses_with(new)
    graph.eliminate_dead_code()


def _fold(graph, node: Node, ends: Node, ids: Node) -> Node:
    space = space_of(node)
    _, end, reduce = space.cross
    src = node.args[2] if "index_put" in name_of(node) else node.args[3]
    rows = shape_of(node)[space.dim]
    if reduce in ops.EXTREMA:
        best = graph.call_function(ops.extremum, (src, ends, ids, end, space.dim, rows, reduce))
        value = value_of(node)
        best.meta.update(val=(value, value.new_empty(value.shape, dtype=torch.int64)), space=[space, space])
        best.stack_trace = node.stack_trace
        return _call(graph, node, operator.getitem, (best, 0))
    new = _call(graph, node, ops.fold, (src, ends, end, space.dim, rows, reduce))
    base = node.args[0]
    if space_of(base).fill != (1 if reduce == "prod" else 0):
        new = _call(graph, node, torch.ops.aten.add.Tensor, (base, new), replace(space, cross=None))
    return new


def _call(graph, node: Node, target, args: tuple, space: Optional[Space] = None) -> Node:
    new = graph.call_function(target, args)
    new.meta.update(val=value_of(node), space=space or space_of(node))
    new.stack_trace = node.stack_trace
    return new
