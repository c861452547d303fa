"""``torch_geometric.nn.aggr`` whose MaxAggregation and MinAggregation run on the kernel for extrema if rows are sorted
by group. Every other name is PyG's own object.
"""

from __future__ import annotations

__path__: list[str] = []  # a package from the start, whose inner modules edgeless.layers.stand_in finds

from typing import TYPE_CHECKING, Any

import torch
import torch_geometric.typing
from torch import Tensor
from torch_geometric.nn import aggr as _stock

from edgeless import cache
from edgeless.checks import compiling
from edgeless.choices.backends import kernel_refusal
from edgeless.functional import neighbor_reduce
from edgeless.graph.handle import Graph
from edgeless.layers.adapter import FusedLayer
from edgeless.layers.stand_in import stand_in

from ..conv import PLAIN, Scriptable, is_plain_float, tracing_refusals
from ..convert import for_stock

if TYPE_CHECKING:
    from torch_geometric.nn.aggr import *  # noqa: F403

    def __getattr__(name: str) -> Any: ...


__all__ = ["MaxAggregation", "MinAggregation"]


class _Extremum(Scriptable, FusedLayer):
    """Base of both layers; each defines ``stock`` and ``reduction``."""

    _called_with_index = True  # layers of PyG call it so

    def forward(self, x, index=None, ptr=None, dim_size=None, dim=-2):
        """The extremum of every group, 0 for an empty one.

        Args:
            x: ``[E, F]``, sorted by group.
            ptr: ``[G + 1]`` int64, from 0 to E: the rows of group g are ``ptr[g]`` to ``ptr[g + 1] - 1``.
            index, dim_size, dim: as upstream; a call with index takes the upstream path.
        Returns:
            Tensor ``[G, F]``.
        Raises:
            ValueError: ptr falls, or does not go from 0 to E.
        """
        return self._choose(x, index, ptr, dim_size, dim)

    def _fusion_refusals(self, x, index=None, ptr=None, dim_size=None, dim=-2) -> list[str]:
        reasons = tracing_refusals()
        if not is_plain_float(x) or x.dim() != 2:
            return [*reasons, "x is not a plain floating tensor of two dimensions"]
        if dim not in (-2, 0):
            reasons.append(f"dim is {dim}")
        if index is not None:
            reasons.append("index is given, and whether it is sorted is not known")
        if type(ptr) not in PLAIN or ptr.dim() != 1 or ptr.dtype != torch.int64 or ptr.numel() == 0:
            reasons.append("ptr is not an int64 tensor of one dimension")
        elif ptr.device != x.device:
            reasons.append(f"ptr is on {ptr.device} and x is on {x.device}")
        elif dim_size not in (None, ptr.numel() - 1):
            reasons.append(f"dim_size is {dim_size} and ptr has {ptr.numel() - 1} groups")
        if reason := kernel_refusal(x.device, "neighbor_reduce"):
            reasons.append(reason)
        return reasons

    def _fused_forward(self, x, index, ptr, dim_size, dim):
        graph = _graph_of(ptr, x.size(0))
        if torch_geometric.typing.WITH_TORCH_SCATTER and not compiling():  # else PyG takes torch's segment_reduce
            return neighbor_reduce(graph, x, self.reduction, ties="first")
        out = neighbor_reduce(graph, x, self.reduction, ties="shared")
        return torch.where(out.isinf(), 0, out)

    def _stock_forward(self, x, index, ptr, dim_size, dim):
        return super()._stock_forward(x, for_stock(index), for_stock(ptr), dim_size, dim)


def _graph_of(ptr: Tensor, num_rows: int) -> Graph:
    """A graph with one edge per row, from the row to its group."""

    def build():
        rows = torch.arange(num_rows, dtype=ptr.dtype, device=ptr.device)
        return Graph.from_csr(ptr, rows, num_rows)

    return cache.graph_from_object(ptr, ("groups", num_rows), build, tensors=(ptr,))


class MaxAggregation(_Extremum, _stock.MaxAggregation):
    """:class:`torch_geometric.nn.MaxAggregation`, whose gradient goes to one of equal rows if torch_scatter is
    installed, else to all of them in equal parts, as upstream."""

    stock = _stock.MaxAggregation
    reduction = "max"


class MinAggregation(_Extremum, _stock.MinAggregation):
    """:class:`torch_geometric.nn.MinAggregation`. Equal rows get the gradient as in :class:`MaxAggregation`."""

    stock = _stock.MinAggregation
    reduction = "min"


stand_in(__name__, "torch_geometric.nn.aggr")
