"""Locates the sources of the kernels and the CUDA headers that they include."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Optional

from .nvrtc import NvrtcError, installed_nvrtc, toolkits

__all__ = ["digest_of_cuda", "digest_of_sources", "include_folders"]

SUFFIXES = (".cuh", ".h")
STANDARD = "jit/standard"  # the part of the C++ standard library that kernels use
FROM_CUDA = ("cuda_fp16.h", "cuda_fp16.hpp", "cuda_bf16.h", "cuda_bf16.hpp")


def is_header(file: str) -> bool:
    """Returns whether the package contains a file of ``core_cuda``; setup.py has the same rule."""
    if file.startswith(f"{STANDARD}/"):
        return True
    return file.endswith(SUFFIXES) and "/cpu/" not in file


@cache
def sources() -> Path:
    """Returns the folder of the kernels' headers: beside this file if installed, ``core_cuda`` in a checkout.

    Raises:
        NvrtcError: both folders are missing.
    """
    here = Path(__file__).resolve().parent
    for folder in (here / "sources", here.parents[1] / "core_cuda"):
        if (folder / STANDARD).is_dir():
            return folder
    raise NvrtcError(f"the sources of the CUDA kernels are missing from {here / 'sources'}: reinstall edgeless.")


@cache
def cuda_headers() -> Path:
    """Returns the folder of CUDA's headers for the 16-bit types.

    Wheels of several major versions of CUDA may be installed beside each other: the headers of the compiler's own
    version are preferred, since others may use features that it lacks.

    Raises:
        NvrtcError: no folder has them.
    """
    wheels = [Path(folder, "nvidia") for folder in sys.path]
    places = [place for wheel in wheels for place in sorted(wheel.glob("cu[0-9]*/include"), reverse=True)]
    places += [wheel / "cuda_runtime" / "include" for wheel in wheels]
    places += [home / "include" for home in toolkits()]
    found = [place for place in places if (place / FROM_CUDA[0]).is_file()]
    if found:
        wanted = _major_of_compiler()
        return min(found, key=lambda place: wanted is not None and _major_of(place) != wanted)  # the first of the best
    raise NvrtcError(
        f"{FROM_CUDA[0]} was not found, which the CUDA kernels include: install nvidia-cuda-runtime, which comes "
        "along with PyTorch for CUDA, or set CUDA_HOME."
    )


def _major_of_compiler() -> Optional[int]:
    try:
        return installed_nvrtc().version[0]
    except NvrtcError:  # the error is reported where a kernel is compiled
        return None


def _major_of(place: Path) -> Optional[int]:
    """Returns the major version of CUDA that a folder of headers belongs to; None if it has no version."""
    try:
        text = (place / "cuda_runtime_api.h").read_text(errors="replace")
    except OSError:
        return None
    version = re.search(r"^#define\s+CUDART_VERSION\s+(\d+)", text, re.MULTILINE)
    return None if version is None else int(version[1]) // 1000


def include_folders() -> list[Path]:
    """Returns the compiler's include folders in search order."""
    return [sources() / STANDARD, sources(), cuda_headers()]


@cache
def digest_of_sources() -> str:
    """Returns a digest of all headers of this project that a kernel may include."""
    root = sources()
    files = (file.relative_to(root).as_posix() for file in root.rglob("*"))
    return _digest(root, sorted(file for file in files if is_header(file)))


@cache
def digest_of_cuda() -> str:
    """Returns a digest of the CUDA headers that kernels include."""
    return _digest(cuda_headers(), FROM_CUDA)


def _digest(folder: Path, names: Sequence[str]) -> str:
    found = hashlib.sha256()
    for name in names:
        text = (folder / name).read_bytes()
        found.update(f"{name}\0{len(text)}\0".encode() + text)
    return found.hexdigest()
