"""Checks of option values. Every error names the option, what was expected and what came."""

from __future__ import annotations

import math
from typing import Any, Optional

from .devices import UsageError
from .memory import available_memory

MOST = 2**31 - 1  # the bound of all counts, more than any machine has memory for
MOST_THREADS = 1024


def check_count(option: str, value: Optional[int], least: int = 1, most: int = MOST) -> None:
    """Raises UsageError unless ``value`` is in [least, most]; None means that the option was not given."""
    if value is not None and value < least:
        raise UsageError(f"{option} must be at least {least:,}, got {value}")
    if value is not None and value > most:
        raise UsageError(f"{option} must be at most {most:,}, got {value}")


def check_real(option: str, value: Optional[float], most: float = math.inf) -> None:
    """Raises UsageError unless ``value`` is finite and in [0, most]; None means that the option was not given."""
    if value is not None and not (0 <= value <= most and math.isfinite(value)):
        wanted = "at least 0" if math.isinf(most) else f"in [0, {most:g}]"
        raise UsageError(f"{option} must be a number {wanted}, got {value}")


def check_room(what: Any, needed: int) -> None:
    """Raises UsageError when ``needed`` bytes are more than the machine has free."""
    room = available_memory()
    if room is not None and needed > room:
        raise UsageError(f"{what} needs about {needed / 1e9:,.0f} GB of memory, and {room / 1e9:,.0f} GB are free")
