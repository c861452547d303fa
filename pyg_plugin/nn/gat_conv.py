"""GATConv of PyG on the fused kernels."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.nn.conv import gat_conv

from edgeless.distributed.graph import DistGraph
from edgeless.functional import gat_attention
from edgeless.functional.projection import node_logits, project_with_logits
from edgeless.graph.handle import Graph

from ..conv import LINEAR, FusedConv, num_dst_of, pair, sizes_of
from ..convert import kind_of


class GATConv(FusedConv, gat_conv.GATConv):
    r"""The GAT layer (Veličković et al.: "Graph Attention Networks", ICLR 2018, equations 3 and 4).

    Constructor, parameters and results are those of :class:`torch_geometric.nn.GATConv`; nothing of the size
    ``[E, H, C]`` is allocated. The mask of attention dropout comes from a counter-based generator that is seeded from
    torch's: reproducible under ``torch.manual_seed``, but not the upstream layer's mask.

    Shapes:
        x: ``[N, F]`` or a pair ``([Ns, F], [Nd, F'] or None)``; edge_index: ``[2, E]`` tensor or EdgeIndex,
        SparseTensor or ``torch.sparse`` COO/CSR ``[Nd, Ns]``, or :class:`edgeless.Graph`; edge_attr: ``[E]`` or
        ``[E, edge_dim]``; size: ``(Ns, Nd)``; output: ``[Nd, H * C]``, or ``[Nd, C]`` without ``concat``.
    """

    # Read by PyG when it writes propagate() and edge_updater(), which the upstream path uses:
    # edge_updater_type: (alpha: OptPairTensor, edge_attr: OptTensor)
    # propagate_type: (x: OptPairTensor, alpha: Tensor)

    numbers = ("negative_slope", "dropout")

    def forward(self, x, edge_index, edge_attr=None, size=None, return_attention_weights=None):
        """The layer's output, and with ``return_attention_weights`` ``(edge_index, alpha [E, H])`` beside it.

        Raises:
            IndexError: edge_index has an id that x does not have.
        """
        return self._choose(x, edge_index, edge_attr, size, return_attention_weights)

    def _fusion_refusals(self, x, edge_index, edge_attr=None, size=None, return_attention_weights=None) -> list[str]:
        x_src, x_dst = pair(x)
        num_dst = None
        if isinstance(x_src, Tensor) and x_src.dim() == 2 and (x_dst is None or size is not None):
            num_dst = num_dst_of(x_src, x_dst, edge_index, size)
            if size is not None and sizes_of(size) != (x_src.size(0), num_dst):
                return [f"size is {size} and the features have the sizes {(x_src.size(0), num_dst)}"]
            if (
                size is x_dst is None
                and num_dst != x_src.size(0)
                and self.add_self_loops
                and type(edge_index) is EdgeIndex
            ):
                return [
                    "the stock layer adds a self loop for every source, and destinations with them, to the EdgeIndex"
                ]
        return self._refusals(x_src, x_dst, num_dst, edge_index, edge_attr, self.add_self_loops)

    def _edge_refusal(self, edge_attr, num_edges: int) -> Optional[str]:
        if edge_attr is None or self.lin_edge is not None:
            return super()._edge_refusal(edge_attr, num_edges)
        if isinstance(edge_attr, Tensor) and edge_attr.dim() > 0 and edge_attr.size(0) == num_edges:
            return None  # without edge_dim the upstream layer ignores edge_attr
        return "edge_attr does not have one row per edge"

    def _fused_forward(self, x, edge_index, edge_attr, size, return_attention_weights):
        heads, channels = self.heads, self.out_channels
        x_src, x_dst = pair(x)
        num_dst = num_dst_of(x_src, x_dst, edge_index, size)
        res = None if self.res is None or x_dst is None else self.res(x_dst)
        if self.lin is not None:
            lin_src = lin_dst = self.lin
        else:
            lin_src, lin_dst = self.lin_src, self.lin_dst
        loops, kind = self.add_self_loops, kind_of(edge_index)
        wants_attention = self.wants_attention(return_attention_weights)
        by_edge = wants_attention or self.lin_edge is not None
        graph = kind.graph(edge_index, x_src.size(0), num_dst, self.flow, loops, by_edge)
        if x_src is x_dst and lin_src is lin_dst and res is None and not by_edge and self.concat:
            vectors = (self.att_src, self.att_dst)
            out = self._layer(graph, "gat", x_src, (lin_src,), vectors, self.bias, self.negative_slope)
            if out is not None:
                return out
        on = graph
        if x_src is x_dst and lin_src is lin_dst:
            vectors = self.att_src, self.att_dst
            if type(graph) is DistGraph and graph.sends_input(x_src, heads * channels):
                on = graph.local
                mapped = graph.map_sources(x_src, lambda x: self._with_logits(x, lin_src, *vectors))
                x_src, alpha_src, alpha_dst = mapped[0], mapped[1], mapped[2][:num_dst]
            else:
                x_src, alpha_src, alpha_dst = self._with_logits(x_src, lin_src, *vectors)
        else:
            x_src, alpha_src = self._with_logits(x_src, lin_src, self.att_src)
            _, alpha_dst = (None, None) if x_dst is None else self._with_logits(x_dst, lin_dst, self.att_dst)

        edge_attr = self._edge_features(kind, edge_index, edge_attr, graph, loops)
        edge_proj = None
        if edge_attr is not None:  # the logit is linear in edge_attr: project the attention vector, not the edges
            edge_proj = (self.lin_edge.weight.view(heads, channels, -1) * self.att_edge[0].unsqueeze(-1)).sum(dim=1)
        out = gat_attention(
            on,
            x_src,
            alpha_src,
            alpha_dst,
            negative_slope=self.negative_slope,
            edge_attr=edge_attr,
            edge_proj=edge_proj,
            dropout=self.dropout if self.training else 0.0,
            return_weights="dropped" if wants_attention else None,
            out_dtype=self._promoted(edge_attr, x_src, alpha_src, alpha_dst, self.att_edge),
        )
        if not wants_attention:
            return self._finish(out, res)
        out, alpha = out
        return self._finish(out, res), kind.with_attention(edge_index, alpha, loops, graph)

    def _with_logits(self, x: Tensor, lin: torch.nn.Module, *atts: Tensor) -> tuple[Tensor, ...]:
        """The projection ``[N, H, C]`` and ``(projection * att).sum(-1)`` ``[N, H]`` for every att ``[1, H, C]``."""
        found = project_with_logits(x, lin, *atts, kinds=LINEAR)
        if found is not None:
            return found[0].view(-1, self.heads, self.out_channels), *found[1:]
        (x,) = self._project(x, lin, heads=(self.heads,))
        logits = node_logits(x, *atts)
        return x, *([(x * att).sum(dim=-1) for att in atts] if logits is None else logits)

    def _stock_forward(self, x, edge_index, edge_attr, size, return_attention_weights):
        if type(edge_index) is Graph and size is None:  # upstream uses the sources' number for both
            size = (edge_index.num_src, edge_index.num_dst)
        return super()._stock_forward(x, edge_index, edge_attr, size, return_attention_weights)
