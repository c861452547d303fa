"""What torch.library offers under different names in torch 2.2 to today."""

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
    """Whether torch.export is tracing. Run while Dynamo traces and not traced: that of torch 2.11 takes the function
    below for True.
    """
    return hasattr(torch.compiler, "is_exporting") and torch.compiler.is_exporting()


def if_known(compute: Callable[[], _T]) -> Optional[_T]:
    """What ``compute`` returns, or None where it depends on a size that a compiled program learns when it runs."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    try:
        return compute()
    except GuardOnDataDependentSymNode:
        return None
