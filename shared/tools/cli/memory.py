"""Peak memory of a block of work, above the memory in use at its start."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Optional

import torch


@dataclass
class Peak:
    """The result of :func:`peak_memory`.

    Attributes:
        before: bytes in use when the block began.
        bytes: the peak of the block minus ``before``; known when the block has ended.
    """

    before: int = 0
    bytes: int = 0


@contextlib.contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """Measures the peak of the ``with`` block above the state at its start.

    On CUDA that is the allocator's own count. On the CPU it is the resident set of this process, so the process should
    do nothing else: Linux keeps the peak and allows to reset it; elsewhere a thread samples every millisecond.
    """
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        peak.before = torch.cuda.memory_allocated(device)
        yield peak
        torch.cuda.synchronize(device)
        peak.bytes = torch.cuda.max_memory_allocated(device) - peak.before
        return
    _return_free_memory()
    if _reset_high_water_mark():
        peak.before = _status("VmRSS")
        yield peak
        peak.bytes = max(0, _status("VmHWM") - peak.before)
    else:
        with _watch(peak):
            yield peak


def available_memory() -> Optional[int]:
    """Bytes that a new allocation could take on this machine; None if the system does not report it."""
    with contextlib.suppress(OSError), open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024
    return None


def _return_free_memory() -> None:
    """Returns freed memory that malloc keeps to the system, so that its reuse is counted."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # no glibc
            ctypes.CDLL(None).malloc_trim(0)


def _reset_high_water_mark() -> bool:
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        return _status("VmHWM") > 0
    except (OSError, StopIteration):
        return False


def _status(field: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))


def _resident() -> int:
    try:
        return _status("VmRSS")
    except (OSError, StopIteration):
        import psutil  # not needed on Linux

        return psutil.Process().memory_info().rss


@contextlib.contextmanager
def _watch(peak: Peak) -> Iterator[None]:
    peak.before, highest, done = _resident(), 0, threading.Event()

    def look() -> None:
        nonlocal highest
        while not done.wait(0.001):
            highest = max(highest, _resident())

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        peak.bytes = max(0, max(highest, _resident()) - peak.before)
