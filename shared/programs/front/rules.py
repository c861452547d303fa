"""The closed table of rules: in which space the result of an ATen op is, given the spaces of its operands.

An op without a rule may run on parameters and on rows of nodes, as a whole; over rows of edges it is refused. A rule is
a function of :class:`Inference` and the node; it returns a :class:`Space`, a list of them for an op with several
results, or None to leave the op to the general rules. Rules of views and products are in
:mod:`edgeless.programs.front.view_rules`, those of index ops in :mod:`edgeless.programs.front.index_rules`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.fx import Node

from .modes import at
from .recording import Ops
from .spaces import EDGE, Argument, Refused, Sizes, Space

RULES: dict[str, Callable] = {}

FACTORIES = {
    *("new_zeros", "new_ones", "new_full", "new_empty", "zeros", "ones", "full", "empty", "scalar_tensor", "arange"),
    *("zeros_like", "ones_like", "full_like", "empty_like", "new_empty_strided", "empty_strided"),
}
_FILLS = {"zeros": 0, "new_zeros": 0, "zeros_like": 0, "ones": 1, "new_ones": 1, "ones_like": 1}
_SAME_ROWS = {"alias", "detach", "clone", "contiguous", "_to_copy", "lift_fresh_copy", "lift_fresh", "lift"}
_OVER_ITEMS = {"_softmax": 1, "_log_softmax": 1, "_softmax_backward_data": 2, "_log_softmax_backward_data": 2}
_OVER_ITEMS |= {"cumsum": 1, "cumprod": 1, "sort": 1, "topk": 2, "flip": 1}
_REDUCTIONS = {
    *(
        "sum",
        "mean",
        "amax",
        "amin",
        "prod",
        "any",
        "all",
        "logsumexp",
        "argmax",
        "argmin",
        "linalg_vector_norm",
        "norm",
    ),
    *("var", "std", "var_mean", "max", "min"),
}
_POINTWISE = {  # pointwise ops that some versions of torch do not tag
    *("threshold_backward", "softplus_backward", "gelu_backward", "sigmoid_backward", "tanh_backward", "elu_backward"),
    *("leaky_relu_backward", "where", "silu_backward", "logit_backward", "hardtanh_backward", "addcmul", "addcdiv"),
    *("log_sigmoid_backward", "_prelu_kernel", "_prelu_kernel_backward", "lerp", "isnan", "isfinite", "isinf"),
    *("masked_fill", "pow", "clamp", "mish_backward", "softplus", "leaky_relu", "relu", "elu", "hardswish_backward"),
    *("hardsigmoid_backward", "celu", "selu", "fill", "rsub"),
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
    """Returns whether a node's result is one tensor."""
    return isinstance(node, Node) and isinstance(value_of(node), Tensor)


def shape_of(node: Node) -> tuple[int, ...]:
    """The shape of a node's result."""
    return tuple(int(n) for n in value_of(node).shape)


def space_of(node: Node) -> Space:
    """The space of a node's result, or of its first result."""
    space = node.meta["space"]
    return space[0] if isinstance(space, list) else space


def from_front(dim: int, dims: int) -> int:
    """A dimension counted from the front."""
    return dim + dims if dim < 0 else dim


def argument(node: Node, position: int, name: str, default=None):
    """An argument of a node's call, however it was passed."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def is_pointwise(node: Node) -> bool:
    """Returns whether an element of the result depends on the same element of the operands alone."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and (
        torch.Tag.pointwise in target.tags or name_of(node) in _POINTWISE
    )


class Inference:
    """Finds the space of every node of a graph."""

    def __init__(self, sizes: Sizes):
        self.sizes = sizes

    def refuse(self, node: Node, clause: str):
        """Refuses a graph because of a node, and names the line that it comes from."""
        raise Refused(f"{clause}{at(node.stack_trace)}")

    def annotate(self, module: Ops, arguments: list[Argument]) -> None:
        """Sets ``meta["space"]`` of all nodes. The arguments are in the order of the placeholders.

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
            raise Refused(
                f"{name_of(node)} is used in a way without a rule, {type(error).__name__}: {error}"
            ) from error
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
        if name in FACTORIES:
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
        """The space of the result of broadcasting these operands."""
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
        """The space of an op over nodes that has no rule and runs over whole tensors."""
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


@rule("log_sigmoid_forward")
def _log_sigmoid(infer: Inference, node: Node):
    space = space_of(node.args[0]).plain()
    _, buffer = value_of(node)
    return [space, space if buffer.numel() else Space()]  # on CUDA there is no buffer


def _paired(spaces, values) -> tuple[list, list]:
    if isinstance(spaces, list):
        return spaces, list(values)
    return [spaces], [values]
