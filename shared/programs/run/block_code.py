"""Writes the Python functions that run a walk over a block of edges, and ops over whole tensors of nodes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Optional

from torch.fx import Node

from ...graph.handle import Graph
from ..front import ops
from ..front.rules import is_pointwise, name_of, shape_of, space_of
from ..front.spaces import EDGE, Refused, Sizes
from ..scheduling.schedule import Nodes, Walk, is_total


@dataclass
class Compiled:
    """A walk as a function from (block, values, sizes) to the block's parts of the sinks, with its text."""

    walk: Walk
    run: Callable
    text: str
    reads: list[Node]


def on_nodes(step: Nodes, traced: Sizes, receiving: Optional[int]) -> Callable[[dict, Sizes, Graph], None]:
    """Ops over whole tensors as a function of (values, sizes, graph), which adds their results to the values.

    Args:
        receiving: the row of ``edge_index`` with the receiving nodes; None if rows of nodes without edges need not
            become zeros.
    """
    constants: list[Any] = []

    def constant(value) -> str:
        constants.append(value)
        return f"c[{len(constants) - 1}]"

    def argument(a) -> str:
        if isinstance(a, Node):
            return f"v[{constant(a)}]"
        if isinstance(a, (list, tuple)):
            return f"[{', '.join(map(argument, a))}]"
        if not isinstance(a, bool) and isinstance(a, (int, float)) and a and a == a:
            for kind in ("edge", "source", "destination"):
                if a % traced.of(kind) == 0:
                    return f"{constant(a // traced.of(kind))} * n.of({kind!r})"
        return constant(a)

    lines = []
    for node in step.ops:
        if node.target is ops.rows_with_edges:
            rows, _, end, dim, _ = node.args
            if receiving is None:
                lines.append(f"    v[{constant(node)}] = {argument(rows)}")
            else:
                call = f"{constant(ops.without_edges)}({argument(rows)}, g, {end == receiving}, {dim})"
                lines.append(f"    v[{constant(node)}] = {call}")
            continue
        parts = [*map(argument, node.args), *(f"{name}={argument(a)}" for name, a in node.kwargs.items())]
        lines.append(f"    v[{constant(node)}] = {constant(node.target)}({', '.join(parts)})")
    scope: dict[str, Any] = {"c": constants}
    exec(compile("def run(v, n, g):\n" + "\n".join(lines), "<ops on nodes>", "exec"), scope)
    return scope["run"]


def compile_walk(walk: Walk, sizes: Sizes, needed: set[Node]) -> Compiled:
    return _Writer(walk, sizes, needed).compile()


class _Writer:
    """Writes the function of a walk."""

    def __init__(self, walk: Walk, sizes: Sizes, needed: set[Node]):
        self.walk, self.sizes, self.needed = walk, sizes, needed
        self.names: dict[Any, str] = {}  # node -> the variable that holds its value
        self.constants: list[Any] = []
        self.reads: list[Node] = []
        self.lines: list[str] = []

    def compile(self) -> Compiled:
        for node in self.walk.ops:
            self.op(node)
        for sink in self.walk.sinks:
            space = space_of(sink)
            if space.kind == EDGE and shape_of(sink)[space.dim] != self.sizes.edges:
                raise Refused("a result by edge has rows that were joined")
        results = ", ".join(self.names[sink] for sink in self.walk.sinks)
        body = "\n".join(f"    {line}" for line in [*self.lines, f"return ({results},)"])
        text = f"def walk(b, v, n):\n{body}\n"
        scope: dict[str, Any] = {"c": self.constants}
        scope.update(argument_rows=ops.argument_rows, share_rows=ops.share_rows, scale_rows=ops.scale_rows)
        exec(compile(text, "<walk over a block of edges>", "exec"), scope)
        return Compiled(self.walk, scope["walk"], text, self.reads)

    def let(self, key, expression: str) -> str:
        if key not in self.names:
            self.names[key] = f"t{len(self.names)}"
            self.lines.append(f"{self.names[key]} = {expression}")
        return self.names[key]

    def constant(self, value) -> str:
        for i, other in enumerate(self.constants):
            if other is value:
                return f"c[{i}]"
        self.constants.append(value)
        return f"c[{len(self.constants) - 1}]"

    def read(self, node: Node) -> str:
        """The text of a value that was computed outside of the walk, all rows of it."""
        if node not in self.reads:
            self.reads.append(node)
        return f"v[{self.reads.index(node)}]"

    def on_edges(self, node: Node) -> str:
        """The text of a value with a row for each edge of the block."""
        if node in self.names:
            return self.names[node]
        space = space_of(node)
        if space.is_ends:
            raise NotImplementedError("edge_index is read as a whole")
        if space.kind == EDGE:
            return self.let(node, f"b.by_edge({self.read(node)}, {space.dim})")
        return self.read(node)

    def on_rows(self, node: Node) -> str:
        """The text of a value with a row for each row of the block."""
        if node in self.names:
            return self.names[node]
        space = space_of(node)
        if not space.rows:
            return self.read(node)
        joined = shape_of(node)[space.dim] // self.sizes.of(space.kind)
        return self.let(("rows", node), f"b.rows({self.read(node)}, {space.dim}, {joined})")

    def op(self, node: Node) -> None:
        space, target = space_of(node), node.target
        if target is ops.gather_rows:
            x, dim = node.args[0], node.args[3]
            own = node.args[2] == self.walk.end
            source = self.on_rows(x) if own else self.read(x)
            self.let(node, f"{source}.index_select({dim}, b.{'own' if own else 'near'})")
        elif target is ops.fold:
            src, _, _, dim, _, reduce = node.args
            self.let(node, f"b.fold({self.on_edges(src)}, {dim}, {reduce!r})")
        elif target is ops.extremum:
            src, _, _, _, dim, _, reduce = node.args
            src = self.on_edges(src)
            best = self.let(("best", node), f"b.fold({src}, {dim}, {reduce!r})")
            wants = any(u.target is operator.getitem and u.args[1] == 1 and u in self.needed for u in node.users)
            arg = f"argument_rows({src}, {best}, b.own, b.ids, {dim})" if wants else "None"
            self.let(node, f"({best}, {arg})")
        elif target is ops.share:
            self.let(node, f"share_rows({', '.join(map(self.on_edges, node.args[:3]))}, b.ids)")
        elif target is ops.dropout_scale:
            like, seed, _, key, p = node.args
            self.let(node, f"scale_rows({self.on_edges(like)}, {self.read(seed)}, b.ids, {key}, {p!r})")
        elif space.kind == EDGE and space.end is not None and name_of(node) in ("select", "unbind"):
            self.ids_of(node)
        elif space.kind == EDGE or is_total(node):
            self.let(node, self.expression(node, self.on_edges, "b.edges"))
        else:
            self.let(node, self.expression(node, self.on_rows, "b.count"))

    def ids_of(self, node: Node) -> None:
        """Computes the node ids of an end for a node that selects them from ``ends``."""
        ids = ["b.own + b.start", "b.near.long()"]
        if name_of(node) == "select":
            self.let(node, ids[space_of(node).end != self.walk.end])
        else:
            self.let(node, f"({', '.join(ids[end != self.walk.end] for end in (0, 1))})")

    def expression(self, node: Node, read: Callable, rows: str) -> str:
        if node.target is operator.getitem:
            return f"{read(node.args[0])}[{node.args[1]}]"

        def argument(a) -> str:
            if isinstance(a, Node):
                return read(a)
            if isinstance(a, (list, tuple)):
                return f"[{', '.join(map(argument, a))}]"
            if (
                isinstance(a, (int, float))
                and not isinstance(a, bool)
                and a == a
                and a not in (float("inf"), -float("inf"))
            ):
                return self.number(a, node, rows)
            return repr(a) if a is None or isinstance(a, (bool, str)) else self.constant(a)

        parts = [*map(argument, node.args), *(f"{name}={argument(a)}" for name, a in node.kwargs.items())]
        return f"{self.constant(node.target)}({', '.join(parts)})"

    def number(self, value, node: Node, rows: str) -> str:
        """The text of a number. A multiple of a traced size becomes a multiple of the block's size, or of the graph's
        size where it is an operand of arithmetic.
        """
        kinds = ("edge", "source", "destination")
        for kind in kinds if value else ():
            if value % self.sizes.of(kind):
                continue
            factor = value // self.sizes.of(kind)
            own = "edge" if rows == "b.edges" else {0: "source", 1: "destination"}[self.walk.end]
            here = kind == own or (kind != "edge" and own != "edge" and self.sizes.one_set)
            if here and isinstance(value, int) and not is_pointwise(node):
                return f"{factor} * {rows}"
            return f"{factor} * n.of({kind!r})"
        return repr(value)
