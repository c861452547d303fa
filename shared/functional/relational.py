"""Products with per-type weights and sums over relations; public through ``edgeless.functional``."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from .. import reference
from ..checks import as_index, check_choice, check_ids, check_integers, compiling, opmath_dtype, surely
from ..graph.handle import Compressed
from ..graph.typed import TypedGraph
from ..ops.graph import coo_to_csr
from ..ops.relational import widths
from ..plan.steps import most_fused_width, takes_widths
from .aggregation import spmm
from .checks import cast, expect, expect_dtype, promoted, runs_reference
from .whole_rows import blocks_of, lacking, longer, longer_matrices, shorter


def _check_operands(call: str, x: Tensor, w: Tensor) -> None:
    expect(call, "x", x, (None, None), "[N, K]")
    expect(call, "w", w, (None, x.size(1), None), "[R, K, M]")
    if w.device != x.device:
        raise ValueError(f"{call}: w must be on x's device {x.device}, got {w.device}")


def _check_index(call: str, name: str, index, shape: str, size: Optional[int], x: Tensor) -> None:
    check_integers(call, name, index, shape)
    if index.dim() != 1 or (size is not None and index.size(0) != size):
        meaning = shape if size is None else f"{shape} = [{size}]"
        raise ValueError(f"{call}: {name} must have shape {meaning}, got {list(index.shape)}")
    if index.device != x.device:
        raise ValueError(f"{call}: {name} must be on x's device {x.device}, got {index.device}")


def segment_mm(x: Tensor, w: Tensor, lengths: Optional[Tensor] = None, *, offsets: Optional[Tensor] = None) -> Tensor:
    r"""Products of consecutive rows with the matrices of their types: rows of type r are multiplied by ``w[r]``.

    Differentiable, any number of times, in x and w. No weight is copied per row, and no type is padded with rows. On
    CUDA, operands whose rows are not whole vectors of 16 bytes are copied to longer rows.

    Args:
        x (Tensor): ``[N, K]``, sorted by type; float32, float64, bfloat16 or float16 (computed in float32).
        w (Tensor): ``[R, K, M]``.
        lengths (Tensor): ``[R]`` integers, the number of rows of every type; they add up to N.
        offsets (Tensor): ``[R + 1]`` integers, in place of lengths: type r has the rows ``offsets[r]`` to
            ``offsets[r + 1]``.
    Returns:
        Tensor ``[N, M]`` of the promoted dtype of x and w.
    Raises:
        TypeError: lengths or offsets is not a Tensor, or both or neither is given.
        ValueError: a shape, dtype or device does not fit, or, on the CPU, a value of lengths or offsets. The host does
            not wait to check values on a GPU: wrong ones fail an assertion on the device, as in torch's indexing.

    Example:
        >>> import torch
        >>> from edgeless import functional
        >>> functional.segment_mm(torch.ones(3, 2), torch.ones(2, 2, 5), torch.tensor([1, 2])).shape
        torch.Size([3, 5])
    """
    call = "segment_mm"
    _check_operands(call, x, w)
    if (lengths is None) == (offsets is None):
        raise TypeError(
            f"{call}: either lengths or offsets must be given, got {'neither' if lengths is None else 'both'}"
        )
    if offsets is None:
        _check_index(call, "lengths", lengths, "[R]", w.size(0), x)
        lengths = lengths.long()  # torch has no cumsum of wide unsigned integers
        offsets = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
        if not compiling() and offsets.device.type == "cpu":
            if w.size(0) and int(lengths.min()) < 0:
                raise ValueError(f"{call}: lengths must not be negative, got {int(lengths.min())}")
            if int(offsets[-1]) != x.size(0):
                raise ValueError(f"{call}: lengths must add up to N = {x.size(0)}, got {int(offsets[-1])}")
    else:
        _check_index(call, "offsets", offsets, "[R + 1]", w.size(0) + 1, x)
        offsets = as_index(offsets)
    dtype = promoted((x, w))
    if runs_reference(call, x.device, "typed_mm"):
        return reference.segment_mm(x, w, offsets)
    return torch.ops.edgeless.typed_mm(cast(x, dtype), cast(w, dtype), offsets, None)


def _check_bias(call: str, bias: Optional[Tensor], num_types: int, width: int, x: Tensor) -> None:
    if bias is None:
        return
    expect(call, "bias", bias, (num_types, width), "[R, M]")
    if bias.device != x.device:
        raise ValueError(f"{call}: bias must be on x's device {x.device}, got {bias.device}")


def _gather_blocks(x: Tensor, w: Tensor, index: Tensor, bias: Optional[Tensor]) -> Tensor:
    """:func:`gather_mm` for block-diagonal ``w`` ``[R, B, K / B, M / B]``: a row becomes B rows of B types."""
    num_types, blocks, width, out_width = w.shape
    # In int64, since ids times B may overflow a narrow dtype.
    of_blocks = index.long().unsqueeze(1) * blocks + torch.arange(blocks, device=index.device)
    bias = None if bias is None else bias.reshape(-1, out_width)
    try:
        out = gather_mm(x.reshape(-1, width), w.reshape(-1, width, out_width), of_blocks.flatten(), bias)
    except IndexError:
        check_ids("gather_mm: index", index.long(), "R", num_types)  # names the caller's types and not the blocks'
        raise
    return out.view(x.size(0), blocks * out_width)


def gather_mm(x: Tensor, w: Tensor, index: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    r"""Products of rows with the matrices of their types: ``out[i] = x[i] @ w[index[i]] + bias[index[i]]``.

    Differentiable, any number of times, in x, w and bias. Rows are read in the order of their types, without a sorted
    copy.

    Args:
        x (Tensor): ``[N, K]``, float32, float64, bfloat16 or float16 (computed in float32).
        w (Tensor): ``[R, K, M]``, or ``[R, B, K / B, M / B]`` for block-diagonal matrices of B blocks.
        index (Tensor): ``[N]`` integers, the type of every row.
        bias (Tensor, optional): ``[R, M]``.
    Returns:
        Tensor ``[N, M]`` of the promoted dtype of x, w and bias.
    Raises:
        TypeError: index is not a Tensor.
        ValueError: a shape, dtype or device does not fit.
        IndexError: a type is negative or not below R, on the CPU; on a GPU an assertion fails on the device.

    Example:
        >>> import torch
        >>> from edgeless import functional
        >>> functional.gather_mm(torch.ones(3, 2), torch.ones(4, 2, 5), torch.tensor([0, 3, 1])).shape
        torch.Size([3, 5])
    """
    call = "gather_mm"
    if isinstance(w, Tensor) and w.dim() == 4:
        expect(call, "w", w, (None,) * 4, "[R, B, K / B, M / B]")
        expect(call, "x", x, (None, w.size(1) * w.size(2)), "[N, K]")
        _check_index(call, "index", index, "[N]", x.size(0), x)
        _check_bias(call, bias, w.size(0), w.size(1) * w.size(3), x)
        return _gather_blocks(x, w, index, bias)
    _check_operands(call, x, w)
    _check_index(call, "index", index, "[N]", x.size(0), x)
    _check_bias(call, bias, w.size(0), w.size(2), x)
    dtype, index = promoted((x, w)), as_index(index)
    if runs_reference(call, x.device, "typed_mm"):
        out = reference.gather_mm(x, w, index)
        return out if bias is None else out + bias.index_select(0, index)
    offsets, _, order = rows_by_type(call, "index", index, w.size(0), "R")
    out = torch.ops.edgeless.typed_mm(cast(x, dtype), cast(w, dtype), offsets, order)
    return out if bias is None else out + torch.ops.edgeless.gather_rows(bias, index, offsets, order)


def rows_by_type(call: str, name: str, types: Tensor, num_types: int, bound: str) -> Compressed:
    """Rows sorted by type: indptr ``[num_types + 1]`` has the offsets of the types, edge_ids the rows ``[N]``.

    Args:
        call, name, bound: names of the call, of its argument ``types`` and of ``num_types``, for error messages.
        types: ``[N]``, int32 or int64.
    Raises:
        IndexError: a type is negative or not below num_types, on the CPU; on a GPU an assertion fails on the device.
    """
    on_gpu = types.device.type == "cuda"
    if on_gpu:  # asserted on the device, so that the host does not wait
        inside = ((types >= 0) & (types < num_types)).all()
        torch._assert_async(inside, f"{call}: {name} has ids outside of [0, {bound})")
    try:
        return Compressed(*coo_to_csr(types, types, num_types, num_types, not on_gpu))
    except IndexError:
        check_ids(f"{call}: {name}", types, bound, num_types)  # names the caller's argument
        raise


def choose_order(
    num_edges: int,
    dst_pairs: int,
    src_pairs: int,
    in_width: int,
    out_width: int,
    one_pass: bool = True,
    fused: bool = False,
) -> str:
    """Whether to sum before multiplying, ``"aggregate"``, or to multiply before summing, ``"transform"``.

    The cost is the number of values read and written, plus a sixteenth per multiply-add. A pair is a unique (node,
    type). Aggregating, an edge gathers ``in_width`` values, and the product of a destination's pair is added to a row
    in cache; without ``one_pass``, the sums and products of pairs are also written and read again. Transforming, the
    product of a source's pair is written, and an edge gathers ``out_width`` values.

    ``fused``: the kernel multiplies a sum while it is in shared memory, so only products are written and read again.
    This cost includes the backward, where transforming writes and reads the summed gradients of pairs twice.
    """
    products = in_width * out_width / 16
    if fused:
        aggregate = num_edges * (in_width + out_width) + dst_pairs * (2 * out_width + products)
        aggregate += src_pairs * (3 * in_width + 2 * products)
        transform = 2 * num_edges * out_width + src_pairs * (4 * in_width + 4 * out_width + 3 * products)
    elif one_pass:
        aggregate = num_edges * in_width + dst_pairs * (2 * out_width + products)
        transform = num_edges * out_width + src_pairs * (in_width + 3 * out_width + products)
    else:
        aggregate = num_edges * in_width + dst_pairs * (2 * in_width + 2 * out_width + products)
        transform = num_edges * out_width + src_pairs * (in_width + out_width + products)
    return "transform" if transform < aggregate else "aggregate"


# Least edges for which block-diagonal weights are expanded to whole matrices first (docs/decisions/0046).
_MANY_EDGES = 1 << 18


def fuses(graph: TypedGraph, weight: Tensor, rows: torch.dtype) -> bool:
    """Whether the order ``"aggregate"`` runs fused, so that each sum is multiplied while it is in shared memory: on
    CUDA, for whole matrices. The op decides by the same rule (``core_cuda/relational/plan.h``).
    """
    return weight.dim() == 3 and fuses_widths(graph, widths(weight), rows)


def fuses_widths(graph: TypedGraph, in_and_out: tuple[int, int], rows: torch.dtype) -> bool:
    """:func:`fuses` for whole matrices of these widths."""
    if graph.device.type != "cuda":
        return False
    most = most_fused_width(graph.device, rows, graph.graph.index_dtype == torch.int64)
    return takes_widths(most, rows, in_and_out)


def whole_matrices(graph: TypedGraph, weight: Tensor, rows: torch.dtype) -> Tensor:
    """Expands block-diagonal matrices ``[R, B, K / B, M / B]`` to ``[R, K, M]`` where the fused kernels take these and
    the graph has many edges (docs/decisions/0046). An infinite feature then turns its whole row NaN, not one block.
    """
    if weight.dim() != 4 or not surely(graph.num_edges >= _MANY_EDGES):
        return weight
    if not fuses_widths(graph, widths(weight), rows):
        return weight
    if not graph.by_dst[2].numel():  # every edge is a pair, so no sum is multiplied
        return weight
    return torch.diag_embed(weight.permute(0, 2, 3, 1)).permute(0, 3, 1, 4, 2).reshape(weight.size(0), *widths(weight))


def transforms(graph: TypedGraph, weight: Tensor, fused: bool = False) -> bool:
    """Whether rows are multiplied before they are summed, by :func:`choose_order`; kept with the graph."""
    if compiling():
        return False
    in_width, out_width = widths(weight)
    one_pass = graph.device.type == "cpu"
    # For these widths the answer is "aggregate" whatever the pairs, so that sources need not be sorted to count them.
    if one_pass and in_width <= 2 * out_width:
        return False
    if fused and in_width <= out_width:
        return False

    def choose(graph: TypedGraph) -> bool:
        _, rows, ptr, *_ = graph.by_dst
        if not ptr.numel():  # every edge is a pair
            return False
        # Counts the segments of sources in place of compact's pairs, since only "transform" needs compact. Both numbers
        # agree unless a pair has so many edges that it is cut into several segments.
        sizes = graph.num_edges, rows.numel(), graph.by_src[1].numel(), in_width, out_width
        return choose_order(*sizes, one_pass, fused) == "transform"

    return graph.format(("transforms", in_width, out_width, fused), choose)


def segments_of(
    graph: TypedGraph, fused: bool, reduce: str, edge_weight: Optional[Tensor], needs_src: bool, rows: torch.dtype
) -> tuple[list[Tensor], list[Tensor], Optional[Tensor]]:
    """The ops' arguments by_dst, by_src (empty where no gradient needs it) and edge_weight. A ``fused`` mean without
    ``edge_weight`` keeps its weights beside the segments, in by_dst and by_src, and returns None for edge_weight.
    """
    opmath = opmath_dtype(rows)
    if not fused or not graph.by_dst[2].numel():  # segments of one edge each have no sum to fuse
        return graph.by_dst, graph.by_src if needs_src else [], edge_weights(graph, edge_weight, reduce, rows)
    mean = opmath if reduce == "mean" and edge_weight is None else None
    left = None if mean is not None else edge_weights(graph, edge_weight, reduce, rows)
    return graph.tiled(True, mean), graph.tiled(False, mean) if needs_src else [], left


def edge_weights(graph: TypedGraph, given: Optional[Tensor], reduce: str, rows: torch.dtype) -> Optional[Tensor]:
    """The weights of the edges in the sum, ``[E]`` or None: ``given``, divided for a mean by the number of edges of the
    same relation and destination.
    """
    if reduce != "mean":
        return given
    mean = graph.mean_weight(opmath_dtype(rows))
    return mean if given is None else given * mean


def relational_sum(
    graph: TypedGraph,
    x: Tensor,
    weight: Tensor,
    edge_weight: Optional[Tensor] = None,
    *,
    reduce: str = "sum",
    out_dtype: Optional[torch.dtype] = None,
    order: Optional[str] = None,
) -> Tensor:
    r"""Sums the features of in-neighbours per relation, multiplies each sum by the relation's matrix, and adds them up.

    .. math:: o_i = \sum_r \Big(\sum_{e = (j, i) \in E_r} w_e\, x_j\Big) W_r

    No tensor has a row or a matrix per edge. Differentiable, any number of times, in x, weight and edge_weight; see
    :mod:`edgeless.functional` for the cost of second derivatives.

    Args:
        graph (edgeless.TypedGraph): messages flow from sources to destinations.
        x (Tensor): ``[Ns, K]``, float32, float64, bfloat16 or float16 (computed in float32).
        weight (Tensor): ``[R, K, M]``, or ``[R, B, K / B, M / B]`` for block-diagonal matrices of B blocks.
        edge_weight (Tensor, optional): ``[E]`` in the graph's original edge order.
        reduce: ``"sum"``, or ``"mean"``, which divides by the number of in-edges of the same relation.
        out_dtype (torch.dtype, optional): default is the promoted dtype of x and weight.
        order (str, optional): ``"aggregate"``: neighbours are summed, then multiplied; ``"transform"``: a source is
            multiplied once for each of its relations, and the products are summed. By default the order that moves
            less memory.
    Returns:
        Tensor ``[Nd, M]``. Rows without in-edges give 0.
    Raises:
        TypeError: graph is not a TypedGraph, or a dtype is not supported.
        ValueError: a shape, dtype, device or option does not fit.
        IndexError: the graph has a type that is negative or not below R.

    Example:
        >>> import torch
        >>> from edgeless import Graph, TypedGraph, functional
        >>> graph = Graph.from_edge_index(torch.tensor([[0, 1, 2, 0], [1, 2, 0, 2]]))
        >>> typed = TypedGraph(graph, torch.tensor([0, 1, 0, 1]), 2)
        >>> functional.relational_sum(typed, torch.ones(3, 2), torch.ones(2, 2, 5)).shape
        torch.Size([3, 5])
    """
    call = "relational_sum"
    if not isinstance(graph, TypedGraph):
        raise TypeError(f"{call}: graph must be an edgeless.TypedGraph, got {type(graph).__name__}")
    if isinstance(weight, Tensor) and weight.dim() == 4:
        expect(call, "weight", weight, (graph.num_types, None, None, None), "[R, B, K / B, M / B]")
        width = weight.size(1) * weight.size(2)
    else:
        expect(call, "weight", weight, (graph.num_types, None, None), "[R, K, M] or [R, B, K / B, M / B]")
        width = weight.size(1)
    expect(call, "x", x, (graph.num_src, width), "[Ns, K]")
    if edge_weight is not None:
        expect(call, "edge_weight", edge_weight, (graph.num_edges,), "[E]")
    check_choice(call, "reduce", reduce, ("sum", "mean"))
    for name, tensor in (("x", x), ("weight", weight), ("edge_weight", edge_weight)):
        if tensor is not None and tensor.device != graph.device:
            raise ValueError(f"{call}: {name} must be on the graph's device {graph.device}, got {tensor.device}")
    if out_dtype is None:
        out_dtype = promoted((x, weight))
    else:
        expect_dtype(call, out_dtype)
    if runs_reference(call, x.device, "relational_sum"):
        return reference.relational_sum(graph, x, weight, edge_weight, reduce).to(out_dtype)
    rows = promoted((x, weight))
    if weight.dtype == opmath_dtype(x.dtype):  # the kernels take 16-bit rows with float32 weights: no row is widened
        rows = x.dtype
    short_in, short_out = lacking(x.device, rows, weight)
    if short_in or short_out:
        blocks, whole = blocks_of(weight), longer_matrices(weight, short_in, short_out)
        options = {"reduce": reduce, "out_dtype": out_dtype, "order": order}
        out = relational_sum(graph, longer(x, short_in, blocks), whole, edge_weight, **options)
        return shorter(out, short_out, blocks)
    parameters = opmath_dtype(rows)
    edge_weight = cast(edge_weight, parameters)
    weight = whole_matrices(graph, weight, rows)
    fused = fuses(graph, weight, rows)
    if order is None:
        order = "transform" if transforms(graph, weight, fused) else "aggregate"
    else:
        check_choice(call, "order", order, ("aggregate", "transform"))
    if order == "transform":
        pairs, edges = graph.compact
        products = relational_sum(pairs, x, weight, out_dtype=rows, order="aggregate")
        return spmm(edges, products, edge_weights(graph, edge_weight, reduce, rows), out_dtype=out_dtype)
    needs_src = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    by_dst, by_src, edge_weight = segments_of(graph, fused, reduce, edge_weight, needs_src, rows)
    out = torch.ops.edgeless.relational_sum(
        cast(x, rows),
        weight if weight.dtype == parameters else cast(weight, rows),
        edge_weight,
        by_dst,
        by_src,
        graph.num_dst,
        out_dtype if out_dtype in (rows, parameters) else parameters,
    )
    return cast(out, out_dtype)
