"""Batches of PyG as arguments of a captured step, on tapes in the place of CUDA graphs."""

import copy

import pytest
import torch

pytest.importorskip("torch_geometric")

import step_cases
from step_cases import follow
from torch import nn
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.nn import global_add_pool

from edgeless.capture.batches import leaves_of, with_leaves
from edgeless.pyg.nn import GATv2Conv, GCNConv, SAGEConv


def two_runs(make, step):
    """Those of small steps, which do not diverge."""
    return step_cases.two_runs(make, step, optimizer=lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9))


def molecule(seed, nodes=5, edges=8):
    made = torch.Generator().manual_seed(seed)
    src = torch.randint(nodes, (edges,), generator=made)
    ends = torch.stack((src, (src + torch.randint(1, nodes, (edges,), generator=made)) % nodes))
    x, y = torch.randn(nodes, 4, generator=made), torch.randn(1, generator=made)
    return Data(x=x, edge_index=ends, y=y, name=f"molecule {seed}", size=nodes)


def batch_of(seed, count=3):
    return Batch.from_data_list([molecule(seed * count + i) for i in range(count)])


class Net(nn.Module):
    def __init__(self, layer, **options):
        super().__init__()
        self.first, self.second = layer(4, 8, **options), layer(8, 1, **options)

    def forward(self, batch):
        x = self.first(batch.x, batch.edge_index).relu()
        return global_add_pool(self.second(x, batch.edge_index), batch.batch, batch.num_graphs).flatten()


def step_on_batches(model, optimizer):
    def step(batch):
        optimizer.zero_grad()
        loss = (model(batch) - batch.y).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


@pytest.mark.parametrize("layer", [GATv2Conv, GCNConv, SAGEConv])
def test_batches_are_replayed(layer):
    eager, captured = two_runs(lambda: Net(layer), step_on_batches)
    follow(eager, captured, [(batch_of(seed),) for seed in range(10)])
    assert captured.step.num_captured == 1 and captured.step.num_replays == 8, captured.step.report()


def test_another_number_of_graphs_is_another_call():
    eager, captured = two_runs(lambda: Net(SAGEConv), step_on_batches)
    batches = [batch_of(seed) for seed in range(6)]
    for batch in batches[3:]:  # the same shapes, with one graph more that has no nodes
        batch._num_graphs, batch.y = 4, torch.cat((batch.y, torch.zeros(1)))
    follow(eager, captured, [(batch,) for batch in batches])
    assert captured.step.num_captured == 2 and captured.step.num_replays == 2, captured.step.report()


def test_what_a_batch_is_taken_apart_into():
    batch, leaves = batch_of(0), []
    tree = leaves_of(batch, leaves)
    assert hash(tree) is not None and not any(isinstance(leaf, (list, str)) for leaf in leaves)
    other = with_leaves(batch, iter([leaf + 1 if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]))
    assert type(other) is type(batch) and other is not batch and other.num_graphs == 3
    assert torch.equal(other.x, batch.x + 1) and torch.equal(other.batch, batch.batch + 1)
    assert "name" in batch and "name" not in other and not hasattr(other, "_slice_dict")
    assert batch.get_example(0).num_nodes == 5  # the batch itself is as it was
    assert leaves_of(Data(x=torch.ones(2)), []) != leaves_of(Data(z=torch.ones(2)), [])


def test_heterogeneous_batches():
    data = HeteroData()
    data["a"].x, data["b"].x = torch.ones(2, 3), torch.ones(3, 1)
    data["a", "to", "b"].edge_index = torch.tensor([[0, 1], [2, 0]])
    batch, leaves = Batch.from_data_list([data, copy.copy(data)]), []
    leaves_of(batch, leaves)
    other = with_leaves(batch, iter([leaf * 2 if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]))
    assert torch.equal(other["a"].x, batch["a"].x * 2) and other.num_graphs == 2
    assert torch.equal(other["a", "to", "b"].edge_index, batch["a", "to", "b"].edge_index * 2)
    assert torch.equal(other["b"].batch, batch["b"].batch * 2)


def test_what_is_left_out_of_a_captured_step_cannot_be_read():
    def step(model, optimizer):
        inner = step_on_batches(model, optimizer)
        return lambda batch: inner(batch) * len(batch.name)

    eager, captured = two_runs(lambda: Net(SAGEConv), step)
    follow(eager, captured, [(batch_of(seed),) for seed in range(6)])
    assert captured.step.num_replays == 0 and "AttributeError" in captured.step.report()


def test_data_in_a_closure_that_changes():
    data = batch_of(0)

    def step(model, optimizer):
        inner = step_on_batches(model, optimizer)
        return lambda: inner(data)

    def between(run, number):
        if number == 5:
            data.x = torch.ones_like(data.x)
        if number == 10:
            data.edge_index = batch_of(1).edge_index

    eager, captured = two_runs(lambda: Net(SAGEConv), step)
    follow(eager, captured, [()] * 15, between)
    assert captured.step.num_replays >= 6, captured.step.report()
