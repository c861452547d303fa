"""Softmax in one pass: sums of exponentials that are corrected where a larger maximum comes.

A softmax over a row is written as a maximum, a sum of exponentials of what is left, and sums of these times values over
that sum: three passes over the edges. :func:`online` finds what such a sum is made of, so that one pass computes it
beside the maximum.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Optional

from ..lowering.items import Folded, Item, Map, Number, Operand, Reshape, RowRead, View, number


@dataclass(eq=False)
class Online:
    """What a sum over a row is made of: the sum of ``source * exp(weight - top)``, divided by ``divisor``.

    Attributes:
        source: an item of the edge, in the shape of the sum.
        weight: the logit in the shape of the sum, by views of ``top.source``.
        top: the maximum of the logit over the row.
        divisor: an item of the row, in the shape of the sum, or None.
    """

    source: Item
    weight: Item
    top: Folded
    divisor: Optional[Item]


def of_row(item: Item) -> bool:
    """Whether an item of an edge is the same for all edges of a row."""
    if isinstance(item, (RowRead, Number)):
        return True
    if isinstance(item, Operand):
        return item.kind in ("own", "param")
    return isinstance(item, (Map, View, Reshape)) and all(map(of_row, item.parts()))


def online(fold: Folded) -> Optional[Online]:
    """What a sum is made of that can be computed beside a maximum; None if it is none."""
    if fold.reduce != "sum" or not fold.dtype.is_floating_point:
        return None
    above, below = _factors(fold.source)
    found = [(i, _exponential(f)) for i, f in enumerate(above)]
    found = [(i, e) for i, e in found if e is not None]
    if len(found) != 1:
        return None
    place, (weight, top) = found[0]
    rest = [f for i, f in enumerate(above) if i != place]
    inner, outer = [f for f in below if not of_row(f)], [f for f in below if of_row(f)]
    source = functools.reduce(_times, rest) if rest else number(1, fold.dtype, fold.shape)
    for factor in inner:
        source = Map(fold.shape, fold.dtype, "div", (source, factor))
    divisor = functools.reduce(_times, outer) if outer else None
    return Online(source, weight, top, divisor)


def _times(a: Item, b: Item) -> Item:
    return Map(a.shape, a.dtype, "mul", (a, b))


def _again(item: Item, base: Item) -> Item:
    """The view that an item is, of another base."""
    if isinstance(item, View):
        return View(item.shape, base.dtype, base, item.at)
    return Reshape(item.shape, base.dtype, base)


def _factors(item: Item) -> tuple[list[Item], list[Item]]:
    """What an item is a product of, above and below the line."""
    if isinstance(item, Map) and item.op in ("mul", "div"):
        (above, below), (a, b) = _factors(item.args[0]), _factors(item.args[1])
        return (above + a, below + b) if item.op == "mul" else (above + b, below + a)
    if isinstance(item, (View, Reshape)):
        return tuple([_again(item, f) for f in side] for side in _factors(item.base))
    return [item], []


def _exponential(item: Item) -> Optional[tuple[Item, Folded]]:
    """Of the exponential of a logit without its maximum, the logit in the item's shape, and the maximum."""
    if isinstance(item, (View, Reshape)):
        found = _exponential(item.base)
        return None if found is None else (_again(item, found[0]), found[1])
    if not (isinstance(item, Map) and item.op == "exp" and isinstance(item.args[0], Map) and item.args[0].op == "sub"):
        return None
    logit, top = item.args[0].args
    if not (isinstance(top, RowRead) and isinstance(top.row, Folded)):
        return None
    own = top.row.reduce == "amax" and top.row.best is None and top.row.source is logit
    return (logit, top.row) if own else None
