"""GATv2Conv of DGL, fused."""

from __future__ import annotations

from torch import nn

from edgeless.distributed.graph import DistGraph
from edgeless.functional import gatv2_attention
from edgeless.functional.projection import are_own_rows, project
from edgeless.layers.adapter import is_plain

from .._framework import stock
from ._layer import DGLLayer, destinations, with_residual


class GATv2Conv(DGLLayer, stock.GATv2Conv):
    r"""``dgl.nn.GATv2Conv`` without an edge tensor: same signature, parameters, initialisation and results.

    Brody, Alon, Yahav: "How Attentive are Graph Attention Networks?", ICLR 2022, equation 7, for H heads of C
    channels, with :math:`W_l`, :math:`W_r` the upstream layer's ``fc_src``, ``fc_dst`` and :math:`a` its ``attn``:

    .. math:: o_i = \sum_j \mathrm{softmax}_j(a^\top \mathrm{LeakyReLU}(W_l x_j + W_r x_i))\, W_l x_j

    All options of the upstream constructor are covered. The mask of ``attn_drop`` comes from edgeless's generator,
    seeded by torch's: rate and scale are as upstream, the dropped edges differ. float32, float64, bfloat16, float16.
    """

    _maps_first = True
    _one_dtype = True
    _taken_over = (("attn_drop", nn.Dropout), ("leaky_relu", nn.LeakyReLU))

    def forward(self, graph, feat, get_attention=False):
        r"""The new features of the destination nodes.

        Args:
            graph (DGLGraph): homogeneous, one relation of a heterograph, or a block; or an :class:`edgeless.Graph`.
            feat (Tensor or pair of Tensors): ``[N, F]``, or ``[Ns, Fs]`` and ``[Nd, Fd]``. Of one Tensor, a block takes
                the first ``Nd`` rows for its destinations.
            get_attention (bool): also return the attention weights, after dropout.

        Returns:
            Tensor ``[Nd, H, C]``, or that and the weights ``[E, H, 1]`` in the order of the graph's edge ids.

        Raises:
            dgl.DGLError: what the upstream layer raises, such as for zero-in-degree nodes when they are not allowed.
            edgeless.NotFusedError: under ``edgeless.backend("fused")``, where :func:`edgeless.explain` says why.
        """
        return self._call(graph, feat, get_attention)

    def _fused_forward(self, relation, feat, get_attention=False):
        if isinstance(feat, tuple):
            h_src, h_dst = self.feat_drop(feat[0]), self.feat_drop(feat[1])
        else:
            h_src = self.feat_drop(feat)
            h_dst = destinations(relation, h_src)
        heads, graph, attn, fc_src = (self._num_heads,), relation.handle, self.attn, self.fc_src
        has_residual = self.res_fc is not None
        dropout, slope = self._attention_dropout(), self.leaky_relu.negative_slope
        shared = self.share_weights and not isinstance(feat, tuple)
        fc_dst = fc_src if shared else self.fc_dst
        if h_src is h_dst and not (has_residual or get_attention):
            maps = (fc_src,) if shared else (fc_src, fc_dst)
            out = self._whole(graph, "gatv2", h_src, maps, (attn,), None, slope, dropout)
            if out is not None:
                return self.activation(out) if self.activation else out
        own_rows = False
        if shared:
            (x_l,) = project(h_src, fc_src, heads=heads)
            x_r = destinations(relation, x_l)
        elif type(graph) is DistGraph:
            (x_l,), (x_r,) = graph.project_sources(
                h_src,
                self._num_heads * self._out_feats,
                lambda h: project(h, fc_src, heads=heads),
                lambda h: project(h, fc_dst, heads=heads),
            )
            graph, own_rows = graph.local, is_plain(fc_src)  # a hook may keep a map's result
        elif h_src is h_dst:
            x_l, x_r = project(h_src, fc_src, fc_dst, joined=2, heads=heads * 2)
        else:
            (x_l,), (x_r,) = (project(h, fc, heads=heads) for h, fc in ((h_src, fc_src), (h_dst, fc_dst)))
        own_rows = own_rows or (not shared and are_own_rows(x_l, (fc_src,)))
        out = gatv2_attention(
            graph,
            x_l,
            x_r,
            attn.squeeze(0),
            negative_slope=slope,
            dropout=dropout,
            return_weights="dropped" if get_attention else None,
            out_dtype=x_l.dtype,
            donate=own_rows,
        )
        out, weights = out if get_attention else (out, None)
        if has_residual:
            out = with_residual(self, out, h_dst)
        if self.activation:
            out = self.activation(out)
        return (out, weights.unsqueeze(-1)) if get_attention else out
