"""Packs: files of kernels that were compiled elsewhere, so that a machine needs no compiler.

A pack is a ZIP archive with a member for each key, so that a kernel is read without reading the others. Members are
compressed by LZMA, which takes two thirds of what ZIP's own compression takes (docs/decisions/0070-packs-in-wheels.md).
"""

from __future__ import annotations

import lzma
import os
import zipfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Optional, Union

from ..files.whole_files import whole_file
from .nvrtc import Image
from .store import packed, unpacked

__all__ = ["Pack", "default_packs", "write_pack"]

# The exceptions of zipfile for archives that are damaged or use features that it does not support.
_DAMAGED = (zipfile.BadZipFile, ValueError, EOFError, NotImplementedError, RuntimeError)
_LOCAL_HEADER = 30  # bytes of a member's own header, without its name


def write_pack(file: Union[str, Path], images: Mapping[str, Image]) -> None:
    """Writes a pack of images by key to a new file, which replaces ``file`` once it is complete.

    Raises:
        OSError: the file cannot be written.
    """
    with whole_file(Path(file)) as half:
        pack_into(half, images)


def pack_into(file: Path, images: Mapping[str, Image]) -> None:
    """Does the same as :func:`write_pack`, but writes to ``file`` itself."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for key in sorted(images):  # ZipInfo has a fixed date: equal images give equal files
            archive.writestr(zipfile.ZipInfo(key), lzma.compress(packed(images[key]), check=lzma.CHECK_NONE))


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
                found = {info.filename: (info.header_offset, info.compress_size) for info in archive.infolist()}
        except _DAMAGED as error:
            raise ValueError(f"file must be a pack of kernels, but {file} is not: {error}") from None
        self._places = found

    def __len__(self) -> int:
        return len(self._places)

    def get(self, key: str) -> Optional[Image]:
        """Returns the image of a key; None if the pack does not contain it or it is damaged."""
        if key not in self._places:
            return None
        begin, size = self._places[key]
        try:  # opened for each read, since threads and forked children would share the position of an open file
            with open(self.file, "rb") as file:
                file.seek(begin)
                header = file.read(_LOCAL_HEADER)
                file.seek(sum(int.from_bytes(header[at : at + 2], "little") for at in (26, 28)), os.SEEK_CUR)
                return unpacked(lzma.decompress(file.read(size)))
        except (lzma.LZMAError, MemoryError, ValueError, OverflowError, EOFError, OSError):
            return None


@cache
def default_packs() -> tuple[Pack, ...]:
    """Returns the packs listed in ``EDGELESS_KERNEL_PACKS``, separated as in PATH, then the package's own, if any.

    The package's own is ``kernels.pack`` beside this file, which ``tox -e pack`` makes before a release.

    Raises:
        ValueError, OSError: a listed file is no pack or cannot be read.
    """
    named = [Path(name) for name in os.environ.get("EDGELESS_KERNEL_PACKS", "").split(os.pathsep) if name]
    carried = Path(__file__).with_name("kernels.pack")
    return tuple(Pack(file) for file in (*named, *([carried] if carried.is_file() else [])))
