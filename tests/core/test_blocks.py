"""Fingerprints of graphs; weighted sparse blocks in files, and their bytes before they are made."""

import copy
import json
import pickle
import struct

import pytest
import torch
from devices import EVERY_DEVICE
from test_wsb import KINDS, ends_of, graph_of, near_and_far, refusals, rows, run

import edgeless
from edgeless import Graph, blocks
from edgeless.graph import fingerprint
from edgeless.graph.fingerprint import Fingerprint
from edgeless.graph.wsb import Blocks, WsbFormat, blocks_of

# Fingerprints --------------------------------------------------------------------------------------------------------


@EVERY_DEVICE
@pytest.mark.parametrize("kind", KINDS)
def test_a_fingerprint_is_of_the_edges_alone(kind, device, monkeypatch):
    ends, *sizes = ends_of(kind)
    graph = Graph.from_edge_index(ends, *sizes)
    expected = graph.fingerprint
    assert len(expected) == 16
    order = torch.randperm(ends.size(1), generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(fingerprint, "_CHUNK", 7 if ends.size(1) < 5000 else 999)
    by_src = Graph(None, graph.csc, *sizes)
    for other in (Graph.from_edge_index(ends[:, order], *sizes), by_src, graph_of(kind, wide=True)):
        assert other.to(device).fingerprint == expected
    assert not by_src.has_csr


@EVERY_DEVICE
def test_other_graphs_have_other_fingerprints(device):
    ends, *sizes = ends_of("random")
    changed = ends.clone()
    changed[0, 9] += 1
    moved = ends.clone()
    moved[:, 3] = ends[:, 4]
    graphs = [
        Graph.from_edge_index(e.to(device), *s)
        for e, s in (
            (ends, sizes),
            (changed, sizes),
            (moved, sizes),
            (ends, [151, 130]),
            (ends, [150, 131]),
            (ends[:, :-1], sizes),
        )
    ]
    graphs.append(graphs[0].reverse())
    assert len({graph.fingerprint for graph in graphs}) == len(graphs)


def test_a_fingerprint_is_kept_and_travels():
    graph = graph_of("random")
    said = graph.fingerprint
    for other in (copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))):
        assert other._formats["fingerprint"] == int(said, 16)
    assert "fingerprint" not in graph.reverse()._formats


def test_tables_in_their_order():
    draw = torch.Generator().manual_seed(0)
    table = torch.randint(100, (2, 50), generator=draw)
    turned = table.flip(1)
    assert str(Fingerprint(3).add(*table)) == str(Fingerprint(3).add(*table.int()))
    assert str(Fingerprint(3).add(*table)) != str(Fingerprint(3).add(*turned))
    others = [
        Fingerprint(4).add(*table),
        Fingerprint(3).add(table[0]).add(table[1]),
        Fingerprint(3).add(*table.flip(0)),
    ]
    assert len({str(one) for one in (Fingerprint(3).add(*table), *others)}) == 4


def test_a_fingerprint_does_not_depend_on_how_many_rows_are_hashed_at_a_time(monkeypatch):
    draw = torch.Generator().manual_seed(0)
    table, graph = torch.randint(100, (2, 50), generator=draw), graph_of("random")
    tensors = {"a": torch.rand(30), "b": torch.rand(7, 3).half()}

    def found():
        made = [str(Fingerprint(3).add(*table)), fingerprint.of_graph(graph)]
        return [*made, fingerprint.of_tensors(tensors), fingerprint.of_text("of a text" * 20)]

    whole = found()
    for count in (1, 7, 49, 50):
        monkeypatch.setattr(fingerprint, "_CHUNK", count)
        assert found() == whole


@pytest.mark.parametrize("first", [None, 0, 2**40])
def test_the_sum_of_hashes_is_the_same_by_torch(first):
    draw = torch.Generator().manual_seed(0)
    columns = list(torch.randint(-(2**62), 2**62, (3, 70_000), generator=draw))
    assert fingerprint._sum_of_hashes(columns, first) == int(fingerprint._sum_by_torch(columns, first))


# Bytes ---------------------------------------------------------------------------------------------------------------


def built(graph):
    sides = [(graph.csr_arrays(False), graph.num_src), (graph.csc_arrays(False), graph.num_dst)]
    return [blocks_of(*arrays, num_columns) for arrays, num_columns in sides]


@EVERY_DEVICE
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_known_before_blocks_are_made(kind, device, monkeypatch):
    graph = graph_of(kind, device)
    monkeypatch.setattr(blocks, "_AT_ONCE", 3)
    assert blocks.num_bytes(graph, exact=True) == sum(t.nbytes for side in built(graph) for t in side)


def test_bytes_are_estimated_from_some_windows():
    for graph in near_and_far():
        exact = blocks.num_bytes(graph, exact=True)
        assert blocks.num_bytes(graph) == pytest.approx(exact, rel=0.05) and blocks.num_bytes(graph) != exact
    ends = torch.randint(50, (2, 500), generator=torch.Generator().manual_seed(0))
    ends = torch.cat([ends, ends.flip(0)], 1)
    symmetric = Graph.from_edge_index(ends, 50, 50, is_symmetric=True)
    assert blocks.num_bytes(symmetric) == sum(t.nbytes for t in built(symmetric)[0])


# Files ---------------------------------------------------------------------------------------------------------------


def kept(graph):
    return [t.cpu() for t in graph._formats["wsb"].kept_tensors()]


@pytest.fixture
def saved(tmp_path):
    pytest.importorskip("safetensors")
    blocks.save(graph_of("random"), tmp_path / "blocks")
    return tmp_path / "blocks"


@EVERY_DEVICE
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_come_back_as_they_were(kind, device, tmp_path, monkeypatch):
    pytest.importorskip("safetensors")
    graph = graph_of(kind, device)
    expected = [t.cpu() for side in built(graph) for t in side]
    blocks.save(graph, tmp_path / "blocks")
    assert [file.name for file in tmp_path.iterdir()] == ["blocks"] and "wsb" not in graph._formats
    for other in (graph_of(kind), graph_of(kind, device, wide=True)):
        with monkeypatch.context() as patch:
            patch.setattr("edgeless.graph.wsb.blocks_of", None)  # none are made
            blocks.load(other, tmp_path / "blocks")
            assert other._formats["wsb"].knows(other, 0.0)
        assert all(torch.equal(a, b) for a, b in zip(kept(other), expected, strict=True))
        assert other.memory_bytes() >= sum(t.nbytes for t in expected)
    blocks.load(other, tmp_path / "blocks")  # a second time changes nothing
    assert len(kept(other)) == 8


def test_one_direction_of_a_symmetric_graph(tmp_path):
    pytest.importorskip("safetensors")
    ends = torch.randint(50, (2, 500), generator=torch.Generator().manual_seed(0))
    ends = torch.cat([ends, ends.flip(0)], 1)
    graph = Graph.from_edge_index(ends, 50, 50, is_symmetric=True)
    blocks.save(graph, tmp_path / "blocks")
    blocks.load(graph, tmp_path / "blocks")
    assert len(kept(graph)) == 4
    with pytest.raises(ValueError, match="must hold by_dst.first.* by_src.bits, got by_dst"):
        blocks.load(Graph.from_edge_index(ends, 50, 50), tmp_path / "blocks")


def test_a_graph_that_has_blocks_keeps_its_own(saved):
    graph = graph_of("random")
    graph.csr_arrays(False), graph.csc_arrays(False)
    graph.format("wsb", lambda _: WsbFormat()).make(graph)
    before = graph._formats["wsb"].kept_tensors()
    blocks.load(graph, saved)
    after = graph._formats["wsb"].kept_tensors()
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(before, after, strict=True))


def rewritten(file, change):
    """The file with other tensors or metadata, its contents' fingerprint made anew."""
    library = pytest.importorskip("safetensors.torch")
    with library.safe_open(file, framework="pt") as opened:
        tensors, about = {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata()  # noqa: SIM118
    change(tensors, about)
    if about:
        about.setdefault("contents", blocks._contents(tensors))
    library.save_file(tensors, file, about or None)


def put(name, index, value):
    def change(tensors, about):
        tensors[name][index] = value
        del about["contents"]

    return change


def replaced(name, make):
    def change(tensors, about):
        tensors[name] = make(tensors[name])
        del about["contents"]

    return change


def says(key, value):
    return lambda tensors, about: about.update({key: value})


@pytest.mark.parametrize(
    "change,message",
    [
        (says("format", "other"), "with the format edgeless-blocks, got other"),
        (lambda tensors, about: about.clear(), "with the format edgeless-blocks, got None"),
        (says("version", "2"), "be saved anew: this edgeless reads the version 1, got 2"),
        (says("height", "64"), "windows of as many rows as the kernels: 32, got 64"),
        (says("columns", "8"), "blocks of as many columns as the kernels: 16, got 8"),
        (says("num_edges", "7"), "be of this graph, with num_edges 2500, got 7"),
        (says("fingerprint", "f" * 16), "be of this graph, with the fingerprint [0-9a-f]{16}, got f{16}"),
        (lambda tensors, about: tensors.pop("by_src.bits"), "must hold by_dst.first, .* got by_dst.bits"),
        (says("contents", "0"), "contents with the fingerprint 0, got [0-9a-f]{16}: it is damaged"),
        (replaced("by_dst.first", lambda t: t.long()), "by_dst.first must be torch.int32, got torch.int64"),
        (replaced("by_dst.first", lambda t: t[:-1]), r"by_dst.first must have shape \[6\], got \[5\]"),
        (
            replaced("by_dst.columns", lambda t: t.reshape(-1)),
            r"by_dst.columns must have shape \[\d+, 16\], got \[\d+\]",
        ),
        (replaced("by_dst.bits", lambda t: t.flatten(1)), r"by_dst.bits must have shape \[\d+, 4, 2, 2\]"),
        (replaced("by_src.order", lambda t: t[:0]), r"by_src.order must have shape \[5\], got \[0\]"),
        (put("by_dst.first", 0, -1), "by_dst.first must rise from 0 to \\d+ blocks, got -1 to"),
        (put("by_dst.first", -1, 10**6), "by_dst.first must rise from 0 to \\d+ blocks, got 0 to 1000000"),
        (put("by_dst.first", 2, 10**6), "by_dst.first must rise .* with a fall"),
        (put("by_dst.order", 0, 99), "by_dst.order must list each of 5 windows once"),
        (put("by_dst.order", slice(None), 1), "by_dst.order must list each of 5 windows once"),
        (put("by_dst.columns", (0, 3), 150), r"by_dst.columns must be in \[0, 150\), got 0 to 150"),
        (put("by_src.columns", (0, 3), -1), r"by_src.columns must be in \[0, 130\), got -1 to"),
        (put("by_dst.bits", 0, -1), "by_dst.bits must have a bit for each of 2500 edges, got"),
    ],
)
def test_files_that_are_refused(saved, change, message):
    rewritten(saved, change)
    graph = graph_of("random")
    with pytest.raises(ValueError, match=f"blocks.load: {saved}.*{message}"):
        blocks.load(graph, saved)
    assert "wsb" not in graph._formats


def test_files_of_another_graph(saved):
    ends, *sizes = ends_of("random", seed=1)
    for other, message in (
        (Graph.from_edge_index(ends, *sizes), "be of this graph, with the fingerprint"),
        (graph_of("star"), "be of this graph, with num_src 3000, got 150"),
        (graph_of("random").reverse(), "be of this graph, with num_src 130, got 150"),
    ):
        with pytest.raises(ValueError, match=message):
            blocks.load(other, saved)


@pytest.mark.parametrize("length", [0, 5, 300, -1])
def test_files_that_are_cut_off(saved, length):
    saved.write_bytes(saved.read_bytes()[:length])
    with pytest.raises(ValueError, match=f"{saved} must be a whole file of safetensors, but it is damaged: "):
        blocks.load(graph_of("random"), saved)


def test_a_flipped_bit_is_noticed(saved):
    data = bytearray(saved.read_bytes())
    (header,) = struct.unpack("<Q", data[:8])
    assert json.loads(data[8 : 8 + header])
    for place in range(8 + header, len(data), 997):
        data[place] ^= 1
        saved.write_bytes(data)
        with pytest.raises(ValueError, match="it is damaged"):
            blocks.load(graph_of("random"), saved)
        data[place] ^= 1


def test_what_is_no_graph_and_no_file(saved, tmp_path):
    for call in (blocks.save, blocks.load):
        with pytest.raises(TypeError, match=r"blocks\.\w+: graph must be an edgeless.Graph, got int"):
            call(3, saved)
    with pytest.raises(TypeError, match="blocks.num_bytes: graph must be"):
        blocks.num_bytes(None)
    with pytest.raises(FileNotFoundError, match="nowhere must be a file that edgeless.blocks.save wrote"):
        blocks.load(graph_of("random"), tmp_path / "nowhere")
    with pytest.raises(OSError, match="nowhere"):
        blocks.save(graph_of("random"), tmp_path / "nowhere" / "blocks")


# On CUDA -------------------------------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("kind", [*KINDS, "means"])
def test_blocks_are_the_same_from_the_gpu(kind):
    graph = graph_of(kind) if kind != "means" else with_windows_near_four_means()
    for here, there in zip(built(graph), built(graph.to("cuda")), strict=True):
        for name, a, b in zip(Blocks._fields, here, there, strict=True):
            assert torch.equal(a, b.cpu()), name


def with_windows_near_four_means():
    """49 windows; a share of 1/49 is not exact, and one window has exactly four times the mean."""
    counts = torch.ones(49, dtype=torch.long)
    counts[5], counts[6] = 8, 43  # 98 blocks
    dst = torch.repeat_interleave(torch.arange(49) * 32, counts * 16)
    first = torch.repeat_interleave((counts * 16).cumsum(0) - counts * 16, counts * 16)
    return Graph.from_edge_index(torch.stack([torch.arange(dst.numel()) - first, dst]), 1000, 49 * 32)


def test_a_window_of_exactly_four_means_is_not_large():
    graph = with_windows_near_four_means()
    order = blocks_of(*graph.csr_arrays(False), 1000).order.tolist()
    assert order == [6, *range(6), *range(7, 49)]


@pytest.mark.cuda
def test_loaded_blocks_compute(saved):
    graph, x = graph_of("random", "cuda"), rows(150, 64)
    expected = run("wsb", graph_of("random", "cuda"), x, norm="both")
    blocks.load(graph, saved)
    assert refusals(lambda: edgeless.functional.spmm(graph, x)) == {""}
    assert all(torch.equal(a, b) for a, b in zip(run("wsb", graph, x, norm="both"), expected, strict=True))
