"""The closed table of rules: in which space the result of an ATen op is, given the spaces of its operands.

An op without a rule may run on parameters and on rows of nodes, as a whole; over rows of edges it is refused. A rule is
a function of :class:`Inference` and the node; it returns a :class:`Space`, a list of them for an op with several
results, or None to leave the op to the general rules. Rules of index ops are in :mod:`edgeless.programs.index_rules`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from .modes import at
from .spaces import EDGE, Argument, Refused, Sizes, Space

RULES: dict[str, Callable] = {}

_FACTORIES = {
    *("new_zeros", "new_ones", "new_full", "new_empty", "zeros", "ones", "full", "empty", "scalar_tensor", "arange"),
    *("zeros_like", "ones_like", "full_like", "empty_like", "new_empty_strided", "empty_strided"),
}
_FILLS = {"zeros": 0, "new_zeros": 0, "zeros_like": 0, "ones": 1, "new_ones": 1, "ones_like": 1}
_SAME_ROWS = {"alias", "detach", "clone", "contiguous", "_to_copy", "lift_fresh_copy", "lift_fresh", "lift"}
_OVER_ITEMS = {"_softmax": 1, "_log_softmax": 1, "_softmax_backward_data": 2, "_log_softmax_backward_data": 2}
_OVER_ITEMS |= {"cumsum": 1, "cumprod": 1, "sort": 1, "topk": 2, "flip": 1}
_REDUCTIONS = {
    *("sum", "mean", "amax", "amin", "prod", "any", "all", "logsumexp", "argmax", "argmin", "linalg_vector_norm", "norm"),
    *("var", "std", "var_mean", "max", "min"),
}
_POINTWISE = {  # pointwise, though some versions of torch do not tag them so
    *("threshold_backward", "softplus_backward", "gelu_backward", "sigmoid_backward", "tanh_backward", "elu_backward"),
    *("leaky_relu_backward", "where", "silu_backward", "logit_backward", "hardtanh_backward", "addcmul", "addcdiv"),
    *("log_sigmoid_backward", "_prelu_kernel", "_prelu_kernel_backward", "lerp", "isnan", "isfinite", "isinf"),
    *("masked_fill", "pow", "clamp", "mish_backward", "softplus", "leaky_relu", "relu", "elu", "hardswish_backward"),
    *("hardsigmoid_backward", "celu", "selu", "fill"),
}


def rule(*names: str):
    """Registers a rule for the ops of these names, whatever their overload."""

    def register(function):
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def name_of(node: Node) -> str:
    """The name of a node's op without namespace and overload, ``"add"`` for ``aten.add.Tensor``."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target.name().split("::")[1].split(".")[0]
    return getattr(node.target, "__name__", str(node.target))


def value_of(node: Node):
    """The stand-in of a node's result."""
    return node.meta.get("val")


def is_tensor(node) -> bool:
    """Whether a node's result is one tensor."""
    return isinstance(node, Node) and isinstance(value_of(node), Tensor)


def shape_of(node: Node) -> tuple[int, ...]:
    """The shape of a node's result."""
    return tuple(int(n) for n in value_of(node).shape)


def space_of(node: Node) -> Space:
    """The space of a node's result; of several results, that of the first."""
    space = node.meta["space"]
    return space[0] if isinstance(space, list) else space


def from_front(dim: int, dims: int) -> int:
    """A dimension counted from the front."""
    return dim + dims if dim < 0 else dim


def argument(node: Node, position: int, name: str, default=None):
    """An argument of a node's call, however it was passed."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def is_pointwise(node: Node) -> bool:
    """Whether an element of the result depends on the same element of the operands alone."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and (
        torch.Tag.pointwise in target.tags or name_of(node) in _POINTWISE
    )


class Inference:
    """Finds the space of every node of a graph."""

    def __init__(self, sizes: Sizes):
        self.sizes = sizes

    def refuse(self, node: Node, clause: str):
        """Refuses a graph because of a node, with the line that it comes from."""
        raise Refused(f"{clause}{at(node.stack_trace)}")

    def annotate(self, module: GraphModule, arguments: list[Argument]) -> None:
        """Sets ``meta["space"]`` of all nodes; the arguments belong to the placeholders in order.

        Raises:
            Refused: an op has no rule, or mixes rows of edges.
        """
        spaces = iter(arguments)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                node.meta["space"] = next(spaces).space
            elif node.op == "get_attr":
                node.meta["val"] = getattr(module, node.target)
                node.meta["space"] = Space()
            elif node.op == "call_function":
                node.meta["space"] = self._checked(node)
            elif node.op != "output":
                raise Refused(f"{node.op} {node.target} is no op")

    def _checked(self, node: Node):
        try:
            found = self._infer(node)
        except Refused as error:
            raise error if "(" in str(error) else Refused(f"{error}{at(node.stack_trace)}") from None
        except Exception as error:
            raise Refused(f"{name_of(node)} is used in a way without a rule, {type(error).__name__}: {error}") from error
        for space, value in zip(*_paired(found, value_of(node))):
            if not isinstance(value, Tensor):
                continue
            if space.kind == EDGE and not space.local:
                self.refuse(node, f"{name_of(node)} depends on the order of the edges")
            shown = self.sizes.space_of(value.shape)
            if space.rows and value.shape[space.dim] % self.sizes.of(space.kind):
                self.refuse(node, f"{name_of(node)} moves rows")
            if not space.rows and shown.rows:
                self.refuse(node, f"{name_of(node)} makes a row for each {shown.kind} of something else")
        return found

    def _infer(self, node: Node):
        target, name = node.target, name_of(node)
        if target is operator.getitem:
            space = node.args[0].meta["space"]
            return replace(space[node.args[1]] if isinstance(space, list) else space, cross=None)
        if not isinstance(target, torch._ops.OpOverload):
            self.refuse(node, f"{name} is no op of ATen")
        if torch.Tag.nondeterministic_seeded in target.tags:
            self.refuse(node, f"{name} draws random numbers, and only dropout over edges is supported")
        if name in _FACTORIES:
            return self._factory(node, name)
        if name in RULES and (found := RULES[name](self, node)) is not None:
            return found
        if is_pointwise(node):
            return self.joined(node, [a for a in node.all_input_nodes if is_tensor(a)])
        if name in _SAME_ROWS:
            return replace(space_of(node.args[0]), cross=None, local=True)
        if name in _REDUCTIONS:
            return self._reduction(node, name)
        if name in _OVER_ITEMS:
            return self._over_items(node, name)
        if all(space_of(a).kind != EDGE for a in node.all_input_nodes):
            return self.whole(node)
        self.refuse(node, f"{name} over rows of edges has no rule")

    def _factory(self, node: Node, name: str):
        space = self.sizes.space_of(shape_of(node))
        if name == "arange":
            return replace(space, local=not space.rows)
        fill = _FILLS.get(name)
        if name in ("full", "new_full", "full_like", "scalar_tensor"):
            fill = node.args[-1] if isinstance(node.args[-1], (int, float)) else None
        if "empty" in name and space.rows:
            self.refuse(node, "memory is used that nothing was written to")
        return replace(space, fill=fill)

    def joined(self, node: Node, operands) -> Space:
        """The space of operands that are broadcast together."""
        dims, found = len(shape_of(node)), None
        for operand in operands:
            space = space_of(operand)
            if not space.rows:
                continue
            dim = space.dim + dims - len(shape_of(operand))
            if shape_of(operand)[space.dim] != shape_of(node)[dim]:
                self.refuse(node, f"{name_of(node)} broadcasts rows")
            if found not in (None, Space(space.kind, dim)):
                self.refuse(node, f"{name_of(node)} mixes rows of a {found.kind} and a {space.kind}")
            found = Space(space.kind, dim)
        return found or Space()

    def whole(self, node: Node):
        """The space of an op over nodes that no rule knows and that runs as a whole."""
        value = value_of(node)
        if isinstance(value, (tuple, list)):
            return [self._whole(node, v) for v in value]
        return self._whole(node, value)

    def _whole(self, node: Node, value) -> Space:
        space = self.sizes.space_of(value.shape) if isinstance(value, Tensor) else Space()
        if space.kind == EDGE:
            self.refuse(node, f"{name_of(node)} makes rows of edges of something else")
        return replace(space, local=not space.rows)

    def total(self, kind: str) -> Space:
        """The space of a sum over all rows of a kind."""
        return Space(cross=("total",)) if kind == EDGE else Space(local=False)

    def _reduction(self, node: Node, name: str):
        operand, space = node.args[0], space_of(node.args[0])
        dims = len(shape_of(operand))
        if name in ("norm", "linalg_vector_norm"):
            over, keep = argument(node, 2, "dim"), argument(node, 3, "keepdim", False)
        else:
            over = argument(node, 1, "dim")
            keep = next((a for a in node.args[2:] if isinstance(a, bool)), node.kwargs.get("keepdim", False))
        if over is None or over == []:
            over = range(dims)
        over = [from_front(d, dims) for d in ([over] if isinstance(over, int) else over)]
        if space.rows and space.dim in over:
            if space.kind == EDGE and name != "sum":
                self.refuse(node, f"{name} goes over all edges")
            result = self.total(space.kind)
        elif space.rows:
            result = Space(space.kind, space.dim if keep else space.dim - sum(d < space.dim for d in over))
        else:
            result = Space()
        return [result for _ in value_of(node)] if isinstance(value_of(node), (tuple, list)) else result

    def _over_items(self, node: Node, name: str):
        operands = [a for a in node.all_input_nodes if is_tensor(a)]
        rows = next((a for a in operands if space_of(a).rows), operands[0])
        space = space_of(rows).plain()
        over = argument(node, _OVER_ITEMS[name], "dims" if name == "flip" else "dim", -1)
        dims = len(shape_of(rows))
        if space.rows and space.dim in [from_front(d, dims) for d in ([over] if isinstance(over, int) else over)]:
            if space.kind == EDGE:
                self.refuse(node, f"{name} goes over the edges")
            space = replace(space, local=False)
        return [space for _ in value_of(node)] if isinstance(value_of(node), (tuple, list)) else space


def _paired(spaces, values) -> tuple[list, list]:
    if isinstance(spaces, list):
        return spaces, list(values)
    return [spaces], [values]


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
    """The space of a product, whose operands are summed over these dimensions."""
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


@rule("fold", "extremum")
def _fold(infer: Inference, node: Node):
    end, dim, _, reduce = node.args[-4:]
    space = Space(infer.sizes.side(end), dim, cross=("fold", end, reduce))
    return [space, space] if name_of(node) == "extremum" else space


@rule("share")
def _share(infer: Inference, node: Node):
    return infer.joined(node, node.args[:3])
