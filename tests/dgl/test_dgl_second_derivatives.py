"""Second derivatives of every layer, of penalties on gradients and of forces, against the stock layers."""

import dgl
import pytest
import test_dgl_agnn
import test_dgl_hetero
import test_dgl_hgt
import test_dgl_relational
import torch
from derivatives import assert_same_derivatives, derivatives
from devices import DEVICES
from dgl.backend.pytorch import sparse
from dgl_cases import IN, LAYERS, features, graph_named, layer_pair, options_for, sum_pair

import edgeless

F64 = torch.float64


@pytest.fixture
def whole_softmax(monkeypatch):
    """On the CPU DGL makes the gradient of its softmax by a kernel that autograd does not know, and so leaves out what
    comes from there; on CUDA by these two ops.
    """

    def backward(graph, out, products):
        sums = sparse.gspmm(graph, "copy_rhs", "sum", None, products)
        return products - sparse.gsddmm(graph, "mul", out, sums, "e", "v")

    monkeypatch.setattr(sparse, "_edge_softmax_backward", backward)


def attention(name, graph="random", **options):
    graph = graph_named(graph)
    in_feats = IN if graph.num_src_nodes() == graph.num_dst_nodes() else (IN, IN)
    return layer_pair(name, in_feats, dtype=F64, **options_for(name, **options)), graph, ()


def sums(name, *args, graph="random", weighted=False, **options):
    graph = graph_named(graph)
    weight = torch.rand(graph.num_edges(), generator=torch.Generator().manual_seed(2), dtype=F64)
    return sum_pair(name, args, F64, **options), graph, (None, weight) if weighted else ()


def relations(normed=False, **options):
    graph = graph_named("random")
    norm = (test_dgl_relational.norm_of(graph, F64),) if normed else ()
    return test_dgl_relational.layer_pair(F64, **options), graph, (test_dgl_relational.types_of(graph), *norm)


CASES = {
    **{name: lambda name=name: attention(name) for name in LAYERS},
    **{f"{name} pair": lambda name=name: attention(name, "bipartite") for name in LAYERS},
    "GATConv residual": lambda: attention("GATConv", residual=True, activation=torch.tanh),
    "GATv2Conv shared": lambda: attention("GATv2Conv", share_weights=True),
    "AGNNConv": lambda: (test_dgl_agnn.layers(F64), graph_named("random"), ()),
    "GraphConv both": lambda: sums("GraphConv", IN, 7),
    "GraphConv weights": lambda: sums("GraphConv", IN, 3, norm="right", weighted=True),
    **{f"SAGEConv {kind}": lambda kind=kind: sums("SAGEConv", IN, 3, kind) for kind in ("mean", "gcn", "pool")},
    **{
        f"GINConv {kind}": lambda kind=kind: sums("GINConv", None, kind, learn_eps=True)
        for kind in ("sum", "mean", "max")
    },
    "RelGraphConv": relations,
    "RelGraphConv basis": lambda: relations(True, regularizer="basis", num_bases=3),
    "RelGraphConv bdd": lambda: relations(regularizer="bdd", num_bases=2, layer_norm=True),
}


def derivatives_of(layer, graph, feat, rest, device="cpu", order=2):
    """Up to an order, by all inputs and parameters."""
    leaves = []

    def on_device(value):
        if isinstance(value, (tuple, list)):
            return type(value)(map(on_device, value))
        if isinstance(value, dict):
            return {key: on_device(v) for key, v in value.items()}
        if value is None:
            return None
        value = value.detach().to(device)
        if value.is_floating_point():
            leaves.append(value.requires_grad_())
        return value

    given = on_device(feat), *on_device(rest)
    out = layer.to(device)(graph.to(device), *given)
    return derivatives(list(out.values()) if isinstance(out, dict) else out, [*leaves, *layer.parameters()], order)


def assert_parity(pair, graph, feat, rest, device):
    theirs, ours = pair
    with edgeless.backend("fused"):
        found = derivatives_of(ours, graph, feat, rest, device)
    assert_same_derivatives(found, derivatives_of(theirs, graph, feat, rest))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_every_layer(case, device, whole_softmax):
    pair, graph, rest = CASES[case]()
    sizes = (test_dgl_relational.IN,) * 2 if case.startswith("Rel") else (IN, IN)
    assert_parity(pair, graph, features(graph, F64, sizes=sizes), rest, device)


@pytest.mark.parametrize("device", DEVICES)
def test_transformers_over_relations(device, whole_softmax):
    graph = graph_named("random")
    x, *rest = test_dgl_hgt.inputs_of(graph, F64)
    assert_parity(test_dgl_hgt.layer_pair(dtype=F64, use_norm=True), graph, x, tuple(rest), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["GraphConv both", "SAGEConv mean", "GATv2Conv"])
def test_graphs_of_several_relations(name, device, whole_softmax):
    layer, options = {**test_dgl_hetero.LAYERS, **test_dgl_hetero.OTHERS}[name]
    if layer != "SAGEConv":
        options = {**options, "allow_zero_in_degree": True}
    graph = test_dgl_hetero.hetero()
    pair = test_dgl_hetero.pair_of(layer, F64, **options)
    assert_parity(pair, graph, test_dgl_hetero.nodes_of(graph, F64), (), device)


@pytest.mark.parametrize("device", DEVICES)
def test_typed_maps(device):
    types = torch.tensor([3, 0, 0, 3, 1, 3, 0] * 9)
    pair = [package.TypedLinear(6, 4, 4) for package in (dgl.nn, edgeless.dgl.nn)]
    pair[1].load_state_dict(pair[0].state_dict())
    x = torch.randn(63, 6, dtype=F64, generator=torch.Generator().manual_seed(1))
    found = []
    for layer, where in zip(pair, ("cpu", device), strict=True):
        leaf = x.to(where).requires_grad_()
        out = layer.to(F64).to(where)(leaf, types.to(where))
        found.append(derivatives(out, [leaf, *layer.parameters()]))
    assert_same_derivatives(found[1], found[0])


def test_gradgradcheck_where_the_stock_layer_is_wrong():
    """Layers of attention on the CPU: DGL's second derivatives are none, without a word."""
    graph = dgl.graph(([0, 1, 2, 2, 0], [1, 1, 1, 0, 0]))
    theirs, ours = layer_pair("GATConv", 2, 2, 1, F64)
    feat = torch.randn(3, 2, dtype=F64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    with edgeless.backend("fused"):
        assert torch.autograd.gradgradcheck(lambda x: ours(graph, x), feat)
    assert not torch.autograd.gradgradcheck(lambda x: theirs(graph, x), feat, raise_exception=False)
