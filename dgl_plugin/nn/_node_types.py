"""Nodes sorted by type, cached with the user's own tensor of types."""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from edgeless import Graph
from edgeless.cache import graph_for
from edgeless.checks import as_index
from edgeless.functional.checks import promoted
from edgeless.functional.relational import rows_by_type


class NodeTypes(NamedTuple):
    """Type t has the nodes ``nodes[offsets[t]]`` to ``nodes[offsets[t + 1] - 1]``."""

    offsets: Tensor
    nodes: Tensor

    def product(self, x: Tensor, w: Tensor, dtype: Optional[torch.dtype] = None) -> Tensor:
        """Multiplies each row of x ``[N, K]`` by the matrix of its node's type in w ``[T, K, M]``, in ``dtype`` or else
        in the promoted dtype of x and w."""
        dtype = promoted((x, w)) if dtype is None else dtype
        return torch.ops.edgeless.typed_mm(x.to(dtype), w.to(dtype), *self)

    def blend(self, y: Tensor, x: Tensor, alpha: Tensor) -> Tensor:
        """``alpha y + (1 - alpha) x`` with each type's alpha, ``[T]``, in their promoted dtype."""
        dtype = promoted((y, x, alpha))
        return torch.ops.edgeless.typed_blend(y.to(dtype), x.to(dtype), alpha.to(dtype), *self)


def nodes_by_type(types: Tensor, num_types: int, count: int) -> NodeTypes:
    """The first ``count`` nodes sorted by type, from the cache if possible.

    Raises:
        IndexError: a type is negative or not below num_types, on the CPU; on a GPU an assertion fails on the device.
    """

    def build():
        rows = rows_by_type("HGTConv", "ntype", as_index(types[:count]), num_types, "T")
        return Graph(rows, None, num_types, num_types)

    csr = graph_for(types, ("nodes by type", num_types, count), build, tensors=(types,)).csr
    return NodeTypes(csr.indptr, csr.edge_ids)
