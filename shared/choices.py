"""What users choose for a block of code.

A :class:`edgeless._C.Choice` is the thread's own, as ``torch.no_grad()`` is, and is kept where torch keeps what follows
a call of ``backward()`` into the threads of autograd: so a checkpoint that runs again there finds the choice of whoever
called ``backward()``. ``choice.name`` says what holds. A function that torch.compile traces may read it: the program is
guarded by the answer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from . import _C


@contextlib.contextmanager
def block(choice: _C.Choice, name: str) -> Iterator[None]:
    """Lets ``name``, one of ``choice.names``, be the choice of this thread inside the ``with`` block."""
    begun = choice.begin(choice.names.index(name))
    try:
        yield
    finally:
        choice.end(begun)
