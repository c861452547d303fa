"""Medians of interleaved runs, so that noise of the machine hits every peer alike.

Peers are the functions under comparison: engines for the tune command, layers and ops for the benchmarks.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Optional

import torch

LEAST_SECONDS = 0.3  # least length of a peer's turn in a round on the CPU, of at least one run
SHORT_SECONDS = 0.02  # least length of a turn on CUDA: short runs, which the host disturbs most, repeat more often
LONG_SECONDS = 3.0  # most seconds of a turn on CUDA; of the warm-up or a CPU turn's first run, before no more begin
L2_BYTES = 256 << 20  # bytes written between runs to flush the L2, larger than the L2 of any current GPU


@dataclass
class Timing:
    """Milliseconds of every run of one peer."""

    runs: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.runs)

    @property
    def spread(self) -> float:
        """Half the distance from the 10th to the 90th percentile, relative to the median."""
        if len(self.runs) < 2:
            return 0.0
        deciles = statistics.quantiles(self.runs, n=10, method="inclusive")
        return (deciles[-1] - deciles[0]) / 2 / self.median


class Failed(Exception):
    """A peer cannot run this case; the message is for the table."""


def in_a_line(error: Exception) -> str:
    """The error in one line of at most 100 characters, for a table."""
    first_line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first_line}"[:100]


def clock_of(device: torch.device) -> Callable[[], float]:
    """A clock in milliseconds that first waits for all work queued on the device."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return 1e3 * time.perf_counter()

    return now


@dataclass
class Timer:
    """Times runs of peers in turns.

    Attributes:
        device: CUDA runs are timed by events, CPU runs by the clock.
        rounds: number of rounds; every peer has one turn per round.
        runs: CUDA runs per turn; more where they take less than :data:`SHORT_SECONDS`, fewer above
            :data:`LONG_SECONDS`. A turn on the CPU runs for :data:`LEAST_SECONDS`.
        warmup: runs before the first round.
        cold: flushes the L2 before every CUDA run.
    """

    device: torch.device
    rounds: int
    runs: int
    warmup: int
    cold: bool = False

    def compare(self, peers: dict) -> dict:
        """A :class:`Timing` or :class:`Failed` for every function of ``peers`` (key -> function without arguments)."""
        timings = {key: Timing() for key in peers}
        failed = {}
        for key, run in peers.items():
            try:
                self._warm_up(run)
            except Failed as error:
                failed[key] = error
        for _ in range(self.rounds):
            for key, run in peers.items():
                if key not in failed:
                    timings[key].runs += self._turn(run)
        return {**timings, **failed}

    def _warm_up(self, run: Callable[[], object]) -> None:
        try:
            start = time.perf_counter()
            for _ in range(self.warmup):
                run()
                if time.perf_counter() - start > LONG_SECONDS:
                    break
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            raise Failed("out of memory") from None
        except Exception as error:  # a failing peer must not stop the measurement of the others
            raise Failed(in_a_line(error)) from error

    def _turn(self, run: Callable[[], object]) -> list[float]:
        if self.device.type == "cuda":
            return self._turn_of_events(run)
        begin = time.perf_counter()
        run()  # not counted: the previous peer's rows are in the caches, and freed memory must be allocated again
        first = time.perf_counter() - begin
        if first > LONG_SECONDS:  # the run is so long that neither effect matters
            return [1e3 * first]
        runs, begin = [], time.perf_counter()
        while not runs or time.perf_counter() - begin < LEAST_SECONDS:
            start = time.perf_counter()
            run()
            runs.append(1e3 * (time.perf_counter() - start))
        return runs

    def _turn_of_events(self, run: Callable[[], object]) -> list[float]:
        flush = torch.empty(L2_BYTES, dtype=torch.uint8, device=self.device) if self.cold else None
        run()  # not counted: the previous peer's rows are in the caches
        (once,) = self._events(run, 1, flush)
        return self._events(run, self._runs_of_turn(once), flush)

    def _runs_of_turn(self, once: float) -> int:
        """The number of runs of a turn, from one run's milliseconds. The host queues all runs without waiting, so it
        needs their number in advance.
        """
        once = max(once, 1e-3)
        fit = round(1e3 * LONG_SECONDS / once)
        return max(1, min(fit, max(self.runs, math.ceil(1e3 * SHORT_SECONDS / once))))

    def _events(self, run: Callable[[], object], count: int, flush: Optional[torch.Tensor]) -> list[float]:
        events = []
        for _ in range(count):
            if flush is not None:
                flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            events.append((start, end))
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(end) for start, end in events]
