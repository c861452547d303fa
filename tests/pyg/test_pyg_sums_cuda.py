"""The layers on sums and extrema on CUDA: fused on the GPU against the stock layer on the CPU."""

import pytest
import torch
from devices import without_waiting
from pyg_cases import GRAPHS, OnGPU, assert_close, node_features, run
from sum_cases import SUMS, WEIGHTED, graphs_of, sum_pair, weights_of, with_ties

import edgeless

pytestmark = pytest.mark.cuda


def check(name, graph, *, dtype=torch.float64, weighted=False, ties=False, **options):
    x = node_features(graph, dtype)
    x = with_ties(x) if ties else x
    if isinstance(x, tuple) and name != "GINConv":
        options.setdefault("in_channels", (x[0].size(1), x[1].size(1)))
    theirs, ours = sum_pair(name, dtype=dtype, **options)
    inputs = (x, graph[0], weights_of(graph, dtype)) if weighted else (x, graph[0])
    assert_close(OnGPU(ours).run_fused(*inputs), run(theirs, theirs, *inputs))


@pytest.mark.parametrize("name", SUMS)
def test_sums_are_the_stock_layers(name):
    for kind in graphs_of(name):
        check(name, GRAPHS[kind])
        check(name, GRAPHS[kind], dtype=torch.float32)
        if name in WEIGHTED:
            check(name, GRAPHS[kind], weighted=True)


@pytest.mark.parametrize("aggr", ["mean", "min", "max"])
def test_other_aggregations_are_the_stock_layers(aggr):
    for graph in GRAPHS.values():
        for ties in (False, True):
            check("SAGEConv", graph, aggr=aggr, ties=ties)


def test_weights_and_loops_that_are_replaced_wait_for_nothing():
    graph = GRAPHS["self_loops"]
    _, ours = sum_pair("GCNConv")
    ours = ours.cuda()
    x, edge_index, weights = (t.cuda() for t in (node_features(graph), graph[0], weights_of(graph)))
    with torch.no_grad(), edgeless.backend("fused"):
        first = ours(x, edge_index, weights)
        again = without_waiting(lambda: ours(x, edge_index, weights))
    assert torch.equal(first, again)


def test_kept_norms_have_the_weight_of_a_nodes_last_loop():
    """Of many loops with weights of their own, PyG's writes on CUDA keep any."""
    loops, edges = torch.zeros(2, 5000, dtype=torch.int64), torch.tensor([[0, 1], [1, 0]])
    graph = (torch.cat((loops, edges), dim=1), 2, 2)
    weights = torch.linspace(0.1, 5, 5002, dtype=torch.float64)
    for _ in range(3):
        theirs, ours = sum_pair("GCNConv", dtype=torch.float64, cached=True)
        inputs = (node_features(graph, torch.float64), graph[0], weights)
        assert_close(OnGPU(ours).run_fused(*inputs), run(theirs, theirs, *inputs))
