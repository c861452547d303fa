"""torch.export: the program of every layer holds our ops and is right for other inputs. To ONNX goes the stock path."""

from __future__ import annotations

import io

import pytest
import torch
import torch_geometric.nn as stock
from pyg_cases import features, random_edges
from torch import Tensor, nn
from torch.export import Dim

import edgeless
import edgeless.pyg.nn as fused
from edgeless.graph.formats import tensors_of

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

WIDTH, RELATIONS = 6, 3
METADATA = (["a", "b"], [("a", "to", "b"), ("b", "to", "a"), ("a", "by", "a")])


def nodes(num_nodes, seed):
    return features(num_nodes, WIDTH, seed=seed)


def edges(num_nodes, seed, num_edges=0):
    return random_edges(num_nodes, num_nodes, num_edges or 5 * num_nodes, seed=seed)


def plain(num_nodes, seed):
    return nodes(num_nodes, seed), edges(num_nodes, seed)


def weighted(num_nodes, seed):
    x, edge_index = plain(num_nodes, seed)
    return x, edge_index, features(edge_index.size(1), 1, seed=seed).view(-1).abs()


def by_edge(num_nodes, seed):
    x, edge_index = plain(num_nodes, seed)
    return x, edge_index, features(edge_index.size(1), 2, seed=seed)


def typed(num_nodes, seed):
    x, edge_index = plain(num_nodes, seed)
    return x, edge_index, edges(RELATIONS, seed, edge_index.size(1))[0]


def bipartite(num_nodes, seed):
    edge_index = random_edges(num_nodes, num_nodes - 5, 5 * num_nodes, seed=seed)
    return (nodes(num_nodes, seed), nodes(num_nodes - 5, seed + 1)), edge_index


def hetero(num_nodes, seed):
    sizes = {"a": num_nodes, "b": num_nodes - 3}
    x_dict = {key: nodes(size, seed + i) for i, (key, size) in enumerate(sizes.items())}
    edge_index_dict = {
        key: random_edges(sizes[key[0]], sizes[key[-1]], 4 * num_nodes, seed=seed + i)
        for i, key in enumerate(METADATA[1])
    }
    return x_dict, edge_index_dict


def grouped(num_nodes, seed):
    ptr = torch.arange(0, num_nodes + 1, num_nodes // 4)
    return nodes(int(ptr[-1]), seed), None, ptr


def rows_of_types(num_nodes, seed):
    return nodes(num_nodes, seed), edges(RELATIONS, seed, num_nodes)[0]


def gin(package, **options):
    return package.GINConv(nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 4)), **options)


def hetero_conv(package):
    return package.HeteroConv({key: package.SAGEConv((WIDTH, WIDTH), 4) for key in METADATA[1]})


CASES = {
    "GATv2Conv": (lambda p: p.GATv2Conv(WIDTH, 4, 2), plain),
    "GATv2Conv bipartite": (lambda p: p.GATv2Conv((WIDTH, WIDTH), 4, 2, add_self_loops=False), bipartite),
    "GATv2Conv edge_dim": (lambda p: p.GATv2Conv(WIDTH, 4, 2, edge_dim=2, concat=False), by_edge),
    "GATConv": (lambda p: p.GATConv(WIDTH, 4, 2), plain),
    "GATConv edge_dim": (lambda p: p.GATConv(WIDTH, 4, 2, edge_dim=2), by_edge),
    "GATConv residual": (lambda p: p.GATConv(WIDTH, 4, 2, residual=True, concat=False), plain),
    "TransformerConv": (lambda p: p.TransformerConv(WIDTH, 4, 2), plain),
    "TransformerConv edge_dim": (lambda p: p.TransformerConv(WIDTH, 4, 2, edge_dim=2, beta=True), by_edge),
    "AGNNConv": (lambda p: p.AGNNConv(), plain),
    "GCNConv": (lambda p: p.GCNConv(WIDTH, 4), plain),
    "GCNConv weighted": (lambda p: p.GCNConv(WIDTH, 4), weighted),
    "GCNConv plain sums": (lambda p: p.GCNConv(WIDTH, 4, normalize=False), weighted),
    "SAGEConv": (lambda p: p.SAGEConv(WIDTH, 4), plain),
    "SAGEConv max": (lambda p: p.SAGEConv(WIDTH, 4, aggr="max", project=True), plain),
    "SAGEConv bipartite": (lambda p: p.SAGEConv((WIDTH, WIDTH), 4, normalize=True), bipartite),
    "GraphConv": (lambda p: p.GraphConv(WIDTH, 4), plain),
    "GraphConv weighted": (lambda p: p.GraphConv(WIDTH, 4, aggr="mean"), weighted),
    "GINConv": (gin, plain),
    "GINConv max": (lambda p: gin(p, aggr="max", train_eps=True), plain),
    "RGCNConv": (lambda p: p.RGCNConv(WIDTH, 4, RELATIONS), typed),
    "RGCNConv bases": (lambda p: p.RGCNConv(WIDTH, 4, RELATIONS, num_bases=2, aggr="add"), typed),
    "FastRGCNConv": (lambda p: p.FastRGCNConv(WIDTH, 4, RELATIONS), typed),
    "RGATConv": (lambda p: p.RGATConv(WIDTH, 4, RELATIONS), typed),
    "RGATConv heads": (lambda p: p.RGATConv(WIDTH, 4, RELATIONS, heads=2, num_bases=2), typed),
    "HGTConv": (lambda p: p.HGTConv(WIDTH, 4, METADATA, heads=2), hetero),
    "HeteroConv": (hetero_conv, hetero),
    "HeteroLinear": (lambda p: p.HeteroLinear(WIDTH, 4, RELATIONS), rows_of_types),
    "MaxAggregation": (lambda p: p.MaxAggregation(), grouped),
    "MinAggregation": (lambda p: p.MinAggregation(), grouped),
}


class Net(nn.Module):
    """A model around a layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *inputs):
        out = self.layer(*inputs)
        return out if isinstance(out, Tensor) else tuple(out.values())


def net_pair(name):
    """A stock model, ours with equal parameters, none of them zero, and what draws their inputs."""
    make, draw = CASES[name]
    theirs, ours = Net(make(stock)), Net(make(fused))
    theirs(*draw(20, 1)), ours(*draw(20, 1))  # lazy parameters
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours, draw


def ops_of(program) -> set[str]:
    return {str(node.target) for node in program.graph.nodes if str(node.target).startswith("edgeless.")}


def assert_same(have, want):
    torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strict", (False, True))
@pytest.mark.parametrize("name", CASES)
def test_the_program_holds_our_ops_and_is_right_for_another_input(name, strict):
    theirs, ours, draw = net_pair(name)
    with edgeless.backend("fused"):
        program = torch.export.export(ours, draw(20, 1), strict=strict)
    assert ops_of(program)
    other = draw(20, 2)
    assert_same(program.module()(*other), theirs(*other))
    assert_same(program.run_decompositions().module()(*other), theirs(*other))
    assert_same(ours(*other), theirs(*other))  # nothing of the tracer stays in the layer or in the cache


@pytest.mark.parametrize("name", ("GATv2Conv", "GATConv", "GCNConv", "SAGEConv", "GINConv max"))
def test_sizes_may_be_dynamic(name):
    theirs, ours, draw = net_pair(name)
    shapes = (({0: Dim("num_nodes", min=2)}, {1: Dim("num_edges", min=2)}),)
    with edgeless.backend("fused"):
        program = torch.export.export(ours, draw(20, 1), dynamic_shapes=shapes)
    assert ops_of(program)
    for num_nodes in (7, 33):
        other = draw(num_nodes, 3)
        assert_same(program.module()(*other), theirs(*other))


def test_a_saved_program_is_right_and_differentiable():
    theirs, ours, draw = net_pair("GATv2Conv")
    file = io.BytesIO()
    torch.export.save(torch.export.export(ours, draw(20, 1)), file)
    file.seek(0)
    model, other = torch.export.load(file).module(), draw(20, 2)
    model(*other).square().sum().backward()
    theirs(*other).square().sum().backward()
    for have, want in zip(model.parameters(), theirs.parameters(), strict=True):
        assert_same(have.grad, want.grad)


def test_a_graph_that_a_model_keeps_is_not_filled_by_the_tracer():
    """A graph builds its other direction when it is first asked for, which may be while a model is exported."""
    graph = edgeless.Graph.from_edge_index(edges(20, 1), 20, 20)

    class OnGraph(nn.Module):
        def forward(self, x):
            return edgeless.functional.spmm(graph, x) * graph.csc.indptr.size(0)

    model, x = OnGraph(), nodes(20, 1)
    program = torch.export.export(model, (x,))
    assert all(type(t) is Tensor for t in tensors_of(graph))
    assert_same(program.module()(x), model(x))


def test_stand_ins_outside_of_a_tracer_take_the_stock_path():
    _, ours, draw = net_pair("GATv2Conv")
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        inputs = [mode.from_tensor(t) for t in draw(20, 1)]
        explanation = edgeless.explain(ours.layer, *inputs)
    assert "the features are a FakeTensor, which has no contents" in str(explanation)


@pytest.mark.parametrize("dynamo", (True, False))
@pytest.mark.parametrize("name", ("SAGEConv", "GCNConv"))
def test_to_onnx_goes_the_stock_path(name, dynamo, tmp_path):
    onnx = pytest.importorskip("onnx", reason="needs onnx")
    pytest.importorskip("onnxscript", reason="needs onnxscript")
    _, ours, draw = net_pair(name)
    said = []

    class Explained(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = ours.layer

        def forward(self, x, edge_index):
            said.append(str(edgeless.explain(self.layer, x, edge_index)))
            return self.layer(x, edge_index)

    path = tmp_path / "model.onnx"
    torch.onnx.export(Explained().eval(), draw(20, 1), str(path), dynamo=dynamo, opset_version=18)
    assert "the model is being exported to ONNX, which has no ops of edgeless" in said[0]
    assert not [node for node in onnx.load(path).graph.node if "edgeless" in node.domain or "edgeless" in node.op_type]
