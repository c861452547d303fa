"""Converts rows of a batch of graphs to a dense tensor with one row per graph, and back, without synchronisation."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

__all__ = ["DenseRows"]


class DenseRows:
    """The indices of a batch's nodes in a dense tensor ``[graphs, most, features]``.

    Args:
        batch: for every node the index of its graph, int64 ``[N]``, ascending.
        ptr: the first node of every graph, and N: int64 ``[graphs + 1]``.
        most: at least the number of nodes of every graph.

    Attributes:
        padded: ``[graphs, most]``, true for entries that attention must ignore: those without a node, except the first
            entry of a graph without nodes, since a softmax over nothing is NaN.
    """

    def __init__(self, batch: Tensor, ptr: Tensor, most: int):
        graphs, ids = ptr.numel() - 1, torch.arange(max(most, 1), device=batch.device)
        most = ids.numel()
        first, counts = ptr[:-1], ptr.diff()
        self.shape = (graphs, most)
        self._none = (ids >= counts.unsqueeze(1)).view(-1, 1)
        self._nodes = (first.unsqueeze(1) + ids).view(-1).masked_fill(self._none.view(-1), 0)
        moved = torch.arange(0, graphs * most, most, device=batch.device) - first
        self._places = torch.arange(batch.numel(), device=batch.device) + moved.index_select(0, batch)
        self.padded = ids >= counts.clamp(min=1).unsqueeze(1)

    def to_dense(self, x: Tensor) -> Tensor:
        """``[N, F]`` to ``[graphs, most, F]``, 0 where there is no node."""
        return _Moved.apply(x, self._nodes, self._none, self._places, None).view(*self.shape, x.size(1))

    def from_dense(self, x: Tensor) -> Tensor:
        """``[graphs, most, F]`` to ``[N, F]``."""
        return _Moved.apply(x.flatten(0, 1), self._places, None, self._nodes, self._none)


class _Moved(torch.autograd.Function):
    """Moves rows by index in both directions; the backward of torch's indexing would add up gradients by atomics."""

    @staticmethod
    def forward(ctx, x: Tensor, there: Tensor, none: Optional[Tensor], back: Tensor, none_back: Optional[Tensor]):
        ctx.places = there, none, back, none_back
        out = x.index_select(0, there)
        return out if none is None else out.masked_fill_(none, 0)

    @staticmethod
    def backward(ctx, grad: Tensor):
        there, none, back, none_back = ctx.places
        return _Moved.apply(grad, back, none_back, there, none), None, None, None, None
