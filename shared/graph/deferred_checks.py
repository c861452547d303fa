"""Checks of a graph's ids on the device, for graphs that a captured step builds anew in every replay.

A check at once would wait for the GPU, which nothing in a CUDA graph can. Instead an id out of range becomes 0, so that
no kernel reads beyond its arrays, and a flag is set, which the host reads before the next call.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Optional

import torch
from torch import Tensor

__all__ = ["DeferredChecks", "building", "deferred", "deferring", "excusing"]

_MOST = 64  # checks that have an error message of their own


class DeferredChecks:
    """The flags of one recording.

    Args:
        device: the device of the graphs that are checked.
    """

    def __init__(self, device: torch.device):
        self.flags = torch.zeros(_MOST, dtype=torch.bool, device=device)
        self._words: list[str] = []
        self._coming: Optional[tuple[Tensor, torch.cuda.Event]] = None

    @property
    def any(self) -> bool:
        """True if the recording has made checks."""
        return bool(self._words)

    def ids(self, name: str, ids: Tensor, limit_name: str, limit: int) -> Tensor:
        """Replaces ids out of range by 0, sets a flag if there are any, and returns the ids.

        Raises:
            IndexError: there are ids, and none can be in range.
        """
        if ids.numel() and limit <= 0:
            raise IndexError(f"{name} has ids, expected none, since {limit_name} = {limit}")
        wrong = (ids < 0) | (ids >= limit)
        self._note(wrong, f"{name} had an id out of range, expected 0 <= id < {limit_name} = {limit}")
        return ids.masked_fill(wrong, 0)

    def no_loops(self, src: Tensor, dst: Tensor) -> None:
        """Sets a flag if an edge is a self loop."""
        self._note(
            src == dst,
            "a layer that replaces self loops got a graph with some, whose number only the host can count; remove "
            "them in the data, or pass add_self_loops=False",
        )

    def _note(self, wrong: Tensor, words: str) -> None:
        place = min(len(self._words), _MOST - 1)
        if len(self._words) < _MOST:
            self._words.append(words)
        self.flags[place].logical_or_(wrong.any())

    def send(self) -> None:
        """Starts the copy of the flags to the host, after a replay."""
        if self._coming is not None:
            return
        if self.flags.device.type != "cuda":
            self._coming = self.flags.clone(), _Now()
            return
        answer = torch.empty(_MOST, dtype=torch.bool, pin_memory=True)
        answer.copy_(self.flags, non_blocking=True)
        arrival = torch.cuda.Event()
        arrival.record()
        self._coming = answer, arrival

    def wrong(self) -> Optional[str]:
        """Returns the error message of replays whose flags have arrived, or None, and resets the flags."""
        if self._coming is None or not self._coming[1].query():
            return None
        found, self._coming = self._coming[0].tolist(), None
        if not any(found):
            return None
        self.flags.zero_()
        return self._words[found.index(True)]


class _Now:
    def query(self) -> bool:
        return True


class _Active(threading.local):
    checks: Optional[DeferredChecks] = None
    excuse: Optional[Callable[[], contextlib.AbstractContextManager]] = None


_active = _Active()


def deferred() -> Optional[DeferredChecks]:
    """Returns the deferred checks of graphs that this thread builds; None if graphs check their ids at once."""
    return _active.checks


def building() -> contextlib.AbstractContextManager:
    """Returns the context in which a graph is built. The host may wait for the GPU in it, even while a step is observed
    for such waits, because the recorded step will defer the checks.
    """
    return contextlib.nullcontext() if _active.excuse is None else _active.excuse()


@contextlib.contextmanager
def excusing(excuse: Callable[[], contextlib.AbstractContextManager]) -> Iterator[None]:
    """Makes ``excuse()`` the context in which this thread builds graphs, until the ``with`` block ends."""
    before, _active.excuse = _active.excuse, excuse
    try:
        yield
    finally:
        _active.excuse = before


@contextlib.contextmanager
def deferring(checks: DeferredChecks) -> Iterator[None]:
    """Defers the checks of graphs that this thread builds to ``checks``, until the ``with`` block ends."""
    before, _active.checks = _active.checks, checks
    try:
        yield
    finally:
        _active.checks = before
