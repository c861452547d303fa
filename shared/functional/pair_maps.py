"""Dot-product attention over unique (source, relation) rows, whose keys and values are maps of the sources' rows."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _C
from ..checks import compiling, opmath_dtype
from ..choices.engines import current_engine
from ..graph.handle import Graph
from ..graph.typed import Compact, TypedGraph
from . import dot_attention
from .checks import cast, runs_reference
from .projection import PLAIN
from .relational import relational_sum
from .whole_rows import lacking


def pair_dot_attention(
    compact: Compact,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_weight: Tensor,
    v_weight: Tensor,
    k_scale: Tensor,
    scale: float,
) -> Tensor:
    """:func:`edgeless.functional.dot_attention` over the keys and values that :func:`pair_maps` computes from k and v.

    Args:
        compact: :attr:`TypedGraph.compact`.
        q: queries of the destinations, ``[Nd, H * M]``.
        k, v, k_weight, v_weight, k_scale: as in :func:`pair_maps`.
        scale: factor of the logits.

    Returns:
        ``[Nd, H * M]`` of the promoted dtype of q and k.
    """
    pairs, edges = compact
    heads = k_weight.size(1)
    if q.dtype is k.dtype and _takes_turns(compact, k, v, k_weight, v_weight, k_scale):
        csr, degrees = edges.csr_arrays(False), edges.cached_max_degrees()
        return torch.ops.edgeless.pair_dot_attention(
            q, k, v, k_weight, v_weight, k_scale, pairs.by_dst, csr, scale, degrees
        )
    k, v = pair_maps(pairs, k, v, k_weight, v_weight, k_scale)
    q, k, v = (t.unflatten(1, (heads, -1)) for t in (q, k, v))
    return dot_attention(edges, q, k, v, scale=scale, donate=True).flatten(1)


def _takes_turns(compact: Compact, k: Tensor, v: Tensor, k_weight: Tensor, v_weight: Tensor, k_scale: Tensor) -> bool:
    """Whether to compute keys and values one after the other in the same memory: on CUDA, without gradients, where
    both together are large (:func:`one_buffer_pays` in ``core_cuda/common/thresholds.h``).
    """
    if not k.is_cuda or torch.is_grad_enabled() or compiling() or type(compact.edges) is not Graph:
        return False
    if current_engine() not in ("auto", "rowsplit"):  # the user chose another engine for attention
        return False
    width = k_weight.size(1) * k_weight.size(3)
    if not _C.one_buffer_pays(2 * compact.edges.num_src * width * k.element_size()):
        return False
    ops = ("attention", "sddmm")
    if not _is_one_op(k, v, k_weight, v_weight, k_scale):
        return False
    return not any(runs_reference("dot_attention", k.device, op) for op in ops)


def pair_maps(
    pairs: TypedGraph, k: Tensor, v: Tensor, k_weight: Tensor, v_weight: Tensor, k_scale: Tensor
) -> tuple[Tensor, Tensor]:
    r"""Keys and values of unique (source, type) pairs, where a type has one key and one value matrix per head.

    .. math:: k_{(j, t)} = p_t\, k_j W^k_t, \quad v_{(j, t)} = v_j W^v_t

    Hu et al.: "Heterogeneous Graph Transformer", WWW 2020, equations 3 and 4.

    Args:
        pairs: ``pairs`` of :attr:`TypedGraph.compact`.
        k, v: ``[N, H * K]``, of one dtype. On CUDA, columns of one tensor, k before v, take one product.
        k_weight, v_weight: ``[R, H, K, M]``, of one dtype.
        k_scale: ``[R, H]``, the factors p.

    Returns:
        Keys and values of the pairs, ``[P, H * M]`` each, of k's dtype. Both may be columns of one tensor.
    """
    wide = opmath_dtype(k.dtype)
    if not _is_one_op(k, v, k_weight, v_weight, k_scale):
        matrices = k_weight * k_scale.to(wide)[..., None, None]  # else gradients of scales are sums of rounded products
        return relational_sum(pairs, k, matrices, out_dtype=k.dtype), relational_sum(pairs, v, cast(v_weight, v.dtype))
    graded = torch.is_grad_enabled() and any(t.requires_grad for t in (k, v, k_weight, v_weight, k_scale))
    by_src = pairs.by_src if graded else []
    return torch.ops.edgeless.pair_maps(k, v, k_weight, v_weight, k_scale, pairs.by_dst, by_src, not compiling())


def _is_one_op(k: Tensor, v: Tensor, k_weight: Tensor, v_weight: Tensor, k_scale: Tensor) -> bool:
    if any(type(t) not in PLAIN for t in (k, v, k_weight, v_weight, k_scale)):
        return False
    if v.dtype is not k.dtype or k_weight.dtype not in (k.dtype, opmath_dtype(k.dtype)):
        return False
    if v_weight.dtype is not k_weight.dtype or k_scale.dtype is not k_weight.dtype:
        return False
    if any(lacking(k.device, k.dtype, weight) != (0, 0) for weight in (k_weight, v_weight)):
        return False
    return not runs_reference("pair_maps", k.device, "relational_sum")
