"""Autocast, under the names that torch gives it in 2.2 to today."""

from __future__ import annotations

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


def cuda_autocast_dtype() -> torch.dtype:
    """The dtype to which autocast rounds on CUDA."""
    return autocast_dtype("cuda")
