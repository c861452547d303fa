"""Observes calls for captures: a mode of torch notes the tensors that ops read; kernels without an op report theirs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

__all__ = ["WatchingMode", "is_seen", "reads", "unheard"]


class WatchingMode(TorchDispatchMode):
    """A mode of torch that watches ops and changes nothing, so that all code runs as without it."""

    def note(self, values: Iterable[object]) -> None:
        """Called with the tensors that a kernel reads without an op of torch."""


def reads(tensors: Iterable[Tensor]) -> None:
    """Reports the tensors that a kernel reads without an op of torch."""
    if torch._C._len_torch_dispatch_stack():
        for mode in _get_current_dispatch_mode_stack():
            if isinstance(mode, WatchingMode):
                mode.note(tensors)


def is_seen(own: int = 0) -> bool:
    """Returns whether a mode of torch sees every op or function, other than those of captures.

    Args:
        own: the number of active function modes that belong to the caller.
    """
    if torch._C._len_torch_function_stack() > own:
        return True
    if not torch._C._len_torch_dispatch_stack():
        return False
    return not all(isinstance(mode, WatchingMode) for mode in _get_current_dispatch_mode_stack())


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """Marks a block of edgeless that prints, writes files or reads the clock, which a capture must not count as effects
    of the observed step.
    """
    hear = sys.getprofile()
    if hear is None:
        yield
        return
    sys.setprofile(None)
    try:
        yield
    finally:
        sys.setprofile(hear)
