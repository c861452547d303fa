"""coo_to_csr and csr_transpose against torch's own stable sort."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import edgeless  # noqa: F401  registers the ops

coo_to_csr = torch.ops.edgeless.coo_to_csr
csr_transpose = torch.ops.edgeless.csr_transpose


def sorted_by(keys, others, num_keys):
    """(indptr, others, positions) of a stable sort by key, int64."""
    order = torch.argsort(keys, stable=True)
    indptr = torch.zeros(num_keys + 1, dtype=torch.int64)
    indptr[1:] = torch.bincount(keys.long(), minlength=num_keys).cumsum(0)
    return indptr, others[order].long(), order


def rows_of(indptr):
    return torch.repeat_interleave(torch.arange(indptr.numel() - 1), indptr.diff())


def assert_sorted(row, col, num_rows, num_cols):
    result = coo_to_csr(row, col, num_rows, num_cols, True)
    for got, want in zip(result, sorted_by(row, col, num_rows), strict=True):
        assert got.dtype == torch.int32
        assert torch.equal(got.long(), want)
    indptr, indices, edge_ids = result
    transpose = csr_transpose(indptr, indices, edge_ids, num_cols)
    want_ptr, want_rows, positions = sorted_by(indices, rows_of(indptr), num_cols)
    for got, want in zip(transpose, (want_ptr, want_rows, edge_ids[positions].long()), strict=True):
        assert got.dtype == torch.int32
        assert torch.equal(got.long(), want)


@st.composite
def edge_lists(draw):
    """Graphs with many multi-edges or few, and numbers of rows that take one pass of the sort or two."""
    num_rows = draw(st.sampled_from([1, 2, 7, 1 << 14, (1 << 14) + 1, 100_000]))
    num_cols = draw(st.integers(1, 50))
    num_edges = draw(st.integers(0, 60))
    # Ids from few neighbourhoods, so that rows repeat and both ends of the range occur.
    row = st.one_of(st.integers(0, min(num_rows, 4) - 1), st.integers(max(0, num_rows - 3), num_rows - 1))
    rows = draw(st.lists(row, min_size=num_edges, max_size=num_edges))
    cols = draw(st.lists(st.integers(0, num_cols - 1), min_size=num_edges, max_size=num_edges))
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    return torch.tensor(rows, dtype=dtype), torch.tensor(cols, dtype=dtype), num_rows, num_cols


@settings(max_examples=60, deadline=None)
@given(edge_lists())
def test_matches_stable_argsort(edges):
    row, col, num_rows, num_cols = edges
    assert_sorted(row, col, num_rows, num_cols)


@pytest.mark.parametrize("num_rows", [1, 300, 1 << 14, 40_000, 700_000])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_blocks_join_seamlessly(num_rows, threads):
    generator = torch.Generator().manual_seed(num_rows)
    row = torch.randint(num_rows, (200_000,), generator=generator)
    col = torch.randint(1000, (200_000,), generator=generator)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_sorted(row, col, num_rows, 1000)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("num_rows", [50, 100_000])
def test_one_hub_owns_every_edge(num_rows):
    row = torch.full((150_000,), num_rows // 2)
    assert_sorted(row, torch.arange(150_000) % 77, num_rows, 77)


def test_far_more_rows_than_edges():
    num_rows = 3_000_000
    row = torch.tensor([2_999_999, 5, 5, 1_500_000, 0])
    indptr, indices, edge_ids = coo_to_csr(row, torch.arange(5), num_rows, 5, True)
    assert edge_ids.tolist() == [4, 1, 2, 3, 0]
    assert indices.tolist() == [4, 1, 2, 3, 0]
    assert indptr[[0, 1, 5, 6, 1_500_000, 1_500_001, 2_999_999, 3_000_000]].tolist() == [0, 1, 1, 3, 3, 4, 4, 5]
    assert bool((indptr.diff() >= 0).all())


@pytest.mark.slow  # and takes a gigabyte of row pointers
def test_three_passes():
    num_rows = (1 << 28) + 1
    row = torch.tensor([1 << 28, 3, (1 << 27) + 9, 3, 0, 1 << 28])
    indptr, indices, edge_ids = coo_to_csr(row, torch.arange(6), num_rows, 6, True)
    assert edge_ids.tolist() == [4, 1, 3, 2, 0, 5]
    assert indptr[[0, 1, 3, 4, 1 << 27, (1 << 27) + 10, 1 << 28, num_rows]].tolist() == [0, 1, 1, 3, 3, 4, 4, 6]


@pytest.mark.parametrize("num_rows, num_cols", [(0, 0), (0, 5), (5, 0), (40_000, 3)])
def test_no_edges(num_rows, num_cols):
    none = torch.empty(0, dtype=torch.int64)
    indptr, indices, edge_ids = coo_to_csr(none, none, num_rows, num_cols, True)
    assert indptr.tolist() == [0] * (num_rows + 1)
    assert indices.numel() == edge_ids.numel() == 0
    indptr, indices, edge_ids = csr_transpose(indptr, indices, None, num_cols)
    assert indptr.tolist() == [0] * (num_cols + 1)


def test_int64_results_where_a_size_needs_them():
    row, col = torch.tensor([1, 0, 1]), torch.tensor([2**40, 0, 5])
    indptr, indices, edge_ids = coo_to_csr(row, col, 2, 2**41, True)
    assert indptr.dtype == indices.dtype == edge_ids.dtype == torch.int64
    assert indices.tolist() == [0, 2**40, 5]
    assert edge_ids.tolist() == [1, 0, 2]
    for size, dtype in ((2**31 - 2, torch.int32), (2**31 - 1, torch.int64)):
        assert coo_to_csr(row, col % 7, 2, size, True)[1].dtype == dtype
    # int32 ids, int64 result
    assert coo_to_csr(row.int(), (col % 7).int(), 2, 2**31, True)[1].dtype == torch.int64


def test_transpose_without_edge_ids_numbers_by_position():
    indptr, indices = torch.tensor([0, 2, 2, 3]), torch.tensor([1, 0, 1])
    assert [t.tolist() for t in csr_transpose(indptr, indices, None, 2)] == [[0, 1, 3], [0, 0, 2], [1, 0, 2]]
    assert csr_transpose(indptr, indices, None, 2)[0].dtype == torch.int64  # the dtype that came in


def test_strided_input():
    edges = torch.randint(100, (500, 2), dtype=torch.int32)  # columns have stride 2
    assert_sorted(edges[:, 0], edges[:, 1], 100, 100)
    assert_sorted(edges[:1, 0].expand(30), edges[:30, 1], 100, 100)


@pytest.mark.parametrize("validate", [True, False])
@pytest.mark.parametrize("num_rows", [5, 50_000])
@pytest.mark.parametrize("bad", [-1, 50_000, 2**31 - 1])
def test_ids_out_of_range(bad, num_rows, validate):
    good = torch.tensor([0, 1, 4, 2])
    wrong = torch.tensor([0, 1, bad, -3])
    with pytest.raises(IndexError, match=rf"row has id {bad} at position 2, expected 0 <= id < num_rows = {num_rows}"):
        coo_to_csr(wrong, good, num_rows, 5, validate)
    with pytest.raises(IndexError, match=rf"col has id {bad} at position 2, expected 0 <= id < num_cols = 5"):
        coo_to_csr(good, wrong, num_rows, 5, validate)
    indptr = torch.tensor([0, 4])
    with pytest.raises(IndexError, match=rf"indices has id {bad} at position 2, expected 0 <= id < num_cols = 5"):
        csr_transpose(indptr, wrong, None, 5)


def test_no_id_is_in_range_without_nodes():
    one = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(IndexError, match="row has id 0 at position 0, expected 0 <= id < num_rows = 0"):
        coo_to_csr(one, one, 0, 1, True)


@pytest.mark.parametrize(
    "indptr, message",
    [
        ([0, 2], "indptr must run from 0 to the 3 edges, got 0 to 2"),
        ([1, 3], "indptr must run from 0 to the 3 edges, got 1 to 3"),
        ([0, 4, 3], "indptr must not fall, got 4 then 3 at row 1"),
        ([], "indptr must have shape"),
    ],
)
def test_transpose_refuses_malformed_row_pointers(indptr, message):
    with pytest.raises(ValueError, match=message):
        csr_transpose(torch.tensor(indptr, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), None, 1)


def test_wrong_arguments_are_named():
    ids = torch.zeros(3, dtype=torch.int64)
    cases = [
        ((ids.float(), ids, 1, 1, True), "row must be int32 or int64"),
        ((ids, ids.int(), 1, 1, True), "col must be Long, got Int"),
        ((ids.view(1, 3), ids, 1, 1, True), "row must be one-dimensional"),
        ((ids, ids[:2], 1, 1, True), "row and col must have the same length, got 3 and 2"),
        ((ids, ids, -1, 1, True), "num_rows must not be negative, got -1"),
        ((ids, ids, 1, -2, True), "num_cols must not be negative, got -2"),
    ]
    for args, message in cases:
        with pytest.raises(ValueError, match=message):
            coo_to_csr(*args)
    indptr = torch.tensor([0, 3])
    with pytest.raises(ValueError, match="edge_ids and indices must have the same length, got 2 and 3"):
        csr_transpose(indptr, ids, ids[:2], 1)
    with pytest.raises(ValueError, match="edge_ids must be Long, got Int"):
        csr_transpose(indptr, ids, ids.int(), 1)


OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.skipif(not hasattr(torch.library, "opcheck"), reason="torch.library.opcheck came with torch 2.4")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("num_cols", [4, 2**31])
def test_opcheck(dtype, num_cols):
    row, col = torch.tensor([3, 0, 3, 1], dtype=dtype), torch.tensor([0, 2, 1, 3], dtype=dtype)
    torch.library.opcheck(coo_to_csr.default, (row, col, 5, num_cols, True), test_utils=OPCHECKS)


@pytest.mark.skipif(not hasattr(torch.library, "opcheck"), reason="torch.library.opcheck came with torch 2.4")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("with_ids", [False, True])
def test_opcheck_of_the_transpose(dtype, with_ids):
    edge_ids = torch.tensor([3, 2, 1, 0], dtype=dtype) if with_ids else None
    args = (torch.tensor([0, 1, 4], dtype=dtype), torch.tensor([0, 2, 1, 3], dtype=dtype), edge_ids, 4)
    torch.library.opcheck(csr_transpose.default, args, test_utils=OPCHECKS)
