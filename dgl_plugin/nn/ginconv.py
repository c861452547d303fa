"""GINConv of DGL, fused."""

from __future__ import annotations

from typing import Optional

import torch

from edgeless.functional import neighbor_reduce, spmm
from edgeless.functional.map_order import first_map, maps_first
from edgeless.functional.projection import add_row, product

from .._autocast import as_dgl_reads
from .._framework import stock
from ..convert import relation_of
from ._layer import DGLLayer, destinations
from ._sums import edge_weight_refusal, per_edge


class GINConv(DGLLayer, stock.GINConv):
    r"""``dgl.nn.GINConv`` on fused sums and maxima: same signature, parameters, initialisation and results.

    Xu et al.: "How Powerful are Graph Neural Networks?", ICLR 2019, equation 4.1, with a sum, mean or maximum:

    .. math:: o_i = f\bigl((1 + \epsilon)\, x_i + \operatorname{aggregate}(\{x_j\})\bigr)

    A maximum with ``edge_weight`` runs the upstream layer. If f begins with a linear map to fewer columns, rows are
    mapped before they are summed (:mod:`edgeless.functional.map_order`). float32, float64, bfloat16, float16.
    """

    _ops = ("spmm", "sddmm", "neighbor_reduce")

    def forward(self, graph, feat, edge_weight=None):
        r"""The new features of the destination nodes.

        Args:
            graph (DGLGraph): homogeneous, one relation of a heterograph, or a block; or an :class:`edgeless.Graph`.
            feat (Tensor or pair of Tensors): ``[N, F]``, or ``[Ns, F]`` and ``[Nd, F]``. Of one Tensor, a block takes
                the first ``Nd`` rows for its destinations.
            edge_weight (Tensor, optional): ``[E]`` or ``[E, 1]``, of feat's dtype, multiplies the messages.

        Returns:
            Tensor ``[Nd, F]``, or the result of ``apply_func`` for it.

        Raises:
            dgl.DGLError: what the upstream layer raises.
            edgeless.NotFusedError: under ``edgeless.backend("fused")``, where :func:`edgeless.explain` says why.
        """
        return self._call(graph, feat, edge_weight)

    def _fusion_refusals(self, graph, feat, edge_weight=None):
        reasons = super()._fusion_refusals(graph, feat)
        if reasons or edge_weight is None:
            return reasons
        if self._aggregator_type == "max":
            return ["edge_weight comes with the aggregator max"]
        reason = edge_weight_refusal(relation_of(graph), feat, edge_weight)
        return [] if reason is None else [reason]

    def _fused_forward(self, relation, feat, edge_weight=None):
        x, x_dst = feat if isinstance(feat, tuple) else (feat, destinations(relation, feat))
        x, handle = as_dgl_reads(x), relation.handle
        network, bias = self.apply_func, None
        if self._aggregator_type == "max":
            neighbors = neighbor_reduce(handle, x, "max", ties="first")
        else:
            edge_weight = per_edge(handle, edge_weight)
            first = None if isinstance(feat, tuple) else self._mapped_first(handle, x, edge_weight)
            if first is not None:
                linear, network = first
                x, bias = product(x, linear.weight.t()), linear.bias
                x_dst = destinations(relation, x)
            neighbors = spmm(handle, x, edge_weight, reduce=self._aggregator_type, out_dtype=x.dtype)
            if bias is not None:
                neighbors = add_row(neighbors, bias)
        out = torch.addcmul(neighbors, x_dst, 1 + self.eps)
        if network is not None:
            out = network(out)
        return out if self.activation is None else self.activation(out)

    def _mapped_first(self, handle, x, edge_weight) -> Optional[tuple]:
        """The first linear map of apply_func and the rest of it, if mapping before the sum is profitable, else None."""
        if self.apply_func is None or self.eps.dtype != x.dtype or (parts := first_map(self.apply_func)) is None:
            return None
        return parts if maps_first(handle, x, parts[0].weight, edge_weight, None) else None
