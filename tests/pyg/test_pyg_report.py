"""What a user of PyG sees of what ran: reports, explanations of models, and models whose layers accelerate joins."""

import copy
import pickle

import pytest
import torch
import torch_geometric.nn as stock
from pyg_cases import GRAPHS, IN, node_features, random_edges

import edgeless
import edgeless.pyg.nn as fused

DEGREES = torch.ones(9)  # of the training graph, for PNAConv
X, EDGES = node_features(GRAPHS["random"]), GRAPHS["random"][0].sort(dim=1, stable=True)[0]


@pytest.fixture(autouse=True)
def fresh():
    edgeless.report(reset=True)


def test_a_fall_back_leaves_a_trace():
    layer = fused.SAGEConv(IN, 4, aggr="lstm")
    for _ in range(3):
        layer(X, EDGES[:, EDGES[1].argsort()])
    fused.GATConv(IN, 4)(X, EDGES)
    found = edgeless.report().layers
    assert found["edgeless.pyg.nn.GATConv"].fused == 1
    (why,) = found["edgeless.pyg.nn.SAGEConv"].stock
    assert "LSTMAggregation" in why and found["edgeless.pyg.nn.SAGEConv"].stock[why] == 3


def test_generated_layers_are_counted(monkeypatch):
    monkeypatch.setenv("EDGELESS_GENERATE", "off")
    layer = fused.LEConv(IN, 4)
    layer(X, EDGES)
    assert edgeless.report(reset=True).layers["edgeless.pyg.nn.LEConv"].stock == {"EDGELESS_GENERATE is off": 1}
    monkeypatch.setenv("EDGELESS_GENERATE", "on")
    layer(X, EDGES)
    (how,) = edgeless.report().layers["edgeless.pyg.nn.LEConv"].generated.items()
    assert how[1] == 1
    said = edgeless.explain(torch.nn.ModuleList([layer])[0], X, EDGES)
    assert said and said.how == how[0]


def test_explain_of_a_model_with_layers_of_every_kind(monkeypatch):
    monkeypatch.setenv("EDGELESS_GENERATE", "on")

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (
                fused.GATv2Conv(IN, 4),
                fused.LEConv(4, 4),
                stock.PNAConv(4, 4, ["max"], ["identity"], DEGREES),
            )

        def forward(self, x, edge_index):
            return self.c(self.b(self.a(x, edge_index), edge_index), edge_index)

    found = edgeless.explain(Net(), X, EDGES)
    outcomes = {name: (e.fused, bool(e.how)) for name, e in found.calls}
    assert outcomes == {"a": (True, False), "b": (True, True), "c": (False, False)} and found.idle == ()
    planned = edgeless.explain(Net(), X, EDGES, plan=True)
    assert planned.calls[0][1].plan and "attention (gatv2)" in str(planned)


def test_aggregations_inside_a_stock_layer_are_left_alone(monkeypatch):
    monkeypatch.setenv("EDGELESS_GENERATE", "off")
    layer = stock.PNAConv(IN, 4, ["max", "min", "mean"], ["identity"], DEGREES)
    report = edgeless.accelerate(layer)
    assert report.swapped == [] and type(layer) is stock.PNAConv
    assert report.kept[0][2].startswith("edgeless has no fused PNAConv; unless EDGELESS_GENERATE")
    assert not any(isinstance(module, edgeless.FusedLayer) for module in layer.modules())


def test_a_layer_that_could_never_run_fused_is_kept():
    model = torch.nn.ModuleDict({"a": stock.SAGEConv(IN, 4, aggr="lstm"), "b": stock.SAGEConv(IN, 4)})
    report = edgeless.accelerate(model)
    assert [name for name, _, _ in report.swapped] == ["b"] and type(model["a"]) is stock.SAGEConv
    assert report.kept[0][2].startswith("no call of it would run fused, because aggr_module is LSTMAggregation")
    assert edgeless.explain(model["a"]).reasons[0].startswith("aggr_module is LSTMAggregation")


def test_a_model_prints_what_is_swapped(monkeypatch):
    monkeypatch.setenv("EDGELESS_GENERATE", "off")
    kept = stock.PNAConv(4, 4, ["max"], ["identity"], DEGREES)
    model = torch.nn.ModuleList([stock.GATConv(IN, 4), torch.nn.ReLU(), kept])
    before = repr(model)
    edgeless.accelerate(model)
    assert repr(model) == before.replace("GATConv(", "edgeless.GATConv(") != before


# to_hetero -----------------------------------------------------------------------------------------------------------

SIZES = {"a": 20, "b": 11}
TYPES = [("a", "to", "b"), ("b", "to", "a"), ("a", "of", "a"), ("a", "by", "a"), ("b", "of", "b")]
X_DICT = {key: torch.randn(size, IN, dtype=torch.float64) for key, size in SIZES.items()}
E_DICT = {key: random_edges(SIZES[key[0]], SIZES[key[2]], 60, seed=i) for i, key in enumerate(TYPES)}


class Net(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.first, self.second = layer(8), layer(3)

    def forward(self, x, edge_index):
        return self.second(self.first(x, edge_index).relu(), edge_index)


def to_hetero(layer=lambda out: stock.SAGEConv((-1, -1), out), types=TYPES, aggr="sum"):
    torch.manual_seed(0)
    try:
        model = stock.to_hetero(Net(layer), (list(SIZES), types), aggr=aggr).double()
    except AttributeError as error:
        pytest.skip(f"this PyG's to_hetero does not work with this torch: {error}")
    with torch.no_grad():
        model(X_DICT, {key: E_DICT[key] for key in types})
    return model


def assert_same_hetero(theirs, ours, edges=E_DICT):
    want, have = theirs(X_DICT, edges), ours(X_DICT, edges)
    assert list(want) == list(have)
    for key in want:
        torch.testing.assert_close(have[key], want[key])
    for model, outs in ((theirs, want), (ours, have)):
        model.zero_grad()
        sum(out.square().sum() for out in outs.values()).backward()
    for (name, p), (_, q) in zip(theirs.named_parameters(), ours.named_parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, msg=name)


LAYERS = {
    "SAGEConv": lambda out: stock.SAGEConv((-1, -1), out),
    "SAGEConv, sum": lambda out: stock.SAGEConv((-1, -1), out, aggr="sum"),
    "GraphConv": lambda out: stock.GraphConv((-1, -1), out),
}


@pytest.mark.parametrize("aggr", ("sum", "mean"))
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_to_hetero_become_one_sum(name, aggr):
    theirs = to_hetero(LAYERS[name], aggr=aggr)
    ours = copy.deepcopy(theirs)
    report = edgeless.accelerate(ours)
    assert report.joined == [("first", 5), ("second", 5)] and len(report.swapped) == 10
    assert "first: 5 layers are called as one sum over relations" in str(report)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    edgeless.report(reset=True)
    assert_same_hetero(theirs, ours)
    assert {name: calls.fused for name, calls in edgeless.report().layers.items()} == {"edgeless.pyg.nn.HeteroConv": 2}
    again = edgeless.accelerate(ours)
    assert again.joined == [] and again.swapped == []
    for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert_same_hetero(theirs, copied)


def test_a_layer_that_takes_the_place_of_a_joined_one_is_called():
    theirs = to_hetero()
    ours = copy.deepcopy(theirs)
    edgeless.accelerate(ours)
    new = stock.SAGEConv((IN, IN), 8).double()
    for model in (theirs, ours):
        model.first["a__of__a"] = copy.deepcopy(new)
    assert_same_hetero(theirs, ours)


def test_hooks_of_a_joined_layer_are_called():
    ours, called = to_hetero(), []
    edgeless.accelerate(ours)
    ours.first["a__of__a"].register_forward_hook(lambda *args: called.append(1))
    ours(X_DICT, E_DICT)
    assert called == [1]


@pytest.mark.parametrize("backend", ("auto", "reference"))
def test_joined_layers_follow_the_backend(backend):
    theirs = to_hetero()
    ours = copy.deepcopy(theirs)
    edgeless.accelerate(ours)
    edgeless.report(reset=True)
    with edgeless.backend(backend):
        assert_same_hetero(theirs, ours)
    assert ("edgeless.pyg.nn.HeteroConv" in edgeless.report().layers) == (backend == "auto")


def test_lazy_layers_are_joined_before_their_first_call():
    theirs, ours = (stock.to_hetero(Net(LAYERS["SAGEConv"]), (list(SIZES), TYPES)).double() for _ in range(2))
    assert edgeless.accelerate(ours).joined
    with torch.no_grad():
        theirs(X_DICT, E_DICT), ours(X_DICT, E_DICT)
    ours.load_state_dict(theirs.state_dict())
    assert_same_hetero(theirs, ours)


@pytest.mark.parametrize(
    "layer,types,aggr",
    (
        (LAYERS["SAGEConv"], TYPES[:3], "sum"),
        (LAYERS["SAGEConv"], TYPES, "max"),
        (lambda out: stock.GATConv((-1, -1), out, add_self_loops=False), TYPES, "sum"),
    ),
    ids=("few relations", "a maximum", "attention"),
)
def test_what_is_not_joined(layer, types, aggr):
    theirs = to_hetero(layer, types, aggr)
    ours = copy.deepcopy(theirs)
    code = ours.code
    assert edgeless.accelerate(ours).joined == [] and ours.code == code
    assert_same_hetero(theirs, ours, {key: E_DICT[key] for key in types})


def test_explain_a_joined_model():
    ours = to_hetero()
    edgeless.accelerate(ours)
    found = edgeless.explain(ours, X_DICT, E_DICT)
    assert [name for name, _ in found.calls] == ["first_joined", "second_joined"] and found and found.idle == ()
