"""DotGatConv of DGL, fused."""

from __future__ import annotations

import math

from edgeless.functional import dot_attention
from edgeless.functional.projection import project

from .._framework import stock
from ._layer import DGLLayer, destinations


class DotGatConv(DGLLayer, stock.DotGatConv):
    r"""``dgl.nn.DotGatConv`` without an edge tensor: same signature, parameters, initialisation and results.

    Scaled dot-product attention (Vaswani et al.: "Attention Is All You Need", 2017, equation 1) over the in-edges, for
    H heads of C channels; the source's projection is key and value at once:

    .. math:: o_i = \sum_j \mathrm{softmax}_j((W_r x_i)^\top (W_l x_j) / \sqrt{C})\, W_l x_j

    As upstream, given a pair of features on a graph with one node type, the second tensor is used for both sides, and
    ``fc_src`` gets no gradient. float32, float64, bfloat16, float16.
    """

    _maps_first = True
    _one_dtype = True

    def forward(self, graph, feat, get_attention=False):
        r"""The new features of the destination nodes.

        Args:
            graph (DGLGraph): homogeneous, one relation of a heterograph, or a block; or an :class:`edgeless.Graph`.
            feat (Tensor or pair of Tensors): ``[N, F]``, or ``[Ns, Fs]`` and ``[Nd, Fd]``. Of one Tensor, a block takes
                the first ``Nd`` rows for its destinations.
            get_attention (bool): also return the attention weights.

        Returns:
            Tensor ``[Nd, H, C]``, or that and the weights ``[E, H, 1]`` in the order of the graph's edge ids.

        Raises:
            dgl.DGLError: what the upstream layer raises, such as for zero-in-degree nodes when they are not allowed.
            edgeless.NotFusedError: under ``edgeless.backend("fused")``, where :func:`edgeless.explain` says why.
        """
        return self._call(graph, feat, get_attention)

    def _fused_forward(self, relation, feat, get_attention=False):
        heads = (self._num_heads,)
        # The upstream layer stores both projections of a pair under one name. If sources and destinations are the same
        # nodes, the second projection overwrites the first.
        if isinstance(feat, tuple) and not relation.one_node_type:
            (x_l,), (x_r,) = (project(h, fc, heads=heads) for h, fc in zip(feat, (self.fc_src, self.fc_dst)))
        else:
            h, fc = (feat[1], self.fc_dst) if isinstance(feat, tuple) else (feat, self.fc)
            if not (relation.is_block or get_attention):
                out = self._whole(relation.handle, "dot", h, (fc,), (), None, 1 / math.sqrt(self._out_feats or 1))
                if out is not None:
                    return out
            x_l = project(h, fc, heads=heads)[0]
            x_r = destinations(relation, x_l)
        return_weights = "softmax" if get_attention else None
        out = dot_attention(relation.handle, x_r, x_l, x_l, return_weights=return_weights, out_dtype=x_l.dtype)
        return (out[0], out[1].unsqueeze(-1)) if get_attention else out
