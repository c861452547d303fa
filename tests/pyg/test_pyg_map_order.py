"""Layers whose linear map and sum over neighbours change places: outputs and all gradients are the stock layers'."""

import pytest
import torch
import torch_geometric.nn as stock
from devices import EVERY_DEVICE
from pyg_cases import GRAPHS, OnGPU, assert_close, features, run, run_fused
from sum_cases import SQUARE, WEIGHTED, sum_pair, weights_of
from torch_geometric.nn import MLP

import edgeless
import edgeless.pyg.nn as fused

WIDTHS = {"GCNConv": (3, 13), "SAGEConv": (13, 3), "GraphConv": (13, 3), "GINConv": (19, 3)}
OPTIONS = {
    "GCNConv": [{}, {"bias": False}, {"improved": True}, {"normalize": False}, {"cached": True}, {"aggr": "mean"}],
    "SAGEConv": [{}, {"aggr": "sum"}, {"bias": False}, {"root_weight": False}, {"root_weight": False, "bias": False},
                 {"normalize": True}],
    "GraphConv": [{}, {"aggr": "mean"}, {"bias": False}],
    "GINConv": [{}, {"eps": -0.7, "train_eps": True}, {"aggr": "mean"}],
}  # fmt: skip
CASES = [(name, options) for name in WIDTHS for options in OPTIONS[name]]


def inputs_of(name, graph, dtype, weighted):
    x = features(graph[1], WIDTHS[name][0], torch.float64, seed=3).to(dtype)
    return (x, graph[0], weights_of(graph, dtype)) if weighted else (x, graph[0])


@EVERY_DEVICE
@pytest.mark.parametrize("name,options", CASES, ids=str)
def test_the_other_order_is_the_stock_layers(name, options, device, changed):
    for kind in SQUARE:
        graph = GRAPHS[kind]
        for dtype in (torch.float64, torch.float32):
            for weighted in (False, name in WEIGHTED):
                theirs, ours = sum_pair(name, *WIDTHS[name], dtype=dtype, **options)
                inputs = inputs_of(name, graph, dtype, weighted)
                have = OnGPU(ours).run_fused(*inputs) if device == "cuda" else run_fused(ours, *inputs)
                assert_close(have, run(theirs, theirs, *inputs))
    assert changed and all(changed)


PERCEPTRONS = [
    lambda: torch.nn.Linear(19, 3),
    lambda: torch.nn.Sequential(torch.nn.Linear(19, 3)),
    lambda: MLP([19, 5, 3], norm=None),
    lambda: MLP([19, 3], bias=False),
    lambda: MLP([19, 5, 4, 3], act_first=True, plain_last=False),
    lambda: MLP([19, 5, 3], act="elu", bias=[False, True]),
]


@EVERY_DEVICE
@pytest.mark.parametrize("case", range(len(PERCEPTRONS)))
def test_what_a_gin_begins_with(case, device, changed):
    """Outputs, all gradients, and the statistics of the MLP's BatchNorm."""
    graph = GRAPHS["random"]
    theirs = stock.GINConv(PERCEPTRONS[case](), eps=0.3, train_eps=True).double()
    ours = fused.GINConv(PERCEPTRONS[case](), eps=0.3, train_eps=True).double()
    ours.load_state_dict(theirs.state_dict())
    inputs = inputs_of("GINConv", graph, torch.float64, False)
    have = OnGPU(ours).run_fused(*inputs) if device == "cuda" else run_fused(ours, *inputs)
    assert_close(have, run(theirs, theirs, *inputs))
    for mine, other in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(mine.cpu(), other)
    assert changed and all(changed)
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]


@EVERY_DEVICE
@pytest.mark.parametrize("aggr", ["max", "min"])
@pytest.mark.parametrize("nn", [torch.nn.Linear, lambda *widths: torch.nn.Sequential(torch.nn.Linear(*widths))])
def test_an_extremum_comes_before_the_first_map(nn, aggr, device, changed):
    """However much narrower what the map makes of it: an extremum of mapped rows is another one."""
    theirs, ours = stock.GINConv(nn(19, 3), aggr=aggr).double(), fused.GINConv(nn(19, 3), aggr=aggr).double()
    ours.load_state_dict(theirs.state_dict())
    inputs = inputs_of("GINConv", GRAPHS["random"], torch.float64, False)
    have = OnGPU(ours).run_fused(*inputs) if device == "cuda" else run_fused(ours, *inputs)
    assert_close(have, run(theirs, theirs, *inputs))
    assert not changed


def test_a_perceptron_of_ones_own_sees_sums(changed):
    class Own(MLP):
        pass

    ours = fused.GINConv(Own([19, 5, 3]))
    hooked = fused.GINConv(MLP([19, 5, 3]))
    hooked.nn.lins[0].register_forward_hook(lambda *args: None)
    with edgeless.backend("fused"), torch.no_grad():
        for layer in (ours, hooked):
            layer(*inputs_of("GINConv", GRAPHS["random"], torch.float32, False))
    assert not changed


@EVERY_DEVICE
@pytest.mark.parametrize("name,options", [case for case in CASES if case[0] in ("SAGEConv", "GraphConv")], ids=str)
def test_pairs_of_source_and_destination_features(name, options, device, changed):
    ends = torch.tensor([[0, 1, 2, 2, 0, 1, 1], [3, 0, 4, 4, 1, 1, 3]])
    for x_dst in (features(5, 7, torch.float64, seed=4), None):
        x, size = (features(3, 13, torch.float64, seed=3), x_dst), None if x_dst is not None else (3, 5)
        theirs, ours = sum_pair(name, (13, 7), 3, dtype=torch.float64, **options)
        inputs = (x, ends, size) if name == "SAGEConv" else (x, ends, None, size)
        have = OnGPU(ours).run_fused(*inputs) if device == "cuda" else run_fused(ours, *inputs)
        assert_close(have, run(theirs, theirs, *inputs))
    assert changed and all(changed)


@pytest.mark.parametrize("name", WIDTHS)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_16_bit_errs_at_most_twice_as_much(name, dtype, changed):
    graph = GRAPHS["random"]
    for weighted in (False, name in WEIGHTED):
        theirs, ours = sum_pair(name, *WIDTHS[name], dtype=dtype)
        inputs = inputs_of(name, graph, dtype, weighted)
        exact = run(theirs.double(), theirs, *(t.double() if t.is_floating_point() else t for t in inputs))
        stock, fused = run(theirs.to(dtype), theirs, *inputs), run_fused(ours, *inputs)
        for key, value in exact.items():
            err = [(found[key].double() - value).abs().mean() for found in (stock, fused)]
            assert err[1] <= 2 * err[0], (weighted, key, *map(float, err))
    assert changed and all(changed)


def test_what_hangs_on_the_map_sees_sums(changed):
    graph = GRAPHS["random"]
    _, ours = sum_pair("SAGEConv", 13, 3)
    seen = []
    ours.lin_l.register_forward_hook(lambda module, args, out: seen.append(args[0]))
    with edgeless.backend("fused"), torch.no_grad():
        ours(*inputs_of("SAGEConv", graph, torch.float32, False))
    assert len(seen) == 1 and not changed


def test_features_without_gradient_are_summed_first(changed):
    """The map's gradient needs the sums alone, so the backward has no graph to walk."""
    graph = GRAPHS["random"]
    theirs, ours = sum_pair("GCNConv", 8, 8, dtype=torch.float64)
    x, edge_index = features(graph[1], 8, torch.float64, seed=3), graph[0].clone()
    with edgeless.backend("fused"):
        out = ours(x, edge_index)
    assert changed == [True]
    grad = torch.randn_like(out)
    want = torch.autograd.grad(theirs(x, edge_index), theirs.lin.weight, grad)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
        have = torch.autograd.grad(out, ours.lin.weight, grad)
    torch.testing.assert_close(have, want, rtol=1e-10, atol=1e-12)
    assert not [event.name for event in trace.events() if "spmm" in event.name]
