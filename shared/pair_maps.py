"""Keys and values of the pairs of a source and a type, from those of the sources: as one node of autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from .functional_checks import cast, runs_reference
from .graph_checks import compiling
from .ops.attention import opmath_dtype
from .projection import PLAIN
from .relational import relational_sum
from .typed_graph import TypedGraph
from .whole_rows import lacking


def pair_maps(
    pairs: TypedGraph, k: Tensor, v: Tensor, k_weight: Tensor, v_weight: Tensor, k_scale: Tensor
) -> tuple[Tensor, Tensor]:
    r"""What a source is to the edges of a type, where a type has a matrix for keys and one for values in every head.

    .. math:: k_{(j, t)} = p_t\, k_j W^k_t, \quad v_{(j, t)} = v_j W^v_t

    Hu et al.: "Heterogeneous Graph Transformer", WWW 2020, equations 3 and 4.

    Args:
        pairs: the first of :attr:`TypedGraph.compact`.
        k, v: ``[N, H * K]``, of one dtype. On CUDA columns of one tensor, k before v, are multiplied together.
        k_weight, v_weight: ``[R, H, K, M]``, of one dtype.
        k_scale: ``[R, H]``, the numbers p.

    Returns:
        Keys and values of the pairs, ``[P, H * M]`` each, of k's dtype, which may be columns of one tensor.
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
