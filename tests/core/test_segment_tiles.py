"""Tiles of segments and rows: the op against plain PyTorch, bit for bit, and what a tile may hold."""

import itertools

import pytest
import torch
from devices import EVERY_DEVICE, without_waiting
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeless import TypedGraph
from edgeless.ops.relational import segment_tiles, typed_edges

# Of core_cuda/relational/tiling.h.
OF_TILE, OF_SEGMENT = 576, 8
OF_ROW_TILE, OF_ROW = 1024, 16
HUB_PART = 512


def typed(num_src, num_dst, num_edges, num_types, *, hub=0, empty=0, dtype=torch.int32, seed=0, device="cpu"):
    """The first ``hub`` edges have one destination; the last ``empty`` types have no edges."""
    gen = torch.Generator().manual_seed(seed)
    ends = [torch.randint(max(n, 1), (num_edges,), generator=gen) for n in (num_src, num_dst)]
    ends[1][:hub] = num_dst // 2
    types = torch.randint(max(num_types - empty, 1), (num_edges,), generator=gen)
    edge_index = torch.stack(ends).to(device, dtype)
    return TypedGraph.from_edge_index(edge_index, types.to(device, dtype), num_types, num_src, num_dst)


def segments_of(graph, cut, by_dst=True, full=False):
    """What the op is given: type_ptr, rows, ptr, by_row, num_edges. full: with room for as many segments as edges."""
    wide = graph.graph.csr if by_dst else graph.graph.csc
    dtype = graph.edge_type.dtype
    direction = [None if t is None else t.to(dtype) for t in wide]
    num_rows, num_edges = direction[0].numel() - 1, graph.num_edges
    type_ptr, rows, ptr, _, _, by_row, _ = typed_edges(*direction, graph.edge_type, graph.num_types, cut)
    segments = int(type_ptr[-1])
    rows[segments:], ptr[segments:] = num_rows, num_edges
    if by_row.dim() == 2:  # on the CPU, where no kernel asks for it
        counts = torch.bincount(rows[:segments], minlength=num_rows)
        by_row = torch.cat((counts.new_zeros(1), counts.cumsum(0), rows.argsort(stable=True))).to(dtype)
    if not full:
        rows, ptr, by_row = rows[:segments], ptr[: segments + 1], by_row[: num_rows + 1 + segments]
    return type_ptr, rows, ptr, by_row, num_edges


def reference(type_ptr, rows, ptr, by_row, num_edges, split_hubs):
    """The same from PyTorch's own ops."""
    row_tiles, of_rows, parts = reference_rows(by_row, by_row.numel() - 1 - rows.numel(), rows.numel(), split_hubs)
    return *reference_tiles(type_ptr, ptr, num_edges), row_tiles, of_rows, parts


def reference_tiles(type_ptr, ptr, num_edges):
    num_types = type_ptr.numel() - 1
    places = ptr.long() + OF_SEGMENT * torch.arange(ptr.numel(), device=ptr.device)
    begins, ends = type_ptr.long(), places[type_ptr.long()]
    if num_types == 0:
        return type_ptr, type_ptr
    first_tiles = torch.cat((begins.new_zeros(1), ((ends.diff() + OF_TILE - 1) // OF_TILE).cumsum(0)))
    most = num_edges + OF_SEGMENT * (ptr.numel() - 1)
    tiles = torch.arange(most // OF_TILE + num_types + 1, device=ptr.device)
    types = (torch.searchsorted(first_tiles, tiles, right=True) - 1).clamp(max=num_types - 1)
    segments = torch.searchsorted(places, ends[types] + OF_TILE * (tiles - first_tiles[types]))
    return first_tiles.to(ptr.dtype), torch.minimum(segments, begins[types + 1]).to(ptr.dtype)


def reference_rows(by_row, num_rows, num_segments, split_hubs):
    ptr, parts, of_rows = by_row[: num_rows + 1].long(), by_row.new_empty((2, 0)), by_row.new_empty(0)
    added = num_segments
    if split_hubs and num_rows and int(ptr.diff().max()) > HUB_PART:
        of_rows, parts = reference_hubs(by_row, ptr, num_segments)
        ptr, added = of_rows[: num_rows + 1].long(), of_rows.numel() - num_rows - 1
    places = ptr + OF_ROW * torch.arange(num_rows + 1, device=ptr.device)
    most = added + OF_ROW * num_rows
    tiles = OF_ROW_TILE * torch.arange((most + OF_ROW_TILE - 1) // OF_ROW_TILE + 1, device=ptr.device)
    return torch.searchsorted(places, tiles).clamp(max=num_rows).to(by_row.dtype), of_rows, parts


def reference_hubs(by_row, ptr, num_segments):
    counts, segments = ptr.diff(), by_row[ptr.numel() :]
    of_row = torch.where(counts > HUB_PART, (counts + HUB_PART - 1) // HUB_PART, 0)
    hubs = torch.arange(counts.numel(), device=ptr.device).repeat_interleave(of_row)
    begins = ptr[hubs] + HUB_PART * (torch.arange(hubs.numel(), device=ptr.device) - (of_row.cumsum(0) - of_row)[hubs])
    parts = torch.stack((begins, torch.minimum(begins + HUB_PART, ptr[hubs + 1])))
    added = torch.where(of_row > 0, of_row, counts)
    own = (of_row == 0).repeat_interleave(counts)
    numbers = segments.new_empty(int(added.sum()))
    of_hub = (of_row > 0).repeat_interleave(added)
    numbers[of_hub] = torch.arange(num_segments, num_segments + hubs.numel(), dtype=by_row.dtype, device=ptr.device)
    numbers[~of_hub] = segments[: own.numel()][own]
    ends = torch.cat((added.new_zeros(1), added.cumsum(0)))
    return torch.cat((ends.to(by_row.dtype), numbers)), parts.to(by_row.dtype)


def check(args, split_hubs=True):
    found, expected = segment_tiles(*args, split_hubs), reference(*args, split_hubs)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == args[0].dtype and torch.equal(ours, theirs)
    return found


def check_tiles(args, found):
    """A tile has segments of one type and bounded work, and rows add up what is theirs."""
    type_ptr, rows, ptr, by_row, _ = args
    num_rows = by_row.numel() - 1 - rows.numel()
    type_tiles, tiles, row_tiles, of_rows, parts = found
    assert type_tiles[0] == 0 and tiles[0] == 0 and tiles[-1] == type_ptr[-1]
    for kind in range(type_ptr.numel() - 1):
        first, last = int(type_tiles[kind]), int(type_tiles[kind + 1])
        assert last < tiles.numel()
        ends = [*tiles[first:last].tolist(), int(type_ptr[kind + 1])]
        assert ends[0] == type_ptr[kind] and ends == sorted(ends)
        for begin, end in itertools.pairwise(ends):
            assert end - begin <= 64  # kTileSegments of core_cuda/relational/cuda/segment_tiles.h
            assert ptr[end] - ptr[begin] < OF_TILE + 64
    begins, segments, num_segments = by_row[: num_rows + 1], by_row[num_rows + 1 :], ptr.numel() - 1
    added = of_rows if of_rows.numel() else by_row
    offsets, numbers = added[: num_rows + 1], added[num_rows + 1 :]
    assert row_tiles[0] == 0 and row_tiles[-1] == num_rows and row_tiles.diff().min() >= 0
    assert row_tiles.diff().max() <= 64
    assert offsets[row_tiles.long()].diff().max() <= OF_ROW_TILE + HUB_PART
    for row in range(num_rows):
        of_row = []
        for number in numbers[offsets[row] : offsets[row + 1]].tolist():
            begin, end = parts[:, number - num_segments].tolist() if number >= num_segments else (0, 0)
            assert end - begin <= HUB_PART
            of_row += segments[begin:end].tolist() if number >= num_segments else [number]
        assert of_row == segments[begins[row] : begins[row + 1]].tolist()


@EVERY_DEVICE
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("sizes,more", [
    ((40, 50, 3000, 1), {}),
    ((40, 50, 3000, 4), {"hub": 2500}),
    ((40, 50, 3000, 300), {"hub": 2500, "empty": 40}),
    ((40, 50, 3000, 5000), {}),
    ((3, 4, 0, 2), {}),
    ((0, 0, 0, 3), {}),
    ((0, 0, 0, 0), {}),
    ((5, 3000, 0, 0), {}),
    ((1, 1, 513, 513), {}),
    ((2, 2, 20_000, 700), {}),
    ((70, 5000, 60_000, 3), {"hub": 30_000, "empty": 1}),
])  # fmt: skip
def test_tiles_are_those_of_plain_pytorch(sizes, more, dtype, device):
    graph = typed(*sizes, **more, dtype=dtype, device=device)
    for cut, by_dst in itertools.product((1, 64), (True, False)):
        check(segments_of(graph, cut, by_dst))
        check(segments_of(graph, cut, by_dst, full=True), split_hubs=False)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 3000), st.integers(1, 200), st.integers(1, 40), st.sampled_from([1, 2, 64]),
    st.sampled_from([0, 511, 512, 513, 1024, 1025, 3000]), st.integers(0, 39), st.integers(0, 10_000),
)  # fmt: skip
def test_small_graphs(num_edges, num_nodes, num_types, cut, hub, empty, seed):
    graph = typed(num_nodes, num_nodes, num_edges, num_types, hub=hub, empty=min(empty, num_types), seed=seed)
    args = segments_of(graph, cut)
    check_tiles(args, check(args))
    check(segments_of(graph, cut, full=True), split_hubs=False)


@pytest.mark.parametrize("most", [3, 511, 512, 513, 1024, 2000])
def test_hubs_are_parts(most):
    """The longest row has just as many segments."""
    dst = torch.cat((torch.full((most,), 7), torch.full((700,), 8), torch.arange(300)))
    edges = torch.stack((torch.zeros_like(dst), dst)).int()
    args = segments_of(TypedGraph.from_edge_index(edges, torch.zeros(dst.numel()).int(), 1, 1, 300), 1)
    found = check(args)
    check_tiles(args, found)
    hubs = [count for count in (most + 1, 701) if count > HUB_PART]
    assert found[4].size(1) == sum(-(-count // HUB_PART) for count in hubs)


@pytest.mark.cuda
def test_a_graph_keeps_them():
    graph = typed(40, 50, 9000, 900, hub=6000, device="cuda")
    at_most = graph.memory_bytes_at_most()
    for by_dst, mean in itertools.product((True, False), (None, torch.float32)):
        found = graph.tiled(by_dst, mean)
        assert graph.memory_bytes() <= at_most
        segments = graph.by_dst if by_dst else graph.by_src
        expected = reference(*segments[:3], segments[5], graph.num_edges, True)
        assert expected[4].size(1) > 0 or not by_dst
        added = expected[3] if expected[3].numel() else segments[5]
        wanted = [*segments, *expected[:3], added, expected[4]]
        if mean is not None:
            assert ("mean", mean) not in graph._formats  # by edge, for which nobody has asked
            of_edges = typed(40, 50, 9000, 900, hub=6000, device="cuda").mean_weight(mean)[segments[4].long()]
            wanted.append(of_edges[segments[2][:-1].long()].unsqueeze(1) if by_dst else of_edges)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        assert all(a is b for a, b in zip(graph.tiled(by_dst, mean), found, strict=True))


@pytest.mark.cuda
@pytest.mark.parametrize("sizes,split_hubs", [((2, 2, 20_000, 700), False), ((40, 50, 200, 4), True)])
def test_does_not_wait_where_it_looks_for_no_hubs(sizes, split_hubs):
    args = segments_of(typed(*sizes, device="cuda"), 64)
    without_waiting(lambda: segment_tiles(*args, split_hubs))


@EVERY_DEVICE
@pytest.mark.skipif(not hasattr(torch.library, "opcheck"), reason="torch.library.opcheck came with torch 2.4")
@pytest.mark.parametrize("hub", [0, 2500])
def test_opcheck(hub, device):
    graph = typed(40, 50, 3000, 4, hub=hub, device=device)
    options = {"test_utils": ("test_schema", "test_autograd_registration", "test_faketensor")}
    for split_hubs in (True, False):
        torch.library.opcheck(torch.ops.edgeless.segment_tiles, (*segments_of(graph, 1), split_hubs), **options)


@EVERY_DEVICE
def test_in_a_program(device):
    args = segments_of(typed(40, 50, 3000, 4, device=device), 64, full=True)
    compiled = torch.compile(lambda *args: segment_tiles(*args, 3000, False), fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(compiled(*args[:4]), segment_tiles(*args, False), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("changed,message", [
    ({"type_ptr": torch.zeros(5)}, "segment_tiles: type_ptr must be int32 or int64, got Float"),
    ({"type_ptr": torch.zeros(0).int()}, r"segment_tiles: type_ptr must have shape \[types \+ 1\], got \[0\]"),
    ({"rows": torch.zeros(3).int()}, r"segment_tiles: rows must have shape \["),
    ({"ptr": torch.zeros(2, 2).int()}, r"segment_tiles: ptr must be \[segments \+ 1\]"),
    ({"by_row": torch.zeros(9).long()}, "segment_tiles: by_row must "),
    ({"by_row": torch.zeros(2).int()}, r"segment_tiles: by_row must have more than the \d+ elements of rows, got 2"),
    ({"num_edges": -1}, "segment_tiles: num_edges must not be negative, got -1"),
])  # fmt: skip
def test_bad_input_is_named(changed, message):
    names = ("type_ptr", "rows", "ptr", "by_row", "num_edges")
    args = {**dict(zip(names, segments_of(typed(40, 50, 300, 4), 64), strict=True)), **changed}
    with pytest.raises(ValueError, match=message):
        segment_tiles(*args.values(), True)
