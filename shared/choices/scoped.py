"""Choices that users make for a block of code, such as the backend and the engine.

A :class:`edgeless._C.Choice` belongs to the calling thread, as ``torch.no_grad()`` does, and is stored in torch's
thread-local state, which ``backward()`` hands to autograd's threads: a checkpoint that runs its forward again there
finds the choice of the thread that called ``backward()``. ``choice.name`` is the choice in force. A function that
torch.compile traces may read it; the program is then guarded by its value.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from .. import _C


@contextlib.contextmanager
def block(choice: _C.Choice, name: str) -> Iterator[None]:
    """Makes ``name``, one of ``choice.names``, the choice of this thread inside the ``with`` block."""
    begun = choice.begin(choice.names.index(name))
    try:
        yield
    finally:
        choice.end(begun)
