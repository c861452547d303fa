"""GCNConv of PyG on the kernel for weighted sums."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor
from torch_geometric.nn.aggr import MeanAggregation, SumAggregation
from torch_geometric.nn.conv import gcn_conv
from torch_geometric.typing import SparseTensor

from edgeless.checks import normal_tensors, opmath_dtype, plain_tensor
from edgeless.distributed.graph import DistGraph
from edgeless.functional import sddmm_dot, spmm
from edgeless.functional.map_order import sums_first
from edgeless.functional.projection import add_row
from edgeless.graph.handle import Graph
from edgeless.layers.adapter import is_plain

from ..conv import LINEAR, FusedConv
from ..convert import SPARSE, SparseMatrix, SparseStorage, for_stock, kind_of
from ..neighbors import NeighborReduction


class GCNConv(NeighborReduction, FusedConv, gcn_conv.GCNConv):
    r"""The graph convolution (Kipf, Welling: "Semi-Supervised Classification with Graph Convolutional Networks", ICLR
    2017, equation 2).

    Constructor, parameters and results are those of :class:`torch_geometric.nn.GCNConv`; nothing of the size
    ``[E, C]`` is allocated. Without edge weights nothing of the size ``[E]`` is either: the normalisation is one factor
    per node, cached with the graph.

    Shapes:
        x: ``[N, F]``; edge_index: ``[2, E]`` tensor or EdgeIndex, SparseTensor or ``torch.sparse`` COO/CSR ``[N, N]``,
        whose values are the weights, or :class:`edgeless.Graph`; edge_weight: ``[E]``; output: ``[N, C]``.
    """

    # Read by PyG when it writes propagate(), which the upstream path uses:
    # propagate_type: (x: Tensor, edge_weight: OptTensor)

    aggregations = {SumAggregation: "sum", MeanAggregation: "mean"}
    takes_size = False
    layouts = FusedConv.layouts
    _degree_norm = (None, 0)  # see _is_degree_norm

    def forward(self, x, edge_index, edge_weight=None):
        """The layer's output.

        Raises:
            IndexError: edge_index has an id that x does not have.
            ValueError: x is a pair.
        """
        return self._choose(x, edge_index, edge_weight)

    def _fusion_refusals(self, x, edge_index, edge_weight=None) -> list[str]:
        if not isinstance(x, Tensor):
            return ["x is not a tensor"]
        if type(edge_index) is DistGraph and self.cached and self._cached_edge_index is not None:
            return ["the layer keeps the normalisation of another graph, and a DistGraph brings its own"]
        kept = self._kept_norm(edge_index)
        if kept is not None:
            edge_index, edge_weight = kept
        reasons = self._reduction_refusals(x, edge_index, edge_weight)
        if kind_of(edge_index) is SparseMatrix and self.add_self_loops and type(self.aggr_module) is MeanAggregation:
            reasons.append("the aggregation is a mean and added self loops may merge edges of the sparse matrix")
        return reasons

    def _fused_forward(self, x, edge_index, edge_weight):
        dtype, num_nodes = x.dtype, x.size(0)
        kept = self._kept_norm(edge_index)
        on_parts = type(edge_index) is DistGraph  # a DistGraph caches its degrees itself
        if kept is None and self.normalize and self.cached and not on_parts:
            kept = self._keep_norm(x, edge_index, edge_weight)
        if kept is not None:
            edge_index, edge_weight = kept
        kind = kind_of(edge_index)
        if self.normalize and kept is None:
            graph, weight, scale = self._norm(edge_index, edge_weight, num_nodes, dtype)
            weighs = dtype if edge_weight is None or kind in SPARSE else edge_weight.dtype
        else:
            graph, scale = kind.graph(edge_index, num_nodes, num_nodes, self.flow, False), None
            weight = self._given_weight(kind, edge_index, edge_weight)
            weighs = None if weight is None else weight.dtype
            if kept is not None and self._is_degree_norm(weight):
                weight, scale = None, _degree_norm(graph, opmath_dtype(x.dtype))
            weight = None if weight is None else weight.flatten()
        if on_parts:
            sums = edge_index.sends_input(x, self.out_channels, summed=True)
        else:
            sums = is_plain(self.lin, LINEAR) and sums_first(graph, x, self.lin.weight, weight, weighs)
        if not sums:
            (x,) = self._project(x, self.lin)
        out_dtype = x.dtype if weighs is None else torch.promote_types(x.dtype, weighs)
        out = spmm(graph, x, weight, reduce=self._reduce, src_scale=scale, dst_scale=scale, out_dtype=out_dtype)
        if sums:
            (out,) = self._project(out, self.lin)
        return out if self.bias is None else add_row(out, self.bias)

    # The normalisation that a layer with cached=True keeps, as upstream and in the same attributes -------------------

    def _kept_norm(self, edge_index: Any) -> Optional[tuple]:
        """(edge_index, edge_weight) of an earlier call, which the upstream layer uses for any later graph."""
        if not self.normalize:
            return None
        if isinstance(edge_index, SparseTensor):
            return None if self._cached_adj_t is None else (self._cached_adj_t, None)
        return self._cached_edge_index if isinstance(edge_index, (Tensor, Graph)) else None

    def _keep_norm(self, x: Tensor, edge_index: Any, edge_weight: Optional[Tensor]) -> tuple:
        edge_index = for_stock(edge_index)
        if self.add_self_loops and edge_weight is not None and edge_weight.is_cuda and isinstance(edge_index, Tensor):
            edge_weight = _equal_loops(edge_index, edge_weight, x.size(0))
        with normal_tensors():
            norm = gcn_conv.gcn_norm(
                edge_index, edge_weight, x.size(0), self.improved, self.add_self_loops, self.flow, x.dtype
            )
        if isinstance(edge_index, SparseTensor):
            self._cached_adj_t = norm
        else:
            self._cached_edge_index = norm
            if edge_weight is None and norm[1] is not None and not norm[1].is_inference():
                self._degree_norm = (norm[1], norm[1]._version)
        return self._kept_norm(edge_index)

    def _is_degree_norm(self, weight: Tensor) -> bool:
        """True if the edge weights are products of per-node factors, as computed here and not written to since."""
        known, version = self._degree_norm
        return weight is known and weight._version == version

    def _stock_forward(self, x, edge_index, edge_weight):
        if self._cached_edge_index is not None:  # perhaps by the upstream layer, before it was swapped
            ids, norm = self._cached_edge_index
            self._cached_edge_index = (for_stock(ids), norm)
        return super()._stock_forward(x, edge_index, edge_weight)

    # The normalisation of one call -----------------------------------------------------------------------------------

    def _norm(self, edge_index: Any, edge_weight: Optional[Tensor], num_nodes: int, dtype: torch.dtype) -> _Norm:
        """The graph with the self loops that the layer adds, and the factors of its messages."""
        kind = kind_of(edge_index)
        loops, statistics = self.add_self_loops, opmath_dtype(dtype)
        by_edge = edge_weight is not None
        graph = kind.graph(edge_index, num_nodes, num_nodes, self.flow, loops and kind not in SPARSE, by_edge)
        if graph.num_src != graph.num_dst:
            raise ValueError(f"GCNConv: edge_index must have as many sources as destinations, got {graph}")
        base = graph
        if loops and kind in SPARSE:
            graph = base.with_self_loops()
        weight = self._given_weight(kind, edge_index, edge_weight)
        if weight is None and kind is SparseStorage and loops and self.improved:
            weight = torch.ones(base.num_edges, dtype=statistics, device=base.device)
        if weight is None:  # as upstream, improved changes nothing without weights
            return _Norm(graph, None, _degree_norm(graph, statistics, has_loops=loops))
        weight = weight.flatten().to(statistics)
        if loops:
            weight = self._with_loops(kind, edge_index, base, graph, weight)
        degrees = spmm(graph, weight.new_ones(num_nodes, 1), weight).squeeze(1)
        scale = degrees.pow(-0.5)
        scale = scale.masked_fill(scale == float("inf"), 0.0)
        if not scale.requires_grad:
            return _Norm(graph, weight, scale)
        ends = scale.unsqueeze(1)
        return _Norm(graph, weight * sddmm_dot(graph, ends, ends), None)

    def _with_loops(self, kind, edge_index: Any, base: Graph, graph: Graph, weight: Tensor) -> Tensor:
        """Weights of ``graph``'s edges: those of kept edges, then one per self loop.

        As upstream, the weight of a user's self loop replaces that of the added loop in an edge list, is added to it
        in a torch.sparse matrix, and is dropped in a SparseTensor.
        """
        loops = weight.new_full((graph.num_dst,), 2.0 if self.improved else 1.0)
        if graph._kept is None:
            return torch.cat((weight, loops))
        if kind is not SparseStorage:
            targets = base.edge_index()[1] if kind is SparseMatrix else kind.targets(edge_index)
            ids, nodes, last = _replaced(graph, targets)
            values = weight.index_select(0, ids)
            if kind is SparseMatrix:
                loops = loops.index_put((nodes,), values, accumulate=True)
            else:
                loops = loops.index_put((nodes,), _equal_to(last, values))
        return torch.cat((weight.index_select(0, graph._kept), loops))


def _replaced(graph: Graph, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The user's self loops, which ``graph`` replaces by its own: their edge ids, their nodes, and for each the index
    among them of its node's last loop, whose weight counts on every device. All are ``[L]`` int64.

    Cached with the graph: to search for loops in every call would wait for the GPU.

    Args:
        targets: destinations of all of the user's edges, ``[E]``.
    """

    def build(looped):
        is_loop = torch.ones(targets.numel(), dtype=torch.bool, device=targets.device)
        is_loop[looped._kept] = False
        ids = is_loop.nonzero().squeeze(1)
        nodes = targets.index_select(0, ids).long()
        return ids, nodes, _last_of_each(nodes, looped.num_dst)

    return (graph.local if type(graph) is DistGraph else graph).format("replaced loops", build)


def _last_of_each(nodes: Tensor, num_nodes: int) -> Tensor:
    """For every entry of ``nodes``, the index of the last entry with the same node."""
    order = torch.arange(nodes.numel(), device=nodes.device)
    return order.new_zeros(num_nodes).scatter_reduce(0, nodes, order, "amax")[nodes]


def _equal_loops(edge_index: Tensor, weight: Tensor, num_nodes: int) -> Tensor:
    """``weight`` where all self loops of a node have the weight of its last one.

    PyG writes the weights of all of them to one element, on CUDA in any order.
    """
    if edge_index.layout is not torch.strided:
        return weight
    src, dst = plain_tensor(edge_index)
    ids = (src == dst).nonzero().squeeze(1)
    last = _last_of_each(dst.index_select(0, ids), num_nodes)
    return weight.index_put((ids,), _equal_to(last, weight.index_select(0, ids)))


def _equal_to(last: Tensor, values: Tensor) -> Tensor:
    """``values[last]``, but the gradient of element i goes to ``values[i]``, as in the upstream layer."""
    return values - values.detach() + values.detach()[last]


def _degree_norm(graph: Graph, dtype: torch.dtype, has_loops: bool = False) -> Tensor:
    """The in-degree to the power -1/2, ``[N]``; 0 for nodes without in-edges, of which ``has_loops`` leaves none."""
    return graph.degree_scale("dst", -0.5, dtype, isolated=1.0 if has_loops else 0.0)


class _Norm(NamedTuple):
    """A normalisation: the factor of edge e from j to i is ``scale[i] * weight[e] * scale[j]``; None stands for 1."""

    graph: Graph
    weight: Optional[Tensor]  # [E]
    scale: Optional[Tensor]  # [N]
