"""The recordings, the counts and the report of captured models and captured steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any

from .keys import Unfit

__all__ = ["Counts", "recording_lock"]

recording_lock = threading.Lock()  # a process records one capture at a time; meanwhile other models run uncaptured


class Counts:
    """Recordings, replays, and calls that were not captured, by reason.

    Subclasses keep recordings in ``_kept`` and equal calls that were not recorded in ``_seen``, by key; ``_most`` is
    the largest number of recordings.
    """

    _kept: dict[Hashable, list[Any]]
    _seen: dict[Hashable, list[Any]]
    _most: int

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

    def _drop(self, stale: Callable[[Any], bool]) -> None:
        for key, kept in list(self._kept.items()):
            self._kept[key] = [recording for recording in kept if not stale(recording)]
            if not self._kept[key]:
                del self._kept[key]

    def _recorded(self, key: Hashable, seen: Any, record: Callable[[], Any]) -> Any:
        """Returns the new recording of equal calls, ``record()``, and keeps it in place of the calls ``seen``.

        Raises:
            Unfit: there are too many recordings, another one is going on, or the calls cannot be recorded.
        """
        self._drop(lambda recording: recording.is_stale())
        if self.num_captured >= self._most:
            raise Unfit(f"there are {self._most} captures, the most that are kept")
        if not recording_lock.acquire(blocking=False):
            raise Unfit("another capture is going on")
        try:
            recording = record()
        except Unfit:
            seen.failed = True
            raise
        finally:
            recording_lock.release()
        self._seen[key].remove(seen)
        self._kept.setdefault(key, []).append(recording)
        return recording
