"""Compiles walks for the CPU and runs them.

A walk is compiled at its first use: in the background, while the interpreter runs it, or at once. Before its first run
the compiled code is compared in float64 with the values that the interpreter computed at the check of the program
(:mod:`edgeless.programs.checking`). If it differs, or there is no compiler, the interpreter continues to run the walk,
and :meth:`Code.text` says why.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor
from torch.fx import Node

from ... import _C
from ...graph.handle import Graph
from ..c.arrange import arrange
from ..c.code import CText, c_code
from ..front import ops
from ..front.rules import space_of, value_of
from ..front.spaces import Sizes
from ..lowering.items import NotLowered, Operand
from ..lowering.lower import lower
from ..scheduling.schedule import Walk, operands
from . import c_compiler
from .agreement import agree

MODES = ("background", "now", "off")
_MOST_EXAMPLES = 4
_FEW = 1 << 15  # edges per thread, below which starting a thread costs more than it saves
_jobs: set[threading.Thread] = set()
_one_at_a_time = threading.Lock()
_mode: Optional[str] = None


def compile_mode() -> str:
    """The value of ``EDGELESS_COMPILE_WALKS``, which says when walks are compiled; ``"background"`` by default.

    Raises:
        ValueError: it has another value than ``"background"``, ``"now"`` or ``"off"``.
    """
    mode = _mode or os.environ.get("EDGELESS_COMPILE_WALKS", "") or "background"
    if mode not in MODES:
        raise ValueError(f"EDGELESS_COMPILE_WALKS must be one of {', '.join(MODES)}, got {mode!r}")
    return mode


@contextlib.contextmanager
def compiling(mode: str) -> Iterator[None]:
    """Sets for the block and all threads when walks are compiled: ``"now"``, ``"background"`` or ``"off"``."""
    global _mode
    before, _mode = _mode, mode
    try:
        yield
    finally:
        _mode = before


def wait() -> None:
    """Waits until the background has compiled all walks that it was given."""
    while _jobs:
        for job in list(_jobs):
            job.join()
            _jobs.discard(job)


class Code:
    """The compiled code of a walk, with a variant for each index dtype in use.

    Args:
        walk, sizes, needed: as for :func:`edgeless.programs.lowering.lower.lower`.

    Attributes:
        why: the reason why the interpreter runs instead, as a clause, or None.
        on_cuda: on a GPU, the walk as generated kernels, or the reason why there are none; None if not known yet.
    """

    def __init__(self, walk: Walk, sizes: Sizes, needed: set[Node]):
        self.walk, self.sizes, self.needed = walk, sizes, needed
        self.why: Optional[str] = None
        self.on_cuda: Any = None
        self.reads = _reads(walk)
        self._dtypes = [(node, value_of(node).dtype) for node in self.reads]
        self._variants: dict[tuple[bool, bool], _Function] = {}
        self._pending: set[tuple[int, bool]] = set()  # (process, wide) of the variants in the background
        self._examples: list[tuple] = []
        self._lock = threading.Lock()

    def text(self) -> str:
        """A description of how the walk runs."""
        if self.on_cuda is not None:
            if isinstance(self.on_cuda, str):
                return f"interpreted ({self.on_cuda})"
            passes = len(self.on_cuda.passes)
            return "a generated kernel" if passes == 1 else f"{passes} generated kernels"
        if self._variants:
            return "compiled"
        if self.why is not None:
            return f"interpreted ({self.why})"
        return "interpreted until it is compiled" if self._pending else "interpreted"

    def ready(self, graph: Graph, receives: bool) -> bool:
        """Returns whether the compiled code can run. Starts to compile it if that has not begun yet.

        Args:
            receives: whether the walk goes by the graph's destinations.
        """
        return self._variant(graph, receives) is not None

    def _variant(self, graph: Graph, receives: bool) -> Optional[_Function]:
        mode = compile_mode()
        if mode == "off" or self.why is not None or graph.device.type != "cpu":
            return None
        wide = walk_arrays(graph, receives).wide
        if (False, wide) not in self._variants:
            if mode == "now":
                self._make(wide)
            elif (os.getpid(), wide) not in self._pending:
                self._pending.add((os.getpid(), wide))
                job = threading.Thread(target=self._make, args=(wide,), daemon=True)
                _jobs.add(job)
                job.start()
        return self._variants.get((False, wide))

    def run(self, values: dict, graph: Graph, sizes: Sizes, receives: bool) -> Optional[list[Any]]:
        """The walk's sinks, or None if the interpreter has to compute them.

        Args:
            values: the values of all nodes that were computed before.
            receives: whether the walk goes by the graph's destinations.
        """
        function = self._variant(graph, receives)
        if function is None or self._is_double(values) is not False:
            return None
        return function(values, graph, sizes, receives)

    def _is_double(self, values: dict) -> Optional[bool]:
        """Returns whether the values are float64 where the trace had other floats: False if they have the traced
        dtypes, None if neither holds for all.
        """
        for node, dtype in self._dtypes:
            if values[node].dtype is not dtype:
                break
        else:
            return False
        pairs = [(values[node].dtype, dtype) for node, dtype in self._dtypes]
        return True if all(a is (torch.float64 if b.is_floating_point else b) for a, b in pairs) else None

    # Examples -------------------------------------------------------------------------------------------------------

    def keep_example(self, values: dict, graph: Graph, sizes: Sizes, receives: bool, interpret: Callable) -> None:
        """Keeps the results that ``interpret`` computes from the values, to compare the compiled code with.

        Whether equal messages are found equal again depends on their last bits, so an example has no equal messages.
        """
        if self._variants or self.why is not None or len(self._examples) >= _MOST_EXAMPLES:
            return
        given = {node: values[node].detach().clone() for node in self.reads}
        for node in self.walk.ops:
            if node.target is ops.share and node.args[2].target is ops.gather_rows:
                argument = node.args[2].args[0]
                if argument in given:
                    given[argument] = given[argument].clamp(min=0)
        results = interpret({**values, **given})
        copies = [tuple(map(_copy, r)) if isinstance(r, tuple) else _copy(r) for r in results]
        self._examples.append((given, graph, sizes, receives, copies))

    def _check(self, function: _Function) -> None:
        for values, graph, sizes, receives, expected in self._examples:
            found = function(values, graph, sizes, receives)
            for sink, ours, theirs in zip(self.walk.sinks, found, expected, strict=True):
                if isinstance(ours, tuple):
                    (ours, argument), (theirs, other) = ours, theirs
                    same = argument is None or _same_winners(argument, other, graph)
                else:
                    same = True
                if not same or ours.dtype is not theirs.dtype or not agree(ours, theirs):
                    raise NotLowered(f"its code of {sink.name} differs from the interpreter")

    # Compiling ------------------------------------------------------------------------------------------------------

    def _make(self, wide: bool) -> None:
        """Compiles the walk, or sets ``why`` to the reason why that failed."""
        try:
            with self._lock, _one_at_a_time:
                if self._examples:
                    values, graph, _, receives, _ = self._examples[0]
                    double = self._is_double(values)
                    if double is not None:
                        self._check(self._function((double, walk_arrays(graph, receives).wide)))
                    self._examples = []
                self._variants.setdefault((False, wide), self._function((False, wide)))
        except (NotLowered, c_compiler.NoCompiler) as error:
            self.why = str(error)
        except Exception as error:
            self.why = f"it cannot be compiled, {type(error).__name__}: {str(error)[:160]}"
        finally:
            _jobs.discard(threading.current_thread())

    def _function(self, key: tuple[bool, bool]) -> _Function:
        double, wide = key
        arranged = arrange(lower(self.walk, self.sizes, self.needed, double))
        return _Function(c_code(arranged, wide, c_compiler.vector_bytes()), self.walk)


def _threads(edges: int, parts: int) -> int:
    return max(1, min(torch.get_num_threads(), edges // _FEW, parts))


def _copy(result: Optional[Tensor]) -> Optional[Tensor]:
    return None if result is None else result.detach().clone()


def _reads(walk: Walk) -> list[Node]:
    """The tensors that a walk reads."""
    own = set(walk.ops)
    nodes = dict.fromkeys(a for node in walk.ops for a in operands(node) if a not in own)
    return [n for n in nodes if isinstance(value_of(n), Tensor) and not space_of(n).is_ends]


def _same_winners(a: Tensor, b: Tensor, graph: Graph) -> bool:
    """Returns whether two arguments of extrema differ only where equal edges were rounded differently."""
    single = (a != b) & (a >= 0) & (b >= 0)
    ends = graph.edge_index()
    return torch.equal(ends[:, a[single]], ends[:, b[single]])


class Arrays(NamedTuple):
    """The arrays that walks by one end of a graph's edges read.

    Attributes:
        tensors: row pointers ``[N + 1]`` int64, the node ids at the other end ``[E]`` and, if the edges are not in the
            order of their ids, the ids ``[E]``.
        rows: ``N``.
        wide: whether ids are int64.
    """

    tensors: tuple[Optional[Tensor], ...]
    rows: int
    wide: bool


def walk_arrays(graph: Graph, receives: bool) -> Arrays:
    """The arrays of the CSR or the CSC, kept with the graph."""
    return graph.format(("arrays of walks", receives), _arrays_in if receives else _arrays_out)


def _arrays_in(graph: Graph) -> Arrays:
    return _arrays_of(graph.csr)


def _arrays_out(graph: Graph) -> Arrays:
    return _arrays_of(graph.csc)


def _arrays_of(arrays) -> Arrays:
    indptr = arrays.indptr.long().contiguous()
    tensors = (indptr, arrays.indices, arrays.edge_ids)
    return Arrays(tensors, indptr.numel() - 1, arrays.indices.dtype is torch.int64)


class _Function:
    """A compiled walk as a function of values."""

    def __init__(self, code: CText, walk: Walk):
        self.code, self.walk = code, walk
        self.call = c_compiler.load(code.text).walk
        arranged = code.arranged
        self.operands = [(operand, operand.node, operand.dtype, _is_moved(operand)) for operand in arranged.operands]
        # For each result: whether it has a row for each edge, the shape of a row, the dtype, and the dimension of the
        # rows.
        self.results: list[tuple[bool, tuple[int, ...], torch.dtype, int]] = []
        found: dict[Node, Any] = {}  # node -> the index of its result; an extremum and its argument have two
        for fold in (f for each in arranged.passes for f in each.folds if f.node is not None):
            places = []
            for item in (fold.best, fold.argument):
                places.append(None if item is None else len(self.results))
                if item is not None:
                    self.results.append((False, tuple(item.shape), item.dtype, space_of(fold.node).dim))
            found[fold.node] = tuple(places) if isinstance(value_of(fold.node), tuple) else places[0]
        for result in arranged.by_edge:
            found[result.node] = len(self.results)
            shape = _item_shape(result.node)
            self.results.append((True, shape, result.dtype, space_of(result.node).dim))
        self.totals = [(tuple(total.array.shape), total.array.dtype) for total in arranged.totals]
        found.update((total.node, len(self.results) + i) for i, total in enumerate(arranged.totals))
        self.sinks = [found[sink] for sink in walk.sinks]
        self.pointers = ctypes.c_void_p * (4 + len(self.operands) + len(self.results) + len(self.totals))
        self.numbers = ctypes.c_long * 5

    def __call__(self, values: dict, graph: Graph, sizes: Sizes, receives: bool) -> list[Any]:
        arrays, rows, _ = walk_arrays(graph, receives)
        inputs = []
        for operand, node, dtype, moved in self.operands:
            tensor = values[node]
            if tensor.dtype is not dtype:
                raise TypeError(f"{node} is {tensor.dtype} and not {dtype}")
            inputs.append((_rows_in_front(operand, tensor) if moved else tensor).contiguous())
        edges = sizes.edges
        outputs = [_C.empty_rows((edges if by_edge else rows, *s), d) for by_edge, s, d, _ in self.results]
        totals = [torch.empty(shape, dtype=dtype) for shape, dtype in self.totals]
        workspace = torch.empty(self.code.workspace, dtype=torch.uint8)
        tensors = [*arrays, *inputs, *outputs, *totals, workspace]
        numbers = (rows, sizes.sources, sizes.destinations, edges, _threads(edges, self.code.parts))
        pointers = self.pointers(*[None if t is None else t.data_ptr() for t in tensors])
        if self.call(pointers, self.numbers(*numbers)):
            raise IndexError("index out of range in self")
        made = [_placed(rows, dim) for rows, (_, _, _, dim) in zip(outputs, self.results)] + totals
        return [
            made[at] if isinstance(at, int) else tuple([None if i is None else made[i] for i in at])
            for at in self.sinks
        ]


def _is_moved(operand: Operand) -> bool:
    """Returns whether the rows of an operand must be moved to the first dimension."""
    return operand.kind != "param" and bool(operand.dim or operand.shape[operand.dim] != 1)


def _rows_in_front(operand: Operand, tensor: Tensor) -> Tensor:
    """An operand with its rows in the first dimension, and a row's elements in the order of its item."""
    joined = operand.shape[operand.dim]
    tensor = tensor.unflatten(operand.dim, (tensor.size(operand.dim) // joined, joined))
    return tensor.movedim(operand.dim, 0)


def _item_shape(node: Node) -> tuple[int, ...]:
    dim = space_of(node).dim
    return tuple(1 if d == dim else int(n) for d, n in enumerate(value_of(node).shape))


def _placed(rows: Tensor, dim: int) -> Tensor:
    """Rows ``[R, *item]`` as the value of a sink, with the rows in the dimension ``dim``."""
    if not dim:
        return ops.shaped(rows, [n for d, n in enumerate(rows.shape) if d != 1 or n != 1])
    return rows.movedim(0, dim).squeeze(dim + 1).clone(memory_format=torch.contiguous_format)
