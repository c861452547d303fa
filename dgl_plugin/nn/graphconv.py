"""GraphConv of DGL, fused."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from edgeless.autocast import autocasts
from edgeless.functional import spmm
from edgeless.functional.map_order import sums_first
from edgeless.functional.projection import add_row, product

from .._autocast import as_dgl_reads
from .._framework import stock
from ..convert import relation_of
from ._layer import DGLLayer
from ._sums import edge_weight_refusal, per_edge


class GraphConv(DGLLayer, stock.GraphConv):
    r"""``dgl.nn.GraphConv`` with both normalisations inside the sum: same signature, parameters and results.

    Kipf, Welling: "Semi-Supervised Classification with Graph Convolutional Networks", ICLR 2017, equation 2, for any
    of the four norms, with optional weights :math:`w` of the edges:

    .. math:: o_i = \sigma\bigl(b + d_i \sum_{e = (j, i)} w_e\, s_j\, W^\top x_j\bigr)

    All options of the upstream constructor are covered. As upstream, rows are summed on the narrower side of :math:`W`,
    except for features without gradient and blocks of few destinations, where summing first is profitable
    (:mod:`edgeless.functional.map_order`). float32, float64, bfloat16, float16.
    """

    _ops = ("spmm", "sddmm")

    _batch_dims = True
    _sources_suffice = True

    def forward(self, graph, feat, weight=None, edge_weight=None):
        r"""The new features of the destination nodes.

        Args:
            graph (DGLGraph): homogeneous, one relation of a heterograph, or a block; or an :class:`edgeless.Graph`.
            feat (Tensor or pair of Tensors): ``[N, *, F]``, or ``[Ns, *, F]`` and any Tensor of ``Nd`` rows and as many
                dimensions, of which only the dtype counts.
            weight (Tensor, optional): ``[F, C]`` for a layer made with ``weight=False``.
            edge_weight (Tensor, optional): ``[E]`` or ``[E, 1]``, of feat's dtype.

        Returns:
            Tensor ``[Nd, *, C]``.

        Raises:
            dgl.DGLError: what the upstream layer raises, such as for zero-in-degree nodes when they are not allowed.
            edgeless.NotFusedError: under ``edgeless.backend("fused")``, where :func:`edgeless.explain` says why.
        """
        return self._call(graph, feat, weight, edge_weight)

    @property
    def _maps_first(self) -> bool:
        return self.weight is not None and self._in_feats > self._out_feats

    def _fusion_refusals(self, graph, feat, weight=None, edge_weight=None):
        reasons = super()._fusion_refusals(graph, feat)
        if reasons:
            return reasons
        if weight is not None and self.weight is not None:
            reasons.append("weight is given, but the layer has its own")
        if weight is not None and not isinstance(weight, Tensor):
            reasons.append(f"weight is a {type(weight).__name__}, not a Tensor")
        if isinstance(feat, tuple) and feat[0].dim() != feat[1].dim():
            reasons.append(f"feat is a pair of {feat[0].dim()} and {feat[1].dim()} dimensions")
        if edge_weight is not None and (reason := edge_weight_refusal(relation_of(graph), feat, edge_weight)):
            reasons.append(reason)
        return reasons

    def _fused_forward(self, relation, feat, weight=None, edge_weight=None):
        x, x_dst = feat if isinstance(feat, tuple) else (feat, feat)
        weight = self.weight if weight is None else weight
        edge_weight = per_edge(relation.handle, edge_weight)
        before = weight is not None and self._in_feats > self._out_feats
        if before and weight.dim() == 2 and x.dtype == x_dst.dtype:
            before = not sums_first(relation.handle, x, weight.t(), edge_weight, None)
        after = weight is not None and not before
        if before:
            x = product(x, weight)
        x = as_dgl_reads(x)
        # The upstream layer applies the in-degrees' norm last, in the dtype of the destinations' features.
        norm_dtype = x_dst.dtype if self._norm in ("right", "both") else None
        out_dtype = x.dtype if after else _promoted(x.dtype, norm_dtype)
        out = spmm(relation.handle, x, edge_weight, norm=self._norm, out_dtype=out_dtype)
        bias = self.bias
        if after and bias is not None and _adds_for_free(bias, out, weight, norm_dtype):
            out, bias = product(out, weight, bias), None
        elif after:
            out = product(out, weight)
            out = out.to(_promoted(out.dtype, norm_dtype))
        if bias is not None:
            out = add_row(out, bias)
        return out if self._activation is None else self._activation(out)


def _promoted(dtype: torch.dtype, other: Optional[torch.dtype]) -> torch.dtype:
    return dtype if other is None else torch.promote_types(dtype, other)


def _adds_for_free(bias: Tensor, x: Tensor, weight: Tensor, norm_dtype: Optional[torch.dtype]) -> bool:
    """True if a product that adds the bias has the same dtypes as the upstream layer's separate steps."""
    one_dtype = bias.dtype == x.dtype == weight.dtype == _promoted(x.dtype, norm_dtype)
    return one_dtype and x.dim() == 2 and not autocasts(x.device.type)
