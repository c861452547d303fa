"""Sums and extrema over in-neighbours, and sampled products. The public names are in ``edgeless.functional``."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from .. import reference
from ..checks import check_choice, check_number, compiling, opmath_dtype, surely
from ..choices.engines import keep_plans
from ..distributed.graph import DistGraph
from ..graph.handle import Graph
from ..ops import reduction as _reduction  # noqa: F401  registers the fake kernels of the ops
from ..ops import spmm as _spmm_op  # noqa: F401
from .checks import cast, expect, expect_dtype, expect_graph, on_this_rank, promoted, runs_reference

# Calling the overload takes half the time of resolving it by name, which is as long as the sum over a small graph.
_SPMM, _NEIGHBOR_REDUCE = torch.ops.edgeless.spmm.default, torch.ops.edgeless.neighbor_reduce.default

NORMS = ("none", "left", "right", "both")


def _check_device(call: str, graph, **tensors) -> None:
    device = graph.device
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{call}: {name} must be on the graph's device {device}, got {tensor.device}")


def scales(graph, norm: str, reduce: str, dtype: torch.dtype):
    """Returns the source scale ``[Ns]`` and the destination scale ``[Nd]`` of a norm and a reduction; None means 1."""
    src = dst = None
    if norm == "left":
        src = graph.degree_scale("src", -1.0, dtype)
    elif norm == "right":
        dst = graph.degree_scale("dst", -1.0, dtype)
    elif norm == "both":
        src, dst = graph.degree_scale("src", -0.5, dtype), graph.degree_scale("dst", -0.5, dtype)
    if reduce == "mean":
        mean = graph.degree_scale("dst", -1.0, dtype)
        dst = mean if dst is None else dst * mean
    return src, dst


def _check_weight(call: str, graph, x: Tensor, weight: Tensor) -> None:
    if isinstance(weight, Tensor) and weight.dim() == 1:
        expect(call, "weight", weight, (graph.num_edges,), "[E]")
    elif x.dim() == 3:
        expect(call, "weight", weight, (graph.num_edges, x.size(1)), "[E] or [E, H]")
    else:
        expect(call, "weight", weight, (graph.num_edges,), "[E], or [E, H] with x of shape [Ns, H, F],")


def _constant(scale: Tensor, dtype: torch.dtype) -> Tensor:
    return cast(scale.detach() if scale.requires_grad else scale, dtype)


def _as_rows(x: Tensor) -> Tensor:
    """Reshapes ``[N, ..., F]`` to what the ops take: ``[N, F]`` or ``[N, H, F]``."""
    return x if x.dim() <= 3 else x.reshape(x.size(0), x.shape[1:].numel())


def spmm(
    graph,
    x: Tensor,
    weight: Optional[Tensor] = None,
    *,
    norm: str = "none",
    reduce: str = "sum",
    src_scale: Optional[Tensor] = None,
    dst_scale: Optional[Tensor] = None,
    out_dtype: Optional[torch.dtype] = None,
) -> Tensor:
    r"""Weighted sum of the features of in-neighbours.

    .. math:: o_i = d_i \sum_{e = (j, i)} w_e\, s_j\, x_j

    Differentiable, any number of times, in x and weight.

    Args:
        graph (edgeless.Graph): messages flow from sources to destinations.
        x (Tensor): ``[Ns, ..., F]``, float32, float64, bfloat16 or float16. 16-bit types are summed in float32.
        weight (Tensor, optional): ``[E]`` in the graph's original edge order, or ``[E, H]`` for x ``[Ns, H, F]``.
        norm: ``"none"``; ``"left"``: :math:`s_j` is 1 / out-degree; ``"right"``: :math:`d_i` is 1 / in-degree;
            ``"both"``: both are 1 / square root of the degree (Kipf, Welling: "Semi-Supervised Classification with
            Graph Convolutional Networks", ICLR 2017, equation 2). A degree of 0 counts as 1.
        reduce: ``"sum"`` or ``"mean"``, which divides by the in-degree.
        src_scale, dst_scale (Tensor, optional): :math:`s` ``[Ns]`` and :math:`d` ``[Nd]`` given directly, without
            gradients. They exclude a norm.
        out_dtype (torch.dtype, optional): default is the promoted dtype of x and weight.
    Returns:
        Tensor ``[Nd, ..., F]``. Rows without in-edges are 0.
    Raises:
        TypeError: a graph, number or dtype of another type.
        ValueError: a shape, dtype, device or option that does not fit.

    Example:
        >>> import torch
        >>> from edgeless import Graph, functional
        >>> graph = Graph.from_edge_index(torch.tensor([[0, 1, 2, 0], [1, 2, 0, 2]]))
        >>> functional.spmm(graph, torch.ones(3, 2), reduce="sum")
        tensor([[1., 1.],
                [1., 1.],
                [2., 2.]])
    """
    call = "spmm"
    expect_graph(call, graph)
    if not isinstance(x, Tensor) or x.dim() < 2:
        came = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{call}: x must be a Tensor of shape [Ns, ..., F], got {came}")
    expect(call, "x", x, (graph.num_src, *[None] * (x.dim() - 1)), "[Ns, ..., F]")
    if weight is not None:
        _check_weight(call, graph, x, weight)
    check_choice(call, "norm", norm, NORMS)
    check_choice(call, "reduce", reduce, ("sum", "mean"))
    for name, scale, size in (("src_scale", src_scale, graph.num_src), ("dst_scale", dst_scale, graph.num_dst)):
        if scale is not None:
            expect(call, name, scale, (size,), "[Ns]" if name == "src_scale" else "[Nd]")
            if norm != "none":
                raise ValueError(f"{call}: {name} goes with norm 'none', got {norm!r}")
    _check_device(call, graph, x=x, weight=weight, src_scale=src_scale, dst_scale=dst_scale)
    if out_dtype is None:
        out_dtype = promoted((x, weight))
    else:
        expect_dtype(call, out_dtype)
    parameters = opmath_dtype(x.dtype)
    by_norm = scales(graph, norm, reduce, parameters)
    src_scale = by_norm[0] if src_scale is None else _constant(src_scale, parameters)
    if dst_scale is not None:
        dst_scale = _constant(dst_scale, parameters)
        dst_scale = dst_scale if by_norm[1] is None else dst_scale * by_norm[1]
    else:
        dst_scale = by_norm[1]
    if type(graph) is DistGraph:
        return _sum_of_parts(graph, x, weight, src_scale, dst_scale, out_dtype)
    if runs_reference(call, x.device, "spmm"):
        return reference.spmm(graph, x, weight, src_scale, dst_scale).to(out_dtype)
    rows = _as_rows(x)
    if weight is not None:
        weight = cast(weight, parameters)
        weight = weight.unsqueeze(1).expand(-1, rows.size(1) if rows.dim() == 3 else 1) if weight.dim() == 1 else weight
    csr = graph.csr_arrays(weight is not None)
    csc = graph.csc_arrays(weight is not None) if torch.is_grad_enabled() and x.requires_grad else []
    keep_plans(graph, x, weight)
    kernel_out = out_dtype if out_dtype in (x.dtype, parameters) else parameters
    out = torch.ops.edgeless.spmm(rows, weight, src_scale, dst_scale, csr, csc, kernel_out, graph.cached_max_degrees())
    return cast(out if x.dim() <= 3 else out.view(graph.num_dst, *x.shape[1:]), out_dtype)


def sum_of_neighbors(graph, x: Tensor, weight: Optional[Tensor] = None, reduce: str = "sum") -> Tensor:
    """:func:`spmm` for layers, which have checked ``x`` ``[Ns, F]`` already except for its number of rows.

    On a small graph the checks take longer than the sum, so without weights they are not repeated.
    """
    if weight is not None or type(graph) is not Graph or x.size(0) != graph.num_src:
        return spmm(graph, x, weight, reduce=reduce)
    dtype = x.dtype
    scale = graph.degree_scale("dst", -1.0, opmath_dtype(dtype)) if reduce == "mean" else None
    csr = graph.csr_arrays(False)
    csc = graph.csc_arrays(False) if torch.is_grad_enabled() and x.requires_grad else []
    degrees = []
    if not x.is_cpu:
        keep_plans(graph, x)
        degrees = graph.cached_max_degrees()
    return _SPMM(x, None, None, scale, csr, csc, dtype, degrees)


def _sum_of_parts(graph: DistGraph, x: Tensor, weight, src_scale, dst_scale, out_dtype: torch.dtype) -> Tensor:
    """:func:`spmm` over a partition; the sum over its own sources overlaps with the exchange of halo rows."""
    if graph.size == 1 or weight is not None:
        src_scale = None if src_scale is None else graph.sources(src_scale)[0]
        (x,) = graph.sources(x)
        return spmm(graph.local, x, weight, src_scale=src_scale, dst_scale=dst_scale, out_dtype=out_dtype)
    own, halo = graph.local.sides
    coming = graph.start(x, join=False)
    total = spmm(own, x, src_scale=src_scale, dst_scale=dst_scale, out_dtype=out_dtype)
    if src_scale is not None:
        (src_scale,) = graph.start(src_scale, join=False).wait()
    others = spmm(halo, *coming.wait(), src_scale=src_scale, dst_scale=dst_scale, out_dtype=out_dtype)
    return total.add_(others)


def sddmm_dot(graph, x_dst: Tensor, x_src: Tensor, *, out_dtype: Optional[torch.dtype] = None) -> Tensor:
    r"""Dot product of the two ends of every edge (a sampled dense-dense matrix product).

    .. math:: p_e = \langle x^{dst}_i, x^{src}_j \rangle, \quad e = (j, i)

    Differentiable, any number of times, in both.

    Args:
        graph (edgeless.Graph): its edges are sampled.
        x_dst (Tensor): ``[Nd, F]`` or ``[Nd, H, F]``.
        x_src (Tensor): ``[Ns, F]`` or ``[Ns, H, F]``, of the same dtype.
        out_dtype (torch.dtype, optional): default is the promoted dtype of both.
    Returns:
        Tensor ``[E]`` or ``[E, H]`` in the graph's original edge order.
    Raises:
        TypeError: a graph or dtype of another type.
        ValueError: a shape, dtype or device that does not fit.

    Example:
        >>> import torch
        >>> from edgeless import Graph, functional
        >>> graph = Graph.from_edge_index(torch.tensor([[0, 1, 2, 0], [1, 2, 0, 2]]))
        >>> functional.sddmm_dot(graph, torch.ones(3, 2, 4), torch.ones(3, 2, 4)).shape
        torch.Size([4, 2])
    """
    call = "sddmm_dot"
    if type(graph) is not Graph:
        graph, _, x_src = on_this_rank(call, graph, 0, None, x_src)
    if not isinstance(x_dst, Tensor) or x_dst.dim() not in (2, 3):
        came = list(x_dst.shape) if isinstance(x_dst, Tensor) else type(x_dst).__name__
        raise ValueError(f"{call}: x_dst must be a Tensor of shape [Nd, F] or [Nd, H, F], got {came}")
    expect(call, "x_dst", x_dst, (graph.num_dst, *[None] * (x_dst.dim() - 1)), "[Nd, F] or [Nd, H, F]")
    expect(call, "x_src", x_src, (graph.num_src, *x_dst.shape[1:]), "[Ns, F] or [Ns, H, F]")
    _check_device(call, graph, x_dst=x_dst, x_src=x_src)
    dtype = promoted((x_dst, x_src))
    if out_dtype is None:
        out_dtype = dtype
    else:
        expect_dtype(call, out_dtype)
    if runs_reference(call, x_dst.device, "sddmm"):
        return reference.sddmm_dot(graph, x_dst, x_src, out_dtype)
    dst, src = cast(x_dst, dtype), cast(x_src, dtype)
    csc = graph.csc_arrays(True) if torch.is_grad_enabled() and src.requires_grad else []
    csr = graph.csr_arrays(True)
    keep_plans(graph, src, sampled=True)
    products = torch.ops.edgeless.sddmm(dst, src, None, None, csr, csc)
    return cast(products if x_dst.dim() == 3 else products.squeeze(1), out_dtype)


def _arg_dtype(graph, ties: str) -> torch.dtype:
    """Returns the narrowest dtype that holds an edge's position within its row, for the argument of an extremum.

    It is int32 while the largest degree is not known without a wait for the GPU. On CUDA the top bit of an argument
    marks an extremum that several edges share; the other bits then count them, and may count the zero of ``scatter``.
    """
    degree = None if compiling() else graph.cached_max_in_degree()
    if degree is None:
        return torch.int32
    if graph.device.type == "cuda" and ties != "first":
        degree = 2 * (degree + 1)
    return torch.uint8 if degree <= 2**8 else torch.int16 if degree <= 2**16 else torch.int32


def gathered_degree(cuda: bool, num_src: int, element_bytes: int, arg_bytes: int, shares: bool) -> int:
    """Returns the mean degree up to which the backward of an extremum gathers over the CSC instead of scattering.

    The gather reads the gradient and the argument of every edge; the scatter writes one number per output element,
    which on the CPU stays in the caches if sources are few. At the limit both take equally long (docs/decisions/0016
    for CUDA, 0018 for the CPU).
    """
    if cuda:
        return (240 if shares else 288) // (element_bytes + arg_bytes)
    return min(16, num_src // 12_500)


def _gathers_gradient(graph, x: Tensor, arg_dtype: torch.dtype, ties: str) -> bool:
    if not (torch.is_grad_enabled() and x.requires_grad):
        return False
    degree = gathered_degree(x.is_cuda, graph.num_src, x.element_size(), arg_dtype.itemsize, ties != "first")
    return surely(graph.num_edges <= degree * graph.num_dst)  # sizes may be unknown until a compiled program runs


def neighbor_reduce(graph, x: Tensor, reduce: str, *, ties: str = "shared", fill: float = 0.0) -> Tensor:
    r"""Minimum or maximum of the features of in-neighbours, element by element. NaN wins, as in ``torch.amax``.

    Args:
        graph (edgeless.Graph): messages flow from sources to destinations.
        x (Tensor): ``[Ns, F]``, float32, float64, bfloat16 or float16.
        reduce: ``"min"`` or ``"max"``.
        ties: how equal extrema divide the gradient. ``"shared"``: in equal parts, as ``torch.amax`` does. ``"first"``:
            the first edge in the row of ``graph.csr`` gets all, as in DGL one edge does. ``"scatter"``: as
            ``torch.scatter_reduce`` into zeros, which PyG uses: in equal parts, of which the zeros themselves keep one
            if the extremum is 0.
        fill: the value of rows without in-edges.
    Returns:
        Tensor ``[Nd, F]`` of x's dtype, differentiable any number of times.
    Raises:
        TypeError: a graph, number or dtype of another type.
        ValueError: a shape, dtype, device or option that does not fit.

    Example:
        >>> import torch
        >>> from edgeless import Graph, functional
        >>> graph = Graph.from_edge_index(torch.tensor([[0, 1, 2, 0], [1, 2, 0, 2]]))
        >>> functional.neighbor_reduce(graph, torch.tensor([[1.0], [5.0], [3.0]]), "max").flatten()
        tensor([3., 1., 5.])
    """
    call = "neighbor_reduce"
    if type(graph) is not Graph:
        graph, _, x = on_this_rank(call, graph, 0, None, x)
    expect(call, "x", x, (graph.num_src, None), "[Ns, F]")
    check_choice(call, "reduce", reduce, ("min", "max"))
    check_choice(call, "ties", ties, ("shared", "first", "scatter"))
    check_number(call, "fill", fill)
    _check_device(call, graph, x=x)
    if runs_reference(call, x.device, "neighbor_reduce"):
        return reference.neighbor_reduce(graph, x, reduce, ties=ties, fill=fill)
    return _extremum(graph, x, reduce, ties, fill)


def extremum_of_neighbors(graph, x: Tensor, reduce: str, ties: str) -> Tensor:
    """:func:`neighbor_reduce` for a layer, as :func:`sum_of_neighbors`."""
    if type(graph) is not Graph or x.size(0) != graph.num_src:
        return neighbor_reduce(graph, x, reduce, ties=ties)
    return _extremum(graph, x, reduce, ties, 0.0)


def _extremum(graph, x: Tensor, reduce: str, ties: str, fill: float) -> Tensor:
    if x.is_cpu and not (compiling() or (torch.is_grad_enabled() and x.requires_grad)):  # the extrema alone
        return _NEIGHBOR_REDUCE(x, graph.csr_arrays(False), [], reduce, fill, torch.bool, ties, [])[0]
    arg_dtype = _arg_dtype(graph, ties)
    gathers = _gathers_gradient(graph, x, arg_dtype, ties)  # a gather looks up CSC edges by their position in the CSR
    csr, csc = graph.csr_arrays(gathers), graph.csc_with_positions() if gathers else []
    degrees = [] if x.is_cpu else graph.cached_max_degrees()
    return _NEIGHBOR_REDUCE(x, csr, csc, reduce, fill, arg_dtype, ties, degrees)[0]
