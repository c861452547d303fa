"""Recognises programs that existing ops compute: sums of neighbours' rows, extrema and attention.

A program lands if each fold that its results depend on is one of these. Then ops of ATen compute its values on nodes,
and its values of edges that depend on edge inputs alone, such as weights, over whole tensors. The existing op computes
each fold. All have their own gradients.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor
from torch.fx import Node

from ...graph.handle import Graph
from ..front import ops
from ..front.recording import Ops
from ..front.rules import name_of, shape_of, space_of, value_of
from ..front.spaces import EDGE, Sizes
from ..scheduling.schedule import operands
from .interpreter import call_whole

_VIEWS = ("view", "_unsafe_view", "unsqueeze", "squeeze")
_MOST_TERMS = 4


class _NoMatch(Exception):
    """Raised if a fold has no known form."""


@dataclass
class Term:
    """A product of a number, gathered source rows, destination rows, values of edges, and a softmax of scores."""

    factor: float = 1.0
    other: Optional[Node] = None
    own: tuple[Node, ...] = ()
    edge: tuple[Node, ...] = ()
    scores: Optional[Node] = None

    def times(self, more: Term) -> Term:
        if (self.other and more.other) or (self.scores and more.scores):
            raise _NoMatch
        return Term(
            self.factor * more.factor,
            self.other or more.other,
            self.own + more.own,
            self.edge + more.edge,
            self.scores or more.scores,
        )


class Landing:
    """A program that existing ops compute.

    Args:
        module: the program's graph, annotated.
        outputs: the program's results.
        sizes: the sizes of the trace.
        receiving: the row of ``edge_index`` with the receiving nodes.

    Attributes:
        name: the names of the ops that it uses.
    """

    def __init__(self, module: Ops, outputs: Sequence[Node], sizes: Sizes, receiving: int):
        self.module, self.outputs, self.sizes, self.receiving = module, list(outputs), sizes, receiving
        self.folds: dict[Node, Callable] = {}
        self.used: list[str] = []
        self.name = ""

    def match(self) -> bool:
        """Returns whether all folds have a known form; prepares their ops."""
        try:
            for output in self.outputs:
                self._visit(output)
        except _NoMatch:
            return False
        self.name = " and ".join(dict.fromkeys(self.used))
        return bool(self.used)

    # Recognition ----------------------------------------------------------------------------------------------------

    def _visit(self, node: Node) -> None:
        """Matches the folds that a value on nodes depends on."""
        if node in self.folds or node.op in ("placeholder", "get_attr"):
            return
        if space_of(node).kind == EDGE:
            if not self._edge_only(node):
                raise _NoMatch
            return
        if space_of(node).cross == ("total",):
            raise _NoMatch
        if node.target is ops.fold:
            self._fold(node)
        elif node.target is ops.extremum:
            self._extremum(node)
        else:
            for operand in operands(node):
                self._visit(operand)

    def _edge_only(self, node: Node) -> bool:
        """Returns whether a value of edges depends only on edge inputs and parameters."""
        if node.op in ("placeholder", "get_attr"):
            return not space_of(node).is_ends
        if space_of(node).kind not in (EDGE, "parameter") or space_of(node).cross or node.target in _OWN:
            return False
        return all(self._edge_only(a) for a in node.all_input_nodes)

    def _extremum(self, node: Node) -> None:
        src, end, dim, reduce = node.args[0], node.args[3], node.args[4], node.args[-1]
        src = _through_views(src, (name_of(src) == "detach") and src)
        if not self._gathers(src, 1 - self.receiving) or end != self.receiving or dim != 0 or len(shape_of(src)) != 2:
            raise _NoMatch
        if any(user.target is operator.getitem and user.args[1] == 1 and user.users for user in node.users):
            raise _NoMatch
        rows = src.args[0]
        self._visit(rows)
        self.used.append("neighbor_reduce")
        self.folds[node] = lambda run, graph: (
            _functional().neighbor_reduce(graph, run(rows), reduce[1:], ties="scatter"),
            None,
        )

    def _gathers(self, node: Node, end: int) -> bool:
        return node.target is ops.gather_rows and node.args[2] == end and node.args[3] == 0

    def _fold(self, node: Node) -> None:
        src, _, end, dim, _, reduce = node.args
        if reduce != "sum" or end != self.receiving or dim != 0:
            raise _NoMatch
        inner = _through_views(src)
        if name_of(inner) in ("mul", "gather_rows"):  # the sum of a view is a view of the sum
            src = inner
        dims, item = len(shape_of(src)), shape_of(src)[1:]
        parts = [self._term(term, dims, value_of(src).dtype) for term in self._terms(src, dims)]

        def total(run, graph):
            found = [part(run, graph) for part in parts]
            out = sum(found[1:], found[0])
            return out.expand(graph.num_dst, *item).reshape(graph.num_dst, *shape_of(node)[1:])

        self.folds[node] = total

    def _terms(self, node: Node, dims: int) -> list[Term]:
        """A value of edges as a sum of products."""
        if len(shape_of(node)) != dims:
            raise _NoMatch
        if space_of(node).fill == 1:
            return [Term()]
        if self._edge_only(node):
            return [Term(edge=(node,))]
        if self._gathers(node, 1 - self.receiving):
            return [Term(other=node.args[0])]
        if self._gathers(node, self.receiving):
            return [Term(own=(node.args[0],))]
        scores = self._scores(node)
        if scores is not None:
            return [Term(scores=scores)]
        name, args = name_of(node), node.args
        if name in ("add", "sub") and not node.kwargs and all(isinstance(a, Node) for a in args):
            if shape_of(args[0]) != shape_of(args[1]):
                raise _NoMatch
            sign = 1.0 if name == "add" else -1.0
            found = self._terms(args[0], dims) + [Term(sign).times(t) for t in self._terms(args[1], dims)]
        elif name == "neg":
            found = [Term(-1.0).times(t) for t in self._terms(args[0], dims)]
        elif name in ("mul", "div") and isinstance(args[1], (int, float)):
            if args[1] % self.sizes.edges == 0 or args[1] % self.sizes.sources == 0:
                raise _NoMatch
            factor = float(args[1]) if name == "mul" else 1.0 / args[1]
            found = [Term(factor).times(t) for t in self._terms(args[0], dims)]
        elif name == "mul":
            found = [a.times(b) for a in self._terms(args[0], dims) for b in self._terms(args[1], dims)]
        else:
            raise _NoMatch
        if len(found) > _MOST_TERMS:
            raise _NoMatch
        return found

    def _term(self, term: Term, dims: int, dtype: torch.dtype) -> Callable:
        """The fold of one product, as a function of (values, graph)."""
        for node in term.own:
            self._visit(node)
        narrow = all(shape_of(e)[-1] == 1 and (dims == 2 or shape_of(e)[1] > 1) for e in term.edge)
        if term.other is not None:
            rows = len(shape_of(term.other))
            if rows != dims or dims not in (2, 3) or not narrow:
                raise _NoMatch
            self._visit(term.other)
        if term.scores is not None:
            if term.other is None or term.edge:
                raise _NoMatch
            attention = self._attention(term.scores, term.other, dims)
        else:
            attention = None
            if term.other is not None or term.edge:
                self.used.append("spmm" if term.other is not None else "a sum of edge rows")

        def run_term(run, graph: Graph):
            weight: Any = None
            for node in term.edge:
                weight = run(node) if weight is None else weight * run(node)
            if attention is not None:
                out = attention(run, graph)
            elif term.other is not None:
                out = _functional().spmm(graph, run(term.other), None if weight is None else weight.squeeze(-1))
            elif weight is not None:
                weight = weight.expand(graph.num_edges, *weight.shape[1:])
                flat = weight.reshape(graph.num_edges, -1)
                out = _functional().spmm(_edges_to_rows(graph), flat).view(graph.num_dst, *weight.shape[1:])
            else:
                out = graph.in_degrees().to(dtype).view(-1, *[1] * (dims - 1))
            for node in term.own:
                out = out * run(node)
            return out if term.factor == 1 else out * term.factor

        return run_term

    def _scores(self, node: Node) -> Optional[Node]:
        """The scores if a value is their softmax over a row's edges, else None."""
        div = _through_views(node)
        if name_of(div) != "div" or not isinstance(div.args[1], Node) or not self._gathers(div.args[1], self.receiving):
            return None
        exp, total = div.args[0], div.args[1].args[0]
        if name_of(total) == "add" and isinstance(total.args[1], float) and total.args[1] <= 1e-15:
            total = total.args[0]
        if total.target is not ops.fold or total.args[0] is not exp or total.args[-1] != "sum" or name_of(exp) != "exp":
            return None
        sub = exp.args[0]
        if name_of(sub) != "sub" or len(sub.args) != 2 or not isinstance(sub.args[1], Node):
            return None
        scores, best = sub.args
        if not self._gathers(best, self.receiving) or best.args[0].target is not operator.getitem:
            return None
        extremum = best.args[0].args[0]
        if extremum.target is not ops.extremum or extremum.args[-1] != "amax" or best.args[0].args[1] != 0:
            return None
        of = extremum.args[0]
        same = of is scores or (name_of(of) == "detach" and of.args[0] is scores)
        return scores if same and extremum.args[3] == total.args[2] == self.receiving else None

    def _attention(self, scores: Node, value: Node, dims: int) -> Callable:
        """The attention op for a softmax of scores times gathered values, as a function of (values, graph)."""
        inner = _through_views(scores)
        heads = shape_of(scores)[1] if len(shape_of(scores)) > 1 else 1
        if (dims == 3 and shape_of(value)[1] != heads) or (dims == 2 and heads != 1):
            raise _NoMatch
        if name_of(inner) == "leaky_relu":
            return self._gat(inner, value, heads, dims)
        vector, of = None, None
        if name_of(inner) == "mv" or name_of(inner) == "mm" and shape_of(inner)[1] == 1:
            of, vector = inner.args
        elif name_of(inner) == "sum" and list(inner.args[1]) == [-1] and name_of(inner.args[0]) == "mul":
            a, b = inner.args[0].args
            of, vector = (a, b) if isinstance(b, Node) and not space_of(b).rows else (b, a)
        if of is None or not isinstance(vector, Node) or space_of(vector).rows or name_of(of) != "leaky_relu":
            raise _NoMatch
        return self._gatv2(of, vector, value, heads, dims)

    def _ends(self, node: Node) -> tuple[Node, Optional[Node], Optional[Node]]:
        """Splits a sum into a gather from the source, one from the destination, and a value of edges, which may be
        None.
        """
        terms = self._terms(node, len(shape_of(node)))
        other = [t.other for t in terms if t.other is not None]
        own = [t.own[0] for t in terms if t.own]
        edge = [t.edge[0] for t in terms if t.edge]
        single = all((t.other is not None) + len(t.own) + len(t.edge) == 1 and t.factor == 1 for t in terms)
        if not single or len(other) != 1 or len(own) > 1 or len(edge) > 1 or any(t.scores for t in terms):
            raise _NoMatch
        for node in other + own:
            self._visit(node)
        return other[0], own[0] if own else None, edge[0] if edge else None

    @staticmethod
    def _slope(node: Node) -> float:
        return float(node.args[1]) if len(node.args) > 1 else 0.01

    def _gat(self, node: Node, value: Node, heads: int, dims: int) -> Callable:
        other, own, edge = self._ends(node.args[0])
        slope = self._slope(node)
        self.used.append("gat_attention" + (" with an edge term" if edge is not None else ""))

        def attend(run, graph: Graph):
            x = run(value).view(graph.num_src, heads, -1)
            a_l = run(other).reshape(-1, heads)
            a_r = None if own is None else run(own).reshape(-1, heads)
            options = {}
            if edge is not None:
                term = run(edge).reshape(-1, heads)
                options = {"edge_attr": term, "edge_proj": torch.eye(heads, dtype=term.dtype, device=term.device)}
            out = _functional().gat_attention(graph, x, a_l, a_r, negative_slope=slope, **options)
            return out if dims == 3 else out.flatten(1)

        return attend

    def _gatv2(self, node: Node, vector: Node, value: Node, heads: int, dims: int) -> Callable:
        other, own, edge = self._ends(node.args[0])
        if own is None or edge is not None or _through_views(other) is not _through_views(value):
            raise _NoMatch
        slope = self._slope(node)
        self._visit(vector)
        self.used.append("gatv2_attention")

        def attend(run, graph: Graph):
            x_l, x_r = (run(n).view(count, heads, -1) for n, count in ((other, graph.num_src), (own, graph.num_dst)))
            att = run(vector).reshape(-1, x_l.size(-1)).expand(heads, -1)
            out = _functional().gatv2_attention(graph, x_l, x_r, att, negative_slope=slope)
            return out if dims == 3 else out.flatten(1)

        return attend

    # Running --------------------------------------------------------------------------------------------------------

    def __call__(self, graph: Graph, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Computes the results from all arguments; ``ends`` and ``ids`` among them are not read."""
        ends = (graph.num_src, graph.num_dst) if self.receiving == 1 else (graph.num_dst, graph.num_src)
        real = Sizes(*ends, graph.num_edges)
        holders = [node for node in self.module.graph.nodes if node.op == "placeholder"]
        values: dict[Node, Any] = dict(zip(holders, tensors))

        def run(node: Node):
            if node in values:
                return values[node]
            if node.op == "get_attr":
                found = getattr(self.module, node.target)
            elif node in self.folds:
                found = self.folds[node](run, graph)
            else:
                for operand in operands(node):
                    run(operand)
                if node.target is ops.rows_with_edges:
                    rows, _, end, dim, _ = node.args
                    found = ops.without_edges(values[rows], graph, end == self.receiving, dim)
                else:
                    found = call_whole(node, values, self.sizes, real)
            values[node] = found
            return found

        return [run(node) for node in self.outputs]


_OWN = (ops.gather_rows, ops.fold, ops.extremum, ops.share, ops.dropout_scale)


def _edges_to_rows(graph: Graph) -> Graph:
    """The graph from each edge to its destination, kept with ``graph``. SpMM over it sums rows of edges in a fixed
    order.
    """

    def build(_):
        ids = torch.arange(graph.num_edges, device=graph.device)
        return Graph.from_edge_index(torch.stack((ids, graph.edge_index()[1])), graph.num_edges, graph.num_dst)

    return graph.format("edges to rows", build)


def _functional():
    from ... import functional  # imported here, since it imports programs itself

    return functional


def _through_views(node: Node, first: Any = None) -> Node:
    """The value that a node is a view of, if the view keeps the elements of each row."""
    if first:
        node = first.args[0]
    while name_of(node) in _VIEWS and isinstance(value_of(node), Tensor) and value_of(node).is_floating_point():
        node = node.args[0]
    return node


def land(program) -> Optional[Landing]:
    """The landing of a program on existing ops, or None."""
    if program.written or program.draws:
        return None
    outputs = program.outputs[: program.results]
    if any(space_of(node).kind == EDGE for node in outputs):
        return None
    landing = Landing(program.module, outputs, program.sizes, program.receiving)
    return landing if landing.match() else None
