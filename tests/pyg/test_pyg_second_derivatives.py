"""Second derivatives of every layer, of penalties on gradients and of forces, against the stock layers."""

import pytest
import test_pyg_agnn
import test_pyg_hetero_conv
import test_pyg_hetero_linear
import test_pyg_hgt
import test_pyg_rgat
import test_pyg_rgcn
import torch
from derivatives import assert_same_derivatives, derivatives
from devices import DEVICES
from pyg_cases import GRAPHS, LAYERS, edge_features, layer_pair, node_features, tensors_of
from sum_cases import sum_pair, weights_of, with_ties
from torch.utils.checkpoint import checkpoint

import edgeless

F64 = torch.float64
SQUARE, PAIR = GRAPHS["random"], GRAPHS["bipartite"]


def attention(name, graph=SQUARE, edge_dim=None, **options):
    """A layer of attention and what it is called with."""
    pair = layer_pair(name, dtype=F64, edge_dim=edge_dim, **options)
    edges = () if edge_dim is None else (edge_features(graph, edge_dim, F64),)
    return pair, (node_features(graph, F64), graph[0], *edges)


def sums(name, graph=SQUARE, weighted=False, ties=False, **options):
    x = node_features(graph, F64)
    pair = sum_pair(name, dtype=F64, **options)
    return pair, (with_ties(x) if ties else x, graph[0], *([weights_of(graph, F64)] if weighted else []))


def rgcn(name, graph=SQUARE, **options):
    x = test_pyg_rgcn.node_features(graph, F64)
    pair = test_pyg_rgcn.layer_pair(name, test_pyg_rgcn.in_channels_of(x), F64, **options)
    return pair, (x, graph[0], test_pyg_rgcn.types_of(graph))


def rgat(edge_dim=None, **options):
    pair = test_pyg_rgat.layer_pair(F64, edge_dim=edge_dim, **options)
    edge_attr = None if edge_dim is None else edge_features(SQUARE, edge_dim, F64)
    return pair, (
        test_pyg_rgat.features(40, test_pyg_rgat.IN, F64),
        SQUARE[0],
        test_pyg_rgat.types_of(SQUARE),
        edge_attr,
    )


def hetero(name, **options):
    pair = test_pyg_hetero_conv.pair_of(name, F64, **options)
    return pair, (test_pyg_hetero_conv.nodes_of(F64), test_pyg_hetero_conv.edges_of())


def hetero_linear():
    types = test_pyg_hetero_linear.TYPES["mixed"]
    return test_pyg_hetero_linear.layer_pair(F64), (test_pyg_hetero_linear.features(len(types), 6, F64), types)


CASES = {
    **{name: lambda name=name: attention(name) for name in LAYERS},
    **{f"{name} edge features": lambda name=name: attention(name, edge_dim=2) for name in LAYERS},
    **{f"{name} pair": lambda name=name: attention(name, PAIR, edge_dim=2, concat=False) for name in LAYERS},
    "GATConv residual": lambda: attention("GATConv", residual=True),
    "GATv2Conv shared": lambda: attention("GATv2Conv", share_weights=True),
    "TransformerConv beta": lambda: attention("TransformerConv", beta=True),
    "AGNNConv": lambda: (test_pyg_agnn.agnn_pair(F64), (node_features(SQUARE, F64), SQUARE[0])),
    "GCNConv": lambda: sums("GCNConv"),
    "GCNConv weights": lambda: sums("GCNConv", weighted=True),
    "GraphConv weights": lambda: sums("GraphConv", weighted=True),
    "GINConv": lambda: sums("GINConv", train_eps=True),
    **{
        f"{name} {aggr}": lambda name=name, aggr=aggr: sums(name, PAIR, aggr=aggr, ties=aggr in ("max", "min"))
        for name in ("SAGEConv", "GraphConv", "GINConv")
        for aggr in ("mean", "max", "min")
    },
    "SAGEConv project": lambda: sums("SAGEConv", project=True),
    **{f"RGCNConv {aggr}": lambda aggr=aggr: rgcn("RGCNConv", aggr=aggr) for aggr in ("mean", "add", "max")},
    "RGCNConv bases, pair": lambda: rgcn("RGCNConv", PAIR, num_bases=3),
    "RGCNConv blocks": lambda: rgcn("RGCNConv", num_blocks=2),
    "FastRGCNConv": lambda: rgcn("FastRGCNConv"),
    "RGATConv": rgat,
    "RGATConv one head": lambda: rgat(heads=1, edge_dim=3),
    "RGATConv within, multiplicative": lambda: rgat(
        attention_mechanism="within-relation", mod="additive", concat=False, **test_pyg_rgat.MULTIPLICATIVE
    ),
    "HGTConv": lambda: (
        test_pyg_hgt.layer_pair(dtype=F64),
        (test_pyg_hgt.nodes_of(dtype=F64), test_pyg_hgt.edges_of()),
    ),
    "HeteroLinear": hetero_linear,
    "HeteroConv SAGEConv": lambda: hetero("SAGEConv"),
    "HeteroConv GraphConv": lambda: hetero("GraphConv", aggr="mean"),
    "HeteroConv GATConv": lambda: hetero("GATConv", add_self_loops=False),
}


def on(device, value, leaves):
    """The inputs on a device, with leaves of its own for floating tensors; these go to ``leaves``."""
    if isinstance(value, dict):
        return {key: on(device, v, leaves) for key, v in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(on(device, v, leaves) for v in value)
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().to(device)
    if value.is_floating_point():
        leaves.append(value.requires_grad_())
    return value


def derivatives_of(layer, inputs, device="cpu", order=2, around=lambda call: call, **kwargs):
    """Up to an order, by all inputs and parameters."""
    leaves = []
    given = on(device, inputs, leaves)
    out = around(lambda: layer.to(device)(*given, **kwargs))()
    outs = list(out.values()) if isinstance(out, dict) else tensors_of(out)
    return derivatives(outs, [*leaves, *layer.parameters()], order)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_every_layer(case, device):
    (theirs, ours), inputs = CASES[case]()
    with edgeless.backend("fused"):
        found = derivatives_of(ours, inputs, device)
    assert_same_derivatives(found, derivatives_of(theirs, inputs))


@pytest.mark.parametrize("name", LAYERS)
def test_the_attention_that_is_returned(name):
    (theirs, ours), inputs = attention(name, edge_dim=2)
    options = {"return_attention_weights": True}
    with edgeless.backend("fused"):
        found = derivatives_of(ours, inputs, **options)
    assert_same_derivatives(found, derivatives_of(theirs, inputs, **options))


@pytest.mark.parametrize("case", ["GATv2Conv", "SAGEConv max", "RGCNConv mean", "RGATConv"])
def test_a_checkpoint(case):
    (_, ours), inputs = CASES[case]()
    again = lambda call: lambda: checkpoint(call, use_reentrant=False)  # noqa: E731
    with edgeless.backend("fused"):
        assert_same_derivatives(derivatives_of(ours, inputs, around=again), derivatives_of(ours, inputs), 1e-12)


def test_forces_of_a_model_are_trained():
    """Energies of atoms by their positions: forces are gradients, and the loss is of these."""
    losses = []
    for index in range(2):
        torch.manual_seed(3)
        layers = [layer_pair("GATv2Conv", 3, 8, 2, F64, edge_dim=1), layer_pair("TransformerConv", 16, 1, 1, F64)]
        model = torch.nn.ModuleList(pair[index] for pair in layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        positions, target = torch.randn(40, 3, dtype=F64, requires_grad=True), torch.randn(40, 3, dtype=F64)
        for _ in range(3):
            src, dst = SQUARE[0]
            lengths = (positions[src] - positions[dst]).square().sum(1, keepdim=True)
            energy = model[1](model[0](positions, SQUARE[0], lengths).tanh(), SQUARE[0]).sum()
            (forces,) = torch.autograd.grad(energy, positions, create_graph=True)
            loss = (forces - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[3:] == pytest.approx(losses[:3], rel=1e-10) and losses[2] != losses[0]


@pytest.mark.parametrize("case", ["GATv2Conv edge features", "RGCNConv mean", "SAGEConv max"])
def test_explain_says_fused(case):
    (_, ours), inputs = CASES[case]()
    assert edgeless.explain(ours, *inputs)
