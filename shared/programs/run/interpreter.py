"""Runs a schedule by blocks of whole rows, with ops of ATen. Only results by edge are allocated with the size of the
edges. Walks that have compiled code (:mod:`edgeless.programs.run.compiled`) run that instead.

Each walk becomes a Python function over one block, so that a block costs little more than its ops. Blocks run one after
the other, so two runs give the same bits.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor
from torch.fx import Node

from ...graph.handle import Graph
from ...kernels import CompileError, NvrtcError
from ..front.rules import space_of
from ..front.spaces import Sizes
from ..scheduling.schedule import Schedule, Walk, is_fold, is_total
from .block_code import Compiled, compile_walk, on_nodes
from .blocks import BLOCK_EDGES, Block, blocks_of, sizes_of
from .compiled import Code

CUDA_BLOCK_EDGES = 1 << 18  # for walks without kernels: on fewer edges, launches take longer than the ops


class _Examples(threading.local):
    """``kept``: whether the interpreter runs all walks of this thread, and walks keep its results as examples."""

    kept = False


_examples = _Examples()


@contextlib.contextmanager
def keeping_examples():
    """Runs all walks by the interpreter and keeps the results, with which compiled code will be compared."""
    before, _examples.kept = _examples.kept, True
    try:
        yield
    finally:
        _examples.kept = before


class Interpreter:
    """Runs a schedule.

    Args:
        plan: the schedule.
        receiving: the row of ``edge_index`` with the receiving nodes.
        backward: whether gradients are among the results. Values of nodes without edges then become zeros before they
            are read.
    """

    def __init__(self, plan: Schedule, receiving: int, backward: bool):
        self.plan, self.receiving = plan, receiving
        needed = {a for step in plan.steps for node in step.ops for a in node.all_input_nodes} | set(plan.outputs)
        self.needed = needed
        for walk in plan.walks():
            walk.code = walk.code or Code(walk, plan.sizes, needed)
        of = receiving if backward else None
        self.steps = [
            compile_walk(step, plan.sizes, needed) if isinstance(step, Walk) else on_nodes(step, plan.sizes, of)
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
            tensors: the arguments in the order of the traced function's; ``ends`` and ``ids`` are not read.
            graph: the graph with the edges of ``ends``.
            given: the values of the nodes ``plan.given``.
            block: the number of edges of a block.
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
        """A walk as generated kernels, or the reason why there are none."""
        try:
            from .cuda_walks import cuda_walk  # not imported where no GPU is used
        except ImportError as error:  # its tables of lanes need NumPy
            return str(error)
        if walk.code.on_cuda is None:
            walk.code.on_cuda = cuda_walk(walk, self.plan.sizes, self.needed, device)
        return walk.code.on_cuda

    def all_on_cuda(self, device: torch.device) -> bool:
        """Returns whether generated kernels run all walks."""
        return not any(isinstance(self.cuda_walk(walk, device), str) for walk in self.plan.walks())

    def run_on_cuda(self, walk: Walk, values: dict, graph: Graph, sizes: Sizes) -> Optional[list[Any]]:
        """The sinks of a walk, computed by generated kernels; None if there are no kernels."""
        found = self.cuda_walk(walk, graph.device)
        if isinstance(found, str):
            return None
        try:
            return found(values, graph, sizes, self.receiving)
        except (CompileError, NvrtcError) as error:
            walk.code.on_cuda = str(error)
            return None


def _store(sink: Node) -> Callable:
    """Returns the function that adds a block's part of a sink to the parts of the blocks before."""
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
    """A number of a trace; a multiple of a traced size becomes the same multiple of the real size."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value or value != value:
        return value
    for kind in ("edge", "source", "destination"):
        if value % traced.of(kind) == 0:
            return type(value)(value // traced.of(kind) * real.of(kind))
    return value


def call_whole(node: Node, values: dict, traced: Sizes, real: Sizes):
    """Calls the op of a node over whole tensors."""

    def argument(a):
        if isinstance(a, Node):
            return values[a]
        if isinstance(a, (list, tuple)):
            return [argument(x) for x in a]
        return _number(a, traced, real)

    return node.target(*map(argument, node.args), **{k: argument(v) for k, v in node.kwargs.items()})
