"""Helpers of the layers that sum, average or take extrema of their neighbours' features."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from edgeless import Graph
from edgeless.autocast import autocasts

from ..convert import Relation


def edge_weight_refusal(relation: Relation, feat, edge_weight) -> Optional[str]:
    """Returns why the kernels, which take one weight per edge, do not support ``edge_weight``, or None.

    Its dtype must be that of the features, unless autocast is on, which here converts both.
    """
    num_edges, x = relation.handle.num_edges, feat[0] if isinstance(feat, tuple) else feat
    if not isinstance(edge_weight, Tensor) or tuple(edge_weight.shape) not in ((num_edges,), (num_edges, 1)):
        what = list(edge_weight.shape) if isinstance(edge_weight, Tensor) else type(edge_weight).__name__
        return f"edge_weight is not a Tensor of shape [E] or [E, 1] with E = {num_edges}, but {what}"
    if edge_weight.dtype != x.dtype and not (autocasts(x.device.type) and edge_weight.is_floating_point()):
        return f"edge_weight is {edge_weight.dtype}, but feat is {x.dtype}"
    if edge_weight.layout is not torch.strided:
        return f"edge_weight has the layout {edge_weight.layout}"
    if edge_weight.device != x.device:
        return f"edge_weight is on {edge_weight.device}, but graph is on {x.device}"
    return None


def per_edge(handle: Graph, edge_weight: Optional[Tensor]) -> Optional[Tensor]:
    """``edge_weight`` ``[E]`` or ``[E, 1]`` as ``[E]``."""
    return None if edge_weight is None else edge_weight.view(handle.num_edges)
