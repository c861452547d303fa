"""Bare aggregations by name: their inputs, and how edgeless, plain PyTorch, DGL and torch.sparse compute them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import edgeless
from edgeless import functional, reference

from .graphs import BenchGraph

Prepare = Callable[[BenchGraph, torch.dtype], Any]
ATTENTION = ("gatv2", "gat", "gt")


@dataclass(frozen=True)
class Op:
    """One aggregation.

    Attributes:
        shapes: (nodes, heads, channels) -> shapes of the inputs, all differentiated.
        edgeless, plain: (edgeless.Graph, *inputs) -> output; for attention also with ``dropout``, a probability.
        others: peer -> (prepare, compute); prepare makes the peer's own graph, which compute takes with the inputs and,
            for attention, with ``dropout``.
    """

    shapes: Callable[[int, int, int], list[tuple]]
    edgeless: Callable[..., Tensor]
    plain: Callable[..., Tensor]
    others: dict[str, tuple[Prepare, Callable[..., Tensor]]] = field(default_factory=dict)


def parse(name: str) -> tuple[str, int, int]:
    """ "gatv2_H8_D128" -> ("gatv2", 8, 128), "spmm_both_F512" -> ("spmm_both", 1, 512); ValueError for other names."""
    size = r"([1-9]\d{0,8})"
    match = re.fullmatch(rf"({'|'.join(ATTENTION)})_H{size}_D{size}|(spmm_none|spmm_both|min|max)_F{size}", name)
    if match is None:
        known = "gatv2_H8_D128, gat_H4_D32, gt_H4_D128, spmm_none_F512, spmm_both_F512, min_F512 or max_F512"
        raise ValueError(f"an aggregation is called {known}, got {name!r}")
    attention, heads, dim, other, width = match.groups()
    return (attention, int(heads), int(dim)) if attention else (other, 1, int(width))


def graph_of(graph: BenchGraph) -> edgeless.Graph:
    """The handle with its CSR and CSC built: they are part of the graph, as in the peers' formats."""
    n = graph.num_nodes
    handle = edgeless.Graph.from_edge_index(graph.edge_index, n, n, validate=False)
    _ = handle.csr, handle.csc
    return handle


def _degree_weights(graph: BenchGraph, dtype: torch.dtype) -> Tensor:
    """1 / sqrt(d_i d_j) of every edge [E], in- and out-degrees, as norm="both" weighs it."""
    src, dst = graph.edge_index
    out_degree = torch.bincount(src, minlength=graph.num_nodes).clamp(min=1)
    in_degree = torch.bincount(dst, minlength=graph.num_nodes).clamp(min=1)
    return (1 / (out_degree[src] * in_degree[dst]).double().sqrt()).to(dtype)


# DGL -----------------------------------------------------------------------------------------------------------------


def _dgl_graph(graph: BenchGraph, dtype: torch.dtype):
    import dgl

    return dgl.graph(tuple(graph.edge_index), num_nodes=graph.num_nodes)


def _dgl_weighted(graph: BenchGraph, dtype: torch.dtype):
    return _dgl_graph(graph, dtype), _degree_weights(graph, dtype).unsqueeze(1)


def _dgl_attend(graph, logits: Tensor, values: Tensor, dropout: float) -> Tensor:
    import dgl

    weights = dgl.ops.edge_softmax(graph, logits)
    return dgl.ops.u_mul_e_sum(graph, values, F.dropout(weights, dropout) if dropout else weights)


def _dgl_gatv2(graph, x_l: Tensor, x_r: Tensor, att: Tensor, dropout: float = 0.0) -> Tensor:
    import dgl

    logits = (F.leaky_relu(dgl.ops.u_add_v(graph, x_l, x_r), 0.2) * att).sum(-1, keepdim=True)
    return _dgl_attend(graph, logits, x_l, dropout)


def _dgl_gat(graph, x: Tensor, a_l: Tensor, a_r: Tensor, dropout: float = 0.0) -> Tensor:
    import dgl

    return _dgl_attend(graph, F.leaky_relu(dgl.ops.u_add_v(graph, a_l, a_r), 0.2).unsqueeze(-1), x, dropout)


def _dgl_dot(graph, q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    import dgl

    return _dgl_attend(graph, dgl.ops.u_dot_v(graph, k, q) / math.sqrt(q.shape[-1]), v, dropout)


def _dgl_spmm(graph, x: Tensor) -> Tensor:
    import dgl

    return dgl.ops.copy_u_sum(graph, x)


def _dgl_weighted_spmm(graph_and_weight, x: Tensor) -> Tensor:
    import dgl

    graph, weight = graph_and_weight
    return dgl.ops.u_mul_e_sum(graph, x, weight)


def _dgl_extremum(reduce: str) -> Callable[..., Tensor]:
    def compute(graph, x: Tensor) -> Tensor:
        import dgl

        return getattr(dgl.ops, f"copy_u_{reduce}")(graph, x)

    return compute


# torch.sparse --------------------------------------------------------------------------------------------------------


def _torch_csr(weighted: bool) -> Prepare:
    def prepare(graph: BenchGraph, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        src, dst = graph.edge_index
        weight = _degree_weights(graph, dtype) if weighted else torch.ones_like(src, dtype=dtype)
        size = (graph.num_nodes, graph.num_nodes)
        coo = torch.sparse_coo_tensor(torch.stack([dst, src]), weight, size)
        return coo.to_sparse_csr(), coo.t().coalesce().to_sparse_csr()

    return prepare


class _TorchSpMM(torch.autograd.Function):
    """torch's own backward of a CSR product transposes on every call; a user who cares keeps the transpose."""

    @staticmethod
    def forward(ctx, matrix, transpose, x):
        ctx.transpose = transpose
        return matrix @ x

    @staticmethod
    def backward(ctx, grad):
        return None, None, ctx.transpose @ grad


def _torch_product(matrices: tuple[Tensor, Tensor], x: Tensor) -> Tensor:
    return _TorchSpMM.apply(*matrices, x)


# The table -----------------------------------------------------------------------------------------------------------


def _plain_both(graph, x: Tensor) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    degrees = (graph.out_degrees(), graph.in_degrees())
    return reference.spmm(graph, x, None, *(degree.to(dtype).clamp(min=1).rsqrt() for degree in degrees))


def _extremum(reduce: str) -> Op:
    return Op(
        lambda n, h, c: [(n, c)],
        # As in every peer but the plain one, the gradient of an element goes to one edge.
        lambda graph, x: functional.neighbor_reduce(graph, x, reduce, ties="first"),
        # Not the reference's default: that one loops over nodes.
        lambda graph, x: reference.neighbor_reduce(graph, x, reduce, ties="scatter"),
        {"dgl": (_dgl_graph, _dgl_extremum(reduce))},
    )


OPS = {
    "gatv2": Op(
        lambda n, h, c: [(n, h, c), (n, h, c), (h, c)],  # x_l, x_r, att
        functional.gatv2_attention,
        reference.gatv2_attention,
        {"dgl": (_dgl_graph, _dgl_gatv2)},
    ),
    "gat": Op(
        lambda n, h, c: [(n, h, c), (n, h), (n, h)],  # x, a_l, a_r
        functional.gat_attention,
        reference.gat_attention,
        {"dgl": (_dgl_graph, _dgl_gat)},
    ),
    "gt": Op(
        lambda n, h, c: [(n, h, c)] * 3,  # q, k, v
        functional.dot_attention,
        reference.dot_attention,
        {"dgl": (_dgl_graph, _dgl_dot)},
    ),
    "spmm_none": Op(
        lambda n, h, c: [(n, c)],
        functional.spmm,
        reference.spmm,
        {"dgl": (_dgl_graph, _dgl_spmm), "torch-csr": (_torch_csr(False), _torch_product)},
    ),
    "spmm_both": Op(
        lambda n, h, c: [(n, c)],
        lambda graph, x: functional.spmm(graph, x, norm="both"),
        _plain_both,
        {"dgl": (_dgl_weighted, _dgl_weighted_spmm), "torch-csr": (_torch_csr(True), _torch_product)},
    ),
    "min": _extremum("min"),
    "max": _extremum("max"),
}
