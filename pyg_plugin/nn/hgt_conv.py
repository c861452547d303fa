"""HGTConv of PyG on typed products and dot-product attention."""

from __future__ import annotations

import math
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn.conv import hgt_conv
from torch_geometric.nn.dense import linear
from torch_geometric.typing import SparseTensor

from edgeless import _C
from edgeless.autocast import rounds_to
from edgeless.checks import compiling
from edgeless.choices.backends import kernel_refusal
from edgeless.functional.pair_maps import pair_dot_attention
from edgeless.layers.adapter import inference_refusal, is_plain

from ..conv import PLAIN, FusedConv, is_plain_float
from ..convert import for_stock
from ..hetero import joined_graph, type_offsets
from ._node_maps import parameters_of, stacked, stacked_maps
from .hetero_linear import HeteroLinear

_OPS = ("relational_sum", "attention")
_RELATION_MAPS = (linear.HeteroLinear, HeteroLinear)
_INDEX_DTYPES = (torch.int64, torch.int32)


class HGTConv(FusedConv, hgt_conv.HGTConv):
    r"""The heterogeneous graph transformer (Hu et al.: "Heterogeneous Graph Transformer", WWW 2020).

    Constructor, parameters and results are those of :class:`torch_geometric.nn.HGTConv`, given edge types in the order
    of the metadata: with another order the upstream layer takes the matrices of other relations, and this one does not.
    Keys and values are computed once per unique (source, edge type), not for all nodes of a type, and there are no
    per-edge rows.

    Shapes:
        x_dict: ``[N_t, F_t]`` each; edge_index_dict: ``[2, E_r]`` tensors or SparseTensors; output: ``[N_t, C]`` each.
    """

    # Read by PyG when it writes propagate(), which the upstream path uses:
    # propagate_type: (k: Tensor, q: Tensor, v: Tensor, edge_attr: Tensor)

    def forward(self, x_dict, edge_index_dict):
        """The layer's output for every node type that has in-edges in the metadata.

        Raises:
            IndexError: an edge_index has an id that its nodes do not have.
        """
        return self._choose(x_dict, edge_index_dict)

    # Predicates ------------------------------------------------------------------------------------------------------

    def _fusion_refusals(self, x_dict, edge_index_dict) -> list[str]:
        reasons = self._module_refusals()
        if self.flow != "source_to_target":
            reasons.append(f"flow is {self.flow!r}")
        for name in ("k_rel", "v_rel"):
            module = getattr(self, name)
            if not is_plain(module, _RELATION_MAPS) or module.bias is not None:
                reasons.append(f"{name} is no plain map without a bias, or has hooks or another forward")
        weight = self.k_rel.weight
        for op in _OPS:
            if reason := kernel_refusal(weight.device, op):
                reasons.append(reason)
                break
        reason = self._node_refusal(x_dict)
        if reason is None:
            reason = self._edge_dict_refusal(x_dict, edge_index_dict)
        if reason is not None:
            reasons.append(reason)
        return reasons

    def _node_refusal(self, x_dict: Any) -> Optional[str]:
        if not isinstance(x_dict, dict) or not x_dict:
            return "x_dict is no dictionary of features"
        weight, types = self.k_rel.weight, self.kqv_lin.lins
        rounded = rounds_to(weight.device.type)
        if rounded is not None and weight.dtype not in (torch.float32, rounded):
            return f"autocast is on, and the parameters are {weight.dtype}"
        for key, x in x_dict.items():
            if key not in types:
                return f"x_dict has the node type {key!r}, and the metadata has not"
            known = is_plain_float(x) and x.dim() == 2 and x.device == weight.device
            if known and rounded is not None:
                if x.dtype not in (torch.float32, rounded):
                    return f"autocast is on, and the features of {key!r} are {x.dtype}"
            elif not known or x.dtype != weight.dtype:
                return f"the features of {key!r} are no plain tensor [N, F] of {weight.dtype} on {weight.device}"
            if reason := inference_refusal(x):
                return reason
        return None

    def _edge_dict_refusal(self, x_dict: dict, edge_index_dict: Any) -> Optional[str]:
        if not isinstance(edge_index_dict, dict) or not edge_index_dict:
            return "edge_index_dict is no dictionary of edges"
        device, types = self.k_rel.weight.device, self.edge_types_map
        if not compiling():
            # Tuples rehash at every look-up and there may be hundreds, so types in the usual order are compared first.
            known = (*edge_index_dict,) == (*types,) and len(x_dict) == len(self.kqv_lin.lins)
            if not known and edge_index_dict.keys() <= types.keys():
                known = all(key[0] in x_dict and key[-1] in x_dict for key in edge_index_dict)
            if known and _C.are_edge_lists((*edge_index_dict.values(),), device):
                return None  # the usual case; otherwise the checks below find the reasons
        for key, edge_index in edge_index_dict.items():
            if key not in types or key[0] not in x_dict or key[-1] not in x_dict:
                return f"edge_index_dict has {key!r}, which the metadata or x_dict has not"
            if isinstance(edge_index, SparseTensor):
                sizes = (x_dict[key[-1]].size(0), x_dict[key[0]].size(0))
                if (edge_index.size(0), edge_index.size(1)) != sizes:
                    return f"the SparseTensor of {key!r} has another shape than {list(sizes)}"
                continue
            plain = type(edge_index) in PLAIN and edge_index.layout is torch.strided
            if not plain or edge_index.dim() != 2 or edge_index.size(0) != 2 or edge_index.dtype not in _INDEX_DTYPES:
                return f"the edges of {key!r} are no plain int64 or int32 tensor [2, E] and no SparseTensor"
            if edge_index.device != device:
                return f"the edges of {key!r} are on {edge_index.device}"
        return None

    # The layer -------------------------------------------------------------------------------------------------------

    def _fused_forward(self, x_dict, edge_index_dict):
        width = self.out_channels
        # Destination types come first, so that tensors of destination nodes alone are the first rows.
        keys = [key for key in self.kqv_lin.lins if key in x_dict]
        keys.sort(key=lambda key: key not in self.dst_node_types)
        sizes = {key: x_dict[key].size(0) for key in keys}
        targets = {key: size for key, size in sizes.items() if key in self.dst_node_types}
        graph = joined_graph("HGTConv", edge_index_dict, sizes, targets, self.edge_types_map, len(self.edge_types))
        offsets = type_offsets(graph, sizes.values())
        rounded = rounds_to(graph.device.type)
        x, kqv = self._map_nodes(x_dict, keys, offsets, rounded)
        k, q, v = kqv.split(width, dim=1)
        compact, priors = graph.compact, self._priors(edge_index_dict)
        q = q if len(targets) == len(sizes) else q[: compact.edges.num_dst]
        matrices, scale = (self._matrices(self.k_rel), self._matrices(self.v_rel)), 1 / math.sqrt(width // self.heads)
        out = pair_dot_attention(compact, q, k, v, *matrices, priors, scale)
        del kqv, q, k, v  # freed before tensors of the same size are allocated
        outs = self._finish_nodes(F.gelu(out), x, x_dict, targets, offsets[: len(targets) + 1], rounded)
        return {key: outs[key] for key in self.kqv_lin.lins if key in targets}

    def _map_nodes(self, x_dict: dict, keys: list, offsets: Tensor, rounded) -> tuple[Optional[Tensor], Tensor]:
        """The features of all nodes, or None if they could not be joined, and the nodes' keys, queries and values."""
        xs = [x_dict[key] for key in keys]
        first = xs[0]
        alike = all(x.size(1) == first.size(1) and x.dtype == first.dtype for x in xs)
        if alike and (maps := stacked_maps(self.kqv_lin, keys, first, rounded)):
            x = torch.cat(xs) if len(xs) > 1 else first
            return x, torch.ops.edgeless.typed_linear(x if rounded is None else x.to(rounded), *maps, offsets)
        mapped = self.kqv_lin(x_dict)
        return None, torch.cat([mapped[key] for key in keys]) if len(keys) > 1 else mapped[keys[0]]

    def _finish_nodes(self, out: Tensor, x: Optional[Tensor], x_dict: dict, targets: dict, offsets, rounded) -> dict:
        """The last map and the skip connection of every type."""
        keys, blended = list(targets), False
        if maps := stacked_maps(self.out_lin, keys, out, rounded):
            out = torch.ops.edgeless.typed_linear(out, *maps, offsets)
            if x is not None and x.size(1) == out.size(1):
                if rounded is not None:  # the skip connection itself is not rounded
                    rounded = torch.promote_types(x.dtype, next(iter(self.skip.values())).dtype)
                    x, out = x.to(rounded), out.to(rounded)
                alpha = stacked(parameters_of(self.skip, keys), out, rounded)
                if alpha is not None and alpha.dim() == 2 and alpha.size(1) == 1:
                    alpha = alpha.sigmoid().view(-1)
                    x = x if x.size(0) == out.size(0) else x[: out.size(0)]
                    out = torch.ops.edgeless.typed_blend(out, x, alpha, offsets, None)
                    blended = True
        # Nobody else holds the split tensor, so users may change its parts in place, as upstream results.
        parts = torch.unsafe_split_with_sizes(out, list(targets.values())) if len(keys) > 1 else (out,)
        outs = dict(zip(keys, parts))
        if not maps:
            outs = self.out_lin(outs)
        return outs if blended else {key: self._skip(key, out, x_dict[key]) for key, out in outs.items()}

    def _matrices(self, linear: torch.nn.Module) -> Tensor:
        """``[R, H, D, D]``; the layer keeps them by head, then by edge type."""
        return linear.weight.unflatten(0, (self.heads, len(self.edge_types))).transpose(0, 1)

    def _priors(self, edge_index_dict: dict) -> Tensor:
        """The factors of each edge type's logits, ``[R, H]``; types without edges get no gradient."""
        priors = parameters_of(self.p_rel, self.edge_types)
        if len(edge_index_dict) < len(priors):
            priors = [p if key in edge_index_dict else p.detach() for p, key in zip(priors, self.edge_types)]
        return torch.stack(priors).view(-1, self.heads)  # its backward is faster than that of cat

    def _stock_forward(self, x_dict, edge_index_dict):
        if isinstance(edge_index_dict, dict):
            edge_index_dict = {key: for_stock(edge_index) for key, edge_index in edge_index_dict.items()}
        return super()._stock_forward(x_dict, edge_index_dict)

    def _skip(self, key: str, out: Tensor, x: Tensor) -> Tensor:
        if out.size(-1) != x.size(-1):
            return out
        alpha = self.skip[key].sigmoid()
        return alpha * out + (1 - alpha) * x
