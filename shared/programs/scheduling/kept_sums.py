"""Sums over a row's edges in a backward that follow from sums which the forward has kept.

The gradient of a softmax over a row needs the sum over its edges of weight times gradient. Where the weights multiply
values that are summed, the gradient of a weight is the row's own gradient times the edge's value, summed over channels:
``sum_e w_e sum_c g_c v_ec = sum_c g_c (sum_e w_e v_ec)``. The inner sum is a result of the forward, so an op on nodes
replaces a walk over edges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Optional

import torch
from torch.fx import Node

from ..front import ops
from ..front.recording import Ops
from ..front.rules import from_front, name_of, shape_of, value_of

aten = torch.ops.aten


def use_kept_sums(joint: Ops, kept: Iterable[Node]) -> int:
    """Replaces such sums in the graph of a backward, and returns how many.

    Args:
        joint: the forward with the backward, as traced.
        kept: the nodes of the forward that the backward may read.
    """
    known = [node for node in kept if _sums(node)]
    found = 0
    for node in list(joint.graph.nodes):
        if _sums(node) and node not in known and all(user.target is ops.gather_rows for user in node.users):
            found += any(_replace(joint, node, other) for other in known)
    return found


def _sums(node: Node) -> bool:
    return node.op == "call_function" and node.target is ops.fold and node.args[-1] == "sum"


def _factors(node: Node) -> tuple[bool, Counter, Counter]:
    """Returns whether a value is a negative product, and the factors in the product's numerator and denominator."""
    name, args = name_of(node) if node.op == "call_function" else "", node.args
    if name == "neg":
        negative, above, below = _factors(args[0])
        return not negative, above, below
    if name in ("mul", "div") and len(args) == 2 and not node.kwargs and all(isinstance(a, Node) for a in args):
        (a, above, below), (b, over, under) = map(_factors, args)
        return a != b, above + (over if name == "mul" else under), below + (under if name == "mul" else over)
    return False, Counter([node]), Counter()


def _inner_sum(above: Counter, shape: tuple) -> Optional[Node]:
    """The factor that is a sum over channels, kept with extent 1, if there is exactly one."""
    found = [n for n, count in above.items() if n.op == "call_function" and name_of(n) == "sum" for _ in range(count)]
    if len(found) != 1 or len(found[0].args) < 3 or not found[0].args[2] or shape_of(found[0]) != shape:
        return None
    (inner,), last = found, len(shape) - 1
    dims = [from_front(d, len(shape)) for d in inner.args[1]]
    whole = shape_of(inner.args[0])
    return inner if dims == [last] and last > 0 and shape == (*whole[:-1], 1) else None


def _replace(joint: Ops, node: Node, kept: Node) -> bool:
    source, shape = node.args[0], shape_of(node.args[0])
    floats = (torch.float32, torch.float64)  # a kept sum of 16 bits is rounded
    if node.args[1:] != kept.args[1:] or value_of(node).dtype not in floats:
        return False
    negative, above, below = _factors(source)
    inner = _inner_sum(above, shape)
    if inner is None:
        return False
    wide = shape_of(inner.args[0])
    if wide == shape or any(shape_of(n) != shape for n in (*above, *below)) or shape_of(kept.args[0]) != wide:
        return False
    more, over, under = _factors(inner.args[0])
    less, kept_above, kept_below = _factors(kept.args[0])
    above = above - Counter([inner]) + over
    below = below + under
    everything = (*above, *below, *kept_above, *kept_below)
    if any(shape_of(n) not in (shape, wide) or value_of(n).dtype is not value_of(node).dtype for n in everything):
        return False

    def own(n: Node) -> bool:
        return n.target is ops.gather_rows and n.args[1:] == (node.args[1], *node.args[2:4])

    rest, divisor = above - kept_above, below - kept_below
    if above - rest != kept_above or below - divisor != kept_below or not all(map(own, (*rest, *divisor))):
        return False
    if any(shape_of(n) != shape for n in divisor):
        return False

    def call(target, like: Node, *args) -> Node:
        made = joint.graph.call_function(target, args)
        made.meta["val"] = like.meta["val"]
        return made

    with joint.graph.inserting_before(node):
        total = kept
        for n in rest.elements():
            if shape_of(n) == wide:
                total = call(aten.mul.Tensor, kept, total, n.args[0])
        total = call(aten.sum.dim_IntList, node, total, [-1], True)
        for target, names in ((aten.mul.Tensor, rest), (aten.div.Tensor, divisor)):
            for n in names.elements():
                if shape_of(n) == shape:
                    total = call(target, node, total, n.args[0])
        if negative ^ more ^ less:
            total = call(aten.neg.default, node, total)
    node.replace_all_uses_with(total)
    return True
