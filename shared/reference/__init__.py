"""The functions of :mod:`edgeless.functional` in plain PyTorch. The kernels are tested against them, and they run where
no kernel can.

Every function takes the arguments of its namesake and returns the same, up to rounding. It gathers the rows of every
edge, so it allocates tensors ``[E, H, C]``, and follows the formula line by line instead of being fast. 16-bit inputs
are converted to float32, and results are rounded once, at the end. The options of attention are checked by
:mod:`edgeless.functional` only.

The graph may be any object with ``num_src``, ``num_dst``, ``num_edges`` and ``edge_index()``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from ..functional.checks import at_least_float32, cast, promoted
from ..functional.dropout import dropout_mask, seed_tensor
from ..functional.edge_options import EdgeOptions
from .relational import gather_mm, relational_sum, segment_mm

__all__ = [
    "cosine_attention",
    "dot_attention",
    "dropout_mask",
    "gat_attention",
    "gather_mm",
    "gatv2_attention",
    "neighbor_reduce",
    "relational_sum",
    "sddmm_dot",
    "segment_mm",
    "spmm",
]

# Attention -----------------------------------------------------------------------------------------------------------


def gatv2_attention(
    graph,
    x_l: Tensor,
    x_r: Tensor,
    att: Tensor,
    *,
    negative_slope: float = 0.2,
    edge_attr: Optional[Tensor] = None,
    edge_proj: Optional[Tensor] = None,
    edge_scale: Optional[Tensor] = None,
    dropout: float = 0.0,
    seed: Tensor | int | None = None,
    return_weights: Optional[str] = None,
    out_dtype: Optional[torch.dtype] = None,
):
    """:func:`edgeless.functional.gatv2_attention` in plain PyTorch: x_l ``[Ns, H, C]``, x_r ``[Nd, H, C]``, att
    ``[H, C]``; returns ``[Nd, H, C]``, or that and weights ``[E, H]``.

    Example:
        >>> import torch
        >>> from edgeless import Graph, reference
        >>> graph = Graph.from_edge_index(torch.tensor([[0, 1, 2, 0], [1, 2, 0, 2]]))
        >>> reference.gatv2_attention(graph, torch.randn(3, 2, 4), torch.randn(3, 2, 4), torch.randn(2, 4)).shape
        torch.Size([3, 2, 4])
    """
    options = EdgeOptions(edge_attr, edge_proj, edge_scale, dropout, seed, return_weights, out_dtype)
    return attend_gatv2(graph, x_l, x_r, att, negative_slope, options)


def gat_attention(
    graph,
    x: Tensor,
    a_l: Tensor,
    a_r: Optional[Tensor],
    *,
    negative_slope: float = 0.2,
    edge_attr: Optional[Tensor] = None,
    edge_proj: Optional[Tensor] = None,
    edge_scale: Optional[Tensor] = None,
    dropout: float = 0.0,
    seed: Tensor | int | None = None,
    return_weights: Optional[str] = None,
    out_dtype: Optional[torch.dtype] = None,
):
    """:func:`edgeless.functional.gat_attention` in plain PyTorch: x ``[Ns, H, C]``, a_l ``[Ns, H]``, a_r ``[Nd, H]``
    or None; returns ``[Nd, H, C]``, or that and weights ``[E, H]``.

    Example:
        >>> import torch
        >>> from edgeless import Graph, reference
        >>> graph = Graph.from_edge_index(torch.tensor([[0, 1, 2, 0], [1, 2, 0, 2]]))
        >>> reference.gat_attention(graph, torch.randn(3, 2, 4), torch.randn(3, 2), torch.randn(3, 2)).shape
        torch.Size([3, 2, 4])
    """
    options = EdgeOptions(edge_attr, edge_proj, edge_scale, dropout, seed, return_weights, out_dtype)
    return attend_gat(graph, x, a_l, a_r, negative_slope, options)


def dot_attention(
    graph,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: Optional[float] = None,
    edge_attr: Optional[Tensor] = None,
    edge_proj: Optional[Tensor] = None,
    edge_scale: Optional[Tensor] = None,
    dropout: float = 0.0,
    seed: Tensor | int | None = None,
    return_weights: Optional[str] = None,
    out_dtype: Optional[torch.dtype] = None,
):
    """:func:`edgeless.functional.dot_attention` in plain PyTorch: q ``[Nd, H, D]``, k ``[Ns, H, D]``, v ``[Ns, H, C]``;
    returns ``[Nd, H, C]``, or that and weights ``[E, H]``.

    Example:
        >>> import torch
        >>> from edgeless import Graph, reference
        >>> graph = Graph.from_edge_index(torch.tensor([[0, 1, 2, 0], [1, 2, 0, 2]]))
        >>> reference.dot_attention(graph, torch.randn(3, 2, 4), torch.randn(3, 2, 4), torch.randn(3, 2, 8)).shape
        torch.Size([3, 2, 8])
    """
    options = EdgeOptions(edge_attr, edge_proj, edge_scale, dropout, seed, return_weights, out_dtype)
    return attend_dot(graph, q, k, v, scale, options)


def cosine_attention(
    graph,
    x: Tensor,
    x_dst: Optional[Tensor] = None,
    beta: float | Tensor = 1.0,
    *,
    eps: float = 1e-12,
    edge_scale: Optional[Tensor] = None,
    dropout: float = 0.0,
    seed: Tensor | int | None = None,
    return_weights: Optional[str] = None,
    out_dtype: Optional[torch.dtype] = None,
):
    """:func:`edgeless.functional.cosine_attention` in plain PyTorch: x ``[Ns, H, C]``, x_dst ``[Nd, H, C]`` or None,
    beta a number, ``[1]`` or ``[H]``; returns ``[Nd, H, C]``, or that and weights ``[E, H]``.

    Example:
        >>> import torch
        >>> from edgeless import Graph, reference
        >>> graph = Graph.from_edge_index(torch.tensor([[0, 1, 2, 0], [1, 2, 0, 2]]))
        >>> reference.cosine_attention(graph, torch.randn(3, 2, 4), beta=2.0).shape
        torch.Size([3, 2, 4])
    """
    options = EdgeOptions(None, None, edge_scale, dropout, seed, return_weights, out_dtype)
    return attend_cosine(graph, x, x_dst, beta, eps, options)


def attend_gatv2(graph, x_l: Tensor, x_r: Tensor, att: Tensor, negative_slope: float, options: EdgeOptions):
    """:func:`gatv2_attention` with its options as one object, as :mod:`edgeless.functional` has them."""
    (x_l, x_r, att), options = _prepare([x_l, x_r, att], options)
    src, dst = graph.edge_index()
    hidden = x_l[src] + x_r[dst]
    if options.edge_attr is not None:
        hidden = hidden + torch.einsum("hcd,ed->ehc", options.edge_proj, options.edge_attr)
    logits = (F.leaky_relu(hidden, negative_slope) * att).sum(-1)
    return _attend(graph, logits, x_l[src], options)


def attend_gat(graph, x: Tensor, a_l: Tensor, a_r: Optional[Tensor], negative_slope: float, options: EdgeOptions):
    """:func:`gat_attention` with its options as one object."""
    (x, a_l, a_r), options = _prepare([x, a_l, a_r], options)
    src, dst = graph.edge_index()
    logits = a_l[src] if a_r is None else a_l[src] + a_r[dst]
    if options.edge_attr is not None:
        logits = logits + options.edge_attr @ options.edge_proj.t()
    logits = F.leaky_relu(logits, negative_slope)
    return _attend(graph, logits, x[src], options)


def attend_dot(graph, q: Tensor, k: Tensor, v: Tensor, scale: Optional[float], options: EdgeOptions):
    """:func:`dot_attention` with its options as one object."""
    (q, k, v), options = _prepare([q, k, v], options)
    if scale is None:
        scale = 1 / math.sqrt(q.size(-1)) if q.size(-1) else 1.0
    src, dst = graph.edge_index()
    key, value = k[src], v[src]
    if options.edge_attr is not None:
        term = torch.einsum("hcd,ed->ehc", options.edge_proj, options.edge_attr)
        key, value = key + term, value + term
    logits = (q[dst] * key).sum(-1) * scale
    return _attend(graph, logits, value, options)


def attend_cosine(graph, x: Tensor, x_dst: Optional[Tensor], beta: float | Tensor, eps: float, options: EdgeOptions):
    """:func:`cosine_attention` with its options as one object."""
    factor = beta if isinstance(beta, Tensor) else None
    (x, x_dst, factor), options = _prepare([x, x_dst, factor], options)
    src, dst = graph.edge_index()
    unit = F.normalize(x, dim=-1, eps=eps)
    unit_dst = unit if x_dst is None else F.normalize(x_dst, dim=-1, eps=eps)
    logits = (beta if factor is None else factor) * (unit_dst[dst] * unit[src]).sum(-1)
    return _attend(graph, logits, x[src], options)


def _prepare(nodes: Sequence[Optional[Tensor]], options: EdgeOptions) -> tuple[Sequence[Optional[Tensor]], EdgeOptions]:
    """The tensors in the dtype of the computation, at least float32, and options with a dtype of the results and, for
    dropout, a seed.
    """
    given = (*nodes, options.edge_attr, options.edge_proj, options.edge_scale)
    out_dtype, compute = options.dtype_of_results(promoted(nodes)), at_least_float32(promoted(given))
    *nodes, edge_attr, edge_proj, edge_scale = [cast(t, compute) for t in given]
    seed = options.seed
    if options.dropout > 0 and seed is None:
        seed = seed_tensor(None, nodes[0].device)
    return nodes, EdgeOptions(
        edge_attr, edge_proj, edge_scale, options.dropout, seed, options.return_weights, out_dtype
    )


def _attend(graph, logits: Tensor, messages: Tensor, options: EdgeOptions):
    """The softmax of ``logits`` ``[E, H]`` over the edges of each destination, and the weighted sum of ``messages``
    ``[E, H, C]``.
    """
    dst = graph.edge_index()[1]
    num_dst, heads, dropout = graph.num_dst, logits.size(1), options.dropout
    index = dst.unsqueeze(1).expand_as(logits)
    top = logits.new_full((num_dst, heads), -math.inf).scatter_reduce(0, index, logits.detach(), "amax")
    weights = (logits - top[dst]).exp()
    weights = weights / torch.zeros_like(top).index_add(0, dst, weights)[dst]
    softmax = weights
    if dropout > 0:
        numbers = getattr(graph, "numbers", None)  # a part of a graph draws by the edges' ids in the whole graph
        keep = dropout_mask(options.seed, graph.num_edges, heads, dropout, logits.device, numbers)
        weights = torch.where(keep, weights / (1 - dropout) if dropout < 1 else weights, 0.0)
    dropped = weights
    scale = options.scale_by_head(heads, weights.dtype)
    if scale is not None:
        weights = weights * scale
    out = messages.new_zeros(num_dst, *messages.shape[1:]).index_add(0, dst, weights.unsqueeze(-1) * messages)
    out = out.to(options.out_dtype)
    if options.return_weights is None:
        return out
    return out, (softmax if options.return_weights == "softmax" else dropped).to(options.out_dtype)


# Sums and extrema ----------------------------------------------------------------------------------------------------


def spmm(graph, x: Tensor, weight: Optional[Tensor] = None, src_scale=None, dst_scale=None) -> Tensor:
    """:func:`edgeless.functional.spmm` in plain PyTorch, with given scales: x ``[Ns, ..., F]``, weight ``[E]`` or
    ``[E, H]`` (for x ``[Ns, H, F]``), src_scale ``[Ns]``, dst_scale ``[Nd]``; returns ``[Nd, ..., F]``.

    Example:
        >>> import torch
        >>> from edgeless import Graph, reference
        >>> graph = Graph.from_edge_index(torch.tensor([[0, 1, 2, 0], [1, 2, 0, 2]]))
        >>> reference.spmm(graph, torch.ones(3, 2))
        tensor([[1., 1.],
                [1., 1.],
                [2., 2.]])
    """
    dtype = promoted((x, weight))
    x = x.to(at_least_float32(dtype))
    src, dst = graph.edge_index()
    ones = (1,) * (x.dim() - 1)
    if src_scale is not None:
        x = x * src_scale.to(x.dtype).view(-1, *ones)
    messages = x[src]
    if weight is not None:
        weight = weight.to(x.dtype)
        messages = messages * (weight.view(-1, *ones) if weight.dim() == 1 else weight.unsqueeze(-1))
    out = messages.new_zeros(graph.num_dst, *x.shape[1:]).index_add(0, dst, messages)
    if dst_scale is not None:
        out = out * dst_scale.to(x.dtype).view(-1, *ones)
    return out.to(dtype)


def sddmm_dot(graph, x_dst: Tensor, x_src: Tensor, out_dtype: Optional[torch.dtype] = None) -> Tensor:
    """:func:`edgeless.functional.sddmm_dot` in plain PyTorch: x_dst ``[Nd, ..., F]`` and x_src ``[Ns, ..., F]``;
    returns ``[E, ...]``, in original edge order.

    Example:
        >>> import torch
        >>> from edgeless import Graph, reference
        >>> graph = Graph.from_edge_index(torch.tensor([[0, 1, 2, 0], [1, 2, 0, 2]]))
        >>> reference.sddmm_dot(graph, torch.ones(3, 2), torch.ones(3, 2))
        tensor([2., 2., 2., 2.])
    """
    dtype = promoted((x_dst, x_src))
    compute = at_least_float32(dtype)
    src, dst = graph.edge_index()
    return (x_dst.to(compute)[dst] * x_src.to(compute)[src]).sum(-1).to(out_dtype or dtype)


def neighbor_reduce(graph, x: Tensor, reduce: str, *, ties: str = "shared", fill: float = 0.0) -> Tensor:
    """:func:`edgeless.functional.neighbor_reduce` in plain PyTorch: x ``[Ns, F]``; returns ``[Nd, F]``, with ``fill``
    for destinations without in-edges.

    Example:
        >>> import torch
        >>> from edgeless import Graph, reference
        >>> graph = Graph.from_edge_index(torch.tensor([[0, 1, 2, 0], [1, 2, 0, 2]]))
        >>> reference.neighbor_reduce(graph, torch.tensor([[1.0], [2.0], [3.0]]), "max")
        tensor([[3.],
                [1.],
                [2.]])
    """
    src, dst = graph.edge_index()
    if ties == "scatter":
        index = dst.unsqueeze(1).expand(-1, x.size(1))
        out = x.new_zeros(graph.num_dst, x.size(1))
        out = out.scatter_reduce(0, index, x[src], "a" + reduce, include_self=False)
    else:
        gathered = x[src[dst.argsort(stable=True)]]  # one gather: the gradient of a gather is as large as x
        rows = gathered.split(graph.in_degrees().tolist()) if graph.num_dst else ()
        out = torch.stack([_extremum(row, reduce, ties) for row in rows]) if rows else gathered
    isolated = graph.in_degrees() == 0
    return torch.where(isolated.unsqueeze(1), torch.full_like(out, fill), out)


def _extremum(rows: Tensor, reduce: str, ties: str) -> Tensor:
    """The extremum ``[F]`` of the rows ``[D, F]`` of a destination's D neighbours; its gradient goes to all of equal
    rows in equal parts (``"shared"``), or to the first.
    """
    if len(rows) == 0:
        return rows.sum(0)
    if ties == "shared":
        return rows.amin(0) if reduce == "min" else rows.amax(0)
    best = rows.amin(0) if reduce == "min" else rows.amax(0)
    first = ((rows == best) | rows.isnan()).to(torch.uint8).argmax(0)
    return rows.gather(0, first.unsqueeze(0))[0]
