"""Graphs under torch.compile: as arguments, and built from an edge_index inside the compiled program."""

import pytest
import torch
from devices import EVERY_DEVICE
from torch import Tensor

import edgeless
from edgeless import Graph
from edgeless.cache import graph_from_edge_index

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.skipif(not hasattr(torch.library, "register_fake"), reason="needs torch 2.4"),
]

needs_program_cache = pytest.mark.skipif(not hasattr(torch.Tag, "cudagraph_unsafe"), reason="needs this tag")

BACKEND = "aot_eager"  # traces like inductor and needs no C++ compiler


class CountingBackend:
    """``aot_eager`` that counts how often Dynamo compiled."""

    def __init__(self):
        self.count = 0

    def __call__(self, module, inputs):
        self.count += 1
        return torch._dynamo.lookup_backend(BACKEND)(module, inputs)


def sum_of_neighbours(graph: Graph, x: Tensor) -> Tensor:
    """[Ns, C] -> [Nd, C], through the CSR tensors of the graph."""
    indptr, indices, _ = graph.csr
    nodes = torch.arange(graph.num_dst, device=x.device)
    rows = nodes.repeat_interleave(indptr.diff(), output_size=graph.num_edges)
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
    assert all(torch.equal(a, b) for a, b in zip(graph.csc, other.csc, strict=True))


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


def both_directions(edge_index: Tensor, x: Tensor) -> Tensor:
    graph = graph_from_edge_index(edge_index, x.size(0), x.size(0))
    return sum_of_neighbours(graph, x) * graph.csc.indptr.diff().unsqueeze(1)


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
def test_plain_edge_index_fullgraph(flow):
    def function(edge_index, x):
        return sum_of_neighbours(graph_from_edge_index(edge_index, x.size(0), x.size(0), flow=flow), x)

    edgeless.clear_cache()
    edge_index, x = random_edges(9, 9, 40), torch.randn(9, 3)
    compiled = torch.compile(function, backend=BACKEND, fullgraph=True)
    want = function(edge_index, x)
    assert torch.equal(compiled(edge_index, x), want)
    assert edgeless.cache_info().graphs == 1  # a traced graph is no graph to keep
    edge_index[:, 0] = 0
    assert torch.equal(compiled(edge_index, x), function(edge_index, x))


@needs_program_cache
@EVERY_DEVICE
def test_a_program_finds_the_graph_that_is_cached(device):
    edgeless.clear_cache()
    edge_index, x = random_edges(9, 9, 40).to(device), torch.randint(-9, 9, (9, 3), device=device).float()
    compiled = torch.compile(both_directions, backend=BACKEND, fullgraph=True)
    for _ in range(3):
        assert torch.equal(compiled(edge_index, x), both_directions(edge_index, x))
    info = edgeless.cache_info()
    assert (info.misses, info.graphs) == (1, 1) and info.hits >= 3 + 3  # the compiled calls and the plain ones
    edge_index[:, 0] = 0
    assert torch.equal(compiled(edge_index, x), both_directions(edge_index, x))
    assert edgeless.cache_info().misses == 2


@needs_program_cache
def test_a_program_builds_anew_without_a_cache(monkeypatch):
    monkeypatch.setenv("EDGELESS_CACHE", "0")
    edgeless.clear_cache()
    edge_index, x = random_edges(9, 9, 40), torch.randn(9, 3)
    compiled = torch.compile(both_directions, backend=BACKEND, fullgraph=True)
    assert torch.equal(compiled(edge_index, x), both_directions(edge_index, x))
    assert edgeless.cache_info().graphs == 0


@needs_program_cache
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("self_loops", [False, True])
@pytest.mark.parametrize("edges", ["random", "no loops"])
@pytest.mark.parametrize("by_edge", [False, True])
def test_what_a_program_gets_are_copies_of_the_cached_arrays(reverse, self_loops, edges, by_edge):
    flow = "target_to_source" if reverse else "source_to_target"
    edge_index = random_edges(9, 9, 40)
    if edges == "no loops":
        edge_index = edge_index[:, edge_index[0] != edge_index[1]].contiguous()
    graph = graph_from_edge_index(edge_index, 9, 9, flow=flow, self_loops=self_loops)
    key = (edge_index, 9, 9, reverse, self_loops)
    ops = torch.ops.edgeless
    room = graph.num_edges if by_edge or not self_loops else edge_index.size(1) + 9
    for transposed, cached in ((False, graph.csr), (True, graph.csc)):
        rows, ids = (op(*key, room, transposed) for op in (ops.cached_rows, ops.cached_edge_ids))
        indptr, indices = rows.split((10, room))
        assert torch.equal(indptr, cached.indptr) and indptr.dtype == cached.indptr.dtype
        for found, want in ((indices, cached.indices), (ids, cached.edge_ids)):
            assert found.numel() == room and found.dtype == want.dtype
            assert torch.equal(found[: graph.num_edges], want) and not found[graph.num_edges :].any()
        rows.zero_(), ids.zero_()
    again = graph_from_edge_index(edge_index.clone(), 9, 9, flow=flow, self_loops=self_loops)
    for changed, want in zip((*graph.csr, *graph.csc), (*again.csr, *again.csc), strict=True):
        assert torch.equal(changed, want)
    if self_loops and by_edge:
        every, kept = torch.arange(edge_index.size(1)), ops.cached_kept_edges(*key)
        assert torch.equal(kept, every if graph._kept is None else graph._kept)
        torch.library.opcheck(ops.cached_kept_edges, key)
    for op in (ops.cached_rows, ops.cached_edge_ids):
        torch.library.opcheck(op, (*key, room, False))


@needs_program_cache
def test_a_program_copies_what_it_uses_alone():
    """Neither edge ids nor, without a gradient, the transpose."""
    seen = []

    def backend(module, inputs):
        return torch._dynamo.backends.common.aot_autograd(fw_compiler=lambda m, _: seen.append(m) or m)(module, inputs)

    edge_index, x = random_edges(9, 9, 40), torch.randn(9, 3)
    compiled = torch.compile(on_edge_index, backend=backend, fullgraph=True)
    assert torch.equal(compiled(edge_index, x), on_edge_index(edge_index, x))
    (program,) = seen
    calls = [str(node.target) for node in program.graph.nodes if "edgeless" in str(node.target)]
    assert calls == ["edgeless.cached_rows.default"]


@needs_program_cache
def test_an_exported_program_holds_no_cache():
    class Module(torch.nn.Module):
        def forward(self, edge_index, x):
            return on_edge_index(edge_index, x)

    program = torch.export.export(Module(), (random_edges(9, 9, 40), torch.randn(9, 3)))
    assert "cached_rows" not in str(program) and "coo_to_csr" in str(program)


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
    with pytest.raises(IndexError, match="has id 9 at position 7, expected 0 <= id < num_(rows|dst) = 9"):
        compiled(edge_index, x)
