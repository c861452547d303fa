"""TransformerConv of PyG on the fused kernels."""

from __future__ import annotations

import math
from typing import Optional

import torch
from torch import Tensor
from torch_geometric.nn.conv import transformer_conv

from edgeless.distributed.graph import DistGraph
from edgeless.functional import dot_attention
from edgeless.functional.projection import add, are_own_rows
from edgeless.layers.adapter import is_plain

from ..conv import LINEAR, FusedConv, pair
from ..convert import SparseMatrix, kind_of


class TransformerConv(FusedConv, transformer_conv.TransformerConv):
    r"""The graph transformer layer (Shi et al.: "Masked Label Prediction", IJCAI 2021, equations 3 to 5).

    Constructor, parameters and results are those of :class:`torch_geometric.nn.TransformerConv`; nothing of the size
    ``[E, H, C]`` is allocated. The mask of attention dropout comes from a counter-based generator that is seeded from
    torch's: reproducible under ``torch.manual_seed``, but not the upstream layer's mask.

    Shapes:
        x: ``[N, F]`` or a pair ``([Ns, F], [Nd, F'])``; edge_index: ``[2, E]`` tensor or EdgeIndex, SparseTensor or
        ``torch.sparse`` COO/CSR ``[Nd, Ns]``, or :class:`edgeless.Graph`; edge_attr: ``[E, edge_dim]``;
        output: ``[Nd, H * C]``, or ``[Nd, C]`` without ``concat``.
    """

    # Read by PyG when it writes propagate(), which the upstream path uses:
    # propagate_type: (query: Tensor, key: Tensor, value: Tensor, edge_attr: OptTensor)

    edge_dims = (2,)
    numbers = ("dropout",)

    def forward(self, x, edge_index, edge_attr=None, return_attention_weights=None):
        """The layer's output, and with a bool as ``return_attention_weights`` ``(edge_index, alpha [E, H])`` beside it.

        Raises:
            IndexError: edge_index has an id that x does not have.
        """
        return self._choose(x, edge_index, edge_attr, return_attention_weights)

    def _fusion_refusals(self, x, edge_index, edge_attr=None, return_attention_weights=None) -> list[str]:
        return self._refusals(*pair(x), None, edge_index, edge_attr, False)

    def _edge_refusal(self, edge_attr, num_edges: int):
        if edge_attr is None and self.lin_edge is not None:
            return "edge_attr is missing and the layer has edge_dim"
        return super()._edge_refusal(edge_attr, num_edges)

    def _fused_forward(self, x, edge_index, edge_attr, return_attention_weights):
        heads, channels = self.heads, self.out_channels
        x_src, x_dst = pair(x)
        kind = kind_of(edge_index)
        graph = kind.graph(edge_index, x_src.size(0), x_dst.size(0), self.flow, False)
        wants_attention = self.wants_attention(return_attention_weights)
        skip = [self.lin_skip] if self.root_weight else []
        maps = (self.lin_query, self.lin_key, self.lin_value, *skip)
        plain = self.lin_beta is None and self.lin_edge is None and self.concat and not wants_attention
        if x_src is x_dst and plain:
            out = self._layer(graph, "dot", x_src, maps, (), None, 1 / math.sqrt(channels or 1))
            if out is not None:
                return out
        on, own_rows = graph, False
        if type(graph) is DistGraph:
            on = graph.local
            own_rows = all(is_plain(lin, LINEAR) for lin in (self.lin_key, self.lin_value))  # a hook may keep rows
            (key, value), (query, *skip) = graph.project_sources(
                x,
                2 * heads * channels,
                lambda x: self._project(x, self.lin_key, self.lin_value, joined=2, heads=(heads, heads)),
                lambda x: self._project(x, self.lin_query, *skip, heads=(heads, *(0 for _ in skip))),
            )
        elif x_src is x_dst:  # lazy maps draw their weights in this order
            in_heads = (heads, heads, heads, *(0 for _ in skip))
            query, key, value, *skip = self._project(x_src, *maps, joined=3, heads=in_heads)
        else:
            (query,) = self._project(x_dst, self.lin_query, heads=(heads,))
            key, value = self._project(x_src, self.lin_key, self.lin_value, joined=2, heads=(heads, heads))
            skip = self._project(x_dst, *skip) if skip else []
        own_rows = own_rows or are_own_rows(key, (self.lin_key, self.lin_value), LINEAR)

        edge_attr = self._edge_features(kind, edge_index, edge_attr, graph, False)
        out = dot_attention(
            on,
            query,
            key,
            value,
            edge_attr=edge_attr,
            edge_proj=None if edge_attr is None else self.lin_edge.weight.view(heads, channels, -1),
            dropout=self.dropout if self.training else 0.0,
            return_weights="softmax" if wants_attention else None,
            out_dtype=self._out_dtype(edge_attr, query, key, value),
            donate=own_rows,
        )
        if wants_attention:
            out, alpha = out
        out = self._merge_heads(out)
        if self.root_weight:
            (skip,) = skip
            if self.lin_beta is None:
                out = add(skip, out, own=is_plain(self.lin_skip, LINEAR))
            else:
                beta = self.lin_beta(torch.cat((out, skip, out - skip), dim=-1)).sigmoid()
                out = beta * skip + (1 - beta) * out
        if not wants_attention:
            return out
        if kind is SparseMatrix:  # unlike GAT, the upstream layer does not write the weights into the matrix
            return out, (edge_index, alpha)
        return out, kind.with_attention(edge_index, alpha, False, graph)

    def _out_dtype(self, edge_attr: Optional[Tensor], *operands: Tensor) -> torch.dtype:
        """The upstream layer's output dtype: under CUDA autocast its softmax runs in float32."""
        dtype = self._promoted(edge_attr, *operands)
        if operands[0].is_cuda and torch.is_autocast_enabled():
            return torch.promote_types(dtype, torch.float32)
        return dtype
