"""Packs: files of kernels that were compiled elsewhere, so that a machine needs no compiler.

A pack is a ZIP archive with a member for each key, so that a kernel is read without reading the others.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Optional, Union

from ..whole_files import whole_file
from .nvrtc import Image
from .store import packed, unpacked

__all__ = ["Pack", "default_packs", "write_pack"]

# The exceptions of zipfile for archives that are damaged or use features that it does not support.
_DAMAGED = (zipfile.BadZipFile, zlib.error, ValueError, EOFError, NotImplementedError, RuntimeError)


def write_pack(file: Union[str, Path], images: Mapping[str, Image]) -> None:
    """Writes a pack of images by key to a new file, which replaces ``file`` once it is complete.

    Raises:
        OSError: the file cannot be written.
    """
    with whole_file(Path(file)) as half:
        pack_into(half, images)


def pack_into(file: Path, images: Mapping[str, Image]) -> None:
    """Does what :func:`write_pack` does, but writes to ``file`` itself."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for key in sorted(images):  # ZipInfo has a fixed date: equal images give equal files
            archive.writestr(zipfile.ZipInfo(key), packed(images[key]), zipfile.ZIP_DEFLATED)


class Pack:
    """The kernels of a file that :func:`write_pack` wrote.

    Args:
        file: the pack.
    Raises:
        ValueError: the file is not a pack.
        OSError: the file cannot be read.
    """

    def __init__(self, file: Union[str, Path]):
        self.file = Path(file)
        try:
            with zipfile.ZipFile(self.file) as archive:
                self._keys = frozenset(archive.namelist())
        except _DAMAGED as error:
            raise ValueError(f"file must be a pack of kernels, but {file} is not: {error}") from None

    def __len__(self) -> int:
        return len(self._keys)

    def get(self, key: str) -> Optional[Image]:
        """Returns the image of a key; None if the pack does not contain it or it is damaged."""
        if key not in self._keys:
            return None
        try:  # opened for each read, since threads and forked children would share the position of an open file
            with zipfile.ZipFile(self.file) as archive:
                return unpacked(archive.read(key))
        except (*_DAMAGED, OSError):
            return None


@cache
def default_packs() -> tuple[Pack, ...]:
    """Returns the packs listed in ``EDGELESS_KERNEL_PACKS``, separated as in PATH, then the package's own, if any.

    Raises:
        ValueError, OSError: a listed file is no pack or cannot be read.
    """
    named = [Path(name) for name in os.environ.get("EDGELESS_KERNEL_PACKS", "").split(os.pathsep) if name]
    carried = Path(__file__).with_name("kernels.pack")
    return tuple(Pack(file) for file in (*named, *([carried] if carried.is_file() else [])))
