"""RGATConv of PyG on typed products and the attention of GAT."""

from __future__ import annotations

from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn.conv import rgat_conv

from edgeless.autocast import autocasts, rounds_to
from edgeless.checks import compiling, opmath_dtype
from edgeless.choices.backends import kernel_refusal
from edgeless.distributed.graph import DistGraph
from edgeless.functional import gat_attention, relational_sum, spmm
from edgeless.functional.checks import cast
from edgeless.functional.dropout import seed_tensor
from edgeless.functional.pair_attention import fits, pair_attention
from edgeless.functional.pair_rows import end_products, to_edges
from edgeless.graph.handle import Graph
from edgeless.graph.typed import TypedGraph
from edgeless.layers.adapter import inference_refusal

from ..conv import FusedConv, is_plain_float
from ..convert import EdgeList, kind_of
from ..every_pair import every_product, graph_of_every_pair, pairs_of_destinations, pays
from ..relations import source_rows, typed_graph, typed_refusal

_OPS = ("relational_sum", "attention", "spmm", "sddmm")
_MODS = ("additive", "scaled", "f-additive", "f-scaled")
_MULTIPLICATIVE = "multiplicative-self-attention"


class RGATConv(FusedConv, rgat_conv.RGATConv):
    r"""The relational graph attention (Busbridge et al.: "Relational Graph Attention Networks", 2019), with additive
    or multiplicative attention, within a relation or across them.

    Constructor, parameters and results are those of :class:`torch_geometric.nn.RGATConv`. Features are multiplied by
    the matrices of relations once per unique (source, relation); per edge there is at most one logit per head.

    Shapes:
        x: ``[N, F]``; edge_index: ``[2, E]`` tensor or EdgeIndex, SparseTensor whose values are the relations,
        :class:`edgeless.Graph`, or :class:`edgeless.TypedGraph` in place of edge_index and edge_type; edge_type:
        ``[E]``; edge_attr: ``[E, De]`` or ``[E]``; output: ``[N, H * C]``, or ``[N, C]`` without ``concat``; of
        multiplicative attention ``[N, H * dim * C]`` and ``[N, dim * C]``.
    """

    # Read by PyG when it writes propagate(), which the upstream path uses:
    # propagate_type: (x: Tensor, edge_type: OptTensor, edge_attr: OptTensor)

    numbers = ("negative_slope", "dropout")

    def forward(self, x, edge_index, edge_type=None, edge_attr=None, size=None, return_attention_weights=None):
        """The layer's output, with ``return_attention_weights`` also the attention before modification and dropout.

        Raises:
            IndexError: edge_index has an id, or edge_type a relation, that is out of range.
        """
        return self._choose(x, edge_index, edge_type, edge_attr, size, return_attention_weights)

    # Predicates ------------------------------------------------------------------------------------------------------

    def _fusion_refusals(self, x, edge_index, edge_type=None, edge_attr=None, size=None, return_attention_weights=None):
        reasons = self._module_refusals()
        if self.attention_mode not in ("additive-self-attention", _MULTIPLICATIVE):
            reasons.append(f"attention_mode is {self.attention_mode!r}")
        if self.mod is not None and self.mod not in _MODS:
            reasons.append(f"mod is {self.mod!r}")
        device = self.q.device
        for op in _OPS:
            if reason := kernel_refusal(device, op):
                reasons.append(reason)
                break
        reason = self._input_refusal(x, size)
        if reason is None:
            reason = typed_refusal(self, edge_index, edge_type, x.size(0), x.size(0), device)
        if reason is None:
            typed = isinstance(edge_index, TypedGraph)
            num_edges = edge_index.num_edges if typed else kind_of(edge_index).num_edges(edge_index)
            reason = self._edge_refusal(edge_attr, num_edges)
        if reason is None and isinstance(return_attention_weights, bool) and kind_of(edge_index) is not EdgeList:
            reason = "the attention is to be returned with edges that are no plain tensor"
        return reasons if reason is None else [*reasons, reason]

    def _input_refusal(self, x: Any, size: Any) -> Optional[str]:
        if not is_plain_float(x) or x.dim() != 2 or x.size(1) != self.in_channels:
            return f"x is no plain floating tensor [N, {self.in_channels}]"
        q = self.q
        if autocasts(q.device.type):
            if torch.float64 in (x.dtype, q.dtype):
                return f"autocast is on, x is {x.dtype} and the parameters are {q.dtype}"
        elif x.dtype != q.dtype:
            return f"x is {x.dtype} on {x.device}, and the parameters {q.dtype} on {q.device}"
        if x.device != q.device:
            return f"x is {x.dtype} on {x.device}, and the parameters {q.dtype} on {q.device}"
        if size is not None and tuple(size) != (x.size(0), x.size(0)):
            return f"size is {size}"
        return inference_refusal(x)

    # The layer -------------------------------------------------------------------------------------------------------

    def _fused_forward(self, x, edge_index, edge_type, edge_attr, size, return_attention_weights):
        device, rest = x.device.type, (edge_index, edge_type, edge_attr, return_attention_weights)
        rows = rounds_to(device)
        if rows is None:
            return self._attend(x, *rest, dtype=x.dtype)
        # Under autocast the upstream layer rounds the operands of products, and on CUDA its softmax is in float32.
        with torch.autocast(device, enabled=False):
            return self._attend(x.to(rows), *rest, dtype=torch.float32 if device == "cuda" else rows)

    def _attend(self, x, edge_index, edge_type, edge_attr, return_attention_weights, dtype):
        """The layer with rows of x's dtype; ``dtype`` is the dtype of the attention and of its sums."""
        if self._takes_every_pair(x, edge_index, edge_type, dtype):
            return self._attend_every_pair(x, edge_index, edge_type, edge_attr, return_attention_weights)
        graph = typed_graph(self, edge_index, edge_type, x.size(0), x.size(0))
        x = source_rows(edge_index, x)
        heads, weights = self.heads, self._weights()
        if (out := self._as_one_op(graph, x, weights, edge_attr, return_attention_weights, dtype)) is not None:
            return out
        turned = graph.reversed  # built first: it keeps the transposes that other formats are sorted from
        over_pairs = turned.compact.pairs.reversed.graph if self._within else None
        pairs, edges = graph.compact
        values = relational_sum(pairs, x, cast(weights, x.dtype), order="aggregate").view(-1, heads, self.out_channels)
        ends = end_products(graph, x, cast(self._vectors(weights), x.dtype))
        edge_attr = _as_rows(edge_attr, x.dtype)
        keys, own, terms = self._logits(graph, *ends, edge_attr)
        if self.dim > 1:  # all weights of a head apply to the same values
            values = values.unsqueeze(2).expand(-1, -1, self.dim, -1).flatten(1, 2)
        within, all_heads = self._within, heads * self.dim
        returned, dropout = isinstance(return_attention_weights, bool), self._attention_dropout
        if dropout and type(edge_index) is DistGraph:  # the mask depends on edge ids in the whole graph
            terms["edge_scale"] = edge_index.local.dropout_scale(dropout, all_heads, opmath_dtype(dtype))
            dropout = 0.0
        out = gat_attention(
            graph.split if within else edges,
            values,
            keys,
            own,
            negative_slope=1.0 if self._multiplies else self.negative_slope,
            dropout=dropout,
            return_weights="softmax" if returned else None,
            out_dtype=dtype,
            **terms,
        )
        out, alpha = out if returned else (out, None)
        if within:
            out = spmm(over_pairs, out)
        out = self._modified(out, edges, values).view(-1, heads, self.dim * self.out_channels)
        out = self._finish(out, None)
        return (out, (edge_index, alpha)) if returned else out

    def _takes_every_pair(self, x: Tensor, edge_index, edge_type, dtype: torch.dtype) -> bool:
        """True if the graph is so small that the products of all nodes and relations take less time than finding those
        that its edges have."""
        if self._within or self._multiplies or self.num_blocks is not None or compiling():
            return False
        if dtype is not x.dtype or x.dtype not in (torch.float32, torch.float64):
            return False
        return pays(edge_index, edge_type, x.size(0), self.num_relations, self.heads, self.out_channels)

    def _attend_every_pair(self, x, edge_index, edge_type, edge_attr, return_attention_weights):
        """:meth:`_attend` for additive attention across relations on a small graph."""
        heads, num_relations = self.heads, self.num_relations
        graph = graph_of_every_pair(edge_index, edge_type, x.size(0), num_relations, self.flow)
        products = every_product(x, self._weights())
        queries, keys = (products @ torch.cat((self.q, self.k), 1)).split(heads, 1)
        # The query of an edge is that of its destination and relation: a row for each edge is tiny here. The gradient
        # of embedding() sums rows in their order, like that of index_select(), but in one loop.
        term = F.embedding(pairs_of_destinations(graph, edge_index, edge_type, self.flow), queries)
        if (edge_attr := _as_rows(edge_attr, x.dtype)) is not None:
            term = term + edge_attr @ (self.e.t() @ self.lin_edge.weight).to(x.dtype).t()
        identity, own = _constants(graph, heads, x.dtype)
        values = products.view(-1, heads, self.out_channels)
        returned = isinstance(return_attention_weights, bool)
        out = gat_attention(
            graph,
            values,
            keys,
            own,
            negative_slope=self.negative_slope,
            edge_attr=term,
            edge_proj=identity,
            dropout=self._attention_dropout,
            return_weights="softmax" if returned else None,
            out_dtype=x.dtype,
        )
        out, alpha = out if returned else (out, None)
        out = self._finish(self._modified(out, graph, values), None)
        return (out, (edge_index, alpha)) if returned else out

    def _logits(self, graph, queries, keys, edge_attr) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The terms of the logits: those of unique (source, relation), those of the rows that the attention is over,
        and the options of :func:`gat_attention` for the edges' terms."""
        proj = None if edge_attr is None else (self.e.t() @ self.lin_edge.weight).to(edge_attr.dtype)
        if self._within and not self._multiplies:
            return keys, queries, {} if edge_attr is None else {"edge_attr": edge_attr, "edge_proj": proj}
        # The query of an edge is that of its destination and relation. For 16-bit rows it is float32, as the kernels'
        # own logits are.
        term = to_edges(graph.reversed, queries)
        if self._multiplies:
            term = term * to_edges(graph, keys)
            term = term if edge_attr is None else term * (edge_attr @ proj.t())
            keys = keys.new_zeros(1, 1).expand_as(keys)
        elif edge_attr is not None:
            term = term + edge_attr @ proj.t()
        over = graph.split if self._within else graph.compact.edges
        identity, own = _constants(over, keys.size(1), keys.dtype)
        return keys, own, {"edge_attr": term, "edge_proj": identity}

    def _as_one_op(self, graph, x, weights, edge_attr, return_attention_weights, dtype) -> Optional[Tensor]:
        """The layer as one op: for one head, across relations, without edge features or returned attention; else
        None."""
        if self.heads != 1 or self._within or self._multiplies or self.mod in ("additive", "f-additive"):
            return None
        if edge_attr is not None or isinstance(return_attention_weights, bool):
            return None
        bias = self.bias if self.mod is None else None  # with one head, concatenation and mean are the same
        if dtype is not x.dtype or not fits(graph, x, weights, (self.q, self.k, bias)):
            return None
        dropout = self._attention_dropout
        seed = seed_tensor(None, x.device) if dropout else None
        out = pair_attention(graph, x, weights, self.q, self.k, bias, self.negative_slope, dropout, seed)
        if self.mod is None:
            return out
        return self._finish(self._modified(out.unsqueeze(1), graph.graph), None)

    @property
    def _within(self) -> bool:
        return self.attention_mechanism == "within-relation"

    @property
    def _multiplies(self) -> bool:
        return self.attention_mode == _MULTIPLICATIVE

    @property
    def _attention_dropout(self) -> float:
        return self.dropout if self.training and self.mod is None else 0.0

    def _weights(self) -> Tensor:
        """The relations' matrices ``[R, in, H * C]``, or ``[R, blocks, in / blocks, H * C / blocks]``."""
        if self.num_bases is None:
            return self.weight
        weight = self.att @ self.basis.view(self.num_bases, -1)
        return weight.view(self.num_relations, self.in_channels, self.heads * self.out_channels)

    def _vectors(self, weights: Tensor) -> Tensor:
        """``W_r q`` of all relations, then ``W_r k``: ``[2 * R, H, in]``. Their products with a node's features are its
        queries and keys."""
        folds, heads, sizes = torch.cat((self.q, self.k), 1), self.q.size(1), (self.num_relations, self.in_channels)
        if weights.dim() == 4:
            blocks, width = weights.shape[1], weights.shape[3]
            vectors = (weights @ folds.view(blocks, width, 2 * heads)).view(-1, 2 * heads).t()
        else:
            vectors = folds.t() @ weights.reshape(-1, folds.size(0)).t()
        if heads > 1:  # each side's heads come before the types
            vectors = vectors.reshape(2, heads, *sizes).transpose(1, 2)
        return vectors.reshape(-1, heads, sizes[1])

    def _modified(self, out: Tensor, edges, values: Optional[Tensor] = None) -> Tensor:
        """Applies ``mod`` to the sum ``[N, H, C]``; its changes are the same for all edges of a destination."""
        if self.mod == "additive":
            return out + self.w * spmm(edges, values)
        if self.mod == "f-additive":  # adds 1 to weights > 0: to all, also those that upstream rounds to 0
            return out + spmm(edges, values)
        if self.mod is None:
            return out
        dtype = out.dtype if self.mod == "f-scaled" else self.l1.dtype
        degree = edges.degree_scale("dst", 1.0, dtype).view(-1, 1)  # for isolated nodes it multiplies 0
        if self.mod == "f-scaled":
            return out * degree.unsqueeze(-1)
        degree = self.activation(degree @ self.l1 + self.b1) @ self.l2 + self.b2
        return out * degree.unsqueeze(1)

    def _stock_forward(self, x, edge_index, edge_type, *rest):
        if isinstance(edge_index, TypedGraph):
            edge_index, edge_type = edge_index.graph, edge_index.edge_type
        if isinstance(edge_type, Tensor) and edge_type.dtype == torch.int32:
            edge_type = edge_type.long()
        return super()._stock_forward(x, edge_index, edge_type, *rest)


def _as_rows(edge_attr: Optional[Tensor], dtype: torch.dtype) -> Optional[Tensor]:
    """``edge_attr`` as ``[E, De]`` of ``dtype``."""
    if edge_attr is None:
        return None
    return (edge_attr.unsqueeze(1) if edge_attr.dim() == 1 else edge_attr.flatten(1)).to(dtype)


def _constants(graph: Graph, heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The identity ``[H, H]``, an ``edge_proj`` that makes edge terms logits, and zero logits of the destinations."""

    def build(_):
        options = {"dtype": dtype, "device": graph.device}
        return torch.eye(heads, **options), torch.zeros(graph.num_dst, heads, **options)

    return graph.format(("logits of edges", heads, dtype), build)
