"""The cache of programs: for each key a program, or the reason why there is none."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, Optional, Union

import torch

from .front.spaces import Argument, Refused

if TYPE_CHECKING:
    from .program import Program

_MOST = 512


class ProgramCache:
    """Programs and refusals by key; the least recently used entry is dropped first."""

    def __init__(self, most: int = _MOST):
        self._entries: OrderedDict[Hashable, Union[Program, str]] = OrderedDict()
        self._most, self._lock = most, threading.RLock()
        self.traces = self.cleared = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def known(self, key: Hashable) -> Optional[Program]:
        """The program of a key, if it has been made."""
        found = self._entries.get(key)
        return None if isinstance(found, str) else found

    def get(
        self,
        key: Hashable,
        function: Callable,
        arguments: Callable[[], Sequence[Argument]],
        one_set: bool,
        receiving: int,
        wanted: Sequence[int],
        form: Callable[[], Any] = lambda: None,
    ) -> Program:
        """The program of a key, traced and checked at its first use.

        The arguments are those of :class:`Program`, and are evaluated only where a program has to be made. The result
        of ``form()`` after the trace becomes the program's attribute ``form``.

        Raises:
            Refused: the function cannot be a program.
        """
        found = self._entries.get(key)
        if found is None:
            with self._lock:
                found = self._entries.get(key)
                if found is None:
                    found = self._make(function, arguments(), one_set, receiving, wanted, form)
                    self._entries[key] = found
                    while len(self._entries) > self._most:
                        self._entries.popitem(last=False)
        if isinstance(found, str):
            raise Refused(found)
        return found

    def _make(self, function, arguments, one_set, receiving, wanted, form) -> Union[Program, str]:
        from .checking import check  # the tracer takes long to import
        from .program import Program

        self.traces += 1
        try:
            with without_hooks():
                program = Program(function, arguments, one_set, receiving, wanted)
                check(program, function, arguments, one_set)
                _try_landing(program, function, arguments, one_set)
        except Refused as error:
            return str(error)
        except Exception as error:  # whatever error a trace raises, the upstream layer runs
            return f"the generator fails, {type(error).__name__}: {str(error).strip()[:160]}"
        program.form = form()
        return program

    def clear(self) -> None:
        """Forgets all programs."""
        self._entries.clear()
        self.cleared += 1


def hooks_of_saved_tensors() -> Any:
    """The active hooks on tensors that autograd saves, such as a checkpoint's, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def without_hooks():
    """Hides the tensors that a trace and a check save from the caller's hooks."""
    if hooks_of_saved_tensors() is None:
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def _try_landing(program: Program, function: Callable, arguments: Sequence[Argument], one_set: bool) -> None:
    """Sets the program's landing if existing ops can compute it and pass the check."""
    from .checking import check
    from .run.landing import land

    try:
        program.landing = land(program)
        if program.landing is not None:
            check(program, function, arguments, one_set)
    except Exception:  # the program runs without a landing, as checked before
        program.landing = None
