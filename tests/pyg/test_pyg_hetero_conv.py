"""HeteroConv over the layers of edgeless: one sum over relations where it can be, and else a call for each."""

import copy

import pytest
import torch
import torch_geometric.nn as stock
from pyg_cases import assert_close, features, random_edges

import edgeless
import edgeless.pyg.nn as fused
from edgeless.layers import hetero_sum

SIZES = {"a": 20, "b": 13, "c": 7}
TYPES = [("a", "to", "b"), ("b", "to", "a"), ("a", "to", "a"), ("c", "by", "a"), ("a", "of", "c")]
IN, OUT = 6, 4
SUMS = [
    ("SAGEConv", {"aggr": "mean"}),
    ("SAGEConv", {"aggr": "sum", "root_weight": False}),
    ("SAGEConv", {"aggr": "mean", "root_weight": False, "bias": False}),
    ("GraphConv", {"aggr": "add"}),
    ("GraphConv", {"aggr": "mean", "bias": False}),
]


def edges_of(types=TYPES):
    return {key: random_edges(SIZES[key[0]], SIZES[key[-1]] - 1, 50, seed=i) for i, key in enumerate(types)}


def nodes_of(dtype=torch.float32):
    return {key: features(size, IN, dtype, seed=i) for i, (key, size) in enumerate(SIZES.items())}


def pair_of(name, dtype=torch.float32, **options):
    """(stock HeteroConv of stock layers, ours of ours)."""
    theirs, ours = (
        package.HeteroConv({key: getattr(package, name)((IN, IN), OUT, **options) for key in TYPES})
        for package in (stock, fused)
    )
    ours.load_state_dict(theirs.state_dict())
    return theirs.to(dtype), ours.to(dtype)


def run(layer, x_dict, *rest, **kwargs):
    leaves = {key: x.detach().clone().requires_grad_() for key, x in x_dict.items()}
    outs = layer(dict(leaves), *rest, **kwargs)
    generator = torch.Generator().manual_seed(23)
    loss = sum((out.double() * torch.randn(out.shape, generator=generator)).sum() for out in outs.values())
    named = {**leaves, **dict(layer.named_parameters())}
    grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {
        **{f"out {k}": v.detach() for k, v in outs.items()},
        **{f"grad {k}": g for k, g in zip(named, grads, strict=True)},
    }


@pytest.fixture
def sums(monkeypatch):
    """Counts the sums over relations."""
    found, function = [], hetero_sum.relational_sum
    monkeypatch.setattr(hetero_sum, "relational_sum", lambda *a, **k: (found.append(1), function(*a, **k))[1])
    return found


@pytest.mark.parametrize(("name", "options"), SUMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_and_means_are_one_sum_over_relations(sums, name, options, dtype):
    theirs, ours = pair_of(name, dtype, **options)
    x_dict, edges = nodes_of(dtype), edges_of()
    want = run(theirs, x_dict, edges)
    with edgeless.backend("fused"):
        have = run(ours, x_dict, edges)
    assert_close(have, want)
    assert list(have) == list(want)
    assert len(sums) == 1


def test_sums_beside_means_are_layers_of_their_own(sums):
    theirs, ours = (
        package.HeteroConv(
            {key: package.SAGEConv((IN, IN), OUT, aggr="sum" if i % 2 else "mean") for i, key in enumerate(TYPES)}
        ).double()
        for package in (stock, fused)
    )
    ours.load_state_dict(theirs.state_dict())
    x_dict, edges = nodes_of(torch.float64), edges_of()
    assert_close(run(ours, x_dict, edges), run(theirs, x_dict, edges))
    assert not sums


def test_relations_without_edges_or_given_in_another_order_are_told_apart(sums):
    theirs, ours = pair_of("SAGEConv")
    edges = edges_of()
    edges[TYPES[1]] = edges[TYPES[1]][:, :0]
    del edges[TYPES[3]]
    backwards = dict(reversed(edges.items()))
    assert_close(run(ours, nodes_of(), backwards), run(theirs, nodes_of(), edges))
    assert len(sums) == 1


def test_edits_of_edges_are_seen(sums):
    theirs, ours = pair_of("GraphConv")
    x_dict, edges = nodes_of(), edges_of()
    run(ours, x_dict, edges)
    edges[TYPES[0]][0, :20] = 1
    assert_close(run(ours, x_dict, edges), run(theirs, x_dict, edges))


def test_an_id_out_of_range_is_named():
    _, ours = pair_of("SAGEConv")
    edges = edges_of()
    edges[TYPES[0]][0, 3] = 20
    with pytest.raises(IndexError, match="HeteroConv"):
        ours(nodes_of(), edges)


@pytest.mark.parametrize(
    "change",
    [
        lambda conv: setattr(conv, "aggr", "mean"),
        lambda conv: conv.convs[TYPES[0]].register_forward_hook(lambda module, inputs, out: out * 2),
        lambda conv: setattr(conv.convs[TYPES[0]], "normalize", True),
        lambda conv: setattr(conv.convs[TYPES[0]].lin_l, "forward", lambda x: x[:, :OUT]),
        lambda conv: setattr(conv.convs[TYPES[0]], "forward", lambda x, edge_index: x[1][:, :OUT]),
    ],
)
def test_what_is_no_sum_of_sums_calls_every_layer(sums, change):
    theirs, ours = pair_of("SAGEConv")
    change(theirs), change(ours)
    assert_close(run(ours, nodes_of(), edges_of()), run(theirs, nodes_of(), edges_of()))
    assert not sums


class Mean(stock.aggr.MeanAggregation):
    """The stock mean, whose name the kernels do not know."""


AGGREGATIONS = {
    **{name: lambda name=name: name for name in ("std", "var", "mul", "median", "softmax", "powermean", "max", "min")},
    "lstm": lambda: stock.aggr.LSTMAggregation(IN, IN),
    "a module": lambda: stock.aggr.SoftmaxAggregation(learn=True),
    "a list": lambda: ["mean", "max"],
    "a subclass": Mean,
}


def of_aggregations(package, name, makes):
    """HeteroConv with an aggregation for each relation, none shared and all with the same parameters."""
    torch.manual_seed(3)
    layer = getattr(package, name)
    return package.HeteroConv({key: layer((IN, IN), OUT, aggr=make()) for key, make in zip(TYPES, makes, strict=True)})


@pytest.mark.parametrize("aggr", AGGREGATIONS)
@pytest.mark.parametrize("name", ["SAGEConv", "GraphConv"])
@pytest.mark.parametrize("how", ["all", "one", "accelerated"])
def test_aggregations_that_are_no_sum_call_every_layer(sums, name, aggr, how):
    if (name, aggr) == ("GraphConv", "a list"):
        pytest.skip("the stock layer cannot multiply the output of several aggregations")
    make = AGGREGATIONS[aggr]
    makes = [make] * len(TYPES) if how != "one" else [make, *[lambda: "mean"] * (len(TYPES) - 1)]
    theirs = of_aggregations(stock, name, makes)
    edges = {key: e[:, e[1].argsort()] for key, e in edges_of().items()}  # as the LSTM wants them
    x_dict = {key: x.abs() + 0.1 for key, x in nodes_of().items()}  # of which powermean has a gradient
    want = run(theirs, x_dict, edges)
    if how == "accelerated":
        ours = theirs
        edgeless.accelerate(ours)
    else:
        ours = of_aggregations(fused, name, makes)
    assert_close(run(ours, x_dict, edges), want)
    assert not sums
    if aggr in ("max", "min"):
        return
    assert "aggr_module is" in str(edgeless.explain(ours, x_dict, edges))
    if how == "accelerated":  # accelerate() keeps such layers, which are then no layers of edgeless
        return
    with edgeless.backend("fused"), pytest.raises(edgeless.NotFusedError, match="aggr_module is"):
        ours(x_dict, edges)


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("name", ["SAGEConv", "GraphConv"])
def test_relations_that_flow_the_other_way_call_every_layer(sums, name, count):
    types = [("a", f"to {i}", "a") for i in range(4)]
    flows = ["target_to_source"] * count + ["source_to_target"] * (4 - count)
    theirs, ours = (
        package.HeteroConv(
            {key: getattr(package, name)(IN, OUT, flow=flow) for key, flow in zip(types, flows, strict=True)}
        )
        for package in (stock, fused)
    )
    ours.load_state_dict(theirs.state_dict())
    x_dict, edges = {"a": nodes_of()["a"]}, edges_of(types)
    assert_close(run(ours, x_dict, edges), run(theirs, x_dict, edges))
    assert not sums


def test_edge_weights_other_layers_and_lazy_ones_call_every_layer(sums):
    theirs, ours = pair_of("GraphConv")
    weights = {key: torch.rand(50) for key in TYPES}
    kwargs = {"edge_weight_dict": weights}
    assert_close(run(ours, nodes_of(), edges_of(), **kwargs), run(theirs, nodes_of(), edges_of(), **kwargs))
    convs = {key: fused.SAGEConv((-1, -1), OUT) for key in TYPES[:2]}
    lazy = fused.HeteroConv({**convs, TYPES[2]: fused.GATConv((-1, -1), OUT, add_self_loops=False)})
    lazy(nodes_of(), edges_of())
    assert not sums


def test_few_relations_call_every_layer(sums):
    theirs, ours = pair_of("SAGEConv")
    edges = dict(list(edges_of().items())[:3])
    assert_close(run(ours, nodes_of(), edges), run(theirs, nodes_of(), edges))
    assert not sums


def test_features_of_another_width_are_the_stock_error(sums):
    theirs, ours = pair_of("SAGEConv")
    x_dict = {key: x[:, :5] for key, x in nodes_of().items()}
    for layer in (theirs, ours):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            layer(x_dict, edges_of())
    assert not sums


def test_a_lazy_layer_is_one_sum_from_its_second_call(sums):
    lazy = fused.HeteroConv({key: fused.SAGEConv((-1, -1), OUT) for key in TYPES})
    first = lazy(nodes_of(), edges_of())
    assert not sums
    second = lazy(nodes_of(), edges_of())
    assert len(sums) == 1
    assert_close(second, first)


def test_accelerate_swaps_the_container_and_its_layers(sums):
    theirs, _ = pair_of("SAGEConv")
    ours = copy.deepcopy(theirs)
    report = edgeless.accelerate(ours)
    assert type(ours) is fused.HeteroConv
    assert len(report.swapped) == 1 + len(TYPES)
    assert not report.kept
    assert_close(run(ours, nodes_of(), edges_of()), run(theirs, nodes_of(), edges_of()))
    assert len(sums) == 1


def test_explain_asks_the_layers():
    theirs, ours = pair_of("SAGEConv")
    x_dict, edges = nodes_of(), edges_of()
    assert edgeless.explain(ours, x_dict, edges)
    assert "edgeless.accelerate" in str(edgeless.explain(theirs, x_dict, edges))
    ours.convs[TYPES[0]].aggr_module = stock.aggr.MedianAggregation()
    said = edgeless.explain(ours, x_dict, edges)
    assert not said
    assert "of ('a', 'to', 'b'), SAGEConv: " in str(said)
    mixed = fused.HeteroConv({TYPES[0]: stock.WLConv()})
    assert "WLConv is not a layer of edgeless" in str(edgeless.explain(mixed, x_dict, edges))
    mixed = fused.HeteroConv({TYPES[0]: stock.NNConv(IN, OUT, torch.nn.Linear(3, IN * OUT))})
    assert "into edgeless.pyg.NNConv if EDGELESS_GENERATE allows it" in str(edgeless.explain(mixed, x_dict, edges))


def test_reference_runs_the_stock_forward(sums):
    theirs, ours = pair_of("SAGEConv")
    with edgeless.backend("reference"):
        assert_close(run(ours, nodes_of(), edges_of()), run(theirs, nodes_of(), edges_of()))
    assert not sums
