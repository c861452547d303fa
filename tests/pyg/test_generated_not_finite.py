"""Features of nodes without edges that are not finite: messages read none of them, and so no gradient may."""

from __future__ import annotations

import copy

import pytest
import torch
from generated_cases import error
from on_host import running
from test_generated_layers import recorded
from torch import nn
from torch.nn import functional as F
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import softmax

import edgeless

N, E = 20, 60


@pytest.fixture(autouse=True)
def generating(monkeypatch):
    monkeypatch.setenv("EDGELESS_GENERATE", "on")


class Layer(MessagePassing):
    """Linear maps of rows, which are computed on nodes."""

    def __init__(self):
        super().__init__(aggr="sum")
        self.lin, self.other, self.gate = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(8, 1)

    def forward(self, x, edge_index, e):
        return self.propagate(edge_index, x=x, e=e)


class Chain(Layer):
    """Whole chains of one end's rows, with products that are not linear."""

    def message(self, x_i, x_j, e):
        hidden = torch.sigmoid(self.lin(x_j)) * self.other(x_j)
        return F.silu(self.lin(hidden)) * torch.tanh(self.other(x_i) * x_i) * e


class Added(Layer):
    """What is added first reaches a map later."""

    def message(self, x_i, x_j, e):
        return F.relu(self.lin(torch.cat([x_i - 2 * x_j, x_j], -1)[:, 2:6]) * e)


class Updated(Layer):
    """The rows themselves are read as well, as they are."""

    def forward(self, x, edge_index, e):
        return self.propagate(edge_index, x=x, e=e, own=x)

    def message(self, x_i, x_j, e):
        return F.elu(self.lin(x_j) + self.lin(x_i)) * e

    def update(self, out, own):
        return out + own


class Attention(Layer):
    """Scores of a linear map, which land on the kernels of attention."""

    def forward(self, x, edge_index, e):
        return self.propagate(edge_index, x=x, size=None)

    def message(self, x_i, x_j, index, size_i):
        score = F.leaky_relu(self.gate(torch.cat([x_i, x_j], -1)))
        return softmax(score, index, None, size_i) * self.lin(x_j)


class Twice(Layer):
    """Sums of sums: nodes without in-edges have sources' rows, and nodes without out-edges destinations'."""

    def aggregate(self, inputs, index, ptr=None, dim_size=None):
        return inputs.new_zeros(dim_size, inputs.size(1)).index_add(0, index, inputs)

    def message(self, x_i, x_j, e, index, dim_size):
        mean = x_i.new_zeros(dim_size, 4).index_add(0, index, x_j)
        return F.silu(self.lin(mean[index])) * self.other(x_j) * e


class Maximum(Layer):
    def __init__(self):
        super().__init__()
        self.aggr_module = edgeless.pyg.nn.MaxAggregation()

    def message(self, x_i, x_j, e):
        return self.lin(x_j) * torch.sigmoid(self.other(x_i)) * e


LAYERS = [Chain, Added, Updated, Attention, Twice, Maximum]


def results(layer, x, edge_index, e):
    out = layer(x, edge_index, e)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    wanted = [t for t in (x, e, *layer.parameters()) if t.requires_grad]
    found = torch.autograd.grad((out * weight)[out.isfinite()].sum(), wanted, allow_unused=True)
    return [out.detach(), *(torch.zeros_like(t) if g is None else g for t, g in zip(wanted, found, strict=True))]


@pytest.mark.parametrize("walks", ["off", "now", "host"])
@pytest.mark.parametrize("lacks", ["both", "in", "out"])
@pytest.mark.parametrize("cls", LAYERS)
def test_no_gradient_reads_features_that_no_message_reads(cls, lacks, walks):
    torch.manual_seed(1)
    theirs = cls().double()
    ours = copy.deepcopy(theirs)
    edgeless.accelerate(ours)
    edge_index = torch.stack([torch.randint(0, 18, (E,)), torch.randint(0, 18, (E,))])
    if lacks == "in":  # a source, whose features messages of others read
        edge_index[0, 0] = 18
    elif lacks == "out":
        edge_index[1, 0] = 18
    e = torch.rand(E, 4, dtype=torch.float64, requires_grad=True)
    for value in (1.0, float("nan"), float("inf")):  # the check of the program takes rows of the first call
        x = torch.randn(N, 4, dtype=torch.float64)
        x[19] = value
        x.requires_grad_()
        with running(walks):
            _, calls = recorded(ours, x, edge_index, e)
            assert [ran for _, ran in calls] == [True], calls
            mine = results(ours, x, edge_index, e)
        right = results(theirs, x, edge_index, e)
        for a, b in zip(mine, right, strict=True):
            assert torch.equal(a.isfinite(), b.isfinite())
            assert error(a[b.isfinite()], b[b.isfinite()]) < 1e-10
