"""``demo --parts`` and ``bench --scale-out`` as a user runs them, on CPU processes."""

import json
import os
import subprocess
import sys

import pytest
import torch.distributed as dist

pytest.importorskip("safetensors")
pytest.importorskip("torch_geometric")
pytest.importorskip("rich")
from edgeless.__main__ import main

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo")
SMALL = ("--nodes", "400", "--edges", "4000", "--epochs", "3", "--hidden", "4")


def torchrun(processes, *options):
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "NO_COLOR": "1"}
    return subprocess.run(
        [*start, "-m", "edgeless", *options], env=environment, capture_output=True, text=True, timeout=240
    )


@pytest.mark.slow
def test_demo_on_parts_trains_as_the_stock_layers(tmp_path):
    done = torchrun(2, "demo", "--parts", "4", *SMALL, "--layer", "sage-mean", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    (loss,) = [line for line in done.stdout.splitlines() if "training loss" in line]
    stock, ours = (float(cell) for cell in loss.replace("│", "|").split("|")[2:4])
    assert ours == pytest.approx(stock, rel=1e-3)
    assert done.stdout.count("test accuracy") == 1  # the first process prints


def test_demo_says_how_many_processes_it_needs(capsys, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(["demo", "--parts", "2", *SMALL]) == 2
    assert "start it with: torchrun --nproc-per-node 2 -m edgeless demo" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert main(["demo", "--parts", "2", *SMALL]) == 2
    assert "the 3 processes must divide it" in capsys.readouterr().err
    assert main(["demo", "--parts", "0", *SMALL]) == 2


@pytest.mark.slow
def test_bench_compares_parts_with_one_process(tmp_path, capsys):
    file = tmp_path / "found.json"
    command = ["bench", "--suite", "scale-out", "--graph", "toy", "--scale-out", "sage-mean", "--rounds", "1"]
    assert main([*command, "--device", "cpu", "--json", str(file)]) == 0
    assert "full-batch epochs on parts" in capsys.readouterr().out
    rows = json.loads(file.read_text())["results"]
    assert [(row["way"], row["processes"]) for row in rows] == [
        ("edgeless", 1), ("torch-csr", 1), ("edgeless", 2), ("torch-csr", 2)
    ]  # fmt: skip
    assert [row["carrier"] for row in rows] == ["", "", "all_to_all", "all_to_all"]
    for row in rows:
        assert row["epoch_ms"] > 0
        assert (row["gradient_error"] or 0) < 1e-5
    assert all(row["same_bits"] for row in rows if row["way"] == "edgeless")


@pytest.mark.slow
def test_bench_tells_what_ddp_costs(tmp_path, capsys):
    file = tmp_path / "found.json"
    command = ["bench", "--suite", "ddp", "--graph", "toy", "--rounds", "1", "--batch-size", "32", "--fanout", "3,2"]
    assert main([*command, "--device", "cpu", "--json", str(file)]) == 0
    assert "mini-batches under DDP" in capsys.readouterr().out
    rows = json.loads(file.read_text())["results"]
    assert [(row["model"], row["prefetched"], row["average"]) for row in rows] == [
        (model, prefetched, average)
        for model in ("sage-mean", "gatv2")
        for prefetched in (False, True)
        for average in ("ddp", "average_gradients")
    ]
    assert all(row["same_parameters"] and row["efficiency"] > 0 for row in rows)


def test_bench_needs_gpus_for_symmetric_memory(capsys):
    command = ["bench", "--scale-out", "gatv2", "--graph", "toy", "--device", "cpu", "--carrier", "auto", "symmetric"]
    assert main(command) == 2
    assert "--carrier symmetric: needs GPUs, and the device is cpu" in capsys.readouterr().err


def test_bench_names_the_models_that_it_has(capsys):
    assert main(["bench", "--scale-out", "gcn", "--graph", "toy", "--device", "cpu"]) == 2
    assert "there are sage-mean, gatv2" in capsys.readouterr().err
