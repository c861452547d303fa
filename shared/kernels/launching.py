"""Launches single kernels from Python; ops launch theirs in C++."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Union

from torch import Tensor

from .. import _C
from .compiler import Kernel

__all__ = ["launch"]

Argument = Union[Tensor, ctypes.Structure, ctypes._SimpleCData]


def launch(
    kernel: Kernel,
    grid: Sequence[int],
    block: int,
    arguments: Sequence[Argument],
    *,
    stream: int = 0,
    dynamic_shared_bytes: int = 0,
    cluster: int = 1,
    cooperative: bool = False,
) -> None:
    """Launches a kernel on the current CUDA device, which compiles and loads it at its first launch.

    Args:
        kernel: the kernel to launch.
        grid: the number of blocks along x, y and z; one to three values. With none along x the kernel is loaded alone.
        block: threads per block.
        arguments: a tensor for a pointer to its data; for any other parameter a :mod:`ctypes` value of the same size.
        stream: a ``cudaStream_t``, such as ``torch.cuda.current_stream().cuda_stream``.
        dynamic_shared_bytes: dynamic shared memory per block.
        cluster: blocks per cluster along x; more than one needs sm_90.
        cooperative: whether this is a cooperative launch, with all blocks resident at once.
    Raises:
        TypeError, ValueError: an argument has another type, or grid another length.
        RuntimeError: there is no driver, or it rejects the kernel or the launch, with its reason in the message; or a
            CUDA graph is being captured and the kernel is not loaded yet.
        CompileError, NvrtcError: as in :func:`edgeless.kernels.compiled`.
    """
    if not 1 <= len(grid) <= 3:
        raise ValueError(f"launch: grid must have one to three numbers, got {tuple(grid)}")
    _C.launch_kernel(
        header=kernel.header, expression=kernel.expression, grid=(*grid, 1, 1)[:3], block=block,
        arguments=[_bytes_of(argument) for argument in arguments], shared_bytes=dynamic_shared_bytes,
        cluster=cluster, cooperative=cooperative, stream=stream,
    )  # fmt: skip


def _bytes_of(argument: Argument) -> bytes:
    if isinstance(argument, Tensor):
        return bytes(ctypes.c_void_p(argument.data_ptr()))
    if isinstance(argument, (ctypes.Structure, ctypes._SimpleCData)):
        return bytes(argument)
    raise TypeError(f"launch: arguments must be tensors or values of ctypes, got {type(argument).__name__}")
