"""The op that gathers a batch of graphs from packed ones; its schema is in ``core_cuda/library.cpp``."""

from __future__ import annotations

import torch

from .. import _C  # noqa: F401  registers the op
from ._registration import register_fake

gather_packed = torch.ops.edgeless.gather_packed


@register_fake("edgeless::gather_packed")
def _gather_packed_fake(columns, dims, levels, increments, last, starts, begins, sizes):
    found = []
    for column, dim, level in zip(columns, dims, levels):
        shape = list(column.shape)
        shape[dim] = sizes[level]
        found.append(column.new_empty(shape))
    return found
