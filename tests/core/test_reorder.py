"""Graph.reorder: the permutation it returns, results on the reordered graph, and what it refuses."""

import functools
import sys

import pytest
import torch
from attention_cases import GRAPHS, assert_close, graph_of, inputs_of
from devices import EVERY_DEVICE
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeless import Graph, TypedGraph, functional, reordering

LIBRARIES = {"community": "sknetwork", "degree": "torch", "metis": "pymetis", "rcm": "scipy"}
# Which nodes the rows of an op's inputs belong to: sources, destinations, or none.
ROLES = {"gatv2": "sd-", "gat": "ssd", "cosine": "sd-", "dot": "dss"}


@pytest.fixture(params=LIBRARIES)
def method(request):
    pytest.importorskip(LIBRARIES[request.param], reason=f"method {request.param!r} needs it")
    return request.param


@functools.cache
def have(name):
    try:
        __import__(LIBRARIES[name])
    except ImportError:
        return False
    return True


def pair(permutation):
    """Permutations of sources and of destinations."""
    return permutation if isinstance(permutation, tuple) else (permutation, permutation)


def assert_same_graph(graph, reordered, permutation):
    """The edges, by their ids, are those between the same nodes."""
    src, dst = pair(permutation)
    for numbers, size in ((src, graph.num_src), (dst, graph.num_dst)):
        assert numbers.dtype == torch.int64 and numbers.device == graph.device
        assert torch.equal(numbers.sort().values.cpu(), torch.arange(size))
    ends = reordered.edge_index()
    assert torch.equal(torch.stack((src[ends[0]], dst[ends[1]])), graph.edge_index())
    assert (reordered.num_src, reordered.num_dst) == (graph.num_src, graph.num_dst)
    assert reordered.index_dtype == graph.index_dtype
    assert torch.equal(reordered.in_degrees(), graph.in_degrees()[dst])


def blocks(num_blocks=40, size=40, degree=8, seed=0):
    """Communities of many edges within and few between them, in a random order."""
    gen = torch.Generator().manual_seed(seed)
    num_nodes = num_blocks * size
    src = torch.arange(num_nodes).repeat_interleave(degree)
    near = src // size * size + torch.randint(size, src.shape, generator=gen)
    far = torch.randint(num_nodes, src.shape, generator=gen)
    dst = torch.where(torch.rand(src.shape, generator=gen) < 0.9, near, far)
    shuffle = torch.randperm(num_nodes, generator=gen)
    return Graph.from_edge_index(shuffle[torch.stack((src, dst))], num_nodes, num_nodes)


# The permutation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_edges_keep_their_ids_and_ends(method, kind, dtype):
    graph = graph_of(kind, dtype)
    reordered, permutation = graph.reorder(method)
    assert isinstance(permutation, tuple) == (graph.num_src != graph.num_dst)
    assert_same_graph(graph, reordered, permutation)


def test_from_csc_the_edges_keep_their_ids(method):
    edges = graph_of("bipartite")
    graph = Graph.from_csc(*edges.csc[:2], edges.num_dst, edge_ids=edges.csc.edge_ids)
    assert_same_graph(edges, *graph.reorder(method))


@pytest.mark.parametrize("edges", [[], [[2, 2], [1, 1], [2, 2]]], ids=["no edges", "loops"])
def test_nodes_without_neighbors_stay_where_they_are(method, edges):
    graph = Graph.from_edge_index(torch.tensor(edges, dtype=torch.int64).reshape(-1, 2).t(), 4, 4)
    reordered, permutation = graph.reorder(method)
    assert permutation.tolist() == [0, 1, 2, 3]
    assert_same_graph(graph, reordered, permutation)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(filter(have, LIBRARIES))),
    sizes=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    num_edges=st.integers(0, 40),
    bipartite=st.booleans(),
    symmetric=st.booleans(),
    draw=st.integers(0, 2**31),
)
def test_any_graph(name, sizes, num_edges, bipartite, symmetric, draw):
    num_src, num_dst = sizes if bipartite else sizes[:1] * 2
    num_edges = 0 if 0 in (num_src, num_dst) else num_edges
    gen = torch.Generator().manual_seed(draw)
    edges = torch.stack([torch.randint(max(n, 1), (num_edges,), generator=gen) for n in (num_src, num_dst)])
    symmetric = symmetric and not bipartite
    edges = torch.cat((edges, edges.flip(0)), 1) if symmetric else edges
    graph = Graph.from_edge_index(edges, num_src, num_dst, is_symmetric=symmetric or None)
    reordered, permutation = graph.reorder(name, bipartite=bipartite)
    assert isinstance(permutation, tuple) == bipartite
    assert reordered.is_symmetric == graph.is_symmetric
    assert_same_graph(graph, reordered, permutation)
    for height in (1, 3):
        windows = {(d // height, s) for s, d in zip(*reordered.edge_index().tolist(), strict=True)}
        expected = graph.num_edges / len(windows) if windows else 1.0
        assert reordering.reuse(reordered, height) == pytest.approx(expected)


def test_two_calls_give_the_same_order(method):
    graph = blocks()
    first, second = (graph.reorder(method, seed=3)[1] for _ in range(2))
    assert torch.equal(first, second)


def test_the_seed_is_that_of_metis():
    pytest.importorskip("pymetis")
    orders = [blocks().reorder("metis", num_parts=16, seed=seed)[1] for seed in range(4)]
    assert any(not torch.equal(orders[0], order) for order in orders[1:])


def test_degrees_fall():
    graph = graph_of("square")
    reordered, _ = graph.reorder("degree")
    src, dst = reordered.edge_index()
    pairs = {(min(e), max(e)) for e in zip(src.tolist(), dst.tolist(), strict=True) if e[0] != e[1]}
    degrees = torch.bincount(torch.tensor(sorted(pairs)).flatten(), minlength=graph.num_src)
    assert bool((degrees.diff() <= 0).all())


@pytest.mark.parametrize("name", ["community", "metis"])
def test_communities_are_found(name):
    pytest.importorskip(LIBRARIES[name])
    graph = blocks()
    reordered, _ = graph.reorder(name, num_parts=40 if name == "metis" else None)
    assert reordering.reuse(reordered, 64) > 3 * reordering.reuse(graph, 64)
    assert reordering.mean_distance(reordered) < 0.3 * reordering.mean_distance(graph)


def test_rcm_finds_a_small_bandwidth():
    pytest.importorskip("scipy")
    path = torch.randperm(500, generator=torch.Generator().manual_seed(0))
    graph = Graph.from_edge_index(torch.stack((path[1:], path[:-1])), 500, 500)
    assert reordering.bandwidth(graph) > 400
    assert reordering.bandwidth(graph.reorder("rcm")[0]) == 1


def test_the_sides_of_a_bipartite_graph_are_ordered_together():
    pytest.importorskip("pymetis")
    gen = torch.Generator().manual_seed(0)
    src = torch.arange(1200).repeat_interleave(10)
    dst = src // 30 * 20 + torch.randint(20, src.shape, generator=gen)
    shuffles = torch.randperm(1200, generator=gen), torch.randperm(800, generator=gen)
    graph = Graph.from_edge_index(torch.stack((shuffles[0][src], shuffles[1][dst])), 1200, 800)
    reordered, _ = graph.reorder("metis", num_parts=40)
    assert reordering.reuse(reordered, 16) > 3 * reordering.reuse(graph, 16)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_a_given_permutation(dtype):
    graph = graph_of("square")
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1)).to(dtype)
    reordered, permutation = graph.reorder(order)
    assert torch.equal(permutation, order.long())
    assert_same_graph(graph, reordered, permutation)
    again, _ = reordered.reorder(reordering.inverse(permutation))
    assert torch.equal(again.edge_index(), graph.edge_index())


def test_a_given_pair_of_permutations():
    graph = graph_of("bipartite")
    orders = torch.randperm(graph.num_src), torch.randperm(graph.num_dst)
    reordered, permutation = graph.reorder(orders)
    assert all(torch.equal(one, other) for one, other in zip(permutation, orders, strict=True))
    assert_same_graph(graph, reordered, permutation)


def test_under_inference_mode_the_graph_can_be_trained_on():
    with torch.inference_mode():
        reordered, _ = graph_of("square").reorder("degree")
    outside, _ = graph_of("square").reorder("degree")
    x = torch.randn(40, 3, requires_grad=True)
    found, expected = (torch.autograd.grad(functional.spmm(g, x).square().sum(), x)[0] for g in (reordered, outside))
    assert expected.abs().sum() > 0 and torch.equal(found, expected)


# Results -------------------------------------------------------------------------------------------------------------


def results(score, graph, permutation, inputs):
    """Outputs in the original order and the gradients of the original inputs, computed in the order given."""
    args, tensors, rest = inputs
    src, dst = permutation
    rows = {"s": lambda x: x[src], "d": lambda x: x[dst], "-": lambda x: x}
    moved = [rows[role](x) for role, x in zip(ROLES[score], args, strict=True)]
    out, weights = getattr(functional, f"{score}_attention")(graph, *moved, **tensors, **rest)
    out = reordering.restore(out, dst)
    gen = torch.Generator().manual_seed(11)
    grads = [torch.randn(t.shape, dtype=t.dtype, generator=gen).to(t.device) for t in (out, weights)]
    leaves = [*args, *tensors.values()]
    found = torch.autograd.grad((out, weights), leaves, grads, allow_unused=True)
    return [out, weights, *(torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True))]


@pytest.mark.parametrize("score", ROLES)
@pytest.mark.parametrize("kind", ["square", "bipartite", "hub", "no edges"])
def test_attention_and_its_gradients_are_the_same(method, score, kind):
    """With dropout too: masks belong to edges' ids, and these stay."""
    graph = graph_of(kind)
    inputs = inputs_of(score, graph, 2, 6, ("edges", "scale", "dropout", "weights"), torch.float64)
    reordered, permutation = graph.reorder(method)
    identity = torch.arange(graph.num_src), torch.arange(graph.num_dst)
    assert_close(results(score, reordered, pair(permutation), inputs), results(score, graph, identity, inputs), 1e-10)


@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("op", ["spmm", "spmm both", "max", "min"])
def test_sums_and_extrema_and_their_gradients_are_the_same(method, kind, op):
    graph = graph_of(kind)
    gen = torch.Generator().manual_seed(2)
    x = torch.randn(graph.num_src, 5, dtype=torch.float64, generator=gen, requires_grad=True)
    weight = torch.randn(graph.num_edges, dtype=torch.float64, generator=gen, requires_grad=True)
    reordered, permutation = graph.reorder(method)
    found = []
    for handle, (src, dst) in ((graph, (torch.arange(graph.num_src), torch.arange(graph.num_dst))),
                               (reordered, pair(permutation))):  # fmt: skip
        if op.startswith("spmm"):
            out, leaves = functional.spmm(handle, x[src], weight, norm=op[5:] or "none"), (x, weight)
        else:
            out, leaves = functional.neighbor_reduce(handle, x[src], op), (x,)
        out = reordering.restore(out, dst)
        grad = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(3))
        found.append([out, *torch.autograd.grad(out, leaves, grad)])
    assert_close(found[1], found[0], 1e-10)


def test_relations_keep_their_types(method):
    graph = graph_of("square")
    types = torch.arange(graph.num_edges) % 3
    gen = torch.Generator().manual_seed(2)
    x, weight = (torch.randn(*shape, dtype=torch.float64, generator=gen) for shape in ((40, 5), (3, 5, 4)))
    reordered, permutation = graph.reorder(method)
    out = functional.relational_sum(TypedGraph(reordered, types, 3), x[permutation], weight)
    expected = functional.relational_sum(TypedGraph(graph, types, 3), x, weight)
    assert_close([reordering.restore(out, permutation)], [expected], 1e-10)


@EVERY_DEVICE
def test_on_a_device(method, device):
    graph = blocks().to(device)
    reordered, permutation = graph.reorder(method)
    assert reordered.device.type == permutation.device.type == device
    assert_same_graph(graph, reordered, permutation)
    assert torch.equal(permutation.cpu(), graph.to("cpu").reorder(method)[1])
    x = torch.randn(graph.num_src, 8, dtype=torch.float64, device=device)
    out = reordering.restore(functional.spmm(reordered, x[permutation]), permutation)
    assert_close([out], [functional.spmm(graph, x)], 1e-10)
    assert reordering.reuse(reordered, 16) == reordering.reuse(reordered.to("cpu"), 16)


# Errors --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments,error,message",
    [
        (("best",), ValueError, "method must be one of 'community', 'degree', 'metis', 'rcm', got 'best'"),
        ((None,), TypeError, "method must be one of .*, got NoneType"),
        ((torch.arange(39),), ValueError, r"method must have shape \[N\] = \[40\], got \[39\]"),
        ((torch.zeros(40),), ValueError, "method must have an integer dtype, got torch.float32"),
        ((torch.arange(1, 41),), IndexError, "method has id 40 at position 39"),
        ((torch.zeros(40, dtype=torch.int64),), ValueError, "method must be a permutation of 0 to N - 1, but 1 is"),
        (
            ((torch.arange(40), torch.arange(40)),),
            TypeError,
            "method must be .* 1 sets of nodes, got tuple",
        ),
    ],
)
def test_what_is_no_method_is_refused(arguments, error, message):
    with pytest.raises(error, match=f"^Graph.reorder: {message}"):
        graph_of("square").reorder(*arguments)


@pytest.mark.parametrize(
    "options,error,message",
    [
        ({"num_parts": 0}, ValueError, "num_parts must be at least 1 and below 2\\*\\*31, got 0"),
        ({"num_parts": 2.0}, TypeError, "num_parts must be an int, got float"),
        ({"seed": -1}, ValueError, "seed must be at least 0 and below 2\\*\\*31, got -1"),
        ({"seed": "0"}, TypeError, "seed must be an int, got str"),
        ({"bipartite": 1}, TypeError, "bipartite must be True, False or None, got int"),
    ],
)
def test_what_is_no_option_is_refused(options, error, message):
    with pytest.raises(error, match=f"^Graph.reorder: {message}"):
        graph_of("square").reorder("metis", **options)


def test_options_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="num_parts belongs to method 'metis', got 'degree'"):
        graph_of("square").reorder("degree", num_parts=3)
    with pytest.raises(ValueError, match="num_parts belongs to method 'metis', got a permutation"):
        graph_of("square").reorder(torch.arange(40), num_parts=3)
    bipartite = graph_of("bipartite")
    with pytest.raises(ValueError, match="bipartite=False needs as many sources as destinations, got"):
        bipartite.reorder("degree", bipartite=False)
    with pytest.raises(TypeError, match="for each of the graph's 2 sets of nodes, got Tensor"):
        bipartite.reorder(torch.arange(bipartite.num_src))
    with pytest.raises(ValueError, match=r"method\['dst'\] must have shape"):
        bipartite.reorder((torch.arange(bipartite.num_src), torch.arange(bipartite.num_dst + 1)))


@pytest.mark.parametrize(
    "name,module,package",
    [
        ("community", "sknetwork.clustering", "scikit-network"),
        ("metis", "pymetis", "pymetis"),
        ("rcm", "scipy.sparse", "scipy"),
    ],
)
def test_a_missing_library_is_named_with_the_extra(monkeypatch, name, module, package):
    monkeypatch.setitem(sys.modules, module, None)
    message = rf"Graph.reorder: method '{name}' needs {package}; install it with: pip install 'edgeless\[reorder\]'"
    with pytest.raises(ImportError, match=message):
        graph_of("square").reorder(name)


def test_restore_and_inverse_say_what_is_wrong():
    with pytest.raises(TypeError, match="restore: out must be a Tensor, got list"):
        reordering.restore([1], torch.arange(1))
    with pytest.raises(ValueError, match=r"restore: out must have N = 3 rows, got shape \[2\]"):
        reordering.restore(torch.zeros(2), torch.arange(3))
    with pytest.raises(TypeError, match=r"inverse: permutation must be a Tensor of shape \[N\], got list"):
        reordering.inverse([0])
    with pytest.raises(ValueError, match="inverse: permutation must be a permutation of 0 to N - 1, but 0 is missing"):
        reordering.inverse(torch.tensor([1, 1]))


def test_statistics_of_nothing():
    graph = graph_of("no edges")
    assert (reordering.reuse(graph, 16), reordering.bandwidth(graph), reordering.mean_distance(graph)) == (1.0, 0, 0.0)
    with pytest.raises(ValueError, match="reuse: height must be at least 1, got 0"):
        reordering.reuse(graph, 0)


def test_reuse_counts_edges_for_each_source_of_a_window():
    graph = Graph.from_edge_index(torch.tensor([[0, 0, 0, 1, 1], [0, 1, 2, 2, 2]]), 3, 3)
    assert reordering.reuse(graph, 1) == 5 / 4  # the multi-edge gathers one row
    assert reordering.reuse(graph, 2) == 5 / 3
    assert (reordering.bandwidth(graph), reordering.mean_distance(graph)) == (2, 1.0)


def test_a_default_device_is_not_looked_at(method):
    """A user's ``torch.set_default_device("cuda")``, for which "meta" stands: nothing is made there unasked."""
    graph = blocks()
    expected, again = graph.reorder(method), blocks()
    with torch.device("meta"):
        reordered, permutation = again.reorder(method)
    assert_same_graph(graph, reordered, permutation)
    assert torch.equal(permutation, expected[1])
