"""Captured steps on padded batches of molecules on a GPU: bit by bit those of the step itself, one recording a size."""

import copy

import pytest
import torch

pytest.importorskip("torch_geometric")

from test_pyg_loader import bench_step, molecules
from torch import nn

import edgeless
from edgeless.padding import convert_batchnorm, real_rows
from edgeless.pyg.loader import PaddedLoader
from edgeless.pyg.nn import GATv2Conv, GINConv
from edgeless.tools.bench.training import ON_MOLECULES
from edgeless.tools.bench.training import molecules as bench_molecules

pytestmark = pytest.mark.cuda


class Net(nn.Module):
    def __init__(self, gat):
        super().__init__()
        mlp = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
        self.begin = nn.Linear(8, 16)
        self.layer = GATv2Conv(16, 16, edge_dim=4, add_self_loops=False) if gat else GINConv(mlp)
        self.norm, self.end = nn.BatchNorm1d(16), nn.Linear(16, 2)

    def forward(self, batch):
        features = (batch.edge_attr,) if type(self.layer) is GATv2Conv else ()
        x = self.layer(self.begin(batch.x), batch.edge_index, *features)
        x = nn.functional.dropout(self.norm(x).relu(), 0.3, self.training)
        return self.end(mean_of_graphs(x, batch))


def mean_of_graphs(x, batch):
    """PyG's global_mean_pool as a product: its own sums are in no fixed order on CUDA."""
    of_graph = batch.batch == torch.arange(batch.num_graphs, device=x.device)[:, None]
    return of_graph.to(x.dtype) @ x / of_graph.sum(1, keepdim=True).clamp(min=1)


def single(count):
    graphs = molecules(count)
    for graph in graphs:
        graph.x, graph.edge_attr, graph.y = graph.x.float(), graph.edge_attr.float(), graph.y.float()
    return graphs


def test_batches_made_on_the_device_are_those_of_the_cpu_and_wait_for_nothing():
    graphs = single(100)
    for number, graph in enumerate(graphs):
        graph.weight, graph.root_index = 0.1 * number, torch.tensor([1])
    options = {"batch_size": 24, "shuffle": True, "follow_batch": ["x", "y"]}
    batches = []
    for device in (None, "cuda"):
        loader = PaddedLoader(graphs, device=device, **options)
        torch.manual_seed(0)
        epochs = list(loader)  # kernels are loaded
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if device else "default")
        try:
            torch.manual_seed(0)
            epochs = list(loader)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        batches.append(epochs)
    for theirs, mine in zip(*batches, strict=True):
        assert list(mine._store._mapping) == list(theirs._store._mapping) and mine.num_graphs == theirs.num_graphs
        for name, value in theirs._store._mapping.items():
            if isinstance(value, torch.Tensor):
                assert mine[name].is_cuda and mine[name].dtype == value.dtype and torch.equal(mine[name].cpu(), value)
            else:
                assert mine[name] == value
        for table, other in zip(mine._slice_dict.values(), theirs._slice_dict.values(), strict=True):
            assert torch.equal(table, other)


@pytest.mark.parametrize("device", [None, "cuda"])
@pytest.mark.parametrize("gat", [True, False])
def test_padded_batches_are_replayed(gat, device):
    torch.manual_seed(0)
    loader = PaddedLoader(single(240), batch_size=24, shuffle=True, waste=0.03, device=device)
    batches = [batch.to("cuda") for _ in range(12) for batch in loader]
    model = convert_batchnorm(Net(gat)).cuda()
    losses, models = [], (model, copy.deepcopy(model))
    for which in models:
        optimizer = torch.optim.Adam(which.parameters(), lr=torch.full((), 0.01, device="cuda"), capturable=True)

        def step(batch, which=which, optimizer=optimizer):
            optimizer.zero_grad()
            with real_rows(batch):
                out = which(batch)
            errors = (out - batch.y).abs().mean(1)
            loss = torch.where(batch.graph_mask, errors, 0).sum() / batch.graph_mask.sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        if which is models[1]:
            step = edgeless.capture_step(step, model=which, optimizer=optimizer)
        torch.manual_seed(5)
        losses.append(torch.stack([step(batch) for batch in batches]))
    assert torch.equal(*losses)
    assert all(map(torch.equal, models[0].state_dict().values(), models[1].state_dict().values()))
    assert 1 <= step.num_captured <= len(loader.sizes.sizes), step.report()
    assert step.num_replays >= len(batches) - 4 * len(loader.sizes.sizes), step.report()


@pytest.mark.parametrize("generate", [None, "on"])
@pytest.mark.parametrize("name", ON_MOLECULES)
def test_the_models_of_the_bench_are_replayed(name, generate, monkeypatch):
    """Losses are equal to rounding: PyG's own sums are in no fixed order on CUDA."""
    if generate is None:
        monkeypatch.delenv("EDGELESS_GENERATE", raising=False)
    else:
        monkeypatch.setenv("EDGELESS_GENERATE", generate)
    loader = PaddedLoader(bench_molecules("zinc", 640), 32, shuffle=True, drop_last=True, waste=0.5, device="cuda")
    batches, losses = [batch for _ in range(2) for batch in loader], []
    for captures in (False, True):
        net, optimizer, step = bench_step(name, "cuda")
        handle = edgeless.capture_step(step, model=net, optimizer=optimizer) if captures else step
        losses.append(torch.stack([handle(batch) for batch in batches]))
    assert torch.allclose(*losses, rtol=1e-3)
    assert handle.num_captured == 1 and handle.num_replays >= len(batches) - 12, handle.report()
