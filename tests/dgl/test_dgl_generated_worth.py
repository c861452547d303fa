"""``EDGELESS_GENERATE=auto`` for DGL's layers: a program runs where it should not be slower than DGL's own ops."""

from __future__ import annotations

import copy

import dgl.function as fn
import dgl.nn.pytorch as stock
import pytest
import torch
from dgl_generated_cases import CASES, E, Inputs, compare, pair_of_layers
from torch import nn

import edgeless
from edgeless.dgl.generated import calls, computing
from edgeless.layers.calls import recording
from edgeless.programs import worth


@pytest.fixture(autouse=True)
def low_thresholds(monkeypatch):
    monkeypatch.delenv("EDGELESS_GENERATE", raising=False)
    monkeypatch.setattr(worth, "TINY", 0)
    monkeypatch.setattr(worth, "INTERPRETED", 0)
    monkeypatch.setitem(worth.LEAST, "cpu", 100)
    monkeypatch.setitem(worth.TRACED, "cpu", 0)


def outcome(layer, *args):
    with recording() as calls:
        layer(*args)
    return "; ".join(found.how or "; ".join(found.reasons) for _, found in calls)


def test_a_layer_of_many_numbers_runs_as_a_program():
    layer, ours = pair_of_layers("GINEConv")
    args = CASES["GINEConv"][1](Inputs())
    assert outcome(ours, *args) == "generated"


def test_few_edges_run_the_stock_forward(monkeypatch):
    _, ours = pair_of_layers("GINEConv")
    args = CASES["GINEConv"][1](Inputs())
    monkeypatch.setattr(worth, "TINY", E + 1)
    assert outcome(ours, *args) == worth.OF_TINY
    monkeypatch.setattr(worth, "TINY", 0)
    monkeypatch.setitem(worth.LEAST, "cpu", E * 6 + 1)
    assert f"{E:,} edges with 6 numbers each are fewer" in outcome(ours, *args)
    monkeypatch.setitem(worth.LEAST, "cpu", 100)
    monkeypatch.setitem(worth.TRACED, "cpu", 2 * E * 6)
    assert f"it has computed {E * 6}" in outcome(ours, *args)
    assert outcome(ours, *args) == "generated"


@pytest.mark.parametrize("name", ["TAGConv", "SGConv", "ChebConv", "GCN2Conv", "GatedGraphConv"])
def test_what_dgl_has_one_op_for_runs_by_it(name):
    layer, ours = pair_of_layers(name)
    args = CASES[name][1](Inputs())
    assert "DGL has an op" in outcome(ours, *args)
    assert torch.equal(ours(*args), layer(*args))


def test_what_is_refused_for_good_is_not_recorded_again(monkeypatch):
    layer, ours = pair_of_layers("TAGConv")
    args = CASES["TAGConv"][1](Inputs())
    ours(*args)
    monkeypatch.setattr(calls, "_recorded", lambda *_: pytest.fail("recorded"))
    assert "DGL has an op" in outcome(ours, *args)


class Sums(nn.Module):
    def __init__(self, message, reduce):
        super().__init__()
        self.message, self.reduce = message, reduce

    def forward(self, g, x, e):
        with g.local_scope():
            g.ndata["h"], g.edata["w"] = x, e
            if self.reduce is None:
                g.apply_edges(self.message)
                return g.edata["m"]
            g.update_all(self.message, self.reduce("m", "o"))
            return g.ndata["o"]


@pytest.mark.parametrize(
    "message, reduce, width, runs",
    [
        (fn.copy_e("w", "m"), fn.sum, 6, False),
        (fn.copy_u("h", "m"), fn.max, 6, False),
        (fn.u_mul_e("h", "w", "m"), fn.sum, 6, False),
        (fn.u_mul_e("h", "w", "m"), fn.sum, 1, True),
        (fn.u_add_v("h", "h", "m"), fn.mean, 6, True),
        (fn.u_add_v("h", "h", "m"), None, 6, False),
        (fn.u_dot_v("h", "h", "m"), None, 6, True),
        (lambda edges: {"m": edges.src["h"].relu()}, fn.sum, 6, True),
    ],
)
def test_which_messages_run_as_programs(message, reduce, width, runs):
    inputs, net = Inputs(), Sums(message, reduce)
    ours = copy.deepcopy(net)
    assert edgeless.accelerate(ours).generated == [""]
    args = inputs.graph, inputs.x, inputs.attr6[:, :width]
    said = outcome(ours, *args)
    assert (said.startswith(("generated", "landed"))) == runs, said
    assert torch.allclose(ours(*args), net(*args), rtol=1e-10)


def test_few_numbers_an_edge_run_by_dgls_ops(monkeypatch):
    inputs = Inputs()
    monkeypatch.setitem(worth.LEAST, "cpu", E)
    _, ours = pair_of_layers("EdgeWeightNorm")
    g, weight = inputs.full, inputs.weight
    assert "as fast" in outcome(ours, g, weight) and "generated" not in outcome(ours, g, weight)
    assert torch.equal(ours(g, weight), stock.EdgeWeightNorm("both")(g, weight))


def test_wide_products_of_edges_are_not_computed_by_several_walks(monkeypatch):
    class Gates(nn.Module):
        def __init__(self):
            super().__init__()
            self.edge, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

        def forward(self, g, x, e):
            with g.local_scope():
                g.ndata["h"], g.edata["c"] = x, self.edge(e)
                g.apply_edges(fn.u_add_v("h", "h", "m"))
                e = g.edata["m"] + g.edata["c"]
                g.edata["gate"] = torch.sigmoid(e)
                g.update_all(fn.u_mul_e("h", "gate", "m"), fn.sum("m", "o"))
                return g.ndata["o"] * 2, self.norm(e)

    monkeypatch.setattr(computing, "WIDE", 6)
    net, inputs = Gates().double(), Inputs()
    ours = copy.deepcopy(net)
    edgeless.accelerate(ours)
    args = inputs.graph, inputs.x, inputs.attr6
    assert "wide products" in outcome(copy.deepcopy(ours), *args)
    assert "wide products" in outcome(ours, *args) and outcome(ours, *args) == "generated"
    net(*args), net(*args)  # as often as ours, for the norm
    compare(net, ours, args)


def test_explain_looks_ahead():
    layer, ours = pair_of_layers("GINEConv")
    args = CASES["GINEConv"][1](Inputs())
    assert edgeless.explain(ours, *args)
    _, ours = pair_of_layers("TAGConv")
    assert "DGL has an op" in str(edgeless.explain(ours, *CASES["TAGConv"][1](Inputs())))
