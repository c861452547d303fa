"""What recorded modules keep, draw and hook: as the stock module does."""

from __future__ import annotations

import copy
import pickle

import dgl
import dgl.function as fn
import pytest
import torch
from dgl_generated_cases import Inputs, compare
from torch import nn
from torch.nn import functional as F

import edgeless
import edgeless.dgl.nn
from edgeless.layers.calls import recording


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    monkeypatch.setenv("EDGELESS_GENERATE", "on")


class Net(nn.Module):
    """Computes messages and their sums; subclasses do something with them."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 8)
        self.kept, self.history, self.calls = None, [], 0

    def forward(self, g, x):
        with g.local_scope():
            return self.of(g, x)

    def compute(self, g, x):
        g.ndata["z"] = self.fc(x)
        g.apply_edges(lambda edges: {"m": torch.tanh(edges.src["z"] - 2 * edges.dst["z"])})
        g.update_all(fn.copy_e("m", "k"), fn.sum("k", "h"))
        return g.ndata["h"]


class KeepsInLists(Net):
    def of(self, g, x):
        h = self.compute(g, x)
        self.history.append(g.edata["m"])
        self.kept = {"m": (g.edata["m"] * 2,), "graphs": [g.local_var()]}
        return h


class KeepsInClosure(Net):
    def of(self, g, x):
        h, m = self.compute(g, x), g.edata["m"]
        self.read = lambda: m * 2
        return h


class KeepsGraph(Net):
    def of(self, g, x):
        self.kept = g
        return self.compute(g, x)


class ReturnsCopies(Net):
    def of(self, g, x):
        self.compute(g, x)
        return g.local_var(), dgl.reverse(g, copy_ndata=True, copy_edata=True), dgl.add_self_loop(g)


class Inner(Net):
    def of(self, g, x):
        g.apply_edges(fn.u_sub_v("z", "z", "d"))
        g.update_all(fn.u_mul_e("z", "d", "k"), fn.sum("k", "o"))
        return g.ndata["o"]


class OfReversed(Net):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def of(self, g, x):
        self.compute(g, x)
        other = dgl.reverse(g, copy_ndata=True, copy_edata=True)
        return self.inner(other, x), other.edata["m"]


class DrawsForMessages(Net):
    """Its second function is not recorded, after the first has drawn."""

    def of(self, g, x):
        g.ndata["z"] = self.fc(x)
        g.update_all(self.message, lambda nodes: {"h": nodes.mailbox["m"].median(1)[0]})
        return g.ndata["h"], torch.rand(2)

    def message(self, edges):
        self.calls += 1
        return {"m": edges.src["z"] * torch.rand(len(edges), 1, dtype=torch.float64)}


class DrawsForNodes(Net):
    def of(self, g, x):
        g.ndata["z"] = self.fc(x)
        g.update_all(fn.copy_u("z", "m"), lambda nodes: {"h": nodes.mailbox["m"].sum(1) * torch.rand(1)})
        return g.ndata["h"], torch.rand(2)


class Counts(Net):
    def of(self, g, x):
        g.ndata["z"] = self.fc(x)
        g.update_all(fn.copy_u("z", "m"), lambda nodes: {"h": (nodes.mailbox["m"] > 0).sum(1)})
        return g.ndata["h"], g.ndata["z"]


class Force(Net):
    def of(self, g, x):
        energy = self.compute(g, x).square().sum()
        (force,) = torch.autograd.grad(energy, g.edata["m"], create_graph=True, allow_unused=True)
        return g.edata["m"] if force is None else force


class HooksLate(Net):
    def of(self, g, x):
        total = self.compute(g, x).sum()
        g.edata["m"].register_hook(lambda grad: 3 * grad)
        return total


class HooksEarly(Net):
    def of(self, g, x):
        g.ndata["z"] = self.fc(x)
        g.apply_edges(fn.u_mul_v("z", "z", "m"))
        g.edata["m"].register_hook(lambda grad: 3 * grad)
        g.update_all(fn.copy_e("m", "k"), fn.mean("k", "h"))
        return F.relu(g.ndata["h"])


def nets(cls):
    torch.manual_seed(1)
    net = cls().double()
    ours = copy.deepcopy(net)
    assert edgeless.accelerate(ours).generated
    return net, ours


def given():
    inputs = Inputs()
    return inputs.graph, inputs.x


def features(found):
    """The features of all graphs in nested results."""
    if isinstance(found, dgl.DGLGraph):
        return [data[name] for data in (found.ndata, found.edata) for name in sorted(data)]
    if isinstance(found, dict):
        found = list(found.values())
    return [found] if isinstance(found, torch.Tensor) else [x for each in found for x in features(each)]


@pytest.mark.parametrize(
    "cls",
    [OfReversed, DrawsForMessages, DrawsForNodes, Counts, Force, HooksLate, HooksEarly],
    ids=lambda cls: cls.__name__,
)
def test_agrees_with_the_stock_module(cls):
    net, ours = nets(cls)
    compare(net, ours, given())
    assert ours.calls == net.calls


@pytest.mark.parametrize("cls", [KeepsInLists, KeepsInClosure, KeepsGraph, ReturnsCopies], ids=lambda cls: cls.__name__)
def test_what_is_kept_is_computed_before_the_call_ends(cls):
    found = []
    for net in nets(cls):
        g, x = given()
        with recording() as calls:
            result = net(g, x)
        assert all(how.fused for _, how in calls)
        with torch.no_grad():
            net.fc.weight.mul_(3)
            x.mul_(2)
        kept = [result, net.history, net.kept or []] + ([net.read()] if hasattr(net, "read") else [])
        found.append(features(kept))
        assert all(type(each) is torch.Tensor for each in found[-1])
        assert cls is not KeepsGraph or net.kept is g
        assert cls is not ReturnsCopies or all(type(each) is dgl.DGLGraph for each in result)
    assert len(found[0]) == len(found[1]) > 0
    assert all(torch.allclose(a, b) for a, b in zip(*found, strict=True))


def test_a_graph_that_is_kept_records_nothing_later():
    _, ours = nets(KeepsInLists)
    g, x = given()
    with torch.no_grad():
        ours(g, x)
    kept = ours.kept["graphs"][0]
    assert type(kept) is dgl.DGLGraph
    kept.apply_edges(fn.u_add_v("h", "h", "later"))
    assert type(kept.edata["later"]) is torch.Tensor
    ours.history.clear()
    copied = pickle.loads(pickle.dumps(copy.deepcopy(ours)))
    assert torch.equal(copied(g, x), ours(g, x))


class WritesGiven(Net):
    """Writes into what it is given, and then does what is not recorded."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, g, x, e):
        with torch.no_grad():
            g.ndata["count"][:, 0].add_(1)
            x.mul_(2)
            e.add_(1)
            self.count += 1
            torch.mul(g.ndata["twice"], 2, out=g.ndata["twice"])
        with g.local_scope():
            g.ndata["z"] = self.fc(x)
            g.apply_edges(fn.u_add_v("z", "z", "m"))
            heads = g.edata["m"].view(-1, 2, 4)
            heads.mul_(2)
            return g.edata["m"]


def test_a_repeated_call_writes_into_what_it_is_given_once():
    found = []
    for net in nets(WritesGiven):
        net.eval()
        inputs = Inputs()
        g, x, e = inputs.graph, inputs.x.detach(), inputs.attr.detach()
        g.ndata["count"], g.ndata["twice"] = torch.zeros(2, g.num_nodes()).t(), torch.ones(g.num_nodes())
        result = [net(g, x, e) for _ in range(2)]
        found.append([*result, x, e, g.ndata["count"], g.ndata["twice"], net.count])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("method", ["apply_edges", "update_all"])
def test_an_edge_type_that_there_is_not_is_an_error(method):
    class Fails(Net):
        def of(self, g, x):
            g.ndata["z"] = self.fc(x)
            reduce = [] if method == "apply_edges" else [fn.sum("m", "h")]
            getattr(g, method)(fn.copy_u("z", "m"), *reduce, etype="nothing")

        def never(self, g):
            g.update_all(None, None)

    _, ours = nets(Fails)
    with pytest.raises(dgl.DGLError, match="nothing"):
        ours(*given())


def test_torch_logs_nothing_of_what_cannot_be_recorded(caplog):
    class Splits(Net):
        def of(self, g, x):
            self.compute(g, x)
            return g.edata["m"].split([g.num_edges() - 3, 3])

    net, ours = nets(Splits)
    compare(net, ours, given())
    assert not caplog.records


class LeavesEdgesUnused(Net):
    """What is pending is computed while an argument is not used."""

    def forward(self, g, x, e):
        with g.local_scope():
            g.ndata["z"] = self.fc(x)
            g.apply_edges(fn.u_add_v("z", "z", "m"))
            m = g.edata["m"] * 2
            m += 1
            with torch.no_grad():
                e.mul_(2)
            return m, e


def test_an_argument_that_is_not_used_is_left_as_it_is():
    net, ours = nets(LeavesEdgesUnused)
    for each in (net, ours):
        inputs = Inputs()
        g, x, e = inputs.graph, inputs.x, inputs.attr
        before = e.detach().clone()
        m, same = each(g, x, e)
        m.sum().backward()
        assert same is e and e.grad is None and torch.equal(e, 2 * before)


class Remembers(Net):
    """Keeps something of every graph by its id, and keeps the graph where nobody finds it."""

    def __init__(self):
        super().__init__()
        self.degrees, self.seen = {}, []

    def of(self, g, x):
        if id(g) not in self.degrees:
            self.degrees[id(g)] = g.in_degrees().double().unsqueeze(1)
        self.read = lambda: g
        return self.compute(g, x) * self.degrees[id(g)]


def test_graphs_are_told_apart_by_their_ids():
    net, ours = nets(Remembers)
    given = [Inputs(seed) for seed in range(6)]
    for inputs in given * 3:
        assert torch.allclose(net(inputs.graph, inputs.x), ours(inputs.graph, inputs.x))
    assert len(ours.degrees) == len(given)
    g = given[-1].graph
    g.ndata["new"] = given[-1].x
    assert type(ours.read()) is dgl.DGLGraph and ours.read().ndata["new"] is g.ndata["new"]
