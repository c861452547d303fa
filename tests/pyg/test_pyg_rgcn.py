"""RGCNConv and FastRGCNConv against the stock layers: every option, graph, dtype and gradient."""

import copy
import itertools
import re

import pytest
import torch
import torch_geometric
import torch_geometric.nn as stock
from devices import EVERY_DEVICE
from pyg_cases import GRAPHS, assert_close, features, run, run_fused

import edgeless
import edgeless.pyg.nn as fused
from edgeless import TypedGraph

LAYERS = ("RGCNConv", "FastRGCNConv")
IN, OUT, R = 6, 4, 5


def types_of(graph, dtype=torch.int64, num_types=R):
    """Types of the edges; the last one has none."""
    generator = torch.Generator().manual_seed(31)
    return torch.randint(max(num_types - 1, 1), (graph[0].size(1),), generator=generator).to(dtype)


def node_features(graph, dtype=torch.float32, pair=False):
    _, num_src, num_dst = graph
    if pair or num_src != num_dst:
        return features(num_src, IN, dtype), features(num_dst, IN - 1, dtype, seed=13)
    return features(num_src, IN, dtype)


def layer_pair(name, in_channels=IN, dtype=torch.float32, num_relations=R, **options):
    theirs = getattr(stock, name)(in_channels, OUT, num_relations, **options)
    ours = getattr(fused, name)(in_channels, OUT, num_relations, **options)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)
    ours.load_state_dict(theirs.state_dict())
    return theirs.to(dtype), ours.to(dtype)


def in_channels_of(x):
    return (IN, IN - 1) if isinstance(x, tuple) else IN


def assert_parity(name, graph, x, edge_index=None, edge_type=None, dtype=torch.float32, **options):
    options.setdefault("in_channels", in_channels_of(x))
    theirs, ours = layer_pair(name, dtype=dtype, **options)
    edge_type = types_of(graph) if edge_type is None else edge_type
    edge_index = graph[0] if edge_index is None else edge_index
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # the stock layer's zeros are of the default dtype
    try:
        assert_close(run_fused(ours, x, edge_index, edge_type), run(theirs, theirs, x, graph[0], edge_type.long()))
    finally:
        torch.set_default_dtype(default)


REGULARIZERS = {"plain": {}, "bases": {"num_bases": 3}, "blocks": {"num_blocks": 2}}


@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_graph(kind, name, dtype):
    graph = GRAPHS[kind]
    for aggr in ("mean", "add"):
        assert_parity(name, graph, node_features(graph, dtype), dtype=dtype, aggr=aggr)


@pytest.mark.parametrize("kind", ["random", "bipartite", "hub", "multi_edges"])
@pytest.mark.parametrize("regularizer", REGULARIZERS)
@pytest.mark.parametrize("aggr", ["mean", "add", "sum", "max", "min"])
@pytest.mark.parametrize("name", LAYERS)
def test_every_option(kind, regularizer, aggr, name):
    if name == "FastRGCNConv" and aggr in ("max", "min"):
        pytest.skip("the stock layer rejects it")
    graph = GRAPHS[kind]
    for root_weight, bias in ((True, True), (False, False), (True, False), (False, True)):
        assert_parity(
            name,
            graph,
            node_features(graph),
            aggr=aggr,
            root_weight=root_weight,
            bias=bias,
            **REGULARIZERS[regularizer],
        )


@pytest.mark.parametrize("aggr", ["mean", "add", "max"])
def test_sums_in_float64(aggr):
    graph = GRAPHS["random"]
    for options in REGULARIZERS.values():
        assert_parity("RGCNConv", graph, node_features(graph, torch.float64), dtype=torch.float64, aggr=aggr, **options)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("aggr", ["mean", "add"])
@pytest.mark.parametrize("num_bases", [None, 2])
def test_ids_in_place_of_features(name, aggr, num_bases):
    """FastRGCNConv takes a node's number for its id: it is right without features alone. Ours is right with ids too."""
    edges, num_nodes, _ = graph = GRAPHS["random"]
    ids = torch.randint(9, (num_nodes,), generator=torch.Generator().manual_seed(3))
    bipartite = GRAPHS["bipartite"]
    pair = (torch.arange(bipartite[1]) % 9, torch.arange(bipartite[2]) % 7)
    cases = [(graph, None, num_nodes), (graph, ids, 9), (graph, ids - 9, 9), (bipartite, pair, (9, 7))]
    for given, x, in_channels in cases:
        options = {"in_channels": in_channels, "aggr": aggr, "num_bases": num_bases}
        theirs, ours = layer_pair("RGCNConv", **options)[0], layer_pair(name, **options)[1]
        edge_type = types_of(given)
        assert_close(run_fused(ours, x, given[0], edge_type), run(theirs, theirs, x, given[0], edge_type))


@pytest.mark.parametrize("name", LAYERS)
def test_ids_of_nodes_and_relations_in_32_bits(name):
    graph = GRAPHS["random"]
    for edge_index, edge_type in (
        (graph[0].int(), types_of(graph).int()),
        (graph[0], types_of(graph).int()),
        (graph[0].int(), types_of(graph)),
    ):
        assert_parity(name, graph, node_features(graph), edge_index, edge_type)


@pytest.mark.parametrize("name", LAYERS)
def test_other_kinds_of_graphs(name):
    graph = GRAPHS["random"]
    edge_index, edge_type = graph[0], types_of(graph)
    x = node_features(graph)
    theirs, ours = layer_pair(name)
    expected = run(theirs, theirs, x, edge_index, edge_type)
    index = torch_geometric.EdgeIndex(edge_index, sparse_size=(40, 40))
    assert_close(run_fused(ours, x, index, edge_type), expected)
    handle = edgeless.Graph.from_edge_index(edge_index, 40, 40)
    assert_close(run_fused(ours, x, handle, edge_type), expected)
    typed = TypedGraph(handle, edge_type, R)
    assert_close(run_fused(ours, x, typed), expected)
    with edgeless.backend("reference"):
        assert_close(run(ours, ours, x, handle, edge_type), expected)
        assert_close(run(ours, ours, x, typed), expected)
    if torch_geometric.typing.WITH_TORCH_SPARSE:
        adj_t = torch_geometric.typing.SparseTensor.from_edge_index(edge_index, edge_type, (40, 40)).t()
        expected = run(theirs, theirs, x, adj_t)
        assert_close(run_fused(ours, x, adj_t), expected)


@pytest.mark.parametrize("aggr", ["mean", "add"])
def test_the_other_flow(aggr):
    graph = GRAPHS["random"]
    assert_parity("RGCNConv", graph, node_features(graph), aggr=aggr, flow="target_to_source")


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_errs_at_most_twice_as_much(name, dtype):
    graph = GRAPHS["random"]
    x, edge_type = node_features(graph, dtype), types_of(graph)
    theirs, ours = layer_pair(name, dtype=dtype)
    exact_layer = copy.deepcopy(theirs).double()
    exact = run(exact_layer, exact_layer, x.double(), graph[0], edge_type)
    found, stocks = run_fused(ours, x, graph[0], edge_type), run(theirs, theirs, x, graph[0], edge_type)
    for key, want in exact.items():
        assert found[key].dtype == stocks[key].dtype, key
        errors = [float((t[key].double() - want).norm() / want.norm()) for t in (found, stocks)]
        assert errors[0] <= 2 * errors[1] + 1e-6, (key, errors)


@EVERY_DEVICE
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("given", ["float32", "autocast", "ids"])
@pytest.mark.parametrize(
    "options",
    [{}, {"aggr": "add"}, {"num_bases": 3}, {"num_blocks": 2}, {"bias": False}, {"bias": False, "root_weight": False}],
    ids=str,
)
@pytest.mark.parametrize("name", ["RGCNConv", "FastRGCNConv"])
def test_autocast(name, options, given, autocast, device):
    """The stock layer's dtypes and, in medians over draws, at most twice its distance from float64."""
    if given == "ids" and "num_blocks" in options:
        pytest.skip("the stock layer rejects ids with num_blocks")
    graph = GRAPHS["random"]
    edges, edge_type, errors = graph[0].to(device), types_of(graph).to(device), []
    x = node_features(graph).to(autocast).float()
    x = torch.arange(len(x)) if given == "ids" else x
    for seed in range(5):
        torch.manual_seed(seed)
        theirs, ours = layer_pair(name, len(x) if given == "ids" else IN, **options)
        with torch.no_grad():
            for p in theirs.parameters():
                p.copy_(torch.randn(p.shape) * 0.4)
        ours.load_state_dict(theirs.state_dict())
        exact = results_of(
            copy.deepcopy(theirs).double(), x if given == "ids" else x.double(), graph[0], types_of(graph)
        )
        moved = x.to(device, autocast if given == "autocast" else None)
        found, stocks = [], []
        for layer, choice, to in ((ours, "fused", found), (theirs, "auto", stocks)):
            with edgeless.backend(choice):
                to += results_of(layer.to(device), moved, edges, edge_type, autocast)
        assert [t.dtype for t in found] == [t.dtype for t in stocks]
        errors.append(
            [[float((t.cpu().double() - want).norm() / want.norm()) for t, want in zip(side, exact, strict=True)]
             for side in (found, stocks)]
        )  # fmt: skip
    mine, theirs = torch.tensor(errors).median(0).values
    assert (mine <= (2 * theirs).clamp_min(1e-6)).all(), (mine.tolist(), theirs.tolist())


def results_of(layer, x, edges, edge_type, autocast=None):
    """Output and the gradients of features and parameters."""
    leaf = x.clone().requires_grad_() if x.is_floating_point() else x
    with torch.autocast(x.device.type, autocast, autocast is not None):
        out = layer(leaf, edges, edge_type)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out.device, out.dtype)
    leaves = [leaf] * leaf.is_floating_point() + list(layer.parameters())
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def test_a_mean_is_one_of_a_relation_whatever_pyg_lib_would_do(monkeypatch):
    """With pyg-lib the stock layer divides by the number of all in-edges; ours follows its loop."""
    monkeypatch.setattr(torch_geometric.backend, "use_segment_matmul", True)
    monkeypatch.setattr(torch_geometric.typing, "WITH_SEGMM", True)
    graph = GRAPHS["random"]
    x, edge_type = node_features(graph), types_of(graph)
    _, ours = layer_pair("RGCNConv", root_weight=False, bias=False)
    with edgeless.backend("fused"):
        found = ours(x, graph[0], edge_type)
    expected = torch.zeros(40, OUT)
    for r in range(R):
        src, dst = graph[0][:, edge_type == r]
        counts = torch.bincount(dst, minlength=40).clamp(min=1)
        expected += torch.zeros(40, IN).index_add(0, dst, x[src]) / counts[:, None] @ ours.weight[r]
    assert (found - expected).norm() <= 1e-5 * expected.norm()


def test_a_new_type_tensor_or_an_edit_makes_a_new_graph():
    graph = GRAPHS["random"]
    edge_index, edge_type = graph[0].clone(), types_of(graph)
    theirs, ours = layer_pair("RGCNConv")
    x = node_features(graph)

    def same():
        with edgeless.backend("fused"):
            out = ours(x, edge_index, edge_type)
        return torch.allclose(out, theirs(x, edge_index, edge_type), atol=1e-5)

    assert same() and same()
    assert edgeless.cache_info().hits == 1
    edge_type[0] = (edge_type[0] + 1) % R
    assert same()
    edge_index[0, 3] = (edge_index[0, 3] + 1) % 40
    assert same()
    edge_type = edge_type.flip(0).contiguous()
    assert same()
    edge_index = edge_index.flip(1).contiguous()
    assert same()
    x = x.flip(0)
    assert same()


def test_ids_that_change_are_seen():
    graph = GRAPHS["random"]
    theirs, ours = layer_pair("RGCNConv", in_channels=9)
    ids, edge_type = torch.arange(40) % 9, types_of(graph)
    for _ in range(2):
        with edgeless.backend("fused"):
            out = ours(ids, graph[0], edge_type)
        assert torch.allclose(out, theirs(ids, graph[0], edge_type), atol=1e-5)
        ids[3] = 8


@pytest.mark.parametrize("name", LAYERS)
def test_bitwise_the_same_for_any_number_of_threads(name):
    generator = torch.Generator().manual_seed(1)
    edge_index = torch.randint(600, (2, 40_000), generator=generator)
    edge_index[1, :15_000] = 3  # a hub that is cut
    edge_type = torch.randint(7, (40_000,), generator=generator)
    _, ours = layer_pair(name, num_relations=7)
    x = features(600, IN)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(run_fused(ours, x, edge_index, edge_type))
            edgeless.clear_cache()
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(results[0][key], other[key]) for key in other)


@pytest.mark.parametrize("name,aggr", [*itertools.product(LAYERS, ("mean", "add")), ("RGCNConv", "max")])
def test_compiles_whole(name, aggr, fresh_dynamo):
    graph = GRAPHS["random"]
    x, edge_type = node_features(graph), types_of(graph)
    theirs, ours = layer_pair(name, aggr=aggr)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    with edgeless.backend("fused"):
        assert_close(run(compiled, ours, x, graph[0], edge_type), run(theirs, theirs, x, graph[0], edge_type))
        typed = TypedGraph.from_edge_index(graph[0], edge_type, R, 40, 40)
        assert_close(run(compiled, ours, x, typed), run(theirs, theirs, x, graph[0], edge_type))


def test_compiles_where_the_number_of_pairs_is_not_known(fresh_dynamo, monkeypatch):
    """The gradient of an extremum goes back in one of two ways, by the edges for each row of the result."""
    monkeypatch.setattr(edgeless.functional.aggregation, "gathered_degree", lambda *_: 30)  # as on CUDA
    test_compiles_whole("RGCNConv", "max", fresh_dynamo)


def test_seeded_initialisation_state_and_repr_are_the_stock_layers():
    for name in LAYERS:
        for options in REGULARIZERS.values():
            torch.manual_seed(3)
            theirs = getattr(stock, name)(IN, OUT, R, **options)
            torch.manual_seed(3)
            ours = getattr(fused, name)(IN, OUT, R, **options)
            assert repr(ours).replace("edgeless.", "") == repr(theirs)
            for (key, mine), (other, value) in zip(ours.state_dict().items(), theirs.state_dict().items(), strict=True):
                assert key == other and torch.equal(mine, value)


def test_accelerate_turns_stock_layers():
    model = torch.nn.ModuleList([stock.RGCNConv(IN, OUT, R), stock.FastRGCNConv(IN, OUT, R)])
    report = edgeless.accelerate(model)
    assert [new for _, _, new in report.swapped] == [fused.RGCNConv, fused.FastRGCNConv]


def test_a_relation_out_of_range_is_named():
    graph = GRAPHS["random"]
    x, edge_type = node_features(graph), types_of(graph)
    for wrong in (R, -1):
        edge_type[7] = wrong
        for name in LAYERS:
            message = f"edge_type has id {wrong} at position 7, expected 0 <= id < num_types = 5"
            with pytest.raises(IndexError, match=message):
                layer_pair(name)[1](x, graph[0], edge_type)


REFUSED = {
    "a sparse matrix": (lambda x, e, t: (x, torch.sparse_coo_tensor(e, t.float(), (40, 40)).coalesce(), t), "sparse"),
    "types of another length": (lambda x, e, t: (x, e, t[1:]), r"edge_type is not an int64 or int32 tensor of shape"),
    "floating types": (lambda x, e, t: (x, e, t.float()), "edge_type is not an int64"),
    "no types": (lambda x, e, t: (x, e, None), "edge_type is not an int64"),
    "features of three dimensions": (lambda x, e, t: (x[None], e, t), "neither plain floating tensors"),
    "a pair of features and ids": (lambda x, e, t: ((x, torch.arange(40)), e, t), "neither plain floating tensors"),
    "another width": (lambda x, e, t: (x[:, 1:], e, t), "the features have 5 and 5 numbers"),
    "another dtype": (lambda x, e, t: (x.double(), e, t), "dtypes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_are_said_in_words(case):
    change, words = REFUSED[case]
    graph = GRAPHS["random"]
    ours = layer_pair("RGCNConv")[1]
    explanation = edgeless.explain(ours, *change(node_features(graph), graph[0], types_of(graph)))
    assert not explanation
    assert re.search(words, str(explanation)), explanation


def test_extrema_of_ids_and_other_aggregations_take_the_stock_path():
    graph = GRAPHS["random"]
    ids = torch.arange(40) % IN
    for aggr, x in (("max", ids), ("mul", node_features(graph))):
        theirs, ours = layer_pair("RGCNConv", aggr=aggr)
        edge_type = types_of(graph)
        assert not edgeless.explain(ours, x, graph[0], edge_type)
        assert_close(run(ours, ours, x, graph[0], edge_type), run(theirs, theirs, x, graph[0], edge_type))
