"""gather_packed against entries that are picked one by one."""

import ctypes
import subprocess
from pathlib import Path

import on_host
import pytest
import torch
from devices import EVERY_DEVICE, moved, poison, without_waiting
from drawn import drawn

from edgeless.ops.packed import gather_packed

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.complex64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def numbers(pick, dtype, *shape):
    made = torch.randint(-100, 100, shape, generator=torch.Generator().manual_seed(pick.randrange(10**6)))
    return made > 0 if dtype is torch.bool else made.to(dtype)


def call_of(pick, num_columns):
    """The arguments of a batch of up to seven graphs, some of them of no entries, with up to three levels."""
    levels, picked, counts = pick.randrange(1, 4), pick.randrange(1, 8), []
    begins = torch.zeros(levels, picked, dtype=torch.int64)
    for level in range(levels):
        stored = [pick.randrange(0, 5) for _ in range(6)]
        total, chosen = sum(stored), [pick.randrange(6) for _ in range(picked - 1)]
        begins[level] = torch.tensor([*(sum(stored[:graph]) for graph in chosen), total])
        counts.append(([*(stored[graph] for graph in chosen), pick.randrange(0, 6)], total))
    starts = torch.zeros(levels, picked + 1, dtype=torch.int64)
    starts[:, 1:] = torch.tensor([count for count, _ in counts]).cumsum(1)
    columns, dims, of, increments, last = [], [], [], [], []
    for _ in range(num_columns):
        level, dtype = pick.randrange(levels), pick.choice((*DTYPES, *INTEGERS))
        integers = dtype in INTEGERS
        table = pick.choice(((), (2,))) if integers and pick.random() < 0.5 else None
        outer, inner = pick.choice(((), (2,), (3, 2))), pick.choice(((), (3,), (4, 2), (0,)))
        if table is not None:
            outer, inner = table, ()
        columns.append(numbers(pick, dtype, *outer, counts[level][1] + 1, *inner))
        dims.append(len(outer))
        of.append(level)
        increments.append(pick.randrange(-1, levels) if integers else -1)
        last.append(None if table is None else numbers(pick, torch.int64, *outer, counts[level][0][-1]))
    return columns, dims, of, increments, last, starts, begins, starts[:, -1].tolist()


def reference(columns, dims, levels, increments, last, starts, begins, sizes):
    found = []
    for data, dim, level, increment, table in zip(columns, dims, levels, increments, last, strict=True):
        parts = []
        for graph in range(begins.size(1)):
            count = int(starts[level, graph + 1] - starts[level, graph])
            places = (torch.arange(count) + begins[level, graph]).clamp(max=data.size(dim) - 1)
            part = data.index_select(dim, places)
            if table is not None and graph == begins.size(1) - 1:
                part = table.to(data.dtype)
            if increment >= 0:
                part = part + starts[increment, graph].to(data.dtype)
            parts.append(part)
        found.append(torch.cat(parts, dim))
    return found


@EVERY_DEVICE
@drawn(60)
def test_batches_are_their_graphs_entries(device, pick):
    arguments = call_of(pick, pick.choice((0, 1, 5, 30)))  # CUDA's kernel writes 24 columns at once
    given = moved(arguments, device)
    if device == "cpu":
        found = gather_packed(*given)
    else:
        gather_packed(*given)
        poison(device)
        found = without_waiting(lambda: gather_packed(*given))
    for mine, expected in zip(found, reference(*arguments), strict=True):
        assert mine.dtype == expected.dtype and mine.is_contiguous() and torch.equal(mine.cpu(), expected)


@EVERY_DEVICE
def test_columns_of_more_than_a_block_of_threads(device):
    made = torch.Generator().manual_seed(0)
    counts = torch.randint(0, 60, (300,), generator=made)
    ends, order = counts.cumsum(0), torch.randperm(300, generator=made)
    data = torch.randn(int(ends[-1]) + 1, 7, generator=made)
    starts = torch.zeros(1, 301, dtype=torch.int64)
    starts[0, 1:] = counts[order].cumsum(0)
    begins = (ends - counts)[order][None]
    arguments = ([data], [0], [0], [-1], [None], starts, begins, [int(starts[0, -1])])
    (found,) = gather_packed(*moved(arguments, device))
    assert torch.equal(found.cpu(), reference(*arguments)[0])


BAD = {
    "a table of int32": ({5: torch.zeros(1, 3, dtype=torch.int32)}, "starts must be"),
    "too few starts": ({5: torch.zeros(1, 2, dtype=torch.int64)}, "starts must be contiguous with 3 columns"),
    "a dimension": ({1: [1]}, "with entries along dims"),
    "a level": ({2: [1]}, "levels and increments must be rows"),
    "an increment": ({3: [1]}, "levels and increments must be rows"),
    "an increment of floats": ({0: [torch.ones(4)], 3: [0]}, "must be integers, got Float"),
    "lengths": ({1: []}, "must have one entry a column"),
    "no entries": ({0: [torch.zeros(0, dtype=torch.int64)]}, "with entries along dims"),
    "last of rows": ({0: [torch.zeros(4, 2, dtype=torch.int64)], 4: [torch.zeros(2, 1).long()]}, "of one number"),
    "sizes": ({7: [2, 2]}, "one row a level"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused(name):
    starts, begins = torch.tensor([[0, 1, 2]]), torch.tensor([[0, 3]])
    arguments = [[torch.arange(4)], [0], [0], [-1], [None], starts, begins, [2]]
    assert gather_packed(*arguments)[0].tolist() == [0, 3]
    change, words = BAD[name]
    for place, value in change.items():
        arguments[place] = value
    with pytest.raises(ValueError, match=f"gather_packed: .*{words}"):
        gather_packed(*arguments)


@pytest.mark.skipif(not hasattr(torch.library, "opcheck"), reason="torch.library.opcheck came with torch 2.4")
@drawn(3)
def test_opcheck(pick):
    torch.library.opcheck(gather_packed.default, call_of(pick, 3))


# The kernel, run by the host -----------------------------------------------------------------------------------------

_ON_HOST = """#include "on_host.h"
#include "packed/gather.cuh"
extern "C" void gather(const edgeless::PackedColumn* columns, int count) {
  edgeless::PackedColumns all;
  int64_t most = 0;
  for (int i = 0; i < count; ++i) all.at[i] = columns[i], most = std::max(most, edgeless::units_of(columns[i]));
  all.count = count;
  const int blocks = static_cast<int>(edgeless::cuda::blocks_for(most));
  on_host::launch(&edgeless::cuda::gather_packed_kernel, reinterpret_cast<const char*>(&all), blocks, count,
                  edgeless::cuda::kThreads);
}
"""


class _Column(ctypes.Structure):
    """PackedColumn of core_cuda/packed/columns.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("source", "to")),
        *((name, ctypes.c_int64) for name in ("outer", "from_rows", "to_rows", "row_bytes")),
        *((name, ctypes.c_void_p) for name in ("starts", "begins", "offsets", "last")),
        ("graphs", ctypes.c_int64),
        ("unit", ctypes.c_int32),
    )


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    if (why := on_host.missing()) is not None:
        pytest.skip(why)
    folder, root = tmp_path_factory.mktemp("gather"), Path(__file__).resolve().parents[2]
    (folder / "gather.cpp").write_text(_ON_HOST)
    includes = [f"-I{root / 'tests/shared'}", f"-I{root / 'core_cuda'}"]
    command = ["g++", "-std=c++17", "-O1", "-w", "-fPIC", "-shared", *includes, "gather.cpp", "-o", "gather.so"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "gather.so")).gather


@drawn(25)
def test_the_kernel_of_cuda_on_the_host(kernel, pick):
    arguments = call_of(pick, pick.choice((1, 4)))
    columns, dims, levels, increments, last, starts, begins, sizes = arguments
    expected, found, given = reference(*arguments), [], []
    for data, dim, level, increment, table, like in zip(columns, dims, levels, increments, last, expected, strict=True):
        to, size = torch.full_like(like, 1), data.element_size()
        row_bytes = size * data.shape[dim + 1 :].numel()
        ids = table is not None or increment >= 0
        column = _Column(
            source=data.data_ptr(),
            to=to.data_ptr(),
            outer=data.shape[:dim].numel(),
            from_rows=data.size(dim),
            to_rows=sizes[level],
            row_bytes=row_bytes,
            starts=starts[level].data_ptr(),
            begins=begins[level].data_ptr(),
            offsets=starts[increment].data_ptr() if increment >= 0 else None,
            last=None if table is None else table.data_ptr(),
            graphs=begins.size(1),
            unit=size if ids else pick.choice([unit for unit in (1, 2, 4, 8, 16) if row_bytes % unit == 0]),
        )
        found.append(to)
        given.append(column)
    kernel((_Column * len(given))(*given), len(given))
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)
