"""A net of layers whose messages are generated; spawned processes import this module by name."""

import os

import torch_geometric.nn as stock
from generated_cases import Inputs, error, mlp, pair_of_layers
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from edgeless.layers.calls import recording


class Net(nn.Module):
    """Two generated layers with what stands between them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = stock.GINEConv(mlp(6, 8), edge_dim=3), stock.ResGatedGraphConv(8, 4, edge_dim=3)
        self.norm = stock.BatchNorm(8)

    def forward(self, x, edge_index, edge_attr):
        return self.second(self.norm(self.first(x, edge_index, edge_attr)).relu(), edge_index, edge_attr)


def pair_of_nets():
    """The stock net and its accelerated copy."""
    return pair_of_layers(Net)


def given(seed=0):
    """Inputs of the net."""
    inputs = Inputs(seed)
    return inputs.x.detach(), inputs.edge_index, inputs.attr.detach()


def in_parallel(rank, world, folder):
    """What is wrong with the gradients of our net under DDP."""
    os.environ["EDGELESS_GENERATE"] = "on"
    theirs, ours = pair_of_nets()
    nets = [DistributedDataParallel(net) for net in (theirs, ours)]
    for step in range(3):
        found = []
        for net in nets:
            net.zero_grad()
            net(*given(world * step + rank)).square().mean().backward()
            found.append([p.grad.clone() for p in net.parameters()])
        if not all(error(a, b) < 1e-10 for a, b in zip(*found, strict=True)):
            yield f"gradients of step {step} differ"
    with recording() as calls:
        ours(*given())
    if not all(found.fused for _, found in calls):
        yield f"not by programs: {calls}"
