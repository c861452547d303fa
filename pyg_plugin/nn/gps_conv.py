"""GPSConv of PyG, which does not wait for the GPU to learn the sizes of a padded batch's graphs."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any, ClassVar, Optional

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn.conv import gps_conv

from edgeless.choices.backends import current_backend, explain
from edgeless.layers.adapter import named
from edgeless.padding import dense_rows_of
from edgeless.padding.dense_rows import DenseRows


class GPSConv(gps_conv.GPSConv):
    r"""The graph transformer layer of Rampášek et al. ("Recipe for a General, Powerful, Scalable Graph Transformer",
    2022): a layer that passes messages, and attention among all nodes of a graph.

    Constructor, parameters and results are those of :class:`torch_geometric.nn.GPSConv`. The inner layer is called, and
    is fused or falls back on its own. In a block of :func:`edgeless.padding.real_rows` with a batch of
    :class:`edgeless.pyg.loader.PaddedLoader`, whose ``batch.batch`` the layer is given, the host knows the sizes of the
    dense batch; so a step with it can be captured. Results are equal there up to rounding. Elsewhere, and for attention
    of type ``"performer"``, whose results depend on the size of the dense batch, the upstream forward is called.

    Shapes:
        x: ``[N, channels]``; edge_index: as the inner layer takes it; batch: int64 ``[N]``; output: ``[N, channels]``.
    """

    stock: ClassVar[type] = gps_conv.GPSConv
    _joins_layers = True

    def forward(self, x: Tensor, edge_index: Any, batch: Optional[Tensor] = None, **kwargs: Any) -> Tensor:
        """The layer's output, as upstream; ``kwargs`` are the inner layer's."""
        if type(self.attn) is torch.nn.MultiheadAttention and current_backend() != "reference":
            dense = dense_rows_of(batch)
            if dense is not None and x.dim() == 2 and x.size(0) == batch.numel():
                return self._of_known_sizes(x, edge_index, batch, dense, kwargs)
        return super().forward(x, edge_index, batch, **kwargs)

    def __repr__(self) -> str:
        return named(self, super().__repr__())

    def _fusion_refusals(self, x: Tensor, edge_index: Any, batch: Optional[Tensor] = None, **kwargs: Any) -> list[str]:
        """The unsupported reasons of the inner layer."""
        return [] if self.conv is None else list(explain(self.conv, x, edge_index, **kwargs).reasons)

    def _of_known_sizes(self, x: Tensor, edge_index: Any, batch: Tensor, dense: DenseRows, kwargs: dict) -> Tensor:
        """The upstream forward, except that rows enter and leave the dense batch by known indices."""
        parts = []
        if self.conv is not None:
            h = F.dropout(self.conv(x, edge_index, **kwargs), p=self.dropout, training=self.training)
            parts.append(self._normed(self.norm1, h + x, batch, dense))
        h = dense.to_dense(x)
        h, _ = self.attn(h, h, h, key_padding_mask=dense.padded, need_weights=False)
        h = F.dropout(dense.from_dense(h), p=self.dropout, training=self.training)
        parts.append(self._normed(self.norm2, h + x, batch, dense))
        out = sum(parts)
        return self._normed(self.norm3, out + self.mlp(out), batch, dense)

    def _normed(self, norm: Optional[torch.nn.Module], x: Tensor, batch: Tensor, dense: DenseRows) -> Tensor:
        if norm is None:
            return x
        if not self.norm_with_batch:
            return norm(x)
        return norm(x, batch=batch, **({"batch_size": dense.shape[0]} if _takes_batch_size(type(norm)) else {}))


@cache
def _takes_batch_size(norm: type) -> bool:
    return "batch_size" in inspect.signature(norm.forward).parameters
