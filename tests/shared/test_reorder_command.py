"""``python -m edgeless reorder``."""

import json

import pytest
import torch

from edgeless import reordering
from edgeless.__main__ import main
from edgeless.tools.bench import reorder

pytestmark = pytest.mark.usefixtures("short_turns")
QUICK = ["--device", "cpu", "--threads", "1", "--rounds", "1"]
LIBRARIES = {"community": "sknetwork", "degree": "torch", "metis": "pymetis", "rcm": "scipy"}


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_methods_are_compared_with_the_order_given(tmp_path, capsys):
    file = tmp_path / "orders.json"
    arguments = ["--graph", "toy", "--method", "degree", "--op", "spmm_none_F8", "--mode", "forward"]
    assert main(["reorder", *arguments, "--json", str(file), *QUICK]) == 0
    printed = capsys.readouterr().out
    assert "as given" in printed and "reuse 16" in printed and "toy, spmm_none_F8 fp32, CPU" in printed
    written = json.loads(file.read_text())
    assert written["setting"]["command"].startswith("python -m edgeless reorder --graph toy")
    orders, cells = written["results"][:2], written["results"][2:]
    assert [order["name"] for order in orders] == ["as given", "degree"]
    assert orders[0]["seconds"] is None and orders[1]["seconds"] > 0
    assert orders[0]["reuse"].keys() == {"16", "64"}
    assert [cell["order"] for cell in cells] == ["as given", "degree"]
    assert all(cell["median_ms"] > 0 and cell["failed"] is None for cell in cells)
    assert cells[1]["faster"] == pytest.approx(cells[0]["median_ms"] / cells[1]["median_ms"])


@pytest.mark.parametrize("method", LIBRARIES)
def test_every_method(method, capsys):
    pytest.importorskip(LIBRARIES[method], reason=f"method {method!r} needs it")
    assert main(["reorder", "--graph", "tiny", "--method", method, "--op", "min_F4", *QUICK]) == 0
    assert method in capsys.readouterr().out.split()


def test_twins_show_their_own_order_too(capsys, monkeypatch):
    monkeypatch.setattr(reorder.twins, "POWER_LAW", {"artnet": (500, 4000, True, 0.75, 20.0, 0.5, 50)})
    assert main(["reorder", "--graph", "artnet", "--method", "degree", "--op", "spmm_none_F8", *QUICK]) == 0
    printed = capsys.readouterr().out
    assert printed.count("the twin's communities") == 2 and "forward + backward" in printed


def test_what_an_order_recovers_and_when_it_pays():
    class Took:
        spread = 0.0

        def __init__(self, median):
            self.median = median

    timings = {"as given": Took(10.0), "metis": Took(4.0), "degree": Took(11.0), "the twin's communities": Took(2.0)}
    seconds = {"as given": None, "metis": 3.0, "degree": 1.0, "the twin's communities": None}
    case = reorder.op_case("spmm_none_F8", "fp32")
    cells = {cell.order: cell for cell in reorder.compared("toy", case, "forward", timings, seconds)}
    assert cells["as given"].faster is cells["as given"].recovered is None
    assert cells["metis"].faster == 2.5 and cells["metis"].recovered == 0.75 and cells["metis"].runs == 500
    assert cells["degree"].recovered == -0.125 and cells["degree"].runs is None
    assert cells["the twin's communities"].recovered == 1.0 and cells["the twin's communities"].runs is None


def test_a_missing_library_is_told(capsys, monkeypatch):
    def missing(call, *rest):
        raise ImportError(f"{call}: method 'rcm' needs scipy; install it with: pip install 'edgeless[reorder]'")

    for name in list(reordering.METHODS):
        if name not in ("degree", "rcm"):
            monkeypatch.delitem(reordering.METHODS, name)
    monkeypatch.setitem(reordering.METHODS, "rcm", missing)
    assert main(["reorder", "--graph", "tiny", "--op", "spmm_none_F4", *QUICK]) == 0
    assert "rcm left out: " in capsys.readouterr().out
    assert main(["reorder", "--graph", "tiny", "--op", "spmm_none_F4", "--method", "rcm", *QUICK]) == 2
    assert "edgeless reorder: --method rcm: " in capsys.readouterr().err


def test_a_method_that_fails_does_not_end_the_others(capsys, monkeypatch):
    pymetis = pytest.importorskip("pymetis")

    def fails(num_parts, adjacency, **options):
        if len(adjacency.adj_starts) > 3:
            raise RuntimeError("no memory")
        return 0, [0, 0]

    monkeypatch.setattr(pymetis, "part_graph", fails)
    arguments = ["--graph", "tiny", "--op", "spmm_none_F4", "--method", "metis", "degree", "--num-parts", "3"]
    assert main(["reorder", *arguments, *QUICK]) == 0
    printed = capsys.readouterr().out
    assert "metis left out: Graph.reorder: METIS failed to make 3 parts of 30 nodes (no memory)" in printed
    assert "degree" in printed


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--graph", "nowhere"], "--graph nowhere: not one of star, toy"),
        (["--op", "gatv3_H1_D1"], "--op: an aggregation is called gatv2_H8_D128"),
        (["--num-parts", "0"], "--num-parts must be at least 1, got 0"),
        (["--seed", "-1"], "--seed must be at least 0, got -1"),
        (["--data", "missing"], "--data missing: no such folder"),
        (["--device", "tpu"], "--device must be auto, cpu, cuda or cuda:N, got 'tpu'"),
    ],
)
def test_what_cannot_be_measured_is_told_in_a_sentence(arguments, message, capsys):
    assert main(["reorder", *arguments]) == 2
    assert message in capsys.readouterr().err
