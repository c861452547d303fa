"""The truth that the kernels are tested against: the same functions in plain PyTorch.

Everything here materialises edge tensors and is slow on purpose: one line per line of the formula. 16-bit inputs are
computed in float32 and rounded once. See :mod:`edgeless.functional` for the arguments.
"""

from __future__ import annotations

import math
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from .graph_checks import check_ids

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

_MASK32 = 0xFFFFFFFF


def _philox(seed: int, edge_id: Tensor, head_group: Tensor) -> list[Tensor]:
    """Philox4x32-7 of ``core_cuda/common/dropout.h``: four int64 tensors that hold 32-bit draws."""
    c0, c1 = edge_id & _MASK32, (edge_id >> 32) & _MASK32
    c2, c3 = head_group.expand_as(c0), torch.zeros_like(c0)
    k0, k1 = seed & _MASK32, (seed >> 32) & _MASK32
    for _ in range(7):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # int64 wraps: the low 64 bits are right
        c0, c2 = ((p1 >> 32) & _MASK32) ^ c1 ^ k0, ((p0 >> 32) & _MASK32) ^ c3 ^ k1
        c1, c3 = p1 & _MASK32, p0 & _MASK32
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return [c0, c1, c2, c3]


def dropout_mask(seed: Tensor | int, num_edges: int, heads: int, p: float, device="cpu", ids=None) -> Tensor:
    """Boolean [E, H]: True where the attention weight is kept by the generator that the kernels use.

    ``ids`` ``[E]`` are what it counts the edges by; by default their own ids.
    """
    ids = torch.arange(num_edges, dtype=torch.int64, device=device) if ids is None else ids
    groups = (heads + 3) // 4
    lanes = [
        lane
        for group in range(groups)
        for lane in _philox(int(seed), ids, torch.tensor(group, dtype=torch.int64, device=device))
    ]
    return torch.stack(lanes, dim=1)[:, :heads] >= int(p * 2**32)


def _attend(graph, logits, messages, edge_scale, dropout, seed, return_weights, out_dtype):
    """Softmax of ``logits`` [E, H] over each destination, then the weighted sum of ``messages`` [E, H, C]."""
    dst = graph.edge_index()[1]
    num_dst, heads = graph.num_dst, logits.size(1)
    index = dst.unsqueeze(1).expand_as(logits)
    top = logits.new_full((num_dst, heads), -math.inf).scatter_reduce(0, index, logits.detach(), "amax")
    weights = (logits - top[dst]).exp()
    weights = weights / torch.zeros_like(top).index_add(0, dst, weights)[dst]
    softmax = weights
    if dropout > 0:
        numbers = getattr(graph, "numbers", None)  # of the part of a graph
        keep = dropout_mask(seed, graph.num_edges, heads, dropout, logits.device, numbers)
        weights = torch.where(keep, weights / (1 - dropout) if dropout < 1 else weights, 0.0)
    dropped = weights
    if edge_scale is not None:
        weights = weights * (edge_scale.unsqueeze(1) if edge_scale.dim() == 1 else edge_scale)
    out = messages.new_zeros(num_dst, *messages.shape[1:]).index_add(0, dst, weights.unsqueeze(-1) * messages)
    out = out.to(out_dtype)
    if return_weights is None:
        return out
    return out, (softmax if return_weights == "softmax" else dropped).to(out_dtype)


def _prepare(tensors, dropout, seed, out_dtype):
    """Raise 16-bit tensors to float32, settle the output's dtype and draw a seed where one is needed."""
    given = [t for t in tensors if t is not None]
    dtype = given[0].dtype
    for t in given[1:]:
        dtype = torch.promote_types(dtype, t.dtype)
    compute = torch.promote_types(dtype, torch.float32)
    if dropout > 0 and seed is None:
        seed = torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=given[0].device)
    return [None if t is None else t.to(compute) for t in tensors], seed, out_dtype or dtype


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
    """Plain version of :func:`edgeless.functional.gatv2_attention`."""
    tensors, seed, out_dtype = _prepare([x_l, x_r, att, edge_attr, edge_proj, edge_scale], dropout, seed, out_dtype)
    x_l, x_r, att, edge_attr, edge_proj, edge_scale = tensors
    src, dst = graph.edge_index()
    hidden = x_l[src] + x_r[dst]
    if edge_attr is not None:
        hidden = hidden + torch.einsum("hcd,ed->ehc", edge_proj, edge_attr)
    logits = (F.leaky_relu(hidden, negative_slope) * att).sum(-1)
    return _attend(graph, logits, x_l[src], edge_scale, dropout, seed, return_weights, out_dtype)


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
    """Plain version of :func:`edgeless.functional.gat_attention`."""
    tensors, seed, out_dtype = _prepare([x, a_l, a_r, edge_attr, edge_proj, edge_scale], dropout, seed, out_dtype)
    x, a_l, a_r, edge_attr, edge_proj, edge_scale = tensors
    src, dst = graph.edge_index()
    logits = a_l[src] if a_r is None else a_l[src] + a_r[dst]
    if edge_attr is not None:
        logits = logits + edge_attr @ edge_proj.t()
    logits = F.leaky_relu(logits, negative_slope)
    return _attend(graph, logits, x[src], edge_scale, dropout, seed, return_weights, out_dtype)


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
    """Plain version of :func:`edgeless.functional.dot_attention`."""
    tensors, seed, out_dtype = _prepare([q, k, v, edge_attr, edge_proj, edge_scale], dropout, seed, out_dtype)
    q, k, v, edge_attr, edge_proj, edge_scale = tensors
    if scale is None:
        scale = 1 / math.sqrt(q.size(-1)) if q.size(-1) else 1.0
    src, dst = graph.edge_index()
    key, value = k[src], v[src]
    if edge_attr is not None:
        term = torch.einsum("hcd,ed->ehc", edge_proj, edge_attr)
        key, value = key + term, value + term
    logits = (q[dst] * key).sum(-1) * scale
    return _attend(graph, logits, value, edge_scale, dropout, seed, return_weights, out_dtype)


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
    """Plain version of :func:`edgeless.functional.cosine_attention`."""
    factor = beta if isinstance(beta, Tensor) else None
    (x, x_dst, factor, edge_scale), seed, out_dtype = _prepare([x, x_dst, factor, edge_scale], dropout, seed, out_dtype)
    src, dst = graph.edge_index()
    unit = F.normalize(x, dim=-1, eps=eps)
    unit_dst = unit if x_dst is None else F.normalize(x_dst, dim=-1, eps=eps)
    logits = (beta if factor is None else factor) * (unit_dst[dst] * unit[src]).sum(-1)
    return _attend(graph, logits, x[src], edge_scale, dropout, seed, return_weights, out_dtype)


def spmm(graph, x: Tensor, weight: Optional[Tensor] = None, src_scale=None, dst_scale=None) -> Tensor:
    """Plain version of :func:`edgeless.functional.spmm`, with the scales ``[Ns]`` and ``[Nd]`` given."""
    dtype = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
    x = x.to(torch.promote_types(dtype, torch.float32))
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
    """Plain version of :func:`edgeless.functional.sddmm_dot`."""
    dtype = torch.promote_types(x_dst.dtype, x_src.dtype)
    compute = torch.promote_types(dtype, torch.float32)
    src, dst = graph.edge_index()
    return (x_dst.to(compute)[dst] * x_src.to(compute)[src]).sum(-1).to(out_dtype or dtype)


def neighbor_reduce(graph, x: Tensor, reduce: str, *, ties: str = "shared", fill: float = 0.0) -> Tensor:
    """Plain version of :func:`edgeless.functional.neighbor_reduce`."""
    src, dst = graph.edge_index()
    if ties == "scatter":
        index = dst.unsqueeze(1).expand(-1, x.size(1))
        out = x.new_zeros(graph.num_dst, x.size(1))
        out = out.scatter_reduce(0, index, x[src], "a" + reduce, include_self=False)
    else:
        gathered = x[src[dst.argsort(stable=True)]]  # one gather: a gradient per row would each be as large as x
        rows = gathered.split(graph.in_degrees().tolist()) if graph.num_dst else ()
        out = torch.stack([_extremum(row, reduce, ties) for row in rows]) if rows else gathered
    isolated = graph.in_degrees() == 0
    return torch.where(isolated.unsqueeze(1), torch.full_like(out, fill), out)


def _extremum(rows: Tensor, reduce: str, ties: str) -> Tensor:
    if len(rows) == 0:
        return rows.sum(0)
    if ties == "shared":
        return rows.amin(0) if reduce == "min" else rows.amax(0)
    best = rows.amin(0) if reduce == "min" else rows.amax(0)
    first = ((rows == best) | rows.isnan()).to(torch.uint8).argmax(0)
    return rows.gather(0, first.unsqueeze(0))[0]


def segment_mm(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    """Plain version of :func:`edgeless.functional.segment_mm`."""
    dtype = torch.promote_types(x.dtype, w.dtype)
    compute = torch.promote_types(dtype, torch.float32)
    ends = offsets.tolist()
    if ends[0] != 0 or ends[-1] != x.size(0) or sorted(ends) != ends:
        raise ValueError(f"segment_mm: offsets must run from 0 to N = {x.size(0)} and not fall, got {ends}")
    parts = [x[begin:end].to(compute) @ w[t].to(compute) for t, (begin, end) in enumerate(zip(ends, ends[1:]))]
    return torch.cat(parts).to(dtype) if parts else x.new_zeros(0, w.size(2), dtype=dtype)


def gather_mm(x: Tensor, w: Tensor, index: Tensor) -> Tensor:
    """Plain version of :func:`edgeless.functional.gather_mm`."""
    index = index.long()
    check_ids("gather_mm: index", index, "R", w.size(0))
    order = index.argsort(stable=True)
    lengths = torch.bincount(index, minlength=w.size(0))
    offsets = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
    out = segment_mm(x[order], w, offsets)
    return torch.empty_like(out).index_copy(0, order, out)


def relational_sum(graph, x: Tensor, weight: Tensor, edge_weight: Optional[Tensor] = None, reduce: str = "sum"):
    """Plain version of :func:`edgeless.functional.relational_sum`."""
    dtype = torch.promote_types(x.dtype, weight.dtype)
    compute = torch.promote_types(dtype, torch.float32)
    x, weight = x.to(compute), weight.to(compute)
    if weight.dim() == 4:
        weight = torch.stack([torch.block_diag(*blocks) for blocks in weight]) if len(weight) else weight.flatten(2)
    (src, dst), types = graph.graph.edge_index(), graph.edge_type
    out = x.new_zeros(graph.num_dst, weight.size(2))
    for r in range(graph.num_types):
        edges = (types == r).nonzero().squeeze(1)
        rows = x[src[edges]]
        if edge_weight is not None:
            rows = rows * edge_weight.to(compute)[edges].unsqueeze(1)
        if reduce == "mean":
            counts = torch.bincount(dst[edges], minlength=graph.num_dst)
            rows = rows / counts[dst[edges]].unsqueeze(1)
        sums = x.new_zeros(graph.num_dst, x.size(1)).index_add(0, dst[edges], rows)
        out = out + sums @ weight[r]
    return out.to(dtype)
