"""Captured steps on padded batches of molecules on a GPU: bit by bit those of the step itself, one recording a size."""

import copy

import pytest
import torch

pytest.importorskip("torch_geometric")

from test_pyg_loader import molecules
from torch import nn
from torch_geometric.nn import GINEConv

import edgeless
from edgeless.padding import convert_batchnorm, real_rows
from edgeless.pyg.loader import PaddedLoader
from edgeless.pyg.nn import GATv2Conv

pytestmark = pytest.mark.cuda


class Net(nn.Module):
    def __init__(self, gat):
        super().__init__()
        mlp = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
        self.begin = nn.Linear(8, 16)
        self.layer = GATv2Conv(16, 16, edge_dim=4, add_self_loops=False) if gat else GINEConv(mlp, edge_dim=4)
        self.norm, self.end = nn.BatchNorm1d(16), nn.Linear(16, 2)

    def forward(self, batch):
        x = self.layer(self.begin(batch.x), batch.edge_index, batch.edge_attr)
        x = nn.functional.dropout(self.norm(x).relu(), 0.3, self.training)
        return self.end(mean_of_graphs(x, batch))


def mean_of_graphs(x, batch):
    """PyG's global_mean_pool as a product: its own sums are in no fixed order on CUDA."""
    of_graph = batch.batch == torch.arange(batch.num_graphs, device=x.device)[:, None]
    return of_graph.to(x.dtype) @ x / of_graph.sum(1, keepdim=True).clamp(min=1)


@pytest.mark.parametrize("gat", [True, False])
def test_padded_batches_are_replayed(gat):
    graphs = molecules(240)
    for graph in graphs:
        graph.x, graph.edge_attr, graph.y = graph.x.float(), graph.edge_attr.float(), graph.y.float()
    torch.manual_seed(0)
    loader = PaddedLoader(graphs, batch_size=24, shuffle=True, waste=0.03)
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
