"""Rewrites a graph so that few ops are left on edges.

A value that depends on one end of an edge alone is computed on nodes and then gathered. A linear map of concatenated
rows, sums and differences is split; its parts on rows of nodes move to the nodes, and parts of the same rows become one
map. A linear map whose results are summed over a node's edges is applied once, to the sum.

Only ops that are finite, and have finite derivatives, wherever their operands are finite may move to nodes: nobody
reads the values of a node without edges, and a gradient of 0 there must stay 0. If the features of such a node are not
finite themselves, the backward replaces them by zeros before it computes anything from them (``rows_with_edges``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional, Union

import torch
from torch.fx import Graph, Node

from ..front import ops
from ..front.recording import Ops
from ..front.rules import from_front, is_pointwise, name_of, shape_of, space_of
from ..front.spaces import EDGE, Sizes

aten = torch.ops.aten

_MOVES_TO_NODES = {
    *("mm", "addmm", "bmm", "mv", "add", "sub", "mul", "neg", "relu", "leaky_relu", "sigmoid", "tanh", "silu", "gelu"),
    *("elu", "softplus", "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "permute", "transpose", "t"),
    *("select", "slice", "cat", "stack", "split", "split_with_sizes", "sum", "mean", "clone", "detach", "_to_copy"),
    *("_softmax", "_log_softmax", "getitem", "hardtanh", "relu6", "_prelu_kernel", "clamp"),
}
_VIEWS = {"view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "permute", "transpose", "t", "select", "slice"}
# Their gradients do not read the operands.
_PASS_ON = {*_VIEWS, *("add", "sub", "neg", "cat", "stack", "split", "split_with_sizes", "sum", "mean", "getitem")}
_PASS_ON |= {"clone", "detach", "_to_copy"}
_TERMS = 8  # sums of more terms are not distributed over


@dataclass
class Plain:
    """A value on edges of which nothing is known."""

    node: Node


@dataclass
class Gathered:
    """A gathered node value: ``rows`` indexed by the ids of an end. ``shape`` is the shape on edges, and ``given`` says
    whether rows of nodes without edges may hold any value.
    """

    end: int
    rows: Node
    dim: int
    kind: str
    shape: Optional[tuple] = None
    given: bool = False


@dataclass
class Sum:
    """A sum of (factor, value) pairs of one shape."""

    terms: list


@dataclass
class Cat:
    """(value, width) pairs that are concatenated in the last dimension."""

    parts: list


@dataclass
class Linear:
    """``rows @ weight + bias``, computed when it is needed."""

    rows: Union[Plain, Gathered]
    weight: Node
    bias: Optional[Node]
    width: int


def rewrite(module: Ops, sizes: Sizes, differentiated: bool) -> tuple[Ops, list[str]]:
    """Returns the rewritten graph, without shapes and spaces, and descriptions of the rewrites.

    Args:
        differentiated: whether gradients of the graph will be computed.
    """
    return _Rewriter(module, sizes, differentiated).run()


class _Rewriter:
    def __init__(self, module: Ops, sizes: Sizes, differentiated: bool):
        self.module, self.sizes, self.graph, self.differentiated = module, sizes, Graph(), differentiated
        self.made: dict[Node, Node] = {}  # old node -> new node
        self.forms: dict[Node, object] = {}  # old node -> the form of its value
        self.gathers: dict[tuple, Node] = {}
        self.kept: dict[tuple, Node] = {}  # (rows, end) -> the rows with zeros for nodes without edges
        self.notes: list[str] = []

    def run(self) -> tuple[Ops, list[str]]:
        for node in self.module.graph.nodes:
            if node.op == "placeholder":
                self.made[node] = self.graph.placeholder(node.target)
                if space_of(node).is_ends:
                    self.ends = self.made[node]
            elif node.op == "get_attr":
                self.made[node] = self.graph.get_attr(node.target)
            elif node.op == "output":
                self.graph.output(tuple(self.new(n) for n in node.args[0]))
            else:
                self.visit(node)
        module = Ops(self.graph, self.module)
        module.graph.eliminate_dead_code()
        return module, list(dict.fromkeys(self.notes))

    # Building -------------------------------------------------------------------------------------------------------

    def call(self, target, *args) -> Node:
        return self.graph.call_function(target, args)

    def new(self, node: Node) -> Node:
        """The new node of an old one."""
        if node not in self.made:
            self.made[node] = self.build(self.forms[node])
        return self.made[node]

    def build(self, form) -> Node:
        if isinstance(form, Plain):
            return form.node
        if isinstance(form, Gathered):
            return self.gather(form)
        if isinstance(form, Linear):
            return self.linear(self.build(form.rows), form.weight, form.bias)
        if isinstance(form, Cat):
            return self.call(aten.cat.default, [self.build(part) for part, _ in form.parts], -1)
        return self.total([(factor, self.build(term)) for factor, term in form.terms])

    def gather(self, form: Gathered) -> Node:
        key = (form.end, form.rows, form.dim)
        if key not in self.gathers:
            rows, joined = form.rows, 1
            if form.shape is not None:
                joined = form.shape[form.dim] // self.sizes.edges
            if joined > 1:  # a view has joined the rows with another dimension
                before, after = form.shape[: form.dim], form.shape[form.dim + 1 :]
                apart = [*before, self.sizes.of(form.kind), joined, *after]
                rows = self.call(aten.reshape.default, rows, apart)
            rows = self.call(ops.gather_rows, rows, self.ends, form.end, form.dim)
            if joined > 1:
                rows = self.call(aten.reshape.default, rows, list(form.shape))
            self.gathers[key] = rows
        return self.gathers[key]

    def finite(self, form: Gathered) -> Node:
        """The rows as ops on nodes may read them: finite wherever a gradient could become NaN."""
        if not form.given or not self.differentiated:
            return form.rows
        key, nodes = (form.rows, form.end, form.dim), self.sizes.of(form.kind)
        if key not in self.kept:
            self.kept[key] = self.call(ops.rows_with_edges, form.rows, self.ends, form.end, form.dim, nodes)
        return self.kept[key]

    def is_given(self, node: Node, end: int) -> bool:
        """Returns whether a value may be other than 0 for nodes without edges. Folds over the edges of that end are 0
        there.
        """
        stack, seen = [node], set()
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            if node.target in (ops.fold, ops.extremum):
                if node.args[-4] != end:
                    return True
            elif node.op == "call_function":
                stack.extend(node.all_input_nodes)
            elif space_of(node).rows and not space_of(node).is_ends:
                return True
        return False

    def linear(self, rows: Node, weight: Node, bias: Optional[Node]) -> Node:
        if bias is None:
            return self.call(aten.mm.default, rows, weight)
        return self.call(aten.addmm.default, bias, rows, weight)

    def total(self, terms: list) -> Node:
        """A sum of (factor, node) pairs."""
        result = None
        for factor, node in terms:
            if result is not None and factor in (1, -1):
                result = self.call(aten.add.Tensor if factor == 1 else aten.sub.Tensor, result, node)
                continue
            if factor != 1:
                node = self.call(aten.neg.default, node) if factor == -1 else self.call(aten.mul.Tensor, node, factor)
            result = node if result is None else self.call(aten.add.Tensor, result, node)
        return result

    def copy(self, node: Node, replaced=None, size: Optional[int] = None) -> Node:
        """A copy of a node's op; with ``size``, over that many rows of nodes in place of rows of edges."""

        def argument(a):
            if isinstance(a, Node):
                return replaced[a] if replaced and a in replaced else self.new(a)
            if isinstance(a, (list, tuple)):
                return type(a)(map(argument, a))
            is_size = size and isinstance(a, int) and not isinstance(a, bool) and a and not is_pointwise(node)
            return a // self.sizes.edges * size if is_size and a % self.sizes.edges == 0 else a

        kwargs = {name: argument(value) for name, value in node.kwargs.items()}
        return self.graph.call_function(node.target, tuple(map(argument, node.args)), kwargs)

    # Rules ----------------------------------------------------------------------------------------------------------

    def form(self, node: Node):
        return self.forms.get(node) or Plain(self.new(node))

    def visit(self, node: Node) -> None:
        space = space_of(node)
        if node.target is ops.gather_rows:
            kind = self.sizes.side(node.args[2])
            given = self.is_given(node.args[0], node.args[2])
            self.forms[node] = Gathered(node.args[2], self.new(node.args[0]), space.dim, kind, shape_of(node), given)
        elif node.target is ops.fold and node.args[-1] == "sum" and isinstance(self.form(node.args[0]), Linear):
            self.made[node] = self.linear_behind(node)
        elif (
            space.kind != EDGE
            or space.cross
            or not any(way(node) for way in (self.to_nodes, self.as_sum, self.as_cat, self.as_part, self.as_linear))
        ):
            self.made[node] = self.copy(node)

    def to_nodes(self, node: Node) -> bool:
        """Moves an op to the nodes if all rows that it reads are gathered from one end."""
        rows = [a for a in node.all_input_nodes if space_of(a).kind == EDGE]
        forms = [self.form(a) for a in rows]
        one_end = {(f.end, f.kind) if isinstance(f, Gathered) else None for f in forms}
        if name_of(node) not in _MOVES_TO_NODES or not space_of(node).local or len(one_end) != 1 or None in one_end:
            return False
        ((end, kind),) = one_end
        passes = name_of(node) in _PASS_ON or (name_of(node) == "mul" and not isinstance(node.args[1], Node))
        replaced = {a: f.rows if passes else self.finite(f) for a, f in zip(rows, forms)}
        copy = self.copy(node, replaced, self.sizes.of(kind))
        shape = None if isinstance(node.meta["space"], list) else shape_of(node)
        given = passes and any(f.given for f in forms)
        self.forms[node] = Gathered(end, copy, space_of(node).dim, kind, shape, given)
        if name_of(node) not in _VIEWS | {"getitem"}:
            self.notes.append(f"{name_of(node)} is computed on nodes")
        return True

    def as_sum(self, node: Node) -> bool:
        """Represents sums, differences and multiples as terms, so that a linear map can be distributed over them."""
        name, args = name_of(node), node.args
        if name in ("add", "sub") and not node.kwargs and all(isinstance(a, Node) for a in args):
            if len(args) != 2 or not all(space_of(a).kind == EDGE and shape_of(a) == shape_of(node) for a in args):
                return False
            sign = 1 if name == "add" else -1
            terms = self.terms(self.form(args[0]), 1) + self.terms(self.form(args[1]), sign)
            if len(terms) > _TERMS or not all(isinstance(t, (Plain, Gathered)) for _, t in terms):
                return False
            self.forms[node] = self.merged(terms)
            return True
        operand = args[0] if args and isinstance(args[0], Node) else None
        if operand is None or not isinstance(self.forms.get(operand), Sum):
            return False
        if name == "neg" or (name == "mul" and isinstance(args[1], (int, float))):
            self.forms[node] = Sum(self.terms(self.forms[operand], -1 if name == "neg" else args[1]))
            return True
        if name in ("view", "_unsafe_view") and all(isinstance(t, (Plain, Gathered)) for t in self.values(operand)):
            self.forms[node] = Sum([(f, self.view(node, operand, t)) for f, t in self.forms[operand].terms])
            return True
        return False

    def values(self, node: Node) -> list:
        return [term for _, term in self.forms[node].terms]

    def view(self, node: Node, operand: Node, term, shape: Optional[tuple] = None):
        if isinstance(term, Plain):
            return Plain(self.copy(node, {operand: term.node}))
        rows = self.copy(node, {operand: term.rows}, self.sizes.of(term.kind))
        return Gathered(term.end, rows, space_of(node).dim, term.kind, shape or shape_of(node), term.given)

    @staticmethod
    def terms(form, factor) -> list:
        return [(factor * f, t) for f, t in form.terms] if isinstance(form, Sum) else [(factor, form)]

    def merged(self, terms: list):
        """A sum whose terms of the same end are added on the nodes."""
        groups: dict[tuple, list] = {}
        rest = []
        for factor, term in terms:
            if isinstance(term, Gathered):
                groups.setdefault((term.end, term.dim, term.kind, term.shape), []).append((factor, term))
            else:
                rest.append((factor, term))
        for (end, dim, kind, shape), group in groups.items():
            if len(group) > 1:
                rows = self.total([(factor, term.rows) for factor, term in group])
                group = [(1, Gathered(end, rows, dim, kind, shape, any(term.given for _, term in group)))]
            rest += group
        return rest[0][1] if len(rest) == 1 and rest[0][0] == 1 else Sum(rest)

    def as_cat(self, node: Node) -> bool:
        if name_of(node) != "cat":
            return False
        dims = len(shape_of(node))
        if space_of(node).dim == dims - 1 or from_front(node.args[1] if len(node.args) > 1 else 0, dims) != dims - 1:
            return False
        self.forms[node] = Cat([(self.form(part), shape_of(part)[-1]) for part in node.args[0]])
        return True

    def as_part(self, node: Node) -> bool:
        """Applies an op to each part of a concatenation where it removes neither the rows' dimension nor the parts'."""
        operand = node.args[0] if node.args and isinstance(node.args[0], Node) else None
        if name_of(node) != "select" or not isinstance(self.forms.get(operand), Cat):
            return False
        dims = len(shape_of(operand))
        if from_front(node.args[1], dims) in (space_of(operand).dim, dims - 1):
            return False
        parts = []
        for part, width in self.forms[operand].parts:
            kept = part if isinstance(part, (Plain, Gathered)) else Plain(self.build(part))
            shape = (*shape_of(node)[:-1], width)
            parts.append((self.view(node, operand, kept, shape), width))
        self.forms[node] = Cat(parts)
        return True

    def as_linear(self, node: Node) -> bool:
        if name_of(node) not in ("mm", "addmm"):
            return False
        *bias, rows, weight = node.args[:3]
        if node.kwargs or space_of(rows).kind != EDGE or space_of(weight).rows or space_of(rows).dim != 0:
            return False
        bias = self.new(bias[0]) if bias else None
        form, width = self.form(rows), shape_of(rows)[1]
        if isinstance(form, (Sum, Cat)) and self.pays(form):
            self.forms[node] = self.distributed(form, self.new(weight), bias, width, shape_of(node))
        elif shape_of(rows)[0] == self.sizes.edges:
            inner = form if isinstance(form, (Plain, Gathered)) else Plain(self.new(rows))
            self.forms[node] = Linear(inner, self.new(weight), bias, width)
        else:
            return False
        return True

    def pays(self, form) -> bool:
        """Returns whether distributing a map is profitable: some leaf of the sum or of the parts is gathered from
        nodes.
        """
        if isinstance(form, Sum):
            return any(self.pays(term) for _, term in form.terms)
        if isinstance(form, Cat):
            return any(self.pays(part) for part, _ in form.parts)
        return isinstance(form, Gathered)

    def distributed(self, form, weight: Node, bias: Optional[Node], width: int, shape: tuple):
        """A linear map of a sum or of parts as a sum of maps; maps of node rows run on the nodes."""
        groups: dict[object, list] = {}
        for factor, leaf, start, stop in _leaves(form, 1, 0, width):
            key = (leaf.end, leaf.rows) if isinstance(leaf, Gathered) else self.build(leaf)
            groups.setdefault(key, [leaf]).append((factor, start, stop))
        terms = []
        for leaf, *uses in groups.values():
            parts = [
                (factor, weight if (a, b) == (0, width) else self.call(aten.slice.Tensor, weight, 0, a, b))
                for factor, a, b in uses
            ]
            part, given, bias = self.total(parts), bias, None
            if isinstance(leaf, Gathered):
                rows = self.linear(self.finite(leaf), part, given)
                terms.append((1, Gathered(leaf.end, rows, 0, leaf.kind, shape)))
            else:
                terms.append((1, Plain(self.linear(self.build(leaf), part, given))))
        on_nodes = sum(isinstance(term, Gathered) for _, term in terms)
        self.notes.append(f"a linear map is split, {on_nodes} of {len(terms)} parts on nodes")
        return self.merged(terms)

    def linear_behind(self, node: Node) -> Node:
        """Moves a linear map behind the fold of its results: ``sum(h W + b) = (sum h) W + degree b``."""
        _, _, end, dim, rows, _ = node.args
        form = self.form(node.args[0])
        total = self.call(ops.fold, self.build(form.rows), self.ends, end, dim, rows, "sum")
        out = self.call(aten.mm.default, total, form.weight)
        self.notes.append("a linear map goes behind the sum")
        if form.bias is None:
            return out
        ones = self.call(aten.new_ones.default, form.bias, [self.sizes.edges])
        degree = self.call(ops.fold, ones, self.ends, end, 0, rows, "sum")
        return self.call(
            aten.add.Tensor, out, self.call(aten.mul.Tensor, self.call(aten.unsqueeze.default, degree, 1), form.bias)
        )


def _leaves(form, factor, start: int, stop: int):
    """The leaves of a value in columns ``start`` to ``stop``: (factor, leaf, start, stop)."""
    if isinstance(form, Sum):
        for f, term in form.terms:
            yield from _leaves(term, factor * f, start, stop)
    elif isinstance(form, Cat):
        for part, width in form.parts:
            yield from _leaves(part, factor, start, start + width)
            start += width
    else:
        yield factor, form, start, stop
