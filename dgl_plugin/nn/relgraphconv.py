"""RelGraphConv of DGL, fused."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from edgeless import Graph
from edgeless.autocast import autocasts, rounds_to
from edgeless.functional import relational_sum
from edgeless.functional.checks import promoted
from edgeless.functional.projection import add_map
from edgeless.functional.relational_layer import relational_layer
from edgeless.layers.adapter import is_plain

from .._framework import stock
from ..convert import Relation, relation_of
from ._layer import DGLLayer
from ._relations import etypes_refusal, source_rows, typed_graph
from .typedlinear import TYPED_LINEARS, weights_of


class RelGraphConv(DGLLayer, stock.RelGraphConv):
    r"""``dgl.nn.RelGraphConv`` without per-edge rows or weight matrices: same signature, parameters and results.

    Schlichtkrull et al.: "Modeling Relational Data with Graph Convolutional Networks", ESWC 2018:

    .. math:: o_i = \sigma\Bigl(W_0 x_i + b + \sum_r \bigl(\sum_{e = (j, i) \in E_r} n_e\, x_j\bigr) W_r\Bigr)

    All options of the upstream constructor are covered. float32, float64, bfloat16, float16.
    """

    _ops = ("relational_sum", "typed_mm")
    _steps = (stock.RelGraphConv.message,)

    _sources_suffice = True

    def forward(self, g, feat, etypes, norm=None, *, presorted=False):
        r"""The new features of the destination nodes.

        Args:
            g (DGLGraph): homogeneous, one relation of a heterograph, or a block; or an :class:`edgeless.Graph`.
            feat (Tensor): source features ``[Ns, F]``; with ``self_loop`` the first ``Nd`` rows are the destinations.
            etypes (Tensor): ``[E]`` integers, the relations of the edges.
            norm (Tensor, optional): ``[E, 1]`` or ``[E]``; default is ``g.edata["norm"]`` if there is one.
            presorted (bool): whether the edges are sorted by relation, which makes no difference here.

        Returns:
            Tensor ``[Nd, C]``.

        Raises:
            IndexError: etypes has a relation that the layer does not have.
            edgeless.NotFusedError: under ``edgeless.backend("fused")``, where :func:`edgeless.explain` says why.
        """
        return self._call(g, feat, etypes, norm, presorted)

    def _fusion_refusals(self, g, feat, etypes, norm=None, presorted=False) -> list[str]:
        reasons = super()._fusion_refusals(g, feat)
        if reasons:
            return reasons
        relation = relation_of(g)
        handle, weight = relation.handle, self.linear_r.W
        if not is_plain(self.linear_r, TYPED_LINEARS):
            reasons.append("linear_r is not a plain TypedLinear, or has hooks or another forward")
        if isinstance(feat, tuple):
            reasons.append("feat is a pair, which the stock layer rejects")
        elif feat.size(1) != self.linear_r.in_size:
            reasons.append(f"feat has {feat.size(1)} features, and the layer takes {self.linear_r.in_size}")
        elif reason := _unlike("feat", feat, weight):
            reasons.append(reason)
        elif self.self_loop and handle.num_dst > handle.num_src:
            reasons.append("self_loop is set and there are more destinations than sources")
        if reason := etypes_refusal(handle, etypes) or _norm_refusal(handle, _norm_of(relation, norm), weight):
            reasons.append(reason)
        return reasons

    def _fused_forward(self, relation, feat, etypes, norm, presorted):
        self.presorted = presorted  # as the upstream layer does
        handle, norm = relation.handle, _norm_of(relation, norm)
        graph = typed_graph(handle, etypes, self.linear_r.num_types)
        norm = None if norm is None else norm.reshape(-1)
        weight, dtype, rounded = weights_of(self.linear_r), feat.dtype, rounds_to(feat.device.type)
        x = feat
        if rounded is not None:
            x, weight = feat.to(rounded), weight.to(rounded)
            # The upstream layer multiplies rounded products by norm, and on CUDA rounds the messages before their sum.
            dtype = rounded if feat.is_cuda else promoted((x, norm))
        (x,) = source_rows(handle, x)
        root = self.loop_weight if self.self_loop else None
        bias = self.h_bias if self.bias else None
        if self.layer_norm:
            h = relational_sum(graph, x, weight, norm, out_dtype=dtype)
            h = add_map(self.layer_norm_weight(h), feat[: handle.num_dst], root, bias)
        else:
            own = feat[: handle.num_dst] if self.self_loop and x is not feat else None
            h = relational_layer(graph, x, weight, norm, own=own, root=root, bias=bias, out_dtype=dtype)
        if self.activation:
            h = self.activation(h)
        return self.dropout(h)

    def _stock_forward(self, g, feat, etypes, norm, presorted):
        g = self._for_stock(g, feat, etypes, norm)
        return stock.RelGraphConv.forward(self, g, feat, etypes, norm, presorted=presorted)


def _norm_of(relation: Relation, norm: Any) -> Any:
    """The factor of the messages: ``norm``, or else ``g.edata["norm"]``, as upstream."""
    if norm is not None or isinstance(relation.graph, Graph):
        return norm
    return relation.graph.edata.get("norm")


def _norm_refusal(handle: Graph, norm: Any, weight: Tensor) -> Optional[str]:
    if norm is None:
        return None
    if not isinstance(norm, Tensor) or tuple(norm.shape) not in ((handle.num_edges,), (handle.num_edges, 1)):
        what = list(norm.shape) if isinstance(norm, Tensor) else type(norm).__name__
        return f"norm is not a Tensor of shape [E, 1] or [E] with E = {handle.num_edges}, but {what}"
    return _unlike("norm", norm, weight)


def _unlike(name: str, x: Tensor, weight: Tensor) -> Optional[str]:
    """Returns why the dtype or device of ``x`` does not fit the weights, or None. Autocast converts all dtypes but
    float64.
    """
    if x.dtype == weight.dtype != torch.float64 and x.device == weight.device:
        return None
    rounds = autocasts(x.device.type)
    if rounds and torch.float64 in (x.dtype, weight.dtype):
        return f"autocast is on, {name} is {x.dtype} and the weights are {weight.dtype}"
    if (x.dtype != weight.dtype and not rounds) or x.device != weight.device:
        return f"{name} is {x.dtype} on {x.device}, and the weights {weight.dtype} on {weight.device}"
    return None
