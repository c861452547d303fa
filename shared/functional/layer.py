"""Layers as one op and one autograd node each on CUDA, and sums of few rows on the CPU.

That saves host time on launch-bound graphs, and memory on large graphs if the backward overwrites what the forward
saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor, nn

from .. import _C
from ..autocast import cuda_autocast_dtype
from ..checks import compiling, opmath_dtype
from ..choices.engines import keep_blocks, keep_plans
from ..distributed.graph import DistGraph, LocalGraph
from ..graph.handle import Graph
from ..layers.adapter import is_plain
from .aggregation import scales
from .checks import cast
from .dropout import seed_tensor
from .projection import fits, rounds, small_weights

_SUM_LAYER = torch.ops.edgeless.sum_layer.default
_PARTS = (DistGraph, LocalGraph)
_FEW_NODES = (
    1 << 15
)  # kLaunchBoundRows of core_cuda/common/thresholds.h: below it, a GEMM takes less time than its launch


def _is_one_op(graph: Graph, x: Tensor, writes_over: bool = False) -> bool:
    """Returns whether a layer should run as one op, for ``x`` ``[N, F]`` of a graph among N nodes.

    On a large graph it should only if its backward overwrites what the forward saved, hence not under saved-tensor
    hooks, such as checkpoints use. Otherwise separate ops take less memory, since each frees its saved tensors before
    the next one runs.
    """
    if not x.is_cuda or compiling() or not x.size(0) == graph.num_src == graph.num_dst:
        return False
    if type(graph) in _PARTS:  # the op does not know their halo rows, dropout seeds and edge ids
        return False
    return x.size(0) < _FEW_NODES or (writes_over and _C.saves_unseen())


def _maps(x: Tensor, linears: Sequence[nn.Module], kinds: tuple[type, ...], *others: Optional[Tensor]):
    """Returns weights, biases and autocast's dtype or None, or None if the op does not support these parameters."""
    if not all(is_plain(linear, kinds) for linear in linears):
        return None
    weights, biases = [linear.weight for linear in linears], [linear.bias for linear in linears]
    if not fits(x, weights, [*biases, *others]):
        return None
    return weights, biases, cuda_autocast_dtype() if rounds([x]) else None


def _needs_gradient(*tensors: Optional[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def attention_layer(
    graph: Graph,
    score: str,
    x: Tensor,
    linears: Sequence[nn.Module],
    *,
    kinds: tuple[type, ...] = (nn.Linear,),
    vectors: Sequence[Tensor] = (),
    row: Optional[Tensor] = None,
    heads: int,
    coefficient: float,
    dropout: float = 0.0,
    by_head: bool = False,
    keeps_dtype: bool = False,
) -> Optional[Tensor]:
    """Computes an attention layer among the nodes of a graph, from their features to the layer's result, as one op.

    Args:
        graph: a graph with as many sources as destinations, N.
        score: ``"gat"``, ``"gatv2"`` or ``"dot"``. It decides what linears and vectors are, in the terms of
            :mod:`edgeless.functional`:

            - gat: linears ``[lin]``, vectors (of sources, of destinations), ``x = lin(x)``;
            - gatv2: linears ``[lin_l, lin_r]`` or one for both, vectors (att,);
            - dot: linears ``[query, key, value]`` and perhaps a fourth, whose result is added, or one for all three.
        x: ``[N, F]``.
        linears: the linear maps.
        kinds: the classes whose forward is ``x @ weight.T + bias``.
        vectors: ``[1, H, C]`` each.
        row: ``[H * C]``, added to the result; not with a fourth map.
        heads: ``H``.
        coefficient: the negative slope of gat and gatv2, or the scale of dot.
        dropout: the probability to drop an attention weight.
        by_head: whether the result is ``[N, H, C]``.
        keeps_dtype: whether the attention has the dtype of the mapped rows, so that only ``row`` may promote it.

    Returns:
        ``[N, H * C]``, of the dtype to which the maps, the vectors and ``row`` promote; None if the caller has to run
        separate ops.
    """
    if not _is_one_op(graph, x, writes_over=len(linears) > 1):
        return None
    if (maps := _maps(x, linears, kinds, *vectors, row)) is None:
        return None
    weights, biases, dtype = maps
    rows = x.dtype if dtype is None else dtype
    with_vectors = torch.promote_types(rows, vectors[0].dtype) if vectors else rows
    if score == "gat" and with_vectors != opmath_dtype(rows):  # the op computes logits in the opmath dtype
        return None
    if keeps_dtype:
        out_dtype = rows if row is None else torch.promote_types(rows, row.dtype)
    elif score == "dot" and dtype is not None:  # the upstream softmax runs in float32
        out_dtype = torch.promote_types(rows, torch.float32)
    else:
        out_dtype = with_vectors
    if any(t.dtype != vectors[0].dtype for t in vectors) or (row is not None and row.dtype != out_dtype):
        return None
    by_edge = dropout > 0  # the dropout mask depends on edge ids
    csc = graph.csc_arrays(by_edge) if _needs_gradient(x, *weights, *biases, *vectors) else []
    csr = graph.csr_arrays(by_edge)
    if score == "dot" and not by_edge:
        keep_blocks(graph, x, rows, heads, weights[0].size(0) // heads)
    seed = seed_tensor(None, x.device) if dropout > 0 else None
    return torch.ops.edgeless.attention_layer(
        x, weights, biases, vectors, row, csr, csc, seed, score, heads, coefficient, dropout,
        dtype, out_dtype, graph.cached_max_degrees(), by_head,
    )  # fmt: skip


def sum_layer(
    graph: Graph,
    x: Tensor,
    linear: nn.Module,
    own: nn.Module,
    *,
    kinds: tuple[type, ...] = (nn.Linear,),
    weight: Optional[Tensor] = None,
    reduce: str = "sum",
) -> Optional[Tensor]:
    """Computes ``linear(spmm(graph, x, weight, reduce=reduce)) + own(x)`` as one op.

    Args:
        graph: a graph with as many sources as destinations, N.
        x: ``[N, F]``.
        linear: the map of the sum over neighbours.
        own: the map of the destination's own row. At most one of both maps may have a bias.
        kinds: the classes whose forward is ``x @ weight.T + bias``.
        weight: ``[E]``, in the order of the graph's edges.
        reduce: ``"sum"`` or ``"mean"``.

    Returns:
        ``[N, C]``; None if the caller has to run separate ops.
    """
    if not _is_one_op(graph, x):
        return _sum_of_few(graph, x, linear, own, kinds, reduce) if x.is_cpu and weight is None else None
    if (maps := _maps(x, (linear, own), kinds)) is None:
        return None
    weights, biases, dtype = maps
    if weight is not None and (weight.dtype != x.dtype or _needs_gradient(weight)):
        return None
    if len(given := [bias for bias in biases if bias is not None]) > 1:
        return None
    parameters = opmath_dtype(x.dtype)
    weighted = weight is not None
    by_edge = cast(weight, parameters).unsqueeze(1) if weighted else None
    csr, csc = graph.csr_arrays(weighted), graph.csc_arrays(weighted) if _needs_gradient(x) else []
    by_node = scales(graph, "none", reduce, parameters)
    keep_plans(graph, x, weight)
    bias, degrees = given[0] if given else None, graph.cached_max_degrees()
    return _SUM_LAYER(x, weights, bias, by_edge, *by_node, csr, csc, dtype, degrees)


def _sum_of_few(graph: Graph, x: Tensor, linear: nn.Module, own: nn.Module, kinds, reduce: str) -> Optional[Tensor]:
    """:func:`sum_layer` for few rows on the CPU."""
    if compiling() or type(graph) is not Graph or not x.size(0) == graph.num_src == graph.num_dst:
        return None
    if (weights := small_weights((x, x), (linear, own), kinds)) is None:
        return None
    scale = graph.degree_scale("dst", -1.0, torch.float32) if reduce == "mean" else None
    csc = graph.csc_arrays(False) if x.requires_grad and torch.is_grad_enabled() else []
    return _SUM_LAYER(x, weights, linear.bias, None, None, scale, graph.csr_arrays(False), csc, None, [])
