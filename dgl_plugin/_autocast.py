"""What DGL's own kernels do under autocast."""

from __future__ import annotations

import torch
from torch import Tensor

from edgeless.autocast import autocasts, cuda_autocast_dtype, rounds_to


def as_dgl_reads(x: Tensor) -> Tensor:
    """``x`` in the dtype in which a kernel of DGL reads it: autocast's on CUDA; on the CPU DGL does not ask."""
    if not x.is_cuda or x.dtype == torch.float64 or not autocasts("cuda"):
        return x
    return x.to(cuda_autocast_dtype())


def as_products_read(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The operands of a product, rounded as autocast asks on their device; results of products have that dtype then."""
    rounded = rounds_to(tensors[0].device.type)
    return tensors if rounded is None else tuple([tensor.to(rounded) for tensor in tensors])
