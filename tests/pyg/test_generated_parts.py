"""Generated layers on the parts of a graph, in two and three processes, against the stock layer on the whole graph."""

import pytest
import torch
import torch.distributed as dist
import torch_geometric.nn as stock
from part_cases import FEATURES, spawn, write_partitions
from pyg_generated_part_cases import DroppedMessages, cases, generated_layers, generating

import edgeless
import edgeless.distributed as ed
from edgeless.pyg import nn

pytest.importorskip("safetensors")
pytest.importorskip("pymetis")


@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo")
@pytest.mark.slow
@pytest.mark.parametrize("world", (2, 3))
def test_parts_give_what_the_whole_graph_gives(tmp_path, world):
    write_partitions(tmp_path, world)
    assert not spawn(generated_layers, world, tmp_path)


@pytest.fixture
def alone(tmp_path):
    """The parts of two, loaded by one process."""
    write_partitions(tmp_path, 2)
    return ed.load(tmp_path / "random")


def refused(layer, dg, *words, more=()):
    """Asserts that ``explain`` says these words, and that the call raises them."""
    layer, x = layer.double(), dg.ndata["x"]
    said = edgeless.explain(layer, x, dg, *more)
    assert not said
    with pytest.raises(edgeless.NotFusedError) as caught:
        layer(x, dg, *more)
    for word in words:
        assert word in str(said) and word in str(caught.value)


class Own(nn.MessagePassing):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return x_j


class Sizes(Own):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x / edge_index.size(1))


class OneBranch(Own):
    def forward(self, x, edge_index):
        if isinstance(edge_index, torch.Tensor):  # of which a DistGraph must not take the other branch
            edge_index = edge_index.flip(0)
        return self.propagate(edge_index, x=x)


class Normed(Own):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(FEATURES)

    def message(self, x_j):
        return self.norm(x_j)


class Updated(Own):
    def update(self, inputs):
        return inputs - inputs.mean(0)


class Shares(Own):
    def aggregate(self, inputs, index, dim_size):
        return super().aggregate(inputs, index, dim_size=dim_size) / dim_size


class Total(Own):
    def message(self, x_j):
        return x_j - x_j.sum(0)


def test_layers_refuse_in_words(alone):
    refused(nn.FeaStConv(FEATURES, 3), alone, "its forward reads edge_index (__getitem__)")
    refused(nn.TAGConv(FEATURES, 3), alone, "its forward reads edge_index")
    refused(Sizes(), alone, "its forward reads edge_index (size)")
    refused(OneBranch(), alone, "its forward reads edge_index (flip)")
    refused(Own(flow="target_to_source"), alone, "the layer's flow is 'target_to_source'")
    refused(Normed(), alone, "a norm over all edges")
    refused(Updated(), alone, "mean goes over all nodes")
    refused(Shares(), alone, "the number of nodes or edges")
    refused(Total(), alone, "goes over all nodes or edges")


def test_a_forward_that_is_called_by_itself_is_refused(alone):
    layer = nn.GINEConv(torch.nn.Linear(FEATURES, 3), edge_dim=2).double()
    with pytest.raises(edgeless.NotFusedError, match="forward\\(\\) was called by itself"):
        layer.forward(alone.ndata["x"], alone, alone.edata["e"])


def test_features_that_no_edge_reads_may_be_infinite(alone):
    """What is computed of own rows before they travel must not spoil the gradients of its parameters."""
    layer = nn.EdgeConv(torch.nn.Linear(2 * FEATURES, 2), aggr="mean").double()
    gradients = []
    for number in (0.0, float("inf")):
        x = alone.ndata["x"].clone()
        x[alone.nodes == 40] = number  # a node without edges
        layer.zero_grad()
        layer(x.requires_grad_(), alone).sum().backward()
        gradients.append(layer.nn.weight.grad)
    assert gradients[1].isfinite().all()
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


def test_size_must_be_that_of_the_part(alone):
    x, e = alone.ndata["x"], alone.edata["e"]
    layer = nn.GINEConv(torch.nn.Linear(FEATURES, 3), edge_dim=2).double()
    torch.testing.assert_close(layer(x, alone, e, size=(45, 45)), layer(x, alone, e))
    refused(layer, alone, "size is (45, 44)", more=(e, (45, 44)))


@pytest.mark.parametrize("choice", ("off", "land"))
def test_where_programs_are_off_parts_are_refused(alone, choice):
    layer = nn.ResGatedGraphConv(FEATURES, 3).double()
    with generating(choice), pytest.raises(edgeless.NotFusedError, match=f"EDGELESS_GENERATE.*{choice}"):
        layer(alone.ndata["x"], alone)


def test_explain_says_what_runs_and_exchanges_nothing(alone, monkeypatch):
    layer = nn.EdgeConv(torch.nn.Linear(2 * FEATURES, 3)).double()
    monkeypatch.setattr(type(alone), "sources", None)
    said = edgeless.explain(layer, alone.ndata["x"], alone, plan=True)
    assert said and "generated over a part" in str(said) and "walk by destination" in str(said)


def test_models_of_generated_layers_are_not_refused():
    model = torch.nn.Sequential(*(make() for _, make, *_ in cases()), DroppedMessages())
    assert ed.refusals(model) == []
    assert "no fused layer" in ed.refusals(torch.nn.Sequential(stock.GINEConv(torch.nn.Linear(2, 2))))[0]
