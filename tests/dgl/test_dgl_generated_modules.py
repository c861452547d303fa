"""Users' modules that pass messages on a DGLGraph, by accelerate alone; most are traps of the recording."""

from __future__ import annotations

import copy
import math
import threading

import dgl
import dgl.function as fn
import pytest
import torch
from dgl.nn.functional import edge_softmax
from dgl.ops import edge_softmax as softmax_of_ops
from dgl_generated_cases import E, Inputs, N, compare, tensors_in
from torch import nn
from torch.nn import functional as F

import edgeless
import edgeless.dgl.nn as fused
from edgeless.dgl.generated import computing
from edgeless.dgl.generated.classes import class_to_swap
from edgeless.dgl.generated.deferred import Unrecorded
from edgeless.dgl.ops import copy_u_sum
from edgeless.dgl.ops import edge_softmax as our_softmax
from edgeless.layers.calls import recording
from edgeless.programs import Refused

APPLY = torch.autograd.Function.__dict__["apply"]  # which a recorded call replaces and puts back


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    monkeypatch.setenv("EDGELESS_GENERATE", "on")


class Net(nn.Module):
    """A module whose forward is a function of the graph and its inputs; it has some layers."""

    def __init__(self):
        super().__init__()
        self.fc, self.gate, self.edge, self.score = (nn.Linear(a, b) for a, b in ((6, 8), (6, 8), (3, 8), (16, 1)))
        self.norm, self.scale = nn.BatchNorm1d(8), nn.Parameter(torch.rand(8))
        self.kept = None


class GatByFunctions(Net):
    def forward(self, g, x, e):
        with g.local_scope():
            g.ndata["z"] = self.fc(x)
            g.apply_edges(self.edge_score)
            g.update_all(lambda edges: {"z": edges.src["z"], "e": edges.data["e"]}, self.reduce)
            return g.ndata["h"]

    def edge_score(self, edges):
        return {"e": F.leaky_relu(self.score(torch.cat([edges.src["z"], edges.dst["z"]], dim=1)))}

    def reduce(self, nodes):
        weight = F.softmax(nodes.mailbox["e"], dim=1)
        return {"h": torch.sum(weight * nodes.mailbox["z"], dim=1)}


class GatedGCN(Net):
    def forward(self, g, x, e):
        with g.local_scope():
            g.ndata["b"], g.ndata["d"] = self.fc(x), self.gate(x)
            g.edata["c"] = self.edge(e)
            g.apply_edges(fn.u_add_v("d", "d", "de"))
            g.edata["e"] = g.edata["de"] + g.edata["c"]
            g.edata["sigma"] = torch.sigmoid(g.edata["e"])
            g.update_all(fn.u_mul_e("b", "sigma", "m"), fn.sum("m", "above"))
            g.update_all(fn.copy_e("sigma", "m"), fn.sum("m", "below"))
            h = self.fc(x) + g.ndata["above"] / (g.ndata["below"] + 1e-6)
            return h, F.relu(self.norm(g.edata["e"]), inplace=True)


class Softmax(Net):
    softmax = staticmethod(edge_softmax)

    def forward(self, g, x, e):
        g = g.local_var()
        g.ndata["z"] = self.fc(x).view(-1, 2, 4)
        g.apply_edges(fn.u_dot_v("z", "z", "t"))
        g.edata["a"] = self.softmax(g, g.edata.pop("t") / math.sqrt(4))
        g.update_all(fn.u_mul_e("z", "a", "m"), fn.sum("m", "h"))
        return g.ndata["h"].flatten(1), g.edata["a"]


class SoftmaxOfOps(Softmax):
    softmax = staticmethod(softmax_of_ops)


class SoftmaxOfOurs(Softmax):
    softmax = staticmethod(our_softmax)


class LayersInside(Net):
    """Layers with kernels of their own get tensors."""

    def __init__(self):
        super().__init__()
        self.conv = fused.GraphConv(8, 8, norm="none", allow_zero_in_degree=True)
        self.gat, self.typed = fused.GATConv(8, 4, 2, allow_zero_in_degree=True), fused.TypedLinear(8, 8, 3)

    def forward(self, g, x, e):
        with g.local_scope():
            g.ndata["z"], g.edata["t"] = self.fc(x), torch.arange(g.num_edges(), device=x.device) % 3
            g.update_all(lambda edges: {"m": self.typed(edges.src["z"], edges.data["t"]).tanh()}, fn.sum("m", "h"))
            g.apply_edges(fn.u_dot_v("z", "z", "w"))
            h = self.conv(g, g.ndata["h"], edge_weight=torch.sigmoid(g.edata["w"]))
            return self.gat(g, h), copy_u_sum(g, g.ndata.pop("h"))


class SoftmaxBySource(Softmax):
    @staticmethod
    def softmax(g, logits):
        return edge_softmax(g, logits, norm_by="src")


class LeavesFeatures(Net):
    def forward(self, g, x, e):
        g.ndata["z"] = self.fc(x)
        g.apply_edges(lambda edges: {"m": edges.src["z"] * self.edge(edges.data["w"])})
        g.update_all(fn.copy_e("m", "m"), fn.max("m", "h"))
        return g.ndata["h"].sum(0), g.edata["m"].sum()


class Keeps(Net):
    def forward(self, g, x, e):
        with g.local_scope():
            g.ndata["z"] = self.fc(x)
            g.apply_edges(fn.u_mul_v("z", "z", "m"))
            self.kept = g.edata["m"]
            g.update_all(fn.copy_e("m", "m"), fn.mean("m", "h"))
            return g.ndata["h"]


class WritesInPlace(Net):
    def forward(self, g, x, e):
        with g.local_scope():
            g.ndata["z"] = self.fc(x)
            g.apply_edges(fn.u_sub_v("z", "z", "m"))
            m = g.edata["m"]
            twice = m * 2
            m *= self.scale
            m[:, 0] = 1.0
            g.edata["n"] = m + twice
            g.update_all(fn.copy_e("n", "m"), fn.sum("m", "h"))
            return g.ndata["h"], m


class WritesView(Net):
    def forward(self, g, x, e):
        with g.local_scope():
            g.ndata["z"] = self.fc(x)
            g.apply_edges(fn.u_sub_v("z", "z", "m"))
            m = g.edata["m"] * 1
            heads = m.view(-1, 2, 4)
            heads += 1
            g.edata["m"] = m
            g.update_all(fn.copy_e("m", "m"), fn.sum("m", "h"))
            return g.ndata["h"]


class WritesNodes(Net):
    def forward(self, g, x, e):
        with g.local_scope():
            z = self.fc(x) * 1
            g.ndata["z"] = z
            g.apply_edges(fn.copy_u("z", "m"))
            z *= 2
            z[0] = 7.0
            g.update_all(fn.copy_e("m", "m"), fn.sum("m", "h"))
            return g.ndata["h"] + z


class WritesInput(Net):
    def forward(self, g, x, e):
        with g.local_scope():
            e = e * 1
            g.edata["w"] = e + self.scale[:3]
            g.update_all(fn.copy_e("w", "m"), fn.sum("m", "h"))
            e.mul_(3)
            g.edata["w"] = e + self.scale[3:6]
            g.update_all(fn.copy_e("w", "m"), fn.sum("m", "k"))
            return g.ndata["h"] + g.ndata["k"]


class Decides(Net):
    def forward(self, g, x, e):
        with g.local_scope():
            g.ndata["z"] = self.fc(x)
            g.apply_edges(fn.u_sub_v("z", "z", "m"))
            m = g.edata["m"]
            m = m * 2 if m.abs().max() > 1 else m
            m = m / m.norm() + float(m[0, 0]) + m[g.edges()[0] > 3].mean()
            m = m * g.num_edges() / m.shape[0] + len(m)
            g.edata["m"] = m
            g.update_all(fn.copy_e("m", "m"), fn.sum("m", "h"))
            return g.ndata["h"]


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 3 * ctx.saved_tensors[0] * grad  # not what autograd would compute


class CustomFunction(Net):
    def forward(self, g, x, e):
        with g.local_scope():
            g.ndata["z"] = self.fc(x)
            g.apply_edges(lambda edges: {"m": Square.apply(edges.src["z"] - edges.dst["z"])})
            g.update_all(fn.copy_e("m", "m"), fn.sum("m", "h"))
            return g.ndata["h"]


class StopsGradients(Net):
    def forward(self, g, x, e):
        with g.local_scope():
            g.ndata["z"] = self.fc(x)
            with torch.no_grad():
                g.apply_edges(fn.u_add_v("z", "z", "s"))
                weight = torch.sigmoid(g.edata["s"])
            g.edata["w"] = weight * g.edata["s"].detach().tanh()
            g.update_all(fn.u_mul_e("z", "w", "m"), fn.sum("m", "h"))
            return g.ndata["h"]


class SomeEdges(Net):
    def forward(self, g, x, e):
        with g.local_scope():
            g.ndata["z"] = self.fc(x)
            g.apply_edges(fn.u_add_v("z", "z", "m"))
            g.apply_edges(lambda edges: {"m": edges.src["z"] * 5}, torch.arange(9, device=x.device))
            g.update_all(fn.copy_e("m", "m"), fn.sum("m", "h"))
            g.send_and_recv(torch.arange(5, device=x.device), fn.copy_u("h", "m"), fn.sum("m", "h"))
            return g.ndata["h"]


class AppliesNodes(Net):
    def forward(self, g, x, e):
        with g.local_scope():
            g.ndata["z"] = self.fc(x)
            g.apply_edges(fn.u_add_v("z", "z", "m"))
            g.update_all(fn.copy_e("m", "m"), fn.sum("m", "h"), lambda nodes: {"h": nodes.data["h"].cumsum(0)})
            return g.ndata["h"], dgl.sum_nodes(g, "h"), dgl.mean_edges(g, "m")


class ChangesGraph(Net):
    def forward(self, g, x, e):
        with g.local_scope():
            g.ndata["z"] = self.fc(x)
            g.apply_edges(fn.copy_u("z", "m"))
            looped = dgl.add_self_loop(g)
            looped.update_all(fn.copy_e("m", "m"), fn.sum("m", "h"))
            back = dgl.reverse(g, copy_ndata=True, copy_edata=True)
            back.update_all(fn.u_mul_e("z", "m", "m"), fn.sum("m", "h"))
            return looped.ndata["h"] + back.ndata["h"]


class OddMailbox(Net):
    def forward(self, g, x, e):
        with g.local_scope():
            g.ndata["z"] = self.fc(x)
            g.update_all(fn.copy_u("z", "m"), lambda nodes: {"h": nodes.mailbox["m"].sort(dim=1)[0][:, 0]})
            g.update_all(fn.copy_u("z", "m"), lambda nodes: {"k": nodes.mailbox["m"].mean((1, 2)).unsqueeze(1)})
            return g.ndata["h"] + g.ndata["k"]


class Mailbox(Net):
    def forward(self, g, x, e):
        with g.local_scope():
            g.ndata["z"], g.edata["w"] = self.fc(x), self.edge(e)
            g.update_all(lambda edges: {"m": edges.src["z"] * edges.data["w"], "w": edges.data["w"]}, self.reduce)
            return g.ndata["h"], g.ndata["k"]

    def reduce(self, nodes):
        m, w, z = nodes.mailbox["m"], nodes.mailbox["w"], nodes.data["z"]
        centred = m - m.mean(1, keepdim=True)
        spread = (centred**2).mean(dim=1)
        best = torch.max(w, dim=1).values * m.size(1)
        return {"h": torch.cat([spread, best, z], dim=1) / m.shape[1], "k": (m * w)[:, :, :3].sum(1) * self.scale[:3]}


class Rebinds(Net):
    """A function of edges that reads what it was not given."""

    def forward(self, g, x, e):
        factor = torch.full((8,), float(x.detach().sum()), device=x.device)
        with g.local_scope():
            g.ndata["z"] = self.fc(x)
            g.update_all(lambda edges: {"m": edges.src["z"] * factor + self.scale}, fn.sum("m", "h"))
            return g.ndata["h"]


class MakesTensors(Net):
    def forward(self, g, x, e):
        with g.local_scope():
            g.ndata["z"] = self.fc(x)
            g.apply_edges(fn.copy_u("z", "m"))
            m = g.edata["m"]
            self.shape = copy.deepcopy(m.shape)
            ones = m.new_ones(m.size(0), 1) + torch.zeros(m.shape, dtype=m.dtype, device=m.device) + torch.ones_like(m)
            assert m.requires_grad and m.dim() == 2 and m.dtype == x.dtype and m.device == x.device
            g.edata["m"] = torch.cat([m.view(len(m), 2, 4), ones.view(m.shape[0], 2, 4)], dim=-1).sum(1)
            g.update_all(fn.copy_e("m", "m"), fn.sum("m", "h"))
            return g.ndata["h"]


class Inner(Net):
    def forward(self, g, x, e):
        with g.local_scope():
            g.ndata["z"], g.edata["w"] = self.fc(x), self.edge(e[:, :3])
            g.update_all(fn.u_mul_e("z", "w", "m"), fn.sum("m", "h"))
            g.apply_edges(fn.u_mul_e("z", "w", "w"))
            return g.ndata["h"], g.edata["w"]


class Outer(Net):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, g, x, e):
        with g.local_scope():
            g.edata["w"] = torch.tanh(e)
            h, w = self.inner(g, x, g.edata["w"])
            g.edata["w"] = w + 1
            g.ndata["h"] = h
            g.update_all(fn.u_mul_e("h", "w", "m"), fn.mean("m", "h"))
            return g.ndata["h"]


ALL_RAN = (
    MakesTensors,
    GatByFunctions,
    GatedGCN,
    Softmax,
    SoftmaxOfOps,
    LeavesFeatures,
    Keeps,
    StopsGradients,
    Mailbox,
    Rebinds,
)
IN_PART = (WritesInPlace, WritesNodes, WritesInput, Decides, CustomFunction, SomeEdges, AppliesNodes, ChangesGraph)
IN_PART = (*IN_PART, LayersInside, SoftmaxBySource, OddMailbox, Outer)
STOCK = (WritesView,)
CASES = [*ALL_RAN, *IN_PART, *STOCK]


def nets(cls):
    torch.manual_seed(1)
    net = cls().double()
    ours = copy.deepcopy(net)
    report = edgeless.accelerate(ours)
    assert len(report.generated) == 1 + (cls is Outer)
    return net, ours


def given(cls):
    inputs = Inputs()
    inputs.lone.edata["w"] = inputs.attr
    return inputs.lone, inputs.x, inputs.attr


@pytest.mark.parametrize("cls", CASES, ids=lambda cls: cls.__name__)
def test_agrees_with_the_stock_module(cls):
    net, ours = nets(cls)
    args = given(cls)
    with recording() as calls:
        copy.deepcopy(ours)(*args)
    reasons = [reason for _, found in calls for reason in found.reasons]
    assert any(found.fused for _, found in calls) == (cls not in STOCK) or cls in IN_PART, reasons
    assert not reasons if cls in ALL_RAN else True, reasons
    compare(net, ours, args)
    compare(net, ours, args)  # what was refused is remembered


def test_features_that_are_left_are_tensors():
    net, ours = nets(LeavesFeatures)
    graphs = [given(LeavesFeatures)[0] for _ in range(2)]
    inputs = Inputs()
    for each, g in zip((net, ours), graphs, strict=True):
        each(g, inputs.x, inputs.attr)
        assert all(type(data[name]) is torch.Tensor for data in (g.ndata, g.edata) for name in data)
    for name in ("z", "h"):
        assert torch.allclose(graphs[0].ndata[name], graphs[1].ndata[name])
    assert torch.allclose(graphs[0].edata["m"], graphs[1].edata["m"]) and type(graphs[1]) is dgl.DGLGraph


def test_attributes_that_are_kept_are_tensors():
    net, ours = nets(Keeps)
    args = given(Keeps)
    net(*args), ours(*args)
    assert type(ours.kept) is torch.Tensor and torch.allclose(ours.kept, net.kept)


def test_errors_are_the_modules_own():
    class Fails(Net):
        def forward(self, g, x, e):
            g.update_all(fn.copy_u("nothing", "m"), fn.sum("m", "h"))

    _, ours = nets(Fails)
    with pytest.raises(KeyError, match="nothing"):
        ours(*given(Fails))


@pytest.mark.parametrize(
    "message",
    [
        lambda edges: {"m": edges.src["z"].sum(0, keepdim=True)},
        lambda edges: {"m": edges.src["z"].t()},
        lambda edges: {"m": torch.ones(3, 8, dtype=torch.float64)},
        lambda edges: {"m": 7},
        lambda edges: [edges.src["z"]],
        lambda edges: {"other": edges.src["z"]},
    ],
)
def test_wrong_messages_are_the_stock_error(message):
    class Fails(Net):
        def forward(self, g, x, e):
            with g.local_scope():
                g.ndata["z"] = self.fc(x)
                g.update_all(message, fn.sum("m", "h"))
                return g.ndata["h"]

    for each in nets(Fails):
        with pytest.raises(Exception) as found:
            each(*given(Fails))
        assert not isinstance(found.value, (Refused, Unrecorded))


def test_integers_are_what_they_are_in_dgl():
    class Counts(Net):
        def forward(self, g, x, e):
            with g.local_scope():
                g.ndata["z"], g.edata["t"] = self.fc(x), (e[:, 0] > 0).long()
                g.apply_edges(lambda edges: {"m": edges.src["z"] * edges.data["t"].unsqueeze(1)})
                g.update_all(fn.copy_e("m", "m"), fn.sum("m", "h"))
                g.apply_edges(lambda edges: {"k": (edges.data["t"] + edges.src["z"].argmax(1)) % 3})
                return g.ndata["h"], g.edata["k"]

    net, ours = nets(Counts)
    assert all(torch.allclose(a, b) for a, b in zip(ours(*given(Counts)), net(*given(Counts)), strict=True))


def test_a_repeated_call_writes_statistics_and_numbers_once():
    """What a call has done before it turns out that it cannot be recorded is undone."""

    class Writes(Net):
        def forward(self, g, x, e):
            h = F.dropout(self.norm(self.fc(x)), 0.5)
            with g.local_scope():
                g.ndata["h"] = h
                g.apply_edges(fn.u_add_v("h", "h", "m"))
                heads = g.edata["m"].view(-1, 2, 4)
                heads.mul_(2)
                return g.edata["m"].sum(), h

    net, ours = nets(Writes)
    args = given(Writes)
    for _ in range(2):
        found = []
        for each in (net, ours):
            torch.manual_seed(5)
            found.append([*tensors_in(each(*args)), *each.buffers()])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    net(*args), ours(*args)


def test_autocast_in_part_of_a_module():
    class Casts(Net):
        def forward(self, g, x, e):
            with g.local_scope():
                g.ndata["z"] = self.fc(x)
                with torch.autocast("cpu", torch.bfloat16):
                    g.apply_edges(lambda edges: {"m": self.score(torch.cat([edges.src["z"], edges.dst["z"]], 1))})
                g.update_all(fn.copy_e("m", "m"), fn.sum("m", "h"))
                return g.ndata["h"]

    torch.manual_seed(0)
    net = Casts()
    ours = copy.deepcopy(net)
    edgeless.accelerate(ours)
    g, x, e = Inputs().lone, torch.randn(N, 6), torch.randn(E, 3)
    a, b = ours(g, x, e), net(g, x, e)
    assert a.dtype == b.dtype and torch.allclose(a, b, rtol=2e-2, atol=2e-2)


def test_second_derivatives():
    net, ours = nets(GatByFunctions)
    g, x, e = given(GatByFunctions)
    found = []
    for each in (net, ours):
        (grad,) = torch.autograd.grad(each(g, x, e).tanh().sum(), x, create_graph=True)
        found.append(torch.autograd.grad((grad**2).sum(), [x, *each.fc.parameters()]))
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(*found, strict=True))


def test_values_that_change_at_every_call_end_in_the_stock_ops():
    class Counts(Net):
        calls = 0

        def forward(self, g, x, e):
            self.calls += 1
            with g.local_scope():
                g.ndata["z"] = self.fc(x)
                g.update_all(lambda edges: {"m": edges.src["z"] * (1 + self.calls / 7)}, fn.sum("m", "h"))
                return g.ndata["h"]

    net, ours = nets(Counts)
    args = given(Counts)
    before = computing.PROGRAMS.traces
    for _ in range(40):
        assert torch.allclose(ours(*args), net(*args), rtol=1e-10)
    assert computing.PROGRAMS.traces - before <= 32


def test_modules_without_messages_are_left_alone():
    class Plain(nn.Module):
        def forward(self, g, x):
            return x * g.in_degrees()

    assert class_to_swap(Plain) is None
    assert str(edgeless.accelerate(nn.Sequential(Plain()))) == "swapped 0, kept 0"


def test_layers_over_relations():
    """HeteroGraphConv gives each layer the graph of a relation."""

    def ends(sources, destinations):
        return torch.randint(sources, (40,)), torch.randint(destinations, (40,))

    relations = {("a", "on", "b"): ends(9, 7), ("b", "back", "a"): ends(7, 9), ("a", "of", "a"): ends(9, 9)}
    names, counts = [name for _, name, _ in relations], {"a": 9, "b": 7}
    g = dgl.heterograph(relations, counts)
    torch.manual_seed(0)
    net = dgl.nn.HeteroGraphConv({name: dgl.nn.GINEConv(nn.Linear(6, 4)) for name in names}).double()
    ours = copy.deepcopy(net)
    assert len(edgeless.accelerate(ours).generated) == 3
    feats = {name: torch.randn(count, 6, dtype=torch.float64) for name, count in counts.items()}
    edges = {name: (torch.randn(40, 6, dtype=torch.float64),) for name in names}
    with recording() as calls:
        found = ours(g, feats, mod_args=edges)
    assert sum(explanation.how == "generated" for _, explanation in calls) == 3
    for name, expected in net(g, feats, mod_args=edges).items():
        assert torch.allclose(found[name], expected, rtol=1e-10)


def test_threads_share_a_graph():
    net, ours = nets(GatedGCN)
    net.eval(), ours.eval()
    g, x, e = given(GatedGCN)
    expected, found = [t.detach() for t in net(g, x, e)], []

    def work():
        for _ in range(8):
            found.append([torch.allclose(a, b, rtol=1e-9) for a, b in zip(ours(g, x, e), expected, strict=True)])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 32 and all(map(all, found))
    assert torch.autograd.Function.__dict__["apply"] is APPLY


def test_a_model_is_explained_layer_by_layer():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Softmax(), dgl.nn.GINEConv(nn.Linear(8, 3))

        def forward(self, g, x, e):
            h, _ = self.first(g, x, e)
            return self.second(g, h, e.new_ones(e.size(0), 8))

    model = Model().double()
    assert edgeless.accelerate(model).generated == ["first", "second"]
    found = edgeless.explain(model, *given(Softmax))
    assert found and [(name, explanation.how) for name, explanation in found.calls] == [
        ("first", "generated"),
        ("second", "generated"),
    ]
