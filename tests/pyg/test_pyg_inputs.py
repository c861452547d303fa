"""Every kind of graph that PyG's layers take, and an edgeless.Graph: results, returned attention, caches."""

import numpy as np
import pytest
import torch
import torch_geometric.nn as stock
from pyg_cases import (
    GRAPHS,
    IN,
    LAYERS,
    assert_close,
    edge_features,
    layer_pair,
    node_features,
    random_edges,
    run,
    run_fused,
)
from sum_cases import construct
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.typing import WITH_TORCH_SPARSE, SparseTensor
from torch_geometric.utils import to_torch_coo_tensor, to_torch_csr_tensor

import edgeless
import edgeless.pyg.nn as fused

ROOT_GRAPHS = ("random", "self_loops", "isolated", "no_edges", "bipartite")
needs_torch_sparse = pytest.mark.skipif(not WITH_TORCH_SPARSE, reason="needs torch_sparse")


def _coo(graph, values=None):
    edge_index, num_src, num_dst = graph
    return to_torch_coo_tensor(edge_index.flip(0), values, size=(num_dst, num_src))


def _csr(graph, values=None):
    edge_index, num_src, num_dst = graph
    return to_torch_csr_tensor(edge_index.flip(0), values, size=(num_dst, num_src))


def _csr_with_multi_edges(graph, values=None):
    edge_index, num_src, num_dst = graph
    order = edge_index[1].argsort(stable=True)
    indptr = torch.zeros(num_dst + 1, dtype=torch.int64)
    indptr[1:] = edge_index[1].bincount(minlength=num_dst).cumsum(0)
    values = torch.ones(order.numel()) if values is None else values[order]
    return torch.sparse_csr_tensor(
        indptr, edge_index[0][order], values, size=(num_dst, num_src, *values.shape[1:]), check_invariants=False
    )


def _sparse_tensor(graph, values=None):
    edge_index, num_src, num_dst = graph
    return SparseTensor(row=edge_index[1], col=edge_index[0], value=values, sparse_sizes=(num_dst, num_src))


def _edge_index(graph, values=None, sort_order=None):
    edge_index, num_src, num_dst = graph
    if sort_order:
        edge_index = edge_index[:, edge_index[int(sort_order == "col")].argsort(stable=True)]
    return EdgeIndex(edge_index, sparse_size=(num_src, num_dst), sort_order=sort_order)


KINDS = {
    "torch_coo": _coo,
    "torch_csr": _csr,
    "torch_csr_multi_edges": _csr_with_multi_edges,
    "torch_sparse": _sparse_tensor,
    "edge_index": _edge_index,
    "edge_index_by_row": lambda g, v=None: _edge_index(g, v, "row"),
    "edge_index_by_col": lambda g, v=None: _edge_index(g, v, "col"),
}
SPARSE = ("torch_coo", "torch_csr", "torch_csr_multi_edges", "torch_sparse")
kinds = pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[needs_torch_sparse] if k == "torch_sparse" else []) for k in KINDS]
)


def _structure(result):
    """What a layer returned beside numbers: types, index tensors, sizes."""
    if isinstance(result, (tuple, list)):
        return type(result), *(_structure(r) for r in result)
    if isinstance(result, EdgeIndex):
        return EdgeIndex, result.sparse_size(), result.sort_order, result.as_tensor().tolist()
    if isinstance(result, SparseTensor):
        row, col, value = result.coo()
        return SparseTensor, result.sizes(), row.tolist(), col.tolist(), value.shape
    if result.layout == torch.sparse_coo:
        return torch.sparse_coo, result.shape, result.indices().tolist()
    if result.layout == torch.sparse_csr:
        return torch.sparse_csr, result.shape, result.crow_indices().tolist(), result.col_indices().tolist()
    return type(result), result.dtype, result.tolist() if not result.is_floating_point() else result.shape


def _assert_same(theirs, ours, *inputs, **kwargs):
    assert_close(run_fused(ours, *inputs, **kwargs), run(theirs, theirs, *inputs, **kwargs))
    with torch.no_grad():
        assert _structure(ours(*inputs, **kwargs)) == _structure(theirs(*inputs, **kwargs))


@kinds
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("graph", ROOT_GRAPHS)
@pytest.mark.parametrize("loops", (True, False))
def test_kinds(kind, name, graph, loops):
    graph = GRAPHS[graph]
    if kind == "torch_csr_multi_edges" and loops and graph is GRAPHS["self_loops"]:
        loops = False  # adding loops makes PyG coalesce, and its values, not the layer's result, depend on that
    options = {} if name == "TransformerConv" else {"add_self_loops": loops}
    theirs, ours = layer_pair(name, dtype=torch.float64, **options)
    x = node_features(graph, torch.float64)
    for attention in (None, True, False):
        _assert_same(theirs, ours, x, KINDS[kind](graph), return_attention_weights=attention)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("loops", (True, False))
@pytest.mark.parametrize("index", ("int64", "int32"))
def test_plain_tensor_attention_structure(name, loops, index):
    graph = GRAPHS["self_loops"]
    options = {} if name == "TransformerConv" else {"add_self_loops": loops}
    theirs, ours = layer_pair(name, **options)
    edge_index = graph[0].to(getattr(torch, index))
    with torch.no_grad():
        for attention in (None, True, False, 0, 1):
            have, want = (
                m(node_features(graph), edge_index, return_attention_weights=attention) for m in (ours, theirs)
            )
            assert _structure(have) == _structure(want)


@pytest.mark.parametrize("kind", [k for k in SPARSE if k != "torch_sparse" or WITH_TORCH_SPARSE])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("explicit", (True, False))
def test_values_are_edge_features(kind, name, explicit):
    """Values of two dimensions feed edge_attr, unless edge_attr is given."""
    graph = GRAPHS["random"]
    graph = (graph[0].unique(dim=1), *graph[1:])
    values = edge_features(graph, 2, torch.float64)
    options = {} if name == "TransformerConv" else {"add_self_loops": False}
    theirs, ours = layer_pair(name, dtype=torch.float64, edge_dim=2, **options)
    x = node_features(graph, torch.float64)
    adj_t = KINDS[kind](graph, values)
    attr = values.flip(0) if explicit else None
    attention = None if kind == "torch_coo" and name != "TransformerConv" else True  # the stock layer cannot return it
    _assert_same(theirs, ours, x, adj_t, attr, return_attention_weights=attention)


@pytest.mark.parametrize("kind", [k for k in SPARSE if k != "torch_sparse" or WITH_TORCH_SPARSE])
@pytest.mark.parametrize("name", ("GATv2Conv", "GATConv"))
def test_values_of_one_dimension_are_no_edge_features(kind, name):
    graph = GRAPHS["random"]
    graph = (graph[0].unique(dim=1), *graph[1:])
    values = edge_features(graph, 1, torch.float64).squeeze(1)
    theirs, ours = layer_pair(name, dtype=torch.float64, edge_dim=1, add_self_loops=False)
    _assert_same(theirs, ours, node_features(graph, torch.float64), KINDS[kind](graph, values))


def test_gradient_reaches_the_values():
    graph = GRAPHS["random"]
    graph = (graph[0].unique(dim=1), *graph[1:])
    theirs, ours = layer_pair("TransformerConv", dtype=torch.float64, edge_dim=2)
    x = node_features(graph, torch.float64)
    grads = []
    for layer in (theirs, ours):
        values = edge_features(graph, 2, torch.float64).requires_grad_()
        layer(x, _coo(graph, values)).square().sum().backward()
        grads.append(values.grad)
    torch.testing.assert_close(*grads)


@kinds
@pytest.mark.parametrize("name", LAYERS)
def test_second_call_builds_nothing(kind, name):
    graph = GRAPHS["random"]
    theirs, ours = layer_pair(name)
    index = KINDS[kind](graph)
    x = node_features(graph)
    first = ours(x, index)
    built = edgeless.cache_info().misses
    assert torch.equal(ours(x, index), first)
    assert edgeless.cache_info().misses == built


@pytest.mark.parametrize("name", LAYERS)
def test_edited_graphs_give_new_answers(name):
    theirs, ours = layer_pair(name)
    x = node_features(GRAPHS["random"])

    def check(index):
        torch.testing.assert_close(ours(x, index), theirs(x, index))

    edge_index = GRAPHS["random"][0].clone()
    check(edge_index)
    edge_index[0, 3] = (edge_index[0, 3] + 1) % 40
    check(edge_index)
    edge_index[1].copy_(edge_index[1].flip(0))
    check(edge_index)
    edge_index.set_(GRAPHS["random"][0][:, :50].contiguous())
    check(edge_index)
    edge_index.resize_(2, 20)
    check(edge_index)

    index = EdgeIndex(GRAPHS["random"][0].clone(), sparse_size=(40, 40))
    check(index)
    index[0, 0] = (int(index.as_tensor()[0, 0]) + 1) % 40
    check(index)
    index.as_tensor()[1, 5] = (int(index.as_tensor()[1, 5]) + 1) % 40
    check(index)

    csr = _csr(GRAPHS["random"])
    check(csr)
    columns = csr.col_indices()
    start = int(csr.crow_indices()[3])
    columns[start] = min(int(columns[start]), int(columns[start + 1]) - 1)  # in place, still sorted
    check(csr)

    coo = _coo(GRAPHS["random"])
    check(coo)
    coo.indices()[1, -1] = 39 - int(coo.indices()[1, -1])
    check(coo)

    if WITH_TORCH_SPARSE:
        adj_t = _sparse_tensor(GRAPHS["random"])
        check(adj_t)
        adj_t.storage.col()[-1] = 39 - int(adj_t.storage.col()[-1])
        check(adj_t)


@pytest.mark.parametrize("name", LAYERS)
def test_another_number_of_nodes_is_another_graph(name):
    theirs, ours = layer_pair(name)
    edge_index = GRAPHS["multi_edges"][0]
    for num_nodes in (3, 8, 3, 5):
        x = torch.randn(num_nodes, IN)
        torch.testing.assert_close(ours(x, edge_index), theirs(x, edge_index))


def test_one_graph_for_layers_with_and_without_loops():
    edge_index = GRAPHS["self_loops"][0]
    x = node_features(GRAPHS["self_loops"])
    for loops in (True, False, True):
        for flow in ("source_to_target", "target_to_source"):
            theirs, ours = layer_pair("GATv2Conv", add_self_loops=loops, flow=flow)
            torch.testing.assert_close(ours(x, edge_index), theirs(x, edge_index))


def test_inference_tensors():
    theirs, ours = layer_pair("GATv2Conv")
    with torch.inference_mode():
        edge_index, x = GRAPHS["random"][0].clone(), node_features(GRAPHS["random"])
        for _ in range(2):
            torch.testing.assert_close(ours(x, edge_index), theirs(x, edge_index))
        edge_index[0, 0] = 39 - edge_index[0, 0]
        torch.testing.assert_close(ours(x, edge_index), theirs(x, edge_index))


# edgeless.Graph --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("graph", ("random", "self_loops", "bipartite", "no_edges"))
@pytest.mark.parametrize("edge_dim", (None, 2))
def test_graph_handle(name, graph, edge_dim):
    graph = GRAPHS[graph]
    theirs, ours = layer_pair(name, dtype=torch.float64, edge_dim=edge_dim)
    x = node_features(graph, torch.float64)
    attr = None if edge_dim is None else edge_features(graph, edge_dim, torch.float64)
    handle = edgeless.Graph.from_edge_index(*graph)
    with edgeless.backend("fused"):
        have = run(ours, ours, x, handle, attr, return_attention_weights=True)
    assert_close(have, run(theirs, theirs, x, graph[0], attr, return_attention_weights=True))
    with torch.no_grad():
        have = ours(x, handle, attr, return_attention_weights=True)
        want = theirs(x, graph[0], attr, return_attention_weights=True)
    assert _structure(have) == _structure(want)


@pytest.mark.parametrize("name", LAYERS)
def test_graph_handle_on_the_stock_path(name):
    graph = GRAPHS["bipartite"]
    theirs, ours = layer_pair(name)
    handle = edgeless.Graph.from_edge_index(*graph)
    with edgeless.backend("reference"):
        torch.testing.assert_close(ours(node_features(graph), handle), theirs(node_features(graph), graph[0]))


def test_graph_handle_without_target_features():
    graph = GRAPHS["bipartite"]
    theirs, ours = layer_pair("GATConv")
    inputs = (node_features(graph)[0], None)
    handle = edgeless.Graph.from_edge_index(*graph)
    want = theirs(inputs, graph[0], size=graph[1:])
    for backend in ("fused", "reference"):
        with edgeless.backend(backend):
            torch.testing.assert_close(ours(inputs, handle), want)


def test_graph_handle_errors():
    graph = GRAPHS["random"]
    handle = edgeless.Graph.from_edge_index(*graph)
    _, ours = layer_pair("GATv2Conv", flow="target_to_source")
    for backend in ("auto", "reference"):
        with (
            edgeless.backend(backend),
            pytest.raises(ValueError, match=r"edge_index: .* got 'target_to_source'; pass graph.reverse\(\)"),
        ):
            ours(node_features(graph), handle)
    _, ours = layer_pair("GATv2Conv")
    with pytest.raises(ValueError, match=r"x_l must have shape \[Ns, H, C\] = \[40, \*, \*\], got \[7, 3, 4\]"):
        ours(torch.randn(7, IN), handle)


def test_kinds_are_what_they_say():
    assert isinstance(_edge_index(GRAPHS["random"], None, "col"), EdgeIndex)
    assert isinstance(_coo(GRAPHS["random"]), Tensor) and _coo(GRAPHS["random"]).layout == torch.sparse_coo
    assert _csr_with_multi_edges(GRAPHS["multi_edges"]).values().numel() == 7


# Sizes and orders of an EdgeIndex --------------------------------------------------------------------------------

_ALL = ("GATConv", "GATv2Conv", "TransformerConv", "AGNNConv", "GCNConv", "SAGEConv", "GINConv", "GraphConv")


@pytest.mark.parametrize("name", _ALL)
@pytest.mark.parametrize("flow", ("source_to_target", "target_to_source"))
@pytest.mark.parametrize("sort_order", (None, "row", "col"))
def test_edge_index_of_every_order_size_and_flow(name, flow, sort_order):
    """In float32 for GraphConv: PyG multiplies by an EdgeIndex in no other dtype."""
    dtype = torch.float32 if name == "GraphConv" else torch.float64
    src, dst = random_edges(8, 8, 20).sort(dim=0).values
    bipartite, symmetric = torch.stack((src, dst % 5)), torch.stack((src, dst))
    symmetric = torch.cat((symmetric, symmetric.flip(0)), 1).unique(dim=1)
    for edges, num_dst, sizes, is_undirected in (
        (bipartite, 5, (8, 5), False),
        (bipartite, 5, (None, None), False),
        (symmetric, 8, (8, 8), sort_order is not None),
        (symmetric, 9, (None, None), False),
    ):
        if sort_order is not None:
            edges = edges[:, edges[int(sort_order == "col")].argsort(stable=True)]
        edges, order = edges.contiguous(), {"sort_order": sort_order, "is_undirected": is_undirected}
        for x, kwargs in _calls(name, max(8, num_dst), num_dst, dtype):
            theirs, ours = (_construct(package, name, isinstance(x, tuple), flow) for package in (stock, fused))
            ours.load_state_dict(theirs.state_dict())
            theirs, ours = theirs.to(dtype), ours.to(dtype)
            have, want = (  # a new one for each, for PyG may write the size that it finds into it
                _outcome(layer, x, EdgeIndex(edges, sparse_size=sizes, **order), **kwargs) for layer in (ours, theirs)
            )
            if isinstance(have, dict) and not isinstance(want, dict):  # for the sizes of an EdgeIndex, or of its loops
                size = {"size": (None, sizes[1])} if "size" in kwargs else {}
                want = _outcome(theirs, x, edges, **size)
            if isinstance(want, dict) and isinstance(have, dict):
                assert have["output 0"].shape == want["output 0"].shape, f"{sizes}, {kwargs}"
                assert_close(have, want)
            else:
                assert isinstance(have, type) and have == want, (
                    f"{sizes}, {kwargs}: {have if isinstance(have, type) else 'a result'}"
                )


@pytest.mark.parametrize("name", _ALL)
@pytest.mark.parametrize("sizes", [(9, 8), (8, 9), (9, None), (None, 9)], ids=str)
def test_one_size_of_an_edge_index_that_does_not_fit(name, sizes):
    edges, x = random_edges(8, 8, 20), torch.randn(8, IN)
    theirs, ours = (_construct(package, name, False, "source_to_target") for package in (stock, fused))
    ours.load_state_dict(theirs.state_dict())
    assert "other sizes than the node features" in str(edgeless.explain(ours, x, EdgeIndex(edges, sparse_size=sizes)))
    have, want = (_outcome(layer, x, EdgeIndex(edges, sparse_size=sizes)) for layer in (ours, theirs))
    if isinstance(want, dict):
        assert_close(have, want)
    else:
        assert have == want


@pytest.mark.parametrize("name", ["GATConv", "GATv2Conv"])
@pytest.mark.parametrize("kind", ["bipartite", "bipartite_more_targets"])
def test_attention_of_loops_that_were_added_between_two_sets(name, kind):
    graph = GRAPHS[kind]
    theirs, ours = layer_pair(name, (IN, IN))
    x = node_features(graph)
    with edgeless.backend("fused"):
        out, (edges, alpha) = ours(x, graph[0], return_attention_weights=True)
    want, (their_edges, their_alpha) = theirs(x, graph[0], return_attention_weights=True)
    assert torch.equal(edges, their_edges)
    torch.testing.assert_close((out, alpha), (want, their_alpha))


def _outcome(layer, *inputs, **kwargs):
    try:
        return run(layer, layer, *inputs, **kwargs)
    except (RuntimeError, ValueError, IndexError) as error:
        return type(error)


def _calls(name, num_src, num_dst, dtype):
    """(features, other arguments) that a layer takes for so many nodes."""
    x, x_dst = torch.randn(num_src, IN, dtype=dtype), torch.randn(num_dst, IN, dtype=dtype)
    if num_src == num_dst:
        yield x, {}
    if name in ("AGNNConv", "GCNConv"):
        return
    yield (x, x_dst), {}
    if name in ("GATConv", "SAGEConv", "GINConv", "GraphConv"):
        for size in (None, (num_src, num_dst), (num_src, 3)):
            yield (x, None), {"size": size}


def _construct(package, name, pair, flow):
    width = (IN, IN) if pair and name != "GINConv" else IN
    layer = package.AGNNConv(flow=flow) if name == "AGNNConv" else construct(package, name, width, flow=flow)
    return layer


# Layouts of features, kinds of numbers ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", _ALL)
@pytest.mark.parametrize("layout", ("coo", "csr", "mkldnn"))
def test_features_that_are_not_dense(name, layout):
    """In float32, whose large maps are an op of edgeless: linear maps are torch's, what comes after them is fused."""
    graph = GRAPHS["random"]
    x = {"coo": Tensor.to_sparse, "csr": Tensor.to_sparse_csr, "mkldnn": Tensor.to_mkldnn}[layout](node_features(graph))
    theirs, ours = (_construct(package, name, False, "source_to_target") for package in (stock, fused))
    ours.load_state_dict(theirs.state_dict())
    maps_first = name in (*LAYERS, "GCNConv") and layout != "mkldnn"
    reason = f"the source features have the layout torch.{'' if layout == 'mkldnn' else 'sparse'}_{layout}"
    explanation = edgeless.explain(ours, x, graph[0])
    assert explanation.fused == maps_first and (maps_first or reason in explanation.reasons)
    have, want = _outcome(ours, x, graph[0]), _outcome(theirs, x, graph[0])
    if isinstance(want, type):
        assert have == want
    else:
        assert_close(have, want)


@pytest.mark.parametrize("number", (np.int64, np.int32, torch.tensor, lambda n: torch.tensor(n, dtype=torch.int32)))
@pytest.mark.parametrize("name", ("GATConv", "SAGEConv", "GINConv", "GraphConv"))
@pytest.mark.parametrize("form", (tuple, list))
def test_sizes_that_are_not_ints(name, number, form):
    x, _ = node_features(GRAPHS["bipartite"], torch.float64)
    theirs, ours = (_construct(package, name, True, "source_to_target") for package in (stock, fused))
    ours.load_state_dict(theirs.state_dict())
    inputs, size = ((x, None), GRAPHS["bipartite"][0]), form(map(number, (20, 11)))
    with edgeless.backend("fused"):
        have = run(ours.double(), ours, *inputs, size=size)
    assert_close(have, run(theirs.double(), theirs, *inputs, size=size))


@pytest.mark.parametrize("layout", (_coo, _csr))
@pytest.mark.parametrize("name", ("GATv2Conv", "GATConv"))
def test_loops_in_a_sparse_matrix_with_edge_attr(name, layout):
    graph = GRAPHS["random"]
    theirs, ours = layer_pair(name, edge_dim=2)
    inputs = (node_features(graph), layout(graph), edge_features(graph))
    for layer in (theirs, ours):
        with pytest.raises(AssertionError):
            layer(*inputs)
    assert "edge_attr is given" in str(edgeless.explain(ours, *inputs))
