"""Drop-ins for functions of ``dgl.ops``: the same arguments, shapes and results, on the kernels of edgeless.

``copy_u_sum``, ``copy_u_mean``, ``copy_u_min``, ``copy_u_max``, ``u_mul_e_sum``, ``u_dot_v``, ``edge_softmax``,
``segment_mm`` and ``gather_mm`` are here; every other name is DGL's own, so that ``from edgeless.dgl import ops`` can
stand for ``from dgl import ops``.

Each but the last two takes a DGLGraph, a block, one relation of a heterograph, or an :class:`edgeless.Graph`. A call
that the kernels do not support runs DGL's function; ``edgeless.explain(ops.u_dot_v, g, x, y)`` says whether and why,
and under ``edgeless.backend("fused")`` the call raises :class:`edgeless.NotFusedError`. Inputs that DGL rejects raise
DGL's own error.

Three results differ from DGL's. ``copy_u_min`` and ``copy_u_max`` drop the gradient of a node without in-edges, which
DGL adds to source node 0. NaN is never skipped. 16-bit features are summed in float32, and float16 works on the CPU.
"""

from __future__ import annotations

__path__: list[str] = []  # a package from the start, whose inner modules edgeless.layers.stand_in finds

import inspect
from collections.abc import Callable
from math import inf, prod
from typing import TYPE_CHECKING, Any, Optional, Union

import torch
from torch import Tensor

from edgeless import Graph, functional
from edgeless.checks import FLOATS, compiling
from edgeless.choices.backends import NotFusedError, current_backend, explain, kernel_refusal
from edgeless.distributed.graph import DistGraph
from edgeless.layers.call_errors import add_call
from edgeless.layers.calls import REFERENCE, ran_fused, ran_stock
from edgeless.layers.stand_in import stand_in

from ._autocast import as_dgl_reads
from ._framework import ALL, stock_ops
from .convert import relation_of, to_dgl
from .generated.deferred import computed, deferred_in, watched_calls
from .generated.recorded_graph import softmax_of_edges
from .typed_ops import gather_mm, segment_mm

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


__all__ = [
    "copy_u_max",
    "copy_u_mean",
    "copy_u_min",
    "copy_u_sum",
    "edge_softmax",
    "gather_mm",
    "segment_mm",
    "u_dot_v",
    "u_mul_e_sum",
]

_MOST_SOFTMAX_HEADS = 8  # the kernel's work per edge grows with their square

# The unsupported reason of a call, or the function that computes its result.
Plan = Union[str, Callable[[], Tensor]]


def copy_u_sum(g, x):
    """Sum of the features of in-neighbours.

    Args:
        g (DGLGraph): messages flow from sources to destinations.
        x (Tensor): ``[Ns, *]``, float32, float64, bfloat16 or float16.

    Returns:
        Tensor ``[Nd, *]`` of x's dtype; 0 for nodes without in-edges.

    Example:
        >>> import dgl, torch
        >>> from edgeless.dgl import ops
        >>> graph, x = dgl.graph(([0, 1, 2], [2, 2, 0])), torch.tensor([1.0, 2.0, 4.0])
        >>> ops.copy_u_sum(graph, x)
        tensor([4., 0., 3.])
    """
    return _run("copy_u_sum", g, x)


def copy_u_mean(g, x):
    """Mean of the features of in-neighbours: shapes and dtypes of :func:`copy_u_sum`.

    Example:
        >>> import dgl, torch
        >>> from edgeless.dgl import ops
        >>> graph, x = dgl.graph(([0, 1, 2], [2, 2, 0])), torch.tensor([1.0, 2.0, 4.0])
        >>> ops.copy_u_mean(graph, x)
        tensor([4.0000, 0.0000, 1.5000])
    """
    return _run("copy_u_mean", g, x)


def copy_u_min(g, x):
    """Minimum of the features of in-neighbours, element by element: shapes and dtypes of :func:`copy_u_sum`.

    Nodes without in-edges give infinity, or 0 if the whole graph has no edge, as in DGL. Among equal minima, one
    gets the gradient.

    Example:
        >>> import dgl, torch
        >>> from edgeless.dgl import ops
        >>> graph, x = dgl.graph(([0, 1, 2], [2, 2, 0])), torch.tensor([1.0, 2.0, 4.0])
        >>> ops.copy_u_min(graph, x)
        tensor([4., inf, 1.])
    """
    return _run("copy_u_min", g, x)


def copy_u_max(g, x):
    """Maximum of the features of in-neighbours: as :func:`copy_u_min`, with minus infinity in place of infinity.

    Example:
        >>> import dgl, torch
        >>> from edgeless.dgl import ops
        >>> graph, x = dgl.graph(([0, 1, 2], [2, 2, 0])), torch.tensor([1.0, 2.0, 4.0])
        >>> ops.copy_u_max(graph, x)
        tensor([4., -inf, 2.])
    """
    return _run("copy_u_max", g, x)


def u_mul_e_sum(g, x, y):
    """Sum of the features of in-neighbours times those of the edges.

    Args:
        g (DGLGraph): messages flow from sources to destinations.
        x (Tensor): ``[Ns, *]``, such as ``[Ns, H, C]``.
        y (Tensor): ``[E, *]`` of the same dtype, in the order of the graph's edge ids. The kernels support one weight
            per edge, ``[E]`` or ``[E, 1, ...]``, and one per edge and head, ``[E, H, 1]``.

    Returns:
        Tensor ``[Nd, *]`` of the broadcast shape; 0 for nodes without in-edges.

    Example:
        >>> import dgl, torch
        >>> from edgeless.dgl import ops
        >>> graph, x = dgl.graph(([0, 1, 2], [2, 2, 0])), torch.tensor([1.0, 2.0, 4.0])
        >>> ops.u_mul_e_sum(graph, x, torch.tensor([10.0, 1.0, 1.0]))
        tensor([ 4.,  0., 12.])
    """
    return _run("u_mul_e_sum", g, x, y)


def u_dot_v(g, x, y):
    """Dot product, over the last dimension, of the features of both ends of every edge.

    Args:
        g (DGLGraph): the graph.
        x (Tensor): source features ``[Ns, *, F]``.
        y (Tensor): destination features ``[Nd, *, F]``, of the same dtype.

    Returns:
        Tensor ``[E, *, 1]`` in the order of the graph's edge ids.

    Example:
        >>> import dgl, torch
        >>> from edgeless.dgl import ops
        >>> graph, x = dgl.graph(([0, 1, 2], [2, 2, 0])), torch.tensor([1.0, 2.0, 4.0])
        >>> ops.u_dot_v(graph, x.view(3, 1).repeat(1, 2), x.view(3, 1).repeat(1, 2)).flatten()
        tensor([ 8., 16.,  8.])
    """
    return _run("u_dot_v", g, x, y)


def edge_softmax(graph, logits, eids=ALL, norm_by="dst"):
    """Softmax of the edges' logits over the in-edges of every destination, or the out-edges of every source.

    On the CPU the kernels take the 16-bit dtypes, which DGL sums in 16 bits; float32 and float64 run DGL's kernel.

    Args:
        graph (DGLGraph): the graph.
        logits (Tensor): ``[E, *]``, such as ``[E, H, 1]``, in the order of the graph's edge ids.
        eids (Tensor, optional): the edges of ``logits``; default: all edges, the only choice that is fused.
        norm_by (str): ``"dst"`` or ``"src"``.

    Returns:
        Tensor of logits' shape and dtype.

    Example:
        >>> import dgl, torch
        >>> from edgeless.dgl import ops
        >>> graph, x = dgl.graph(([0, 1, 2], [2, 2, 0])), torch.tensor([1.0, 2.0, 4.0])
        >>> ops.edge_softmax(graph, torch.zeros(3, 1)).flatten()
        tensor([0.5000, 0.5000, 1.0000])
    """
    return _run("edge_softmax", graph, logits, eids, norm_by)


# The choice ------------------------------------------------------------------------------------------------------


def _run(name: str, graph, *inputs):
    if not compiling() and watched_calls() and deferred_in(inputs):
        found = softmax_of_edges(graph._graph, *inputs) if name == "edge_softmax" else None
        if found is not None:
            return found
        inputs = computed(inputs)
    choice, function = current_backend(), globals()[name]
    if choice != "reference":
        plan = _plan(name, graph, *inputs)
        if not isinstance(plan, str):
            ran_fused(function, function, (graph, *inputs))
            return plan()
        if choice == "fused" or isinstance(graph, DistGraph):
            raise NotFusedError(str(explain(function, graph, *inputs)))
    elif isinstance(graph, DistGraph):
        raise NotFusedError(f"{name}: backend('reference') runs DGL's own function, which knows no DistGraph")
    else:
        plan = REFERENCE
    ran_stock(function, function, (plan,))
    try:
        return getattr(stock_ops, name)(to_dgl(graph) if isinstance(graph, Graph) else graph, *inputs)
    except Exception as error:
        if plan != REFERENCE:
            add_call(error, function, (graph, *inputs), (plan,))
        raise


def _plan(name: str, graph, *inputs) -> Plan:
    relation = relation_of(graph)
    if relation.refusal is not None:
        return relation.refusal
    refusals = (kernel_refusal(relation.handle.device, op) for op in ("spmm", "sddmm", "neighbor_reduce"))
    return next(filter(None, refusals), None) or _PLANS[name](relation.handle, *inputs)


def _explained(name: str):
    """Gives the function ``name`` the predicate that :func:`edgeless.explain` calls."""
    function = globals()[name]

    def refusals(*inputs, **kwargs) -> list[str]:
        given = inspect.signature(function).bind(*inputs, **kwargs)
        given.apply_defaults()
        plan = _plan(name, *given.args)
        return [plan] if isinstance(plan, str) else []

    function._fusion_refusals = refusals


# The plan of each function ---------------------------------------------------------------------------------------


def _copy_u_sum(handle: Graph, x, reduce: str = "sum") -> Plan:
    if refusal := _tensor_refusal(handle, "x", x, handle.num_src):
        return refusal

    def compute():
        rows = as_dgl_reads(x).reshape(handle.num_src, prod(x.shape[1:]))
        return functional.spmm(handle, rows, reduce=reduce).view(handle.num_dst, *x.shape[1:])

    return compute


def _copy_u_mean(handle: Graph, x) -> Plan:
    return _copy_u_sum(handle, x, "mean")


def _extremum(handle: Graph, x, reduce: str) -> Plan:
    if refusal := _tensor_refusal(handle, "x", x, handle.num_src):
        return refusal
    fill = 0.0 if handle.num_edges == 0 else inf if reduce == "min" else -inf

    def compute():
        rows = as_dgl_reads(x).reshape(handle.num_src, prod(x.shape[1:]))
        out = functional.neighbor_reduce(handle, rows, reduce, ties="first", fill=fill)
        return out.view(handle.num_dst, *x.shape[1:])

    return compute


def _copy_u_min(handle: Graph, x) -> Plan:
    return _extremum(handle, x, "min")


def _copy_u_max(handle: Graph, x) -> Plan:
    return _extremum(handle, x, "max")


def _u_mul_e_sum(handle: Graph, x, y) -> Plan:
    refusal = _tensor_refusal(handle, "x", x, handle.num_src) or _tensor_refusal(handle, "y", y, handle.num_edges)
    if refusal or (refusal := _dtype_refusal(x, y)):
        return refusal
    sizes = max(x.dim(), y.dim()) - 1
    of_x, of_y = (_padded(t.shape[1:], sizes) for t in (x, y))
    while of_y and of_y[-1] == 1:
        of_y = of_y[:-1]
    heads, channels = prod(of_y), prod(of_x[len(of_y) :])
    if of_x[: len(of_y)] != of_y:
        return f"x of shape {list(x.shape)} and y of shape {list(y.shape)} are not one number an edge or a head"
    if heads > 1 and channels == 1:
        return f"y has as many numbers an edge as x a node, {heads}, for which DGL's own kernel is made"

    def compute():
        rows = as_dgl_reads(x).reshape(handle.num_src, heads, channels)
        out = functional.spmm(handle, rows, as_dgl_reads(y).reshape(handle.num_edges, heads))
        return out.view(handle.num_dst, *of_x)

    return compute


def _u_dot_v(handle: Graph, x, y) -> Plan:
    refusal = _tensor_refusal(handle, "x", x, handle.num_src) or _tensor_refusal(handle, "y", y, handle.num_dst)
    if refusal or (refusal := _dtype_refusal(x, y)):
        return refusal
    if x.shape[1:] != y.shape[1:]:
        return f"x and y have different shapes, {list(x.shape)} and {list(y.shape)}"
    if x.dim() == 1 or x.size(-1) == 1:
        return "x and y have one number to multiply, which is no dot product"
    batch, size = x.shape[1:-1], x.size(-1)

    def compute():
        src = as_dgl_reads(x).reshape(handle.num_src, prod(batch), size)
        dst = as_dgl_reads(y).reshape(handle.num_dst, prod(batch), size)
        return functional.sddmm_dot(handle, dst, src).view(handle.num_edges, *batch, 1)

    return compute


def _edge_softmax(handle: Graph, logits, eids, norm_by) -> Plan:
    if not (isinstance(eids, str) and eids == ALL):
        return "eids are given, so the softmax is over a subgraph"
    if norm_by not in ("dst", "src"):
        return f"norm_by is {norm_by!r}"
    if norm_by == "src" and isinstance(handle, DistGraph):
        return "norm_by is 'src', and a process has the in-edges of its nodes of a DistGraph only"
    if refusal := _tensor_refusal(handle, "logits", logits, handle.num_edges):
        return refusal
    heads = prod(logits.shape[1:])
    if heads > _MOST_SOFTMAX_HEADS:
        return f"logits has {heads} numbers an edge, more than {_MOST_SOFTMAX_HEADS}"
    if logits.device.type == "cpu" and logits.dtype in (torch.float32, torch.float64):
        return f"logits is {logits.dtype} on the CPU, for which DGL's own kernel is made"

    def compute():
        graph = _reversed(handle) if norm_by == "src" else handle
        rows = as_dgl_reads(logits).reshape(handle.num_edges, heads)
        # GAT attention with an identity LeakyReLU and zero node logits, so that only the edge logits are left.
        nodes = rows.new_zeros(graph.num_src, heads)
        identity = torch.eye(heads, dtype=rows.dtype, device=rows.device)
        _, weights = functional.gat_attention(
            graph,
            nodes.unsqueeze(-1),
            nodes,
            None,
            negative_slope=1.0,
            edge_attr=rows,
            edge_proj=identity,
            return_weights="softmax",
        )
        return weights.view(logits.shape)

    return compute


_PLANS = {
    "copy_u_max": _copy_u_max,
    "copy_u_mean": _copy_u_mean,
    "copy_u_min": _copy_u_min,
    "copy_u_sum": _copy_u_sum,
    "edge_softmax": _edge_softmax,
    "u_dot_v": _u_dot_v,
    "u_mul_e_sum": _u_mul_e_sum,
}

for _name in _PLANS:
    _explained(_name)


# Checks ----------------------------------------------------------------------------------------------------------


def _tensor_refusal(handle: Graph, name: str, x, rows: int) -> Optional[str]:
    """Returns why the kernels do not support ``x`` as a tensor of ``rows`` rows, or None. DGL raises its own error for
    it.
    """
    if not isinstance(x, Tensor):
        return f"{name} is a {type(x).__name__}, not a Tensor"
    if x.dim() == 0 or x.size(0) != rows:
        return f"{name} has shape {list(x.shape)}, not {rows} rows"
    if 0 in x.shape[1:]:
        return f"{name} has shape {list(x.shape)}, which has no features"
    if x.dtype not in FLOATS:
        return f"{name} is {x.dtype}"
    if x.layout is not torch.strided:
        return f"{name} has the layout {x.layout}"
    if x.device != handle.device:
        return f"{name} is on {x.device}, but graph is on {handle.device}"
    return None


def _dtype_refusal(x: Tensor, y: Tensor) -> Optional[str]:
    dtypes = as_dgl_reads(x[:0]).dtype, as_dgl_reads(y[:0]).dtype
    return None if dtypes[0] == dtypes[1] else f"x is {x.dtype}, but y is {y.dtype}"


def _padded(sizes, length: int) -> tuple[int, ...]:
    return (1,) * (length - len(sizes)) + tuple(sizes)


def _reversed(handle: Graph) -> Graph:
    """The reverse of ``handle``, which shares the CSC that ``handle`` builds and keeps here."""
    _ = handle.csc
    return handle.reverse()


stand_in(__name__, "dgl.ops", {getattr(stock_ops, name): globals()[name] for name in __all__})
