"""The counts and the report of captured models and captured steps."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

__all__ = ["Counts"]


class Counts:
    """Recordings, replays, and calls that were not captured, by reason. Subclasses keep recordings in ``_kept``."""

    _kept: dict[Hashable, list[Any]]

    def __init__(self):
        self._refused: dict[str, int] = {}
        self._misses = self._replays = 0
        self._gave_up = False

    def __repr__(self) -> str:
        return self.report()

    def report(self) -> str:
        """Returns the text of the report: recordings, replays, and why other calls were not captured."""
        kept = f"{self.num_captured} captured"
        state = f"gave up after {self._misses} calls in a row without a replay" if self._gave_up else kept
        lines = [f"{state}, {self._replays} replayed"]
        return "\n".join(lines + [f"  {count} not captured: {why}" for why, count in self._refused.items()])

    @property
    def num_captured(self) -> int:
        """The number of recordings that are kept."""
        return sum(map(len, self._kept.values()))

    @property
    def num_replays(self) -> int:
        """The number of calls that were replayed."""
        return self._replays

    def _refuse(self, why: str) -> None:
        self._refused[why] = self._refused.get(why, 0) + 1
