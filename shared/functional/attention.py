"""From the checked arguments of an attention function to the ops: dtypes, arrays of the graph, seed and results.

The *query side* is the destination's: its rows ``dst`` are read once for all edges of a CSR segment. The *gathered
side* is the source's: its rows ``src`` and ``value`` are read for every edge.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from ..checks import opmath_dtype
from ..choices.engines import keep_blocks
from ..distributed.graph import LocalGraph
from ..graph.handle import Graph
from ..ops import attention as _attention_op  # noqa: F401  registers the fake kernels of the ops
from .checks import cast, promoted
from .dropout import seed_tensor
from .edge_options import EdgeOptions


def attend(
    graph: Graph,
    score: str,
    coefficient: float,
    dst: Tensor,
    src: Tensor,
    value: Optional[Tensor],
    att: Optional[Tensor],
    options: EdgeOptions,
    donate: bool = False,
):
    """Attention by the kernels, differentiable in every floating tensor any number of times.

    Args:
        score: the name of a score in ``core_cuda/common/score.h``.
        coefficient: the score's parameter: the slope of the LeakyReLU, the scale of the dot product, or the cosine's
            eps.
        dst: rows of the destinations ``[Nd, H, D]``, or their logits ``[Nd, H]`` for gat.
        src: rows of the sources ``[Ns, H, D]``, or their logits ``[Ns, H]`` for gat.
        value: values of the sources ``[Ns, H, C]``; None where ``src`` are the values as well.
        att: the attention vector ``[H, C]`` of gatv2, or the factor ``[H, 1]`` of the cosine.
        options: the options of edges, which have been checked against the graph.
        donate: whether the last backward may write gradients over ``src`` and ``value``.

    Returns:
        Tensor ``[Nd, H, C]``, or ``(out, weights [E, H])`` with ``options.return_weights``.
    """
    dropout, returned = options.dropout, options.return_weights
    if dropout > 0 and type(graph) is LocalGraph:
        return _attend_in_part(graph, score, coefficient, dst, src, value, att, options, donate)
    rows = promoted((dst, src, value))
    out_dtype = options.dtype_of_results(rows if att is None else promoted((att,), rows))
    parameters = opmath_dtype(rows)
    keys = rows
    edge_attr, edge_proj = options.edge_attr, options.edge_proj
    if score == "gat":
        # A node has one logit per head. Logits are computed in float32 or float64 anyway, so converting them costs
        # little. The values keep their own dtype, since they are most of the bytes that are read.
        keys, rows = parameters, rows if rows == torch.float64 else value.dtype
        if edge_proj is not None:
            edge_proj = edge_proj.unsqueeze(1)
    if score != "gat" or edge_attr is None or edge_attr.dtype != parameters:
        edge_attr = cast(edge_attr, rows)
    if score == "gat" and src.is_cuda and keys not in (dst.dtype, src.dtype):  # one launch instead of two
        dst, src = torch.ops.edgeless.cast_all([dst, src], keys)
    dst, src, value = cast(dst, keys), cast(src, keys), cast(value, rows)
    if att is not None and att.dtype != rows:  # the ops take the dtype of the rows and that of the parameters
        att = cast(att, parameters)
    edge_proj, edge_scale = cast(edge_proj, parameters), options.scale_by_head(dst.size(1), parameters)
    seed = seed_tensor(options.seed, dst.device) if dropout > 0 else None
    # The kernels find edge tensors, returned weights and the dropout mask by the original ids of the edges.
    by_edge = dropout > 0 or returned is not None or edge_attr is not None or edge_scale is not None
    csr = graph.csr_arrays(by_edge)
    # The backward of the gathered side walks the CSC. On CUDA the gradient of gatv2's attention vector does so, too.
    needs_csc = torch.is_grad_enabled() and (
        src.requires_grad
        or (value is not None and value.requires_grad)
        or (score == "gatv2" and src.is_cuda and att.requires_grad)
    )
    csc = graph.csc_arrays(by_edge) if needs_csc else []
    # On CUDA the destination pass stores what it computes from edge features in the order of the CSR, except for gatv2
    # and weighted edges, whose values are stored by edge id. The source pass then needs the CSC-to-CSR permutation.
    by_id = edge_scale is not None or edge_attr is None or score == "gatv2"
    if csc and src.is_cuda and not by_id and type(graph) is Graph:
        csc = graph.csc_with_places()
    kernel_out = out_dtype if out_dtype in (rows, parameters) else parameters
    if score == "dot" and not by_edge:
        keep_blocks(graph, src, rows, src.size(1), src.size(2))
    out, stats = torch.ops.edgeless.attention(
        dst, src, value, att, edge_attr, edge_proj, edge_scale, csr, csc, seed, score, coefficient, dropout, kernel_out,
        graph.cached_max_degrees(), donate and returned is None,  # the backward of the weights reads the rows again
    )  # fmt: skip
    out = cast(out, out_dtype)
    if returned is None:
        return out
    rate = dropout if returned == "dropped" else 0.0
    weights = torch.ops.edgeless.attention_weights(
        stats, dst, src, att, edge_attr, edge_proj, csr, csc, seed if rate > 0 else None, score, coefficient, rate
    )
    return out, cast(weights, out_dtype)


def _attend_in_part(graph: LocalGraph, score, coefficient, dst, src, value, att, options: EdgeOptions, donate: bool):
    """:func:`attend` with dropout on a part of a graph: the mask is drawn by the edges' ids in the whole graph, while
    edge tensors are indexed by their ids in the part.
    """
    seed, returned = seed_tensor(options.seed, dst.device), options.return_weights
    if options.edge_attr is options.edge_scale is returned is None:  # no edge tensor: the kernels see the whole ids
        options = options._replace(seed=seed)
        return attend(graph.numbered, score, coefficient, dst, src, value, att, options, donate)
    # Else dropout becomes a factor of the weights after the softmax, as edge_scale is.
    heads, rows = dst.size(1), promoted((dst, src, value))
    parameters = opmath_dtype(rows)
    kept = graph.dropout_scale(options.dropout, heads, parameters, seed)
    scale = options.scale_by_head(heads, parameters)
    without_dropout = options._replace(
        edge_scale=kept if scale is None else kept * scale,
        dropout=0.0,
        seed=None,
        return_weights=None if returned is None else "softmax",
        out_dtype=options.dtype_of_results(promoted((att,), rows)),
    )
    found = attend(graph, score, coefficient, dst, src, value, att, without_dropout)
    if returned != "dropped":
        return found
    return found[0], found[1] * kept.to(found[1].dtype)
