"""The ops by which a traced program goes between nodes and edges, with their gradients and their plain form.

They appear in traced graphs only. ``ends`` is ``edge_index`` ``[2, E]`` int64 and ``end`` one of its rows, ``ids``
``[E]`` int64 are the edge ids, and ``dim`` is the dimension of the rows. The interpreter runs them over blocks of
edges. Here they run over all edges at once, for second derivatives and tests.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...functional.dropout import _philox
from ...graph.handle import Graph
from .spaces import Refused

_LIBRARY = torch.library.Library("edgeless_programs", "DEF")
_LIBRARY.define("gather_rows(Tensor x, Tensor ends, int end, int dim) -> Tensor")
_LIBRARY.define("fold(Tensor src, Tensor ends, int end, int dim, int rows, str reduce) -> Tensor")
_LIBRARY.define(
    "extremum(Tensor src, Tensor ends, Tensor ids, int end, int dim, int rows, str reduce) -> (Tensor, Tensor)"
)
_LIBRARY.define("share(Tensor src, Tensor best, Tensor arg, Tensor ids) -> Tensor")
_LIBRARY.define("rows_with_edges(Tensor x, Tensor ends, int end, int dim, int nodes) -> Tensor")
_LIBRARY.define("dropout_scale(Tensor like, Tensor seed, Tensor ids, int key, float p) -> Tensor")
_LIBRARY.define("stop(Tensor x) -> Tensor")  # stands for a detach() of the user while gradients are traced

gather_rows = torch.ops.edgeless_programs.gather_rows.default
fold = torch.ops.edgeless_programs.fold.default
extremum = torch.ops.edgeless_programs.extremum.default
share = torch.ops.edgeless_programs.share.default
rows_with_edges = torch.ops.edgeless_programs.rows_with_edges.default
dropout_scale = torch.ops.edgeless_programs.dropout_scale.default
stop = torch.ops.edgeless_programs.stop.default

EXTREMA = ("amax", "amin")


def shaped(owned: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor that nobody else holds, in another shape and not as a view, because a result of a function of autograd
    that is a view could not be written in place.
    """
    return torch.ops.aten._unsafe_view(owned, list(shape))


def expanded(index: Tensor, like: Tensor, dim: int) -> Tensor:
    """An index ``[E]`` expanded to the shape of ``like``, whose rows are in ``dim``; int64."""
    shape = [1] * like.dim()
    shape[dim] = -1
    return index.long().view(shape).expand(like.shape)


def fold_rows(src: Tensor, index: Tensor, dim: int, rows: int, reduce: str) -> Tensor:
    """Reduces rows of equal ``index`` by ``"sum"``, ``"prod"``, ``"amax"`` or ``"amin"``. A result row without any is
    0, or 1 for a product.
    """
    shape = list(src.shape)
    shape[dim] = rows
    if reduce == "sum":
        return src.new_zeros(shape).index_add_(dim, index, src)
    out = src.new_ones(shape) if reduce == "prod" else src.new_zeros(shape)
    return out.scatter_reduce_(dim, expanded(index, src, dim), src, reduce, include_self=reduce == "prod")


def tolerance(dtype: torch.dtype) -> float:
    """The largest relative difference from an extremum of a message that counts as equal to it: a few roundings."""
    return 64 * torch.finfo(dtype).eps if dtype.itemsize > 2 else 0.0


def is_extreme(src: Tensor, best: Tensor) -> Tensor:
    """Returns whether messages equal an extremum. Those of more than 16 bits may differ by :func:`tolerance`."""
    equal = src == best
    if src.element_size() > 2:
        equal = equal | ((src - best).abs() < tolerance(src.dtype) * best.abs())
    return equal


def argument_rows(src: Tensor, best: Tensor, index: Tensor, ids: Tensor, dim: int) -> Tensor:
    """The id of the edge that an extremum comes from, or, where several edges equal it, minus the number of edges
    within its tolerance.

    A backward that computed a message again and compared it with the maximum would find no edge where the two are
    rounded differently. So it reads the argument, and compares only where several edges are equal. It then finds the
    edges that were counted here, so that the shares of a gradient sum to 1.
    """
    zeros, own = torch.zeros_like(best, dtype=torch.int64), best.index_select(dim, index)
    winners = src == own
    count = zeros.index_add(dim, index, winners.long())
    edges = torch.where(winners, expanded(ids, src, dim), 0)
    found = zeros.index_add(dim, index, edges)  # the sum over a single winner is its id
    alike = zeros.index_add(dim, index, is_extreme(src, own).long()) if src.element_size() > 2 else count
    return torch.where(count == 1, found, -alike)


def share_rows(src: Tensor, best: Tensor, arg: Tensor, ids: Tensor) -> Tensor:
    """The share of the gradient of an extremum that each edge gets, in the shape of ``src``.

    ``best`` and ``arg`` are the extremum and the argument of the edge's row. Equal edges get equal shares. As in
    ``torch.scatter_reduce`` into zeros, the zeros themselves keep one share if the extremum is 0. Messages that are
    computed again may be rounded differently, so a few roundings are allowed. They are not in 16 bits, where most such
    differences vanish and many messages are one rounding below the extremum. :func:`argument_rows` counts by the same
    rule.
    """
    ids = ids.view([-1 if n == ids.numel() and d == _rows_of(src, ids) else 1 for d, n in enumerate(src.shape)])
    wins = torch.where(arg >= 0, arg == ids, is_extreme(src, best))
    count = torch.where(arg >= 0, 1, -arg) + (best == 0)
    return torch.where(wins, 1.0, 0.0).to(src.dtype) / count.clamp(min=1)


def _rows_of(src: Tensor, ids: Tensor) -> int:
    return next(d for d, n in enumerate(src.shape) if n == ids.numel())


def scale_rows(like: Tensor, seed: Tensor, ids: Tensor, key: int, p: float) -> Tensor:
    """The factor of dropout for every element of ``like`` ``[E, ...]``: 0, or ``1 / (1 - p)``.

    A draw depends on the seed, the number ``key`` of the op, the edge id and the index of the element in its row.
    """
    width = like.shape[1:].numel()
    groups = torch.arange((width + 3) // 4, device=ids.device) + (key << 24)
    counters = ids.view(-1, 1).expand(-1, groups.numel())
    draws = torch.stack(_philox(int(seed), counters, groups), dim=2).view(ids.numel(), 4 * groups.numel())[:, :width]
    kept = draws >= int(p * 2**32)
    return (kept.to(like.dtype) / (1.0 - p) if p < 1 else torch.zeros_like(kept, dtype=like.dtype)).view(like.shape)


def without_edges(x: Tensor, graph: Graph, receiving: bool, dim: int) -> Tensor:
    """``x`` with zeros in the rows of nodes that have no edge at one end.

    Args:
        graph: a graph whose destinations, or sources if ``receiving`` is false, are the rows of ``x``.
    """

    def build(_):
        indptr = (graph.csr if receiving else graph.csc).indptr
        lacks = indptr[1:] == indptr[:-1]
        return None if lacks.is_cpu and not bool(lacks.any()) else lacks  # on a GPU the check would wait

    lacks = graph.format(("lack edges", receiving), build)
    return x if lacks is None else zeroed(x, lacks, dim)


def zeroed(x: Tensor, lacks: Tensor, dim: int) -> Tensor:
    """``x`` with zeros in the rows that ``lacks``, a bool for each node, marks."""
    count, shape = lacks.numel(), list(x.shape)
    if shape[dim] != count:  # a view has joined the rows with another dimension
        lacks = lacks.view(count, 1).expand(count, shape[dim] // count).reshape(-1)
    return x.masked_fill(lacks.view([-1 if d == dim else 1 for d in range(x.dim())]), 0)


def _whole_with_edges(x, ends, end, dim, nodes):
    lacks = torch.ones(nodes, dtype=torch.bool, device=x.device)
    return zeroed(x, lacks.index_fill(0, ends[end].long(), False), dim)


def _whole_gather(x, ends, end, dim):
    return x.index_select(dim, ends[end])


def _whole_fold(src, ends, end, dim, rows, reduce):
    return fold_rows(src, ends[end], dim, rows, reduce)


def _whole_extremum(src, ends, ids, end, dim, rows, reduce):
    best = fold_rows(src, ends[end], dim, rows, reduce)
    return best, argument_rows(src, best, ends[end], ids, dim)


def _meta_rows(x, dim, rows):
    shape = list(x.shape)
    shape[dim] = rows
    return x.new_empty(shape)


def _meta_extremum(src, ends, ids, end, dim, rows, reduce):
    best = _meta_rows(src, dim, rows)
    return best, best.new_empty(best.shape, dtype=torch.int64)


_PLAIN = {
    "gather_rows": (_whole_gather, lambda x, ends, end, dim: _meta_rows(x, dim, ends.size(1))),
    "rows_with_edges": (_whole_with_edges, lambda x, ends, end, dim, nodes: x.new_empty(x.shape)),
    "fold": (_whole_fold, lambda src, ends, end, dim, rows, reduce: _meta_rows(src, dim, rows)),
    "extremum": (_whole_extremum, _meta_extremum),
    "share": (share_rows, lambda src, best, arg, ids: src.new_empty(src.shape)),
    "dropout_scale": (scale_rows, lambda like, seed, ids, key, p: like.new_empty(like.shape)),
}
for _name, (_whole, _meta) in _PLAIN.items():
    _LIBRARY.impl(_name, _meta, "Meta")
    for _key in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _whole, _key)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ends, end, dim):
        ctx.save_for_backward(ends)
        ctx.options = end, dim, x.size(dim)
        with torch._C._AutoDispatchBelowAutograd():
            return gather_rows(x, ends, end, dim)

    @staticmethod
    def backward(ctx, grad):
        end, dim, rows = ctx.options
        return fold(grad, ctx.saved_tensors[0], end, dim, rows, "sum"), None, None, None


class _WithEdges(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ends, end, dim, nodes):
        ctx.save_for_backward(ends)
        ctx.options = end, dim, nodes
        with torch._C._AutoDispatchBelowAutograd():
            return rows_with_edges(x, ends, end, dim, nodes)

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():
            grad = rows_with_edges(grad, ctx.saved_tensors[0], *ctx.options)
        return grad, None, None, None, None  # in a first derivative the rows of such nodes are zeros already


class _Fold(torch.autograd.Function):
    @staticmethod
    def forward(ctx, src, ends, end, dim, rows, reduce):
        ctx.save_for_backward(ends)
        ctx.options = end, dim
        if reduce != "sum" and ctx.needs_input_grad[0]:
            raise Refused("the gradient of a product of a node's messages is not supported")
        with torch._C._AutoDispatchBelowAutograd():
            return fold(src, ends, end, dim, rows, reduce)

    @staticmethod
    def backward(ctx, grad):
        return gather_rows(grad, ctx.saved_tensors[0], *ctx.options), None, None, None, None, None


class _Extremum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, src, ends, ids, end, dim, rows, reduce):
        with torch._C._AutoDispatchBelowAutograd():
            best, arg = extremum(src, ends, ids, end, dim, rows, reduce)
        ctx.save_for_backward(src, best, arg, ends, ids)
        ctx.options = end, dim
        ctx.mark_non_differentiable(arg)
        return best, arg

    @staticmethod
    def backward(ctx, grad, _):
        src, best, arg, ends, ids = ctx.saved_tensors
        best, arg = (gather_rows(value.detach(), ends, *ctx.options) for value in (best, arg))
        part = share(src.detach(), best, arg, ids)
        return gather_rows(grad, ends, *ctx.options) * part, None, None, None, None, None, None


def _constant(op):
    def call(*args):
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    return call


_LIBRARY.impl("gather_rows", lambda *args: _Gather.apply(*args), "Autograd")
_LIBRARY.impl("rows_with_edges", lambda *args: _WithEdges.apply(*args), "Autograd")
_LIBRARY.impl("fold", lambda *args: _Fold.apply(*args), "Autograd")
_LIBRARY.impl("extremum", lambda *args: _Extremum.apply(*args), "Autograd")
_LIBRARY.impl("share", _constant(share), "Autograd")
_LIBRARY.impl("dropout_scale", _constant(dropout_scale), "Autograd")
_LIBRARY.impl("stop", _constant(stop), "Autograd")
_LIBRARY.impl("stop", lambda x: x.new_empty_strided(x.shape, x.stride()), "Meta")
