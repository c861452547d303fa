"""The graph handle: both directions, original edge order, derived graphs, copies, and what it refuses."""

import copy
import io
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import edgeless
from edgeless import Graph
from edgeless.graph.handle import Compressed

#         a bipartite graph: 4 sources, 3 destinations, a multi-edge (0 -> 1 twice), source 3 and destination 2 isolated
EDGES = torch.tensor([[0, 1, 0, 2, 0, 1], [1, 0, 0, 1, 1, 1]])


def edges_of(compressed: Compressed, rows_are_sources: bool):
    """(src, dst) in original order, read edge by edge from the compressed arrays."""
    indptr, indices, edge_ids = (None if t is None else t.tolist() for t in compressed)
    edges = {}
    for row in range(len(indptr) - 1):
        for position in range(indptr[row], indptr[row + 1]):
            edge = position if edge_ids is None else edge_ids[position]
            edges[edge] = (row, indices[position]) if rows_are_sources else (indices[position], row)
    return torch.tensor([edges[e] for e in range(len(indices))], dtype=torch.int64).reshape(-1, 2).t()


def assert_graph(graph: Graph, edge_index, num_src, num_dst):
    edge_index = edge_index.long()
    assert (graph.num_src, graph.num_dst, graph.num_edges) == (num_src, num_dst, edge_index.size(1))
    assert torch.equal(edges_of(graph.csr, rows_are_sources=False), edge_index)
    assert torch.equal(edges_of(graph.csc, rows_are_sources=True), edge_index)
    assert torch.equal(graph.edge_index(), edge_index)
    assert graph.csr.indptr.numel() == num_dst + 1
    assert graph.csc.indptr.numel() == num_src + 1
    assert torch.equal(graph.in_degrees(), torch.bincount(edge_index[1], minlength=num_dst))
    assert torch.equal(graph.out_degrees(), torch.bincount(edge_index[0], minlength=num_src))
    _ = graph.csc  # from which they are read where it is there
    degrees = [graph.in_degrees(), graph.out_degrees(), graph.reverse().in_degrees()]
    assert all(d.dtype == torch.int64 for d in degrees) and torch.equal(degrees[1], degrees[2])
    assert graph.has_zero_in_degree == bool((graph.in_degrees() == 0).any())
    for tensor in (*graph.csr, *graph.csc):
        assert tensor is None or tensor.dtype == graph.index_dtype == torch.int32


# From edge_index -----------------------------------------------------------------------------------------------------


def test_from_edge_index():
    graph = Graph.from_edge_index(EDGES, 4, 3)
    assert_graph(graph, EDGES, 4, 3)
    assert graph.csr.indptr.tolist() == [0, 2, 6, 6]
    assert graph.csr.indices.tolist() == [1, 0, 0, 2, 0, 1]  # of one row: in their original order
    assert graph.csr.edge_ids.tolist() == [1, 2, 0, 3, 4, 5]
    assert graph.has_zero_in_degree
    assert graph.is_symmetric is None


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
def test_integer_dtypes(dtype):
    assert_graph(Graph.from_edge_index(EDGES.to(dtype), 4, 3), EDGES, 4, 3)
    graph = Graph.from_csr(torch.tensor([0, 1, 3], dtype=dtype), torch.tensor([1, 0, 1], dtype=dtype))
    assert_graph(graph, torch.tensor([[1, 0, 1], [0, 1, 1]]), 2, 2)


def test_number_of_nodes_from_the_ids():
    square = Graph.from_edge_index(EDGES)
    assert (square.num_src, square.num_dst) == (3, 3)
    assert Graph.from_edge_index(EDGES, num_src=9).num_dst == 2
    assert Graph.from_edge_index(EDGES, num_dst=9).num_src == 3
    empty = Graph.from_edge_index(torch.empty(2, 0, dtype=torch.int64))
    assert_graph(empty, torch.empty(2, 0), 0, 0)
    assert not empty.has_zero_in_degree


@pytest.mark.parametrize("num_src, num_dst", [(0, 0), (5, 0), (0, 5), (3, 2)])
def test_no_edges(num_src, num_dst):
    graph = Graph.from_edge_index(torch.empty(2, 0, dtype=torch.int64), num_src, num_dst)
    assert_graph(graph, torch.empty(2, 0), num_src, num_dst)
    assert graph.has_zero_in_degree == (num_dst > 0)
    assert graph.with_self_loops().num_edges == min(num_src, num_dst)


@pytest.mark.parametrize(
    "strided",
    [EDGES.t().contiguous().t(), EDGES.repeat_interleave(2, dim=1)[:, ::2], EDGES[:, :1].expand(2, 5), EDGES.flip(1)],
    ids=["transposed", "stepped", "expanded", "flipped"],
)
def test_strided_edge_index(strided):
    assert_graph(Graph.from_edge_index(strided, 4, 3), strided, 4, 3)


def test_hub_among_isolated_nodes():
    edge_index = torch.stack((torch.arange(500) % 40, torch.full((500,), 17)))
    assert_graph(Graph.from_edge_index(edge_index, 60, 60), edge_index, 60, 60)


def test_the_largest_degree_of_every_size():
    for indptr in ([0], [0, 0], [0, 2, 2, 5]):
        indptr = torch.tensor(indptr)
        graph = Graph.from_csr(indptr, torch.zeros(int(indptr[-1]), dtype=torch.long), 1)
        assert graph.max_in_degree == max([0, *indptr.diff().tolist()])


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 40), st.integers(0, 10**6))
def test_any_graph(num_src, num_dst, num_edges, seed):
    generator = torch.Generator().manual_seed(seed)
    ends = [torch.randint(n, (num_edges,), generator=generator) for n in (num_src, num_dst)]
    edge_index = torch.stack(ends)
    graph = Graph.from_edge_index(edge_index, num_src, num_dst)
    assert_graph(graph, edge_index, num_src, num_dst)
    assert_graph(graph.reverse(), edge_index.flip(0), num_dst, num_src)
    assert_graph(Graph.from_csr(*graph.csr[:2], num_src, edge_ids=graph.csr.edge_ids), edge_index, num_src, num_dst)
    assert_graph(Graph.from_csc(*graph.csc[:2], num_dst, edge_ids=graph.csc.edge_ids), edge_index, num_src, num_dst)
    assert_loops_replaced(graph, edge_index)


# What is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "edge_index, error, message",
    [
        ([[0], [1]], TypeError, r"edge_index must be a Tensor of shape \[2, E\], got list"),
        (torch.zeros(3, 5, dtype=torch.long), ValueError, r"edge_index must have shape \[2, E\], got \[3, 5\]"),
        (torch.zeros(2, dtype=torch.long), ValueError, r"edge_index must have shape \[2, E\], got \[2\]"),
        (torch.zeros(2, 1, 1, dtype=torch.long), ValueError, r"edge_index must have shape \[2, E\], got \[2, 1, 1\]"),
        (torch.zeros(2, 5), ValueError, "edge_index must have an integer dtype, got torch.float32"),
        (torch.zeros(2, 5, dtype=torch.bool), ValueError, "edge_index must have an integer dtype, got torch.bool"),
        (torch.eye(2).to_sparse(), ValueError, "edge_index must be a dense Tensor, got layout torch.sparse_coo"),
    ],
)
def test_edge_index_of_the_wrong_kind(edge_index, error, message):
    with pytest.raises(error, match="Graph.from_edge_index: " + message):
        Graph.from_edge_index(edge_index)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8])
def test_ids_out_of_range(dtype):
    edge_index = torch.tensor([[0, 1, 6], [0, 2, 1]], dtype=dtype)
    with pytest.raises(IndexError, match=r"edge_index\[0\] has id 6 at position 2, expected 0 <= id < num_src = 5"):
        Graph.from_edge_index(edge_index, 5, 3)
    with pytest.raises(IndexError, match=r"edge_index\[1\] has id 2 at position 1, expected 0 <= id < num_dst = 2"):
        Graph.from_edge_index(edge_index, 7, 2)
    with pytest.raises(IndexError, match=r"edge_index\[0\] has id -1 at position 0, expected 0 <= id < num_src = 7"):
        Graph.from_edge_index(torch.tensor([[-1, 0], [0, 0]], dtype=dtype), 7, 2)
    with pytest.raises(IndexError, match=r"edge_index\[1\] has id -1 at position 0"):
        Graph.from_edge_index(torch.tensor([[0], [-1]], dtype=dtype))


def test_wrong_numbers_of_nodes():
    for name in ("num_src", "num_dst"):
        with pytest.raises(ValueError, match=f"{name} must not be negative, got -1"):
            Graph.from_edge_index(EDGES, **{name: -1})
        with pytest.raises(TypeError, match=f"{name} must be an int, got float"):
            Graph.from_edge_index(EDGES, **{name: 4.0})


def test_symmetry_is_declared_not_guessed():
    there_and_back = torch.tensor([[0, 1], [1, 0]])
    assert Graph.from_edge_index(there_and_back).is_symmetric is None
    graph = Graph.from_edge_index(there_and_back, is_symmetric=True)
    assert graph.is_symmetric
    assert graph.reverse().is_symmetric
    assert graph.with_self_loops().is_symmetric
    with pytest.raises(ValueError, match="is_symmetric needs as many sources as destinations, got 4 and 3"):
        Graph.from_edge_index(EDGES, 4, 3, is_symmetric=True)


@pytest.mark.parametrize("build, other", [(Graph.from_csr, "num_src"), (Graph.from_csc, "num_dst")])
def test_compressed_arrays_of_the_wrong_kind(build, other):
    indptr, indices = torch.tensor([0, 1, 3]), torch.tensor([1, 0, 1])
    cases = [
        ((indptr.tolist(), indices), {}, TypeError, r"indptr must be a Tensor of shape \[rows \+ 1\], got list"),
        ((indptr.float(), indices), {}, ValueError, "indptr must have an integer dtype, got torch.float32"),
        ((indptr[:0], indices), {}, ValueError, r"indptr must have shape \[rows \+ 1\], got \[0\]"),
        ((indptr, indices[None]), {}, ValueError, r"indices must have shape \[E\], got \[1, 3\]"),
        ((torch.tensor([1, 1, 3]), indices), {}, ValueError, "indptr must run from 0 to E = 3, got 1 to 3"),
        ((torch.tensor([0, 1, 2]), indices), {}, ValueError, "indptr must run from 0 to E = 3, got 0 to 2"),
        ((torch.tensor([0, 5, 3]), indices), {}, ValueError, "indptr must not fall, but row 1 runs from 5 to 3"),
        ((indptr, indices + 1), {}, IndexError, f"indices has id 2 at position 0, expected 0 <= id < {other} = 2"),
        ((indptr, indices, 1), {}, IndexError, f"indices has id 1 at position 0, expected 0 <= id < {other} = 1"),
        ((indptr, indices, -1), {}, ValueError, f"{other} must not be negative, got -1"),
        ((indptr, indices), {"edge_ids": indices[:2]}, ValueError, r"edge_ids must have shape \[3\], got \[2\]"),
        ((indptr, indices), {"edge_ids": indices}, ValueError, "edge_ids must be a permutation .* 2 is missing"),
        (
            (indptr, indices),
            {"edge_ids": indices + 2},
            IndexError,
            "edge_ids has id 3 at position 0, expected .* E = 3",
        ),
        ((indptr, indices.to("meta")), {}, ValueError, "indices must be on the device of indptr, cpu, got meta"),
        ((indptr, indices, 5), {"is_symmetric": True}, ValueError, "is_symmetric needs as many sources as dest"),
    ]
    for args, options, error, message in cases:
        with pytest.raises(error, match=message):
            build(*args, **options)


# From CSR and CSC ----------------------------------------------------------------------------------------------------


def test_from_csr_shares_what_fits():
    indptr, indices = torch.tensor([0, 1, 3], dtype=torch.int32), torch.tensor([1, 0, 1], dtype=torch.int32)
    graph = Graph.from_csr(indptr, indices)
    assert graph.csr.indptr is indptr
    assert graph.csr.indices is indices
    assert graph.csr.edge_ids is None
    assert not graph.has_csc
    assert_graph(graph, torch.tensor([[1, 0, 1], [0, 1, 1]]), 2, 2)
    assert graph.has_csc


def test_from_csc_builds_csr_when_asked():
    graph = Graph.from_csc(torch.tensor([0, 1, 3]), torch.tensor([4, 0, 1]), 5, edge_ids=torch.tensor([2, 0, 1]))
    assert graph.has_csc
    assert_graph(graph, torch.tensor([[1, 1, 0], [0, 1, 4]]), 2, 5)


def test_transpose_is_built_once():
    graph = Graph.from_edge_index(EDGES, 4, 3)
    assert not graph.has_csc
    assert graph.csc is graph.csc
    assert graph.has_csc
    assert graph.csr is graph.csr


# Derived graphs ------------------------------------------------------------------------------------------------------


def assert_loops_replaced(graph, edge_index):
    """The contract of with_self_loops, edge by edge."""
    looped = graph.with_self_loops()
    kept = [e for e in range(edge_index.size(1)) if edge_index[0, e] != edge_index[1, e]]
    loops = torch.arange(min(graph.num_src, graph.num_dst))
    want = torch.cat((edge_index[:, kept], torch.stack((loops, loops))), dim=1)
    assert_graph(looped, want, graph.num_src, graph.num_dst)
    if len(kept) == edge_index.size(1):
        assert looped._kept is None
    else:
        assert looped._kept.dtype == torch.int64
        assert looped._kept.tolist() == kept
    assert graph.with_self_loops() is looped


@pytest.mark.parametrize("num_src,num_dst", [(7, 7), (9, 4), (3, 8), (0, 5)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_built_with_self_loops(num_src, num_dst, dtype):
    """The same graph in one step, of which with_self_loops() says that its loops are its own."""
    gen = torch.Generator().manual_seed(0)
    num_edges = 30 if num_src else 0
    rows = [torch.randint(n, (num_edges,), generator=gen) for n in (max(num_src, 1), num_dst)]
    edge_index = torch.stack(rows).to(dtype)
    graph = Graph.from_edge_index(edge_index, num_src, num_dst, self_loops=True)
    want = Graph.from_edge_index(edge_index, num_src, num_dst).with_self_loops()
    again, of_want = graph.with_self_loops(), want.with_self_loops()
    plain = Graph.from_edge_index(want.edge_index(), num_src, num_dst).with_self_loops()
    for found in (graph, again, of_want):
        assert torch.equal(found.edge_index(), want.edge_index())
        for arrays, expected in ((found.csr, want.csr), (found.csc, want.csc)):
            assert all(map(torch.equal, arrays, expected))
    for found in (again, of_want):
        assert found._kept is plain._kept is None or torch.equal(found._kept, plain._kept)
    assert again.csr[1].data_ptr() == graph.csr[1].data_ptr()  # nothing was sorted
    assert again.cached_max_degrees() == graph.cached_max_degrees()


def test_with_self_loops():
    edge_index = torch.tensor([[0, 1, 1, 2, 1], [0, 1, 2, 0, 1]])
    graph = Graph.from_edge_index(edge_index)
    assert_loops_replaced(graph, edge_index)
    assert graph.num_edges == 5  # itself unchanged
    assert_loops_replaced(Graph.from_edge_index(edge_index, 3, 5), edge_index)
    assert_loops_replaced(Graph.from_edge_index(edge_index, 6, 4), edge_index)
    no_loops = edge_index[:, 2:4]
    assert_loops_replaced(Graph.from_edge_index(no_loops), no_loops)


def test_reverse_shares_tensors():
    graph = Graph.from_edge_index(EDGES, 4, 3)
    reverse = graph.reverse()
    assert reverse.csc is graph.csr
    assert_graph(reverse, EDGES.flip(0), 3, 4)
    assert not graph.has_csc  # the handle itself is immutable
    graph.csc  # noqa: B018
    assert graph.reverse().csr is graph.csc


def test_to_is_itself_or_a_new_handle():
    graph = Graph.from_edge_index(EDGES, 4, 3)
    assert graph.to("cpu") is graph
    moved = graph.with_self_loops().to("meta")
    assert moved.device == torch.device("meta")
    assert graph.device == torch.device("cpu")
    assert (moved.num_src, moved.num_dst, moved.num_edges) == (4, 3, 7)
    assert moved._kept.device == torch.device("meta")
    assert not moved.has_csc


@pytest.mark.parametrize(
    "clone",
    [copy.copy, copy.deepcopy, lambda g: pickle.loads(pickle.dumps(g)), lambda g: _saved_and_loaded(g)],
    ids=["copy", "deepcopy", "pickle", "torch.save"],
)
def test_copies_are_the_same_graph(clone):
    edge_index = torch.tensor([[0, 1, 1, 2], [1, 1, 2, 0]])
    graph = Graph.from_edge_index(edge_index, 4, 4, is_symmetric=False)
    alone = len(pickle.dumps(graph))
    graph.with_self_loops()
    assert len(pickle.dumps(graph)) == alone  # what can be derived is not written
    for original, want in ((graph, edge_index), (graph.with_self_loops(), graph.with_self_loops().edge_index())):
        copied = clone(original)
        assert copied is not original
        assert copied.is_symmetric is False
        assert copied._kept is original._kept or torch.equal(copied._kept, original._kept)
        assert_graph(copied, want, 4, 4)
    assert_loops_replaced(clone(graph), edge_index)


def _saved_and_loaded(graph):
    file = io.BytesIO()
    torch.save(graph, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


# Facts ---------------------------------------------------------------------------------------------------------------


def test_memory_is_what_the_tensors_take():
    graph = Graph.from_edge_index(EDGES, 4, 3)
    csr = 4 * (4 + 6 + 6)
    assert graph.memory_bytes() == csr
    most = graph.memory_bytes_at_most()
    graph.csc  # noqa: B018
    assert graph.memory_bytes() == csr + 4 * (5 + 6 + 6) == most
    looped = graph.with_self_loops()
    assert looped._kept is not None
    assert graph.memory_bytes() == most + looped.memory_bytes()
    looped.csc  # noqa: B018
    looped.degree_scale("dst", -1.0, torch.float32)
    assert graph.memory_bytes() == graph.memory_bytes_at_most()
    shared = Graph.from_csr(graph.csr.indptr, graph.csr.indptr[:0], 4, validate=False)
    assert shared.memory_bytes() == 4 * 4


def test_ids_of_kept_edges_are_part_of_the_memory_that_a_graph_may_grow_to():
    looped = Graph.from_edge_index(EDGES, 4, 3).with_self_loops()
    most = looped.memory_bytes_at_most()
    assert looped._kept is not None and looped.memory_bytes() < most
    looped.csc  # noqa: B018
    assert looped.memory_bytes() == most


def test_degrees_do_not_build_the_other_direction():
    graph = Graph.from_edge_index(EDGES, 4, 3)
    assert graph.out_degrees().tolist() == [3, 2, 1, 0]
    assert not graph.has_csc
    assert graph.reverse().in_degrees().tolist() == [3, 2, 1, 0]


def test_repr_says_what_it_is():
    assert repr(Graph.from_edge_index(EDGES, 4, 3)) == "Graph(num_src=4, num_dst=3, num_edges=6, device='cpu', int32)"
    square = Graph.from_edge_index(EDGES[:, :0], 2, 2, is_symmetric=True)
    assert repr(square) == "Graph(num_src=2, num_dst=2, num_edges=0, device='cpu', int32, symmetric)"


def test_facts_cannot_be_assigned():
    graph = Graph.from_edge_index(EDGES, 4, 3)
    for name in ("num_src", "num_dst", "num_edges", "csr", "csc", "is_symmetric"):
        with pytest.raises(AttributeError):
            setattr(graph, name, None)


def test_built_under_inference_mode_it_serves_training():
    with torch.inference_mode():
        indptr, indices = torch.tensor([0, 1, 3], dtype=torch.int32), torch.tensor([1, 0, 1], dtype=torch.int32)
        assert indptr.is_inference()
        graphs = [Graph.from_edge_index(EDGES.clone()), Graph.from_csr(indptr, indices)]
        graphs += [graph.with_self_loops() for graph in graphs]
        for graph in graphs:
            graph.csc  # noqa: B018
    for graph in graphs:
        for tensor in (*graph.csr, *graph.csc, graph._kept):
            assert tensor is None or not tensor.is_inference()


def test_exported():
    assert edgeless.Graph is Graph


@pytest.mark.parametrize("side,degrees", [("src", [4, 0, 1]), ("dst", [0, 4, 1])])
@pytest.mark.parametrize("isolated", [1.0, 0.0])
def test_powers_of_degrees_are_kept(side, degrees, isolated):
    graph = Graph.from_edge_index(torch.tensor([[0, 0, 0, 0, 2], [1, 1, 1, 1, 2]]), 3, 3)
    scale = graph.degree_scale(side, -0.5, torch.float64, isolated=isolated)
    assert torch.equal(scale, torch.tensor([d**-0.5 if d else isolated for d in degrees], dtype=torch.float64))
    assert graph.degree_scale(side, -0.5, torch.float64, isolated=isolated) is scale


def test_edge_ids_of_the_transpose_are_kept_from_when_they_are_needed():
    graph = Graph.from_edge_index(EDGES, 4, 3)
    indptr, indices = graph.csc_arrays(by_edge=False)
    assert graph.has_csc and graph.csc_arrays(by_edge=False)[0] is indptr
    assert graph.memory_bytes() == 4 * (4 + 6 + 6) + 4 * (5 + 6)
    assert graph.out_degrees().tolist() == [3, 2, 1, 0]
    assert_graph(pickle.loads(pickle.dumps(graph)), EDGES, 4, 3)
    assert_graph(graph.reverse(), EDGES.flip(0), 3, 4)
    whole = graph.csc_arrays(by_edge=True)
    assert len(whole) == 3 and torch.equal(whole[0], indptr) and torch.equal(whole[1], indices)
    assert all(a is b for a, b in zip(graph.csc, whole, strict=True))
    assert graph.csc_arrays(by_edge=False)[0] is whole[0]  # held once
    assert graph.memory_bytes() == graph.memory_bytes_at_most()
    assert [len(graph.csr_arrays(by_edge)) for by_edge in (False, True)] == [2, 3]
    sorted_graph = Graph.from_csr(*graph.csr[:2], 4)
    assert len(sorted_graph.csr_arrays(by_edge=True)) == 2  # positions are the ids
