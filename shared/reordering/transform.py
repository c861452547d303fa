"""Base of the adapters' transforms that reorder the nodes of a graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Optional, Union

from torch import Tensor

from .permutations import permutations


class ReorderBase:
    """Mixin of both ``Reorder`` transforms; it precedes the framework's own base.

    Args:
        method, num_parts, seed: as in :meth:`edgeless.Graph.reorder`; ``method`` may also be a dictionary of
            permutations by node type.
    """

    def __init__(
        self,
        method: Union[str, Tensor, Mapping[str, Tensor]] = "community",
        num_parts: Optional[int] = None,
        seed: int = 0,
    ):
        self.method = method
        self.num_parts = num_parts
        self.seed = seed

    def _permutations(self, sizes: dict, relations: list[tuple]) -> dict:
        """Node type -> permutation; the arguments are those of :func:`edgeless.reordering.permutations`."""
        return permutations("Reorder", sizes, relations, self.method, self.num_parts, self.seed)

    def __repr__(self) -> str:
        method = repr(self.method) if isinstance(self.method, str) else "a permutation"
        return f"{type(self).__name__}({method}, num_parts={self.num_parts}, seed={self.seed})"
