"""Decides whether two computations of one value in float64 agree."""

from __future__ import annotations

import torch
from torch import Tensor

TOLERANCE, SCALE = 1e-9, 1e-3  # relative by norm, or to the scale for values below it


def agree(a: Tensor, b: Tensor) -> bool:
    """Returns whether values of one shape are equal but for rounding, where they are finite; integers are equal."""
    if a.shape != b.shape:
        return False
    if not b.is_floating_point():
        return torch.equal(a, b)
    finite = b.isfinite()
    if not torch.equal(a.isfinite(), finite) or not torch.equal(a.isnan(), b.isnan()):
        return False
    a, b = a.detach()[finite].double(), b.detach()[finite].double()
    return bool((a - b).norm() <= TOLERANCE * max(float(b.norm()), SCALE))
