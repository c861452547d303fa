"""``python -m edgeless tune``."""

import json

import pytest
import torch

from edgeless.__main__ import main
from edgeless.choices import engines
from edgeless.choices.engines import ENGINES
from edgeless.choices.tuning_file import TuningFile
from edgeless.tools import tuning_measure
from edgeless.tools.bench import graphs
from edgeless.tools.cli import tune_command
from edgeless.tools.tuning_measure import Measured


@pytest.fixture
def file(tmp_path, monkeypatch):
    file = tmp_path / "tuning.json"
    monkeypatch.setattr(engines.tuner, "file", TuningFile(file, ENGINES))
    return file


@pytest.fixture
def fake(monkeypatch):
    """A GPU that is none, and a clock."""
    found = Measured({"rowsplit": 2.5, "wsb": 1.0, "cusparse": 4.0}, 30.0)
    monkeypatch.setattr(tuning_measure, "measure", lambda graph, shape, sides, *how: dict.fromkeys(sides, found))

    class Gpu:
        type = "cuda"

    monkeypatch.setattr(tune_command, "pick_device", lambda name: Gpu)
    monkeypatch.setattr(tune_command, "describe_device", lambda device: "a GPU")
    monkeypatch.setattr(tune_command, "load", lambda name, data, device: graphs.load(name, data, torch.device("cpu")))


def test_nothing_decided_yet(file, capsys):
    assert main(["tune", "--show"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{file}: EDGELESS_TUNING={engines.tuner.mode} (one of off, cached)",
        "no decisions",
    ]


def test_what_is_measured_is_printed_and_kept(file, fake, capsys):
    assert main(["tune", "--graph", "toy", "--op", "spmm_none_F64", "--dtype", "bf16"]) == 0
    printed = capsys.readouterr().out
    assert "toy: spmm_none_F64 bf16, a GPU" in printed and f"kept in {file}" in printed
    for words in (["forward", "wsb", "1.00", "30.0", "20", "taken"], ["backward", "cusparse", "4.00", "never"]):
        assert any(all(word in line for word in words) for line in printed.splitlines()), words
    decisions = json.loads(file.read_text())["decisions"]
    assert [(d["side"], d["engine"], d["width"], d["dtype"]) for d in decisions] == [
        (side, "wsb", 64, "bfloat16") for side in ("by_dst", "by_src")
    ]
    assert main(["tune", "--show"]) == 0
    printed = capsys.readouterr().out
    assert "2 decisions" in printed and decisions[0]["fingerprint"] in printed and "wsb 1.00" in printed


def test_self_loops_make_another_graph_and_a_dry_run_keeps_nothing(file, fake, capsys):
    assert main(["tune", "--graph", "toy", "--dtype", "fp32", "--weighted", "--dry-run"]) == 0
    assert "toy: spmm_none_F128 fp32 weighted" in capsys.readouterr().out and not file.exists()
    for more in ([], ["--self-loops"]):
        assert main(["tune", "--graph", "toy", "--dtype", "fp32", *more]) == 0
    assert "toy with self loops" in capsys.readouterr().out
    assert len({entry["fingerprint"] for entry in json.loads(file.read_text())["decisions"]}) == 2


def test_without_memory(file, fake, capsys, monkeypatch):
    monkeypatch.setattr(tuning_measure, "measure", lambda *args: {})
    assert main(["tune", "--graph", "toy", "--dtype", "fp32"]) == 1
    assert "there is no memory to measure it in" in capsys.readouterr().err


def test_a_file_that_cannot_be_used_is_told(file, fake, capsys):
    file.write_text("{")
    for arguments in (["--show"], ["--graph", "toy"]):
        assert main(["tune", *arguments]) == 1
        assert f"{file}" in capsys.readouterr().err
    assert file.read_text() == "{"


@pytest.mark.parametrize(
    "arguments,message",
    [
        ([], "tune needs --graph, as in: edgeless tune --graph hm:community"),
        (["--graph", "nowhere"], "--graph nowhere: not one of star, toy"),
        (["--graph", "nowhere.npz"], "--graph nowhere.npz: no such file"),
        (["--graph", "toy", "--op", "gatv3_H1_D1"], "--op: an aggregation is called gatv2_H8_D128"),
        (["--graph", "toy", "--op", "min_F8"], "--op min_F8: engines are chosen for sums and dot product attention"),
        (["--graph", "toy", "--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--graph", "toy", "--data", "missing"], "--data missing: no such folder"),
        (["--graph", "toy", "--device", "cpu"], "the CPU has one engine, rowsplit, so there is nothing to decide"),
    ],
)
def test_what_cannot_be_tuned_is_told_in_a_sentence(arguments, message, file, capsys):
    assert main(["tune", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.cuda
@pytest.mark.parametrize("more", [[], ["--weighted"]])
def test_on_a_gpu(more, file, capsys):
    arguments = ["--graph", "toy", "--op", "spmm_none_F64", "--rounds", "1", "--runs", "2", *more]
    assert main(["tune", *arguments]) == 0
    printed = capsys.readouterr().out
    assert printed.count("taken") == 4 and "rowsplit" in printed and "cusparse" in printed
    assert ("wsb" in printed) == (not more)
    assert len(json.loads(file.read_text())["decisions"]) == 4
