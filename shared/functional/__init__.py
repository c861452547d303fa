"""Graph attention without a tensor of the size [E, H, C], as one differentiable call a layer; and, from modules of
their own, sums and extrema over in-neighbours and products with the matrices of types.

Every function takes a :class:`edgeless.Graph` and node tensors. In shapes, ``Ns`` and ``Nd`` are the graph's numbers of
source and destination nodes, ``E`` is its number of edges, ``H`` the number of attention heads and ``C`` or ``D`` the
channels of a head. Rows are floating: float32, float64, bfloat16 or float16. 16-bit rows are read as they are and
computed with in float32. Edge tensors are in the original order of the graph's edges. A destination without in-edges
gets zeros.

Every function is differentiable in every floating tensor, any number of times. First derivatives come from kernels.
Second derivatives of attention, of extrema and of sums over relations (``create_graph=True``, as forces and penalties
on gradients need) are computed by ops of PyTorch, which do allocate tensors of the size of the edges.

All attention functions share these options, which :class:`edgeless.functional.edge_options.EdgeOptions` checks:

* ``edge_attr`` (Tensor, optional): edge features ``[E, De]``; needs edge_proj.
* ``edge_proj`` (Tensor, optional): their projection per head, ``[H, De]`` for gat and ``[H, C, De]`` for gatv2 and dot.
  The edge term of an edge e is ``t_e = edge_proj @ edge_attr[e]``.
* ``edge_scale`` (Tensor, optional): ``[E]`` or ``[E, H]``; multiplies the attention weights after softmax and dropout.
* ``dropout`` (float): probability to drop an attention weight, in [0, 1]; kept ones are divided by ``1 - dropout``.
* ``seed`` (int or int64 Tensor [1], optional): seed of the dropout mask; None draws one from torch's generator.
* ``return_weights`` (str, optional): also return the attention weights ``[E, H]``: ``"softmax"`` for those before
  dropout, ``"dropped"`` for those after it. Neither includes edge_scale.
* ``out_dtype`` (torch.dtype, optional): dtype of all results; None is the promoted dtype of all inputs.

All functions raise these errors, which name the argument, what was expected and what came:

* ValueError: a shape, dtype, device or option does not fit.
* TypeError: the graph is no graph, or a number, the seed or out_dtype is no such thing.
* NotFusedError: under ``edgeless.backend("fused")``, where no kernel can run.
"""

from __future__ import annotations

import math
from typing import Optional, Union

import torch
from torch import Tensor

from .. import reference
from ..checks import check_number, opmath_dtype
from ..graph.handle import Graph
from .aggregation import neighbor_reduce, sddmm_dot, spmm
from .attention import attend
from .checks import expect as _expect
from .checks import on_this_rank as _on_this_rank
from .checks import promoted as _promoted
from .checks import runs_reference as _runs_reference
from .dropout import Seed
from .edge_options import EdgeOptions
from .message_passing import message_passing
from .relational import gather_mm, relational_sum, segment_mm

__all__ = [
    "cosine_attention",
    "dot_attention",
    "gat_attention",
    "gather_mm",
    "gatv2_attention",
    "message_passing",
    "neighbor_reduce",
    "relational_sum",
    "sddmm_dot",
    "segment_mm",
    "spmm",
]


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
        x_l (Tensor): projected sources ``[Ns, H, C]``, which are keys and values at once.
        x_r (Tensor): projected destinations ``[Nd, H, C]``.
        att (Tensor): attention vector ``[H, C]``.
        negative_slope (float): slope of the LeakyReLU for negative numbers.
        edge_proj (Tensor, optional): ``[H, C, De]``; the edge term enters the logit only.
        donate (bool): promises that the caller uses x_l for nothing but this call. The last backward may then write the
            gradient of x_l over x_l, and allocates no second tensor of its size. No effect with ``return_weights`` or
            with edge tensors.

    The other options and the errors are described at the head of :mod:`edgeless.functional`.

    Returns:
        Tensor ``[Nd, H, C]``, or ``(out, weights [E, H])`` with ``return_weights``.

    Example:
        >>> import torch
        >>> from edgeless import Graph, functional
        >>> graph = Graph.from_edge_index(torch.tensor([[0, 1, 2, 0], [1, 2, 0, 2]]))
        >>> x_l, x_r, att = torch.randn(3, 2, 4), torch.randn(3, 2, 4), torch.randn(2, 4)
        >>> out, weights = functional.gatv2_attention(graph, x_l, x_r, att, return_weights="softmax")
        >>> out.shape, weights.shape
        (torch.Size([3, 2, 4]), torch.Size([4, 2]))
    """
    call = "gatv2_attention"
    if type(graph) is not Graph:
        graph, seed, x_l = _on_this_rank(call, graph, dropout, seed, x_l)
    check_number(call, "negative_slope", negative_slope)
    _expect(call, "x_l", x_l, (graph.num_src, None, None), "[Ns, H, C]")
    _, heads, channels = x_l.shape
    _expect(call, "x_r", x_r, (graph.num_dst, heads, channels), "[Nd, H, C]")
    _expect(call, "att", att, (heads, channels), "[H, C]")
    options = EdgeOptions(edge_attr, edge_proj, edge_scale, dropout, seed, return_weights, out_dtype)
    options.check(call, graph, heads, (heads, channels), (("x_l", x_l), ("x_r", x_r), ("att", att)))
    if _runs_reference(call, x_l.device):
        return reference.attend_gatv2(graph, x_l, x_r, att, negative_slope, options)
    return attend(graph, "gatv2", negative_slope, x_r, x_l, None, att, options, donate)


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
        x (Tensor): values of the sources ``[Ns, H, C]``.
        a_l (Tensor): what a source adds to the logit, ``[Ns, H]``.
        a_r (Tensor, optional): what a destination adds to the logit, ``[Nd, H]``; None is zero.
        negative_slope (float): slope of the LeakyReLU for negative numbers.
        edge_proj (Tensor, optional): ``[H, De]``; the edge term enters the logit only.

    The other options and the errors are described at the head of :mod:`edgeless.functional`.

    Returns:
        Tensor ``[Nd, H, C]``, or ``(out, weights [E, H])`` with ``return_weights``.

    Example:
        >>> import torch
        >>> from edgeless import Graph, functional
        >>> graph = Graph.from_edge_index(torch.tensor([[0, 1, 2, 0], [1, 2, 0, 2]]))
        >>> x, a_l, a_r = torch.randn(3, 2, 4), torch.randn(3, 2), torch.randn(3, 2)
        >>> edge_attr, edge_proj = torch.randn(4, 5), torch.randn(2, 5)
        >>> functional.gat_attention(graph, x, a_l, a_r, edge_attr=edge_attr, edge_proj=edge_proj).shape
        torch.Size([3, 2, 4])
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
    options = EdgeOptions(edge_attr, edge_proj, edge_scale, dropout, seed, return_weights, out_dtype)
    options.check(call, graph, heads, (heads,), (("x", x), ("a_l", a_l), ("a_r", a_r)))
    if _runs_reference(call, x.device):
        return reference.attend_gat(graph, x, a_l, a_r, negative_slope, options)
    if a_r is None:
        a_r = a_l.new_zeros(graph.num_dst, heads)
    return attend(graph, "gat", negative_slope, a_r, a_l, x, None, options)


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
        q (Tensor): queries of the destinations ``[Nd, H, D]``.
        k (Tensor): keys of the sources ``[Ns, H, D]``.
        v (Tensor): values of the sources ``[Ns, H, C]``; with edge features C must be D.
        scale (float, optional): the factor ``s`` of the logits; None is ``1 / sqrt(D)``.
        edge_proj (Tensor, optional): ``[H, D, De]``; the edge term is added to the key and to the value.
        donate (bool): promises that the caller uses k and v for nothing but this call. The last backward may then write
            their gradients over them, and allocates no second tensors of their size. No effect with
            ``return_weights`` or with edge tensors.

    The other options and the errors are described at the head of :mod:`edgeless.functional`.

    Returns:
        Tensor ``[Nd, H, C]``, or ``(out, weights [E, H])`` with ``return_weights``.

    Example:
        >>> import torch
        >>> from edgeless import Graph, functional
        >>> graph = Graph.from_edge_index(torch.tensor([[0, 1, 2, 0], [1, 2, 0, 2]]))
        >>> q, k, v = torch.randn(3, 2, 4), torch.randn(3, 2, 4), torch.randn(3, 2, 8)
        >>> functional.dot_attention(graph, q, k, v, dropout=0.5, seed=7).shape
        torch.Size([3, 2, 8])
    """
    call = "dot_attention"
    if type(graph) is not Graph:
        graph, seed, k, v = _on_this_rank(call, graph, dropout, seed, k, v)
    _expect(call, "q", q, (graph.num_dst, None, None), "[Nd, H, D]")
    _, heads, dim = q.shape
    _expect(call, "k", k, (graph.num_src, heads, dim), "[Ns, H, D]")
    _expect(call, "v", v, (graph.num_src, heads, None if edge_attr is None else dim), "[Ns, H, C]")
    options = EdgeOptions(edge_attr, edge_proj, edge_scale, dropout, seed, return_weights, out_dtype)
    options.check(call, graph, heads, (heads, dim), (("q", q), ("k", k), ("v", v)))
    if scale is not None:
        check_number(call, "scale", scale)
    if _runs_reference(call, q.device):
        return reference.attend_dot(graph, q, k, v, scale, options)
    if scale is None:
        scale = 1 / math.sqrt(dim) if dim else 1.0
    return attend(graph, "dot", scale, q, k, v, None, options, donate)


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
        x (Tensor): sources ``[Ns, H, C]``, which are keys and values at once.
        x_dst (Tensor, optional): destinations ``[Nd, H, C]``; None is ``x``, for a graph with Nd = Ns.
        beta (float or Tensor): factor of the cosine, one number or ``[1]`` for all heads, or ``[H]``.
        eps (float): least norm that a row is divided by, as in :func:`torch.nn.functional.normalize`.

    The other options and the errors are described at the head of :mod:`edgeless.functional`; there are no edge
    features.

    Returns:
        Tensor ``[Nd, H, C]``, or ``(out, weights [E, H])`` with ``return_weights``.

    Example:
        >>> import torch
        >>> from edgeless import Graph, functional
        >>> graph = Graph.from_edge_index(torch.tensor([[0, 1, 2, 0], [1, 2, 0, 2]]))
        >>> functional.cosine_attention(graph, torch.randn(3, 2, 4), beta=2.0).shape
        torch.Size([3, 2, 4])
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
    options = EdgeOptions(None, None, edge_scale, dropout, seed, return_weights, out_dtype)
    options.check(call, graph, heads, (), (("x", x), ("x_dst", x_dst), ("beta", given_beta)))
    if _runs_reference(call, x.device):
        return reference.attend_cosine(graph, x, x_dst, beta, eps, options)
    if given_beta is None:  # a number takes no part in the promotion of dtypes, but the tensor made of it would
        rows = _promoted((x, x_dst))
        out_dtype = options.dtype_of_results(rows)
        options = EdgeOptions(None, None, edge_scale, dropout, seed, return_weights, out_dtype)
        beta = torch.full((1,), float(beta), dtype=opmath_dtype(rows), device=x.device)
    query = x if x_dst is None else x_dst
    return attend(graph, "cosine", eps, query, x, None, beta.expand(heads).unsqueeze(1), options)
