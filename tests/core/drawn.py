"""Random calls of a layer: drawn from a seed, and what ours makes of them beside the stock layer."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch


class Drawn:
    """What a seed draws."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def one_of(self, choices):
        return self.rng.choice(tuple(choices))

    def often(self):
        return self.rng.random() < 0.7

    def randn(self, *sizes):
        return torch.randn(*sizes, generator=self.generator, dtype=torch.float64)


def assert_alike(
    case: Any, have: Any, want: Any, close: Callable, stands_for_any: Callable[[Any], bool] = lambda error: False
) -> None:
    """Two results, or the errors in their place, are alike.

    Args:
        case: printed where they are not.
        have, want: ours and the stock layer's.
        close: compares results.
        stands_for_any: whether an error of ours may stand in the place of any error of the stock layer.
    """
    if isinstance(want, Exception) or isinstance(have, Exception):
        same = type(have) is type(want) or (isinstance(want, Exception) and stands_for_any(have))
        assert same, f"{case}: {_short(have)} instead of {_short(want)}"
        return
    try:
        close(have, want)
    except AssertionError as error:
        raise AssertionError(f"{case}: {error}") from error


def _short(outcome: Any) -> str:
    return repr(outcome)[:200] if isinstance(outcome, Exception) else "a result"
