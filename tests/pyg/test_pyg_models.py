"""The layers inside PyG's own machinery: models, heterogeneous graphs, samplers, explainers."""

import copy

import pytest
import torch
import torch_geometric.nn as stock
from pyg_cases import GRAPHS, IN, LAYERS, assert_close, layer_pair, node_features, random_edges, run, run_exact
from torch_geometric.data import Data, HeteroData
from torch_geometric.explain import AttentionExplainer, Explainer, GNNExplainer
from torch_geometric.loader import NeighborLoader
from torch_geometric.typing import WITH_PYG_LIB, WITH_TORCH_SPARSE
from torch_geometric.utils import trim_to_layer

import edgeless
import edgeless.pyg.nn as fused

GRAPH = GRAPHS["random"]
needs_sampler = pytest.mark.skipif(not (WITH_TORCH_SPARSE or WITH_PYG_LIB), reason="needs torch_sparse or pyg_lib")


def _assert_same_model(theirs, ours, *inputs, **kwargs):
    """Outputs and gradients of two models with equal parameters; the second on the kernels."""
    with edgeless.backend("fused"):
        have = run(ours, ours, *inputs, **kwargs)
    exact = all(parameter.dtype == torch.float64 for parameter in theirs.parameters())
    assert_close(have, run(theirs, theirs, *inputs, **kwargs) if exact else run_exact(theirs, *inputs, **kwargs))


# accelerate ------------------------------------------------------------------------------------------------------


def _models():
    yield stock.GAT(IN, 8, 2, heads=2)
    yield stock.GAT(IN, 8, 3, 4, v2=True, heads=2, jk="cat")
    yield stock.GAT((IN, IN), 8, 2, v2=True, heads=4, act="elu", norm="layer")
    yield stock.Sequential(
        "x, edge_index",
        [
            (stock.TransformerConv(IN, 8, 2, beta=True), "x, edge_index -> x"),
            torch.nn.ReLU(),
            (stock.GATConv(16, 4, residual=True), "x, edge_index -> x"),
        ],
    )


@pytest.mark.parametrize("index", range(4))
def test_accelerate_models(index):
    theirs = list(_models())[index]
    ours = copy.deepcopy(theirs)
    report = edgeless.accelerate(ours)
    convs = [n for n, m in theirs.named_modules() if isinstance(m, stock.MessagePassing)]
    assert [name for name, _, _ in report.swapped] == convs and report.kept == []
    x = node_features(GRAPH)
    _assert_same_model(theirs, ours, (x, x) if index == 2 else x, GRAPH[0])
    assert edgeless.accelerate(ours).swapped == []
    assert repr(ours).replace("edgeless.", "") == repr(theirs)
    theirs.load_state_dict(ours.state_dict())


def test_a_model_class_that_makes_fused_layers():
    class Net(stock.GAT):
        def init_conv(self, in_channels, out_channels, **kwargs):
            return fused.GATv2Conv(in_channels, out_channels // kwargs["heads"], **kwargs)

    model = Net(IN, 8, 2, heads=2)
    with edgeless.backend("fused"):
        assert model(node_features(GRAPH), GRAPH[0]).shape == (40, 8)


def test_accelerate_reports_what_it_generates(monkeypatch):
    monkeypatch.setenv("EDGELESS_GENERATE", "auto")

    class Mine(stock.GATConv):
        pass

    model = torch.nn.ModuleDict(
        {"a": stock.GATConv(IN, 4), "b": stock.ChebConv(IN, 4, 2), "c": Mine(IN, 4), "d": fused.GATConv(IN, 4)}
    )
    report = edgeless.accelerate(model)
    assert report.swapped[:2] == [("a", stock.GATConv, fused.GATConv), ("b", stock.ChebConv, fused.ChebConv)]
    assert report.swapped[2][:2] == ("c", Mine) and issubclass(report.swapped[2][2], Mine)
    lines = str(report).splitlines()
    assert lines[0] == "swapped 3 (1 with kernels, 2 generated), kept 0" and report.generated == ["b", "c"]
    assert lines[2] == "  b: ChebConv -> edgeless.pyg.nn.ChebConv, generated" and lines[3].endswith("Mine, generated")
    assert isinstance(model["c"], Mine)


def test_accelerate_reports_what_it_keeps_where_nothing_is_generated(monkeypatch):
    class Mine(stock.GATConv):
        pass

    class Driven(stock.MessagePassing):
        def propagate(self, edge_index, size=None, **kwargs):
            return kwargs["x"]

    model = torch.nn.ModuleDict({"a": Mine(IN, 4), "b": Driven()})
    monkeypatch.setenv("EDGELESS_GENERATE", "auto")
    assert [name for name, _, _ in edgeless.accelerate(torch.nn.ModuleDict({"b": Driven()})).kept] == ["b"]
    monkeypatch.setenv("EDGELESS_GENERATE", "off")
    report = edgeless.accelerate(model)
    assert report.kept[0][2] == "it is a subclass of GATConv, whose changes the fused layer does not know"
    assert report.kept[1][2] == "edgeless has no fused Driven"
    assert type(model["a"]) is Mine and str(report).splitlines()[0] == "swapped 0, kept 2"


# Heterogeneous graphs --------------------------------------------------------------------------------------------

EDGE_TYPES = [("user", "follows", "user"), ("user", "plays", "game"), ("game", "liked_by", "user")]


def _hetero():
    data = HeteroData()
    data["user"].x, data["game"].x = torch.randn(20, IN), torch.randn(11, 7)
    sizes = {"user": 20, "game": 11}
    for i, (source, relation, target) in enumerate(EDGE_TYPES):
        data[source, relation, target].edge_index = random_edges(sizes[source], sizes[target], 50, seed=i)
    return data


@pytest.mark.parametrize("name", LAYERS)
def test_hetero_conv(name):
    def convs(package):
        layer = getattr(package, name)
        options = {} if name == "TransformerConv" else {"add_self_loops": False}
        return stock.HeteroConv({edge_type: layer((-1, -1), 4, 2, **options) for edge_type in EDGE_TYPES}, aggr="sum")

    data = _hetero()
    theirs, ours = convs(stock), convs(fused)
    with torch.no_grad():
        theirs(data.x_dict, data.edge_index_dict), ours(data.x_dict, data.edge_index_dict)
    ours.load_state_dict(theirs.state_dict())
    with edgeless.backend("fused"):
        have = ours(data.x_dict, data.edge_index_dict)
    want = theirs(data.x_dict, data.edge_index_dict)
    for key in want:
        torch.testing.assert_close(have[key], want[key])


@pytest.mark.parametrize("name", LAYERS)
def test_to_hetero(name):
    class Net(torch.nn.Module):
        def __init__(self, package):
            super().__init__()
            layer = getattr(package, name)
            options = {} if name == "TransformerConv" else {"add_self_loops": False}
            self.first = layer((-1, -1), 4, 2, **options)
            self.second = layer((-1, -1), 3, **options)

        def forward(self, x, edge_index):
            return self.second(self.first(x, edge_index).relu(), edge_index)

    data = _hetero()
    try:
        theirs = stock.to_hetero(Net(stock), data.metadata(), aggr="sum")
    except AttributeError as error:
        pytest.skip(f"this PyG's to_hetero does not work with this torch: {error}")
    ours = stock.to_hetero(Net(fused), data.metadata(), aggr="sum")
    with torch.no_grad():
        theirs(data.x_dict, data.edge_index_dict), ours(data.x_dict, data.edge_index_dict)
    ours.load_state_dict(theirs.state_dict())
    with edgeless.backend("fused"):
        have = ours(data.x_dict, data.edge_index_dict)
    want = theirs(data.x_dict, data.edge_index_dict)
    for key in want:
        torch.testing.assert_close(have[key], want[key])
    later = stock.to_hetero(Net(stock), data.metadata(), aggr="sum")
    assert len(edgeless.accelerate(later).swapped) == 6


# Samplers --------------------------------------------------------------------------------------------------------


def _two_layers(name):
    options = {} if name == "TransformerConv" else {"add_self_loops": False}
    return [layer_pair(name, IN, 4, 2, **options), layer_pair(name, 8, 3, 1, **options)]


@needs_sampler
@pytest.mark.parametrize("name", LAYERS)
def test_neighbor_loader(name):
    pairs = _two_layers(name)
    data = Data(x=torch.randn(200, IN), edge_index=random_edges(200, 200, 1500))
    for batch in NeighborLoader(data, [5, 4], batch_size=32, input_nodes=torch.arange(96)):
        results = []
        for which in (0, 1):
            x = batch.x
            for pair in pairs:
                x = pair[which](x, batch.edge_index)
            results.append(x[: batch.batch_size])
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("name", LAYERS)
def test_trim_to_layer(name):
    """Nodes and edges in the order of a two-hop sample; the last layer needs the first hop only."""
    nodes, edges = [8, 12, 20], [30, 50]
    first, second = random_edges(20, 8, edges[0], 1), random_edges(40, 12, edges[1], 2)
    edge_index = torch.cat((first, second + torch.tensor([[0], [8]])), dim=1)
    inputs = torch.randn(40, IN)
    results = []
    for which in (0, 1):
        x, index = inputs, edge_index
        for depth, pair in enumerate(_two_layers(name)):
            x, index, _ = trim_to_layer(depth, nodes, edges, x, index, None)
            x = pair[which](x, index)
        results.append(x[:8])
    assert index.size(1) == edges[0]
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("name", LAYERS)
def test_bipartite_blocks(name):
    """A sampled block: few targets that are the first sources."""
    theirs, ours = layer_pair(name, (IN, IN) if name != "GATConv" else IN, dtype=torch.float64)
    for seed in range(3):
        edge_index = random_edges(50, 9, 70, seed)
        x = torch.randn(50, IN, dtype=torch.float64)
        _assert_same_model(theirs, ours, (x, x[:9]), edge_index)


# Explainers ------------------------------------------------------------------------------------------------------


def _explainer(model, algorithm):
    return Explainer(
        model,
        algorithm,
        explanation_type="model",
        edge_mask_type="object",
        node_mask_type=None if isinstance(algorithm, AttentionExplainer) else "attributes",
        model_config={"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"},
    )


@pytest.mark.parametrize("name", ("GATv2Conv", "GATConv", "TransformerConv"))
@pytest.mark.parametrize("algorithm", (AttentionExplainer, lambda: GNNExplainer(epochs=3)))
def test_explainers(name, algorithm):
    theirs, ours = layer_pair(name)
    x = node_features(GRAPH)
    ours(x, GRAPH[0])
    masks = []
    for layer in (theirs, ours):
        torch.manual_seed(0)
        masks.append(_explainer(layer.eval(), algorithm())(x, GRAPH[0], index=3).edge_mask)
    torch.testing.assert_close(masks[1], masks[0])
    assert masks[0].abs().sum() > 0
    assert edgeless.explain(ours, x, GRAPH[0])  # fused again afterwards
    torch.testing.assert_close(ours(x, GRAPH[0]), theirs(x, GRAPH[0]))
