"""What torch.library offers under different names in torch 2.2 to today."""

from __future__ import annotations

import torch

if hasattr(torch.library, "register_fake"):
    register_fake = torch.library.register_fake
else:  # torch < 2.4
    register_fake = torch.library.impl_abstract
