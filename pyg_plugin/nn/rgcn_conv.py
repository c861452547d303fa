"""RGCNConv and FastRGCNConv of PyG on sums over relations."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor
from torch_geometric.nn.conv import rgcn_conv

from edgeless.autocast import autocasts, rounds_to
from edgeless.checks import opmath_dtype
from edgeless.choices.backends import kernel_refusal
from edgeless.functional import gather_mm, neighbor_reduce, spmm
from edgeless.functional.projection import add_map
from edgeless.functional.relational_layer import relational_layer
from edgeless.graph.typed import TypedGraph
from edgeless.layers.adapter import inference_refusal

from ..conv import FusedConv, is_plain_float
from ..convert import Part, SparseStorage, kind_of
from ..neighbors import NeighborReduction
from ..relations import embedding_graph, is_ids, source_rows, typed_graph, typed_refusal

_NAMES = {"add": "sum", "sum": "sum", "mean": "mean", "min": "min", "max": "max"}


class _Relational:
    """Mixin of both layers, which list it before :class:`FusedConv`."""

    node_dims = (0,)
    aggregations = NeighborReduction.aggregations
    _extrema = True  # whether the upstream layer supports extrema

    def forward(self, x, edge_index, edge_type=None):
        """The layer's output.

        Raises:
            IndexError: edge_index or x has an id, or edge_type a relation, that is out of range.
        """
        return self._choose(x, edge_index, edge_type)

    # Predicates ------------------------------------------------------------------------------------------------------

    def _fusion_refusals(self, x, edge_index, edge_type=None) -> list[str]:
        reasons, weight = self._module_refusals(), self.weight
        reduce, device = self._reduce, weight.device
        if not reasons and _NAMES.get(self.aggr) != reduce:
            reasons.append(f"aggr is {self.aggr!r} and aggr_module is {self.aggr_module}")
        if not reasons and reduce in ("min", "max") and not self._extrema:
            reasons.append(f"aggr is {self.aggr!r}, which the stock layer rejects")
        if reason := kernel_refusal(device, "relational_sum"):  # stands for the other ops too
            reasons.append(reason)
        if kind_of(edge_index) is Part and (not is_plain_float(x) or x.dim() != 2):
            reasons.append("edge_index is a DistGraph, with nodes of one kind, and x no plain floating tensor [N, F]")
        elif (reason := self._feature_refusal(x, weight, reduce)) or (
            reason := typed_refusal(self, edge_index, edge_type, *self._sizes(x), device)
        ):
            reasons.append(reason)
        return reasons

    def _feature_refusal(self, x: Any, weight: Tensor, reduce: Optional[str]) -> Optional[str]:
        x_l, x_r = _pair(x)
        if isinstance(x, tuple) and (len(x) != 2 or x_r is None):
            return "x is no pair of the features of sources and destinations"
        sides = (x_l,) if x_r is x_l else (x_l, x_r)
        for given in sides:
            if isinstance(given, Tensor) and given.device != weight.device:
                return f"the features are on {given.device} and the layer is on {weight.device}"
        if (x_l is None or is_ids(x_l)) and (x_r is None or is_ids(x_r)):
            if self.num_blocks is not None:
                return "num_blocks is set and the features are ids, which the stock layer rejects"
            return "aggr is an extremum and the features are ids" if reduce in ("min", "max") else None
        for given in sides:
            if not is_plain_float(given) or given.dim() != 2:
                return "the features are neither plain floating tensors [N, F] nor ids [N] on both sides"
            if reason := inference_refusal(given):
                return reason
        root = self.root
        if x_l.size(1) != self.in_channels_l or (root is not None and x_r.size(1) != root.size(0)):
            takes = (self.in_channels_l, x_r.size(1) if root is None else root.size(0))
            return f"the features have {x_l.size(1)} and {x_r.size(1)} numbers, and the layer takes {takes}"
        dtypes = {x_l.dtype, x_r.dtype, weight.dtype}
        if autocasts(weight.device.type):
            return f"autocast is on and there are the dtypes {dtypes}" if torch.float64 in dtypes else None
        return f"the features and the weights are of the dtypes {dtypes}" if len(dtypes) > 1 else None

    @property
    def _reduce(self) -> Optional[str]:
        return self.aggregations.get(type(self.aggr_module))

    def _sizes(self, x: Any) -> tuple[int, int]:
        x_l, x_r = _pair(x)
        num_src = self.in_channels_l if x_l is None else x_l.size(0)
        return num_src, num_src if x_r is None else x_r.size(0)

    # The layer -------------------------------------------------------------------------------------------------------

    def _fused_forward(self, x, edge_index, edge_type):
        x_l, x_r = _pair(x)
        graph = typed_graph(self, edge_index, edge_type, *self._sizes(x))
        reduce, root, bias = self._reduce, self.root, self.bias
        of_ids = x_l is None or is_ids(x_l)
        dtype = self._result_dtype(of_ids)
        if of_ids:
            out = self._sum_of_embeddings(graph, x_l, dtype)
            if root is not None:
                out = out + (root[: graph.num_dst] if x_r is None else root[x_r])
            return add_map(out, None, None, bias)
        x_l = source_rows(edge_index, x_l)
        if reduce in ("min", "max"):
            return add_map(self._sum_of_extrema(graph, x_l, edge_index).to(dtype), x_r, root, bias)
        own = None if root is None or x_r is x_l else x_r
        return relational_layer(
            graph, x_l, self._weights(), own=own, root=root, bias=bias, reduce=reduce, out_dtype=dtype
        )

    def _weights(self) -> Tensor:
        """The relations' matrices ``[R, in, out]``, or ``[R, blocks, in / blocks, out / blocks]``."""
        if self.num_bases is None:
            return self.weight
        weight = self.comp @ self.weight.view(self.num_bases, -1)
        return weight.view(self.num_relations, self.in_channels_l, self.out_channels)

    def _sum_of_embeddings(self, graph: TypedGraph, ids: Optional[Tensor], dtype: torch.dtype) -> Tensor:
        """The layer's sum for features that are ids: (relation, id) is the source, and its row of the weights is
        gathered."""
        table = self._weights().reshape(-1, self.out_channels)
        weight = graph.mean_weight(opmath_dtype(table.dtype)) if self._reduce == "mean" else None
        return spmm(embedding_graph(graph, ids, self.in_channels_l), table, weight, out_dtype=dtype)

    def _sum_of_extrema(self, graph: TypedGraph, x: Tensor, edge_index: Any) -> Tensor:
        """The sum over relations of the neighbours' extremum times the relation's matrix."""
        pairs = graph.pairs
        sparse = kind_of(edge_index) is SparseStorage and self.fuse  # then one of equal rows gets the gradient
        best = neighbor_reduce(pairs.neighbors, x, self._reduce, ties="first" if sparse else "scatter")
        types = torch.arange(graph.num_types, device=x.device)
        types = types.repeat_interleave(pairs.offsets.diff(), output_size=best.size(0))
        return spmm(pairs.sums, gather_mm(best, self._weights(), types))

    def _stock_forward(self, x, edge_index, edge_type):
        if isinstance(edge_index, TypedGraph):
            edge_index, edge_type = edge_index.graph, edge_index.edge_type
        if isinstance(edge_type, Tensor) and edge_type.dtype == torch.int32:
            edge_type = edge_type.long()  # torch.gather needs int64 indices, see for_stock
        return super()._stock_forward(x, edge_index, edge_type)


class RGCNConv(_Relational, FusedConv, rgcn_conv.RGCNConv):
    r"""The relational graph convolution (Schlichtkrull et al.: "Modeling Relational Data with Graph Convolutional
    Networks", ESWC 2018).

    Constructor, parameters and results are those of :class:`torch_geometric.nn.RGCNConv`, as its loop over relations
    computes them: a mean is over the in-edges of one relation. With pyg-lib installed, the upstream layer divides by
    the number of all in-edges instead. Nothing of the size ``[E, F]`` or of relations times nodes is allocated.

    Shapes:
        x: ``[N, F]``, ids ``[N]``, None, or a pair of sources' and destinations'; edge_index: ``[2, E]`` tensor or
        EdgeIndex, SparseTensor ``[Nd, Ns]`` whose values are the relations, :class:`edgeless.Graph`,
        :class:`edgeless.distributed.DistGraph`, or
        :class:`edgeless.TypedGraph` in place of edge_index and edge_type; edge_type: ``[E]``; output: ``[Nd, C]``.
    """

    # Read by PyG when it writes propagate(), which the upstream path uses:
    # propagate_type: (x: Tensor, edge_type_ptr: OptTensor)

    def _result_dtype(self, of_ids: bool) -> torch.dtype:
        default, own = torch.get_default_dtype(), self.weight.dtype
        return own if own is default else torch.promote_types(default, own)


class FastRGCNConv(_Relational, FusedConv, rgcn_conv.FastRGCNConv):
    r"""The same layer as :class:`RGCNConv`, with sums and means, in the dtype of the features.

    Constructor, parameters and results are those of :class:`torch_geometric.nn.FastRGCNConv`, which gathers a weight
    for every edge. Features may be ids, in whose place the upstream layer uses the indices of the nodes.

    Shapes: as of :class:`RGCNConv`.
    """

    # Read by PyG when it writes propagate(), which the upstream path uses:
    # propagate_type: (x: Tensor, edge_type: OptTensor)

    _extrema = False

    def _result_dtype(self, of_ids: bool) -> torch.dtype:
        """The upstream result's dtype. Autocast rounds products with weights, but not gathered rows and the bias."""
        device = self.weight.device.type
        rounded = None if of_ids and self.num_bases is None else rounds_to(device)
        if rounded is None:
            return self.weight.dtype
        if self._reduce == "mean" and device == "cuda":  # autocast has reciprocals in float32 there
            rounded = torch.promote_types(rounded, torch.float32)
        others = [self.bias] if not of_ids else [self.bias, self.root]
        for other in others:
            rounded = rounded if other is None else torch.promote_types(rounded, other.dtype)
        return rounded


def _pair(x: Any) -> tuple:
    return x if isinstance(x, tuple) and len(x) == 2 else (x, x)
