"""Affine indices: sums of loop variables times factors. Views turn them into one another without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(eq=False)
class Var:
    """A loop's variable, from 0 to ``extent - 1``; ``name`` is an identifier once the loop is placed."""

    extent: int
    name: str = ""


class Split(Exception):
    """A variable must be split into an outer and an inner one of extent ``inner`` for an index to be affine."""

    def __init__(self, variable: Var, inner: int):
        super().__init__(f"{variable.extent} by {inner}")
        self.variable, self.inner = variable, inner


class NotAffine(Exception):
    """An index is not affine."""


@dataclass(frozen=True)
class Index:
    """``const + sum of factor * variable``."""

    terms: tuple[tuple[Var, int], ...] = ()
    const: int = 0

    @staticmethod
    def of(variable: Var) -> Index:
        """The index that consists of one variable."""
        return Index(((variable, 1),)) if variable.extent > 1 else Index()

    def __add__(self, other: Index | int) -> Index:
        if isinstance(other, int):
            return Index(self.terms, self.const + other)
        factors = dict(self.terms)
        for variable, factor in other.terms:
            factors[variable] = factors.get(variable, 0) + factor
        return Index(tuple((v, f) for v, f in factors.items() if f), self.const + other.const)

    def __mul__(self, factor: int) -> Index:
        return Index(tuple((v, f * factor) for v, f in self.terms if factor), self.const * factor)

    @property
    def variables(self) -> set[Var]:
        """The variables that the index depends on."""
        return {v for v, _ in self.terms}

    def divided(self, by: int) -> tuple[Index, Index]:
        """Quotient and remainder.

        Raises:
            Split: a variable must be split first.
            NotAffine: quotient or remainder is not affine.
        """
        whole = tuple((v, f // by) for v, f in self.terms if f % by == 0)
        rest = Index(tuple((v, f) for v, f in self.terms if f % by), self.const % by)
        ends = [(v.extent - 1) * f for v, f in rest.terms]
        if sum(min(e, 0) for e in ends) + rest.const >= 0 and sum(max(e, 0) for e in ends) + rest.const < by:
            return Index(whole, self.const // by), rest
        for variable, factor in rest.terms:
            inner = by // factor if factor > 0 and by % factor == 0 else 0
            if 1 < inner < variable.extent and variable.extent % inner == 0:
                raise Split(variable, inner)
        raise NotAffine

    def text(self) -> str:
        """The index in C."""
        parts = [v.name if f == 1 else f"{v.name} * {f}" for v, f in self.terms]
        if self.const or not parts:
            parts.append(str(self.const))
        return " + ".join(parts)


def strides_of(shape: Sequence[int]) -> list[int]:
    """The strides of a contiguous array."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return strides


def flat(index: Sequence[Index], shape: Sequence[int]) -> Index:
    """The offset of an element in a contiguous array."""
    total = Index()
    for i, stride in zip(index, strides_of(shape)):
        total = total + i * stride
    return total


def unflat(place: Index, shape: Sequence[int]) -> list[Index]:
    """The index of the element at an offset of a contiguous array; the inverse of :func:`flat`.

    Raises:
        Split, NotAffine: as :meth:`Index.divided`.
    """
    index = []
    for dim, stride in enumerate(strides_of(shape)):
        if shape[dim] == 1:
            index.append(Index())
            continue
        quotient, place = place.divided(stride) if stride > 1 else (place, Index())
        index.append(quotient)
    return index
