"""The crossovers of a plan: the nearest numbers of edges and of nodes with which another kernel or tile is chosen.

Plans are pure functions of sizes, so crossovers are found by planning for graphs of other sizes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple, Optional

from edgeless.plan.steps import Step
from edgeless.tools.bench.plans import Sizes

__all__ = ["Turn", "turns"]

FARTHEST = 64  # sizes up to this factor are searched, in both directions
_STEPS_OF_TWO = 4  # sizes that are tried between a number and twice as many
_LAUNCH = re.compile(r"[;,] \d+ blocks( \(\d+ resident\))?")  # the grid, which follows the sizes

Plan = Callable[[Sizes], list[Step]]


class Turn(NamedTuple):
    """A crossover: a size with which a step has another kernel or tile.

    Attributes:
        step: the index of the step in the plan.
        quantity: ``"edges"`` or ``"nodes"``.
        size: the nearest number of them with which ``then`` is chosen.
        grows: whether the size is larger than the graph's.
        then: the kernel and tile at that size.
    """

    step: int
    quantity: str
    size: int
    grows: bool
    then: str

    def __str__(self) -> str:
        bound = "at least" if self.grows else "at most"
        return f"with {bound} {self.size:,} {self.quantity}: {self.then}"


def turns(plan: Plan, sizes: Sizes) -> list[Turn]:
    """Returns the nearest crossovers of every step, for more and for fewer edges and nodes.

    Args:
        plan: (sizes) -> the steps; pure.
        sizes: the sizes of the graph.
    """
    found = []
    for number in range(len(plan(sizes))):
        for quantity in ("edges", "nodes"):
            for grows in (False, True):
                turn = _nearest(plan, sizes, number, quantity, grows)
                if turn is not None:
                    found.append(turn)
    return found


def _nearest(plan: Plan, sizes: Sizes, number: int, quantity: str, grows: bool) -> Optional[Turn]:
    now = sizes.num_edges if quantity == "edges" else sizes.num_dst
    chosen = _chosen(plan(sizes), number)

    def differs(size: int) -> bool:
        return _chosen(plan(_with(sizes, quantity, size)), number) != chosen

    same = now
    for power in range(1, _STEPS_OF_TWO * FARTHEST.bit_length()):
        factor = 2.0 ** (power / _STEPS_OF_TWO)
        other = int(now * factor) if grows else int(now / factor)
        if other < 1 or other == same:
            continue
        if differs(other):
            break
        same = other
    else:
        return None
    while abs(other - same) > 1:
        middle = (other + same) // 2
        if differs(middle):
            other = middle
        else:
            same = middle
    return Turn(number, quantity, other, grows, _words(plan(_with(sizes, quantity, other)), number))


def _with(sizes: Sizes, quantity: str, size: int) -> Sizes:
    if quantity == "edges":
        return sizes._replace(num_edges=size)
    return sizes._replace(num_src=size, num_dst=size)


def _chosen(steps: list[Step], number: int) -> Optional[tuple]:
    if number >= len(steps):
        return None
    step = steps[number]
    return step.engine, step.slices, step.kernels, _LAUNCH.sub("", step.kernel)


def _words(steps: list[Step], number: int) -> str:
    if number >= len(steps):
        return "no such step"
    step = steps[number]
    slices = "" if step.slices == 1 else f" in {step.slices} slices"
    names = ", ".join(expression.replace("edgeless::cuda::", "") for _, expression in step.kernels)
    return f"{step.engine}: {_LAUNCH.sub('', step.kernel)}{slices} ({names})"
