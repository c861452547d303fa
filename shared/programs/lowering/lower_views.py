"""Lowers views, products and reductions of items; see :mod:`edgeless.programs.lowering.lower`."""

from __future__ import annotations

import math

import torch
from torch.fx import Node

from ..front.rules import argument, from_front, name_of, shape_of, space_of, value_of
from .affine import Index
from .items import (
    Assemble,
    Item,
    Lookup,
    NotLowered,
    View,
    apply,
    broadcast,
    cast,
    expand,
    narrow,
    number,
    permute,
    product,
    reduce,
    reshape,
)
from .lower import _Lowering, from_start, views
from .scalar_ops import where

# Views --------------------------------------------------------------------------------------------------------------


@views("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "alias", "detach", "clone", "contiguous", "lift")
def _same_order(low: _Lowering, node: Node, given):
    return reshape(given(node.args[0]), low.item_shape(node))


@views("lift_fresh_copy", "lift_fresh")
def _same(low: _Lowering, node: Node, given):
    return given(node.args[0])


@views("_to_copy")
def _to_copy(low: _Lowering, node: Node, given):
    return cast(given(node.args[0]), low.dtype(node))


@views("expand")
def _expand(low: _Lowering, node: Node, given):
    return expand(given(node.args[0]), low.item_shape(node))


@views("permute")
def _permute(low: _Lowering, node: Node, given):
    x = given(node.args[0])
    return permute(x, [from_front(d, len(x.shape)) for d in node.args[1]])


@views("transpose", "t")
def _transpose(low: _Lowering, node: Node, given):
    x = given(node.args[0])
    dims = len(x.shape)
    if dims < 2:
        return x
    a, b = (0, 1) if name_of(node) == "t" else (from_front(d, dims) for d in node.args[1:3])
    order = list(range(dims))
    order[a], order[b] = b, a
    return permute(x, order)


def _range(node: Node, dim: int, extent: int) -> tuple[int, int, int]:
    start, stop, step = argument(node, 2, "start", 0), argument(node, 3, "end"), argument(node, 4, "step", 1)
    return slice(start, stop, step).indices(extent)


@views("slice")
def _slice(low: _Lowering, node: Node, given):
    x = given(node.args[0])
    dim = from_front(argument(node, 1, "dim", 0), len(x.shape))
    if shape_of(node) == shape_of(node.args[0]):
        return x
    start, _, step = _range(node, dim, x.shape[dim])
    return narrow(x, dim, start, low.item_shape(node)[dim], step)


@views("select")
def _select(low: _Lowering, node: Node, given):
    x = given(node.args[0])
    dim = from_front(node.args[1], len(x.shape))
    return reshape(narrow(x, dim, node.args[2] % x.shape[dim], 1), low.item_shape(node))


def _parts(x: Item, dim: int, widths) -> list[Item]:
    starts = [sum(widths[:i]) for i in range(len(widths))]
    return [narrow(x, dim, start, width) for start, width in zip(starts, widths)]


@views("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "chunk", "unsafe_chunk")
def _split(low: _Lowering, node: Node, given):
    x = given(node.args[0])
    dim = from_front(argument(node, 2, "dim", 0), len(x.shape))
    return tuple(_parts(x, dim, [int(v.shape[dim]) for v in value_of(node)]))


@views("unbind")
def _unbind(low: _Lowering, node: Node, given):
    x = given(node.args[0])
    dim = from_front(argument(node, 1, "dim", 0), len(x.shape))
    shape = [n for d, n in enumerate(x.shape) if d != dim]
    return tuple(reshape(part, shape) for part in _parts(x, dim, [1] * x.shape[dim]))


@views("flip")
def _flip(low: _Lowering, node: Node, given):
    x = given(node.args[0])
    dims = {from_front(d, len(x.shape)) for d in node.args[1]}

    def at(index):
        return [i * -1 + (n - 1) if d in dims and n > 1 else i for d, (i, n) in enumerate(zip(index, x.shape))]

    return View(x.shape, x.dtype, x, at)


@views("repeat")
def _repeat(low: _Lowering, node: Node, given):
    x, shape = given(node.args[0]), low.item_shape(node)
    once, several = [], []
    for n, m in zip([1] * (len(shape) - len(x.shape)) + list(x.shape), shape):
        apart = n not in (1, m)
        once += [1, n] if apart else [n]
        several += [m // n, n] if apart else [m]
    return reshape(expand(reshape(x, once), several), shape)


# Arrays of parts ----------------------------------------------------------------------------------------------------


def _placed(x: Item, shape, dim: int, start: int, step: int = 1) -> tuple:
    dims = range(len(shape))
    return x, tuple(start if d == dim else 0 for d in dims), tuple(step if d == dim else 1 for d in dims)


def _zeros(shape, dtype):
    return number(0, dtype, shape)


@views("cat")
def _cat(low: _Lowering, node: Node, given):
    shape, dtype = low.item_shape(node), low.dtype(node)
    dim = from_front(argument(node, 1, "dim", 0), len(shape))
    pieces, start = [], 0
    for part in map(given, node.args[0]):
        if part.numel:
            pieces.append(_placed(cast(part, dtype), shape, dim, start))
            start += part.shape[dim]
    return Assemble(shape, dtype, pieces, None)


@views("stack")
def _stack(low: _Lowering, node: Node, given):
    shape, dtype = low.item_shape(node), low.dtype(node)
    dim = from_front(argument(node, 1, "dim", 0), len(shape))
    one = [1 if d == dim else n for d, n in enumerate(shape)]
    parts = [cast(reshape(part, one), dtype) for part in map(given, node.args[0])]
    return Assemble(shape, dtype, [_placed(part, shape, dim, i) for i, part in enumerate(parts)], None)


@views("slice_backward", "select_backward")
def _view_backward(low: _Lowering, node: Node, given):
    grad, shape = given(node.args[0]), low.item_shape(node)
    dim = from_front(node.args[2], len(shape))
    if name_of(node) == "select_backward":
        grad = reshape(grad, [1 if d == dim else n for d, n in enumerate(shape)])
        start, step = node.args[3] % shape[dim], 1
    elif grad.shape == shape:
        return grad
    else:
        start, _, step = slice(*node.args[3:6]).indices(shape[dim])
    return Assemble(shape, grad.dtype, [_placed(grad, shape, dim, start, step)], _zeros(shape, grad.dtype))


@views("slice_scatter", "select_scatter")
def _write_view(low: _Lowering, node: Node, given):
    base, part, shape = given(node.args[0]), given(node.args[1]), low.item_shape(node)
    dim, dtype = from_front(argument(node, 2, "dim", 0), len(shape)), low.dtype(node)
    if name_of(node) == "select_scatter":
        part = reshape(part, [1 if d == dim else n for d, n in enumerate(shape)])
        start, step = node.args[3] % shape[dim], 1
    else:
        start, stop, step = argument(node, 3, "start"), argument(node, 4, "end"), argument(node, 5, "step", 1)
        start, _, step = slice(start, stop, step).indices(shape[dim])
        part = expand(part, [part.shape[d] if d == dim else n for d, n in enumerate(shape)])
    whole = _placed(expand(cast(base, dtype), shape), shape, dim, 0)
    return Assemble(shape, dtype, [whole, _placed(cast(part, dtype), shape, dim, start, step)], None)


@views("constant_pad_nd")
def _pad(low: _Lowering, node: Node, given):
    x, shape = given(node.args[0]), low.item_shape(node)
    pads, starts = node.args[1], [0] * len(shape)
    for k in range(len(pads) // 2):
        starts[-1 - k] = pads[2 * k]
    if any(p < 0 for p in pads):
        raise NotLowered("a negative pad")
    fill = number(argument(node, 2, "value", 0), x.dtype, shape)
    return Assemble(shape, x.dtype, [(x, tuple(starts), (1,) * len(shape))], cast(fill, x.dtype))


# Indices computed for each edge -------------------------------------------------------------------------------------


def _looked_up(low: _Lowering, base: Item, dim: int, index: Item, shape) -> Item:
    """Rows of a parameter: ``base`` indexed in ``dim`` by the item ``index``, whose dims replace ``dim``."""
    dims = len(index.shape)
    if base.shape[dim] == 0:
        raise NotLowered("a lookup in an empty table")

    def at(i):
        return [*i[:dim], Index(), *i[dim + dims :]], list(i[dim : dim + dims])

    return Lookup(tuple(shape), base.dtype, base, dim, cast(index, torch.int64), at)


@views("embedding")
def _embedding(low: _Lowering, node: Node, given):
    return _looked_up(low, given(node.args[0]), 0, given(node.args[1]), low.item_shape(node))


@views("index_select")
def _index_select(low: _Lowering, node: Node, given):
    x, index = given(node.args[0]), given(node.args[2])
    return _looked_up(low, x, from_front(node.args[1], len(x.shape)), index, low.item_shape(node))


@views("index", "_unsafe_index")
def _index(low: _Lowering, node: Node, given):
    used = [(dim, index) for dim, index in enumerate(node.args[1]) if index is not None]
    if len(used) != 1 or value_of(used[0][1]).dtype in (torch.bool, torch.uint8):
        raise NotLowered("an index by several tensors or a mask")
    (dim, index), x = used[0], given(node.args[0])
    return _looked_up(low, x, dim, from_start(given(index), x.shape[dim]), low.item_shape(node))


@views("gather")
def _gather(low: _Lowering, node: Node, given):
    x, index = given(node.args[0]), given(node.args[2])
    dim = from_front(node.args[1], len(x.shape))

    def at(i):
        return [Index() if d == dim else k for d, k in enumerate(i)], list(i)

    return Lookup(index.shape, x.dtype, x, dim, cast(index, torch.int64), at)


# Products and reductions --------------------------------------------------------------------------------------------


@views("mm", "bmm")
def _mm(low: _Lowering, node: Node, given):
    return product(given(node.args[0]), given(node.args[1]))


@views("addmm")
def _addmm(low: _Lowering, node: Node, given):
    bias, out = given(node.args[0]), product(given(node.args[1]), given(node.args[2]))
    alpha, beta = node.kwargs.get("alpha", 1), node.kwargs.get("beta", 1)
    out = out if alpha == 1 else apply("mul", out, alpha)
    return apply("add", out, bias if beta == 1 else apply("mul", bias, beta))


@views("mv")
def _mv(low: _Lowering, node: Node, given):
    a, b = given(node.args[0]), given(node.args[1])
    return reduce("add", apply("mul", a, b), [1], keep=False)


@views("dot")
def _dot(low: _Lowering, node: Node, given):
    return reduce("add", apply("mul", given(node.args[0]), given(node.args[1])), [0], keep=False)


@views("linalg_cross")
def _cross(low: _Lowering, node: Node, given):
    a, b = broadcast(given(node.args[0]), given(node.args[1]))
    dim = from_front(argument(node, 2, "dim", -1), len(a.shape))
    first, second = ([narrow(x, dim, k, 1) for k in range(3)] for x in (a, b))
    pieces = []
    for k in range(3):
        i, j = (k + 1) % 3, (k + 2) % 3
        part = apply("sub", apply("mul", first[i], second[j]), apply("mul", first[j], second[i]))
        pieces.append(_placed(part, a.shape, dim, k))
    return Assemble(a.shape, a.dtype, pieces, None)


def _dims(node: Node, x: Item, position: int = 1) -> list[int]:
    over = argument(node, position, "dim")
    if over is None or over == []:
        over = range(len(x.shape))
    return [from_front(d, len(x.shape)) for d in ([over] if isinstance(over, int) else over)]


def _finished(low: _Lowering, node: Node, out: Item) -> Item:
    shape = low.item_shape(node) if space_of(node).rows else tuple(value_of(node).shape)
    return reshape(out, shape)


def _mean(x: Item, dims, less: float = 0) -> Item:
    count = math.prod(x.shape[d] for d in dims) - less
    return apply("div", reduce("add", x, dims), count if count else float("nan"))


@views("sum", "mean", "amax", "amin", "prod")
def _reduced(low: _Lowering, node: Node, given):
    x, name = given(node.args[0]), name_of(node)
    x, dims = cast(x, low.dtype(node)), _dims(node, x)
    if name == "mean":
        return _finished(low, node, _mean(x, dims))
    primitive = {"sum": "add", "amax": "max", "amin": "min", "prod": "mul"}[name]
    return _finished(low, node, reduce(primitive, x, dims))


@views("any", "all")
def _any(low: _Lowering, node: Node, given):
    x = cast(given(node.args[0]), torch.bool)
    whole = cast(x, torch.int32)
    out = reduce("max" if name_of(node) == "any" else "min", whole, _dims(node, x))
    return _finished(low, node, cast(out, torch.bool))


@views("logsumexp")
def _logsumexp(low: _Lowering, node: Node, given):
    x = given(node.args[0])
    dims = _dims(node, x)
    best = reduce("max", x, dims)
    infinite = apply("eq", apply("abs", best), float("inf"), dtype=torch.bool)
    best = where(infinite, 0.0, best, x.dtype)
    total = reduce("add", apply("exp", apply("sub", x, best)), dims)
    return _finished(low, node, apply("add", apply("log", total), best))


@views("norm", "linalg_vector_norm")
def _norm(low: _Lowering, node: Node, given):
    x = cast(given(node.args[0]), low.dtype(node))
    order, dims = argument(node, 1, "ord", argument(node, 1, "p", 2)), _dims(node, x, 2)
    if order == 2:
        return _finished(low, node, apply("sqrt", reduce("add", apply("mul", x, x), dims)))
    if order in (1, float("inf"), -float("inf")):
        primitive = {1: "add", float("inf"): "max"}.get(order, "min")
        return _finished(low, node, reduce(primitive, apply("abs", x), dims))
    raise NotLowered(f"a norm of order {order}")


@views("var", "std", "var_mean")
def _var(low: _Lowering, node: Node, given):
    x, over = given(node.args[0]), argument(node, 1, "dim")
    if isinstance(over, bool):
        raise NotLowered("an old form of var")
    dims, correction = _dims(node, x), node.kwargs.get("correction", 1)
    less = 1 if correction is None else correction
    mean = _mean(x, dims)
    off = apply("sub", x, mean)
    out = _mean(apply("mul", off, off), dims, less)
    if name_of(node) == "var_mean":
        shapes = [tuple(v.shape) for v in value_of(node)]
        space, sizes = space_of(node), low.sizes
        shape = [n // sizes.of(space.kind) if space.rows and d == space.dim else n for d, n in enumerate(shapes[0])]
        return reshape(out, shape), reshape(mean, shape)
    return _finished(low, node, apply("sqrt", out) if name_of(node) == "std" else out)


@views("_softmax", "_log_softmax")
def _softmax(low: _Lowering, node: Node, given):
    x = cast(given(node.args[0]), low.dtype(node))
    dims = [from_front(node.args[1], len(x.shape))] if x.shape else []
    off = apply("sub", x, reduce("max", x, dims))
    powers = apply("exp", off)
    total = reduce("add", powers, dims)
    if name_of(node) == "_softmax":
        return apply("div", powers, total)
    return apply("sub", off, apply("log", total))


@views("_softmax_backward_data")
def _softmax_backward(low: _Lowering, node: Node, given):
    grad, out, dim = given(node.args[0]), given(node.args[1]), from_front(node.args[2], len(shape_of(node)))
    part = apply("mul", grad, out)
    return cast(apply("sub", part, apply("mul", out, reduce("add", part, [dim]))), low.dtype(node))
