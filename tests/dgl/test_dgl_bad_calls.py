"""Errors of calls with arguments that do not fit name what was expected, or why the stock layer ran and what came."""

import dgl
import dgl.nn as stock
import pytest
import torch
from bad_calls import FAULTS, assert_errors_say_what_came
from every_layer import pair_of
from test_dgl_every_layer import CASES, GRAPH, IN, OUT, X

import edgeless.dgl.nn as fused
from edgeless.dgl import ops


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", CASES)
def test_every_layer(name, fault):
    theirs, ours = pair_of(CASES[name], stock, fused)
    assert_errors_say_what_came(theirs, ours, CASES[name].inputs, fault)


@pytest.mark.parametrize("fault", ("another device", "another width", "too few rows"))
def test_a_fault_gives_errors(fault):
    theirs, ours = pair_of(CASES["GATConv"], stock, fused)
    assert assert_errors_say_what_came(theirs, ours, CASES["GATConv"].inputs, fault) > 0


def test_a_wrong_number_of_rows_is_named():
    with pytest.raises(RuntimeError, match="because feat has 11 rows for 12 nodes") as raised:
        fused.GraphConv(IN, OUT).double()(GRAPH, X[:-1])
    assert str(raised.value).endswith(
        "with graph: DGLGraph, feat: float64 [11, 6] on cpu, weight: None, edge_weight: None."
    )


def test_a_graph_that_is_none():
    with pytest.raises(Exception, match=r"because graph is a Tensor, not a DGLGraph"):
        fused.SAGEConv(IN, OUT, "mean").double()(X, X)


def test_an_error_of_a_layer_that_cannot_be_shown_stays_that_error():
    """The repr() of DGL's GCN2Conv fails."""
    theirs = stock.GCN2Conv(IN, layer=1)
    with pytest.raises(KeyError):
        repr(theirs)
    graph, x = dgl.add_self_loop(GRAPH), X.float()
    for layer in (theirs, fused.GCN2Conv(IN, layer=1)):
        with pytest.raises(dgl.DGLError, match="data type"):
            layer(graph, x, x, edge_weight=x.new_ones(graph.num_edges(), dtype=torch.float64))


def test_functions_say_why_too():
    with pytest.raises(dgl.DGLError, match=r"copy_u_sum ran its stock forward, because x has shape \[11, 6\]"):
        ops.copy_u_sum(GRAPH, X[:-1])
