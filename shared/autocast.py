"""The state of autocast. torch renamed the functions that read it in 2.4, and edgeless supports 2.2 and later."""

from __future__ import annotations

from typing import Optional

import torch

try:
    torch.is_autocast_enabled("cpu")
    _TAKES_DEVICE = True
except TypeError:  # torch < 2.4
    _TAKES_DEVICE = False


def autocasts(device_type: str) -> bool:
    """Returns whether autocast is on for a device type."""
    if _TAKES_DEVICE:
        return torch.is_autocast_enabled(device_type)
    return torch.is_autocast_cpu_enabled() if device_type == "cpu" else torch.is_autocast_enabled()


def autocast_dtype(device_type: str) -> torch.dtype:
    """Returns the dtype to which autocast casts on a device type."""
    if _TAKES_DEVICE:
        return torch.get_autocast_dtype(device_type)
    return torch.get_autocast_cpu_dtype() if device_type == "cpu" else torch.get_autocast_gpu_dtype()


def rounds_to(device_type: str) -> Optional[torch.dtype]:
    """Returns the dtype to which autocast casts on a device type, or None where it is off."""
    return autocast_dtype(device_type) if autocasts(device_type) else None


def cuda_autocast_dtype() -> torch.dtype:
    """Returns the dtype to which autocast casts on CUDA."""
    return autocast_dtype("cuda")
