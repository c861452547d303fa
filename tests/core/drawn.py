"""Random calls of layers, one or many over time: drawn from a seed, and ours held against the stock layers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

import edgeless


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


class DrawnUse(Drawn):
    """What is done in turn with layers and graphs that are kept. Subclasses make a graph, call, edit and replace."""

    graph: Callable
    call: Callable
    edit: Callable
    replace: Callable

    def __init__(self, seed: int):
        super().__init__(seed)
        self.log: list[str] = []
        self.graphs = [self.graph() for _ in range(3)]
        self.layers: dict[str, tuple] = {}  # the stock layer and ours

    def run(self, steps: int = 40) -> None:
        limit = edgeless.cache_info().limit
        actions = (self.call, self.call, self.call, self.edit, self.edit, self.replace, self.train, self.cache)
        try:
            for _ in range(steps):
                self.one_of(actions)()
        finally:
            edgeless.set_cache_limit(limit)

    def layers_of(self, name: str, make: Callable, stock: Any, fused: Any) -> tuple:
        """Made at their first call, in float64."""
        if name not in self.layers:
            default = torch.get_default_dtype()
            torch.set_default_dtype(torch.float64)
            try:
                theirs, ours = make(stock), make(fused)
            finally:
                torch.set_default_dtype(default)
            ours.load_state_dict(theirs.state_dict())
            self.layers[name] = theirs, ours
        return self.layers[name]

    def train(self) -> None:
        """A step of an optimizer, which writes over the parameters."""
        if not self.layers:
            return
        name = self.one_of(self.layers)
        self.log.append(f"{name}: other parameters")
        with torch.no_grad():
            for theirs, ours in zip(*(layer.parameters() for layer in self.layers[name]), strict=True):
                change = 0.1 * self.randn(*ours.shape)
                ours.add_(change), theirs.add_(change)

    def cache(self) -> None:
        how = self.one_of(("cleared", "small", "none", "large"))
        self.log.append(f"cache: {how}")
        if how == "cleared":
            edgeless.clear_cache()
        else:
            edgeless.set_cache_limit({"small": 3000, "none": 0, "large": 1 << 30}[how])


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
