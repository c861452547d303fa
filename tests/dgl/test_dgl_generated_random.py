"""Random modules on a DGLGraph against themselves: what they record is right, or the stock ops run."""

from __future__ import annotations

import copy
import operator
import random

import dgl.function as fn
import pytest
import torch
from dgl.nn.functional import edge_softmax
from dgl_generated_cases import E, Inputs, compare
from torch import nn
from torch.nn import functional as F

import edgeless
from edgeless.layers.calls import recording

WIDTH = 4
SMOOTH = (torch.tanh, torch.sigmoid, F.silu, F.softplus, torch.sin, lambda x: x * 0.5 + 1, lambda x: x**2, F.gelu)
BINARY = (operator.add, operator.sub, operator.mul, lambda a, b: a / (b.abs() + 1), torch.maximum)
BUILTIN = ("add", "sub", "mul")


class Drawn(nn.Module):
    """Steps that a seed draws; each takes values of edges and nodes, and adds some."""

    def __init__(self, seed: int):
        super().__init__()
        self.seed = seed
        self.maps = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.wide = nn.Linear(2 * WIDTH, WIDTH)
        self.norm, self.scale = nn.BatchNorm1d(WIDTH), nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, g, x, e):
        self.draw = random.Random(self.seed)
        with g.local_scope():
            self.edges, self.nodes = [e], [x, self.maps[0](x)]
            for _ in range(self.draw.randint(3, 9)):
                self.draw.choice(
                    (self.builtin, self.own, self.softmax, self.pointwise, self.pointwise, self.mixed)
                    + (self.reduce, self.reduce, self.mailbox, self.read, self.written, self.views)
                )(g)
            self.reduce(g)
            returned = [self.nodes[-1], self.draw.choice(self.nodes)]
            return returned + ([self.draw.choice(self.edges)] if self.draw.random() < 0.5 else [])

    def edge(self):
        return self.draw.choice(self.edges[-3:])

    def node(self):
        return self.draw.choice(self.nodes[-3:])

    def builtin(self, g):
        a, b = self.draw.sample("uve", 2)
        g.srcdata["a"], g.edata["e"] = self.node(), self.edge()
        name = f"{a}_{self.draw.choice(BUILTIN)}_{b}"
        fields = ["e" if letter == "e" else "a" for letter in (a, b)]
        g.apply_edges(getattr(fn, name)(*fields, "m"))
        self.edges.append(g.edata.pop("m"))

    def own(self, g):
        g.ndata["a"], g.ndata["b"], g.edata["e"] = self.node(), self.node(), self.edge()
        kind, function = self.draw.randrange(3), self.draw.choice(SMOOTH)

        def message(edges):
            if kind == 0:
                return {"m": self.wide(torch.cat([edges.src["a"], edges.dst["b"]], dim=1))}
            if kind == 1:
                return {"m": function(edges.src["a"] - edges.dst["b"]) * edges.data["e"]}
            return {"m": self.maps[1](edges.data["e"]) + edges.dst["a"] * self.scale}

        g.apply_edges(message)
        self.edges.append(g.edata.pop("m"))

    def softmax(self, g):
        score = self.edge().view(-1, 2, 2).sum(-1, keepdim=True)
        self.edges.append((edge_softmax(g, score) * self.edge().view(-1, 2, 2)).flatten(1))

    def pointwise(self, g):
        self.edges.append(self.draw.choice(SMOOTH)(self.edge()))

    def mixed(self, g):
        other = self.edge() if self.draw.random() < 0.7 else self.scale
        self.edges.append(self.draw.choice(BINARY)(self.edge(), other))

    def views(self, g):
        e = self.edge()
        picked = self.draw.randrange(5)
        if picked == 0:
            e = torch.cat([e[:, 2:], e[:, :2]], dim=-1)
        elif picked == 1:
            e = e.view(g.num_edges(), 2, 2).transpose(1, 2).reshape(-1, WIDTH)
        elif picked == 2:
            e = e.unsqueeze(1).expand(-1, 2, WIDTH).mean(1)
        elif picked == 3:
            e = torch.stack(e.chunk(2, dim=1), dim=1).flatten(1)
        else:
            e = e.detach() + F.normalize(e, dim=1)
        self.edges.append(e)

    def read(self, g):
        e = self.edge()
        picked = self.draw.randrange(4)
        if picked == 0:
            e = e * float(e.detach().mean())
        elif picked == 1:
            e = e + e[torch.arange(E) % 7].sum(0)
        elif picked == 2:
            e = torch.where(e > e.median(), e, e * 2)
        else:
            e = self.norm(e)
        self.edges.append(e)

    def written(self, g):
        e = self.edge() + 1
        e *= self.scale
        if self.draw.random() < 0.3:
            e.view(-1, 2, 2)[:, 0] *= 2
        self.edges.append(F.relu(e + 0.1, inplace=True))

    def reduce(self, g):
        g.ndata["a"], g.edata["e"] = self.node(), self.edge()
        message = self.draw.choice(
            (fn.copy_u("a", "m"), fn.copy_e("e", "m"), fn.u_mul_e("a", "e", "m"), fn.u_add_v("a", "a", "m"))
            + (fn.e_sub_v("e", "a", "m"), lambda edges: {"m": edges.src["a"] * edges.data["e"].sigmoid()})
        )
        g.update_all(message, getattr(fn, self.draw.choice(("sum", "mean", "max", "min")))("m", "h"))
        self.nodes.append(g.ndata.pop("h") * 0.3)

    def mailbox(self, g):
        g.ndata["a"], g.edata["e"] = self.node(), self.edge()
        kind = self.draw.randrange(4)

        def reduce(nodes):
            m, a = nodes.mailbox["m"], nodes.data["a"]
            if kind == 0:
                return {"h": (F.softmax(m, dim=1) * nodes.mailbox["e"]).sum(1)}
            if kind == 1:
                return {"h": m.max(1)[0] * a + m.sum(dim=1) / m.size(1)}
            if kind == 2:
                return {"h": (m - m.mean(1, keepdim=True)).abs().mean(1) + self.scale}
            return {"h": torch.cat([m[:, :, :2].sum(1), nodes.mailbox["e"][:, 0, 2:]], dim=1)}

        g.update_all(lambda edges: {"m": edges.src["a"] + edges.data["e"], "e": edges.data["e"]}, reduce)
        self.nodes.append(g.ndata.pop("h") * 0.3)


@pytest.mark.parametrize("seed", range(60))
def test_drawn_module(seed, monkeypatch):
    monkeypatch.setenv("EDGELESS_GENERATE", "on")
    torch.manual_seed(seed)
    net = Drawn(seed).double()
    ours = copy.deepcopy(net)
    assert edgeless.accelerate(ours).generated == [""]
    inputs = Inputs(seed)
    graph = (inputs.simple, inputs.lone)[seed % 2]
    args = graph, inputs.x[:, :WIDTH], inputs.attr6[:, :WIDTH]
    compare(net, ours, args, tolerance=1e-9)
    compare(net, ours, args, tolerance=1e-9)  # as what was refused is remembered


def test_most_drawn_modules_run_programs(monkeypatch):
    monkeypatch.setenv("EDGELESS_GENERATE", "on")
    inputs, ran = Inputs(), 0
    for seed in range(20):
        net = Drawn(seed).double()
        edgeless.accelerate(net)
        with recording() as calls:
            net(inputs.simple, inputs.x[:, :WIDTH], inputs.attr6[:, :WIDTH])
        ran += any(found.fused for _, found in calls)
    assert ran >= 15
