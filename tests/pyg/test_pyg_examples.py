"""The examples for PyTorch Geometric."""

import importlib
import importlib.util
import re

import example_scripts
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GATv2Conv, global_mean_pool

import edgeless

needs_gloo = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo")


def test_node_classification(tmp_path):
    *_, last = example_scripts.run("pyg_node_classification.py", tmp_path).splitlines()
    assert float(last.split()[2]) > 70  # four classes


def test_neighbor_sampling(tmp_path):
    printed = example_scripts.run("pyg_neighbor_sampling.py", tmp_path)
    if any(map(importlib.util.find_spec, ("pyg_lib", "torch_sparse"))):
        assert printed.count("epoch") == 3
    else:
        assert printed.startswith("skipped: NeighborLoader needs pyg-lib or torch_sparse")


def test_accelerate(tmp_path):
    printed = example_scripts.run("accelerate_model.py", tmp_path)
    assert "swapped 3, kept 0" in printed
    assert "GATv2Conv runs fused" in printed


def test_molecules(tmp_path):
    printed = example_scripts.run("pyg_molecules.py", tmp_path).splitlines()
    losses = [float(line.split()[3].rstrip(",")) for line in printed if line.startswith("epoch")]
    assert len(losses) == 8 and losses[-1] < 0.5 * losses[0]
    sizes = next(line for line in printed if " sizes, " in line)
    assert int(sizes.split()[0]) <= 8 and all(float(part.split()[-1]) <= 12 for part in sizes.split(" %")[:-1])
    assert any(" replayed" in line for line in printed)


def test_own_messages(tmp_path):
    printed = example_scripts.run("own_messages.py", tmp_path)
    assert printed.count(" runs fused, generated.") == 8 == len(printed.splitlines())


def test_the_page_of_own_messages_shows_what_explain_prints(monkeypatch):
    monkeypatch.setenv("EDGELESS_GENERATE", "on")
    monkeypatch.syspath_prepend(str(example_scripts.EXAMPLES))
    page = (example_scripts.EXAMPLES.parent / "docs" / "own-messages.md").read_text()
    shown = re.findall(r"^`(\w+)`\..*?^```\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    layers = importlib.import_module("own_messages").calls(20, 90)
    assert [name for name, _ in shown] == [type(layer).__name__ for layer, _ in layers]
    for (name, steps), (layer, inputs) in zip(shown, layers, strict=True):
        inputs[0].requires_grad_()
        printed = str(edgeless.explain(layer, *inputs, plan=True))
        forward = printed.partition("forward:")[2].partition("backward:")[0]
        forward = re.sub(r"; (compiled|interpreted.*)$", "", forward, flags=re.MULTILINE)  # depends on the machine
        assert forward.split() == steps.split(), name


@needs_gloo
@pytest.mark.slow
def test_full_batch_on_parts_is_that_of_one_process(tmp_path):
    pytest.importorskip("safetensors")
    one, two = (
        [line.split(" on ")[0] for line in example_scripts.run("full_batch_ddp.py", tmp_path, processes).splitlines()]
        for processes in (1, 2)
    )
    assert [line.split(":")[0] for line in one] == [line.split(":")[0] for line in two] and len(one) == 4
    for here, there in zip(one, two, strict=True):
        assert float(here.split()[-1]) == pytest.approx(float(there.split()[-1]), rel=1e-4)


@needs_gloo
@pytest.mark.slow
def test_minibatches_under_ddp(tmp_path):
    printed = example_scripts.run("pyg_minibatch_ddp.py", tmp_path, 2)
    if any(map(importlib.util.find_spec, ("pyg_lib", "torch_sparse"))):
        assert printed.count("on 2 processes") == 3
    else:
        assert "skipped: NeighborLoader needs pyg-lib or torch_sparse" in printed


def test_the_page_of_tasks_runs(fresh_dynamo):
    edgeless.report(reset=True)
    assert example_scripts.run_page("how-to/pyg.md") >= 8


class OnMolecules(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = GATv2Conv(4, 8, add_self_loops=False), torch.nn.BatchNorm1d(8)
        self.head = torch.nn.Linear(8, 1)

    def forward(self, batch):
        x = self.norm(self.conv(batch.x, batch.edge_index)).relu()
        return self.head(global_mean_pool(x, batch.batch, batch.num_graphs))


def test_the_page_of_small_graphs_runs():
    graphs = [Data(torch.randn(6, 4), torch.randint(6, (2, 12)), y=torch.randn(1, 1)) for _ in range(8)]
    model = OnMolecules()
    optimizer = torch.optim.Adam(model.parameters())
    given = {
        "edgeless": edgeless,
        "torch": torch,
        "F": F,
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
        "dataset": graphs,
        "loader": DataLoader(graphs, 4),
    }
    assert example_scripts.run_page("small-graphs.md", given) >= 2
