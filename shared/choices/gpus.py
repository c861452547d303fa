"""Decides at the first call on a GPU whether the CUDA kernels can run on it."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Optional

import torch

from ..untraced import constant

__all__ = ["gpu_refusal"]

OLDEST = 80  # compute capability 8.0, for tensor cores of bfloat16 and TF32, and maxima that keep a NaN
# The ops whose kernels need none of these, and therefore run on older GPUs; "graph" stands for building a graph.
OLDEST_OF = {"graph": 75, "spmm": 75, "sddmm": 75}

_refusals: dict[tuple[int, str], Optional[str]] = {}  # (index of the device, op) -> reason


@constant
def gpu_refusal(device: torch.device, op: str = "attention") -> Optional[str]:
    """Returns why no CUDA kernel of ``op`` can run on a GPU, or None if they can.

    In a torch.compile program the answer is a constant. A GPU is refused if it is older than the kernels, if nothing
    here can compile them for it, or if the driver is too old. Packs that EDGELESS_KERNEL_PACKS names, and
    EDGELESS_JIT=cached, promise that nothing must be compiled. Before CUDA is initialized, when nobody can have
    computed on a GPU, the answer is None.

    Args:
        device: a device of type "cuda"; without an index, the current one.
        op: the compiled op, as in :func:`edgeless.choices.backends.kernel_refusal`, or ``"graph"``.
    """
    index = device.index
    if index is None:
        if not torch.cuda.is_initialized():
            return None
        index = torch.cuda.current_device()
    try:
        return _refusals[index, op]
    except KeyError:
        pass
    if not torch.cuda.is_initialized():
        return None
    return _refusals.setdefault((index, op), _refusal_of(index, op))


def _refusal_of(index: int, op: str) -> Optional[str]:
    major, minor = torch.cuda.get_device_capability(index)
    architecture, oldest = 10 * major + minor, OLDEST_OF.get(op, OLDEST)
    if architecture < oldest:
        name = torch.cuda.get_device_name(index)
        return (
            f"the GPU ({name}) has compute capability {major}.{minor}, and the kernels of {op} need "
            f"{oldest // 10}.{oldest % 10}"
        )
    return _driver_refusal() or _compiler_refusal(architecture)


def _driver_refusal() -> Optional[str]:
    driver = _driver()
    if driver is None:
        return "the CUDA driver cannot be opened"
    if not hasattr(driver, "cuLaunchKernelEx"):  # the check of core_cuda/jit/driver.cpp
        return "the CUDA driver is older than CUDA 11.8, which the kernels need"
    return None


def _driver() -> Optional[ctypes.CDLL]:
    try:
        return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None


def _driver_version() -> tuple[int, int]:
    number = ctypes.c_int()
    _driver().cuDriverGetVersion(ctypes.byref(number))
    return number.value // 1000, number.value % 1000 // 10


def _compiler_refusal(architecture: int) -> Optional[str]:
    if os.environ.get("EDGELESS_KERNEL_PACKS") or os.environ.get("EDGELESS_JIT") == "cached":
        return None
    from ..kernels import NvrtcError, headers, installed_nvrtc  # imported only where a GPU is used

    try:
        headers.include_folders()
        nvrtc = installed_nvrtc()
        target = nvrtc.target(architecture)
    except NvrtcError as error:
        return f"the CUDA kernels cannot be compiled here: {str(error).rstrip('.')}"
    if target.startswith("compute_") and (version := _driver_version()) < nvrtc.version:
        # A driver compiles no PTX of a newer compiler.
        return (
            f"NVRTC {'.'.join(map(str, nvrtc.version))} does not know the GPU (sm_{architecture}), and the driver, of "
            f"CUDA {'.'.join(map(str, version))}, is too old for what it would compile: install a newer driver"
        )
    return None
