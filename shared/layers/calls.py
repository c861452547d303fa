"""Counts the calls of layers: how often each layer ran fused, generated or as the upstream layer, and why.

Layers call :func:`ran_fused`, :func:`ran_generated` or :func:`ran_stock` once for each call. A thread counts in
dictionaries of its own, which no other thread writes, so a count takes no lock. Code that torch.compile traces is noted
once for each trace, and a replay of a CUDA graph, which runs no Python, not at all.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Optional

import torch

from ..capture.watching import unheard
from ..untraced import constant
from .explanation import Explanation, Printed

MOST_REASONS = 20  # counted for one layer; reasons may name sizes, so their number has no bound
OTHER = "other reasons"
TRACED = "torch.compile traced it, and edgeless.explain says why"
OF_PROGRAMS = "torch.compile or torch.export traced it, and into a compiled model go the stock layer's ops"
REFERENCE = 'edgeless.backend("reference") is in force'

_logger = logging.getLogger("edgeless")
if os.environ.get("EDGELESS_LOG", "") not in ("", "0"):
    _handler = logging.StreamHandler(sys.stderr)
    _handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    _logger.addHandler(_handler)
    _logger.propagate = False  # otherwise the program's own handler would print the line again
else:
    _logger.addHandler(logging.NullHandler())  # silent, unless the program sets up Python's logging


class NotFusedError(RuntimeError):
    """Raised under ``backend("fused")`` by a call that the kernels do not cover; :func:`explain` gives the message."""


class _Thread(threading.local):
    """A thread's counts."""

    def __init__(self):
        self.fused: dict[Any, int] = {}  # class or function -> calls
        self.others: dict[tuple[Any, str, str], int] = {}  # class or function, "generated" or "stock", how or why
        self.recorded: Optional[list[tuple[Any, Explanation]]] = None
        self.plans = False
        self.ahead = False
        with _lock:
            _collect_dead()
            _threads.append((weakref.ref(threading.current_thread()), self.fused, self.others))


_lock = threading.Lock()
_threads: list[tuple[weakref.ref, dict, dict]] = []
_of_dead: Counter = Counter()
_before: Counter = Counter()  # the counts of the last reset
_warned: dict[Any, set[str]] = {}


def _collect_dead() -> None:
    """Adds up the counts of threads that have ended; the caller holds the lock."""
    for entry in [entry for entry in _threads if (thread := entry[0]()) is None or not thread.is_alive()]:
        _threads.remove(entry)
        _of_dead.update(_joined(*entry[1:]))


def _joined(fused: dict, others: dict) -> Counter:
    # Copies, which Python makes in one step, since the owner may add a key at any time.
    return Counter({**{(key, "fused", ""): n for key, n in fused.copy().items()}, **others.copy()})


_mine = _Thread()


# For layers ----------------------------------------------------------------------------------------------------------


def ran_fused(key: Any, layer: Any, inputs: Optional[tuple]) -> None:
    """Counts a call that runs fused.

    Args:
        key: the layer's class, or the function.
        layer: the layer or function itself.
        inputs: the arguments of the call, by position; None if the call has no plan.
    """
    if _mine.recorded is None:
        counts = _mine.fused
        counts[key] = counts.get(key, 0) + 1
    else:
        _record_fused(layer, inputs)


def ran_generated(layer: Any, how: str, text: Callable[[], str]) -> None:
    """Counts a call whose messages are generated: ``how`` names what ran, and ``text()`` describes the program."""
    if _mine.recorded is None:
        _count(type(layer), "generated", how)
    else:
        _mine.recorded.append((layer, Explanation(type(layer).__name__, True, (), how=how, levels=text())))


def ran_stock(key: Any, layer: Any, reasons: Sequence[str]) -> None:
    """Counts a call that runs as the upstream layer or function, and warns of it once for each reason."""
    if _mine.recorded is None:
        why = "; ".join(reasons)
        known = _warned.setdefault(key, set())
        _count(key, "stock", why if why in known else _new_reason(key, known, why))
    else:
        _mine.recorded.append((layer, Explanation(name_of(key).rpartition(".")[2], False, tuple(reasons))))


@constant
def note_trace(key: Any, fused: bool, why: str = TRACED) -> None:
    """Counts a call that is being traced: Dynamo calls this function while it traces, and compiles none of it."""
    _count(key, "traced" if fused else "stock", "" if fused else why)


@contextmanager
def recording(plans: bool = False, *, ahead: bool = False):
    """Yields a list that gets (layer, explanation) of every call of this thread inside the block; none is counted.

    Args:
        plans: whether explanations of calls on kernels get their plans, for which these calls run twice.
        ahead: whether layers behave as they will after enough calls.
    """
    before = _mine.recorded, _mine.plans, _mine.ahead
    _mine.recorded, _mine.plans, _mine.ahead = [], plans, ahead
    try:
        yield _mine.recorded
    finally:
        _mine.recorded, _mine.plans, _mine.ahead = before


def looks_ahead() -> bool:
    """Returns whether this thread's calls are recorded by :func:`recording` with ``ahead``."""
    return _mine.ahead


def name_of(key: Any) -> str:
    """The name under which a user imports a layer or function, which may be given as a name."""
    if isinstance(key, str):
        return key
    module, name = key.__module__, key.__qualname__
    for package in ("edgeless.pyg.nn", "edgeless.dgl.nn", "edgeless.dgl.ops"):
        if module == package or module.startswith(package + "."):
            return f"{package}.{name}"
    return f"edgeless.dgl.ops.{name}" if module.startswith("edgeless.dgl.") else f"{module}.{name}"


def _count(key: Any, outcome: str, why: str) -> None:
    counts = _mine.others
    counts[key, outcome, why] = counts.get((key, outcome, why), 0) + 1


def _record_fused(layer: Any, inputs: Optional[tuple]) -> None:
    name, steps, recorded = getattr(layer, "__name__", type(layer).__name__), (), _mine.recorded
    if _mine.plans and inputs is not None:
        from ..plan.recording import record  # it imports what imports this module

        parameters = layer.parameters() if isinstance(layer, torch.nn.Module) else ()
        again = getattr(layer, "_choose", layer)
        with recording():
            steps = tuple(record(lambda: again(*inputs), [*parameters, *inputs]))
    recorded.append((layer, Explanation(name, True, (), steps)))


def _new_reason(key: Any, known: set[str], why: str) -> str:
    """The reason to count a call under, which is logged if it is new."""
    with _lock:
        if why in known:
            return why
        if len(known) >= MOST_REASONS:
            why = OTHER
        if why not in known:
            known.add(why)
            if why != REFERENCE:
                said = "for reasons that are too many to list" if why == OTHER else f"because {why}"
                with unheard():
                    _logger.warning("%s does not run fused, %s", name_of(key), said)
    return why


# For users -----------------------------------------------------------------------------------------------------------


@dataclass
class LayerCalls:
    """The calls of one class of layers, or of one function.

    Attributes:
        fused: calls on kernels of edgeless.
        generated: calls whose messages a generated program computed, by the kind of code that ran.
        stock: calls of the upstream code, by reason.
        traced: how often torch.compile or torch.export traced the fused forward; runs of what they compile are not
            counted.
    """

    fused: int = 0
    generated: dict[str, int] = field(default_factory=dict)
    stock: dict[str, int] = field(default_factory=dict)
    traced: int = 0

    def _lines(self) -> list[tuple[str, str]]:
        lines = [(f"{self.fused} fused", "")] if self.fused else []
        lines += [(f"{n} generated", "" if how == "generated" else how) for how, n in self.generated.items()]
        lines += [(f"{self.traced} traced fused", "")] if self.traced else []
        return lines + [(f"{n} stock", why) for why, n in self.stock.items()]


@dataclass(repr=False)
class Report(Printed):
    """The result of :func:`report`.

    Attributes:
        layers: the name of a layer's class or of a function -> its calls.
    """

    layers: dict[str, LayerCalls] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = []
        for name, calls in self.layers.items():
            lines += [f"{name}: {count}{f', {why}' if why else ''}" for count, why in calls._lines()]
        return "\n".join(lines) or "No layer of edgeless was called."

    def _rows(self):
        rows = [(name, *line) for name, calls in self.layers.items() for line in calls._lines()]
        return ("layer", "calls", "why"), rows


def report(*, reset: bool = False) -> Report:
    """Counts what the layers of edgeless ran since the start of the process or the last reset.

    Calls are counted by class, over all threads. Functions of ``edgeless.dgl.ops`` are counted too, and those of
    :mod:`edgeless.functional` where they ran plain PyTorch. What ``torch.compile`` compiled is noted once for each
    trace; replays of CUDA graphs run no layer, and ``model.captured`` counts them. Upstream layers that
    were not swapped are not seen: :func:`edgeless.accelerate` reports them, and so does ``explain(model, *inputs)``.

    Args:
        reset: whether to set the counts to zero after this report.
    Returns:
        A report, which prints as text and shows as a table in notebooks.

    Example:
        >>> import edgeless
        >>> print(edgeless.report(reset=True))
        No layer of edgeless was called.
    """
    global _before
    with _lock:
        _collect_dead()
        total = Counter(_of_dead)
        for _, fused, others in _threads:
            total.update(_joined(fused, others))
        counts = total - _before
        if reset:
            _before = total
            _warned.clear()
    found: dict[str, LayerCalls] = {}
    for (key, outcome, why), count in counts.items():
        calls = found.setdefault(name_of(key), LayerCalls())
        if outcome in ("fused", "traced"):
            setattr(calls, outcome, getattr(calls, outcome) + count)
        else:
            by_reason = getattr(calls, outcome)
            by_reason[why] = by_reason.get(why, 0) + count
    return Report(dict(sorted(found.items())))
