"""Helpers that register fake kernels, for torch 2.2 and later, whose names in torch.library differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Optional, TypeVar

import torch

from ..untraced import constant

_T = TypeVar("_T")

if hasattr(torch.library, "register_fake"):
    register_fake = torch.library.register_fake
else:  # torch < 2.4
    register_fake = torch.library.impl_abstract


@constant
def is_exporting() -> bool:
    """Returns whether torch.export is tracing.

    Dynamo calls this instead of tracing it, since Dynamo of torch 2.11 takes ``torch.compiler.is_exporting()`` to be
    True.
    """
    return hasattr(torch.compiler, "is_exporting") and torch.compiler.is_exporting()


def if_known(compute: Callable[[], _T]) -> Optional[_T]:
    """Returns the result of ``compute``, or None if it depends on a size that is known only when a program runs."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    try:
        return compute()
    except GuardOnDataDependentSymNode:
        return None
