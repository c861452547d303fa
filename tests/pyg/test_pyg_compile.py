"""torch.compile: whole graphs, with an edgeless.Graph and with a plain edge_index, without a recompile per batch."""

import pytest
import torch
import torch_geometric.nn as stock
from pyg_cases import GRAPHS, LAYERS, assert_close, edge_features, layer_pair, node_features, random_edges, run
from sum_cases import sum_pair
from torch._dynamo.testing import CompileCounterWithBackend

import edgeless
import edgeless.pyg.nn as fused

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def _run_compiled(layer, compiled, *inputs, **kwargs):
    with edgeless.backend("fused"):
        return run(compiled, layer, *inputs, **kwargs)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("graph,edge_dim", (("random", None), ("bipartite", 2)))
@pytest.mark.parametrize("form", ("graph", "tensor"))
def test_whole_graph(name, edge_dim, form, graph):
    graph = GRAPHS[graph]
    theirs, ours = layer_pair(name, dtype=torch.float64, edge_dim=edge_dim)
    x = node_features(graph, torch.float64)
    attr = None if edge_dim is None else edge_features(graph, edge_dim, torch.float64)
    index = graph[0] if form == "tensor" else edgeless.Graph.from_edge_index(*graph)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    want = run(theirs, theirs, x, graph[0], attr)
    for _ in range(2):
        assert_close(_run_compiled(ours, compiled, x, index, attr), want)


@pytest.mark.skipif(not hasattr(torch.Tag, "cudagraph_unsafe"), reason="needs this tag")
@pytest.mark.parametrize("name", (*LAYERS, "AGNNConv", "GCNConv"))
def test_self_loops_do_not_break_the_program_in_two(name):
    edge_index = GRAPHS["random"][0]  # has loops, whose number is known at run time only
    if name == "AGNNConv":
        theirs, ours = stock.AGNNConv(), fused.AGNNConv()
    else:
        theirs, ours = layer_pair(name) if name in LAYERS else sum_pair(name)
    x = node_features(GRAPHS["random"])
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ours, backend=counter)
    for _ in range(2):
        assert_close(_run_compiled(ours, compiled, x, edge_index), run(theirs, theirs, x, edge_index))
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", LAYERS)
def test_attention_weights(name):
    graph = GRAPHS["random"]
    options = {} if name == "TransformerConv" else {"add_self_loops": False}
    theirs, ours = layer_pair(name, dtype=torch.float64, **options)
    x = node_features(graph, torch.float64)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    have = _run_compiled(ours, compiled, x, graph[0], return_attention_weights=True)
    assert_close(have, run(theirs, theirs, x, graph[0], return_attention_weights=True))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("form", ("graph", "tensor"))
def test_no_recompile_for_every_number_of_edges(name, form):
    theirs, ours = layer_pair(name)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ours, fullgraph=True, backend=counter)
    for i in range(8):
        num_nodes, num_edges = 40 + 3 * i, 100 + 17 * i
        edge_index = random_edges(num_nodes, num_nodes, num_edges, seed=i)
        x = node_features((edge_index, num_nodes, num_nodes))
        index = edge_index if form == "tensor" else edgeless.Graph.from_edge_index(edge_index, num_nodes, num_nodes)
        with edgeless.backend("fused"):
            torch.testing.assert_close(compiled(x, index), theirs(x, edge_index))
    assert counter.frame_count <= 2  # once with fixed, once with dynamic sizes


@pytest.mark.slow
@pytest.mark.timeout(900)  # compiles C++, which a busy machine may keep waiting
def test_a_model_with_dropout_under_inductor():
    graph = GRAPHS["random"]

    class Net(torch.nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.conv = layer

        def forward(self, x, graph):
            return self.conv(x, graph).relu().sum(dim=1)

    theirs, ours = layer_pair("GATv2Conv", dropout=0.5)
    compiled = torch.compile(Net(ours), fullgraph=True)
    handle = edgeless.Graph.from_edge_index(*graph)
    x = node_features(graph)
    with edgeless.backend("fused"):
        first, second = compiled(x, handle), compiled(x, handle)
        assert not torch.equal(first, second)
        first.sum().backward()
        ours.eval()
        torch.testing.assert_close(compiled(x, handle), Net(theirs.eval())(x, graph[0]))


def test_what_falls_back_compiles_too():
    graph = GRAPHS["random"]
    theirs, ours = layer_pair("GATv2Conv", aggr="max")
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(node_features(graph), graph[0]), theirs(node_features(graph), graph[0]))


@pytest.mark.parametrize("name", LAYERS)
def test_export(name):
    graph = GRAPHS["random"]
    theirs, ours = layer_pair(name)
    program = torch.export.export(ours, (node_features(graph), graph[0]))
    torch.testing.assert_close(program.module()(node_features(graph), graph[0]), theirs(node_features(graph), graph[0]))
