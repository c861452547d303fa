"""What users choose for a block of code: kept for every thread, followed by threads that work for another."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Optional

Tell = Callable[[Optional[str]], None]


class Blocks:
    """The ``with`` blocks that are open, in the order of their beginning, and what the newest of them chose.

    Blocks of several threads, and of several tasks or generators of one thread, end in any order: each takes away
    itself and nothing else. The choice is kept apart from the blocks, because torch.compile puts a guard on what it
    reads, and a string is the same for every block of one name.
    """

    def __init__(self, tell: Optional[Tell] = None):
        self.choice: Optional[str] = None
        self.names: dict[object, str] = {}
        self.tell = tell  # called with every new choice

    def begin(self, block: object, name: str) -> None:
        self.names[block] = name
        self.update()

    def end(self, block: object) -> None:
        self.names.pop(block, None)
        self.update()

    def update(self) -> None:
        self.choice = next(reversed(self.names.values()), None)
        if self.tell is not None:
            self.tell(self.choice)


class _Thread(threading.local):
    def __init__(self, tell_own: Callable[[], Optional[Tell]]):
        self.blocks = Blocks(tell_own())


class Choices:
    """The blocks of every thread, ``own.blocks``, and of all threads together, ``newest``.

    A thread that is inside no block of its own takes the newest choice of all threads: those of autograd, which run
    checkpoints again on CUDA, and those of nn.DataParallel work for a thread that is inside one. A context variable
    would not reach them, and torch.compile cannot read one.

    Args:
        tell_own: called in every thread, gives who is told what that thread chooses.
        tell_newest: is told the newest choice.
    """

    def __init__(self, tell_own: Callable[[], Optional[Tell]] = lambda: None, tell_newest: Optional[Tell] = None):
        self.own = _Thread(tell_own)
        self.newest = Blocks(tell_newest)
        self._lock = threading.RLock()  # a generator in a block may be collected wherever memory is allocated
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        """A child has the thread that forked and no other; one of the others may have held the lock."""
        self._lock = threading.RLock()
        self.newest.names = dict(self.own.blocks.names)
        self.newest.update()

    @contextlib.contextmanager
    def block(self, name: str) -> Iterator[None]:
        """Lets ``name`` be the choice of this thread inside the ``with`` block."""
        own, block = self.own.blocks, object()
        with self._lock:
            own.begin(block, name)
            self.newest.begin(block, name)
        try:
            yield
        finally:
            with self._lock:
                own.end(block)
                self.newest.end(block)
