"""The key of a layer's programs, field by field."""

from __future__ import annotations

import contextlib
import sys

import pytest
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

from edgeless.programs import layers
from edgeless.pyg.generated.calls import PROGRAMS
from edgeless.pyg.nn import MessagePassing

N, E, OFFSET = 9, 40, 1.0
G = torch.Generator().manual_seed(0)
EDGES = torch.randint(N, (2, E), generator=G)
X, ATTR = torch.rand(N, 3, generator=G), torch.rand(E, 3, generator=G)


class Layer(MessagePassing):
    """A layer with parameters, buffers and a number."""

    def __init__(self, **options):
        super().__init__(**options)
        self.number, self.weight = 2, nn.Parameter(torch.rand(3, 3))
        self.scale, self.bias = nn.Parameter(torch.rand(3)), nn.Parameter(torch.rand(3))
        self.register_buffer("factor", torch.rand(3, requires_grad=True))
        self.register_buffer("shift", torch.rand(3, requires_grad=True))

    def forward(self, x, edge_index, e, more=2.0, size=None):
        return self.propagate(edge_index, x=x, e=e, more=more, size=size)

    def message(self, x_j, e, more):
        out = (e if x_j is None else x_j * e) ** (self.number + self.training)
        out = out @ self.weight.to(out.dtype) * torch.tensor([1.0, 2.0, 3.0])
        return (out * self.scale + self.bias) * self.factor + self.shift + more + OFFSET


LAYER, MEAN, BACK = Layer(), Layer(aggr="mean"), Layer(flow="target_to_source")
PARAMETERS = {name: LAYER._parameters[name] for name in ("weight", "bias", "scale")}
BUFFERS = {name: LAYER._buffers[name] for name in ("shift", "factor")}


def user(layer=LAYER, dtypes=(torch.float32,) * 2, grads=(True, True), widths=(3, 3), block=contextlib.nullcontext,
         without_nodes=False, **options):  # fmt: skip
    """One user, as a function: what the layer is given, and the block of code that calls it."""

    def call(by_program):
        given = [
            t[:, :width].to(dtype, copy=True).requires_grad_(grad)
            for t, dtype, grad, width in zip((X, ATTR), dtypes, grads, widths, strict=True)
        ]
        x, e = given
        with block(), pytest.MonkeyPatch.context() as patch:
            patch.setenv("EDGELESS_GENERATE", "on" if by_program else "off")
            out = layer(None if without_nodes else x, EDGES, e, **options)
            return described(out, [x, e, *layer.parameters(), *layer.buffers()])

    return call


def with_tensor(name, width=3, dtype=torch.float32, grad=True):
    """A user whose layer has another parameter or buffer of this name."""
    value = getattr(LAYER, name).detach()[..., :width].to(dtype, copy=True).requires_grad_(grad)
    value = nn.Parameter(value, grad) if name in PARAMETERS else value
    return user(block=within((set_to, LAYER, name, value)))


USERS = {
    "another aggregation": user(layer=MEAN),
    "another flow": user(layer=BACK),
    "a number of the layer": user(block=within((set_to, LAYER, "number", 3))),
    "the mode of the layer": user(block=within((set_to, LAYER, "training", False))),
    "an argument": user(more=3.0),
    "sizes of two sets": user(without_nodes=True, size=(N + 1, N)),
    "sizes of one set": user(without_nodes=True, size=(N, N)),
    "no gradients": user(block=torch.no_grad),
    "autocast": user(block=within((torch.autocast, "cpu", torch.bfloat16))),
    "the default dtype": user(block=within((default_dtype, torch.float64))),
    **of_sides(user, "nodes", "edges"),
    **of_tensors(with_tensor, "tensor", (*PARAMETERS, *BUFFERS)),
    "the order of parameters": user(block=within((set_to, LAYER, "_parameters", PARAMETERS))),
    "the order of buffers": user(block=within((set_to, LAYER, "_buffers", BUFFERS))),
    "a global": user(block=within((set_to, sys.modules[__name__], "OFFSET", 2.0))),
    "plain": user(),
}


def test_nobody_gets_anothers_program(monkeypatch):
    monkeypatch.setattr(layers, "MOST_PROGRAMS", len(USERS))
    keys = Keys(monkeypatch, depths=(2, 1, 0, 0))
    assert_nobody_gets_anothers(USERS, PROGRAMS)
    assert len(keys.found) == len(USERS), "a user runs the stock layer"
    never = keys.never_alone()
    assert never.pop("1.3") == 1, "the flow, which is among the attributes of the layer too"
    assert not never, "no two users differ in these fields alone"
