"""Converts a DGLGraph's handle and the types of its edges to an :class:`edgeless.TypedGraph`."""

from __future__ import annotations

from typing import Any, Optional, Union

import torch
from torch import Tensor
from torch.nn import Parameter

from edgeless import Graph, TypedGraph
from edgeless.distributed.graph import DistGraph
from edgeless.graph.typed import typed_graph_for

Handle = Union[Graph, DistGraph]


def etypes_refusal(handle: Handle, etypes: Any) -> Optional[str]:
    """Returns why the kernels do not support ``etypes``, or None. The upstream layer raises its own error for it."""
    if type(etypes) not in (Tensor, Parameter):
        return f"etypes is a {type(etypes).__name__}, not a Tensor"
    if tuple(etypes.shape) != (handle.num_edges,) or etypes.dtype not in (torch.int32, torch.int64):
        return f"etypes is not an int64 or int32 Tensor of shape [E] = [{handle.num_edges}]"
    return None if etypes.device == handle.device else f"etypes is on {etypes.device}, but graph is on {handle.device}"


def typed_graph(handle: Handle, etypes: Tensor, num_types: int) -> TypedGraph:
    """The cached typed graph of a handle and the user's own ``etypes``. For a DistGraph its sources are local and halo
    nodes, whose rows :func:`source_rows` gives.
    """
    graph = handle.local if type(handle) is DistGraph else handle
    return typed_graph_for(etypes, handle, num_types, lambda: TypedGraph(graph, etypes, num_types))


def source_rows(handle: Handle, *rows: Tensor) -> tuple[Tensor, ...]:
    """The rows of the sources of :func:`typed_graph`; for a DistGraph the rows of halo nodes are fetched."""
    return handle.sources(*rows) if type(handle) is DistGraph else rows
