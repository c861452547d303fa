"""TypedGraph: segments of both directions against a plain sort, means, pairs, caches, bad input."""

import copy
import pickle

import pytest
import torch
from devices import EVERY_DEVICE
from hypothesis import given, settings
from hypothesis import strategies as st

import edgeless
from edgeless import Graph, TypedGraph
from edgeless.graph.formats import tensors_of
from edgeless.ops.relational import _num_parts, typed_edges


def typed(num_src, num_dst, num_edges, num_types, seed=0, dtype=torch.int64, hub=0, device="cpu"):
    gen = torch.Generator().manual_seed(seed)
    ends = [torch.randint(max(n, 1), (num_edges,), generator=gen) for n in (num_src, num_dst)]
    ends[1][:hub] = 0
    types = torch.randint(num_types, (num_edges,), generator=gen)
    edge_index = torch.stack(ends).to(device, dtype)
    return TypedGraph.from_edge_index(edge_index, types.to(device, dtype), num_types, num_src, num_dst)


def check_direction(direction, types, num_types, cut):
    """What typed_edges gives of a direction of a graph is its edges sorted by (type, row), in segments, in parts."""
    found = typed_edges(*direction, types, num_types, cut)
    assert found[-1].device.type == "cpu"
    type_ptr, rows, ptr, indices, edge_ids, parts, count = (t.cpu() for t in found)
    indptr, others, ids = (t if t is None else t.cpu() for t in direction)
    types = types.cpu()
    num_rows, num_edges = indptr.numel() - 1, others.numel()
    of_row = torch.arange(num_rows).repeat_interleave(indptr.diff().long())
    ids = torch.arange(num_edges) if ids is None else ids.long()
    order = torch.argsort(types.long()[ids], stable=True)
    assert torch.equal(indices.long(), others.long()[order])
    assert torch.equal(edge_ids.long(), ids[order])
    segments = int(type_ptr[-1])
    assert count.tolist() == [segments]
    rows, lengths = rows[:segments].long(), ptr[: segments + 1].diff().long()
    assert ptr[0] == 0 and ptr[segments] == num_edges if num_edges else segments == 0
    assert segments == 0 or (int(lengths.min()) > 0 and int(lengths.max()) <= cut)
    assert torch.equal(rows.repeat_interleave(lengths), of_row[order])
    of_segment = torch.arange(num_types).repeat_interleave(type_ptr.diff().long())
    assert torch.equal(of_segment.repeat_interleave(lengths), types.long()[ids][order])
    # a segment ends only where the pair does, or at the cut
    same = (rows[1:] == rows[:-1]) & (of_segment[1:] == of_segment[:-1])
    assert bool((lengths[:-1][same] == cut).all())
    if parts.dim() == 1:  # on CUDA
        check_rows_of_segments(rows, parts, num_rows, num_edges)
    else:
        check_parts(type_ptr, rows, parts, num_rows, num_edges)


def check_rows_of_segments(rows, by_row, num_rows, num_edges):
    """Where the segments of every row begin, and behind it the segments."""
    assert by_row.shape == (num_rows + 1 + num_edges,)
    begins, segments = by_row[: num_rows + 1].long(), by_row[num_rows + 1 :][: rows.numel()].long()
    assert torch.equal(begins.diff(), torch.bincount(rows, minlength=num_rows))
    assert torch.equal(segments, rows.argsort(stable=True))


def check_parts(type_ptr, rows, parts, num_rows, num_edges):
    num_types = type_ptr.numel() - 1
    assert parts.shape == (_num_parts(num_rows, num_edges, num_types) + 1, 2 + num_types)
    assert torch.equal(parts[0, 2:], type_ptr[:-1].long()) and torch.equal(parts[-1, 2:], type_ptr[1:].long())
    assert bool((parts.diff(dim=0)[:, [0, *range(2, 2 + num_types)]] >= 0).all())
    assert parts[0, 0] == 0 and parts[-1, 0] == num_rows
    for part in range(parts.size(0) - 1):
        low, high = parts[part, 0], parts[part + 1, 0] + parts[part + 1, 1]
        for t in range(num_types):
            of_part = rows[parts[part, 2 + t] : parts[part + 1, 2 + t]]
            assert of_part.numel() == 0 or (of_part.min() >= low and of_part.max() < high)


@EVERY_DEVICE
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("sizes", [
    (50, 40, 400, 5), (3, 3, 0, 2), (0, 0, 0, 3), (1, 1, 30, 1), (2000, 3000, 60_000, 7), (300, 300, 40_000, 900),
    (5, 100_000, 30_000, 2), (7, 9, 50_000, 1), (3000, 2000, 270_000, 90),
])  # fmt: skip
@pytest.mark.parametrize("cut", [1, 3, 512])
def test_segments_of_both_directions(dtype, sizes, cut, device):
    for hub in (0, sizes[2] // 2):
        graph = typed(*sizes, dtype=dtype, hub=hub, device=device)
        for direction in (graph.graph.csr, graph.graph.csc):
            check_direction(direction, graph.edge_type, graph.num_types, cut)


@EVERY_DEVICE
def test_what_segments_are_sorted_from_is_not_kept_beside_them(device):
    """Eight bytes an edge; but where somebody has it, or shares it, it is not made again."""
    for side in ("by_src", "compact"):
        graph, other = (typed(50, 40, 400, 5, device=device) for _ in range(2))
        kept = other.graph.csc
        for ours, theirs in zip(tensors_of(getattr(graph, side)), tensors_of(getattr(other, side)), strict=True):
            assert torch.equal(ours, theirs)
        assert not graph.graph.has_csc and other.graph.csc is kept
    assert graph.split.num_edges == 400 and graph.graph.has_csc  # whose reversed graph has it for its own CSR


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 200), st.integers(1, 6), st.integers(1, 9), st.integers(1, 4), st.integers(0, 10_000))
def test_small_graphs(num_edges, num_nodes, num_types, cut, seed):
    graph = typed(num_nodes, num_nodes, num_edges, num_types, seed)
    check_direction(graph.graph.csr, graph.edge_type, num_types, cut)


def test_blocks_of_threads_change_nothing():
    graph, results = typed(400, 500, 90_000, 11, hub=40_000), []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(typed_edges(*graph.graph.csr, graph.edge_type, 11, 64))
    finally:
        torch.set_num_threads(before)
    segments = int(results[0][0][-1])
    for other in results[1:]:
        for i, (a, b) in enumerate(zip(results[0], other, strict=True)):
            end = {1: segments, 2: segments + 1}.get(i)
            assert torch.equal(a[:end], b[:end])


@EVERY_DEVICE
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_means_count_edges_of_the_same_relation(dtype, device):
    graph = typed(40, 50, 3000, 4, hub=1500, device=device)
    _, dst = graph.graph.edge_index()
    pair = graph.edge_type * 50 + dst
    expected = 1 / torch.bincount(pair)[pair].to(dtype)
    assert torch.allclose(graph.mean_weight(dtype), expected, rtol=1e-7)
    assert graph.mean_weight(dtype).dtype == dtype


@EVERY_DEVICE
@pytest.mark.parametrize("cut", [1, 64, 2**62])
@pytest.mark.parametrize("sizes", [(40, 50, 3000, 4), (3, 3, 0, 2), (0, 0, 0, 3), (7, 9, 5000, 2000)])
def test_means_of_segments_are_those_of_their_edges(sizes, cut, device):
    """Of a hub of many segments all have that of the pair."""
    graph = typed(*sizes, hub=sizes[2] // 2, device=device)
    type_ptr, rows, ptr, _, edge_ids, _, _ = typed_edges(*graph.graph.csr, graph.edge_type, sizes[3], cut)
    segments = int(type_ptr[-1])
    found = torch.ops.edgeless.typed_means(type_ptr, rows, ptr, None, torch.float32)[:segments]
    of_edges = graph.mean_weight(torch.float32)
    assert torch.equal(found, of_edges[edge_ids[ptr[:segments].long()].long()])


@pytest.mark.cuda
@pytest.mark.parametrize("num_types", [1, 400])
def test_a_mean_keeps_few_bytes_of_an_edge(num_types):
    """Ids of both ends and of the edge by destination and by source, and one weight; else numbers of segments alone."""
    src, dst = (torch.randint(3000, (1_000_000,), device="cuda") for _ in range(2))
    types = torch.randint(num_types, (1_000_000,), device="cuda")
    graph = TypedGraph.from_edge_index(torch.stack([src, dst]), types, num_types, 3000, 3000)
    segments = sum(graph.tiled(by_dst, torch.float32)[1].numel() for by_dst in (True, False))
    assert segments < 50_000 if num_types == 1 else segments > 1_000_000
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_of(graph._formats)}
    assert sum(storages.values()) <= 20 * 1_000_000 + 15 * segments + 200_000


@EVERY_DEVICE
def test_pairs(device):
    graph = typed(40, 50, 3000, 4, hub=1500, device=device)
    pairs = graph.pairs
    _, dst = graph.graph.edge_index()
    keys = torch.unique(graph.edge_type * 50 + dst)
    assert pairs.offsets[-1] == keys.numel() == pairs.neighbors.num_dst == pairs.sums.num_src
    rows = pairs.sums.edge_index()
    assert torch.equal(rows[1][rows[0].argsort()].long(), keys % 50)
    assert pairs.neighbors.num_edges == 3000


@EVERY_DEVICE
def test_compact_sources(device):
    graph = typed(40, 50, 3000, 4, hub=1500, device=device)
    pairs, edges = graph.compact
    src, dst = graph.graph.edge_index()
    keys = torch.unique(graph.edge_type * 40 + src)
    assert pairs.num_dst == pairs.num_edges == edges.num_src == keys.numel()
    sources, ids = pairs.graph.edge_index()
    assert torch.equal(sources[ids.argsort()].long(), keys % 40) and torch.equal(pairs.edge_type.long(), keys // 40)
    of_edge, to = edges.edge_index()
    assert torch.equal(keys[of_edge.long()], graph.edge_type * 40 + src) and torch.equal(to, dst)
    assert torch.equal(graph.pair_of_edge(), of_edge)
    again = edges.reverse().edge_index()
    assert torch.equal(again[1], of_edge) and torch.equal(again[0], to)
    assert torch.equal(edges.csc.indices.sort().values, to.sort().values)


@EVERY_DEVICE
def test_pairs_of_edges(device):
    ptr, ids = torch.tensor([0, 2, 3, 6]).to(device), torch.tensor([4, 1, 0, 2, 5, 3]).to(device)
    op = torch.ops.edgeless.pairs_of_edges
    assert op(ptr, ids).tolist() == [1, 0, 2, 2, 0, 2]
    assert op(ptr[:1].int(), ids[:0].int()).shape == (0,)
    with pytest.raises(ValueError, match=r"pairs_of_edges: ptr must have shape \[pairs \+ 1\], got \[1\]"):
        op(ptr[:1], ids)
    with pytest.raises(ValueError, match="pairs_of_edges: ptr must be Long, got Int"):
        op(ptr.int(), ids)
    with pytest.raises(ValueError, match=r"pairs_of_edges: ptr must be \[pairs \+ 1\], got shape \[2, 2\]"):
        op(ptr.view(2, 2), ids)


@EVERY_DEVICE
def test_pairs_at_both_ends(device):
    graph = typed(50, 50, 3000, 4, hub=1500, device=device)
    types, counts = graph.ends
    src, dst = graph.graph.edge_index()
    ends = [torch.unique(graph.edge_type.long() * 50 + nodes) for nodes in (dst, src)]
    assert counts == tuple(keys.numel() for keys in ends)
    nodes, of_type = types.edge_index()
    assert torch.equal(of_type, torch.cat((ends[0] // 50, ends[1] // 50 + 4)))
    assert torch.equal(nodes, torch.cat([keys % 50 for keys in ends]))
    again = types.reverse().edge_index()
    assert torch.equal(again[0], of_type) and torch.equal(again[1], nodes)


def test_copies_and_pickles():
    graph = typed(40, 50, 300, 4)
    graph.by_dst, graph.by_src, graph.pairs, graph.compact  # noqa: B018
    for other in (copy.copy(graph), copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))):
        assert all(torch.equal(a, b) for a, b in zip(other.by_dst, graph.by_dst, strict=True))
        assert other.memory_bytes() <= other.memory_bytes_at_most()
    assert repr(graph).startswith("TypedGraph(Graph(num_src=40, num_dst=50, num_edges=300")


def test_memory_grows_to_what_was_said():
    graph = typed(40, 50, 3000, 4)
    at_most = graph.memory_bytes_at_most()
    graph.by_dst, graph.by_src  # noqa: B018
    assert graph.memory_bytes() <= at_most


@pytest.mark.skipif(not hasattr(torch.library, "opcheck"), reason="torch.library.opcheck came with torch 2.4")
def test_opcheck():
    graph = typed(40, 50, 3000, 4)
    options = {"test_utils": ("test_schema", "test_autograd_registration", "test_faketensor")}
    torch.library.opcheck(torch.ops.edgeless.typed_edges, (*graph.graph.csr, graph.edge_type, 4, 16), **options)
    by_dst = graph.by_dst
    for edge_ids in (by_dst[4], None):
        torch.library.opcheck(torch.ops.edgeless.typed_means, (*by_dst[:3], edge_ids, torch.float32))
    torch.library.opcheck(torch.ops.edgeless.pairs_of_edges, (by_dst[2], by_dst[4]))


@EVERY_DEVICE
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("wrong", [4, -1, 2**31 - 1])
def test_types_out_of_range_are_named(wrong, dtype, device):
    types = torch.tensor([0, 3, 1, wrong, 2], dtype=dtype, device=device)
    edges = torch.tensor([[0, 1, 2, 3, 4], [0, 0, 1, 1, 1]], device=device)
    graph = TypedGraph(Graph.from_edge_index(edges), types, 4)
    with pytest.raises(IndexError, match=f"edge_type has id {wrong} at position 3, expected 0 <= id < num_types = 4"):
        graph.by_dst  # noqa: B018


@pytest.mark.parametrize("types,num_types,kind,message", [
    ([0, 1], 2, TypeError, r"TypedGraph: edge_type must be a Tensor of shape \[E\], got list"),
    (torch.zeros(4).long(), 2, ValueError, r"TypedGraph: edge_type must have shape \[E\] = \[5\], got \[4\]"),
    (torch.zeros(5), 2, ValueError, "TypedGraph: edge_type must have an integer dtype, got torch.float32"),
    (torch.zeros(5).long(), 2.0, TypeError, "TypedGraph: num_types must be an int, got float"),
    (torch.zeros(5).long(), -2, ValueError, "TypedGraph: num_types must not be negative, got -2"),
    (torch.zeros(5, device="meta").long(), 2, ValueError, "TypedGraph: edge_type must be on cpu, got meta"),
])  # fmt: skip
def test_bad_input_is_named(types, num_types, kind, message):
    graph = Graph.from_edge_index(torch.tensor([[0, 1, 2, 3, 4], [0, 0, 1, 1, 1]]))
    with pytest.raises(kind, match=message):
        TypedGraph(graph, types, num_types)
    assert edgeless.TypedGraph is TypedGraph
