"""Atomic file writes: a file is written beside its place and moved there when it is complete."""

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
    """Gives a temporary path to write to inside the block; the end of the block moves it to ``file``.

    Nobody sees a half-written file. If several processes or threads write the same file, the last to finish wins.
    After an exception ``file`` is unchanged and the temporary file is gone.

    Args:
        file: path in an existing folder. The temporary path is an empty file of the same suffix with a random name,
            since process ids repeat on a volume that several containers share.
    Raises:
        OSError: the file cannot be written; a full disk may report so only at the fsync that ends the block.
    """
    half = file.with_name(f".edgeless-{secrets.token_hex(8)}.new{file.suffix}")
    try:
        with open(half, "xb") as made:
            mode = stat.S_IMODE(os.fstat(made.fileno()).st_mode)
        yield half
        with open(half, "r+b") as written:
            os.fsync(written.fileno())
        os.chmod(half, mode)  # the mode of any new file; safetensors makes files private to the user
        os.replace(half, file)
    finally:
        with contextlib.suppress(OSError):
            half.unlink()
