"""Converts the edges of a generated layer's call, in any format, to one tensor."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.typing import SparseTensor
from torch_geometric.utils import to_edge_index

from edgeless.programs import Refused

from ..convert import SPARSE, kind_of

_NARROW = (torch.int32, torch.int64)


def plain_edges(layer, edge_index, kwargs: dict, names) -> tuple[Tensor, Optional[tuple], dict]:
    """Returns the edges as a tensor ``[2, E]``, the sizes of a sparse matrix, and the arguments with its values."""
    if isinstance(edge_index, EdgeIndex):
        if layer.fuse and layer.SUPPORTS_FUSED_EDGE_INDEX:
            raise Refused("edge_index is an EdgeIndex, for which the layer has its own message_and_aggregate()")
        return checked(edge_index.as_tensor()), (edge_index.num_rows, edge_index.num_cols), kwargs
    if kind_of(edge_index) in SPARSE:
        return _edges_of_matrix(layer, edge_index, dict(kwargs), names)
    if not isinstance(edge_index, Tensor):
        raise Refused(f"edge_index is a {type(edge_index).__name__}")
    return checked(edge_index), None, kwargs


def _edges_of_matrix(layer, adj_t, kwargs: dict, names):
    if layer.fuse:
        raise Refused("edge_index is a sparse matrix, for which the layer has its own message_and_aggregate()")
    if layer.flow != "source_to_target":
        raise Refused("edge_index is a sparse matrix, and the flow is reversed")
    if isinstance(adj_t, SparseTensor):
        row, col, values = adj_t.coo()
        features = values
    else:
        (row, col), values = to_edge_index(adj_t)
        features = values if values.dim() > 1 else None
    for name, value in (("edge_weight", values), ("edge_attr", features), ("edge_type", values)):
        if name in names and kwargs.get(name) is None and value is not None:
            kwargs[name] = value
    return torch.stack((col, row)), (adj_t.size(1), adj_t.size(0)), kwargs


def checked(edge_index: Tensor) -> Tensor:
    """Returns ``edge_index`` if it is a plain tensor ``[2, E]`` of ids, else refuses the call."""
    if type(edge_index) is not Tensor or edge_index.dim() != 2 or edge_index.size(0) != 2:
        raise Refused("edge_index is no plain tensor of shape [2, E]")
    if edge_index.dtype not in _NARROW:
        raise Refused(f"edge_index has the dtype {edge_index.dtype}")
    return edge_index
