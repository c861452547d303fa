"""Files that a command writes at its end: proved writable before the work begins."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from .devices import UsageError


class OutputError(Exception):
    """What was computed cannot be written; the message is all that is printed."""


def check_writable(option: str, file: Path) -> None:
    """Raises UsageError unless ``file`` can be written; leaves nothing behind."""
    if file.is_dir():
        raise UsageError(f"{option} {file}: must be a file, but is a directory")
    existed = os.path.lexists(file)
    if existed and not file.is_file():  # a pipe, a device: to open it might wait or be noticed
        return
    try:
        with open(file, "ab"):
            pass
        if not existed:
            file.unlink()
    except OSError as error:
        raise UsageError(f"{option} {file}: cannot be written ({error.strerror})") from None


@contextlib.contextmanager
def writing(option: str, file: Path) -> Iterator[None]:
    """Turns what goes wrong while ``file`` is written, on a full disk say, into an OutputError."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"{option} {file}: cannot be written ({error.strerror or error})") from error
