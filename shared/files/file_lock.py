"""A lock that lets one writer at a time read a file, add to it and replace it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Optional

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

__all__ = ["locked"]

PATIENCE = 10.0  # seconds that a writer waits for the others
_PAUSE = 0.005


@contextlib.contextmanager
def locked(file: Path, patience: Optional[float] = None) -> Iterator[None]:
    """Keeps all other threads and processes out of blocks of the same file.

    The operating system holds the lock and releases it when the process ends. The lock is on the file itself, which is
    created empty if it is missing. If the file system has no locks, or others hold the lock for longer than
    ``patience`` seconds (:data:`PATIENCE` by default), the block runs without it, so that no program hangs.

    Raises:
        OSError: the file cannot be opened for writing.
    """
    held = None if fcntl is None else _acquire(file, PATIENCE if patience is None else patience)
    try:
        yield
    finally:
        if held is not None:
            with held:
                fcntl.flock(held, fcntl.LOCK_UN)  # a forked child shares the open file: closing ours keeps the lock


def _acquire(file: Path, patience: float) -> Optional[IO[bytes]]:
    """Returns the open, locked file; None if the lock cannot be had."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        held = open(file, "ab")  # noqa: SIM115  closed when the lock is released
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(held.fileno()), os.stat(file)):
                return held
        except BlockingIOError:
            time.sleep(_PAUSE)
        except FileNotFoundError:
            pass
        except OSError:
            held.close()
            return None
        held.close()  # it is locked by others, or the previous holder has replaced the file at this path
    return None
