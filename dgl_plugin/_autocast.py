"""What DGL's own kernels do under autocast."""

from __future__ import annotations

import torch
from torch import Tensor


def autocasts(device_type: str) -> bool:
    """Whether autocast is on for a kind of device."""
    if _AUTOCAST_TAKES_DEVICE:
        return torch.is_autocast_enabled(device_type)
    return torch.is_autocast_cpu_enabled() if device_type == "cpu" else torch.is_autocast_enabled()


def as_dgl_reads(x: Tensor) -> Tensor:
    """``x`` in the dtype in which a kernel of DGL reads it: autocast's on CUDA; on the CPU DGL does not ask."""
    if not x.is_cuda or x.dtype == torch.float64 or not autocasts("cuda"):
        return x
    return x.to(torch.get_autocast_dtype("cuda") if _AUTOCAST_TAKES_DEVICE else torch.get_autocast_gpu_dtype())


try:
    torch.is_autocast_enabled("cpu")
    _AUTOCAST_TAKES_DEVICE = True
except TypeError:  # torch < 2.4
    _AUTOCAST_TAKES_DEVICE = False
