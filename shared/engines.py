"""Which engine computes sums of neighbours and sampled products.

``engine(name)`` chooses one of :data:`ENGINES` for everything inside a ``with`` block. An engine is picked where an op
picks its kernel (``core_cuda/spmm/spmm_cuda.cpp``), below autograd and every layer. What it does not compute it refuses
in words, and rowsplit, which computes everything, runs instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Optional

import torch
from torch import Tensor

from . import _C
from .choices import Choices
from .formats import CSC, CSC_ROWS, CSR, HeldByCore
from .graph_checks import compiling
from .wsb import COLUMNS, LEAST_EDGES, WsbFormat

if TYPE_CHECKING:
    from .graph import Graph

__all__ = ["ENGINES", "ROWSPLIT", "Engine", "current_engine", "engine", "keep_plans", "pick"]

# "auto" is rowsplit but where blocks pay. In the order of Engine in core_cuda/engine.h.
ENGINES = ("auto", "rowsplit", "cusparse", "cusparse-alg2", "wsb")
_CUSPARSE, _WSB = "cusparse", "wsb"  # the keys of what a graph keeps for them


# The interface -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Engine:
    """What runs an op on a graph.

    Attributes:
        name: as :func:`engine` takes it.
        refusal: (op, its arguments by name) -> why it does not compute this, or None.
        kernel: how a plan calls what runs; None where the plan itself finds out.
        reads_values: whether it reads a number for every edge even where all are 1.
        num_rows: arrays of a direction -> how many rows of x it reads for them; None: one for every edge.
    """

    name: str
    refusal: Callable[[str, dict[str, Any]], Optional[str]]
    kernel: Optional[str] = None
    reads_values: bool = False
    num_rows: Optional[Callable[[list[Tensor]], int]] = None


def _cusparse_refusal(op: str, args: dict[str, Any]) -> Optional[str]:
    if op == "spmm":
        return _C.spmm_refusal(args["x"], args.get("weight"), args["csr"])
    if op == "sddmm":
        return _C.sddmm_refusal(args["dst"], args["src"], args["csr"])
    return "it computes sums and sampled products only"


def _wsb_refusal(op: str, args: dict[str, Any]) -> Optional[str]:
    if op == "spmm":
        return _C.wsb_refusal(args["x"], args.get("weight"), args["csr"])
    return "it computes sums only"


ROWSPLIT = Engine("rowsplit", lambda op, args: None)
_ENGINES = {
    "auto": ROWSPLIT,
    "rowsplit": ROWSPLIT,
    "cusparse": Engine("cusparse", _cusparse_refusal, "CSR_ALG3", True),
    "cusparse-alg2": Engine("cusparse-alg2", _cusparse_refusal, "CSR_ALG2", True),
    "wsb": Engine("wsb", _wsb_refusal, "mma m16n8k16", num_rows=lambda csr: COLUMNS * _C.num_blocks(csr)),
}


def pick(op: str, args: dict[str, Any], name: Optional[str] = None) -> tuple[Engine, str]:
    """The engine that runs an op with these arguments, and why not the one that was chosen, "" if it is that one.

    Args:
        op: of ``torch.ops.edgeless``.
        args: its arguments by name.
        name: one of :data:`ENGINES`; the one in force when None.
    """
    name = name or current_engine()
    if name == "auto" and op == "spmm" and _C.blocks_pay(args["x"], args.get("weight"), args["csr"]):
        return _ENGINES["wsb"], ""
    chosen = _ENGINES[name]
    refusal = chosen.refusal(op, args)
    return (chosen, "") if refusal is None else (ROWSPLIT, f"{chosen.name}: {refusal}")


def named(name: str) -> Engine:
    """The engine that ``name``, one of :data:`ENGINES`, stands for."""
    return _ENGINES[name]


# The choice ----------------------------------------------------------------------------------------------------------


def _teller(choice) -> Callable[[Optional[str]], None]:
    return lambda name: choice.set(-1 if name is None else ENGINES.index(name))


_choice = Choices(lambda: _teller(_C.own_engine_choice()), _teller(_C.newest_engine_choice()))


def current_engine() -> str:
    """The choice in force, one of :data:`ENGINES`."""
    return _choice.own.blocks.choice or _choice.newest.choice or "auto"


@contextlib.contextmanager
def engine(name: str) -> Iterator[None]:
    """Chooses who computes sums of neighbours and sampled products inside the ``with`` block.

    The choice is the thread's own and is followed by others as that of :func:`edgeless.backend` is: call ``backward()``
    inside the block as well. It holds when an op runs, so compiled programs follow it without being compiled again.

    Args:
        name: ``"auto"``: rowsplit, but wsb for large graphs in whose order it is clearly faster. ``"rowsplit"``: the
            kernels of edgeless. ``"cusparse"``: cuSPARSE with the algorithm that gives the same bits in every run, for
            what it computes; the rest runs on rowsplit, and :func:`edgeless.explain` with ``plan=True`` says why.
            ``"cusparse-alg2"``: the same with CUSPARSE_SPMM_CSR_ALG2, whose sums may be rounded differently in
            every run. ``"wsb"``: tensor cores on weighted sparse blocks (:mod:`edgeless.wsb`), for sums of bfloat16 and
            float16 without edge weights; the graph keeps the blocks, which take time to make.
    Raises:
        ValueError: for any other name.
        RuntimeError: inside a function that torch.compile traces; open the block around the call.
    """
    if name not in ENGINES:
        raise ValueError(f"engine: name must be one of {', '.join(map(repr, ENGINES))}, got {name!r}")
    if compiling():
        raise RuntimeError("engine: the block must be opened outside of the function that torch.compile traces")
    with _choice.block(name):
        yield


# What a graph keeps --------------------------------------------------------------------------------------------------


class CusparseFormat(HeldByCore):
    """What a graph keeps for cuSPARSE: values and plans with their workspaces, in ``core_cuda/spmm/cusparse_plans.h``.

    They are made when an op first needs them, so this entry grows: see :meth:`edgeless.formats.Keeper.num_formats`.
    """

    def __init__(self):
        super().__init__(_C.CusparsePlans())
        self.seen: tuple = ()

    def knows(self, graph: Graph) -> bool:
        """Whether :meth:`learn` has nothing to tell."""
        return self.seen == tuple(graph._formats)

    def learn(self, graph: Graph) -> None:
        """Tells which arrays and scales are the graph's. Waits for the GPU once for every direction."""
        formats = graph._formats
        sides = [tuple(formats[key][:2]) for key in (CSR, CSC, CSC_ROWS) if key in formats]
        scales = [value for key, value in formats.items() if type(key) is tuple and key[0] == "scale"]
        self.held.learn(sides, scales)
        self.seen = tuple(formats)

    def info(self) -> dict[str, int]:
        """How many plans and values are kept, and how often a plan was there (hits) or something had to be made."""
        return self.held.info()


def keep_plans(graph: Graph, x: Tensor, weight: Optional[Tensor] = None) -> None:
    """Lets ``graph`` keep what the engine in force needs for a sum of rows of ``x``.

    To be called when the graph's arrays for the op are at hand.
    """
    name = "auto" if _choice.newest.choice is None else current_engine()
    if name == "auto":
        large = x.element_size() == 2 and weight is None and graph.num_edges >= LEAST_EDGES
        if not large or not x.is_cuda:
            return
    elif name == "rowsplit":
        return
    if compiling():
        return
    key, asked = (_CUSPARSE, ()) if name.startswith(_CUSPARSE) else (_WSB, (name == "wsb",))
    kept = graph._formats.get(key)
    if kept is not None and kept.knows(graph, *asked):
        return
    if graph.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        graph.format(key, lambda _: _FORMATS[key]()).learn(graph, *asked)


_FORMATS = {_CUSPARSE: CusparseFormat, _WSB: WsbFormat}


def cusparse_info(graph: Graph) -> Optional[dict[str, int]]:
    """What ``graph`` keeps for cuSPARSE, see :meth:`CusparseFormat.info`; None if nothing."""
    kept = graph._formats.get(_CUSPARSE)
    return None if kept is None else kept.info()
