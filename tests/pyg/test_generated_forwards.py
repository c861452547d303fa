"""Layers that make tensors by edge before they propagate: their forwards run as programs, or as before."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from generated_cases import Inputs, compare, pair_of_layers
from on_host import MODES, running
from test_generated_second import agree, both, largest_allocation
from torch import nn
from torch_geometric.nn.conv import MessagePassing as StockMessagePassing
from torch_geometric.nn.models import SchNet
from torch_geometric.nn.models.schnet import CFConv, GaussianSmearing, InteractionBlock
from torch_geometric.utils import softmax

import edgeless
from edgeless.layers.calls import recording
from edgeless.programs import derivatives, worth
from edgeless.pyg.generated import forwards, known_forwards
from edgeless.pyg.generated.calls import PROGRAMS


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    monkeypatch.setenv("EDGELESS_GENERATE", "on")
    PROGRAMS.clear()


class EGNN(StockMessagePassing):
    """As users write it: distances and an MLP of both ends outside of message(), new positions besides new features."""

    def __init__(self, width=6, extra=None):
        super().__init__(aggr="sum")
        self.edge = nn.Sequential(nn.Linear(2 * width + 1, 8), nn.SiLU(), nn.Linear(8, 8), nn.SiLU())
        self.shift, self.node, self.extra = nn.Linear(8, 1), nn.Linear(width + 8, width), extra

    def forward(self, h, pos, edge_index):
        row, col = edge_index
        away = pos[row] - pos[col]
        messages = self.edge(torch.cat([h[row], h[col], away.pow(2).sum(1, keepdim=True)], 1))
        if self.extra is not None:
            messages = self.extra(messages)
        size = (h.size(0), h.size(0))
        moved = self.propagate(edge_index, m=away * self.shift(messages), size=size)
        total = self.propagate(edge_index, m=messages, size=size)
        return self.node(torch.cat([h, total], 1)), pos + moved

    def message(self, m):
        return m

    def aggregate(self, inputs, index, dim_size=None):
        return super().aggregate(inputs, index, dim_size=dim_size)


class Filtered(StockMessagePassing):
    """Attention whose scores are made outside."""

    def __init__(self):
        super().__init__()
        self.score, self.value = nn.Linear(12, 4), nn.Linear(6, 4)

    def forward(self, x, edge_index, dropped=0.0):
        scores = self.score(torch.cat([x[edge_index[0]], x[edge_index[1]]], 1)).tanh()
        alpha = softmax(scores, edge_index[1], num_nodes=x.size(0))
        return self.propagate(edge_index, x=self.value(x), alpha=alpha)

    def message(self, x_j, alpha):
        return x_j * alpha


def filters(count=3, width=8):
    return nn.Sequential(nn.Linear(count, width), nn.Softplus(), nn.Linear(width, width))


CASES = {
    "CFConv": (lambda: CFConv(6, 8, 8, filters(), 5.0), lambda i: (i.x, i.edge_index, i.weight, i.attr)),
    "InteractionBlock": (lambda: InteractionBlock(6, 3, 8, 5.0), lambda i: (i.x, i.edge_index, i.weight, i.attr)),
    "EGNN": (EGNN, lambda i: (i.x, i.pos, i.edge_index)),
    "attention": (Filtered, lambda i: (i.x, i.edge_index)),
}


def calls_of(layer, *args):
    """The results of two calls, of which the first one notices what the forward makes, and what the second one did."""
    layer(*args)
    with recording() as calls:
        out = layer(*args)
    return out, [(found.how or found.reasons[0], found.fused) for _, found in calls]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_a_whole_forward_runs_as_one_program(name, mode):
    make, inputs = CASES[name]
    args = inputs(Inputs())
    layer, ours = pair_of_layers(make)
    with running(mode):
        assert calls_of(ours, *args)[1] == [("generated", True)]
        compare(layer, ours, args)
        agree(both(ours, args), both(layer, args))
    (program,) = [p for p in PROGRAMS._entries.values() if not isinstance(p, str)]
    assert not any(space.kind == "edge" for space in (n.meta["space"] for n in program.plan.outputs))
    made = list(program.derivatives.values())
    assert made and all(isinstance(each, derivatives.Derivative) for each in made)


def test_other_graphs_and_states_need_no_key(monkeypatch):
    layer, ours = pair_of_layers(EGNN)
    given = Inputs()
    calls_of(ours, given.x, given.pos, given.edge_index)
    ours(given.x, given.pos, given.edge_index)
    monkeypatch.setattr(forwards, "_run_long", None)  # what is known needs no long way
    for seed in (1, 2):
        other = Inputs(seed)
        ends = other.edge_index[:, : 40 + seed].contiguous()
        compare(layer, ours, (other.x, other.pos, ends))
    monkeypatch.undo()
    monkeypatch.setenv("EDGELESS_GENERATE", "on")
    with torch.no_grad():
        ours.shift.weight.mul_(2)
        layer.shift.weight.mul_(2)
    compare(layer, ours, (given.x, given.pos, given.edge_index))


class Counts(nn.Module):
    def forward(self, messages):
        return messages * messages.mean()  # over all edges


@pytest.mark.parametrize("extra", [Counts(), nn.Dropout(0.0), nn.Identity()])
def test_what_cannot_be_traced_propagates_alone(extra):
    layer, ours = pair_of_layers(lambda: EGNN(extra=extra))
    given = Inputs()
    args = (given.x, given.pos, given.edge_index)
    calls_of(ours, *args)
    _, calls = calls_of(ours, *args)
    alone = isinstance(extra, Counts)
    assert len(calls) == (2 if alone else 1) and all(ran for _, ran in calls)
    assert known_forwards.runs_whole(ours) is not alone
    compare(layer, ours, args)


def test_layers_that_make_nothing_by_edge_are_left_alone():
    import torch_geometric.nn as stock

    _, ours = pair_of_layers(lambda: stock.ResGatedGraphConv(6, 8))
    given = Inputs()
    _, calls = calls_of(ours, given.x, given.edge_index)
    assert calls == [("generated", True)] and not known_forwards.runs_whole(ours)


def test_an_explanation_and_a_copy():
    given = Inputs()
    _, ours = pair_of_layers(EGNN)
    told = edgeless.explain(ours, given.x, given.pos, given.edge_index, plan=True)
    assert told.fused and "walk by" in str(told) and str(told).count("forward:") == 1
    again = pickle.loads(pickle.dumps(ours))
    args = (given.x, given.pos, given.edge_index)
    for module in (copy.deepcopy(ours), again):
        assert torch.equal(module(*args)[0], ours.stock.forward(copy.deepcopy(ours), *args)[0])


def test_by_default_small_products_run_by_the_stock_layer(monkeypatch):
    monkeypatch.setenv("EDGELESS_GENERATE", "auto")
    layer, ours = pair_of_layers(lambda: CFConv(6, 8, 8, filters(), 5.0))
    given = Inputs()
    args = (given.x, given.edge_index, given.weight, given.attr)
    for _ in range(3):
        assert torch.equal(ours(*args), layer(*args))


def test_wide_products_are_computed_anew_only_on_large_graphs(monkeypatch):
    monkeypatch.setenv("EDGELESS_GENERATE", "auto")
    for name in ("LEAST", "TRACED"):
        monkeypatch.setattr(worth, name, {"cpu": 1})
    layer, ours = pair_of_layers(lambda: CFConv(6, 8, 128, filters(3, 128), 5.0))
    edges = 2000
    args = (torch.randn(50, 6).double(), torch.randint(50, (2, edges)), torch.rand(edges).double())
    args = (*args, torch.rand(edges, 3).double())
    with running("now"):
        _, calls = calls_of(ours, *args)
        assert not calls[0][1] and "multiplications" in calls[0][0]
        compare(layer, ours, args)
        monkeypatch.setattr(worth, "LEAST_OF_PRODUCTS", edges * 128)
        assert calls_of(ours, *args)[1] == [("generated", True)]
        compare(layer, ours, args)


class Fixed(nn.Module):
    """The graph of SchNet, which PyG finds by another library."""

    def forward(self, pos, batch):
        near = (torch.cdist(pos.detach(), pos.detach()) < 2.5) & (batch[:, None] == batch)
        row, col = near.fill_diagonal_(False).nonzero().t()
        return torch.stack([row, col]), (pos[row] - pos[col]).norm(dim=-1)


def energy_and_forces(net, z, pos, batch):
    energy = net(z, pos, batch)
    (forces,) = torch.autograd.grad(energy.sum(), pos, create_graph=True)
    loss = energy.square().sum() + forces.square().sum()
    return [energy, forces, *torch.autograd.grad(loss, [pos, *net.parameters()], allow_unused=True)]


@pytest.mark.parametrize("mode", MODES[:2])
def test_energies_and_forces_of_schnet(mode):
    torch.manual_seed(0)
    net = SchNet(12, 8, 2, 10, 2.5, interaction_graph=Fixed()).double()
    ours = copy.deepcopy(net)
    edgeless.accelerate(ours)
    pos = (3 * torch.rand(24, 3, dtype=torch.float64)).requires_grad_()
    given = torch.randint(1, 10, (24,)), pos, torch.arange(24) // 8
    with running(mode):
        for _ in range(2):
            mine = energy_and_forces(ours, *given)
    agree(mine, energy_and_forces(net, *given))
    programs = list(PROGRAMS._entries.values())
    assert programs and all(program.derivatives for program in programs if not isinstance(program, str))


def test_a_filter_needs_no_edge_tensor():
    torch.manual_seed(0)
    nodes, edges, width = 300, 30_000, 16
    layer, ours = pair_of_layers(lambda: CFConv(6, width, width, filters(3, width), 5.0))
    x = torch.randn(nodes, 6, dtype=torch.float64, requires_grad=True)
    args = (x, torch.randint(nodes, (2, edges)), torch.rand(edges, dtype=torch.float64))
    args = (*args, GaussianSmearing(0, 1, 3).double()(args[2]))
    with running("now"):
        for _ in range(2):
            both(ours, args)
        largest = largest_allocation(lambda: both(ours, args))
    assert largest < edges * width * 8 <= largest_allocation(lambda: both(layer, args))
