"""Graphs under torch.compile: as arguments, and built from an edge_index inside the compiled program."""

import pytest
import torch
from torch import Tensor

import edgeless
from edgeless import Graph
from edgeless.cache import graph_from_edge_index

pytestmark = pytest.mark.skipif(not hasattr(torch.library, "register_fake"), reason="needs torch 2.4")

BACKEND = "aot_eager"  # traces like inductor and needs no C++ compiler


class CountingBackend:
    """``aot_eager`` that counts how often Dynamo compiled."""

    def __init__(self):
        self.count = 0

    def __call__(self, module, inputs):
        self.count += 1
        return torch._dynamo.lookup_backend(BACKEND)(module, inputs)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def sum_of_neighbours(graph: Graph, x: Tensor) -> Tensor:
    """[Ns, C] -> [Nd, C], through the CSR tensors of the graph."""
    indptr, indices, _ = graph.csr
    rows = torch.arange(graph.num_dst).repeat_interleave(indptr.diff(), output_size=graph.num_edges)
    return x.new_zeros(graph.num_dst, x.size(1)).index_add(0, rows, x[indices])


def sum_back(graph: Graph, x: Tensor) -> Tensor:
    return sum_of_neighbours(graph.reverse(), x)


def random_edges(num_src, num_dst, num_edges):
    generator = torch.Generator().manual_seed(num_edges)
    return torch.stack([torch.randint(n, (num_edges,), generator=generator) for n in (num_src, num_dst)])


@pytest.mark.parametrize("function", [sum_of_neighbours, sum_back])
@pytest.mark.parametrize("csc_first", [False, True])
def test_explicit_graph_fullgraph(function, csc_first):
    graph = Graph.from_edge_index(random_edges(9, 9, 40), 9, 9)
    if csc_first:
        graph.csc  # noqa: B018
    x = torch.randn(9, 3)
    compiled = torch.compile(function, backend=BACKEND, fullgraph=True)
    assert torch.equal(compiled(graph, x), function(graph, x))
    assert torch.equal(compiled(graph, x), function(graph, x))


def test_transpose_built_by_the_compiled_program_is_kept():
    graph = Graph.from_edge_index(random_edges(9, 9, 40), 9, 9)
    torch.compile(lambda g: g.csc.indptr + 1, backend=BACKEND, fullgraph=True)(graph)
    assert graph.has_csc
    other = Graph.from_edge_index(graph.edge_index(), 9, 9)
    assert all(torch.equal(a, b) for a, b in zip(graph.csc, other.csc))


def test_self_loops_added_before_compiling():
    graph = Graph.from_edge_index(random_edges(9, 9, 40), 9, 9)
    looped, x = graph.with_self_loops(), torch.randn(9, 3)
    compiled = torch.compile(lambda g, x: sum_of_neighbours(g.with_self_loops(), x), backend=BACKEND, fullgraph=True)
    assert torch.equal(compiled(graph, x), sum_of_neighbours(looped, x))


def test_new_sizes_do_not_compile_again():
    backend = CountingBackend()
    compiled = torch.compile(sum_of_neighbours, backend=backend, fullgraph=True)
    for step in range(6):
        num_nodes, num_edges = 10 + step, 40 + 7 * step
        graph, x = (
            Graph.from_edge_index(random_edges(num_nodes, num_nodes, num_edges), num_nodes, num_nodes),
            torch.randn(num_nodes, 3),
        )
        assert torch.equal(compiled(graph, x), sum_of_neighbours(graph, x))
    assert backend.count <= 2  # once for static sizes, once for dynamic ones


def on_edge_index(edge_index: Tensor, x: Tensor) -> Tensor:
    return sum_of_neighbours(graph_from_edge_index(edge_index, x.size(0), x.size(0)), x)


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
def test_plain_edge_index_fullgraph(flow):
    def function(edge_index, x):
        return sum_of_neighbours(graph_from_edge_index(edge_index, x.size(0), x.size(0), flow=flow), x)

    edgeless.clear_cache()
    edge_index, x = random_edges(9, 9, 40), torch.randn(9, 3)
    compiled = torch.compile(function, backend=BACKEND, fullgraph=True)
    want = function(edge_index, x)
    before = edgeless.cache_info()
    assert torch.equal(compiled(edge_index, x), want)
    assert edgeless.cache_info() == before  # a traced graph is no graph to keep
    edge_index[:, 0] = 0
    assert torch.equal(compiled(edge_index, x), function(edge_index, x))


def test_plain_edge_index_of_new_sizes_does_not_compile_again():
    backend = CountingBackend()
    compiled = torch.compile(on_edge_index, backend=backend, fullgraph=True)
    for step in range(6):
        edge_index, x = random_edges(10 + step, 10 + step, 40 + 7 * step), torch.randn(10 + step, 3)
        assert torch.equal(compiled(edge_index, x), on_edge_index(edge_index, x))
    assert backend.count <= 2


def test_plain_edge_index_with_inductor():
    edge_index, x = random_edges(9, 9, 40), torch.randn(9, 3)
    compiled = torch.compile(on_edge_index, fullgraph=True)
    torch.testing.assert_close(compiled(edge_index, x), on_edge_index(edge_index, x))


def test_number_of_edges_known_at_run_time_only():
    def function(edge_index, mask, x):
        return on_edge_index(edge_index[:, mask], x)

    edge_index, x = random_edges(9, 9, 40), torch.randn(9, 3)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(function, backend=BACKEND, fullgraph=True)
        for mask in (edge_index[0] > 3, edge_index[0] > 5):
            assert torch.equal(compiled(edge_index, mask, x), function(edge_index, mask, x))


def test_ids_out_of_range_raise_at_run_time():
    edge_index, x = random_edges(9, 9, 40), torch.randn(9, 3)
    compiled = torch.compile(on_edge_index, backend=BACKEND, fullgraph=True)
    compiled(edge_index, x)
    edge_index[1, 7] = 9
    with pytest.raises(IndexError, match="row has id 9 at position 7, expected 0 <= id < num_rows = 9"):
        compiled(edge_index, x)
