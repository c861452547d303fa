"""Errors of calls with arguments that do not fit name what was expected, or why the stock layer ran and what came."""

import pytest
import torch
import torch_geometric.nn as stock
from bad_calls import FAULTS, assert_errors_say_what_came
from every_layer import pair_of
from test_pyg_every_layer import ATTR, CASES, EDGES, IN, OUT, X

import edgeless
import edgeless.pyg.nn as fused

# The sum of one layer's result on another device with that of the others, which is HeteroConv's own step.
JOINS_DEVICES = {"HeteroConv of SAGEConv without anything", "HeteroConv of SAGEConv without roots"}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", CASES)
def test_every_layer(name, fault):
    if fault == "another device" and name in JOINS_DEVICES:
        pytest.skip("the layers accept it, and their results cannot be added")
    theirs, ours = pair_of(CASES[name], stock, fused)
    assert_errors_say_what_came(theirs, ours, CASES[name].inputs, fault)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_gives_errors(fault):
    theirs, ours = pair_of(CASES["GATConv with all"], stock, fused)
    assert assert_errors_say_what_came(theirs, ours, CASES["GATConv with all"].inputs, fault) > 0


def test_a_transposed_edge_index_is_named():
    with pytest.raises(RuntimeError, match=r"Sizes of tensors must match") as raised:
        fused.GATConv(IN, OUT).double()(X, EDGES.t())
    assert str(raised.value).endswith(
        "\nedgeless: GATConv ran its stock forward, because edge_index is not an int64 or int32 tensor of shape [2, "
        "E], and edge_index.t() may be. The call was edgeless.GATConv(6, 4, heads=1) with x: float64 [12, 6] on cpu, "
        "edge_index: int64 [50, 2] on cpu, edge_attr: None, size: None, return_attention_weights: None."
    )


def test_a_wrong_width_is_named_where_the_kernels_cover_the_call():
    with pytest.raises(RuntimeError, match=r"x: float64 \[12, 5\] on cpu") as raised:
        fused.SAGEConv(IN, OUT).double()(X[:, 1:], EDGES)
    assert "stock" not in str(raised.value) and "edgeless.SAGEConv(6, 4, aggr=mean)" in str(raised.value)


def test_missing_edge_features(monkeypatch):
    """Layers with kernels run without them, as upstream; a generated layer's error names the argument."""
    layer = fused.GATConv(IN, OUT, edge_dim=3).double()
    with edgeless.backend("fused"):
        assert layer(X, EDGES).shape == (12, OUT)
    monkeypatch.setenv("EDGELESS_GENERATE", "on")
    with pytest.raises(Exception, match="edge_attr: None"):
        fused.GINEConv(torch.nn.Linear(IN, OUT), edge_dim=3).double()(X, EDGES)


def test_edge_features_without_edge_dim():
    with pytest.raises((RuntimeError, AssertionError), match="edge_attr is given to a layer without edge_dim"):
        fused.TransformerConv(IN, OUT).double()(X, EDGES, ATTR)


def test_the_reference_backend_leaves_errors_alone():
    layer = fused.GATConv(IN, OUT).double()
    with edgeless.backend("reference"), pytest.raises(RuntimeError) as raised:
        layer(X, EDGES.t())
    assert "edgeless" not in str(raised.value)


def test_types_of_another_number_are_refused_before_the_stock_layer_writes_beyond_its_tensors():
    with pytest.raises(ValueError, match=r"type_vec must have shape \[N\] = \[12\], got \[11\]"):
        fused.HeteroLinear(IN, OUT, 3).double()(X, torch.arange(11) % 3)


def test_generated_layers_say_why_too(monkeypatch):
    monkeypatch.setenv("EDGELESS_GENERATE", "on")
    with pytest.raises(Exception, match="because edge_index has the dtype torch.float32|edge_index"):
        fused.LEConv(IN, OUT).double()(X, EDGES.float())
