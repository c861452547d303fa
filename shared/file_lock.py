"""One writer at a time for a file that is read, added to and replaced."""

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
    """Inside the block no other thread or process is in a block of the same file.

    The lock is the system's and ends with the process that holds it. It is on the file itself, which is made, empty,
    where there is none. Where the file system has no locks, or the others take longer than ``patience`` seconds,
    :data:`PATIENCE` by default, the block runs without one: no program hangs for it.

    Raises:
        OSError: the file cannot be opened for writing.
    """
    held = None if fcntl is None else _acquire(file, PATIENCE if patience is None else patience)
    try:
        yield
    finally:
        if held is not None:
            with held:
                fcntl.flock(held, fcntl.LOCK_UN)  # said, since a child that was forked in between shares what is open


def _acquire(file: Path, patience: float) -> Optional[IO[bytes]]:
    """The open file that has the lock; None where there is no lock to be had."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        held = open(file, "ab")  # noqa: SIM115  it is closed when the lock is given back
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
        held.close()  # of others, or no longer the file in this place: the one before has replaced it
    return None
