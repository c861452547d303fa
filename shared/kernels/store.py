"""The disk cache of compiled kernels.

A file holds one image after a checksum. It is written under a temporary name and renamed, so that nobody reads an
incomplete one; a truncated or altered file is removed and its kernel compiled again. Only the user may write to the
folder, since code from it is run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Optional, Union

from ..files.cache_folder import default_folder
from ..files.file_lock import locked
from ..files.whole_files import whole_file
from .nvrtc import Image

__all__ = ["Store", "default_store", "packed", "unpacked"]

MAGIC = b"edgeless kernel 1\n"
SUFFIX = ".kernel"
MOST_BYTES = 512 << 20


def packed(image: Image) -> bytes:
    """Serialises an image: magic, checksum, a line of JSON, code."""
    body = json.dumps({"kind": image.kind, "name": image.name}).encode() + b"\n" + image.code
    return MAGIC + hashlib.sha256(body).digest() + body


def unpacked(data: bytes) -> Optional[Image]:
    """Returns the image that :func:`packed` serialised; None if the bytes are invalid."""
    checksum, body = data[len(MAGIC) : len(MAGIC) + 32], data[len(MAGIC) + 32 :]
    if not data.startswith(MAGIC) or hashlib.sha256(body).digest() != checksum:
        return None
    line, _, code = body.partition(b"\n")
    try:
        fields = json.loads(line)
        return Image(str(fields["kind"]), str(fields["name"]), code)
    except (ValueError, TypeError, KeyError):  # another program's file with the same magic
        return None


class Store:
    """A folder of images by key.

    If the folder cannot be created, read or written, kernels are compiled again; no error is raised.

    Args:
        folder: need not exist. None: nothing is kept.
        most_bytes: the limit of all files together; beyond it, the least recently used ones are removed.
    """

    def __init__(self, folder: Union[str, Path, None], most_bytes: int = MOST_BYTES):
        self.folder = None if folder is None else Path(folder)
        self._most_bytes = most_bytes
        self._usable: Optional[bool] = None

    def get(self, key: str) -> Optional[Image]:
        """Returns the image of a key, or None if there is none."""
        if not self._is_usable():
            return None
        file = self._file(key)
        try:
            image = unpacked(file.read_bytes())
            if image is None:
                file.unlink()
            else:
                os.utime(file)  # the time of its last use, for _trim
            return image
        except OSError:
            return None

    def put(self, key: str, image: Image) -> None:
        """Writes an image to the folder and trims the folder to its limit."""
        if not self._is_usable():
            return
        with contextlib.suppress(OSError):
            with whole_file(self._file(key)) as file:
                file.write_bytes(packed(image))
            self._trim()

    @contextlib.contextmanager
    def writing(self, key: str) -> Iterator[None]:
        """Keeps other processes from compiling the same kernel in the block, if the file system has locks."""
        with contextlib.ExitStack() as stack:
            if self._is_usable():
                with contextlib.suppress(OSError):
                    stack.enter_context(locked(self.folder / f"{key[:2]}.lock", patience=60.0))
            yield

    def _file(self, key: str) -> Path:
        return self.folder / f"{key}{SUFFIX}"

    def _is_usable(self) -> bool:
        if self._usable is None:
            self._usable = self.folder is not None and self._is_private()
        return self._usable

    def _is_private(self) -> bool:
        """Creates the folder if necessary and returns whether it exists and only the user can write to it."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = self.folder.stat()
        except OSError:
            return False
        others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if os.name == "posix" and (found.st_uid != os.geteuid() or others):
            why = "others may write to it" if found.st_uid == os.geteuid() else "it belongs to another user"
            warnings.warn(
                f"edgeless: {self.folder} is not used for compiled kernels, since {why}. Set EDGELESS_KERNEL_CACHE to "
                "a folder of your own.",
                stacklevel=2,
            )
            return False
        return True

    def sizes(self) -> list[int]:
        """Returns the bytes of each image's file; nothing is created."""
        return [size for _, size, _ in self._files()]

    def _files(self) -> list[tuple[float, int, Path]]:
        """Returns the time of last use, the bytes and the path of each image's file."""
        files = []
        for file in self.folder.glob(f"*{SUFFIX}") if self.folder is not None else ():
            with contextlib.suppress(OSError):  # another process has removed it
                found = file.stat()
                files.append((found.st_mtime, found.st_size, file))
        return files

    def _trim(self) -> None:
        files = self._files()
        total = sum(size for _, size, _ in files)
        for _, size, file in sorted(files):
            if total <= self._most_bytes:
                return
            with contextlib.suppress(OSError):
                file.unlink()
            total -= size


@cache
def default_store() -> Store:
    """Returns the user's store: ``EDGELESS_KERNEL_CACHE``, or ``edgeless/kernels`` in the user's cache folder."""
    given = os.environ.get("EDGELESS_KERNEL_CACHE")
    folder = default_folder()
    return Store(Path(given) if given else folder and folder / "kernels")
