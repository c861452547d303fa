"""Sums over a row's edges, in a backward, whose factor from the gradient is the row's own.

The gradient of what a message reads at its own end is ``sum_e g_i w_e``, with the gradient ``g_i`` of the row's sum
and numbers ``w_e`` that the forward knows. That is ``g_i sum_e w_e``. The forward keeps the inner sum, for which it
computes little more than it computes anyway, and the backward loses a walk over the edges by that end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch.fx import Node

from ..front import ops
from ..front.recording import Ops
from ..front.rules import name_of, shape_of, space_of, value_of
from ..front.spaces import EDGE
from .schedule import is_fold, is_total

DEVICES = ("cpu",)  # where it was measured
aten = torch.ops.aten
# Ops that are linear in their first operand; those of the second kind may be 0 where an infinite gradient stays 0.
_SMOOTH = ("sigmoid_backward", "tanh_backward", "softplus_backward", "silu_backward", "gelu_backward")
_MASKS = ("threshold_backward",)


@dataclass
class _Product:
    """An edge's value as ``own`` of its row times ``rest``, which is None where it is 1."""

    own: Node
    rest: Optional[Node]
    masked: bool = False


def keep_own_sums(joint: Ops, gradients: Sequence[Node], module: Ops, arguments: int, receiving: int) -> dict:
    """Replaces such sums if no walk by the receiving end is left then.

    Args:
        joint: the forward with its gradients, annotated.
        gradients: its results that are gradients.
        module: the forward, annotated.
        arguments: how many placeholders of ``joint`` are those of ``module``.

    Returns:
        For each inner sum of ``joint`` that node of ``module`` which is to be kept; both graphs have new nodes.
    """
    return _Splitting(joint, gradients, module, arguments, receiving).run()


class _Splitting:
    def __init__(self, joint: Ops, gradients: Sequence[Node], module: Ops, arguments: int, receiving: int):
        self.joint, self.gradients, self.module, self.receiving = joint, gradients, module, receiving
        holders = [node for node in joint.graph.nodes if node.op == "placeholder"]
        self.ends = holders[0]
        self.late = set(holders[arguments:])  # what depends on the results' gradients
        for node in joint.graph.nodes:
            if node.op == "call_function" and any(a in self.late for a in node.all_input_nodes):
                self.late.add(node)
        own = [node for node in module.graph.nodes if node.op == "placeholder"]
        self.same: dict[Node, Node] = dict(zip(holders, own))  # of nodes of the joint graph those of the forward's
        self.known: dict[Any, Node] = {}
        first: dict[Node, Node] = {}  # of nodes that compute the same
        for node in module.graph.nodes:
            args = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: first.get(n, n))
            key = _key(node.target, *args) if node.op == "call_function" else node
            first[node] = self.known.setdefault(key, node)

    def run(self) -> dict[Node, Node]:
        folds = [node for node in self._needed() if is_fold(node) and node in self.late]
        ours = [node for node in folds if node.args[-4] == self.receiving]
        others = len(folds) > len(ours)
        everything = [node for node in self._needed() if is_total(node)] + list(self.gradients)
        if not ours or (not others and any(is_total(n) or space_of(n).kind == EDGE for n in everything)):
            return {}
        pairs = [(fold, self._split(fold.args[0]) if self._is_plain(fold) else None) for fold in ours]
        if any(found is None or found.rest is None or not self._is_early(found.rest) for _, found in pairs):
            return {}
        return {inner: copy for fold, found in pairs for inner, copy in [self._replace(fold, found)]}

    def _needed(self) -> list[Node]:
        seen, stack = set(), list(self.gradients)
        while stack:
            node = stack.pop()
            if node not in seen:
                seen.add(node)
                stack.extend(node.all_input_nodes)
        return [node for node in self.joint.graph.nodes if node in seen and node.op == "call_function"]

    def _is_plain(self, fold: Node) -> bool:
        plain = fold.target is ops.fold and fold.args[-1] == "sum" and fold.args[3] == 0
        return plain and value_of(fold).dtype in (torch.float32, torch.float64)

    def _is_early(self, rest: Optional[Node]) -> bool:
        """Whether the forward can compute a value of edges in the walk that it has."""
        stack, seen = [] if rest is None else [rest], set()
        while stack:
            node = stack.pop()
            if node in seen or node.op != "call_function":
                continue
            seen.add(node)
            if node in self.late or is_fold(node):
                return False
            if space_of(node).kind != EDGE:
                if self._of_forward(node) is None:
                    return False
            else:
                stack.extend(node.all_input_nodes)
        return True

    def _of_forward(self, node: Node) -> Optional[Node]:
        """The forward's node that computes the same, or None."""
        if node not in self.same:
            if node.op == "get_attr":
                return None
            args = torch.fx.node.map_arg((node.args, node.kwargs), self._of_forward)
            found = self.known.get(_key(node.target, *args))
            if found is None:
                return None
            self.same[node] = found
        return self.same[node]

    # Products -------------------------------------------------------------------------------------------------------

    def _split(self, node: Node) -> Optional[_Product]:
        """A value of edges as a product with a factor of its row, or None."""
        if node.op != "call_function":
            return None
        if node.target is ops.gather_rows:
            x, _, end, dim = node.args
            return _Product(x, None) if end == self.receiving and dim == 0 and node in self.late else None
        name, args = name_of(node), node.args
        if name == "mul" and len(args) == 2 and all(isinstance(a, Node) for a in args):
            late, other = args if args[0] in self.late else args[::-1]
            return self._times(node, late, other)
        if name in ("add", "sub") and all(isinstance(a, Node) for a in args) and not node.kwargs:
            one, other = (self._below(node, a) for a in args)
            if one is None or other is None or one.own is not other.own or None in (one.rest, other.rest):
                return None
            one.masked |= other.masked
            return self._with(one, node, node.target, one.rest, other.rest)
        linear = name in ("neg", *_SMOOTH, *_MASKS) or (name in ("mul", "div") and len(args) == 2 and not node.kwargs)
        if not linear or any(isinstance(a, Node) and a in self.late for a in args[1:]):
            return None
        found = self._below(node, args[0])
        rest = None if found is None else self._rest(found, node)
        if rest is None:
            return None
        found.masked |= name in _MASKS
        return self._with(found, node, node.target, rest, *args[1:], **node.kwargs)

    def _times(self, node: Node, late: Node, other: Node) -> Optional[_Product]:
        if other in self.late or shape_of(other) != shape_of(node):
            return None
        found = self._below(node, late)
        if found is None or found.rest is None:
            return None if found is None else _Product(found.own, other, found.masked)
        return self._with(found, node, aten.mul.Tensor, found.rest, other)

    def _below(self, node: Node, part: Any) -> Optional[_Product]:
        """The product that an operand of a value is, if it has the value's shape."""
        if not isinstance(part, Node) or shape_of(part) != shape_of(node):
            return None
        return self._split(part) if value_of(part).dtype is value_of(node).dtype else None

    def _rest(self, found: _Product, node: Node) -> Optional[Node]:
        """The rest of an operand of a node, which may be 1 in the shape of another operand."""
        if found.rest is None:
            same = [a for a in node.args[1:] if isinstance(a, Node) and shape_of(a) == shape_of(node)]
            if same and value_of(same[0]).dtype is value_of(node).dtype:
                found.rest = self._call(aten.full_like.default, node, same[0], 1)
        return found.rest

    def _with(self, found: _Product, node: Node, target, *args, **kwargs) -> _Product:
        return _Product(found.own, self._call(target, node, *args, **kwargs), found.masked)

    def _call(self, target, like: Node, *args, **kwargs) -> Node:
        """A new node of the joint graph, behind its operands, with the space and the stand-in of another."""
        operands = [a for a in args if isinstance(a, Node)]  # no later than the node itself
        place = {node: i for i, node in enumerate(self.joint.graph.nodes)}
        with self.joint.graph.inserting_after(max(operands, key=place.__getitem__)):
            made = self.joint.graph.call_function(target, args, kwargs)
        made.meta.update(like.meta)
        return made

    # Replacing ------------------------------------------------------------------------------------------------------

    def _replace(self, fold: Node, found: _Product) -> tuple[Node, Node]:
        """Puts a product of the row in place of a sum; returns the inner sum and the forward's copy of it."""
        own, nodes = found.own, shape_of(found.own)[0]
        with self.joint.graph.inserting_before(fold):
            inner = self.joint.graph.call_function(fold.target, (found.rest, *fold.args[1:]))
            # The gradient of a row without edges must not matter, even if it is not finite.
            own = self.joint.graph.call_function(ops.rows_with_edges, (own, self.ends, self.receiving, 0, nodes))
            total = self.joint.graph.call_function(aten.mul.Tensor, (own, inner))
            made = [inner, own, total]
            if found.masked:  # nor that of a row whose edges all have 0
                none = self.joint.graph.call_function(aten.eq.Scalar, (inner, 0))
                none.meta["val"] = value_of(fold).to(torch.bool)
                total = self.joint.graph.call_function(aten.masked_fill.Scalar, (total, none, 0))
                made.append(total)
        for node in made:
            node.meta["val"] = value_of(fold)
        fold.replace_all_uses_with(total)
        return inner, self._copied(inner)

    def _copied(self, node: Node) -> Node:
        """A node in the forward, which may be there already."""
        found = self._of_forward(node)
        if found is not None:
            return found
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), self._copied)
        output = next(n for n in self.module.graph.nodes if n.op == "output")
        with self.module.graph.inserting_before(output):
            made = self.module.graph.call_function(node.target, args, kwargs)
        made.meta["val"] = value_of(node)
        self.same[node] = self.known[_key(node.target, args, kwargs)] = made
        return made


def _key(target: Any, args: Any, kwargs: Any) -> Any:
    def frozen(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return tuple(map(frozen, value))
        return value if isinstance(value, Node) else (type(value), str(value))

    return target, frozen(args), tuple((name, frozen(value)) for name, value in sorted(kwargs.items()))
