"""The choice of the engine that computes sums over neighbours, attention and sampled products.

``engine(name)`` chooses one of :data:`ENGINES` for everything inside a ``with`` block. The engine is picked where an op
picks its kernel (``core_cuda/spmm/spmm_cuda.cpp``, ``core_cuda/attention/blocks_cuda.cpp``), below autograd and every
layer. If it does not support a call, it gives the reason, and rowsplit, which supports all calls, runs instead.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Optional

import torch
from torch import Tensor

from .. import _C
from ..checks import compiling
from ..graph.formats import CSC, CSC_ROWS, CSR, HeldByCore
from ..graph.wsb import COLUMNS, DOT_HEADS, LEAST_EDGES, WsbFormat
from .scoped import block
from .tuning import Shape, Tuner, shape_of_dot, shape_of_sum, sides_of

if TYPE_CHECKING:
    from ..graph.handle import Graph

__all__ = ["ENGINES", "ROWSPLIT", "Engine", "current_engine", "engine", "keep_plans", "pick", "waits_for_gpu"]

_choice = _C.engine_choice
ENGINES = _choice.names  # "auto" is rowsplit unless blocks are profitable
_CUSPARSE, _WSB = "cusparse", "wsb"  # the keys of their formats in a graph's store
_ATTENTION = ("attention", "attention_backward", "attention_backward_into")


# The interface -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Engine:
    """An implementation of ops on a graph.

    Attributes:
        name: its name in :func:`engine`.
        refusal: (op, its arguments by name) -> the unsupported reason, or None.
        pays: (op, its arguments by name) -> whether it is profitable, so that ``"auto"`` chooses it.
        kernel: the name of its kernel in plans; None if the plan determines it.
        reads_values: whether it reads a weight for every edge even if all are 1.
        num_rows: arrays of a direction -> the number of rows of x that it reads; None: one for every edge.
    """

    name: str
    refusal: Callable[[str, dict[str, Any]], Optional[str]]
    pays: Callable[[str, dict[str, Any]], bool] = lambda op, args: False
    kernel: Optional[str] = None
    reads_values: bool = False
    num_rows: Optional[Callable[[list[Tensor]], int]] = None


def _cusparse_refusal(name: str, op: str, args: dict[str, Any]) -> Optional[str]:
    if op == "spmm":
        return _C.cusparse_spmm_refusal(ENGINES.index(name), args["x"], args.get("weight"), args["csr"])
    if op == "sddmm":
        return _C.cusparse_sddmm_refusal(args["dst"], args["src"], args["csr"])
    return "it computes sums and sampled products only"


def waits_for_gpu(name: str, dtype: torch.dtype) -> bool:
    """Returns whether sums of ``dtype`` on the engine ``name`` may wait for the GPU; captures then use rowsplit."""
    return name in ENGINES and _C.cusparse_waits(ENGINES.index(name), dtype.itemsize)


def _cusparse(name: str, kernel: str) -> Engine:
    return Engine(name, functools.partial(_cusparse_refusal, name), kernel=kernel, reads_values=True)


def _wsb_view(op: str, args: dict[str, Any]) -> tuple[Optional[str], bool]:
    """Returns the unsupported reason or None, and whether ``"auto"`` chooses blocks."""
    if op == "spmm":
        return _C.wsb_sum(args["x"], args.get("weight"), args["csr"])
    if op not in _ATTENTION:
        return "it computes sums and attention only", False
    backward = op != "attention"
    if args.get("grad_weights") is not None:
        return "it has no gradient of returned weights", False
    names = ("dst", "src", "value", "edge_attr", "edge_scale", "csr", "csc", "score")
    dst, src, value, *rest = (args.get(name) for name in names)
    return _C.wsb_attention(backward, dst, src, src if value is None else value, *rest, args.get("dropout", 0.0))


ROWSPLIT = Engine("rowsplit", lambda op, args: None)
_ENGINES = {
    "auto": ROWSPLIT,
    "rowsplit": ROWSPLIT,
    "cusparse": _cusparse("cusparse", "CSR_ALG3"),
    "cusparse-alg2": _cusparse("cusparse-alg2", "CSR_ALG2"),
    "wsb": Engine(
        "wsb",
        lambda op, args: _wsb_view(op, args)[0],
        lambda op, args: _wsb_view(op, args)[1],
        kernel="mma m16n8k16",
        num_rows=lambda csr: COLUMNS * _C.num_blocks(csr),
    ),
}


def pick(op: str, args: dict[str, Any], name: str) -> tuple[Engine, str]:
    """Returns the engine that runs an op, and the reason why the chosen engine does not ("" if it does).

    Args:
        op: a name in ``torch.ops.edgeless``.
        args: the op's arguments by name.
        name: the choice, one of :data:`ENGINES`.
    """
    if name == "auto" and (decided := _decision(op, args)) is not None:
        name = ENGINES[decided[0]]
    if name == "auto" and _ENGINES["wsb"].pays(op, args):
        return _ENGINES["wsb"], ""
    chosen = _ENGINES[name]
    refusal = chosen.refusal(op, args)
    return (chosen, "") if refusal is None else (ROWSPLIT, f"{chosen.name}: {refusal}")


def _decision(op: str, args: dict[str, Any]) -> Optional[tuple[int, str]]:
    """Returns the index of the engine that tuning decided on and the origin of the decision, or None."""
    shape = _shape_of(op, args)
    return None if shape is None else _C.decision(args["csr"], *shape)


def _shape_of(op: str, args: dict[str, Any]) -> Optional[Shape]:
    """Returns the key by which tuning decides on an op; None for ops that are not tuned."""
    if op == "spmm":
        return shape_of_sum(args["x"], args.get("weight"))
    if op not in _ATTENTION or args["score"] != "dot":
        return None
    _, heads, head_dim = args["dst"].shape
    return shape_of_dot(args["dst"].dtype, heads, head_dim, backward=op != "attention")


def origin(op: str, args: dict[str, Any], name: str) -> str:
    """Describes what decided the engine of :func:`pick`; "" if ``"auto"`` has no alternative to rowsplit."""
    if name != "auto":
        return f'edgeless.engine("{name}")'
    if (decided := _decision(op, args)) is not None:
        return decided[1]
    shape = _shape_of(op, args)
    large = shape is not None and args["csr"][0].is_cuda and args["csr"][1].numel() >= LEAST_EDGES
    return "statistics of the graph" if large else ""


def named(name: str) -> Engine:
    """Returns the engine that ``name``, one of :data:`ENGINES`, stands for."""
    return _ENGINES[name]


# The choice ----------------------------------------------------------------------------------------------------------


def current_engine() -> str:
    """Returns the choice in force, one of :data:`ENGINES`."""
    return _choice.name


@contextlib.contextmanager
def engine(name: str) -> Iterator[None]:
    """Chooses the engine for sums over neighbours, attention and sampled products inside the ``with`` block.

    The choice belongs to the calling thread, as that of :func:`edgeless.backend` does. Gradients are computed by the
    engine that was chosen for their forward, wherever and whenever ``backward()`` is called. Compiled programs follow
    the choice without recompilation: their forward and their backward each take that of the block in which they run.

    Args:
        name: ``"auto"``: rowsplit, or wsb for large graphs whose node order makes it clearly faster. ``"rowsplit"``:
            edgeless' own kernels. ``"cusparse"``: cuSPARSE with its deterministic algorithm, for the calls that it
            supports; others run on rowsplit, and :func:`edgeless.explain` with ``plan=True`` says why.
            ``"cusparse-alg2"``: the same with CUSPARSE_SPMM_CSR_ALG2, whose sums may be rounded differently in
            every run. ``"wsb"``: tensor cores on weighted sparse blocks (:mod:`edgeless.graph.wsb`), for sums and dot
            product attention of bfloat16 and float16 without per-edge data; the graph keeps the blocks, which take
            time to build.
    Raises:
        ValueError: for any other name.
        RuntimeError: inside a function that torch.compile traces; open the block around the call.

    Example:
        >>> import edgeless
        >>> with edgeless.engine("rowsplit"):
        ...     pass  # edge-balanced CSR, on the CPU the only one
    """
    if name not in ENGINES:
        raise ValueError(f"engine: name must be one of {', '.join(map(repr, ENGINES))}, got {name!r}")
    if compiling():
        raise RuntimeError("engine: the block must be opened outside of the function that torch.compile traces")
    with block(_choice, name):
        yield


# What a graph keeps --------------------------------------------------------------------------------------------------


class CusparseFormat(HeldByCore):
    """A graph's values and plans with workspaces for cuSPARSE, held by ``core_cuda/spmm/cusparse_plans.h``.

    Each is made when an op first needs it, so this entry grows: see :meth:`edgeless.graph.formats.Keeper.num_formats`.
    """

    def __init__(self):
        super().__init__(_C.CusparsePlans())
        self.seen: tuple = ()

    def knows(self, graph: Graph) -> bool:
        """Returns whether :meth:`learn` has already passed on all of the graph's formats."""
        return self.seen == tuple(graph._formats)

    def learn(self, graph: Graph) -> None:
        """Passes the graph's arrays and scales to the core. Waits for the GPU once for every direction."""
        formats = graph._formats
        sides = [tuple(formats[key][:2]) for key in (CSR, CSC, CSC_ROWS) if key in formats]
        scales = [value for key, value in formats.items() if type(key) is tuple and key[0] == "scale"]
        self.held.learn(sides, scales)
        self.seen = tuple(formats)

    def info(self) -> dict[str, int]:
        """Returns how many plans and values are kept, and how often a plan was cached (hits) or had to be made."""
        return self.held.info()


def keep_plans(graph: Graph, x: Tensor, weight: Optional[Tensor] = None, *, sampled: bool = False) -> None:
    """Prepares ``graph`` for the engine in force, for a sum of rows of ``x`` or for ``sampled`` products.

    Call it when the graph's arrays for the op are built.
    """
    if compiling():
        return
    name = current_engine()
    if name == "auto":
        if sampled or not _is_large(graph, x):
            return
        by_blocks = x.element_size() == 2 and weight is None
        if not (by_blocks or tuner.active):
            return
        if (tuner.active and _decides(graph, x, weight)) or not by_blocks:
            return
    if name.startswith(_CUSPARSE):
        _keep(graph, _CUSPARSE)
    elif name != "rowsplit":
        _keep(graph, _WSB, _least_reuse(name, graph, 0, x.numel() * x.element_size()))


def keep_blocks(graph: Graph, x: Tensor, dtype: torch.dtype, heads: int, head_dim: int) -> None:
    """Builds and keeps the blocks of ``graph`` for dot product attention if the choice in force wants them.

    Call it when the graph's arrays for the op are built, and only if the op has no per-edge data.

    Args:
        graph: the graph that keeps the blocks.
        x: the layer's input; only its device is read.
        dtype: the dtype of queries, keys and values, which are computed from x.
        heads, head_dim: the shape of their rows.
    """
    if compiling():
        return
    name = current_engine()
    if name not in ("auto", _WSB) or dtype.itemsize != 2 or head_dim not in DOT_HEADS:
        return
    if name == "auto":
        if not _is_large(graph, x):
            return
        if tuner.active and _decides_dot(graph, dtype, heads, head_dim):
            return
    gathered = graph.num_src * heads * head_dim * dtype.itemsize
    _keep(graph, _WSB, _least_reuse(name, graph, head_dim, gathered))


def _is_large(graph: Graph, x: Tensor) -> bool:
    return x.is_cuda and graph.num_edges >= LEAST_EDGES


def _least_reuse(name: str, graph: Graph, head_dim: int, gathered_bytes: int) -> float:
    return 0.0 if name == _WSB else _C.reuse_that_pays(head_dim, gathered_bytes, graph.num_dst, graph.num_edges)


def _keep(graph: Graph, key: str, *how: float) -> None:
    kept = graph._formats.get(key)
    if kept is not None and kept.knows(graph, *how):
        return
    if graph.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        graph.format(key, lambda _: _FORMATS[key]()).learn(graph, *how)


def _decides(graph: Graph, x: Tensor, weight: Optional[Tensor]) -> bool:
    """Returns whether tuning has decided which engine computes this sum and its gradient."""
    if not tuner.may_decide(graph) or (weight is not None and weight.numel() > graph.num_edges):
        return False
    return tuner.decide(graph, shape_of_sum(x, weight))


def _decides_dot(graph: Graph, dtype: torch.dtype, heads: int, head_dim: int) -> bool:
    """Like :func:`_decides`, for dot product attention and, if the graph has both directions, its backward."""
    if not tuner.may_decide(graph):
        return False
    passes = (False, True) if len(sides_of(graph)) > 1 else (False,)
    shapes = [shape_of_dot(dtype, heads, head_dim, backward=backward) for backward in passes]
    decided = [tuner.decide(graph, shape) for shape in shapes]  # a list: both passes are looked up
    return all(decided)


def _prepare(graph: Graph, name: str) -> None:
    made = graph.format(name, lambda _: _FORMATS[name]())
    if name == _WSB:
        made.make(graph)
    else:
        made.learn(graph)


tuner = Tuner(ENGINES, _prepare)

_FORMATS = {_CUSPARSE: CusparseFormat, _WSB: WsbFormat}


def cusparse_info(graph: Graph) -> Optional[dict[str, int]]:
    """Returns :meth:`CusparseFormat.info` of ``graph``, or None if the graph keeps nothing for cuSPARSE."""
    kept = graph._formats.get(_CUSPARSE)
    return None if kept is None else kept.info()
