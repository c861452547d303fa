"""Files that a command writes at its end, checked to be writable before the work begins."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from edgeless.files.whole_files import whole_file

from .devices import UsageError


class OutputError(Exception):
    """Raised if results cannot be written; only the message is printed."""


def check_writable(option: str, file: Path) -> None:
    """Raises UsageError unless ``file`` can be written; leaves nothing behind."""
    if file.is_dir():
        raise UsageError(f"{option} {file}: must be a file, but is a directory")
    existed = os.path.lexists(file)
    if existed and not file.is_file():  # a pipe or device: opening it might wait or have an effect
        return
    try:
        with open(file, "ab"):
            pass
        if not existed:
            file.unlink()
    except OSError as error:
        raise UsageError(f"{option} {file}: cannot be written ({error.strerror})") from None


@contextlib.contextmanager
def writing(option: str, file: Path) -> Iterator[Path]:
    """Yields a path to write ``file`` to; an error in the block, such as a full disk, becomes an OutputError.

    The old contents stay until the new ones are complete. Pipes, devices and links are written directly, and so is a
    file in a folder where no other file can be made.
    """
    as_it_is = file.is_symlink() or (file.exists() and not file.is_file()) or not os.access(file.parent, os.W_OK)
    try:
        with contextlib.nullcontext(file) if as_it_is else whole_file(file) as path:
            yield path
    except OSError as error:
        raise OutputError(f"{option} {file}: cannot be written ({error.strerror or error})") from error
