"""GCN, SAGE, GIN and GraphConv against the stock layers: outputs and all gradients."""

import copy
import itertools

import pytest
import torch
from pyg_cases import GRAPHS, IN, features, node_features, random_edges, run, run_fused
from sum_cases import (
    PAIRS,
    SPARSE,
    SQUARE,
    SUMS,
    WEIGHTED,
    as_sparse,
    assert_same,
    assert_sum_parity,
    distinct,
    graphs_of,
    sum_pair,
    weights_of,
    with_ties,
)
from torch_geometric import EdgeIndex

import edgeless
from edgeless.pyg import neighbors

FULL = (torch.float32, torch.float64)
CASES = [(name, graph) for name in SUMS for graph in graphs_of(name)]


def _grid(**choices):
    return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]


_BOOL = (True, False)
OPTIONS = {
    "GCNConv": [
        options
        for options in _grid(improved=_BOOL, cached=_BOOL, add_self_loops=(None, *_BOOL), normalize=_BOOL, bias=_BOOL)
        if options["normalize"] or not options["add_self_loops"]
    ],
    "SAGEConv": _grid(
        aggr=("mean", "max", "min", "sum", "add"), normalize=_BOOL, root_weight=_BOOL, project=_BOOL, bias=_BOOL
    ),
    "GINConv": _grid(eps=(0.0, -0.7), train_eps=_BOOL, aggr=("add", "sum", "mean", "max", "min")),
    "GraphConv": _grid(aggr=("add", "mean", "max", "min"), bias=_BOOL),
}


@pytest.mark.parametrize("dtype", FULL)
@pytest.mark.parametrize("name,graph", CASES)
def test_shapes(name, graph, dtype):
    assert_sum_parity(name, GRAPHS[graph], dtype=dtype)


@pytest.mark.parametrize("dtype", FULL)
@pytest.mark.parametrize("name,graph", [case for case in CASES if case[0] in WEIGHTED])
def test_weights(name, graph, dtype):
    assert_sum_parity(name, GRAPHS[graph], dtype=dtype, weighted=True)


@pytest.mark.parametrize("aggr", ("max", "min"))
@pytest.mark.parametrize("name,graph", [case for case in CASES if case[0] in PAIRS])
def test_ties(name, graph, aggr):
    assert_sum_parity(name, GRAPHS[graph], dtype=torch.float64, aggr=aggr, ties=True)


@pytest.mark.parametrize("graph", ("self_loops", "isolated", "multi_edges", "bipartite"))
@pytest.mark.parametrize("name", SUMS)
def test_every_combination_of_options(name, graph):
    if graph not in graphs_of(name):
        pytest.skip("GCNConv takes no pairs")
    for options in OPTIONS[name]:
        for weighted in (False, name in WEIGHTED and options.get("aggr") not in ("max", "min")):
            assert_sum_parity(name, GRAPHS[graph], dtype=torch.float64, weighted=weighted, **options)


@pytest.mark.parametrize("graph", ("random", "self_loops", "multi_edges"))
@pytest.mark.parametrize("name", SUMS)
def test_flow(name, graph):
    for weighted in (False, name in WEIGHTED):
        assert_sum_parity(name, GRAPHS[graph], dtype=torch.float64, weighted=weighted, flow="target_to_source")
    if name in PAIRS:
        assert_sum_parity(name, GRAPHS[graph], dtype=torch.float64, pair=True, flow="target_to_source")
    if name == "SAGEConv":
        assert_sum_parity(name, GRAPHS[graph], dtype=torch.float64, project=True, flow="target_to_source")


@pytest.mark.parametrize("graph", ("random", "self_loops", "no_edges"))
@pytest.mark.parametrize("name", SUMS)
def test_int32(name, graph):
    """Against the stock layer on int64: the stock gradient is wrong for int32 indices."""
    graph = GRAPHS[graph]
    theirs, ours = sum_pair(name, dtype=torch.float64)
    inputs = (weights_of(graph, torch.float64),) if name in WEIGHTED else ()
    x = node_features(graph, torch.float64)
    want = run(theirs, theirs, x, graph[0], *inputs)
    have = run_fused(ours, x, graph[0].int(), *inputs)
    for key, value in want.items():
        torch.testing.assert_close(have[key], value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("weighted", _BOOL)
def test_16_bit(name, dtype, weighted):
    """Error against float64 at most twice the stock layer's own."""
    if weighted and name not in WEIGHTED:
        pytest.skip("takes no weights")
    graph = (random_edges(60, 60, 1500), 60, 60)
    theirs, ours = sum_pair(name, 24, 16, dtype=dtype)
    exact, _ = sum_pair(name, 24, 16, dtype=torch.float64)
    exact.load_state_dict({key: value.double() for key, value in theirs.state_dict().items()})
    inputs = [torch.randn(60, 24).to(dtype)] + ([weights_of(graph, dtype)] if weighted else [])
    call = lambda run, layer, x, *rest: run(layer, x, graph[0], *rest)  # noqa: E731
    have = call(run_fused, ours, *inputs)
    stock = call(lambda layer, *args: run(layer, layer, *args), theirs, *inputs)
    truth = call(lambda layer, *args: run(layer, layer, *args), exact, *(t.double() for t in inputs))
    for key, want in truth.items():
        assert have[key].dtype == stock[key].dtype == dtype
        size = float(want.norm())
        error, allowed = (float((found[key].double() - want).norm()) / size for found in (have, stock))
        assert error <= 2 * allowed + 1e-12, f"{key}: {error:.1e}, stock {allowed:.1e}"


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("weighted", _BOOL)
@pytest.mark.parametrize("half", _BOOL)
def test_autocast_dtypes(name, weighted, half):
    if weighted and name not in WEIGHTED:
        pytest.skip("takes no weights")
    graph = GRAPHS["random"]
    x = node_features(graph).to(torch.bfloat16 if half else torch.float32)
    inputs = (weights_of(graph),) if weighted else ()
    for options in ({}, {"aggr": "mean"}, {"project": True}, {"aggr": "max"}):
        if "project" in options and name != "SAGEConv" or options.get("aggr") == "max" and name in WEIGHTED:
            continue
        theirs, ours = sum_pair(name, **options)
        with torch.autocast("cpu", torch.bfloat16), edgeless.backend("fused"):
            have = ours(x, graph[0], *inputs)
        with torch.autocast("cpu", torch.bfloat16):
            want = theirs(x, graph[0], *inputs)
        assert have.dtype == want.dtype, options
        torch.testing.assert_close(have, want, rtol=0.05, atol=0.05)
        have.float().sum().backward()
        assert {p.grad.dtype for p in ours.parameters()} == {torch.float32}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("aggr", ("mean", "sum", "max"))
@pytest.mark.parametrize("size", (None, (20, 11), (20, 20), (20, None), [20, 11]))
def test_size_and_sources_only(name, aggr, size):
    graph = GRAPHS["bipartite"]
    theirs, ours = sum_pair(name, dtype=torch.float64, aggr=aggr)
    x_src, x_dst = node_features(graph, torch.float64)
    assert_same(theirs, ours, (x_src, None), graph[0], size=size)
    if size is None or size[1] in (None, 11):
        assert_same(theirs, ours, (x_src, x_dst), graph[0], size=size)


@pytest.mark.parametrize("name", SUMS)
def test_widths(name):
    graph = GRAPHS["random"]
    for width, channels in ((1, 1), (3, 8), (33, 20), (100, 7)):
        theirs, ours = sum_pair(name, width, channels)
        assert_same(theirs, ours, torch.randn(40, width), graph[0])
    x = torch.randn(IN, 80).t()[::2]  # not contiguous
    for options in ({}, {"aggr": "mean" if name == "GCNConv" else "max"}):
        assert_same(*sum_pair(name, **options), x, graph[0])
        assert_same(*sum_pair(name, **options), torch.randn(1, IN).expand(40, IN), graph[0])


# Weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WEIGHTED)
def test_shapes_of_weights(name):
    graph = GRAPHS["self_loops"]
    x, weights = node_features(graph, torch.float64), weights_of(graph, torch.float64)
    assert_same(*sum_pair(name, dtype=torch.float64), x, graph[0], weights.unsqueeze(1))
    assert_same(*sum_pair(name, dtype=torch.float64), x, graph[0], weights.repeat_interleave(2)[::2])
    assert_same(*sum_pair(name, dtype=torch.float64), x, graph[0], weights.new_full((1,), 0.5).expand(6))


@pytest.mark.parametrize("graph", ("random", "self_loops", "multi_edges"))
@pytest.mark.parametrize("improved", _BOOL)
def test_gcn_weights_that_need_no_gradient(graph, improved):
    """They take another way: factors of nodes in place of factors of edges."""
    graph = GRAPHS[graph]
    theirs, ours = sum_pair("GCNConv", dtype=torch.float64, improved=improved)
    x, weights = node_features(graph, torch.float64), weights_of(graph, torch.float64)
    with edgeless.backend("fused"):
        have = run(lambda x: ours(x, graph[0], weights), ours, x)
    want = run(lambda x: theirs(x, graph[0], weights), theirs, x)
    for key, value in want.items():
        torch.testing.assert_close(have[key], value, rtol=1e-10, atol=1e-12)


def test_gcn_weights_of_every_sign():
    graph = GRAPHS["self_loops"]
    theirs, ours = sum_pair("GCNConv", dtype=torch.float64)
    weights = weights_of(graph, torch.float64) * torch.tensor([1, -0.1, 1, 0, -1, 1])
    x = node_features(graph, torch.float64)
    with torch.no_grad(), edgeless.backend("fused"):
        torch.testing.assert_close(ours(x, graph[0], weights), theirs(x, graph[0], weights), equal_nan=True)


def test_gcn_looks_for_the_loops_that_it_replaces_once():
    graph = GRAPHS["self_loops"]
    _, ours = sum_pair("GCNConv")
    weights, edge_index = weights_of(graph), graph[0].clone()

    def searches():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace, torch.no_grad():
            ours(node_features(graph), edge_index, weights)
        return [event.name for event in trace.events() if event.name == "aten::nonzero"]

    assert searches()
    assert not searches()


def test_gcn_gradcheck():
    graph = GRAPHS["self_loops"]
    _, ours = sum_pair("GCNConv", 2, 2, dtype=torch.float64)
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    weights = weights_of(graph, torch.float64)[:5].requires_grad_()
    edge_index = graph[0][:, [0, 1, 2, 3, 5]]  # two loops at one node have no gradient that differences would find
    with edgeless.backend("fused"):
        assert torch.autograd.gradcheck(lambda x, w: ours(x, edge_index, w), (x, weights))
        assert torch.autograd.gradgradcheck(lambda x, w: ours(x, edge_index, w), (x, weights))


# Graphs of other kinds -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", ("random", "self_loops", "isolated", "no_edges", "bipartite"))
@pytest.mark.parametrize("kind", SPARSE)
@pytest.mark.parametrize("name", SUMS)
def test_sparse(name, kind, index):
    if index not in graphs_of(name):
        pytest.skip("GCNConv takes no pairs")
    graph = distinct(GRAPHS[index])
    x = node_features(graph, torch.float64)
    values = weights_of(graph, torch.float64)
    some = ({}, {"improved": True}, {"normalize": False}) if name == "GCNConv" else ({}, {"aggr": "mean"})
    for options in OPTIONS["GCNConv"] if (name, index) == ("GCNConv", "self_loops") else some:
        if kind == "torch_sparse" and graph[0].numel() == 0 and not options.get("bias", True):
            continue  # the stock layer's result has no gradient
        for given in (None, values):
            theirs, ours = sum_pair(name, dtype=torch.float64, **options)
            assert_same(theirs, ours, x, as_sparse(kind, graph, given, torch.float64))


@pytest.mark.skipif("torch_sparse" not in SPARSE, reason="torch_sparse is not installed")
@pytest.mark.parametrize("aggr", ("max", "min"))
@pytest.mark.parametrize("name", PAIRS)
def test_extrema_over_a_sparse_tensor(name, aggr):
    """The sparse product gives the gradient of equal extrema to one edge."""
    for graph in ("random", "bipartite", "isolated"):
        graph = distinct(GRAPHS[graph])
        x = with_ties(node_features(graph, torch.float64))
        theirs, ours = sum_pair(name, dtype=torch.float64, aggr=aggr)
        assert_same(theirs, ours, x, as_sparse("torch_sparse", graph))


@pytest.mark.parametrize("kind", SPARSE)
@pytest.mark.parametrize("name", WEIGHTED)
def test_gradient_reaches_the_values(name, kind):
    if (name, kind) == ("GCNConv", "coo"):
        pytest.skip("torch has no derivative of what the stock layer does")
    graph = distinct(GRAPHS["random"])
    x = node_features(graph, torch.float64)
    theirs, ours = sum_pair(name, dtype=torch.float64)
    grads = []
    for layer in (theirs, ours):
        values = weights_of(graph, torch.float64).requires_grad_()
        layer(x, as_sparse(kind, graph, values)).square().sum().backward()
        grads.append(values.grad)
    assert edgeless.explain(ours, x, as_sparse(kind, graph, values))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("order", (None, "row", "col"))
@pytest.mark.parametrize("name", SUMS)
def test_edge_index_object(name, order):
    graph = GRAPHS["random"]
    edges = graph[0]
    if order is not None:
        edges = edges[:, edges[0 if order == "row" else 1].argsort(stable=True)]
    index = EdgeIndex(edges, sparse_size=(40, 40), sort_order=order)
    x = node_features(graph)  # some products of an EdgeIndex are not there for float64
    aggregations = ("sum", "mean") if name == "GCNConv" else ("sum", "mean", "max", "min")
    for aggr in aggregations:
        theirs, ours = sum_pair(name, aggr=aggr)
        assert_same(theirs, ours, x, index)
        if name != "GCNConv":
            assert_same(theirs, ours, with_ties(x), index)
    if name in WEIGHTED:
        assert_same(*sum_pair(name), x, index, weights_of(graph))


@pytest.mark.parametrize("backend", ("fused", "reference"))
@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("graph", ("random", "self_loops", "bipartite"))
def test_graph_handle(name, graph, backend):
    if graph not in graphs_of(name):
        pytest.skip("GCNConv takes no pairs")
    graph = GRAPHS[graph]
    handle = edgeless.Graph.from_edge_index(*graph)
    x = node_features(graph, torch.float64)
    rest = (weights_of(graph, torch.float64),) if name in WEIGHTED else ()
    for options in ({}, {"cached": True}) if name == "GCNConv" else ({}, {"aggr": "mean"}):
        theirs, ours = sum_pair(name, dtype=torch.float64, **options)
        for inputs in ((), rest):
            want = theirs(x, graph[0], *inputs)
            with edgeless.backend(backend):
                torch.testing.assert_close(ours(x, handle, *inputs), want)
    if graph is GRAPHS["bipartite"]:
        with edgeless.backend(backend):
            have = ours((x[0], None), handle)
        torch.testing.assert_close(have, theirs((x[0], None), graph[0], size=graph[1:]))


@pytest.mark.parametrize("name", SUMS)
def test_edited_graphs_give_new_answers(name):
    theirs, ours = sum_pair(name)
    x, rest = node_features(GRAPHS["self_loops"]), ()
    edge_index = GRAPHS["self_loops"][0].clone()
    if name in WEIGHTED:
        rest = (weights_of(GRAPHS["self_loops"]),)
    for _ in range(3):
        torch.testing.assert_close(ours(x, edge_index, *rest), theirs(x, edge_index, *rest))
        torch.testing.assert_close(ours(x, edge_index), theirs(x, edge_index))
        edge_index[0] = (edge_index[0] + 1) % 3
        if rest:
            rest[0].mul_(1.5).add_(0.1)
    for num_nodes in (5, 3, 9):
        x = torch.randn(num_nodes, IN)
        torch.testing.assert_close(ours(x, edge_index), theirs(x, edge_index))


@pytest.mark.parametrize("name", SUMS)
def test_second_call_builds_nothing(name):
    _, ours = sum_pair(name)
    x, edge_index = node_features(GRAPHS["random"]), GRAPHS["random"][0].clone()
    ours(x, edge_index)
    built = edgeless.cache_info().misses
    ours(x, edge_index)
    assert edgeless.cache_info().misses == built


# cached=True -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ("plain", "edge_index", *SPARSE))
@pytest.mark.parametrize("graph", ("random", "self_loops"))
def test_cached_ignores_later_graphs(kind, graph):
    graph, other = distinct(GRAPHS[graph]), distinct(GRAPHS["hub"])

    def adjacency(graph):
        if kind == "plain":
            return graph[0].clone()
        if kind == "edge_index":
            return EdgeIndex(graph[0], sparse_size=graph[1:])
        return as_sparse(kind, graph, None, torch.float64)

    x = node_features(graph, torch.float64)
    theirs, ours = sum_pair("GCNConv", dtype=torch.float64, cached=True)
    first = adjacency(graph)
    for index in (first, adjacency(other), adjacency(graph)):
        assert_same(theirs, ours, x, index)
    if kind == "plain":
        first.zero_()
        assert_same(theirs, ours, x, first)
    for layer in (theirs, ours):
        layer.reset_parameters()
    assert ours._cached_edge_index is None and ours._cached_adj_t is None
    ours.load_state_dict(theirs.state_dict())
    small = (random_edges(20, 20, 50), 20, 20)
    x = node_features(small, torch.float64)
    assert_same(theirs, ours, x, adjacency(distinct(small)))


def test_cached_weights_are_those_of_the_first_call():
    graph = GRAPHS["self_loops"]
    x, weights = node_features(graph), weights_of(graph)
    theirs, ours = sum_pair("GCNConv", cached=True, improved=True)
    for rest in ((weights,), (), (weights * 3,)):
        with torch.no_grad(), edgeless.backend("fused"):
            torch.testing.assert_close(ours(x, graph[0], *rest), theirs(x, graph[0], *rest))


@pytest.mark.parametrize("kind", ("plain", *SPARSE))
def test_cached_in_inference_mode(kind):
    """As by a model that is validated before it is trained; the stock layer cannot use norms of an edge_index then."""
    graph = distinct(GRAPHS["random"])
    adjacency = graph[0] if kind == "plain" else as_sparse(kind, graph, None, torch.float64)
    theirs, ours = sum_pair("GCNConv", dtype=torch.float64, cached=True)
    x = node_features(graph, torch.float64)
    with torch.inference_mode():
        ours(x, adjacency)
    assert_same(theirs, ours, x, adjacency)


@pytest.mark.parametrize("loops", _BOOL)
def test_cached_norms_that_were_written_to(loops):
    graph = GRAPHS["isolated"]
    theirs, ours = sum_pair("GCNConv", cached=True, add_self_loops=loops)
    for num_nodes in (10, 10, 14):
        x = torch.randn(num_nodes, IN)
        assert_same(theirs, ours, x, graph[0])
    for layer in (theirs, ours):
        layer._cached_edge_index[1].mul_(2.5)
    assert_same(theirs, ours, x, graph[0])
    edge_index, weight = theirs._cached_edge_index
    for layer in (theirs, ours):
        layer._cached_edge_index = (edge_index, weight + 1)
    assert_same(theirs, copy.deepcopy(ours), x, graph[0])


@pytest.mark.parametrize("graph", SQUARE)
def test_cached_by_the_stock_path_and_back(graph):
    """Both paths keep the same tensors, so a layer can change between them."""
    graph = GRAPHS[graph]
    x = node_features(graph)
    theirs, ours = sum_pair("GCNConv", cached=True)
    with edgeless.backend("fused"):
        ours(x, graph[0])
    theirs(x, graph[0])
    for have, want in zip(ours._cached_edge_index, theirs._cached_edge_index, strict=True):
        assert torch.equal(have, want)
    want = theirs(x, graph[0])
    for backend in ("reference", "fused"):
        with edgeless.backend(backend):
            torch.testing.assert_close(ours(x, graph[0]), want)


@pytest.mark.parametrize("aggr", ("mean", "max"))
@pytest.mark.parametrize("name", ("SAGEConv", "GraphConv"))
def test_rows_without_neighbours_are_not_mapped(name, aggr, monkeypatch):
    """As in a sampled graph, where most nodes have been drawn and not expanded."""
    graph, mapped = GRAPHS["isolated"], []
    product = neighbors.product
    monkeypatch.setattr(neighbors, "product", lambda x, *rest: mapped.append(x.size(0)) or product(x, *rest))
    theirs, ours = sum_pair(name, dtype=torch.float64, aggr=aggr)
    assert_same(theirs, ours, node_features(graph, torch.float64), graph[0])
    assert set(mapped) == {10, 2}
    mapped.clear()
    ours.lin_l = ours.lin_rel = torch.nn.Sequential(theirs.lin_l if name == "SAGEConv" else theirs.lin_rel)
    with edgeless.backend("fused"):  # a map that is more than its weight is called with every row
        ours(node_features(graph, torch.float64), graph[0])
    assert not mapped


@pytest.mark.parametrize("name", ("SAGEConv", "GraphConv"))
def test_destinations_of_a_wider_dtype_that_are_mostly_without_neighbours(name):
    """What the neighbours give is promoted in the sum, as in the stock layer."""
    ends = torch.tensor([[0, 1, 2, 2], [3, 0, 3, 0]])
    theirs, ours = sum_pair(name, (IN, IN))
    for layer in (theirs, ours):
        (layer.lin_r if name == "SAGEConv" else layer.lin_root).double()
    assert_same(theirs, ours, (features(3), features(9, dtype=torch.float64)), ends, tolerance=1e-5)
