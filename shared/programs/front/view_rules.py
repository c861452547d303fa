"""Rules of views, products and the generator's own ops; see :mod:`edgeless.programs.front.rules`."""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Node

from .rules import Inference, argument, from_front, name_of, rule, shape_of, space_of, value_of
from .spaces import EDGE, Space

# Views --------------------------------------------------------------------------------------------------------------


@rule("view", "_unsafe_view", "reshape")
def _view(infer: Inference, node: Node):
    space = space_of(node.args[0])
    if not space.rows:
        return Space()
    old, new, size = shape_of(node.args[0]), shape_of(node), infer.sizes.of(space.kind)
    before = 1
    for extent in old[: space.dim]:
        before *= extent
    passed = 1
    for dim, extent in enumerate(new):
        if extent % size == 0:
            if passed != before:
                infer.refuse(node, "a view moves rows")
            return replace(space, dim=dim, cross=None)
        passed *= extent
    infer.refuse(node, "a view joins rows")


@rule("expand")
def _expand(infer: Inference, node: Node):
    space = space_of(node.args[0])
    shift = len(shape_of(node)) - len(shape_of(node.args[0]))
    if not space.rows:
        return replace(infer.sizes.space_of(shape_of(node)), fill=space.fill)
    return replace(space, dim=space.dim + shift, cross=None)


@rule("unsqueeze")
def _unsqueeze(infer: Inference, node: Node):
    space = space_of(node.args[0])
    dim = from_front(node.args[1], len(shape_of(node)))
    return replace(space, dim=space.dim + (space.rows and dim <= space.dim), cross=None)


@rule("squeeze")
def _squeeze(infer: Inference, node: Node):
    space, old = space_of(node.args[0]), shape_of(node.args[0])
    dims = argument(node, 1, "dim", list(range(len(old))))
    gone = {from_front(d, len(old)) for d in ([dims] if isinstance(dims, int) else dims)}
    return replace(space, dim=space.dim - sum(old[d] == 1 and d < space.dim for d in gone), cross=None)


@rule("permute")
def _permute(infer: Inference, node: Node):
    space = space_of(node.args[0])
    order = [from_front(d, len(shape_of(node))) for d in node.args[1]]
    return Space(space.kind, order.index(space.dim)) if space.rows else Space()


@rule("transpose", "t")
def _transpose(infer: Inference, node: Node):
    space, dims = space_of(node.args[0]), len(shape_of(node))
    if not space.rows or dims < 2:
        return space.plain()
    a, b = (0, 1) if name_of(node) == "t" else (from_front(d, dims) for d in node.args[1:3])
    return Space(space.kind, {a: b, b: a}.get(space.dim, space.dim))


@rule("slice")
def _slice(infer: Inference, node: Node):
    space = space_of(node.args[0])
    dim = from_front(argument(node, 1, "dim", 0), len(shape_of(node)))
    if space.is_ends and shape_of(node) != shape_of(node.args[0]):
        infer.refuse(node, "a part of edge_index is taken")
    if not space.rows or dim != space.dim or shape_of(node) == shape_of(node.args[0]):
        return replace(space, cross=None)
    if space.kind == EDGE:
        infer.refuse(node, "a range of the edges is taken")
    return infer.whole(node)


@rule("cat")
def _cat(infer: Inference, node: Node):
    dim = from_front(argument(node, 1, "dim", 0), len(shape_of(node)))
    spaces = [space_of(part) for part in node.args[0]]
    rows = {space.plain() for space in spaces if space.rows}
    if not rows:
        return Space()
    if any(space.dim == dim for space in rows):
        if any(space.kind == EDGE for space in rows):
            infer.refuse(node, "rows of edges are concatenated with others")
        return infer.whole(node)
    if len(rows) != 1 or not all(space.rows for space in spaces):
        infer.refuse(node, "rows of different spaces are concatenated")
    return rows.pop()


@rule("stack")
def _stack(infer: Inference, node: Node):
    dim = from_front(argument(node, 1, "dim", 0), len(shape_of(node)))
    spaces = {space_of(part).plain() for part in node.args[0]}
    if len(spaces) != 1:
        infer.refuse(node, "rows of different spaces are stacked")
    space = spaces.pop()
    return replace(space, dim=space.dim + (space.rows and dim <= space.dim))


@rule("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "chunk", "unsafe_chunk")
def _split(infer: Inference, node: Node):
    space = space_of(node.args[0])
    dim = from_front(argument(node, 2, "dim", 0), len(shape_of(node.args[0])))
    if space.is_ends or (space.rows and dim == space.dim):
        infer.refuse(node, "rows are split")
    return [space.plain() for _ in value_of(node)]


@rule("repeat")
def _repeat(infer: Inference, node: Node):
    space = space_of(node.args[0])
    if not space.rows:
        return infer.sizes.space_of(shape_of(node)) if space.fill is None else _expand(infer, node)
    dim = space.dim + len(shape_of(node)) - len(shape_of(node.args[0]))
    if node.args[1][dim] != 1:
        infer.refuse(node, "rows are repeated")
    return replace(space, dim=dim, cross=None)


@rule("select_backward", "slice_backward")
def _view_backward(infer: Inference, node: Node):
    space, dims = space_of(node.args[0]), len(node.args[1])
    dim = from_front(node.args[2], dims)
    if not space.rows:
        return infer.whole(node)
    if name_of(node) == "select_backward":
        return Space(space.kind, space.dim + (dim <= space.dim))
    if dim == space.dim and shape_of(node.args[0]) != shape_of(node):
        infer.refuse(node, "a range of rows is taken")
    return space.plain()


@rule("constant_pad_nd")
def _pad(infer: Inference, node: Node):
    space = space_of(node.args[0])
    if space.rows and len(node.args[1]) // 2 > len(shape_of(node)) - 1 - space.dim:
        infer.refuse(node, "rows are padded")
    return space.plain()


@rule("slice_scatter", "select_scatter")
def _write_view(infer: Inference, node: Node):
    base, part = space_of(node.args[0]), space_of(node.args[1])
    dim = from_front(argument(node, 2, "dim", 0), len(shape_of(node)))
    space = base.plain() if base.rows else infer.sizes.space_of(shape_of(node))
    whole = shape_of(node.args[1]) == shape_of(node)
    if space.rows and dim == space.dim and not whole:
        infer.refuse(node, "a range of rows is written")
    if part.rows:
        expected = space.dim - (name_of(node) == "select_scatter" and dim < space.dim)
        if part.plain() != Space(space.kind, expected):
            infer.refuse(node, "rows of one space are written into another")
    return space


# Products and others ------------------------------------------------------------------------------------------------


@rule("mm")
def _mm(infer: Inference, node: Node):
    return _product(infer, node, *map(space_of, node.args[:2]), 1, 0)


@rule("addmm")
def _addmm(infer: Inference, node: Node):
    if space_of(node.args[0]).rows:
        infer.refuse(node, "addmm adds rows")
    space = _product(infer, node, *map(space_of, node.args[1:3]), 1, 0)
    if space.cross:
        infer.refuse(node, "a sum over all edges is added to something")
    return space


@rule("bmm")
def _bmm(infer: Inference, node: Node):
    a, b = map(space_of, node.args[:2])
    if a.rows and b.rows and a.dim == 0 and b.dim == 0:
        if a.kind != b.kind:
            infer.refuse(node, "a product mixes rows")
        return a.plain()
    return _product(infer, node, a, b, 2, 1)


def _product(infer: Inference, node: Node, a: Space, b: Space, inner_a: int, inner_b: int) -> Space:
    """The space of a product that sums over dimension ``inner_a`` of a and ``inner_b`` of b."""
    if not a.rows and not b.rows:
        return Space()
    if a.rows and b.rows:
        if a.kind == b.kind and a.dim == inner_a and b.dim == inner_b:
            return infer.total(a.kind)
    elif a.rows and a.dim != inner_a and (a.dim == inner_a - 1 or inner_a == 2):
        return a.plain()
    elif b.rows and b.dim != inner_b and b.dim in (0, inner_b + 1):
        return b.plain()
    infer.refuse(node, "a matrix product mixes rows")


@rule("mv")
def _mv(infer: Inference, node: Node):
    a, b = map(space_of, node.args[:2])
    if not b.rows and (not a.rows or a.dim == 0):
        return a.plain()
    if a.rows and a.kind == b.kind and a.dim == 1:
        return infer.total(a.kind)
    infer.refuse(node, "a product mixes rows")


@rule("dot")
def _dot(infer: Inference, node: Node):
    a, b = map(space_of, node.args[:2])
    if a.plain() != b.plain():
        infer.refuse(node, "a product mixes rows")
    return infer.total(a.kind) if a.rows else Space()


@rule("linalg_cross")
def _cross(infer: Inference, node: Node):
    space = infer.joined(node, node.args[:2])
    if space.rows and from_front(argument(node, 2, "dim", -1), len(shape_of(node))) == space.dim:
        infer.refuse(node, "a cross product goes over rows")
    return space


# The generator's own ------------------------------------------------------------------------------------------------


@rule("dropout_scale")
def _dropout_scale(infer: Inference, node: Node):
    space = space_of(node.args[0])
    if space.kind != EDGE or space.dim != 0:
        infer.refuse(node, "dropout is applied to something else than rows of edges")
    return space.plain()


@rule("gather_rows")
def _gather_rows(infer: Inference, node: Node):
    end, dim = node.args[2:]
    return Space(EDGE, dim, cross=("gather", end))


@rule("rows_with_edges")
def _rows_with_edges(infer: Inference, node: Node):
    return space_of(node.args[0]).plain()


@rule("fold", "extremum")
def _fold(infer: Inference, node: Node):
    end, dim, _, reduce = node.args[-4:]
    space = Space(infer.sizes.side(end), dim, cross=("fold", end, reduce))
    return [space, space] if name_of(node) == "extremum" else space


@rule("share")
def _share(infer: Inference, node: Node):
    return infer.joined(node, node.args[:3])
