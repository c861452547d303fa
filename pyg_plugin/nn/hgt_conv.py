"""HGTConv of PyG on products with the matrices of relations and dot-product attention."""

from __future__ import annotations

import math
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch_geometric.nn.conv import hgt_conv
from torch_geometric.nn.dense import linear
from torch_geometric.typing import SparseTensor

from edgeless.adapter import inference_refusal, is_hooked
from edgeless.autocast import autocasts
from edgeless.backends import kernel_refusal
from edgeless.functional import dot_attention, relational_sum
from edgeless.graph_checks import compiling

from ..conv import FusedConv, is_plain_float
from ..hetero import joined_graph
from .hetero_linear import HeteroLinear

_OPS = ("relational_sum", "attention")
_INDEX_DTYPES = (torch.int64, torch.int32)


class HGTConv(FusedConv, hgt_conv.HGTConv):
    r"""The heterogeneous graph transformer (Hu et al.: "Heterogeneous Graph Transformer", WWW 2020).

    Constructor, parameters and results are those of :class:`torch_geometric.nn.HGTConv`, given edge types in the order
    of the metadata: with another order the stock layer takes the matrices of other relations, and this one does not.
    Keys and values are made for the sources that an edge type has, not for all nodes of their type, and there is no row
    for an edge.

    Shapes:
        x_dict: ``[N_t, F_t]`` each; edge_index_dict: ``[2, E_r]`` tensors or SparseTensors; output: ``[N_t, C]`` each.
    """

    # Read by PyG when it writes propagate(), which the stock path uses:
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
            if type(module) not in (linear.HeteroLinear, HeteroLinear) or is_hooked(module) or module.bias is not None:
                reasons.append(f"{name} is no plain map without a bias")
        weight = self.k_rel.weight
        if compiling():
            reasons.append("the call is being compiled")
        elif autocasts(weight.device.type):
            reasons.append("autocast is on")
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
        weight = self.k_rel.weight
        for key, x in x_dict.items():
            if key not in self.kqv_lin.lins:
                return f"x_dict has the node type {key!r}, and the metadata has not"
            if not is_plain_float(x) or x.dim() != 2 or x.dtype != weight.dtype or x.device != weight.device:
                return f"the features of {key!r} are no plain tensor [N, F] of {weight.dtype} on {weight.device}"
            if reason := inference_refusal(x):
                return reason
        return None

    def _edge_dict_refusal(self, x_dict: dict, edge_index_dict: Any) -> Optional[str]:
        if not isinstance(edge_index_dict, dict) or not edge_index_dict:
            return "edge_index_dict is no dictionary of edges"
        for key, edge_index in edge_index_dict.items():
            if key not in self.edge_types_map or key[0] not in x_dict or key[-1] not in x_dict:
                return f"edge_index_dict has {key!r}, which the metadata or x_dict has not"
            if isinstance(edge_index, SparseTensor):
                sizes = (x_dict[key[-1]].size(0), x_dict[key[0]].size(0))
                if (edge_index.size(0), edge_index.size(1)) != sizes:
                    return f"the SparseTensor of {key!r} has another shape than {list(sizes)}"
                continue
            plain = type(edge_index) in (Tensor, Parameter) and edge_index.layout is torch.strided
            if not plain or edge_index.dim() != 2 or edge_index.size(0) != 2 or edge_index.dtype not in _INDEX_DTYPES:
                return f"the edges of {key!r} are no plain int64 or int32 tensor [2, E] and no SparseTensor"
            if edge_index.device != self.k_rel.weight.device:
                return f"the edges of {key!r} are on {edge_index.device}"
        return None

    # The layer -------------------------------------------------------------------------------------------------------

    def _fused_forward(self, x_dict, edge_index_dict):
        heads, width = self.heads, self.out_channels
        kqv_dict = self.kqv_lin(x_dict)
        sizes = {key: kqv.size(0) for key, kqv in kqv_dict.items()}
        kqv = next(iter(kqv_dict.values())) if len(kqv_dict) == 1 else torch.cat(list(kqv_dict.values()))
        k, q, v = kqv.split(width, dim=1)
        graph = joined_graph("HGTConv", edge_index_dict, sizes, sizes, self.edge_types_map, len(self.edge_types))
        pairs, edges, _ = graph.compact
        wide = torch.promote_types(k.dtype, torch.float32)  # or gradients of priors are sums of rounded products
        keys = self._matrices(self.k_rel).to(wide) * self._priors(edge_index_dict).to(wide)
        k = relational_sum(pairs, k, keys, out_dtype=k.dtype)
        v = relational_sum(pairs, v, self._matrices(self.v_rel))
        q, k, v = (t.unflatten(1, (heads, width // heads)) for t in (q, k, v))
        out = dot_attention(edges, q, k, v, scale=1 / math.sqrt(width // heads)).flatten(1)
        outs = dict(zip(sizes, out.split(list(sizes.values()))))
        outs = {key: out for key, out in outs.items() if key in self.dst_node_types}
        outs = self.out_lin({key: F.gelu(out) for key, out in outs.items()})
        return {key: self._skip(key, out, x_dict[key]) for key, out in outs.items()}

    def _matrices(self, linear: torch.nn.Module) -> Tensor:
        """``[R, H, D, D]``; the layer keeps them by head, then by edge type."""
        return linear.weight.unflatten(0, (self.heads, len(self.edge_types))).transpose(0, 1)

    def _priors(self, edge_index_dict: dict) -> Tensor:
        """What the logits of an edge type are multiplied by, ``[R, H, 1, 1]``; types without edges get no gradient."""
        named = [(self.p_rel["__".join(key)], key in edge_index_dict) for key in self.edge_types]
        return torch.stack([p if given else p.detach() for p, given in named]).view(-1, self.heads, 1, 1)

    def _skip(self, key: str, out: Tensor, x: Tensor) -> Tensor:
        if out.size(-1) != x.size(-1):
            return out
        alpha = self.skip[key].sigmoid()
        return alpha * out + (1 - alpha) * x
