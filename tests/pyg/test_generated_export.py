"""Generated layers in torch.compile, torch.export and AOTInductor: the stock layers' ops, without a graph break."""

from __future__ import annotations

import copy

import pytest
import torch
import torch_geometric.nn as stock
from torch import Tensor, nn
from torch.export import Dim

import edgeless
from edgeless.layers.calls import OF_PROGRAMS

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

WIDTH, DEGREES = 6, torch.tensor([3, 0, 5, 9, 7, 4, 2])


def drawn(num_nodes, seed):
    """Node features, edges and their features."""
    generator = torch.Generator().manual_seed(seed)
    edge_index = torch.randint(num_nodes, (2, 5 * num_nodes), generator=generator)
    x, e = (torch.randn(rows, width, generator=generator) for rows, width in ((num_nodes, WIDTH), (5 * num_nodes, 3)))
    return x, edge_index, e


class Net(nn.Module):
    """One layer with, and one without features of edges."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x, edge_index, edge_attr):
        return self.second(torch.tanh(self.first(x, edge_index, edge_attr)), edge_index)


def fresh(cls):
    """A class of its own, of which no call has been seen."""
    return type(cls.__name__, (cls,), {"__module__": cls.__module__})


def nets():
    scaled = ["mean", "max", "std"], ["identity", "amplification"], DEGREES
    return {
        "GINEConv, ResGatedGraphConv": lambda make: Net(
            make(stock.GINEConv)(nn.Linear(WIDTH, WIDTH), edge_dim=3), make(stock.ResGatedGraphConv)(WIDTH, 4)
        ),
        "CGConv, EdgeConv": lambda make: Net(
            make(stock.CGConv)(WIDTH, 3), make(stock.EdgeConv)(nn.Linear(2 * WIDTH, 4), aggr="max")
        ),
        "PNAConv, GENConv": lambda make: Net(
            make(stock.PNAConv)(WIDTH, WIDTH, *scaled, edge_dim=3), make(stock.GENConv)(WIDTH, 4, norm=None)
        ),
        "PDNConv, SuperGATConv": lambda make: Net(
            make(stock.PDNConv)(WIDTH, WIDTH, 3, 4), make(stock.SuperGATConv)(WIDTH, 4, is_undirected=True)
        ),
    }


def pair(name, make=fresh):
    """A stock model and its accelerated copy, which has not been called."""
    torch.manual_seed(3)
    theirs = nets()[name](make).eval()
    ours = copy.deepcopy(theirs)
    assert len(edgeless.accelerate(ours).swapped) == 2
    return theirs, ours


def assert_same(have, want):
    torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", nets())
def test_a_model_that_was_never_called_compiles_whole(name):
    theirs, ours = pair(name)
    x, *rest = drawn(20, 1)
    edgeless.report(reset=True)
    found = []
    for model in (theirs, torch.compile(ours, fullgraph=True, backend="aot_eager")):
        given = x.clone().requires_grad_()
        out = model(given, *rest)
        out.square().sum().backward()
        found.append([out.detach(), given.grad, *(p.grad for p in model.parameters())])
    for want, have in zip(*found, strict=True):
        assert_same(have, want)
    said = edgeless.report().layers
    assert {why for calls in said.values() for why in calls.stock} == {OF_PROGRAMS}
    assert_same(ours(x, *rest), theirs(x, *rest))


@pytest.mark.parametrize("strict", (False, True))
@pytest.mark.parametrize("name", list(nets())[:3])
def test_an_exported_model_is_right_for_another_graph(name, strict):
    theirs, ours = pair(name)
    shapes = {0: Dim("nodes", min=2)}, {1: Dim("edges", min=2)}, {0: Dim("edges", min=2)}
    program = torch.export.export(ours, drawn(20, 1), strict=strict, dynamic_shapes=shapes)
    for num_nodes in (7, 33):
        other = drawn(num_nodes, 2)
        assert_same(program.module()(*other), theirs(*other))


@pytest.mark.slow
@pytest.mark.timeout(900)  # compiles C++, which a busy machine may keep waiting
def test_a_package_of_aot_inductor_is_right(tmp_path):
    theirs, ours = pair("GINEConv, ResGatedGraphConv")
    inputs = drawn(20, 1)
    path = str(tmp_path / "model.pt2")
    torch._inductor.aoti_compile_and_package(torch.export.export(ours, inputs), package_path=path)
    out = torch._inductor.aoti_load_package(path)(*inputs)
    assert isinstance(out, Tensor)
    assert_same(out, theirs(*inputs).detach())
