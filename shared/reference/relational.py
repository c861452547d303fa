"""Products with per-type weights and sums over relations, in plain PyTorch; public through ``edgeless.reference``."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from ..checks import check_ids
from ..functional.checks import at_least_float32, promoted


def segment_mm(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    """:func:`edgeless.functional.segment_mm` in plain PyTorch: x ``[N, K]``, w ``[R, K, M]``, offsets ``[R + 1]``
    integers; returns ``[N, M]``.

    Raises:
        ValueError: offsets do not run from 0 to N, or decrease.

    Example:
        >>> import torch
        >>> from edgeless import Graph, reference
        >>> reference.segment_mm(torch.ones(3, 2), torch.ones(2, 2, 1), torch.tensor([0, 1, 3])).shape
        torch.Size([3, 1])
    """
    dtype = promoted((x, w))
    compute = at_least_float32(dtype)
    ends = offsets.tolist()
    if ends[0] != 0 or ends[-1] != x.size(0) or sorted(ends) != ends:
        raise ValueError(f"segment_mm: offsets must run from 0 to N = {x.size(0)} and not fall, got {ends}")
    parts = [x[begin:end].to(compute) @ w[t].to(compute) for t, (begin, end) in enumerate(zip(ends, ends[1:]))]
    return torch.cat(parts).to(dtype) if parts else x.new_zeros(0, w.size(2), dtype=dtype)


def gather_mm(x: Tensor, w: Tensor, index: Tensor) -> Tensor:
    """:func:`edgeless.functional.gather_mm` in plain PyTorch: x ``[N, K]``, w ``[R, K, M]``, index ``[N]`` integers
    below R; returns ``[N, M]``.

    Raises:
        IndexError: index has a value outside ``[0, R)``.

    Example:
        >>> import torch
        >>> from edgeless import Graph, reference
        >>> reference.gather_mm(torch.ones(3, 2), torch.ones(2, 2, 1), torch.tensor([1, 0, 1])).shape
        torch.Size([3, 1])
    """
    index = index.long()
    check_ids("gather_mm: index", index, "R", w.size(0))
    order = index.argsort(stable=True)
    lengths = torch.bincount(index, minlength=w.size(0))
    offsets = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
    out = segment_mm(x[order], w, offsets)
    return torch.empty_like(out).index_copy(0, order, out)


def relational_sum(graph, x: Tensor, weight: Tensor, edge_weight: Optional[Tensor] = None, reduce: str = "sum"):
    """:func:`edgeless.functional.relational_sum` in plain PyTorch: graph a :class:`edgeless.TypedGraph`, x ``[Ns, K]``,
    weight ``[R, K, M]`` or blocks ``[R, B, K / B, M / B]``, edge_weight ``[E]``; returns ``[Nd, M]``.

    Example:
        >>> import torch
        >>> from edgeless import Graph, reference
        >>> from edgeless import TypedGraph
        >>> graph = Graph.from_edge_index(torch.tensor([[0, 1, 2, 0], [1, 2, 0, 2]]))
        >>> typed = TypedGraph(graph, torch.tensor([0, 1, 0, 1]), 2)
        >>> reference.relational_sum(typed, torch.ones(3, 2), torch.ones(2, 2, 4)).shape
        torch.Size([3, 4])
    """
    dtype = promoted((x, weight))
    compute = at_least_float32(dtype)
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
