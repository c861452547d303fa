"""EDGELESS_GENERATE=auto, the default: programs only where what will run them is faster than PyG."""

from __future__ import annotations

import copy
import time

import pytest
import torch
import torch_geometric.nn as stock
from generated_cases import error, mlp
from test_generated_layers import case, recorded
from torch import nn

import edgeless
from edgeless.programs import worth
from edgeless.programs.run import compiled
from edgeless.programs.run.compiled import Code
from edgeless.pyg.generated.calls import PROGRAMS


@pytest.fixture(autouse=True)
def by_default(monkeypatch):
    monkeypatch.delenv("EDGELESS_GENERATE", raising=False)
    monkeypatch.setenv("EDGELESS_COMPILE_WALKS", "now")
    monkeypatch.setattr(worth, "TINY", 0)
    monkeypatch.setitem(worth.LEAST, "cpu", 100)
    monkeypatch.setitem(worth.TRACED, "cpu", 0)
    PROGRAMS.clear()


def outcome(layer, *args):
    """What the only propagate() of a call did: how a program ran, or why none."""
    _, calls = recorded(layer, *args)
    assert len(calls) == 1
    return calls[0][0]


def test_small_calls_are_refused_before_a_trace(monkeypatch):
    _, ours, args, _ = case("GINEConv")
    monkeypatch.setitem(worth.LEAST, "cpu", 70 * 6 + 1)
    traces = PROGRAMS.traces
    assert "70 edges with 6 numbers each are fewer than the 421 numbers" in str(edgeless.explain(ours, *args))
    assert PROGRAMS.traces == traces
    monkeypatch.setitem(worth.LEAST, "cpu", 70 * 6)
    assert outcome(ours, *args) == "generated"


def test_tiny_calls_are_not_looked_at(monkeypatch):
    layer, ours, args, _ = case("GINEConv")
    monkeypatch.setattr(worth, "TINY", 71)
    monkeypatch.setattr(worth, "refuse_small", lambda *_: pytest.fail("looked"))
    assert outcome(ours, *args) == worth.OF_TINY and torch.equal(ours(*args), layer(*args))
    monkeypatch.setattr(worth, "TINY", 70)
    with pytest.raises(pytest.fail.Exception, match="looked"):
        ours(*args)


def test_a_program_may_be_wider_than_its_arguments(monkeypatch):
    layer = stock.EdgeConv(mlp(12, 8)).double()
    edgeless.accelerate(layer)
    x, edge_index = case("EdgeConv")[2]
    monkeypatch.setitem(worth.LEAST, "cpu", 70 * 12)
    assert "fewer than" in outcome(layer, x, edge_index)


def test_a_layer_computes_as_much_as_a_trace_costs_before_one_is_made(monkeypatch):
    layer, ours, args, _ = case("GINEConv")
    monkeypatch.setitem(worth.TRACED, "cpu", 3 * 70 * 6)
    expected, traces = layer(*args), PROGRAMS.traces
    said = [outcome(ours, *args) for _ in range(4)]
    assert ["computed 1260 numbers" in s for s in said] == [True, True, False, False] and said[2:] == ["generated"] * 2
    assert PROGRAMS.traces == traces + 1
    assert str(edgeless.explain(copy.deepcopy(ours), *args)) == "GINEConv runs fused, generated."
    twin = copy.deepcopy(ours)  # whose program there is
    assert outcome(twin, *args) == "generated" and error(twin(*args), expected) < 1e-10
    with torch.no_grad():  # another program
        assert "has computed" in outcome(ours, *args)


def test_what_may_not_fit_into_memory_does_not_wait(monkeypatch):
    _, ours, args, _ = case("GINEConv")
    monkeypatch.setitem(worth.TRACED, "cpu", 1 << 40)
    monkeypatch.setattr(worth, "AT_ONCE", 70 * 6)
    assert outcome(ours, *args) == "generated"


@pytest.mark.parametrize("name, said", [("GINEConv", "are not compiled"), ("EdgeConv", "minimum's or maximum's")])
def test_the_stock_layer_runs_while_code_is_compiled(monkeypatch, name, said):
    monkeypatch.setenv("EDGELESS_COMPILE_WALKS", "background")
    layer, ours, args, _ = case(name)
    make, may_go_on = Code._make, []
    monkeypatch.setattr(Code, "_make", lambda *args: (wait_for(may_go_on), make(*args)))
    assert said in outcome(ours, *args)
    may_go_on.append(True)
    compiled.wait()
    out, calls = recorded(ours, *args)
    assert calls == [("generated", True)]
    assert error(out, layer(*args)) < 1e-10


def wait_for(signal, seconds=20.0):
    end = time.monotonic() + seconds
    while not signal and time.monotonic() < end:
        time.sleep(0.001)


def test_where_nothing_is_compiled_large_calls_are_interpreted(monkeypatch):
    monkeypatch.setenv("EDGELESS_COMPILE_WALKS", "off")
    _, ours, args, _ = case("GINEConv")
    assert f"the {worth.INTERPRETED} from which" in str(edgeless.explain(ours, *args))
    monkeypatch.setattr(worth, "INTERPRETED", 70 * 6)
    assert outcome(ours, *args) == "generated"
    _, ours, args, _ = case("EdgeConv")
    assert "faster only where they are compiled" in outcome(ours, *args)
    with torch.no_grad():
        assert outcome(ours, *args) == "generated"


def test_hooks_of_saved_tensors_see_the_same_at_every_call(monkeypatch):
    """A checkpoint compares what a call saves with what its repetition saves, by when more may be compiled."""
    layer, ours, args, _ = case("GINEConv")
    grads = []
    for least in (70 * 6 + 1, 70 * 6):
        monkeypatch.setattr(worth, "INTERPRETED", least)
        for module in (layer, ours):
            with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
                out, calls = recorded(module, *args)
            grads.append(torch.autograd.grad(out.sum(), args[0])[0])
        if least > 70 * 6:
            assert "saved tensors have hooks" in calls[0][0]
        else:
            assert calls == [("generated", True)]
    assert all(error(grad, grads[0]) < 1e-10 for grad in grads)


def test_what_lands_on_ops_needs_no_compiler(monkeypatch):
    monkeypatch.setenv("EDGELESS_COMPILE_WALKS", "off")
    _, ours, args, _ = case("LEConv")
    assert outcome(ours, *args).startswith("landed on")


def test_a_walk_that_cannot_be_compiled_counts_as_interpreted(monkeypatch):
    _, ours, args, _ = case("GINEConv")
    monkeypatch.setattr(Code, "ready", lambda self, *_: False)
    assert "are not compiled" in outcome(ours, *args)


def test_users_layers_are_swapped_by_default():
    class Mine(stock.MessagePassing):
        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=x)

        def message(self, x_j):
            return x_j.sigmoid()

    model = nn.ModuleList([Mine(), stock.GINEConv(nn.Linear(6, 6))])
    report = edgeless.accelerate(model)
    assert len(report.swapped) == 2 and not report.kept and isinstance(model[0], Mine)


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["GINEConv", "ResGatedGraphConv"])
def test_on_cuda_programs_run_from_their_own_numbers_on(monkeypatch, name):
    layer, ours, args, _ = case(name)
    layer, ours, args = layer.cuda(), ours.cuda(), [arg.cuda() for arg in args]
    assert f"the {worth.LEAST['cuda']:,} numbers" in outcome(ours, *args)
    monkeypatch.setitem(worth.LEAST, "cuda", 100)
    monkeypatch.setitem(worth.TRACED, "cuda", 0)
    assert outcome(ours, *args) == "generated"
    assert error(ours(*args).cpu(), layer(*args).cpu()) < 1e-10
