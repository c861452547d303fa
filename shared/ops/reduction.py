"""Fake kernels of minimum and maximum over in-neighbours. The schemas are in ``core_cuda/library.cpp``, the gradients
in ``core_cuda/reduction/reduction_autograd.cpp``.
"""

from __future__ import annotations

import torch

from ._registration import register_fake


@register_fake("edgeless::neighbor_reduce")
def _neighbor_reduce_fake(x, csr, csc, reduce, fill, arg_dtype, ties, max_degrees=()):
    rows = csr[0].size(0) - 1
    kept = 0 if arg_dtype is torch.bool else rows
    return (
        x.new_empty((rows, x.size(1))),
        x.new_empty((kept, x.size(1)), dtype=arg_dtype),
        x.new_empty((kept,), dtype=torch.uint8),
    )


@register_fake("edgeless::edge_positions")
def _edge_positions_fake(csr):
    return csr[1].new_empty(csr[1].shape, dtype=torch.int32)


@register_fake("edgeless::neighbor_reduce_backward")
def _neighbor_reduce_backward_fake(grad_out, x, out, arg, tied, csr, csc, reduce, ties, max_degrees=()):
    return x.new_empty(x.shape)
