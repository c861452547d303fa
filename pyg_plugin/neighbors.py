"""Base of the layers whose messages are neighbours' features, perhaps times an edge weight."""

from __future__ import annotations

from typing import Any, Optional

import torch
import torch_geometric.typing
from torch import Tensor
from torch.nn import Module
from torch_geometric import EdgeIndex
from torch_geometric.nn.aggr import MaxAggregation, MeanAggregation, MinAggregation, SumAggregation

from edgeless.autocast import autocasts
from edgeless.checks import compiling
from edgeless.distributed.graph import DistGraph
from edgeless.functional import spmm
from edgeless.functional.aggregation import extremum_of_neighbors, sum_of_neighbors
from edgeless.functional.layer import sum_layer
from edgeless.functional.map_order import maps_first, narrows
from edgeless.functional.projection import add, add_row, product, products, project_sum
from edgeless.graph.handle import Graph
from edgeless.graph.rows import receiving
from edgeless.layers.adapter import is_plain

from .conv import LINEAR, PLAIN, is_plain_float, num_dst_of, pair, sizes_of
from .convert import SPARSE, EdgeList, Handle, SparseMatrix, SparseStorage, kind_of
from .nn import aggr as fused

_NAMES = {"add": "sum", "sum": "sum", "mean": "mean", "min": "min", "max": "max"}


class NeighborReduction:
    """Mixin of sums, means and extrema; a layer lists it before :class:`FusedConv`.

    Class attributes of a layer:
        takes_size: whether the upstream forward's last argument is ``size``.
        drops_values: whether the upstream layer ignores the values of a SparseTensor.
    """

    node_dims = (0, -2)
    layouts = (torch.strided,)
    aggregations = {
        SumAggregation: "sum",
        MeanAggregation: "mean",
        MaxAggregation: "max",
        MinAggregation: "min",
        fused.MaxAggregation: "max",
        fused.MinAggregation: "min",
    }
    takes_size = True
    drops_values = False

    # Predicates ------------------------------------------------------------------------------------------------------

    def _reduction_refusals(self, x: Any, edge_index: Any, edge_weight: Any = None, size: Any = None) -> list[str]:
        """The unsupported reasons of a call; the arguments are those of the upstream forward."""
        x_src, x_dst = pair(x)
        if size is edge_weight is None and x_src is x_dst and kind_of(edge_index) is EdgeList:
            return self._refusals(x_src, x_dst, None, edge_index, None, False)  # the checks below concern other inputs
        num_dst = None
        if isinstance(x_src, Tensor) and x_src.dim() == 2:
            num_dst = num_dst_of(x_src, x_dst, edge_index, size)
            if reason := self._size_refusal(x_src, num_dst, edge_index, size):
                return [reason]
        reasons = self._refusals(x_src, x_dst, num_dst if x_dst is None else None, edge_index, None, False)
        kind = kind_of(edge_index)
        if kind is None or type(x_src) not in PLAIN:
            return reasons
        if kind in SPARSE and not self.fuse:
            reasons.append("edge_index is a sparse matrix and the layer's fuse is off, which changes what it means")
        elif kind in SPARSE and type(self.aggr_module) in self.aggregations and _NAMES.get(self.aggr) != self._reduce:
            reasons.append(f"aggr is {self.aggr!r} and aggr_module is {self.aggr_module}")
        elif self._multiplies_by(edge_index) and self.flow != "source_to_target":
            reasons.append("edge_index is sorted by column, and the stock layer then takes no notice of its flow")
        elif self._multiplies_by(edge_index) and x_dst is None and edge_index.num_cols is None:
            reasons.append("edge_index is sorted by column and has as many destinations as its largest id says")
        elif not reasons and (reason := self._weight_refusal(kind, x_src, edge_index, edge_weight)):
            reasons.append(reason)
        return reasons

    @staticmethod
    def _size_refusal(x_src: Tensor, num_dst: int, edge_index: Any, size: Any) -> Optional[str]:
        if size is None or kind_of(edge_index) not in (EdgeList, Handle):  # the other kinds have their own sizes
            return None
        have, sizes = (x_src.size(0), num_dst), sizes_of(size)
        if sizes is None or any(n not in (None, m) for n, m in zip(sizes, have)):
            return f"size is {size} and the features have the sizes {have}"
        return None

    def _edge_refusal(self, edge_attr: Any, num_edges: int) -> Optional[str]:
        return None  # _weight_refusal checks weights with their features

    def _weight_refusal(self, kind, x: Tensor, edge_index: Any, edge_weight: Any) -> Optional[str]:
        """Returns why the kernels do not support the weights of the edges, or None."""
        weight, name = self._given_weight(kind, edge_index, edge_weight), "edge_weight"
        if kind in SPARSE:
            name = "the values of edge_index"
            if kind is SparseMatrix and autocasts(x.device.type):
                return "autocast is on and edge_index is a torch.sparse matrix"
        if weight is None:
            return None
        if self._reduce in ("min", "max"):
            return f"aggr_module is {self.aggr_module} and the messages are weighted"
        if not is_plain_float(weight) or weight.device != x.device:
            return f"{name}: not a plain floating tensor on the device of the features"
        if kind in SPARSE:
            if weight.dim() != 1:
                return f"{name} have {weight.dim()} dimensions"
            if weight.dtype != x.dtype:
                return f"{name} are {weight.dtype} and the features are {x.dtype}"
            if autocasts(x.device.type):
                return f"autocast is on and {name} are weights"
            return None
        num_edges = kind.num_edges(edge_index)
        if tuple(weight.shape) not in ((num_edges,), (num_edges, 1)):
            return f"edge_weight does not have the shape [E] = [{num_edges}]"
        if torch.float64 in (weight.dtype, x.dtype) and weight.dtype != x.dtype:
            return f"edge_weight is {weight.dtype} and the features are {x.dtype}"
        return None

    # Steps of a forward ----------------------------------------------------------------------------------------------

    def _multiplies_by(self, edge_index: Any) -> bool:
        """True if the upstream layer computes a sparse matrix product with this EdgeIndex instead of messages."""
        fusible = self.SUPPORTS_FUSED_EDGE_INDEX and self.fuse and type(edge_index) is EdgeIndex
        return fusible and edge_index.is_sorted_by_col

    @property
    def _reduce(self) -> Optional[str]:
        """The kernels' name of the aggregation; None if they do not support it."""
        return self.aggregations.get(type(self._modules.get("aggr_module")))

    @property
    def _op(self) -> str:
        return "neighbor_reduce" if self._reduce in ("min", "max") else "spmm"

    def _given_weight(self, kind, edge_index: Any, edge_weight: Optional[Tensor]) -> Optional[Tensor]:
        """The weights as the user passed them; the values of a sparse matrix take precedence over ``edge_weight``."""
        if kind in SPARSE:
            return None if kind is SparseStorage and self.drops_values else kind.weights(edge_index)
        return edge_weight

    def _graph(self, x: tuple, edge_index: Any, size: Any) -> Graph:
        x_src, x_dst = x
        num_dst = num_dst_of(x_src, x_dst, edge_index, size)
        return kind_of(edge_index).graph(edge_index, x_src.size(0), num_dst, self.flow, False)

    def _map_neighbors(self, x: tuple, edge_index: Any, edge_weight, size, linear, own: Optional[Module]) -> Tensor:
        """``linear(propagate(x)) + own(x_dst)``; ``own`` may be None, and only ``linear`` may have a bias.

        If most destinations have no in-edges, these get the bias alone and ``linear`` is applied to the others only.
        """
        x_src, x_dst = x
        graph = self._graph(x, edge_index, size)
        if x_dst is not None and own is not None:
            dense, rows = receiving(graph)
            if dense is not None and _both_plain(linear, own):
                out = product(x_dst, own.weight.t(), linear.bias)
                neighbors = self._aggregate(dense, x_src, edge_index, edge_weight)
                return out.index_add_(0, rows, product(neighbors, linear.weight.t()))
        if (reduce := self._reduce) in ("sum", "mean"):
            weight = self._given_weight(kind_of(edge_index), edge_index, edge_weight)
            weight = None if weight is None else weight.flatten()
            may_map = (narrows(linear) or type(graph) is DistGraph) and is_plain(linear, LINEAR)
            if may_map and self._maps_first(graph, x, weight, linear):
                return self._sum_mapped(graph, x, weight, linear, own)
            if x_src is x_dst and own is not None:
                out = sum_layer(graph, x_src, linear, own, kinds=LINEAR, weight=weight, reduce=reduce)
                if out is not None:
                    return out
        neighbors = self._aggregate(graph, x_src, edge_index, edge_weight)
        if own is None or x_dst is None:
            return self._project(neighbors, linear)[0]
        return project_sum((neighbors, x_dst), (linear, own), kinds=LINEAR)

    def _sum_mapped(self, graph: Graph, x: tuple, weight: Optional[Tensor], linear, own: Optional[Module]) -> Tensor:
        """``linear(sum of x_src) + own(x_dst)``, computed as a sum of rows of x_src that are mapped first."""
        x_src, x_dst = x
        if own is None or x_dst is None:
            out = spmm(graph, product(x_src, linear.weight.t()), weight, reduce=self._reduce)
            return out if linear.bias is None else add_row(out, linear.bias)
        if x_src is x_dst and _both_plain(linear, own):
            mapped, rest = products(x_src, (linear.weight, own.weight), (None, linear.bias))
        else:
            mapped, rest = product(x_src, linear.weight.t()), self._project(x_dst, own)[0]
            rest = rest if linear.bias is None else rest + linear.bias
        return add(spmm(graph, mapped, weight, reduce=self._reduce), rest, own=True)

    @staticmethod
    def _maps_first(graph: Graph, x: tuple, weight: Optional[Tensor], linear) -> bool:
        """True if rows are mapped before they are summed or, in a DistGraph, sent to other processes."""
        x_src, x_dst = x
        if type(graph) is DistGraph:
            return graph.size > 1 and linear.weight.size(0) < x_src.size(1) and not graph.keeps(x_src)
        if compiling() and x_src is not x_dst:
            return False
        return maps_first(graph, x_src, linear.weight, weight, None if weight is None else weight.dtype)

    def _aggregate(self, graph: Graph, x_src: Tensor, edge_index: Any, edge_weight: Optional[Tensor]) -> Tensor:
        kind = kind_of(edge_index)
        reduce, weight = self._reduce, self._given_weight(kind, edge_index, edge_weight)
        if reduce in ("min", "max"):
            return extremum_of_neighbors(graph, x_src, reduce, self._ties(kind, x_src, edge_index))
        return sum_of_neighbors(graph, x_src, None if weight is None else weight.flatten(), reduce)

    def _ties(self, kind, x: Tensor, edge_index: Any) -> str:
        """The rule for gradients of equal extrema: one edge in sparse products and torch_scatter, else as in torch."""
        if kind in SPARSE:
            return "first"
        package = x.is_cuda and torch_geometric.typing.WITH_TORCH_SCATTER
        if self._multiplies_by(edge_index):
            package = torch_geometric.typing.WITH_TORCH_SPARSE
        return "first" if package and not compiling() else "scatter"

    def _stock_forward(self, x, edge_index, *rest):
        if type(edge_index) is Graph and self.takes_size and rest[-1] is None:
            rest = (*rest[:-1], (edge_index.num_src, edge_index.num_dst))  # else upstream uses x's rows for both sizes
        return super()._stock_forward(x, edge_index, *rest)


def _both_plain(linear: Module, own: Module) -> bool:
    """True if both maps are plain and of the same dtype, and only the first may have a bias."""
    plain = is_plain(linear, LINEAR) and is_plain(own, LINEAR)
    return plain and own.bias is None and linear.weight.dtype == own.weight.dtype
