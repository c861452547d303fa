"""From a DGLGraph and the types of its edges to an :class:`edgeless.TypedGraph`."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor
from torch.nn import Parameter

from edgeless import Graph, TypedGraph
from edgeless.distributed.graph import DistGraph
from edgeless.typed_graph import typed_graph_for


def etypes_refusal(handle: Graph, etypes: Any) -> Optional[str]:
    """Why ``etypes`` is nothing for the kernels; the stock layer knows the right error for it."""
    if type(handle) is DistGraph:
        return "graph is a DistGraph, and a layer over relations does not run on parts of a graph"
    if type(etypes) not in (Tensor, Parameter):
        return f"etypes is a {type(etypes).__name__}, not a Tensor"
    if tuple(etypes.shape) != (handle.num_edges,) or etypes.dtype not in (torch.int32, torch.int64):
        return f"etypes is not an int64 or int32 Tensor of shape [E] = [{handle.num_edges}]"
    return None if etypes.device == handle.device else f"etypes is on {etypes.device}, but graph is on {handle.device}"


def typed_graph(handle: Graph, etypes: Tensor, num_types: int) -> TypedGraph:
    """The (cached) typed graph of a handle and the user's own ``etypes``."""
    return typed_graph_for(etypes, handle, num_types, lambda: TypedGraph(handle, etypes, num_types))
