"""The logits of nodes: what each brings to the score of an edge, where that is linear in the nodes' features."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from .autocast import autocasts
from .ops import attention as _attention  # noqa: F401  registers the fake kernel of the op


def node_logits(x: Tensor, *vectors: Tensor) -> Optional[tuple[Tensor, ...]]:
    """``(x * a).sum(-1)`` ``[N, H]`` of x ``[N, H, C]`` for every a ``[1, H, C]``, without a product of x's size.

    None where dtypes differ and under autocast: a matrix product would round what the stock layers do not.
    """
    if any(a.dtype != x.dtype for a in vectors) or autocasts(x.device.type):
        return None
    return torch.ops.edgeless.node_logits(x, vectors)[0].chunk(len(vectors), dim=1)
