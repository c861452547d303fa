"""SAGEConv of DGL, fused."""

from __future__ import annotations

import torch

from edgeless.checks import opmath_dtype
from edgeless.functional import neighbor_reduce, spmm
from edgeless.functional.checks import promoted
from edgeless.functional.layer import sum_layer
from edgeless.functional.map_order import sums_first
from edgeless.functional.projection import add, pays, project, project_sum
from edgeless.layers.adapter import is_plain

from .._autocast import as_dgl_reads
from .._framework import stock
from ..convert import relation_of
from ._layer import DGLLayer, destinations
from ._sums import edge_weight_refusal, per_edge


class SAGEConv(DGLLayer, stock.SAGEConv):
    r"""``dgl.nn.SAGEConv`` on fused sums and maxima: same signature, parameters, initialisation and results.

    Hamilton, Ying, Leskovec: "Inductive Representation Learning on Large Graphs", NeurIPS 2017, algorithm 1 and
    section 3.3:

    .. math:: o_i = W_{self} x_i + W_{neigh} \operatorname{aggregate}(\{x_j\})

    with the aggregators mean, gcn (the mean over the node and its neighbours, without the first term) and pool (the
    maximum of :math:`\mathrm{ReLU}(W_{pool} x_j + b)`). ``lstm`` and ``pool`` with ``edge_weight`` run the
    upstream layer. As upstream, rows are summed on the narrower side of :math:`W_{neigh}`, except for features without
    gradient and blocks of few destinations, where summing first is profitable
    (:mod:`edgeless.functional.map_order`). float32, float64, bfloat16, float16.
    """

    _ops = ("spmm", "sddmm", "neighbor_reduce")

    def forward(self, graph, feat, edge_weight=None):
        r"""The new features of the destination nodes.

        Args:
            graph (DGLGraph): homogeneous, one relation of a heterograph, or a block; or an :class:`edgeless.Graph`.
            feat (Tensor or pair of Tensors): ``[N, F]``, or ``[Ns, Fs]`` and ``[Nd, Fd]``. Of one Tensor, a block takes
                the first ``Nd`` rows for its destinations.
            edge_weight (Tensor, optional): ``[E]`` or ``[E, 1]``, of feat's dtype, multiplies the messages.

        Returns:
            Tensor ``[Nd, C]``.

        Raises:
            dgl.DGLError: what the upstream layer raises.
            edgeless.NotFusedError: under ``edgeless.backend("fused")``, where :func:`edgeless.explain` says why.
        """
        return self._call(graph, feat, edge_weight)

    @property
    def _maps_first(self) -> bool:
        return self._aggre_type == "pool" or self._in_src_feats > self._out_feats

    def _state_refusals(self):
        reasons = super()._state_refusals()
        if self._aggre_type == "lstm":
            reasons.append("aggregator_type is lstm, which is no sum, mean or maximum")
        return reasons

    def _fusion_refusals(self, graph, feat, edge_weight=None):
        reasons = super()._fusion_refusals(graph, feat)
        if reasons:
            return reasons
        if self._aggre_type == "gcn" and isinstance(feat, tuple) and feat[0].size(1) != feat[1].size(1):
            reasons.append(f"feat is a pair of {feat[0].size(1)} and {feat[1].size(1)} columns, and the aggregator gcn")
        if edge_weight is not None:
            if self._aggre_type == "pool":
                reasons.append("edge_weight comes with the aggregator pool")
            elif reason := edge_weight_refusal(relation_of(graph), feat, edge_weight):
                reasons.append(reason)
        return reasons

    def _fused_forward(self, relation, feat, edge_weight=None):
        if isinstance(feat, tuple):
            x, x_dst = self.feat_drop(feat[0]), self.feat_drop(feat[1])
        else:
            x = self.feat_drop(feat)
            x_dst = destinations(relation, x)
        edge_weight = per_edge(relation.handle, edge_weight)
        out, mapped = None, self._maps_neighbors(relation.handle, x, x_dst, edge_weight)
        if self._aggre_type == "mean" and x is x_dst and not mapped:
            linears = (self.fc_neigh, self.fc_self)
            out = sum_layer(relation.handle, x, *linears, weight=edge_weight, reduce="mean")
        if out is None:
            out = self._in_parts(relation, x, x_dst, edge_weight, isinstance(feat, tuple), mapped)
        if self.activation is not None:
            out = self.activation(out)
        return out if self.norm is None else self.norm(out)

    def _maps_neighbors(self, handle, x, x_dst, edge_weight) -> bool:
        """True if fc_neigh is applied to the neighbours' rows, not to their sum or maximum."""
        if self._aggre_type == "pool" or self._in_src_feats <= self._out_feats:
            return False
        linear = self.fc_neigh
        alike = x_dst.dtype == x.dtype and x_dst.layout is torch.strided
        may_sum = alike and is_plain(linear) and linear.bias is None
        return not (may_sum and sums_first(handle, x, linear.weight, edge_weight, None))

    def _in_parts(self, relation, x, x_dst, edge_weight, pair, mapped):
        """The layer up to its activation, step by step.

        Args:
            pair: whether feat was a pair.
            mapped: the result of :meth:`_maps_neighbors`.
        """
        if self._aggre_type == "pool":
            h = as_dgl_reads(_relu(project(x, self.fc_pool)[0], own=is_plain(self.fc_pool)))
            neighbors = neighbor_reduce(relation.handle, h, "max", ties="first")
        else:
            aggregate = self._mean if self._aggre_type == "mean" else self._mean_with_self
            pair = pair and self._aggre_type == "gcn"
            # For this aggregator the upstream layer stores both tensors of a pair under one name. If sources and
            # destinations are the same nodes, the second overwrites the first.
            x = x_dst if pair and relation.one_node_type else x
            h = project(x, self.fc_neigh)[0] if mapped else x
            if pair and not relation.one_node_type:
                h_dst = self.fc_neigh(x_dst) if mapped else x_dst
            else:
                h_dst = destinations(relation, h)
            neighbors = aggregate(relation.handle, h, h_dst, x_dst.dtype, edge_weight)
        if self._aggre_type != "gcn":
            if mapped:
                return add(project(x_dst, self.fc_self)[0], neighbors, own=is_plain(self.fc_self))
            return project_sum((x_dst, neighbors), (self.fc_self, self.fc_neigh))
        neighbors = neighbors if mapped else project(neighbors, self.fc_neigh)[0]
        return neighbors if self.bias is None else neighbors + self.bias

    @staticmethod
    def _mean(handle, h, h_dst, dtype, edge_weight):
        h = as_dgl_reads(h)
        return spmm(handle, h, edge_weight, reduce="mean", out_dtype=h.dtype)

    @staticmethod
    def _mean_with_self(handle, h, h_dst, dtype, edge_weight):
        """The mean over a node and its neighbours. ``dtype`` is the dtype of the degrees upstream."""
        h = as_dgl_reads(h)
        dtype = torch.promote_types(promoted((h, h_dst)), dtype)
        scale = 1 / (handle.in_degrees() + 1).to(opmath_dtype(dtype))
        total = spmm(handle, h, edge_weight, dst_scale=scale, out_dtype=dtype)
        return torch.addcmul(total, h_dst.to(dtype), scale.to(dtype).unsqueeze(1))


class _ReluInPlace(torch.autograd.Function):
    """ReLU in place, for a tensor that nobody else holds; the gradient of its result is overwritten in the backward."""

    @staticmethod
    def forward(ctx, h):
        ctx.mark_dirty(h.relu_())
        ctx.save_for_backward(h)
        return h

    @staticmethod
    def backward(ctx, grad):
        (h,) = ctx.saved_tensors
        batched = "Batched" in str(torch._C._dispatch_keys(grad))  # under is_grads_batched grad cannot be overwritten
        into = {} if torch.is_grad_enabled() or batched else {"grad_input": grad}
        return torch.ops.aten.threshold_backward(grad, h, 0, **into)


def _relu(h: torch.Tensor, own: bool) -> torch.Tensor:
    """ReLU, in place for a large result: first touches of new memory for it and its gradient take most of its time.

    ``own``: h comes from a plain linear map and the result goes to one op, so nobody else reads h or the gradient.
    """
    return _ReluInPlace.apply(h) if own and h.dim() == 2 and pays(h, h.size(1)) else h.relu()
