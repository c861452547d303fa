"""GATConv of DGL, fused."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from edgeless.autocast import autocasts
from edgeless.distributed.graph import DistGraph
from edgeless.functional import gat_attention
from edgeless.functional.projection import add_row, node_logits, project_with_logits

from .._framework import stock
from ..convert import relation_of
from ._layer import DGLLayer, destinations, heads_of, with_residual


class GATConv(DGLLayer, stock.GATConv):
    r"""``dgl.nn.GATConv`` without an edge tensor: same signature, parameters, initialisation and results.

    Veličković et al.: "Graph Attention Networks", ICLR 2018, equation 3, for H heads of C channels, with the attention
    vector in two halves, :math:`a_l` (``attn_l``) for sources and :math:`a_r` (``attn_r``) for destinations:

    .. math:: o_i = \sum_j \mathrm{softmax}_j(\mathrm{LeakyReLU}(a_l^\top W x_j + a_r^\top W x_i))\, w_{ij} W x_j

    All options of the upstream constructor are covered. The mask of ``attn_drop`` comes from edgeless's generator,
    seeded by torch's: rate and scale are as upstream, the dropped edges differ. float32, float64, bfloat16, float16.
    """

    _maps_first = True
    _one_dtype = True
    _taken_over = (("attn_drop", nn.Dropout), ("leaky_relu", nn.LeakyReLU))
    _batch_dims = True

    def forward(self, graph, feat, edge_weight=None, get_attention=False):
        r"""The new features of the destination nodes.

        Args:
            graph (DGLGraph): homogeneous, one relation of a heterograph, or a block; or an :class:`edgeless.Graph`.
            feat (Tensor or pair of Tensors): ``[N, *, F]``, or ``[Ns, *, Fs]`` and ``[Nd, *, Fd]``. Of one Tensor, a
                block takes the first ``Nd`` rows for its destinations.
            edge_weight (Tensor, optional): :math:`w` ``[E]``, multiplies the weights after softmax and dropout.
            get_attention (bool): also return the attention weights, after dropout and times ``edge_weight``.

        Returns:
            Tensor ``[Nd, *, H, C]``, or that and the weights ``[E, *, H, 1]`` in the order of the graph's edge ids.

        Raises:
            dgl.DGLError: what the upstream layer raises, such as for zero-in-degree nodes when they are not allowed.
            edgeless.NotFusedError: under ``edgeless.backend("fused")``, where :func:`edgeless.explain` says why.
        """
        return self._call(graph, feat, edge_weight, get_attention)

    def _fusion_refusals(self, graph, feat, edge_weight=None, get_attention=False):
        reasons = super()._fusion_refusals(graph, feat)
        if self._num_heads == 0:
            reasons.append("num_heads is 0")
        if edge_weight is not None and not reasons:
            reasons = _edge_weight_refusals(relation_of(graph).handle.num_edges, feat, edge_weight)
        return reasons

    def _fused_forward(self, relation, feat, edge_weight=None, get_attention=False):
        graph, vectors, bias = relation.handle, (self.attn_l, self.attn_r), self.bias
        has_residual = self.res_fc is not None
        dropout, slope = self._attention_dropout(), self.leaky_relu.negative_slope
        if isinstance(feat, tuple):
            h_src, h_dst = self.feat_drop(feat[0]), self.feat_drop(feat[1])
            fc_src, fc_dst = (self.fc_src, self.fc_dst) if hasattr(self, "fc_src") else (self.fc, self.fc)
            x, a_l = self._with_logits(h_src, fc_src, vectors[0])
            _, a_r = self._with_logits(h_dst, fc_dst, vectors[1])
        else:
            h_src, fc = self.feat_drop(feat), self.fc
            h_dst = destinations(relation, h_src)
            if h_src is h_dst and edge_weight is None and not (has_residual or get_attention):
                out = self._whole(graph, "gat", h_src, (fc,), vectors, bias, slope, dropout)
                if out is not None:
                    return self.activation(out) if self.activation else out
            if type(graph) is DistGraph and graph.sends_input(h_src, self._num_heads * self._out_feats):
                x, a_l, a_r = graph.map_sources(h_src, lambda x: self._with_logits(x, fc, *vectors))
                graph = graph.local
                a_r = a_r[: graph.num_dst]
            else:
                x, a_l, a_r = self._with_logits(h_src, fc, *vectors)
                a_r = destinations(relation, a_r)
        batch = x.shape[1:-2]
        if edge_weight is not None:
            edge_weight = edge_weight.to(x.dtype)
        # The kernel has one head dimension, so batch dimensions become further heads.
        out = gat_attention(
            graph,
            x.flatten(1, -2),
            a_l,
            a_r,
            negative_slope=slope,
            edge_scale=edge_weight,
            dropout=dropout,
            return_weights="dropped" if get_attention else None,
            out_dtype=x.dtype,
        )
        out, weights = out if get_attention else (out, None)
        out = out.view(out.size(0), *batch, self._num_heads, self._out_feats)
        if has_residual:
            out = with_residual(self, out, h_dst)
        if bias is not None:
            out = add_row(out.flatten(-2), bias.flatten()).view(out.shape)
        if self.activation:
            out = self.activation(out)
        if not get_attention:
            return out
        if edge_weight is not None:
            weights = weights * edge_weight.unsqueeze(-1)
        return out, weights.view(weights.size(0), *batch, self._num_heads, 1)

    def _with_logits(self, h: Tensor, fc: nn.Module, *vectors: Tensor) -> tuple[Tensor, ...]:
        """The projection ``[N, *, H, C]`` of ``h``, and its terms of the logits for each attention vector."""
        if h.dim() == 2 and (found := project_with_logits(h, fc, *vectors)) is not None:
            return heads_of(found[0], self), *found[1:]
        x = heads_of(fc(h), self)
        return x, *_logits(x, *vectors)


def _logits(x: Tensor, *vectors: Tensor):
    """The nodes' terms of the logits, ``[N, B * H]`` for each vector ``[1, H, C]``, from ``x`` ``[N, *, H, C]``.

    One matrix product per head reads ``x`` once and, unlike ``(x * a).sum(-1)``, saves no tensor of the size of ``x``.
    """
    if (found := node_logits(x, *(a.to(x.dtype) for a in vectors))) is not None:
        return found
    heads = x.flatten(1, -2).transpose(0, 1)  # [B * H, N, C]
    columns = torch.cat(vectors).to(x.dtype).permute(1, 2, 0)  # [H, C, number of vectors]
    columns = columns.repeat(heads.size(0) // columns.size(0), 1, 1)
    found = torch.bmm(heads, columns).permute(2, 1, 0).unbind(0)
    return found


def _edge_weight_refusals(num_edges: int, feat, edge_weight) -> list[str]:
    if not isinstance(edge_weight, Tensor):
        return [f"edge_weight is a {type(edge_weight).__name__}, not a Tensor"]
    if edge_weight.dim() != 1 or edge_weight.size(0) != num_edges:
        return [f"edge_weight must have shape [E] = [{num_edges}] for that, got {list(edge_weight.shape)}"]
    if edge_weight.is_complex() or edge_weight.layout is not torch.strided:
        return [f"edge_weight is {edge_weight.dtype}, {edge_weight.layout}"]
    x = feat[0] if isinstance(feat, tuple) else feat
    if x.dim() > 2:
        return ["edge_weight comes with a feat of more than two dimensions"]
    if torch.promote_types(x.dtype, edge_weight.dtype) != x.dtype and not autocasts(x.device.type):
        return [f"edge_weight is {edge_weight.dtype}, which makes more of the attention than feat's {x.dtype}"]
    return []
