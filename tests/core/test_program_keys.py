"""The key of functional.message_passing's programs, field by field."""

from __future__ import annotations

import contextlib
import sys

import torch
from program_keys import (
    Keys,
    assert_nobody_gets_anothers,
    default_dtype,
    described,
    of_sides,
    of_tensors,
    set_to,
    within,
)
from torch import nn

import edgeless
from edgeless import Graph, functional
from edgeless.functional.message_passing import PROGRAMS

OFFSET = 1.0
G = torch.Generator().manual_seed(0)
EDGES = torch.randint(9, (2, 40), generator=G)
SQUARE, ACROSS = Graph.from_edge_index(EDGES, 9, 9), Graph.from_edge_index(EDGES, 10, 9)
ROWS = torch.rand(10, 3, generator=G), torch.rand(9, 3, generator=G), torch.rand(40, 3, generator=G)


class Power(nn.Module):
    """A module that reads numbers of its own and of the setting."""

    def __init__(self):
        super().__init__()
        self.power = 2
        self.factor = nn.Parameter(torch.rand(3, 3))
        self.scale, self.shift = nn.Parameter(torch.rand(3)), nn.Parameter(torch.rand(3))

    def forward(self, x):
        out = x ** (self.power + self.training)
        return out @ self.factor.to(out.dtype) * self.scale * torch.tensor([1.0, 2.0, 3.0]) + self.shift


POWER = Power()
REORDERED = {name: POWER._parameters[name] for name in ("factor", "shift", "scale")}


def closing_over(factor):
    def message(x, y, more=0.5):
        return POWER(x * y) * factor + more + OFFSET

    def other(x, y, more=0.5):
        return POWER(x * y) * factor - more - OFFSET

    return message, other


MESSAGE, OTHER = closing_over(2.0)


def user(graph=SQUARE, message=MESSAGE, sides=("src", "dst"), dtypes=(torch.float32,) * 2, grads=(True, True),
         widths=(3, 3), reduce="sum", block=contextlib.nullcontext):  # fmt: skip
    """One user, as a function: what it is given, and the block of code that it calls in."""
    rows = {"src": ROWS[0][: graph.num_src], "dst": ROWS[1][: graph.num_dst], "edge": ROWS[2]}
    options = list(zip(sides, dtypes, grads, widths, strict=True))

    def call(by_program):
        given = [rows[side][:, :width].to(dtype, copy=True).requires_grad_(g) for side, dtype, g, width in options]
        by_side = {side: [t for s, t in zip(sides, given, strict=True) if s == side] for side in rows}
        with block(), edgeless.backend("fused" if by_program else "reference"):
            out = functional.message_passing(graph, message, **by_side, reduce=reduce)
            return described(out, [*given, *POWER.parameters()])

    return call


def with_parameter(name, width=3, dtype=torch.float32, grad=True):
    """A user whose module has another parameter of this name."""
    value = getattr(POWER, name).detach()[..., :width].to(dtype, copy=True)
    return user(block=within((set_to, POWER, name, nn.Parameter(value, grad))))


USERS = {
    "another function": user(message=OTHER),
    "a number in its closure": user(block=within((set_to, MESSAGE.__closure__[0], "cell_contents", 3.0))),
    "a default": user(block=within((set_to, MESSAGE, "__defaults__", (0.25,)))),
    "a global": user(block=within((set_to, sys.modules[__name__], "OFFSET", 2.0))),
    "a number of its module": user(block=within((set_to, POWER, "power", 3))),
    "the mode of its module": user(block=within((set_to, POWER, "training", False))),
    "the reduction": user(reduce="mean"),
    **of_sides(user, "sources", "destinations"),
    **of_tensors(with_parameter, "parameter", ("factor", "scale", "shift")),
    "the order of parameters": user(block=within((set_to, POWER, "_parameters", REORDERED))),
    "no gradients": user(block=torch.no_grad),
    "autocast": user(block=within((torch.autocast, "cpu", torch.bfloat16))),
    "the default dtype": user(block=within((default_dtype, torch.float64))),
    "sides": user(sides=("src", "src")),
    "edges": user(sides=("edge", "edge")),
    "edges of two sets of nodes": user(graph=ACROSS, sides=("edge", "edge")),
    "plain": user(),
}


def test_nobody_gets_anothers_program(monkeypatch):
    keys = Keys(monkeypatch, depths=(1, 2, 0, 0, 0, 0))
    assert_nobody_gets_anothers(USERS, PROGRAMS)
    assert not keys.never_alone(), "no two users differ in these fields alone"


def inline(factor, power=1):
    """A function of its own at each call, of the same code."""

    def message(x, y, *, more=0.5):
        return (x * y) ** power * factor + more

    return message


def test_functions_of_the_same_code_share_a_program():
    PROGRAMS.clear()
    before, (x, y, _) = PROGRAMS.traces, ROWS

    def run(message):
        return functional.message_passing(ACROSS, message, src=x, dst=y)

    def by_hand(factor, power, more):
        source, destination = ACROSS.edge_index()
        messages = (x[source] * y[destination]) ** power * factor + more
        return torch.zeros(9, 3).index_add(0, destination, messages)

    for factor, power, more in (
        (2.0, 1, 0.5),
        (2.0, 1, 0.5),
        (3.0, 1, 0.5),
        (2.0, 2, 0.5),
        (2.0, 1, 1.5),
        (2.0, 1, 0.5),
    ):
        message = inline(factor, power)
        if more != 0.5:
            message.__kwdefaults__ = {"more": more}
        torch.testing.assert_close(run(message), by_hand(factor, power, more))
    assert PROGRAMS.traces - before == 4


def test_attributes_of_a_function_make_it_another():
    PROGRAMS.clear()
    before = PROGRAMS.traces
    for number in (1.0, 2.0):
        message = inline(2.0)
        message.number = number
        functional.message_passing(ACROSS, message, src=ROWS[0], dst=ROWS[1])
    assert PROGRAMS.traces - before == 2
