"""Bad input: the stock layer's error where the stock layer has one, and an error that names the trouble where not."""

import pytest
import torch
from pyg_cases import GRAPHS, IN, LAYERS, edge_features, layer_pair, node_features
from torch_geometric import EdgeIndex
from torch_geometric.typing import WITH_TORCH_SPARSE, SparseTensor
from torch_geometric.utils import to_torch_coo_tensor

import edgeless

GRAPH = GRAPHS["random"]
X, EDGES = node_features(GRAPH), GRAPH[0]
ATTENTION = ("GATv2Conv", "GATConv")


def assert_same_error(name, expected, *inputs, match=None, **options):
    """Both layers raise ``expected``; ours with ``match`` in the message."""
    theirs, ours = layer_pair(name, **options)
    with pytest.raises(expected):
        theirs(*inputs)
    with pytest.raises(expected, match=match):
        ours(*inputs)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", (torch.int64, torch.int32))
@pytest.mark.parametrize("bad,match", ((40, "40"), (-1, "-1"), (2**31 - 1, "2147483647")))
@pytest.mark.parametrize("row", (0, 1))
def test_ids_out_of_range(name, dtype, bad, match, row):
    edge_index = EDGES.clone()
    edge_index[row, 7] = bad
    _, ours = layer_pair(name)
    for _ in range(2):  # not only when the graph is built first
        with pytest.raises(IndexError, match=match):
            ours(X, edge_index.to(dtype))
    # Of destinations the stock GAT layers raise what scatter raises.
    expected = IndexError if name == "TransformerConv" or row == 0 else (IndexError, RuntimeError)
    with pytest.raises(expected):
        layer_pair(name)[0](X, edge_index)


@pytest.mark.parametrize("name", LAYERS)
def test_ids_of_a_graph_that_was_right_for_more_nodes(name):
    _, ours = layer_pair(name)
    ours(X, EDGES)
    with pytest.raises(IndexError):
        ours(X[:30], EDGES)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(
    "edge_index,expected",
    (
        (EDGES.float(), ValueError),
        (EDGES[0], ValueError),
        (torch.zeros(3, 7, dtype=torch.int64), ValueError),
        (EDGES.tolist(), (ValueError, AttributeError, NotImplementedError)),
        (None, (ValueError, AttributeError, NotImplementedError)),
    ),
    ids=("float", "one row", "three rows", "list", "None"),
)
def test_edge_index_of_a_wrong_kind(name, edge_index, expected):
    options = {} if name == "TransformerConv" else {"add_self_loops": False}
    assert_same_error(name, expected, X, edge_index, **options)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(
    "x", (None, torch.randn(40, IN + 1), X.double(), X.long()), ids=("None", "width", "f64", "int")
)
def test_features_of_a_wrong_kind(name, x):
    assert_same_error(name, (RuntimeError, TypeError), x, EDGES)


@pytest.mark.parametrize("name", ATTENTION)
def test_static_graphs(name):
    assert_same_error(name, AssertionError, X.expand(2, 40, IN), EDGES)
    assert_same_error(name, AssertionError, (X.expand(2, 40, IN), X), EDGES)


def test_missing_target_features():
    assert_same_error("GATv2Conv", AssertionError, (X, None), EDGES)
    assert_same_error("TransformerConv", (TypeError, AttributeError), (X, None), EDGES)


@pytest.mark.parametrize("name", ATTENTION)
def test_gat_sizes(name):
    if name == "GATConv":
        assert_same_error(name, ValueError, X, EDGES, None, (40, 41))
        assert_same_error(name, ValueError, (X, None), EDGES, None, (41, 40))
        assert_same_error(name, TypeError, X, EDGES, None, (40, None))


def test_edge_features_that_do_not_fit():
    attr = edge_features(GRAPH)
    assert_same_error("GATv2Conv", AssertionError, X, EDGES, attr)
    assert_same_error("TransformerConv", AssertionError, X, EDGES, edge_dim=2)
    assert_same_error("TransformerConv", RuntimeError, X, EDGES, attr)
    for name in LAYERS:
        assert_same_error(name, (RuntimeError, IndexError), X, EDGES, attr[:-1], edge_dim=2)
        assert_same_error(name, RuntimeError, X, EDGES, edge_features(GRAPH, 3), edge_dim=2)
        assert_same_error(name, RuntimeError, X, EDGES, attr.double(), edge_dim=2)
        options = {} if name == "TransformerConv" else {"fill_value": 1}
        assert_same_error(name, RuntimeError, X, EDGES, attr.long(), edge_dim=2, **options)
    assert_same_error("GATConv", IndexError, X, EDGES, attr[:-1])


@pytest.mark.parametrize("name", ATTENTION)
def test_fill_values_that_do_not_fit(name):
    attr = edge_features(GRAPH)
    assert_same_error(name, AttributeError, X, EDGES, attr, edge_dim=2, fill_value=[1.0])
    assert_same_error(name, ValueError, X, EDGES, attr, edge_dim=2, fill_value="median")
    assert_same_error(name, RuntimeError, X, EDGES, attr, edge_dim=2, fill_value=torch.ones(3))
    graph = GRAPHS["bipartite_more_targets"]  # a target without a loop has features to reduce: the stock layer raises
    assert_same_error(name, RuntimeError, node_features(graph), graph[0], edge_features(graph), edge_dim=2)


@pytest.mark.parametrize("name", LAYERS)
def test_sparse_matrices_that_do_not_fit(name):
    options = {} if name == "TransformerConv" else {"add_self_loops": False}
    adj_t = to_torch_coo_tensor(EDGES.flip(0), size=(40, 40))
    assert_same_error(name, ValueError, X, adj_t, flow="target_to_source", **options)
    assert_same_error(name, ValueError, X, adj_t.to_sparse_csc(), **options)
    assert_same_error(name, ValueError, X[:39], adj_t, **options)
    uncoalesced = torch.sparse_coo_tensor(EDGES.flip(0), torch.ones(EDGES.size(1)), (40, 40), check_invariants=True)
    assert_same_error(name, RuntimeError, X, uncoalesced, **options)
    if WITH_TORCH_SPARSE:
        adj_t = SparseTensor(row=EDGES[1], col=EDGES[0], sparse_sizes=(40, 40))
        assert_same_error(name, ValueError, X, adj_t, flow="target_to_source", **options)
        assert_same_error(name, ValueError, X[:39], adj_t, **options)


@pytest.mark.skipif(not WITH_TORCH_SPARSE, reason="needs torch_sparse")
@pytest.mark.parametrize("name", ATTENTION)
def test_sparse_tensor_with_edge_features_and_self_loops(name):
    adj_t = SparseTensor(row=EDGES[1], col=EDGES[0], sparse_sizes=(40, 40))
    assert_same_error(name, NotImplementedError, X, adj_t, edge_dim=2)


@pytest.mark.parametrize("name", LAYERS)
def test_edge_index_with_other_sizes(name):
    options = {} if name == "TransformerConv" else {"add_self_loops": False}
    assert_same_error(name, ValueError, X, EdgeIndex(EDGES, sparse_size=(41, 41)), **options)


@pytest.mark.parametrize("name", LAYERS)
def test_dropout_out_of_range(name):
    assert_same_error(name, ValueError, X, EDGES, dropout=1.5)


def test_explain_never_raises():
    _, ours = layer_pair("GATv2Conv")
    for inputs in ((None, None), (X, None), ((X,), EDGES), (X, EDGES, "attr"), (3, 4, 5), ((X, X, X), EDGES)):
        assert not edgeless.explain(ours, *inputs)
