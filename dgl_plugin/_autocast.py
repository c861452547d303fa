"""Dtype conversions that DGL's own kernels do under autocast."""

from __future__ import annotations

import torch
from torch import Tensor

from edgeless.autocast import autocasts, cuda_autocast_dtype, rounds_to


def as_dgl_reads(x: Tensor) -> Tensor:
    """Casts ``x`` as DGL's kernels do: to the autocast dtype on CUDA, unless float64; on the CPU not at all."""
    if not x.is_cuda or x.dtype == torch.float64 or not autocasts("cuda"):
        return x
    return x.to(cuda_autocast_dtype())


def as_products_read(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Casts the operands of a matrix product to the autocast dtype of their device, which the product then has too."""
    rounded = rounds_to(tensors[0].device.type)
    return tensors if rounded is None else tuple([tensor.to(rounded) for tensor in tensors])
