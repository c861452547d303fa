"""What torch.library offers under different names in torch 2.2 to today."""

from __future__ import annotations

import torch

if hasattr(torch.library, "register_fake"):
    register_fake = torch.library.register_fake
else:  # torch < 2.4
    register_fake = torch.library.impl_abstract

LIBRARY = torch.library.Library("edgeless", "IMPL")


def register_autograd_kernel(name: str, kernel) -> None:
    """Make ``kernel`` what ``torch.ops.edgeless.<name>`` runs above the autograd dispatch key.

    A plain kernel under this key costs less per call than ``torch.library.register_autograd``, which matters on
    small graphs, and exists in every supported torch.
    """
    LIBRARY.impl(name, kernel, "Autograd")


below_autograd = torch._C._AutoDispatchBelowAutograd
