"""Autocast, under the names that torch gives it in 2.2 to today."""

from __future__ import annotations

from typing import Optional

import torch

try:
    torch.is_autocast_enabled("cpu")
    _TAKES_DEVICE = True
except TypeError:  # torch < 2.4
    _TAKES_DEVICE = False


def autocasts(device_type: str) -> bool:
    """Whether autocast is on for a kind of device."""
    if _TAKES_DEVICE:
        return torch.is_autocast_enabled(device_type)
    return torch.is_autocast_cpu_enabled() if device_type == "cpu" else torch.is_autocast_enabled()


def autocast_dtype(device_type: str) -> torch.dtype:
    """The dtype to which autocast rounds on a kind of device."""
    if _TAKES_DEVICE:
        return torch.get_autocast_dtype(device_type)
    return torch.get_autocast_cpu_dtype() if device_type == "cpu" else torch.get_autocast_gpu_dtype()


def rounds_to(device_type: str) -> Optional[torch.dtype]:
    """The dtype to which autocast rounds where it is on for a kind of device, else None."""
    return autocast_dtype(device_type) if autocasts(device_type) else None


def cuda_autocast_dtype() -> torch.dtype:
    """The dtype to which autocast rounds on CUDA."""
    return autocast_dtype("cuda")
