"""Layers whose messages are generated against DGL's, and what else is true of a layer."""

from __future__ import annotations

import copy
import io
import pickle

import dgl
import dgl.nn.pytorch as stock
import pytest
import torch
from dgl_generated_cases import CASES, E, Inputs, N, compare, error, pair_of_layers, tensors_in

import edgeless
import edgeless.dgl.nn as fused
from edgeless.dgl.generated import computing
from edgeless.dgl.generated.classes import GeneratedLayer
from edgeless.layers.calls import recording

APPLY = torch.autograd.Function.__dict__["apply"]  # which a recorded call replaces and puts back
STOCK = ("TWIRLSConv",)  # it computes on a graph that it makes of the given one
LANDED = ("APPNPConv", "ChebConv", "GCN2Conv", "GMMConv", "GatedGraphConv", "SGConv", "TAGConv")


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    monkeypatch.setenv("EDGELESS_GENERATE", "on")


@pytest.fixture(autouse=True)
def double():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # in which some layers make weights of edges
    yield
    torch.set_default_dtype(before)


def told(layer, *args):
    """What is said of the programs of a call, and why others did not run."""
    with recording() as calls:
        layer(*args)
    return [found.how for _, found in calls if found.fused], [r for _, found in calls for r in found.reasons]


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_stock_layer(name):
    layer, ours = pair_of_layers(name)
    given = CASES[name][1](Inputs())
    how, reasons = told(copy.deepcopy(ours), *given)
    assert bool(how) == (name not in STOCK) and not reasons, (how, reasons)
    if name in LANDED:
        assert how == ["landed on spmm"]
    compare(layer, ours, given)


@pytest.mark.parametrize("name", ["GINEConv", "EdgeConv", "EGATConv", "PNAConv", "NNConv sum", "EdgeGATConv attention"])
@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
def test_in_inference_by_any_ids(name, idtype):
    layer, ours = (each.eval() for each in pair_of_layers(name))
    given = CASES[name][1](Inputs(idtype=idtype))
    with torch.no_grad():
        for a, b in zip(tensors_in(ours(*given)), tensors_in(layer(*given)), strict=True):
            assert not a.requires_grad and torch.allclose(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "name, kind",
    [(n, k) for n in ("GINEConv", "EdgeConv", "EGATConv", "CFConv", "GMMConv") for k in ("float32", "bfloat16")]
    + [(n, "autocast") for n in ("GINEConv", "EdgeConv", "CFConv", "PNAConv")],  # others fail there in DGL too
)
def test_in_other_types(name, kind):
    """The error against float64 is at most that of the stock layer, twice, and what rounding 32 bits makes."""
    layer, ours = pair_of_layers(name)
    given = CASES[name][1](Inputs())
    expected = tensors_in(layer(*given))
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    short = [a.detach().to(dtype) if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in given]
    found = []
    for each in (ours, layer):
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            found.append(tensors_in(each.to(dtype)(*short)))
    for a, b, c in zip(*found, expected, strict=True):
        assert a.dtype == b.dtype and error(a.double(), c) <= 2 * error(b.double(), c) + 1e-5


def test_every_layer_of_dgl_has_a_class():
    for name in generated_names():
        cls = getattr(fused, name)
        assert issubclass(cls, getattr(stock, name)) and issubclass(cls, GeneratedLayer)
        assert cls.__module__ == "edgeless.dgl.nn" and cls.__name__ == name


def generated_names():
    return [name for name in fused.__all__ if hasattr(getattr(fused, name), "_runs_generated")]


def test_one_program_serves_every_graph():
    layer, ours = pair_of_layers("GINEConv")
    first = Inputs()
    ours(*CASES["GINEConv"][1](first))
    before = computing.PROGRAMS.traces
    for count in (5, 90):
        g = dgl.graph((torch.randint(N, (count,)), torch.randint(N, (count,))), num_nodes=N)
        attr = torch.randn(count, 6, requires_grad=True)
        compare(layer, ours, (g, first.x, attr))
    assert computing.PROGRAMS.traces == before


def test_zero_in_degrees_are_an_error_unless_allowed():
    inputs = Inputs()
    for layer, args in ((fused.EdgeConv(6, 8), (inputs.x,)), (fused.EGATConv(6, 3, 8, 4, 2), (inputs.x, inputs.attr))):
        with pytest.raises(dgl.DGLError, match="0-in-degree"):
            layer(inputs.graph, *args)


def test_wrong_arguments_raise_the_stock_error():
    inputs, layer = Inputs(), fused.GINEConv(None)
    for args in ((inputs.x, inputs.attr), (inputs.x[:5], inputs.attr6), (inputs.x, inputs.attr6[:5])):
        with pytest.raises(Exception) as ours:
            layer(inputs.graph, *args)
        with pytest.raises(type(ours.value)):
            stock.GINEConv(None)(inputs.graph, *args)
    layer(inputs.graph, inputs.x, inputs.attr6)
    assert told(layer, inputs.graph, inputs.x, inputs.attr6)[0]


def test_graph_and_features_are_left_as_they_were():
    layer, ours = pair_of_layers("EdgeGATConv attention")
    inputs = Inputs()
    inputs.full.ndata["h"], inputs.full.edata["e"] = inputs.x, inputs.attr
    ours(*CASES["EdgeGATConv attention"][1](inputs))
    assert type(inputs.full) is dgl.DGLGraph and "_recorder" not in vars(inputs.full)
    assert inputs.full.ndata["h"] is inputs.x and list(inputs.full.edata) == ["e"]
    assert torch.autograd.Function.__dict__["apply"] is APPLY


def test_no_edges_and_no_nodes():
    layer, ours = pair_of_layers("GINEConv")
    for nodes in (4, 0):
        g = dgl.graph(([], []), num_nodes=nodes)
        given = g, torch.randn(nodes, 6), torch.randn(0, 6)
        assert torch.equal(ours(*given), layer(*given))


def test_copies_pickles_and_states():
    layer, ours = pair_of_layers("GINEConv")
    given = CASES["GINEConv"][1](Inputs())
    expected = layer(*given)
    buffer = io.BytesIO()
    torch.save(ours, buffer)
    buffer.seek(0)
    for each in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), torch.load(buffer, weights_only=False)):
        assert type(each) is type(ours) and torch.allclose(each(*given), expected, rtol=1e-10)
    assert list(layer.state_dict()) == list(ours.state_dict()) and repr(ours) == f"edgeless.{layer!r}"
    fresh = fused.GINEConv(copy.deepcopy(layer.apply_func), learn_eps=True)
    fresh.load_state_dict(layer.state_dict())
    assert torch.allclose(fresh(*given), expected, rtol=1e-10)


def test_hooks_inside_run_the_stock_forward():
    _, ours = pair_of_layers("GINEConv")
    given, seen = CASES["GINEConv"][1](Inputs()), []
    ours.apply_func[0].register_forward_hook(lambda *_: seen.append(1))
    assert "has a hook" in told(ours, *given)[1][0] and seen == [1]


@pytest.mark.parametrize("choice", ["off", "reference"])
def test_choices(choice, monkeypatch):
    layer, ours = pair_of_layers("GINEConv")
    given = CASES["GINEConv"][1](Inputs())
    if choice == "off":
        monkeypatch.setenv("EDGELESS_GENERATE", "off")
    with edgeless.backend("reference" if choice == "reference" else "auto"):
        how, reasons = told(ours, *given)
        assert not how and len(reasons) == 1 and torch.equal(ours(*given), layer(*given))


def test_dropout_is_one_mask_for_results_and_weights():
    """The attention that is returned is that by which messages were multiplied, with its gradient."""
    inputs = Inputs()
    layer = fused.EdgeGATConv(6, 3, 8, 2, attn_drop=0.5, residual=False, bias=False)
    out, weights = layer(inputs.full, inputs.x, inputs.attr, True)
    how, reasons = told(layer, inputs.full, inputs.x, inputs.attr, True)
    assert how == ["generated"] and not reasons
    assert 0.2 < float((weights == 0).double().mean()) < 0.8
    src, dst = inputs.full.edges()
    rows = layer.fc(inputs.x).view(N, 2, 8)[src] + layer.fc_edge(inputs.attr).view(E, 2, 8)
    expected = torch.zeros(N, 2, 8).index_add(0, dst, rows * weights)
    assert torch.allclose(out, expected, rtol=1e-10)


@pytest.mark.parametrize("name", ["EdgeConv norm"])
def test_statistics_of_norms_are_written_once(name):
    layer, ours = pair_of_layers(name)
    given = CASES[name][1](Inputs())
    for _ in range(3):
        ours(*given), layer(*given)
    for a, b in zip(ours.buffers(), layer.buffers(), strict=True):
        assert torch.allclose(a.double(), b.double(), rtol=1e-12)


def test_explain_says_how_and_what():
    inputs = Inputs()
    layer = fused.GINEConv(torch.nn.Linear(6, 8))
    found = edgeless.explain(layer, inputs.graph, inputs.x, inputs.attr6, plan=True)
    assert found and found.how == "generated" and "forward:" in found.levels
    assert not edgeless.explain(stock.GINEConv(None), inputs.graph, inputs.x, inputs.attr6)
