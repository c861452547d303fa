"""HGTConv of DGL, fused."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from edgeless.autocast import rounds_to
from edgeless.functional.pair_maps import pair_dot_attention
from edgeless.layers.adapter import is_plain, typed_rows_refusals

from .._framework import stock
from ..convert import relation_of
from ._layer import DGLLayer, destinations
from ._node_types import nodes_by_type
from ._relations import etypes_refusal, source_rows, typed_graph
from .typedlinear import TYPED_LINEARS, weights_of


class HGTConv(DGLLayer, stock.HGTConv):
    r"""``dgl.nn.HGTConv`` without per-edge rows: same signature, parameters and results.

    Hu et al.: "Heterogeneous Graph Transformer", WWW 2020. Keys and values are multiplied by the matrices of edge types
    once per unique (source, edge type), not once per edge. All options of the upstream constructor are covered.
    float32, float64, bfloat16, float16.
    """

    _ops = ("relational_sum", "typed_mm", "attention")
    _steps = (stock.HGTConv.message,)

    def forward(self, g, x, ntype, etype, *, presorted=False):
        """The new features of the destination nodes.

        Args:
            g (DGLGraph): homogeneous, or a block; or an :class:`edgeless.Graph`.
            x (Tensor): ``[N, F]``; in a block the first ``Nd`` rows are the destinations.
            ntype (Tensor): ``[N]`` integers, the types of nodes.
            etype (Tensor): ``[E]`` integers, the types of edges.
            presorted (bool): whether nodes and edges are sorted by type, which makes no difference here.

        Returns:
            Tensor ``[Nd, H * C]``.

        Raises:
            IndexError: etype or ntype has a type that the layer does not have.
            edgeless.NotFusedError: under ``edgeless.backend("fused")``, where :func:`edgeless.explain` says why.
        """
        return self._call(g, x, ntype, etype, presorted)

    def _fusion_refusals(self, g, x, ntype, etype, presorted=False) -> list[str]:
        reasons = super()._fusion_refusals(g, x)
        if reasons:
            return reasons
        handle = relation_of(g).handle
        linears = (self.linear_k, self.linear_q, self.linear_v, self.linear_a, *self.relation_att, *self.relation_msg)
        if not all(is_plain(linear, TYPED_LINEARS) for linear in linears):
            reasons.append("not all of its maps are plain TypedLinears, without hooks or another forward")
        if isinstance(x, tuple):
            reasons.append("x is a pair, which the stock layer rejects")
            return reasons
        reasons += typed_rows_refusals(x, ntype, self.in_size, self.linear_k.W)
        if reason := etypes_refusal(handle, etype):
            reasons.append(reason)
        return reasons

    def _fused_forward(self, relation, x, ntype, etype, presorted):
        self.presorted = presorted  # as the upstream layer does
        x_dst = destinations(relation, x)
        width, rounded = self.num_heads * self.head_size, rounds_to(x.device.type)
        maps = [weights_of(linear) for linear in (self.linear_k, self.linear_v, self.linear_q)]
        num_ntypes = self.skip.size(0)
        nodes = targets = nodes_by_type(ntype, num_ntypes, x.size(0))
        if relation.is_block:
            targets = nodes_by_type(ntype, num_ntypes, x_dst.size(0))
            k, v = nodes.product(x, torch.cat(maps[:2], dim=2), rounded).split(width, dim=1)
            q = targets.product(x_dst, maps[2], rounded)
        else:
            k, v, q = nodes.product(x, torch.cat(maps, dim=2), rounded).split(width, dim=1)
        k, v = source_rows(relation.handle, k, v)
        num_etypes = self.relation_pri[0].size(0)
        compact = typed_graph(relation.handle, etype, num_etypes).compact
        priors = _by_head(list(self.relation_pri)).view(num_etypes, self.num_heads)
        matrices = _blocks(self.relation_att), _blocks(self.relation_msg)
        h = pair_dot_attention(compact, q, k, v, *matrices, priors, 1 / self.sqrt_d)
        del q, k, v  # freed before tensors of the same size are allocated
        h = self.drop(targets.product(h, weights_of(self.linear_a), rounded))
        residual = x_dst if x_dst.shape == h.shape else x_dst @ self.residual_w
        out = targets.blend(h, residual, torch.sigmoid(self.skip))
        return self.norm(out) if self.use_norm else out

    def _stock_forward(self, g, x, ntype, etype, presorted):
        g = self._for_stock(g, x, ntype, etype)
        return stock.HGTConv.forward(self, g, x, ntype, etype, presorted=presorted)


def _blocks(linears: nn.ModuleList) -> Tensor:
    """The heads' matrices, ``[R, D, D]`` each, stacked as ``[R, H, D, D]``."""
    return _by_head([weights_of(linear) for linear in linears])


def _by_head(tensors: Sequence[Tensor]) -> Tensor:
    """The heads' tensors, ``[R, *]`` each, stacked as ``[R, H, *]``."""
    return torch.stack(tensors, dim=1) if len(tensors) > 1 else tensors[0].unsqueeze(1)
