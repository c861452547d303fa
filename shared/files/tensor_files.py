"""Reads and writes tensors as safetensors files, and turns the library's errors into OSError and ValueError."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .whole_files import whole_file

__all__ = ["keeps", "opened", "safetensors", "write"]


def safetensors(call: str, extra: str):
    """The safetensors module; an ImportError says what to install.

    Args:
        call: the caller's name, for the message.
        extra: the extra of the edgeless package that installs safetensors.
    """
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            f"{call} keeps tensors as safetensors; install them with: pip install 'edgeless[{extra}]'"
        ) from error
    return safetensors


def keeps(library, dtype: torch.dtype) -> bool:
    """Returns whether files of the library may hold tensors of ``dtype``."""
    try:
        library.torch.save({"tensor": torch.empty(0, dtype=dtype, device="cpu")})
    except KeyError:  # the library's table of dtypes lacks it
        return False
    return True


def write(call: str, library, file: Path, tensors: dict[str, Tensor], about: dict[str, str]) -> None:
    """Writes tensors and the metadata ``about`` to a file that appears only when it is complete.

    Args:
        library: the module from :func:`safetensors`.
    Raises:
        OSError: the file cannot be written.
    """
    with whole_file(file) as half:
        try:
            library.torch.save_file(tensors, half, about)
        except library.SafetensorError as error:
            raise OSError(f"{call}: {file} cannot be written: {error}") from None


@contextlib.contextmanager
def opened(call: str, library, file: Path, device: str = "cpu") -> Iterator[Any]:
    """An open tensor file, as from ``safetensors.safe_open``; a damaged file raises ValueError."""
    try:
        with library.safe_open(file, framework="pt", device=device) as held:
            yield held
    except library.SafetensorError as error:
        raise ValueError(f"{call}: {file} must be a whole file of safetensors, but it is damaged: {error}") from None
