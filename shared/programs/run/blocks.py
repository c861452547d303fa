"""Runs a schedule by blocks of whole rows, with ops of ATen: nothing of the size of the edges is allocated but results
by edge. Walks with compiled code (:mod:`edgeless.programs.run.compiled`) run by that.

Each walk becomes a small Python function over one block, so that a block costs little more than its ops. A block has
whole rows, some :data:`BLOCK_EDGES` edges and at least one row. Rows are summed in the order of the graph, and blocks
one after the other, so two runs give the same bits.
"""

from __future__ import annotations

import contextlib
import math
import operator
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor
from torch.fx import Node

from ... import _C  # noqa: F401  registers the sum
from ...graph.handle import Graph
from ...kernels import CompileError, NvrtcError
from ..front import ops
from ..front.rules import is_pointwise, name_of, shape_of, space_of
from ..front.spaces import EDGE, Refused, Sizes
from ..scheduling.schedule import Nodes, Schedule, Walk, is_fold, is_total
from .compiled import Code

BLOCK_EDGES = 4096
CUDA_BLOCK_EDGES = 1 << 18  # where no kernel is generated: launches take longer than the ops on fewer edges
_SUM, _SUMMED = torch.ops.edgeless.spmm.default, (torch.float32, torch.float64)  # faster than index_add_ on the CPU


class Block:
    """A few rows of a graph: ``count`` rows from ``start``, with their edges.

    Attributes:
        near: the other end of each edge ``[e]``.
        own: the row of each edge, counted from ``start``, ``[e]`` int64.
    """

    __slots__ = ("start", "count", "edges", "near", "own", "_ids", "_slice", "_rows", "_csr")

    def __init__(self, arrays, start: int, stop: int):
        indptr, indices, ids = arrays
        self.start, self.count = start, stop - start
        first, last = int(indptr[start]), int(indptr[stop])
        self.edges = last - first
        self.near = indices[first:last]
        degrees = indptr[start + 1 : stop + 1] - indptr[start:stop]
        rows = torch.arange(self.count, device=indices.device)
        self.own = torch.repeat_interleave(rows, degrees, output_size=self.edges)
        self._ids = None if ids is None else ids[first:last]
        self._slice = slice(first, last)
        self._rows, self._csr = indptr[start : stop + 1], None

    @property
    def ids(self) -> Tensor:
        """The edges' numbers ``[e]`` int64."""
        if self._ids is None:
            return torch.arange(self._slice.start, self._slice.stop, device=self.near.device)
        return self._ids.long()

    def fold(self, src: Tensor, dim: int, reduce: str) -> Tensor:
        """The rows of edges ``src`` reduced into this block; see :func:`edgeless.programs.front.ops.fold_rows`."""
        fast = not src.is_cpu or (dim == 0 and src.dim() == 2 and src.size(1) > 2 and src.dtype in _SUMMED)
        if reduce == "sum" and fast and src.is_floating_point():
            return self.sum(src, dim)
        return ops.fold_rows(src, self.own, dim, self.count, reduce)

    def sum(self, src: Tensor, dim: int) -> Tensor:
        """The sums of rows of edges by SpMM: in a fixed order, where ``index_add_`` has atomics on CUDA."""
        if self._csr is None:
            rows = self._rows - self._rows[0]
            self._csr = [rows, torch.arange(self.edges, dtype=rows.dtype, device=rows.device)]
        by_row = src.movedim(dim, 0)
        flat = by_row.reshape(self.edges, math.prod(by_row.shape[1:])).contiguous()
        sums = _SUM(flat, None, None, None, self._csr, [], src.dtype, [])
        sums = ops.shaped(sums, [self.count, *by_row.shape[1:]])
        return sums.movedim(0, dim).clone() if dim else sums

    def by_edge(self, x: Tensor, dim: int) -> Tensor:
        """The rows of these edges in a tensor by edge."""
        if self._ids is None:
            return x.narrow(dim, self._slice.start, self.edges)
        return x.index_select(dim, self._ids)

    def rows(self, x: Tensor, dim: int, joined: int = 1) -> Tensor:
        """The rows of this block in a tensor by node; a view may have joined rows with another dimension."""
        return x.narrow(dim, self.start * joined, self.count * joined)


def blocks_of(graph: Graph, receiving: bool, edges: int):
    """The arrays of a direction of a graph and the rows where its blocks begin and end. Kept with the graph."""

    def build(_):
        indptr = (graph.csr if receiving else graph.csc).indptr.long()
        limits = torch.arange(edges, max(graph.num_edges, edges), edges, device=indptr.device)
        cuts = torch.unique(torch.searchsorted(indptr, limits, right=True) - 1)
        inner = [int(cut) for cut in cuts if 0 < cut < indptr.numel() - 1]
        return [0, *inner, indptr.numel() - 1]

    arrays = graph.csr if receiving else graph.csc
    return arrays, graph.format(("blocks", receiving, edges), build)


@dataclass
class Compiled:
    """A walk as a function of (block, values, numbers) to the sinks' parts, with its text."""

    walk: Walk
    run: Callable
    text: str
    reads: list[Node]


class _Examples(threading.local):
    """Whether the interpreter runs alone in this thread, and walks keep what it computes."""

    kept = False


_examples = _Examples()


@contextlib.contextmanager
def keeping_examples():
    """Runs all walks by the interpreter; their code will be compared with what it computed."""
    before, _examples.kept = _examples.kept, True
    try:
        yield
    finally:
        _examples.kept = before


class Interpreter:
    """Runs a schedule.

    Args:
        plan: the schedule.
        receiving: the row of ``edge_index`` whose nodes receive.
        backward: whether gradients are among the results. What nodes without edges have reaches no others.
    """

    def __init__(self, plan: Schedule, receiving: int, backward: bool):
        self.plan, self.receiving = plan, receiving
        needed = {a for step in plan.steps for node in step.ops for a in node.all_input_nodes} | set(plan.outputs)
        self.needed = needed
        for walk in plan.walks():
            walk.code = walk.code or Code(walk, plan.sizes, needed)
        of = receiving if backward else None
        self.steps = [
            _compile(step, plan.sizes, needed) if isinstance(step, Walk) else _on_nodes(step, plan.sizes, of)
            for step in plan.steps
        ]
        self.placeholders = [node for node in plan.module.graph.nodes if node.op == "placeholder"]
        self.constants = {n: getattr(plan.module, n.target) for n in plan.module.graph.nodes if n.op == "get_attr"}

    def __call__(
        self,
        tensors: list[Tensor],
        graph: Graph,
        given: Optional[dict] = None,
        block: int = BLOCK_EDGES,
        compiled: bool = True,
    ):
        """Computes the results from the arguments.

        Args:
            tensors: in the order of the traced function's arguments; ``ends`` and ``ids`` are not read.
            graph: has the edges of ``ends``.
            given: values of ``plan.given``.
            block: how many edges a block has.
            compiled: whether walks may run as compiled code.
        """
        values: dict[Node, Any] = dict(zip(self.placeholders, tensors))
        values.update(self.constants)
        values.update(given or {})
        sizes = sizes_of(graph, self.receiving)
        for step in self.steps:
            if isinstance(step, Compiled):
                values.update(zip(step.walk.sinks, self._walk(step, values, graph, sizes, block, compiled)))
            else:
                step(values, sizes, graph)
        return [values[node] for node in self.plan.outputs]

    def _walk(self, step: Compiled, values: dict, graph: Graph, sizes: Sizes, block: int, compiled: bool) -> list[Any]:
        if graph.device.type == "cuda":
            found = self.run_on_cuda(step.walk, values, graph, sizes) if compiled else None
            block = max(block, CUDA_BLOCK_EDGES)
            return self._interpret(step, values, graph, sizes, block) if found is None else found
        code, receives = step.walk.code, step.walk.end == self.receiving
        if _examples.kept:
            code.keep_example(values, graph, sizes, receives, lambda v: self._interpret(step, v, graph, sizes, block))
        found = code.run(values, graph, sizes, receives) if compiled and not _examples.kept else None
        return self._interpret(step, values, graph, sizes, block) if found is None else found

    def _interpret(self, step: Compiled, values: dict, graph: Graph, sizes: Sizes, block: int) -> list[Any]:
        walk = step.walk
        arrays, cuts = blocks_of(graph, walk.end == self.receiving, block)
        reads = [values[node] for node in step.reads]
        results: list[Any] = [None] * len(walk.sinks)
        stores = [_store(sink) for sink in walk.sinks]
        for start, stop in zip(cuts, cuts[1:]):
            part = Block(arrays, start, stop)
            for i, found in enumerate(step.run(part, reads, sizes)):
                results[i] = stores[i](results[i], found, part, sizes, cuts[-1])
        return results

    def cuda_walk(self, walk: Walk, device: torch.device) -> Any:
        """A walk as generated kernels, or why there are none."""
        try:
            from .cuda_walks import cuda_walk  # not imported where no GPU is used
        except ImportError as error:  # its tables of lanes need NumPy
            return str(error)
        if walk.code.on_cuda is None:
            walk.code.on_cuda = cuda_walk(walk, self.plan.sizes, self.needed, device)
        return walk.code.on_cuda

    def all_on_cuda(self, device: torch.device) -> bool:
        """Whether generated kernels run all walks."""
        return not any(isinstance(self.cuda_walk(walk, device), str) for walk in self.plan.walks())

    def run_on_cuda(self, walk: Walk, values: dict, graph: Graph, sizes: Sizes) -> Optional[list[Any]]:
        """The sinks of a walk by generated kernels, or None if there are none."""
        found = self.cuda_walk(walk, graph.device)
        if isinstance(found, str):
            return None
        try:
            return found(values, graph, sizes, self.receiving)
        except (CompileError, NvrtcError) as error:
            walk.code.on_cuda = str(error)
            return None


def sizes_of(graph: Graph, receiving: int) -> Sizes:
    """The sizes of a graph as a program counts them; ``receiving`` is the row of ``edge_index`` whose nodes receive."""
    return graph.format(("sizes", receiving), _sizes_by_sources if receiving else _sizes_by_destinations)


def _sizes_by_sources(graph: Graph) -> Sizes:
    return Sizes(graph.num_src, graph.num_dst, graph.num_edges)


def _sizes_by_destinations(graph: Graph) -> Sizes:
    return Sizes(graph.num_dst, graph.num_src, graph.num_edges)


def _store(sink: Node) -> Callable:
    """How a block's part of a sink joins the parts of the blocks before."""
    dim = space_of(sink).dim
    if is_total(sink):
        return lambda whole, part, *_: part if whole is None else whole.add_(part)
    if is_fold(sink):

        def rows(whole, part, block, sizes, count):
            if block.count == count:
                return part
            if isinstance(part, tuple):
                return tuple(rows(w, p, block, sizes, count) for w, p in zip(whole or (None,) * len(part), part))
            if part is None:
                return None
            if whole is None:
                whole = part.new_empty([count if d == dim else n for d, n in enumerate(part.shape)])
            whole.narrow(dim, block.start, block.count).copy_(part)
            return whole

        return rows

    def by_edge(whole, part, block, sizes, count):
        if whole is None:
            whole = part.new_empty([sizes.edges if d == dim else n for d, n in enumerate(part.shape)])
        return whole.index_copy_(dim, block.ids, part)

    return by_edge


def _number(value, traced: Sizes, real: Sizes):
    """A number of a trace, with the real sizes where it is a multiple of a traced one."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value or value != value:
        return value
    for kind in ("edge", "source", "destination"):
        if value % traced.of(kind) == 0:
            return type(value)(value // traced.of(kind) * real.of(kind))
    return value


def call_whole(node: Node, values: dict, traced: Sizes, real: Sizes):
    """The result of an op of a graph over whole tensors."""

    def argument(a):
        if isinstance(a, Node):
            return values[a]
        if isinstance(a, (list, tuple)):
            return [argument(x) for x in a]
        return _number(a, traced, real)

    return node.target(*map(argument, node.args), **{k: argument(v) for k, v in node.kwargs.items()})


def _on_nodes(step: Nodes, traced: Sizes, receiving: Optional[int]) -> Callable[[dict, Sizes, Graph], None]:
    """Ops over whole tensors as a function of (values, sizes, graph), which adds their results to the values.

    Args:
        receiving: the row of ``edge_index`` whose nodes receive; None if rows of nodes without edges may stay as they
            are.
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


# Walks as Python functions ------------------------------------------------------------------------------------------


def _compile(walk: Walk, sizes: Sizes, needed: set[Node]) -> Compiled:
    return _Writer(walk, sizes, needed).compile()


class _Writer:
    """Writes the function of a walk."""

    def __init__(self, walk: Walk, sizes: Sizes, needed: set[Node]):
        self.walk, self.sizes, self.needed = walk, sizes, needed
        self.names: dict[Any, str] = {}  # what a block has computed
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
        """A value from outside of the walk, as a whole."""
        if node not in self.reads:
            self.reads.append(node)
        return f"v[{self.reads.index(node)}]"

    def on_edges(self, node: Node) -> str:
        """A value as an op on edges reads it."""
        if node in self.names:
            return self.names[node]
        space = space_of(node)
        if space.is_ends:
            raise NotImplementedError("edge_index is read as a whole")
        if space.kind == EDGE:
            return self.let(node, f"b.by_edge({self.read(node)}, {space.dim})")
        return self.read(node)

    def on_rows(self, node: Node) -> str:
        """A value as an op on the walk's rows reads it."""
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
        """The node ids of an end, as a value."""
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
        """A number, in which a multiple of a size is one of the block's or, in arithmetic, of the whole graph's."""
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
