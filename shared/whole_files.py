"""Files that are complete or not there at all: written beside their place, and moved there in one step."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

__all__ = ["whole_file"]


@contextlib.contextmanager
def whole_file(file: Path) -> Iterator[Path]:
    """A path to write to inside the block, whose end puts what was written in the place of ``file``.

    Nobody sees a half-written file, also where several processes or threads write the same one: the last one's stays.
    After an exception ``file`` is as it was, and nothing is left beside it.

    Args:
        file: in a folder that exists. The path inside is an empty file with its suffix and a name that is drawn at
            random: process ids repeat on a volume that several containers share.
    Raises:
        OSError: the file cannot be put there; a full disk may say so only here, when the data are asked to be on it.
    """
    half = file.with_name(f".edgeless-{secrets.token_hex(8)}.new{file.suffix}")
    try:
        with open(half, "xb") as made:
            mode = stat.S_IMODE(os.fstat(made.fileno()).st_mode)
        yield half
        with open(half, "r+b") as written:
            os.fsync(written.fileno())
        os.chmod(half, mode)  # that of any new file; safetensors' are closed to everybody else
        os.replace(half, file)
    finally:
        with contextlib.suppress(OSError):
            half.unlink()
