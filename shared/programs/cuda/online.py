"""Online softmax, in one pass: sums of exponentials are rescaled when the maximum grows.

A program writes a softmax over a row as a maximum, a sum of exponentials of the logits minus the maximum, and sums of
exponentials times values divided by that sum: three passes over the edges. :func:`online` recognises such a sum, so
that one pass computes it together with the maximum.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Optional

from ..lowering.items import Folded, Item, Map, Number, Operand, Reshape, RowRead, View, number


@dataclass(eq=False)
class Online:
    """The parts of a sum over a row: the sum of ``source * exp(weight - top)``, divided by ``divisor``.

    Attributes:
        source: an item of the edge, in the shape of the sum.
        weight: the logit in the shape of the sum, made of views of ``top.source``.
        top: the maximum of the logit over the row.
        divisor: an item of the row, in the shape of the sum, or None.
    """

    source: Item
    weight: Item
    top: Folded
    divisor: Optional[Item]


def of_row(item: Item) -> bool:
    """Returns whether an item of an edge is the same for all edges of a row."""
    if isinstance(item, (RowRead, Number)):
        return True
    if isinstance(item, Operand):
        return item.kind in ("own", "param")
    return isinstance(item, (Map, View, Reshape)) and all(map(of_row, item.parts()))


def online(fold: Folded) -> Optional[Online]:
    """The parts of a sum that can be computed together with a maximum; None for any other fold."""
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
    """Applies the views of an item to another base."""
    if isinstance(item, View):
        return View(item.shape, base.dtype, base, item.at)
    return Reshape(item.shape, base.dtype, base)


def _factors(item: Item) -> tuple[list[Item], list[Item]]:
    """The factors in the numerator and in the denominator of an item."""
    if isinstance(item, Map) and item.op in ("mul", "div"):
        (above, below), (a, b) = _factors(item.args[0]), _factors(item.args[1])
        return (above + a, below + b) if item.op == "mul" else (above + b, below + a)
    if isinstance(item, (View, Reshape)):
        return tuple([_again(item, f) for f in side] for side in _factors(item.base))
    return [item], []


def _exponential(item: Item) -> Optional[tuple[Item, Folded]]:
    """The logit, in the item's shape, and its maximum, if an item is the exponential of their difference."""
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
