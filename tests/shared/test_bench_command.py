"""``python -m edgeless bench`` on a graph of its own, with peers of its own: no framework changes what it does."""

import json

import pytest
import torch

from edgeless.__main__ import main
from edgeless.tools.cli.devices import installed

pytestmark = pytest.mark.usefixtures("short_turns")


def test_bench_measures_and_writes_what_it_prints(tmp_path, capsys):
    file = tmp_path / "bench.json"
    options = ["--graph", "toy", "--op", "gatv2_H2_D8", "--peers", "plain", "edgeless", "--device", "cpu"]
    assert main(["bench", *options, "--rounds", "1", "--warmup", "1", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert "toy: 1,000 nodes, 10,000 edges; gatv2_H2_D8 fp32" in out
    written = json.loads(file.read_text())
    assert [(row["peer"], row["mode"]) for row in written["results"]] == [
        (peer, mode) for mode in ("forward", "forward_backward") for peer in ("plain", "edgeless")
    ]
    for row in written["results"]:
        assert row["median_ms"] > 0
        assert row["peak_bytes"] is not None
        forward = 10_000 * (64 + 4) + 1000 * (64 + 64 + 8)  # rows of 64 bytes, their ids, a logsumexp of each head
        assert row["planned_bytes"] == forward if row["mode"] == "forward" else row["planned_bytes"] > 3 * forward
        assert row["roofline_ms"] is None  # of no CPU
    assert written["setting"]["torch"] == torch.__version__


def test_threads_are_compared_and_restored(capsys):
    before = torch.get_num_threads()
    options = ["--graph", "toy", "--op", "gat_H1_D8", "--peers", "edgeless", "--mode", "forward", "--no-memory"]
    try:
        assert main(["bench", *options, "--compare-threads", "1,2", "--rounds", "1"]) == 0
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    out = capsys.readouterr().out
    assert "edgeless, 1 thread " in out
    assert "edgeless, 2 threads" in out
    assert "against 1 thread" in out


def test_figures_of_a_baseline_are_printed_with_their_mean(tmp_path, capsys):
    figures = {"graph": "toy", "op": "gat_H1_D8", "dtype": "fp32", "forward_ms": 1e6, "forward_peer": "a slow one"}
    baseline = {"machine": "a machine", "date": "2026-11-21", "aggregation": [figures], "layers": []}
    (tmp_path / "b.json").write_text(json.dumps(baseline))
    options = ["--graph", "toy", "--op", "gat_H1_D8", "--peers", "edgeless", "--mode", "forward", "--no-memory"]
    assert main(["bench", *options, "--device", "cpu", "--rounds", "1", "--baseline", str(tmp_path / "b.json")]) == 0
    out = capsys.readouterr().out
    assert "of 1,000,000" in out
    assert "Ratio to the best peer (a machine, 2026-11-21)" in out


def test_engines_that_compute_a_case_stand_beside_the_chosen_one(tmp_path, capsys):
    """Those that do not are rows with their reason, and nobody needs to know which to leave out."""
    file = tmp_path / "engines.json"
    command = ["bench", "--suite", "engines", "--graph", "toy", "--op", "spmm_none_F8", "min_F8", "--dtype", "bf16"]
    assert main([*command, "--device", "cpu", "--rounds", "1", "--warmup", "0", "--json", str(file)]) == 0
    rows = {(row["case"]["name"], row["peer"]): row for row in json.loads(file.read_text())["results"]}
    assert rows["spmm_none_F8", "edgeless-cusparse"]["failed"] == "cusparse: the tensors are not on a GPU"
    assert rows["min_F8", "edgeless-wsb"]["failed"] == "wsb: it computes sums and attention only"
    assert ("min_F8", "edgeless-cusparse") not in rows
    assert rows["min_F8", "edgeless-auto"]["engine"] == "rowsplit"
    blocks = rows["spmm_none_F8", "edgeless-wsb"]
    assert blocks["reuse"] >= 1 and blocks["build_ms"] > 0 and blocks["blocks_bytes"] > 0
    printed = capsys.readouterr().out
    assert "The engine that is chosen, against the fastest" in printed and "rowsplit" in printed


def test_the_generator_suite_runs_in_pieces(tmp_path, capsys, monkeypatch):
    if not installed("pyg"):
        pytest.skip("needs pyg")
    monkeypatch.setenv("EDGELESS_GENERATE", "on")
    monkeypatch.setenv("EDGELESS_COMPILE_WALKS", "off")
    file = tmp_path / "generator.json"
    piece = ["--graph", "toy", "--layer", "resgated", "gine-16", "--width", "8", "16", "--peers", "pyg", "edgeless-pyg"]
    options = ["--suite", "generator-cpu", *piece, "--device", "cpu", "--rounds", "1", "--warmup", "0", "--no-memory"]
    assert main(["bench", *options, "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["results"]
    cells = [(r["case"]["name"], r["case"]["features"], r["case"]["heads"] * r["case"]["channels"]) for r in rows]
    assert list(dict.fromkeys(cells)) == [
        ("resgated", 8, 8), ("resgated", 16, 16), ("gine-16", 8, 8), ("gine-16", 16, 16)
    ]  # fmt: skip
    assert all(row["failed"] is None for row in rows) and len(rows) == 4 * 4
    assert main(["bench", "--layer", "resgated", "--width", "0"]) != 0
    assert "--width must be at least 1, got 0" in capsys.readouterr().err
