"""The second level of a program: how its values are computed, as steps over whole nodes and walks over edges.

A walk visits rows of edges by destination (CSR) or by source (CSC). It gathers operands, computes an expression on the
edges of a row, and ends in sinks: folds over the row's edges, sums over all edges, and results by edge. Values that
depend only on a row's own folds, such as the sum of a softmax, are computed within the walk.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Union

from torch import Tensor
from torch.fx import Node

from ..front import ops
from ..front.recording import Ops
from ..front.rules import name_of, shape_of, space_of, value_of
from ..front.spaces import EDGE, Refused, Sizes
from ..front.tracing import outputs_of

FOLDS = (ops.fold, ops.extremum)


def operands(node: Node) -> list[Node]:
    """The values that a node's op reads, without ``ends`` and ``ids``, which every walk has."""
    if node.target in (ops.gather_rows, ops.rows_with_edges) or node.target in FOLDS:
        return [node.args[0]]
    if node.target is ops.share:
        return list(node.args[:3])
    if node.target is ops.dropout_scale:
        return [node.args[0], node.args[1]]
    return node.all_input_nodes


def is_fold(node: Node) -> bool:
    """Returns whether a node folds rows of edges into rows of nodes."""
    return node.target in FOLDS


def is_total(node: Node) -> bool:
    """Returns whether a node sums over all edges."""
    return node.op == "call_function" and space_of(node).cross == ("total",)


def is_local(node: Node) -> bool:
    """Returns whether a row of a node's result depends only on the same row of its operands."""
    space = node.meta["space"]
    if node.target is ops.rows_with_edges:  # a walk over the rows' edges does not need it
        return False
    return all(s.local for s in space) if isinstance(space, list) else space.local


@dataclass
class Nodes:
    """Ops over whole nodes and parameters, in order."""

    ops: list[Node]


@dataclass
class Walk:
    """A walk by the rows of ``end``: all its ops in order, and its sinks, the ops whose results are kept. ``code`` is
    its compiled code, if it may have some.
    """

    end: int
    ops: list[Node]
    sinks: list[Node]
    code: Any = field(default=None, compare=False, repr=False)


Step = Union[Nodes, Walk]


@dataclass
class Schedule:
    """The steps that compute the results of a graph.

    Attributes:
        module: the graph, annotated with spaces.
        sizes: the sizes that the graph was traced with.
        outputs: the graph's results.
        given: nodes whose values are given besides the arguments.
        steps: the steps in the order in which they run.
    """

    module: Ops
    sizes: Sizes
    outputs: list[Node]
    given: list[Node] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def walks(self) -> list[Walk]:
        """The walks among the steps."""
        return [step for step in self.steps if isinstance(step, Walk)]


def schedule(module: Ops, sizes: Sizes, receiving: int, given: Iterable[Node] = ()) -> Schedule:
    """Orders an annotated graph into steps. Where a walk may go by either end, it goes by the ``receiving`` end.

    Raises:
        Refused: no order of walks computes all results.
    """
    plan = Schedule(module, sizes, outputs_of(module), list(given))
    done = {node for node in module.graph.nodes if node.op in ("placeholder", "get_attr")} | set(plan.given)
    needed = _needed(plan.outputs, done)
    order = [node for node in module.graph.nodes if node in needed and node.op == "call_function"]
    by_edge = {node for node in plan.outputs if space_of(node).kind == EDGE and node not in done}
    while True:
        whole = []
        for node in order:
            if node in done or space_of(node).kind == EDGE or is_fold(node) or is_total(node):
                continue
            if all(a in done and space_of(a).kind != EDGE for a in operands(node)):
                whole.append(node)
                done.add(node)
        if whole:
            plan.steps.append(Nodes(whole))
        if all(node in done for node in plan.outputs):
            return plan
        walks = [_walk(order, done, end, by_edge, sizes) for end in (receiving, 1 - receiving)]
        walks = [walk for walk in walks if walk is not None]
        if not walks:
            raise Refused("its values cannot be computed in walks over rows of edges")
        walk = next((walk for walk in walks if any(map(is_fold, walk.sinks))), walks[0])
        plan.steps.append(walk)
        done.update(walk.sinks)


def _needed(outputs: list[Node], done: set[Node]) -> set[Node]:
    needed: set[Node] = set()
    stack = list(outputs)
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            if node not in done:
                stack.extend(operands(node))
    return needed


def _walk(order: list[Node], done: set[Node], end: int, by_edge: set[Node], sizes: Sizes):
    """The walk by an end that computes as many sinks as possible from the nodes that are done, or None."""
    edges: set[Node] = set()  # computed on the edges of a row
    rows: set[Node] = set()  # computed for the row itself
    sinks: list[Node] = []
    for node in order:
        reads = operands(node)
        if is_fold(node):
            ready = all(a in edges or (a in done and space_of(a).kind == EDGE) for a in reads)
            if node not in done and node_end(node) == end and ready:
                rows.add(node)
                sinks.append(node)
        elif is_total(node):
            if node not in done and all(a in edges or a in done for a in reads):
                sinks.append(node)
        elif space_of(node).kind == EDGE:
            own = node.target is ops.gather_rows and node.args[2] == end
            if all(a in edges or a in done or (own and a in rows) for a in reads):
                edges.add(node)
                if node in by_edge and node not in done:
                    sinks.append(node)
        elif (
            node not in done
            and is_local(node)
            and space_of(node).kind == sizes.side(end)
            and all(a in rows or (a in done and space_of(a).kind != EDGE) for a in reads)
        ):
            rows.add(node)
    if not sinks:
        return None
    kept, stack = set(), list(sinks)
    while stack:
        node = stack.pop()
        if node not in kept:
            kept.add(node)
            stack.extend(a for a in operands(node) if a in edges or (a in rows and a not in done))
    return Walk(end, [node for node in order if node in kept], sinks)


def node_end(fold: Node) -> int:
    """The end of the edges that a fold's result rows belong to."""
    return fold.args[-4]


# Text ---------------------------------------------------------------------------------------------------------------


def values_text(module: Ops) -> str:
    """The text of the first level: every value with its op, its space, the shape of an item and the dtype."""
    lines = []
    for node in module.graph.nodes:
        if node.op == "output" or (node.op == "placeholder" and not node.users):
            continue
        value, space = value_of(node), space_of(node)
        if not isinstance(value, Tensor):
            continue
        item = [n for d, n in enumerate(shape_of(node)) if not (space.rows and d == space.dim)]
        made = "" if node.op == "placeholder" else f" = {_op_text(node)}"
        lines.append(f"{node.name}{made}: {space.kind} {item} {str(value.dtype).replace('torch.', '')}")
    return "\n".join(lines)


def steps_text(plan: Schedule, receiving: int) -> str:
    """The text of the second level: one line for each step."""
    lines = []
    for step in plan.steps:
        if isinstance(step, Nodes):
            names = [name_of(node) for node in step.ops if not _is_view(node)]
            if names:
                lines.append("on nodes: " + ", ".join(names))
            continue
        side = ("source", "destination") if receiving == 1 else ("destination", "source")
        gathers = [f"{n.args[0].name}[{side[n.args[2]]}]" for n in step.ops if n.target is ops.gather_rows]
        names = [
            name_of(n)
            for n in step.ops
            if space_of(n).kind == EDGE and n.target is not ops.gather_rows and not _is_view(n)
        ]
        sinks = [f"{_op_text(n)} -> {n.name}" if not _by_edge(n) else f"by edge -> {n.name}" for n in step.sinks]
        lines.append(
            f"walk by {side[step.end]}: gathers {', '.join(gathers) or 'nothing'}; "
            f"computes {', '.join(names) or 'nothing'}; keeps {', '.join(sinks)}"
            + (f"; {step.code.text()}" if step.code is not None else "")
        )
    return "\n".join(lines)


def _by_edge(node: Node) -> bool:
    return space_of(node).kind == EDGE


def _is_view(node: Node) -> bool:
    return node.target is operator.getitem or name_of(node) in (
        *("view", "_unsafe_view", "unsqueeze", "squeeze", "expand", "slice", "select", "t", "transpose", "permute"),
        *("detach", "alias", "rows_with_edges"),
    )


def _op_text(node: Node) -> str:
    if is_fold(node):
        return f"{node.args[-1]} of {node.args[0].name}"
    if is_total(node):
        return f"sum over edges, {name_of(node)} of {', '.join(a.name for a in operands(node))}"
    if node.target is ops.gather_rows:
        return f"{node.args[0].name} of {('row 0', 'row 1')[node.args[2]]} of edge_index"
    return f"{name_of(node)}({', '.join(a.name for a in operands(node))})"
