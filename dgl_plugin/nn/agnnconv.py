"""AGNNConv of DGL, fused."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from edgeless import Graph
from edgeless.autocast import autocasts
from edgeless.functional import cosine_attention, dot_attention

from .._autocast import as_dgl_reads
from .._framework import stock
from ..convert import Relation
from ._layer import DGLLayer, destinations


class AGNNConv(DGLLayer, stock.AGNNConv):
    r"""``dgl.nn.AGNNConv`` without an edge tensor: same signature, parameters, initialisation and results.

    Thekumparampil et al.: "Attention-based Graph Neural Network for Semi-supervised Learning", 2018, equation 4, with
    the cosine over the last dimension:

    .. math:: o_i = \sum_j \mathrm{softmax}_j(\beta \cos(x_i, x_j))\, x_j

    As upstream, given a pair of features on a graph with one node type, the cosines are between rows of the second
    tensor and the average is over rows of the first. float32, float64, bfloat16, float16.
    """

    _batch_dims = True

    def forward(self, graph, feat):
        r"""The new features of the destination nodes.

        Args:
            graph (DGLGraph): homogeneous, one relation of a heterograph, or a block; or an :class:`edgeless.Graph`.
            feat (Tensor or pair of Tensors): ``[N, *, F]``, or ``[Ns, *, F]`` and ``[Nd, *, F]``. Of one Tensor, a
                block takes the first ``Nd`` rows for its destinations.

        Returns:
            Tensor ``[Nd, *, F]``.

        Raises:
            dgl.DGLError: what the upstream layer raises, such as for zero-in-degree nodes when they are not allowed.
            edgeless.NotFusedError: under ``edgeless.backend("fused")``, where :func:`edgeless.explain` says why.
        """
        return self._call(graph, feat)

    def _fusion_refusals(self, graph, feat):
        reasons = super()._fusion_refusals(graph, feat)
        if reasons:
            return reasons
        x, x_dst = feat if isinstance(feat, tuple) else (feat, feat)
        if 0 in x.shape[1:]:
            return [f"feat has shape {list(x.shape)}, which has no features"]
        if x.shape[1:] != x_dst.shape[1:] or x.dtype != x_dst.dtype:
            shapes = f"{list(x.shape)} {x.dtype} and {list(x_dst.shape)} {x_dst.dtype}"
            return [f"feat is a pair of {shapes}, which differ in more than the number of rows"]
        rounds = x.is_cuda and autocasts("cuda")  # DGL's kernels then round their inputs
        if torch.promote_types(x.dtype, self.beta.dtype) != x.dtype and not rounds:
            return [f"beta is {self.beta.dtype} and feat is {x.dtype}"]
        return []

    def _fused_forward(self, relation, feat):
        x, x_dst = feat if isinstance(feat, tuple) else (feat, destinations(relation, feat))
        x, x_dst = as_dgl_reads(x), as_dgl_reads(x_dst)
        shape = (x_dst.size(0), *x.shape[1:])
        # The kernel has one head dimension, so batch dimensions become further heads.
        x, x_dst = (t.flatten(1, -2) if t.dim() > 2 else t.unsqueeze(1) for t in (x, x_dst))
        if isinstance(feat, tuple) and relation.one_node_type:
            # The upstream layer stores the unit rows of both tensors under one name. If sources and destinations are
            # the same nodes, the unit rows of the second tensor overwrite those of the first.
            unit = F.normalize(x_dst, dim=-1)
            out = dot_attention(relation.handle, self.beta * unit, unit, x, scale=1.0, out_dtype=x.dtype)
        else:
            out = cosine_attention(relation.handle, x, x_dst, self.beta, out_dtype=x.dtype)
        return out.view(shape)

    def _stock_forward(self, relation, feat):
        graph = relation.graph if isinstance(relation, Relation) else relation
        if isinstance(graph, Graph) and isinstance(feat, Tensor):  # to_dgl gives the graph two node types
            feat = (feat, feat)
        return super()._stock_forward(relation, feat)
