"""Attention over a graph, one call a layer, with no edge tensor behind it; sums and extrema over in-neighbours; and
products with the matrices of types.

Every function takes a :class:`edgeless.Graph` and node tensors, and is differentiable in every floating tensor, any
number of times. Gradients are made by kernels; whoever differentiates those of attention, extrema and sums over
relations (``create_graph=True``, as forces and penalties on gradients do) has them computed again by ops of PyTorch,
with tensors of the edges.
``Ns``/``Nd`` are the graph's numbers of source/destination nodes, ``E`` its edges, ``H`` heads. Edge tensors are in
the graph's original edge order. float16 and bfloat16 rows are read as they are and computed in float32.

Options that all functions share:
    edge_attr (Tensor, optional): edge features ``[E, De]``.
    edge_proj (Tensor, optional): their projection per head; ``t_e = edge_proj @ edge_attr[e]``.
    edge_scale (Tensor, optional): ``[E]`` or ``[E, H]``, multiplies the weights after softmax and dropout.
    dropout (float): probability to drop an attention weight, in [0, 1]; kept ones are divided by ``1 - dropout``.
    seed (int or int64 Tensor [1], optional): of the dropout mask; drawn from torch's generator when None.
    return_weights (str, optional): also return the attention weights ``[E, H]`` in original edge order:
        ``"softmax"`` before dropout, ``"dropped"`` after it.
    out_dtype (torch.dtype, optional): default is the promoted dtype of all inputs.
They raise ValueError for a shape, dtype, device or option that does not fit, and TypeError for a graph, number, seed or
out_dtype that is no such thing, naming the argument, what was expected and what came. Rows without in-edges give 0.
"""

from __future__ import annotations

import math
from typing import Optional, Union

import torch
from torch import Tensor

from . import reference
from .aggregation import neighbor_reduce, sddmm_dot, spmm
from .distributed.graph import LocalGraph
from .engines import keep_blocks
from .functional_checks import cast as _cast
from .functional_checks import expect as _expect
from .functional_checks import expect_dtype as _expect_dtype
from .functional_checks import expect_seed as _expect_seed
from .functional_checks import on_this_rank as _on_this_rank
from .functional_checks import promoted as _promoted
from .functional_checks import runs_reference as _runs_reference
from .graph import Graph
from .graph_checks import check_number, opmath_dtype
from .ops import attention as _attention_op  # noqa: F401  registers the fake kernels of the ops
from .relational import gather_mm, relational_sum, segment_mm

__all__ = [
    "cosine_attention",
    "dot_attention",
    "gat_attention",
    "gather_mm",
    "gatv2_attention",
    "neighbor_reduce",
    "relational_sum",
    "sddmm_dot",
    "segment_mm",
    "spmm",
]

Seed = Union[int, Tensor, None]
_RETURNABLE = ("softmax", "dropped")


def _check_common(
    call, graph, tensors, heads, edge_attr, edge_proj, edge_scale, proj_sizes, dropout, seed,
    return_weights, out_dtype,
):  # fmt: skip
    if (edge_attr is None) != (edge_proj is None):
        missing, given = ("edge_attr", "edge_proj") if edge_attr is None else ("edge_proj", "edge_attr")
        raise ValueError(f"{call}: {given} needs {missing} as well, got None")
    if edge_attr is not None:
        _expect(call, "edge_attr", edge_attr, (graph.num_edges, None), "[E, De]")
        meaning = "[H, De]" if len(proj_sizes) == 1 else "[H, C, De]"
        _expect(call, "edge_proj", edge_proj, (*proj_sizes, edge_attr.size(1)), meaning)
    if edge_scale is not None:
        if isinstance(edge_scale, Tensor) and edge_scale.dim() == 1:
            _expect(call, "edge_scale", edge_scale, (graph.num_edges,), "[E] or [E, H]")
        else:
            _expect(call, "edge_scale", edge_scale, (graph.num_edges, heads), "[E] or [E, H]")
    check_number(call, "dropout", dropout)
    if not 0.0 <= dropout <= 1.0:
        raise ValueError(f"{call}: dropout must lie in [0, 1], got {dropout}")
    if seed is not None:
        _expect_seed(call, seed)
    if return_weights is not None and not (isinstance(return_weights, str) and return_weights in _RETURNABLE):
        raise ValueError(f"{call}: return_weights must be None, 'softmax' or 'dropped', got {return_weights!r}")
    if out_dtype is not None:
        _expect_dtype(call, out_dtype)
    device = graph.device
    for name, tensor in (*tensors, ("edge_attr", edge_attr), ("edge_proj", edge_proj), ("edge_scale", edge_scale)):
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{call}: {name} must be on the graph's device {device}, got {tensor.device}")


def seed_tensor(seed: Seed, device) -> Tensor:
    """``[1]`` int64 for the kernels; drawn from torch's generator where no seed is given."""
    if seed is None:
        return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)
    if isinstance(seed, Tensor):
        return seed.to(device=device, dtype=torch.int64).reshape(1)
    return torch.tensor([seed], dtype=torch.int64, device=device)


def _fused(
    graph, score, coefficient, dst, src, value, att, edge_attr, edge_proj, edge_scale,
    dropout, seed, return_weights, out_dtype, donate=False,
):  # fmt: skip
    out_dtype = out_dtype or _promoted((dst, src, value, att, edge_attr, edge_proj, edge_scale))
    rows = _promoted((dst, src, value))
    parameters = opmath_dtype(rows)
    keys = rows
    if score == "gat":  # its keys are numbers of the nodes: they need not take less, nor make the values take more
        keys, rows = parameters, rows if rows == torch.float64 else value.dtype
    if score != "gat" or edge_attr is None or edge_attr.dtype != parameters:
        edge_attr = _cast(edge_attr, rows)
    if score == "gat" and src.is_cuda and keys not in (dst.dtype, src.dtype):  # one launch, not two
        dst, src = torch.ops.edgeless.cast_all([dst, src], keys)
    dst, src, value = _cast(dst, keys), _cast(src, keys), _cast(value, rows)
    if att is not None and att.dtype != rows:  # the ops take either
        att = _cast(att, parameters)
    edge_proj, edge_scale = _cast(edge_proj, parameters), _cast(edge_scale, parameters)
    if edge_scale is not None and edge_scale.dim() == 1:
        edge_scale = edge_scale.unsqueeze(1).expand(-1, dst.size(1))
    if dropout > 0 and type(graph) is LocalGraph:
        return _dropped_by_number(
            graph, score, coefficient, dst, src, value, att, edge_attr, edge_proj, edge_scale,
            dropout, seed, return_weights, out_dtype, donate,
        )  # fmt: skip
    seed = seed_tensor(seed, dst.device) if dropout > 0 else None
    by_edge = dropout > 0 or return_weights is not None or edge_attr is not None or edge_scale is not None
    csr = graph.csr_arrays(by_edge)
    # On CUDA, the gradient of gatv2's attention vector is made over both directions.
    by_src = [src, value, att if src.is_cuda and score == "gatv2" else None]
    needs_csc = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in by_src)
    csc = graph.csc_arrays(by_edge) if needs_csc else []
    # What is computed of edges by the features stands in the order of the CSR there.
    by_id = edge_scale is not None or edge_attr is None or score == "gatv2"
    if csc and src.is_cuda and not by_id and type(graph) is Graph:
        csc = graph.csc_with_places()
    kernel_out = out_dtype if out_dtype in (rows, parameters) else parameters
    if score == "dot" and not by_edge:
        keep_blocks(graph, src, rows, src.size(1), src.size(2))
    out, stats = torch.ops.edgeless.attention(
        dst, src, value, att, edge_attr, edge_proj, edge_scale, csr, csc, seed, score, coefficient, dropout, kernel_out,
        graph.max_degrees_at_hand(), donate and return_weights is None,  # weights need the rows in their own backward
    )  # fmt: skip
    out = _cast(out, out_dtype)
    if return_weights is None:
        return out
    rate = dropout if return_weights == "dropped" else 0.0
    weights = torch.ops.edgeless.attention_weights(
        stats, dst, src, att, edge_attr, edge_proj, csr, csc, seed if rate > 0 else None, score, coefficient, rate
    )
    return out, _cast(weights, out_dtype)


def _dropped_by_number(
    graph, score, coefficient, dst, src, value, att, edge_attr, edge_proj, edge_scale,
    dropout, seed, return_weights, out_dtype, donate,
):  # fmt: skip
    """:func:`_fused` where the ids that dropout draws by, the whole graph's, are not those of the edge tensors here."""
    seed = seed_tensor(seed, dst.device)
    if edge_attr is edge_scale is return_weights is None:
        return _fused(
            graph.numbered, score, coefficient, dst, src, value, att, None, None, None, dropout, seed, None, out_dtype,
            donate,
        )  # fmt: skip
    heads = dst.size(1)
    kept = graph.dropout_scale(dropout, heads, opmath_dtype(dst.dtype), seed)
    scale = kept if edge_scale is None else kept * (edge_scale.unsqueeze(1) if edge_scale.dim() == 1 else edge_scale)
    weights = None if return_weights is None else "softmax"
    found = _fused(
        graph, score, coefficient, dst, src, value, att, edge_attr, edge_proj, scale, 0.0, None, weights, out_dtype
    )
    if return_weights != "dropped":
        return found
    return found[0], found[1] * kept.to(found[1].dtype)


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
    seed: Seed = None,
    return_weights: Optional[str] = None,
    out_dtype: Optional[torch.dtype] = None,
    donate: bool = False,
):
    r"""GATv2 (Brody, Alon, Yahav: "How Attentive are Graph Attention Networks?", ICLR 2022, equation 7).

    .. math:: o_i = \sum_j \mathrm{softmax}_j(a^\top \mathrm{LeakyReLU}(x^l_j + x^r_i + t_{ij}))\, x^l_j

    Args:
        graph (edgeless.Graph): messages flow from sources to destinations.
        x_l (Tensor): projected sources ``[Ns, H, C]``; keys and values at once.
        x_r (Tensor): projected destinations ``[Nd, H, C]``.
        att (Tensor): attention vector ``[H, C]``.
        negative_slope (float): of the LeakyReLU.
        edge_proj (Tensor, optional): ``[H, C, De]``; the edge term enters the logit only.
        donate (bool): x_l has no other use than this call: a backward that is the last one may write its gradient over
            it, and allocates no second set of rows. Without effect under ``return_weights`` and with edge tensors.

    The other options, and what is raised, stand at the head of :mod:`edgeless.functional`.

    Returns:
        Tensor ``[Nd, H, C]``, or ``(out, weights [E, H])`` with ``return_weights``.
    """
    call = "gatv2_attention"
    if type(graph) is not Graph:
        graph, seed, x_l = _on_this_rank(call, graph, dropout, seed, x_l)
    check_number(call, "negative_slope", negative_slope)
    _expect(call, "x_l", x_l, (graph.num_src, None, None), "[Ns, H, C]")
    _, heads, channels = x_l.shape
    _expect(call, "x_r", x_r, (graph.num_dst, heads, channels), "[Nd, H, C]")
    _expect(call, "att", att, (heads, channels), "[H, C]")
    _check_common(
        call, graph, (("x_l", x_l), ("x_r", x_r), ("att", att)), heads,
        edge_attr, edge_proj, edge_scale, (heads, channels), dropout, seed, return_weights, out_dtype,
    )  # fmt: skip
    if _runs_reference(call, x_l.device):
        return reference.gatv2_attention(
            graph, x_l, x_r, att, negative_slope=negative_slope, edge_attr=edge_attr, edge_proj=edge_proj,
            edge_scale=edge_scale, dropout=dropout, seed=seed, return_weights=return_weights, out_dtype=out_dtype,
        )  # fmt: skip
    return _fused(
        graph, "gatv2", negative_slope, x_r, x_l, None, att, edge_attr, edge_proj, edge_scale,
        dropout, seed, return_weights, out_dtype, donate,
    )  # fmt: skip


def gat_attention(
    graph,
    x: Tensor,
    a_l: Tensor,
    a_r: Optional[Tensor] = None,
    *,
    negative_slope: float = 0.2,
    edge_attr: Optional[Tensor] = None,
    edge_proj: Optional[Tensor] = None,
    edge_scale: Optional[Tensor] = None,
    dropout: float = 0.0,
    seed: Seed = None,
    return_weights: Optional[str] = None,
    out_dtype: Optional[torch.dtype] = None,
):
    r"""GAT (Veličković et al.: "Graph Attention Networks", ICLR 2018, equation 3), with the two halves of the attention
    vector already applied to the nodes.

    .. math:: o_i = \sum_j \mathrm{softmax}_j(\mathrm{LeakyReLU}(a^l_j + a^r_i + t_{ij}))\, x_j

    Args:
        graph (edgeless.Graph): messages flow from sources to destinations.
        x (Tensor): values ``[Ns, H, C]``.
        a_l (Tensor): logit of a source ``[Ns, H]``.
        a_r (Tensor, optional): logit of a destination ``[Nd, H]``; None is zero.
        negative_slope (float): of the LeakyReLU.
        edge_proj (Tensor, optional): ``[H, De]``; the edge term enters the logit only.

    The other options, and what is raised, stand at the head of :mod:`edgeless.functional`.

    Returns:
        Tensor ``[Nd, H, C]``, or ``(out, weights [E, H])`` with ``return_weights``.
    """
    call = "gat_attention"
    if type(graph) is not Graph:
        graph, seed, x, a_l = _on_this_rank(call, graph, dropout, seed, x, a_l)
    check_number(call, "negative_slope", negative_slope)
    _expect(call, "x", x, (graph.num_src, None, None), "[Ns, H, C]")
    heads = x.size(1)
    _expect(call, "a_l", a_l, (graph.num_src, heads), "[Ns, H]")
    if a_r is not None:
        _expect(call, "a_r", a_r, (graph.num_dst, heads), "[Nd, H]")
    _check_common(
        call, graph, (("x", x), ("a_l", a_l), ("a_r", a_r)), heads,
        edge_attr, edge_proj, edge_scale, (heads,), dropout, seed, return_weights, out_dtype,
    )  # fmt: skip
    if _runs_reference(call, x.device):
        return reference.gat_attention(
            graph, x, a_l, a_r, negative_slope=negative_slope, edge_attr=edge_attr, edge_proj=edge_proj,
            edge_scale=edge_scale, dropout=dropout, seed=seed, return_weights=return_weights, out_dtype=out_dtype,
        )  # fmt: skip
    if a_r is None:
        a_r = a_l.new_zeros(graph.num_dst, heads)
    proj = None if edge_proj is None else edge_proj.unsqueeze(1)
    return _fused(
        graph, "gat", negative_slope, a_r, a_l, x, None, edge_attr, proj, edge_scale,
        dropout, seed, return_weights, out_dtype,
    )  # fmt: skip


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
    seed: Seed = None,
    return_weights: Optional[str] = None,
    out_dtype: Optional[torch.dtype] = None,
    donate: bool = False,
):
    r"""Scaled dot-product attention over the edges (Shi et al.: "Masked Label Prediction", IJCAI 2021, equations 3-4).

    .. math:: o_i = \sum_j \mathrm{softmax}_j(s\, q_i^\top (k_j + t_{ij}))\, (v_j + t_{ij})

    Args:
        graph (edgeless.Graph): messages flow from sources to destinations.
        q (Tensor): queries ``[Nd, H, D]``.
        k (Tensor): keys ``[Ns, H, D]``.
        v (Tensor): values ``[Ns, H, C]``; C may differ from D when there is no edge term.
        scale (float, optional): ``s``; default ``1 / sqrt(D)``.
        edge_proj (Tensor, optional): ``[H, C, De]``; the edge term enters key and value.
        donate (bool): k and v have no other use than this call: a backward that is the last one may write their
            gradients over them, and allocates no second set of rows. Without effect under ``return_weights`` and with
            edge tensors.

    The other options, and what is raised, stand at the head of :mod:`edgeless.functional`.

    Returns:
        Tensor ``[Nd, H, C]``, or ``(out, weights [E, H])`` with ``return_weights``.
    """
    call = "dot_attention"
    if type(graph) is not Graph:
        graph, seed, k, v = _on_this_rank(call, graph, dropout, seed, k, v)
    _expect(call, "q", q, (graph.num_dst, None, None), "[Nd, H, D]")
    _, heads, dim = q.shape
    _expect(call, "k", k, (graph.num_src, heads, dim), "[Ns, H, D]")
    _expect(call, "v", v, (graph.num_src, heads, None if edge_attr is None else dim), "[Ns, H, C]")
    _check_common(
        call, graph, (("q", q), ("k", k), ("v", v)), heads,
        edge_attr, edge_proj, edge_scale, (heads, dim), dropout, seed, return_weights, out_dtype,
    )  # fmt: skip
    if scale is not None:
        check_number(call, "scale", scale)
    if _runs_reference(call, q.device):
        return reference.dot_attention(
            graph, q, k, v, scale=scale, edge_attr=edge_attr, edge_proj=edge_proj, edge_scale=edge_scale,
            dropout=dropout, seed=seed, return_weights=return_weights, out_dtype=out_dtype,
        )  # fmt: skip
    if scale is None:
        scale = 1 / math.sqrt(dim) if dim else 1.0
    return _fused(
        graph, "dot", scale, q, k, v, None, edge_attr, edge_proj, edge_scale,
        dropout, seed, return_weights, out_dtype, donate,
    )  # fmt: skip


def cosine_attention(
    graph,
    x: Tensor,
    x_dst: Optional[Tensor] = None,
    beta: Union[float, Tensor] = 1.0,
    *,
    eps: float = 1e-12,
    edge_scale: Optional[Tensor] = None,
    dropout: float = 0.0,
    seed: Seed = None,
    return_weights: Optional[str] = None,
    out_dtype: Optional[torch.dtype] = None,
):
    r"""Attention by cosine similarity (Thekumparampil et al.: "Attention-based Graph Neural Network for
    Semi-supervised Learning", 2018, equation 4).

    .. math:: o_i = \sum_j \mathrm{softmax}_j(\beta \cos(x^r_i, x_j))\, x_j

    Args:
        graph (edgeless.Graph): messages flow from sources to destinations.
        x (Tensor): sources ``[Ns, H, C]``; keys and values at once.
        x_dst (Tensor, optional): destinations ``[Nd, H, C]``; None is ``x``, in a graph with Nd = Ns.
        beta (float or Tensor): ``[1]`` or one for every head, ``[H]``.
        eps (float): a shorter norm counts as this one, as in :func:`torch.nn.functional.normalize`.

    The other options, and what is raised, stand at the head of :mod:`edgeless.functional`; there are no edge features.

    Returns:
        Tensor ``[Nd, H, C]``, or ``(out, weights [E, H])`` with ``return_weights``.
    """
    call = "cosine_attention"
    if type(graph) is not Graph:
        x_dst = x if x_dst is None else x_dst
        graph, seed, x = _on_this_rank(call, graph, dropout, seed, x)
    _expect(call, "x", x, (graph.num_src, None, None), "[Ns, H, C]")
    _, heads, channels = x.shape
    if x_dst is not None:
        _expect(call, "x_dst", x_dst, (graph.num_dst, heads, channels), "[Nd, H, C]")
    elif graph.num_dst != graph.num_src:
        raise ValueError(
            f"{call}: x_dst must be a Tensor for a graph with {graph.num_src} source and {graph.num_dst} destination "
            "nodes, got None"
        )
    given_beta = beta if isinstance(beta, Tensor) else None
    if given_beta is not None:
        _expect(call, "beta", beta, (1 if beta.shape == (1,) else heads,), "[1] or [H]")
    elif not isinstance(beta, (int, float)):
        raise ValueError(f"{call}: beta must be a number or a Tensor, got {type(beta).__name__}")
    check_number(call, "eps", eps)
    if not eps >= 0:
        raise ValueError(f"{call}: eps must not be negative, got {eps}")
    _check_common(
        call, graph, (("x", x), ("x_dst", x_dst), ("beta", given_beta)), heads,
        None, None, edge_scale, (), dropout, seed, return_weights, out_dtype,
    )  # fmt: skip
    options = {"edge_scale": edge_scale, "dropout": dropout, "seed": seed, "return_weights": return_weights}
    if _runs_reference(call, x.device):
        return reference.cosine_attention(graph, x, x_dst, beta, eps=eps, out_dtype=out_dtype, **options)
    out_dtype = out_dtype or _promoted((x, x_dst, given_beta, edge_scale))
    rows = _promoted((x, x_dst))
    if given_beta is None:
        beta = torch.full((1,), float(beta), dtype=opmath_dtype(rows), device=x.device)
    return _fused(
        graph, "cosine", eps, x if x_dst is None else x_dst, x, None, beta.expand(heads).unsqueeze(1), None, None,
        edge_scale,
        dropout, seed, return_weights, out_dtype,
    )  # fmt: skip
