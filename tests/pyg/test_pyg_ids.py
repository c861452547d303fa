"""int32 ids against the stock layer on int64: torch's gather and scatter compute other gradients with int32 ids."""

import pytest
import torch
import torch_geometric.nn as stock
from pyg_cases import GRAPHS, IN, LAYERS, OUT, assert_close, edge_features, layer_pair, node_features, run
from sum_cases import SUMS, sum_pair, weights_of
from torch_geometric import EdgeIndex

import edgeless
import edgeless.pyg.nn as fused

GRAPH = GRAPHS["random"]
NAMES = (*LAYERS, "AGNNConv", *SUMS)


def _pair(name, **options):
    if name in LAYERS:
        return layer_pair(name, dtype=torch.float64, edge_dim=2, **options)
    if name == "AGNNConv":
        return stock.AGNNConv(**options).double(), fused.AGNNConv(**options).double()
    return sum_pair(name, dtype=torch.float64, **options)


def _rest(name):
    if name in LAYERS:
        return (edge_features(GRAPH, dtype=torch.float64),)
    return (weights_of(GRAPH, torch.float64),) if name in ("GCNConv", "GraphConv") else ()


def _csr(ids):
    edges = GRAPH[0].flip(0).unique(dim=1)
    pointers = torch.zeros(GRAPH[2] + 1, dtype=torch.int64)
    pointers[1:] = edges[0].bincount(minlength=GRAPH[2]).cumsum(0)
    values = torch.linspace(0.5, 1.5, edges.size(1), dtype=torch.float64)
    return torch.sparse_csr_tensor(pointers.to(ids), edges[1].to(ids), values, (GRAPH[2], GRAPH[1]))


KINDS = {
    "tensor": lambda ids: GRAPH[0].to(ids),
    "edge_index": lambda ids: EdgeIndex(GRAPH[0].to(ids), sparse_size=GRAPH[1:]),
    "csr": _csr,
}
REFUSED = {  # options and calls that no kernel covers
    "hook": lambda layer: layer.register_message_forward_hook(lambda module, inputs, output: output * 2),
    "aggregation": lambda layer: setattr(layer, "aggr_module", stock.aggr.MulAggregation()),
}


@pytest.mark.parametrize("path", ("fused", "reference", *REFUSED))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_gradients(name, kind, path):
    theirs, ours = _pair(name)
    x, rest = node_features(GRAPH, torch.float64), _rest(name)
    if kind == "csr":
        theirs, ours, rest = (*layer_pair(name, dtype=torch.float64), ()) if name in LAYERS else (theirs, ours, ())
    if path in REFUSED:
        for layer in (theirs, ours):
            REFUSED[path](layer)
    want = run(theirs, theirs, x, KINDS[kind](torch.int64), *rest)
    with edgeless.backend(path if path == "reference" else "auto"):
        assert bool(edgeless.explain(ours, x, KINDS[kind](torch.int32), *rest)) == (path == "fused")
        assert_close(run(ours, ours, x, KINDS[kind](torch.int32), *rest), want)


@pytest.mark.parametrize("name", ("GATConv", "GATv2Conv"))
@pytest.mark.parametrize("fill_value", ("mean", "add", "sum", "min", "max", "mul", 0.5))
@pytest.mark.parametrize("kind", ("tensor", "edge_index"))
def test_features_of_added_loops(name, fill_value, kind):
    theirs, ours = _pair(name, fill_value=fill_value)
    x, attr = node_features(GRAPH, torch.float64), edge_features(GRAPH, dtype=torch.float64)
    want = run(theirs, theirs, x, KINDS[kind](torch.int64), attr)
    with edgeless.backend("fused"):
        assert_close(run(ours, ours, x, KINDS[kind](torch.int32), attr), want)


@pytest.mark.parametrize("loops", (True, False))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LAYERS)
def test_returned_ids_have_the_stock_layers_dtype(name, kind, loops):
    options = {} if name == "TransformerConv" else {"add_self_loops": loops}
    theirs, ours = layer_pair(name, dtype=torch.float64, **options)
    x, index = node_features(GRAPH, torch.float64), KINDS[kind](torch.int32)
    given, wide = index, False
    try:
        _, (want, _) = theirs(x, given, return_attention_weights=True)
    except RuntimeError as error:  # PyG hands CSR pointers to torch_scatter, where it is there, which takes int64 alone
        if kind != "csr" or "expected scalar type Long" not in str(error):
            raise
        given, wide = KINDS[kind](torch.int64), True
        _, (want, _) = theirs(x, given, return_attention_weights=True)
    for backend in ("fused", "reference"):
        with edgeless.backend(backend):
            _, (have, _) = ours(x, index, return_attention_weights=True)
        assert type(have) is type(want) and have.layout == want.layout and (have is index) == (want is given)
        ids, expected = (t.col_indices() if kind == "csr" else t for t in (have, want))
        assert ids.dtype == (torch.int32 if wide else expected.dtype)
        assert torch.equal(torch.as_tensor(ids).long(), torch.as_tensor(expected).long())


@pytest.mark.parametrize("first", ("stock", "fused"))
def test_cached_normalisation(first):
    """The stock layer may use what a fused call has kept, and what the stock layer kept before it was swapped."""
    theirs, ours = sum_pair("GCNConv", cached=True, dtype=torch.float64)
    x, weight = node_features(GRAPH, torch.float64), weights_of(GRAPH, torch.float64)
    want = run(theirs, theirs, x, GRAPH[0], weight)
    if first == "stock":
        ours = stock.GCNConv(IN, OUT, cached=True).double()
        ours.load_state_dict(theirs.state_dict())
        ours(x, GRAPH[0].int(), weight)
        edgeless.accelerate(ours)
        with edgeless.backend("reference"):
            have = run(ours, ours, x, GRAPH[0].int())
        have["grad of input[2]"] = want["grad of input[2]"]  # the cached weights came from another tensor
    else:
        have = run(ours, ours, x, GRAPH[0].int(), weight)
    assert_close(have, want)


@pytest.mark.parametrize("index", (True, False))
def test_aggregation(index):
    x = torch.randn(6, 3, dtype=torch.float64)
    ids = {"index": torch.tensor([0, 0, 1, 1, 1, 2])} if index else {"ptr": torch.tensor([0, 2, 5, 6])}
    theirs, ours = stock.aggr.MaxAggregation(), fused.MaxAggregation()
    want = run(lambda x: theirs(x, **ids), theirs, x)
    ids = {name: t.int() for name, t in ids.items()}
    assert_close(run(lambda x: ours(x, **ids), ours, x), want)


def test_a_traced_layer():
    theirs, ours = layer_pair("GATConv", dtype=torch.float64)
    x = node_features(GRAPH, torch.float64)
    traced = torch.jit.trace(ours, (x, GRAPH[0].int()), check_trace=False)
    want = run(lambda x: theirs(x, GRAPH[0]), theirs, x)
    assert_close(run(lambda x: traced(x, GRAPH[0].int()), ours, x), want)
