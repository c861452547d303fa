"""The benchmark of training steps: peers train the same model on the same molecules; what is not replayed is said."""

import json

import pytest
import torch

pytest.importorskip("torch_geometric")

from edgeless.__main__ import main
from edgeless.padding import real_rows
from edgeless.tools.bench import training
from edgeless.tools.bench.suites import SUITES
from edgeless.tools.cli.devices import UsageError

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    monkeypatch.setattr(training, "TURN", 2)
    monkeypatch.setattr(training, "_EPOCH", 4)


@pytest.mark.parametrize("name", training.DATASETS)
def test_molecules_are_like_their_data_set(name):
    graphs, like = training.molecules(name, 600), training.DATASETS[name]
    nodes = torch.tensor([float(graph.num_nodes) for graph in graphs])
    assert float(nodes.mean()) == pytest.approx(like.mean, rel=0.1)
    assert float(nodes.std()) == pytest.approx(like.spread, rel=0.2)
    for graph in graphs[:20]:
        assert graph.x.shape == (graph.num_nodes, like.features) and graph.is_undirected()
        assert not graph.has_self_loops() and graph.edge_attr.shape == (graph.num_edges, training.BONDS)
    assert torch.equal(graphs[3].x, training.molecules(name, 600)[3].x)


@pytest.mark.parametrize("model", training.ON_MOLECULES)
def test_peers_train_alike(model):
    graphs, losses = training.molecules("qm9", 32), {}
    for peer in ("pyg", "edgeless-pyg", "edgeless-pyg-captured"):
        made = training._of_molecules(peer, model, "qm9", 8, "fp32", CPU, graphs)
        torch.manual_seed(1)
        batches = made.batches()
        losses[peer] = torch.stack([made.step(next(batches)) for _ in range(2)])
    if model == "gps":  # with dropout, over rows of padding too
        del losses["edgeless-pyg-captured"]
    for peer, found in losses.items():
        assert torch.allclose(found, losses["pyg"], rtol=1e-3), peer


def test_under_autocast_the_step_computes_in_16_bits():
    graphs, losses = training.molecules("qm9", 32), []
    for dtype in ("fp32", "bf16"):
        made = training._of_molecules("pyg", "gine", "qm9", 8, dtype, CPU, graphs)
        torch.manual_seed(1)
        losses.append(made.step(next(made.batches())))
    assert losses[0] != losses[1] and torch.allclose(*losses, rtol=0.1)


def test_the_peer_with_cuda_graphs_has_padded_batches_and_the_stock_model(monkeypatch):
    modes = []
    monkeypatch.setattr(torch, "compile", lambda net, **options: modes.append(options) or net)
    made = training._of_molecules("pyg-reduce-overhead", "gine", "qm9", 8, "fp32", CPU, training.molecules("qm9", 32))
    assert modes == [{"mode": "reduce-overhead", "dynamic": True}] and made.sizes is not None and made.handle is None
    assert made.step(next(made.batches())).isfinite()


@pytest.mark.parametrize("model", training.ON_A_GRAPH)
def test_models_of_a_graph(model):
    torch.manual_seed(0)
    net, ends = training.OnAGraph(model, 12), torch.randint(9, (2, 30))
    assert net(torch.randn(9, 12), ends).shape == (9, training.CLASSES)


def test_a_padded_batch_has_as_many_outputs_as_graphs():
    made = training._of_molecules(
        "edgeless-pyg-captured", "gine", "zinc", 8, "fp32", CPU, training.molecules("zinc", 16)
    )
    batch = next(made.batches())
    with real_rows(batch):
        assert batch.num_graphs == batch.graph_mask.numel() > batch.graph_mask.sum() == 8 and made.sizes.batches
    assert made.step(batch).shape == () and "not on the current GPU" in made.why()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_command_prints_and_writes(tmp_path, capsys, dtype):
    file = tmp_path / "steps.json"
    command = ["bench", "--training", "gine", "--graph", "qm9", "--molecules", "8", "--device", "cpu", "--rounds", "1"]
    command += ["--dtype", dtype, "--peers", "pyg", "edgeless-pyg-captured", "--json", str(file)]
    assert main(command) == 0
    assert f"training gine in {dtype} on batches of 8 molecules as in qm9" in capsys.readouterr().out
    rows = json.loads(file.read_text())["results"]
    assert {row["dtype"] for row in rows} == {dtype}
    assert [row["peer"] for row in rows] == ["pyg", "edgeless-pyg-captured"]
    assert all(row["failed"] is None and row["total_ms"] >= row["step_ms"] > 0 for row in rows)
    assert rows[0]["waste"] is None and 0 <= rows[1]["waste"] < 0.5 and rows[1]["why"] is not None


def test_a_peer_that_fails_has_its_reason(monkeypatch):
    def failing(*given):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(training, "_turn", failing)
    (row,) = training.measure("qm9", None, "gine", 4, "fp32", ["pyg"], CPU, 1)
    assert row.failed == "RuntimeError: out of luck" and row.step_ms is None


def test_what_does_not_go_together_is_an_error():
    with pytest.raises(UsageError, match="--training gcn: on zinc there are gine, gatv2, pna, gps"):
        training.check(["gcn"], ["zinc"])
    with pytest.raises(UsageError, match="--training pna: on cora there are gcn"):
        training.check(["pna"], ["cora"])
    with pytest.raises(UsageError, match="for --training there are pyg, pyg-compiled"):
        training.peers_of(["dgl"])
    with pytest.raises(UsageError, match="--dtype fp16: for --training there are fp32 and bf16"):
        training.check(["gine"], ["zinc"], ["fp16"])
    for name in ("small", "small-molecules"):
        training.check(SUITES[name]["training"], SUITES[name]["graph"])
