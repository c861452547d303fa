"""Walks that run as compiled code on the CPU, and when they are compiled.

A walk is compiled at its first use: in the background, while the interpreter runs it, or at once. The compiled code is
first compared with what the interpreter computed at the check of the program (:mod:`edgeless.programs.checking`), in
float64. Where it differs, or there is no compiler, the interpreter goes on, and :meth:`Code.text` says why.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, Optional

import torch
from torch import Tensor
from torch.fx import Node

from ..graph import Graph
from . import c_compiler, ops
from .agreement import agree
from .arrange import arrange
from .c_code import CText, c_code
from .items import NotLowered, Operand
from .loops import Fold
from .lower import lower
from .rules import space_of, value_of
from .schedule import Walk, operands
from .spaces import Sizes

MODES = ("background", "now", "off")
_MOST_EXAMPLES = 4
_FEW = 1 << 15  # edges of a thread, below which starting it costs more than it saves
_jobs: set[threading.Thread] = set()
_one_at_a_time = threading.Lock()
_mode: Optional[str] = None


def compile_mode() -> str:
    """When walks are compiled: the value of ``EDGELESS_COMPILE_WALKS``, ``"background"`` by default.

    Raises:
        ValueError: it has another value than ``"background"``, ``"now"`` or ``"off"``.
    """
    mode = _mode or os.environ.get("EDGELESS_COMPILE_WALKS", "") or "background"
    if mode not in MODES:
        raise ValueError(f"EDGELESS_COMPILE_WALKS must be one of {', '.join(MODES)}, got {mode!r}")
    return mode


@contextlib.contextmanager
def compiling(mode: str) -> Iterator[None]:
    """Compiles walks ``"now"``, in the ``"background"`` or not at all (``"off"``) inside the block, in all threads."""
    global _mode
    before, _mode = _mode, mode
    try:
        yield
    finally:
        _mode = before


def wait() -> None:
    """Waits until everything that is being compiled in the background is done."""
    while _jobs:
        for job in list(_jobs):
            job.join()
            _jobs.discard(job)


class Code:
    """The compiled code of a walk, in the variants that were called for.

    Args:
        walk, sizes, needed: as for :func:`edgeless.programs.lower.lower`.

    Attributes:
        why: a clause that says why the interpreter runs instead, or None.
    """

    def __init__(self, walk: Walk, sizes: Sizes, needed: set[Node]):
        self.walk, self.sizes, self.needed = walk, sizes, needed
        self.why: Optional[str] = None
        self.reads = _reads(walk)
        self._variants: dict[tuple[bool, bool], _Function] = {}
        self._pending: set[tuple[int, bool]] = set()  # (process, wide) of what is compiled in the background
        self._examples: list[tuple] = []
        self._lock = threading.Lock()

    def text(self) -> str:
        """How the walk runs, in words."""
        if self._variants:
            return "compiled"
        if self.why is not None:
            return f"interpreted ({self.why})"
        return "interpreted until it is compiled" if self._pending else "interpreted"

    def ready(self, graph: Graph, receives: bool) -> bool:
        """Whether the compiled code can run; if it is not compiled yet, that begins.

        Args:
            receives: whether the walk goes by the graph's destinations.
        """
        mode = compile_mode()
        if mode == "off" or self.why is not None or graph.device.type != "cpu":
            return False
        wide = _is_wide(graph, receives)
        if (False, wide) not in self._variants:
            if mode == "now":
                self._make(wide)
            elif (os.getpid(), wide) not in self._pending:
                self._pending.add((os.getpid(), wide))
                job = threading.Thread(target=self._make, args=(wide,), daemon=True)
                _jobs.add(job)
                job.start()
        return (False, wide) in self._variants

    def run(self, values: dict, graph: Graph, sizes: Sizes, receives: bool) -> Optional[list[Any]]:
        """The walk's sinks, or None if the interpreter has to compute them.

        Args:
            values: of all nodes that were computed before.
            receives: whether the walk goes by the graph's destinations.
        """
        if not self.ready(graph, receives) or self._is_double(values) is not False:
            return None
        return self._variants[False, _is_wide(graph, receives)](values, graph, sizes, receives)

    def _is_double(self, values: dict) -> Optional[bool]:
        """Whether floats are float64 though they were not in the trace, or None if some are neither way."""
        pairs = [(values[node].dtype, value_of(node).dtype) for node in self.reads]
        if all(a is b for a, b in pairs):
            return False
        return True if all(a is (torch.float64 if b.is_floating_point else b) for a, b in pairs) else None

    # Examples -------------------------------------------------------------------------------------------------------

    def keep_example(self, values: dict, graph: Graph, sizes: Sizes, receives: bool, interpret: Callable) -> None:
        """Keeps what ``interpret`` computes of values, for a comparison.

        Whether equal messages are found equal again depends on their last bits, so an example has no equal ones.
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
        """Compiles the walk; ``why`` says why it could not."""
        try:
            with self._lock, _one_at_a_time:
                if self._examples:
                    values, graph, _, receives, _ = self._examples[0]
                    double = self._is_double(values)
                    if double is not None:
                        self._check(self._function((double, _is_wide(graph, receives))))
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
        return _Function(c_code(arranged, wide), self.walk)


def _threads(edges: int, parts: int) -> int:
    return max(1, min(torch.get_num_threads(), edges // _FEW, parts))


def _is_wide(graph: Graph, receives: bool) -> bool:
    return (graph.csr if receives else graph.csc).indices.dtype is torch.int64


def _copy(result: Optional[Tensor]) -> Optional[Tensor]:
    return None if result is None else result.detach().clone()


def _reads(walk: Walk) -> list[Node]:
    """The tensors that a walk reads."""
    own = set(walk.ops)
    nodes = dict.fromkeys(a for node in walk.ops for a in operands(node) if a not in own)
    return [n for n in nodes if isinstance(value_of(n), Tensor) and not space_of(n).is_ends]


def _same_winners(a: Tensor, b: Tensor, graph: Graph) -> bool:
    """Whether arguments of extrema differ only where equal edges were rounded differently."""
    single = (a != b) & (a >= 0) & (b >= 0)
    ends = graph.edge_index()
    return torch.equal(ends[:, a[single]], ends[:, b[single]])


def row_pointers(graph: Graph, receives: bool) -> Tensor:
    """The row pointers of the CSR, or of the CSC, ``[N + 1]`` int64. Kept with the graph."""
    arrays = graph.csr if receives else graph.csc
    return graph.format(("indptr", receives), lambda _: arrays.indptr.long().contiguous())


class _Function:
    """A compiled walk as a function of values."""

    def __init__(self, code: CText, walk: Walk):
        self.code, self.walk = code, walk
        self.call = c_compiler.load(code.text).walk
        self.operands = code.arranged.operands
        self.folds: list[Fold] = [f for each in code.arranged.passes for f in each.folds if f.node is not None]

    def __call__(self, values: dict, graph: Graph, sizes: Sizes, receives: bool) -> list[Any]:
        arrays = graph.csr if receives else graph.csc
        indptr = row_pointers(graph, receives)
        rows = indptr.numel() - 1
        inputs = [self._rows(operand, values[operand.node]) for operand in self.operands]
        outputs: list[Tensor] = []
        for fold in self.folds:
            outputs += [
                torch.empty((rows, *b.shape), dtype=b.dtype) for b in (fold.best, fold.argument) if b is not None
            ]
        for result in self.code.arranged.by_edge:
            outputs.append(torch.empty((sizes.edges, *_item_shape(result.node)), dtype=result.dtype))
        totals = [torch.empty(t.array.shape, dtype=t.array.dtype) for t in self.code.arranged.totals]
        workspace = torch.empty(self.code.workspace, dtype=torch.uint8)
        tensors = [indptr, arrays.indices, arrays.edge_ids, *inputs, *outputs, *totals, workspace]
        pointers = (ctypes.c_void_p * len(tensors))(*(None if t is None else t.data_ptr() for t in tensors))
        numbers = (rows, sizes.sources, sizes.destinations, sizes.edges, _threads(sizes.edges, self.code.parts))
        if self.call(pointers, (ctypes.c_long * 5)(*numbers)):
            raise IndexError("index out of range in self")
        found, results = iter(outputs), {}
        for fold in self.folds:
            best = _placed(next(found), fold.node)
            argument = None if fold.argument is None else _placed(next(found), fold.node)
            results[fold.node] = (best, argument) if isinstance(value_of(fold.node), tuple) else best
        for result in self.code.arranged.by_edge:
            results[result.node] = _placed(next(found), result.node)
        results.update(zip((t.node for t in self.code.arranged.totals), totals))
        return [results[sink] for sink in self.walk.sinks]

    def _rows(self, operand: Operand, tensor: Tensor) -> Tensor:
        """An operand with its rows in front, the elements of a row in the order of its item."""
        if tensor.dtype is not operand.dtype:
            raise TypeError(f"{operand.node} is {tensor.dtype} and not {operand.dtype}")
        if operand.kind != "param" and (operand.dim or operand.shape[operand.dim] != 1):
            joined = operand.shape[operand.dim]
            tensor = tensor.unflatten(operand.dim, (tensor.size(operand.dim) // joined, joined))
            tensor = tensor.movedim(operand.dim, 0)
        return tensor.contiguous()


def _item_shape(node: Node) -> tuple[int, ...]:
    dim = space_of(node).dim
    return tuple(1 if d == dim else int(n) for d, n in enumerate(value_of(node).shape))


def _placed(rows: Tensor, node: Node) -> Tensor:
    """Rows ``[R, *item]`` as the value of a sink, whose rows may be in another dimension."""
    dim = space_of(node).dim
    return rows.movedim(0, dim).squeeze(dim + 1).contiguous() if dim else rows.squeeze(1)
