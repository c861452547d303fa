"""Index spaces: the nodes or edges that the rows of a value belong to, and the sizes by which a trace recognises them.

A value of a program belongs to one space. A parameter has no rows. A value of sources, destinations or, where both ends
are the same nodes, of nodes has one row for each of them; a value of edges has one row for each edge. The dimension of
the rows is part of the space, since a message may be transposed or have batch dimensions in front.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor

FIRST = 3  # a traced function's arguments before its caller's: ends, ids, seed
PARAMETER, NODE, SOURCE, DESTINATION, EDGE = "parameter", "node", "source", "destination", "edge"


class Refused(Exception):
    """Raised for a call that the generator does not support; its text is the unsupported reason."""


@dataclass(frozen=True)
class Space:
    """The space of a value.

    Attributes:
        kind: one of the five names of this module.
        dim: the dimension that has the rows; 0 for a parameter.
        end: the row of ``edge_index`` that an index tensor is, else None.
        is_ends: whether the value is ``edge_index`` itself.
        fill: the value of all elements of a constant, else None.
        local: whether a row depends only on the same row of the operands.
        cross: how the op goes from one space to another: ``("gather", end)``, ``("fold", end, reduce)`` or
            ``("total",)``, a sum over all edges; None for other values.
    """

    kind: str = PARAMETER
    dim: int = 0
    end: Optional[int] = None
    is_ends: bool = False
    fill: Optional[float] = None
    local: bool = True
    cross: Optional[tuple] = None

    @property
    def rows(self) -> bool:
        """True if the value has rows."""
        return self.kind != PARAMETER

    def plain(self) -> Space:
        """The space with only its kind and dimension."""
        return Space(self.kind, self.dim)


@dataclass(frozen=True)
class Sizes:
    """Numbers of sources, destinations and edges. While a program is traced they are primes, by which a dimension is
    recognised.
    """

    sources: int
    destinations: int
    edges: int

    @property
    def one_set(self) -> bool:
        """True if both ends of the edges are the same nodes."""
        return self.sources == self.destinations

    def of(self, kind: str) -> int:
        """The number of rows of a space."""
        return {EDGE: self.edges, DESTINATION: self.destinations}.get(kind, self.sources)

    def side(self, end: int) -> str:
        """The space of the nodes at an end of the edges: row 0 or 1 of ``edge_index``."""
        return NODE if self.one_set else (SOURCE, DESTINATION)[end]

    def space_of(self, shape) -> Space:
        """The space of a value of this shape; a parameter if no dimension is a multiple of a size."""
        kinds = (EDGE, NODE) if self.one_set else (EDGE, SOURCE, DESTINATION)
        for dim, extent in enumerate(shape):
            for kind in kinds:
                if extent and extent % self.of(kind) == 0:
                    return Space(kind, dim)
        return Space()


# Large primes, above every threshold with which a function may compare a size; and small ones, with fewer edges than
# nodes. A number that was computed from a size is not the same multiple of it in both traces, which are compared.
_LARGE, _SMALL = (100_000_007, 100_000_037, 100_000_039), (11, 13, 7)


def traced_sizes(one_set: bool, small: bool = False) -> Sizes:
    """The sizes that stand for the real ones in a trace."""
    sources, destinations, edges = _SMALL if small else _LARGE
    return Sizes(sources, sources if one_set else destinations, edges)


@dataclass(frozen=True)
class Argument:
    """An argument of a traced function.

    Attributes:
        value: the tensor of the current call; its dtype, its device and the extents of its other dimensions are kept.
        space: the space of the tensor.
        written: whether the function may write into it, as a norm does into its statistics.
        device: the device of the tensor, for a ``value`` without contents.
        name: the name in the text of a program.
    """

    value: Tensor
    space: Space = Space()
    written: bool = False
    device: Optional[torch.device] = None
    name: str = ""

    def described(self) -> Argument:
        """A copy without the tensor's contents."""
        value = torch.empty(self.value.shape, dtype=self.value.dtype, device="meta")
        return Argument(value, self.space, self.written, self.device or self.value.device, self.name)

    def stand_in(self, sizes: Sizes) -> Tensor:
        """A new tensor of the argument's dtype and device, for a graph of these sizes."""
        return torch.empty(self.shape(sizes), dtype=self.value.dtype, device=self.device or self.value.device)

    def shape(self, sizes: Sizes) -> list[int]:
        """The argument's shape for a graph of these sizes."""
        shape = list(self.value.shape)
        if self.space.is_ends:
            return [2, sizes.edges]
        if self.space.rows:
            shape[self.space.dim] = sizes.of(self.space.kind)
        return shape
