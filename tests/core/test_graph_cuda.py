"""Graphs built on the GPU are those built on the CPU, bit by bit."""

import pytest
import torch

import edgeless
from edgeless import Graph

pytestmark = pytest.mark.cuda
coo_to_csr = torch.ops.edgeless.coo_to_csr
csr_transpose = torch.ops.edgeless.csr_transpose


def draw(num_rows, num_cols, num_edges, dtype=torch.int64, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return (torch.randint(max(n, 1), (num_edges,), generator=gen).to(dtype) for n in (num_rows, num_cols))


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert a.is_cuda and a.dtype == b.dtype and torch.equal(a.cpu(), b)


SIZES = [
    (1, 1, 0),
    (0, 0, 0),
    (5, 0, 0),
    (1, 1, 1),
    (3, 7, 20),
    (300, 2, 5000),
    (2, 70_000, 5000),
    (70_000, 9, 100_000),
    (70_000, 300, 262_144),
    (70_000, 300, 262_145),  # by several launches
]


@pytest.mark.parametrize("num_rows,num_cols,num_edges", SIZES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("validate", [True, False])
def test_equals_the_cpu(num_rows, num_cols, num_edges, dtype, validate):
    row, col = draw(num_rows, num_cols, num_edges, dtype)
    expected = coo_to_csr(row, col, num_rows, num_cols, True)
    found = coo_to_csr(row.cuda(), col.cuda(), num_rows, num_cols, validate)
    assert_same(found, expected)
    indptr, indices, ids = expected
    for edge_ids in (ids, None):
        moved = None if edge_ids is None else edge_ids.cuda()
        wanted = csr_transpose(indptr, indices, edge_ids, num_cols)
        assert_same(csr_transpose(indptr.cuda(), indices.cuda(), moved, num_cols), wanted)
        wide = [None if t is None else t.long() for t in (indptr, indices, edge_ids)]
        moved = [None if t is None else t.cuda() for t in wide]
        assert_same(csr_transpose(*moved, num_cols), csr_transpose(*wide, num_cols))


def test_strided_ids():
    row, col = draw(50, 60, 1000)
    both = torch.stack([row, col], dim=1).cuda()
    assert_same(coo_to_csr(both[:, 0], both[:, 1], 50, 60, True), coo_to_csr(row, col, 50, 60, True))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("bad", [-1, 50, 2**31 - 1])
@pytest.mark.parametrize("num_edges", [1000, 300_000])
def test_ids_out_of_range(dtype, bad, num_edges):
    row, col = (t.cuda() for t in draw(50, 50, num_edges, dtype))
    wrong = row.clone()
    wrong[[700, 900]] = bad
    with pytest.raises(IndexError, match=f"row has id {bad} at position 700, expected 0 <= id < num_rows = 50"):
        coo_to_csr(wrong, col, 50, 50, True)
    with pytest.raises(IndexError, match=f"col has id {bad} at position 700, expected 0 <= id < num_cols = 50"):
        coo_to_csr(row, wrong, 50, 50, True)
    with pytest.raises(IndexError, match=rf"edge_index\[0\] has id {bad} at position 700"):
        Graph.from_edge_index(torch.stack([wrong, col]), 50, 50)


def test_mixed_devices_are_refused():
    row, col = draw(50, 50, 100)
    with pytest.raises(ValueError, match="col must be on cuda:0, got cpu"):
        coo_to_csr(row.cuda(), col, 50, 50, True)


def test_the_handle_on_both_devices():
    edge_index = torch.stack(tuple(draw(500, 500, 20_000, seed=3)))
    cpu, gpu = Graph.from_edge_index(edge_index, 500, 500), Graph.from_edge_index(edge_index.cuda(), 500, 500)
    for direction in ("csr", "csc"):
        assert_same([t for t in getattr(gpu, direction) if t is not None], getattr(cpu, direction))
    looped = gpu.with_self_loops()
    assert_same(looped.csr, cpu.with_self_loops().csr)
    assert torch.equal(gpu.edge_index().cpu(), edge_index)
    assert edgeless.Graph.from_edge_index(edge_index).to("cuda").csr.indptr.is_cuda


@pytest.mark.parametrize("num_edges", [100_000, 300_000])
def test_no_host_sync_without_validation(num_edges):
    row, col = (t.cuda() for t in draw(5000, 5000, num_edges))
    expected = coo_to_csr(row, col, 5000, 5000, True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = coo_to_csr(row, col, 5000, 5000, False)
        transpose = csr_transpose(*found, 5000)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert_same(transpose, csr_transpose(*(t.cpu() for t in expected), 5000))


@pytest.mark.parametrize("num_edges", [10_000, 300_000])
def test_captured_in_a_cuda_graph(num_edges):
    row, col = (t.cuda() for t in draw(500, 500, num_edges))
    expected = coo_to_csr(row, col, 500, 500, True)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        found = coo_to_csr(row, col, 500, 500, False)
    captured.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
