"""``python -m edgeless reorder --gathers``: what orders are worth to patterns of loads."""

import json

import pytest
import torch
from devices import EVERY_DEVICE

from edgeless import Graph
from edgeless.__main__ import main
from edgeless.tools.bench import gathers, reorder
from edgeless.tools.bench.gathers import BY, LOADS, Gather, compared, dots, gaps

pytestmark = pytest.mark.usefixtures("short_turns")
QUICK = ["--device", "cpu", "--threads", "1", "--rounds", "1"]


class Took:
    spread = 0.0

    def __init__(self, median):
        self.median = median


def cells_of(by, loads, before, after):
    cells = [Gather("toy", order, 32, by, loads, 10**6) for order in ("as given", "rcm")]
    return compared(cells, {"as given": Took(before), "rcm": Took(after)}, "as given")


def test_the_gap_is_what_neighbours_gain_more_than_features():
    cells = cells_of(BY[0], LOADS[0], 3.0, 2.0) + cells_of(BY[1], LOADS[0], 10.0, 4.0) + cells_of(BY[0], LOADS[1], 1, 1)
    assert [cell.faster for cell in cells] == [None, 1.5, None, 2.5, None, 1.0]
    assert gaps(cells) == {("rcm", LOADS[0], 32): 1.0}


def test_what_cannot_run_is_left_out():
    cells = [Gather("toy", order, 32, BY[0], LOADS[0], 1) for order in ("as given", "rcm")]
    compared(cells, {"as given": gathers.Failed("out of memory"), "rcm": Took(1.0)}, "as given")
    assert cells[0].failed == "out of memory" and cells[1].faster is None and gaps(cells) == {}


@pytest.fixture
def on_the_cpu(monkeypatch):
    """The command, which asks for a GPU, with the op's kernel for the CPU."""
    monkeypatch.setattr(gathers, "check", lambda device, widths: None)


def expected(handle, x):
    src, dst = handle.edge_index()
    products = (x.index_select(0, src) * x.index_select(0, dst)).sum(1)
    return torch.zeros(len(x), dtype=x.dtype, device=x.device).index_add_(0, dst, products)


def test_the_command(on_the_cpu, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    file, plot = tmp_path / "gathers.json", tmp_path / "gaps.svg"
    before = torch.get_num_threads()
    arguments = ["--graph", "toy", "tiny", "--method", "degree", "--gathers", "--widths", "4", "8"]
    try:
        assert main(["reorder", *arguments, "--json", str(file), "--plot", str(plot), *QUICK]) == 0
    finally:
        torch.set_num_threads(before)
    printed = capsys.readouterr().out
    assert "toy, gathers, CPU" in printed and "GB/s by neighbour" in printed and "spmm" not in printed
    results = [row for row in json.loads(file.read_text())["results"] if "loads" in row]
    assert len(results) == 2 * 2 * 2 * 2 * 2  # graphs, orders, widths, patterns, loads
    assert {row["failed"] for row in results} == {None}
    assert (results[0]["bytes"], results[0]["width"]) == (2 * 10_000 * (2 * 16 + 4), 4)
    drawn = plot.read_text()
    assert drawn.startswith("<?xml") and "<svg" in drawn


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--gathers"], "--gathers times loads of a GPU's warps, and --device is the CPU"),
        (["--widths", "0"], "--widths must be at least 1, got 0"),
        (["--plot", "gaps.png"], "--plot draws gathers; add --gathers"),
    ],
)
def test_what_cannot_be_gathered_is_told_in_a_sentence(arguments, message, capsys):
    assert main(["reorder", "--graph", "toy", *arguments, *QUICK]) == 2
    assert message in capsys.readouterr().err


def test_widths_fill_the_loads():
    with pytest.raises(reorder.UsageError, match="--widths must be multiples of 4, .* got 6"):
        gathers.check(torch.device("cuda"), [8, 6])


@EVERY_DEVICE
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("loads", LOADS)
@pytest.mark.parametrize("by", BY)
def test_gathers_are_sums_of_dot_products(by, loads, wide, device):
    draw = torch.Generator().manual_seed(0)
    ends = torch.randint(500, (2, 20_000), generator=draw)
    ends[1, :3000] = 7
    handle = Graph.from_edge_index(ends, 520, 520)
    if wide:
        handle = Graph(type(handle.csr)(*(None if t is None else t.long() for t in handle.csr)), None, 520, 520)
    handle = handle.to(device)
    assert handle.index_dtype == (torch.int64 if wide else torch.int32)
    for width in (4, 32, 100, 512):
        x = torch.randn(520, width, generator=draw).to(device)
        for passes in (0, 1, 2):
            found, right = dots(handle, x, by, loads, passes), passes * expected(handle, x.double())
            assert float((found - right).norm()) <= 1e-5 * float(right.norm())
    assert not dots(handle, x, by, loads)[500:].any()


@EVERY_DEVICE
def test_what_the_op_refuses(device):
    handle = Graph.from_edge_index(torch.tensor([[0, 1], [1, 0]])).to(device)
    x, more = torch.ones(2, 6, device=device), torch.ones(3, 4, device=device)
    for message, call in (
        ("vectors need rows of a multiple of 4 numbers .* got F = 6", lambda: dots(handle, x, BY[0], LOADS[1])),
        ("x must be .*Float, got .*Double", lambda: dots(handle, x.double(), BY[0], LOADS[0])),
        (
            r"indptr must have shape \[N \+ 1\] = \[4\], got \[3\]",
            lambda: dots(handle, more, BY[0], LOADS[0]),
        ),
        ("must be contiguous", lambda: dots(handle, x.new_ones(4, 2).t(), BY[0], LOADS[0])),
        (r"passes must be in \[0, 2\*\*20\], got -1", lambda: dots(handle, x, BY[0], LOADS[0], -1)),
    ):
        with pytest.raises((ValueError, RuntimeError), match=message):
            call()


@pytest.mark.cuda
def test_the_command_on_a_gpu(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    arguments = ["--graph", "toy", "--method", "degree", "--gathers", "--widths", "32", "--rounds", "1", "--runs", "2"]
    assert main(["reorder", *arguments, "--plot", str(tmp_path / "gaps.png")]) == 0
    assert "gap" in capsys.readouterr().out and (tmp_path / "gaps.png").stat().st_size > 1000
