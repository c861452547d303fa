"""What a graph keeps: built once, weighed, dropped in copies; and one array of neighbours for both directions of a
symmetric graph.
"""

import copy
import pickle

import pytest
import torch
from torch.testing import assert_close

import edgeless
from edgeless import Graph
from edgeless.functional import dot_attention, gatv2_attention, neighbor_reduce, sddmm_dot, spmm

ONE_WAY = torch.tensor([[0, 0, 1, 1, 2, 4, 4, 3], [1, 1, 2, 4, 5, 0, 4, 5]])  # multi-edges, a loop, node 6 isolated
SYMMETRIC = torch.cat((ONE_WAY, ONE_WAY.flip(0)), 1)[:, torch.randperm(16, generator=torch.Generator().manual_seed(0))]


def test_an_entry_is_built_once_and_weighed():
    graph, calls = Graph.from_edge_index(ONE_WAY, 7, 7), []

    def build(of):
        calls.append(of)
        return {"parts": [torch.zeros(5), (torch.zeros(3, dtype=torch.int8), None)], "number": 3}

    before, entries = graph.memory_bytes(), graph.num_formats()
    kept = graph.format("anything", build)
    assert graph.format("anything", build) is kept and calls == [graph]
    assert graph.memory_bytes() == before + 5 * 4 + 3
    assert graph.memory_bytes_at_most() >= graph.memory_bytes()
    assert graph.num_formats() == entries + 1


def test_what_is_kept_with_a_kept_graph_counts_too():
    graph = Graph.from_edge_index(ONE_WAY, 7, 7)
    looped = graph.with_self_loops()
    before, entries = graph.memory_bytes(), graph.num_formats()
    scale = looped.degree_scale("dst", -0.5, torch.float32)
    assert graph.memory_bytes() == before + scale.nbytes
    assert graph.num_formats() == entries + 1


def test_the_cache_weighs_a_graph_anew_when_it_keeps_more():
    edgeless.clear_cache()
    edge_index = ONE_WAY.clone()
    graph = edgeless.cache.graph_from_edge_index(edge_index, 7, 7)
    charged = edgeless.graph.weak_cache._cache._charged
    graph.format("large", lambda _: torch.zeros(1000))
    edgeless.cache.graph_from_edge_index(edge_index, 7, 7)
    assert edgeless.graph.weak_cache._cache._charged == charged + 4000


def test_nothing_is_kept_of_a_build_that_fails():
    graph = Graph.from_edge_index(ONE_WAY, 7, 7)
    with pytest.raises(ZeroDivisionError):
        graph.format("broken", lambda _: 1 / 0)
    assert graph.format("broken", lambda _: 1) == 1


@pytest.mark.parametrize("make", [copy.deepcopy, lambda graph: pickle.loads(pickle.dumps(graph)), copy.copy])
def test_copies_take_the_adjacency_and_facts(make):
    graph = Graph.from_edge_index(ONE_WAY, 7, 7)
    assert graph.has_zero_in_degree and graph.max_in_degree == 2
    graph.csc, graph.with_self_loops(), graph.degree_scale("src", 1.0, torch.float32)
    other = make(graph)
    assert other.has_csc and other.num_formats() == 3  # both directions and whether a node has no in-edge
    assert other.memory_bytes() < graph.memory_bytes()
    assert torch.equal(other.with_self_loops().edge_index(), graph.with_self_loops().edge_index())


def symmetric(**options):
    return Graph.from_edge_index(SYMMETRIC, 7, 7, is_symmetric=True, **options)


def pointers(arrays):
    return [t.data_ptr() for t in arrays]


def test_a_symmetric_graph_has_one_array_of_neighbours():
    for graph in (symmetric(), symmetric().reverse(), symmetric().with_self_loops()):
        before = graph.memory_bytes()
        assert pointers(graph.csc_arrays(False)) == pointers(graph.csr_arrays(False))
        assert graph.has_csc and graph.memory_bytes() == before
    plain = Graph.from_edge_index(SYMMETRIC, 7, 7)
    assert pointers(plain.csc_arrays(False)) != pointers(plain.csr_arrays(False))


def test_a_symmetric_graph_given_by_its_columns():
    indptr, indices, _ = symmetric().csc
    graph = Graph.from_csc(indptr, indices, is_symmetric=True)
    assert pointers(graph.csr_arrays(False)) == pointers(graph.csc_arrays(False)) == pointers((indptr, indices))
    assert torch.equal(graph.edge_index()[0].bincount(minlength=7), graph.out_degrees())


def test_edge_ids_of_a_symmetric_graph_are_each_directions_own():
    graph, plain = symmetric(), Graph.from_edge_index(SYMMETRIC, 7, 7)
    for ours, theirs in zip(graph.csc, plain.csc, strict=True):
        assert torch.equal(ours, theirs)


def attend(graph, x):
    return gatv2_attention(graph, x, x.flip(0), x[0])


CALLS = {
    "gatv2": attend,
    "dropout": lambda graph, x: dot_attention(graph, x, x, x, dropout=0.5, seed=3),
    "sum": lambda graph, x: spmm(graph, x, norm="both"),
    "max": lambda graph, x: neighbor_reduce(graph, x.flatten(1), "max"),
    "sddmm": sddmm_dot,
}


@pytest.mark.parametrize("name", CALLS)
def test_results_and_gradients_are_those_of_any_graph(name):
    run = CALLS[name] if name != "sddmm" else lambda graph, x: sddmm_dot(graph, x, x.flip(0))
    x = torch.randn(7, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    results = []
    for graph in (symmetric(), Graph.from_edge_index(SYMMETRIC, 7, 7)):
        leaf = x.clone().requires_grad_()
        out = run(graph, leaf)
        results.append((out, *torch.autograd.grad(out.cos().sum(), leaf)))
    for ours, theirs in zip(*results, strict=True):
        assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "edges, missing",
    [
        (ONE_WAY, "0 to 1"),
        (torch.tensor([[0, 1, 0], [1, 0, 1]]), "0 to 1"),  # once more there than back
        (torch.tensor([[2, 3, 3], [3, 2, 2]]), "3 to 2"),
        (torch.tensor([[1, 2, 5], [2, 1, 3]]), "5 to 3"),
    ],
)
def test_a_graph_that_is_not_symmetric_is_refused(edges, missing):
    message = f"is_symmetric needs the reverse of every edge, as often as the edge, but {missing} has none"
    with pytest.raises(ValueError, match=f"Graph.from_edge_index: {message}"):
        Graph.from_edge_index(edges, 7, 7, is_symmetric=True)
    csr = Graph.from_edge_index(edges, 7, 7).csr
    with pytest.raises(ValueError, match="Graph.from_csr: is_symmetric needs the reverse of every edge"):
        Graph.from_csr(*csr[:2], is_symmetric=True)
    with pytest.raises(ValueError, match="Graph.from_csc: is_symmetric needs the reverse of every edge"):
        Graph.from_csc(*csr[:2], is_symmetric=True)
    assert Graph.from_edge_index(edges, 7, 7, is_symmetric=True, validate=False).is_symmetric


def test_no_edges_are_symmetric():
    for size in (0, 3):
        assert Graph.from_edge_index(ONE_WAY[:, :0], size, size, is_symmetric=True).is_symmetric
