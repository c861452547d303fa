"""GATv2Conv of PyG on the fused kernels."""

from __future__ import annotations

from torch_geometric.nn.conv import gatv2_conv

from edgeless.distributed.graph import DistGraph
from edgeless.functional import gatv2_attention
from edgeless.functional.projection import are_own_rows
from edgeless.layers.adapter import is_plain

from ..conv import LINEAR, FusedConv, pair
from ..convert import kind_of


class GATv2Conv(FusedConv, gatv2_conv.GATv2Conv):
    r"""The GATv2 layer (Brody, Alon, Yahav: "How Attentive are Graph Attention Networks?", ICLR 2022, equation 7).

    Constructor, parameters and results are those of :class:`torch_geometric.nn.GATv2Conv`; nothing of the size
    ``[E, H, C]`` is allocated. The mask of attention dropout comes from a counter-based generator that is seeded from
    torch's: reproducible under ``torch.manual_seed``, but not the upstream layer's mask.

    Shapes:
        x: ``[N, F]`` or a pair ``([Ns, F], [Nd, F'])``; edge_index: ``[2, E]`` tensor or EdgeIndex, SparseTensor or
        ``torch.sparse`` COO/CSR ``[Nd, Ns]``, or :class:`edgeless.Graph`; edge_attr: ``[E]`` or ``[E, edge_dim]``;
        output: ``[Nd, H * C]``, or ``[Nd, C]`` without ``concat``.
    """

    # Read by PyG when it writes propagate() and edge_updater(), which the upstream path uses:
    # edge_updater_type: (x: PairTensor, edge_attr: OptTensor)
    # propagate_type: (x: PairTensor, alpha: Tensor)

    numbers = ("negative_slope", "dropout")

    def forward(self, x, edge_index, edge_attr=None, return_attention_weights=None):
        """The layer's output, and with ``return_attention_weights`` ``(edge_index, alpha [E, H])`` beside it.

        Raises:
            IndexError: edge_index has an id that x does not have.
        """
        return self._choose(x, edge_index, edge_attr, return_attention_weights)

    def _fusion_refusals(self, x, edge_index, edge_attr=None, return_attention_weights=None) -> list[str]:
        return self._refusals(*pair(x), None, edge_index, edge_attr, self.add_self_loops)

    def _fused_forward(self, x, edge_index, edge_attr, return_attention_weights):
        heads, channels, att = self.heads, self.out_channels, self.att
        x_l, x_r = pair(x)
        res = None if self.res is None else self.res(x_r)
        loops, kind = self.add_self_loops, kind_of(edge_index)
        wants_attention = self.wants_attention(return_attention_weights)
        by_edge = wants_attention or self.lin_edge is not None
        graph = kind.graph(edge_index, x_l.size(0), x_r.size(0), self.flow, loops, by_edge)
        on, own_rows = graph, False
        shared = x_l is x_r and self.share_weights
        if x_l is x_r and res is None and not by_edge and self.concat:
            maps = (self.lin_l,) if shared else (self.lin_l, self.lin_r)
            out = self._layer(graph, "gatv2", x_l, maps, (att,), self.bias, self.negative_slope)
            if out is not None:
                return out
        if shared:
            x_l = x_r = self._project(x_l, self.lin_l, heads=(heads,))[0]
        elif type(graph) is DistGraph:
            on, own_rows = graph.local, is_plain(self.lin_l, LINEAR)  # a hook may keep a map's result
            (x_l,), (x_r,) = graph.project_sources(
                x,
                heads * channels,
                lambda x: self._project(x, self.lin_l, heads=(heads,)),
                lambda x: self._project(x, self.lin_r, heads=(heads,)),
            )
        elif x_l is x_r:
            x_l, x_r = self._project(x_l, self.lin_l, self.lin_r, joined=2, heads=(heads, heads))
        else:
            (x_l,), (x_r,) = (
                self._project(x, lin, heads=(heads,)) for x, lin in ((x_l, self.lin_l), (x_r, self.lin_r))
            )
        own_rows = own_rows or (not shared and are_own_rows(x_l, (self.lin_l,), LINEAR))

        edge_attr = self._edge_features(kind, edge_index, edge_attr, graph, loops)
        out = gatv2_attention(
            on,
            x_l,
            x_r,
            att.squeeze(0),
            negative_slope=self.negative_slope,
            edge_attr=edge_attr,
            edge_proj=None if edge_attr is None else self.lin_edge.weight.view(heads, channels, -1),
            dropout=self.dropout if self.training else 0.0,
            return_weights="dropped" if wants_attention else None,
            out_dtype=self._promoted(edge_attr, x_l, x_r, att),
            donate=own_rows,
        )
        if not wants_attention:
            return self._finish(out, res)
        out, alpha = out
        return self._finish(out, res), kind.with_attention(edge_index, alpha, loops, graph)
