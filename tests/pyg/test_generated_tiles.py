"""Products of narrow edge features in generated kernels: which are found, and what they compute."""

from __future__ import annotations

import copy

import numpy as np
import on_host as host
import pytest
import torch
import torch_geometric.nn as stock
from test_generated_cuda import NEEDS_NVRTC, agree_on_the_host, cast, results, skewed, walks_of
from torch import nn

import edgeless
from edgeless.kernels import Store, compiled
from edgeless.kernels.provider import kernel_named
from edgeless.programs.cuda.tiles import _places, _steps
from edgeless.programs.run.cuda_walks import CudaWalk
from edgeless.programs.scheduling.schedule import is_fold
from edgeless.tools.cli.own_attention import own_attention

LAYERS = {
    "GINEConv": lambda f, k: stock.GINEConv(nn.Linear(f, f), edge_dim=k),
    "CGConv": lambda f, k: stock.CGConv(f, k),
    "own attention": lambda f, k: own_attention(stock.MessagePassing)(f, f, k),
}
# Products of features, sums over all edges and gradients of features in the passes of the forward and of the backward.
FOUND = {
    "GINEConv": [(1, 0, 0), (1, 1, 1)],
    "CGConv": [(2, 0, 0), (2, 2, 2), (2, 0, 0)],
    "own attention": [(2, 0, 0), (2, 2, 2), (2, 0, 0)],
}


class Own(stock.MessagePassing):
    """Messages that use products otherwise than the layers do."""

    def __init__(self, kind):
        super().__init__(aggr="max" if kind == "extremum" else "sum")
        self.kind = kind
        self.first, self.second = nn.Linear(16, 64), nn.Linear(16, 64, bias=False)

    def forward(self, x, edge_index, e):
        return self.propagate(edge_index, x=x, e=e)

    def message(self, x_i, x_j, e):
        if self.kind == "halves":  # of the features
            return self.first(e[:, :16]) * torch.sigmoid(self.second(e[:, 16:])) * x_i + e.sum(-1, keepdim=True)
        if self.kind == "heads":  # a product is read by lanes other than those that have its channels
            weights = (x_j * self.first(e)).view(-1, 4, 16).sum(-1)
            return (weights[..., None] * self.second(e).view(-1, 4, 16)).flatten(1)
        return self.first(e) + x_j * self.second(e)


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    monkeypatch.setenv("EDGELESS_GENERATE", "on")


def inputs(width, features, nodes=3000, edges=60_000, hub=9000):
    g = torch.Generator().manual_seed(4)
    x = torch.randn(nodes, width, dtype=torch.float64, generator=g).requires_grad_()
    ends = skewed(nodes, edges, hub)
    e = torch.randn(ends.size(1), features, dtype=torch.float64, generator=g).requires_grad_()
    return x, ends, e


def cuda_walks_of(monkeypatch, name, width, features, dtype=torch.float32):
    args = inputs(width, features, 40, 300, 60)
    walks = walks_of(monkeypatch, lambda: LAYERS[name](width, features), dtype, args, {})
    return list({id(walk): CudaWalk(walk, sizes, needed) for walk, sizes, needed in walks}.values())


def passes_of(*args):
    return [each for walk in cuda_walks_of(*args) for each in walk.passes]


def counts(each):
    texts = ("multiply_features", "TileTotals", "sums.template multiply_columns")
    return tuple(each.text.code.count(f" {text}<") for text in texts)


@pytest.mark.parametrize("name, dtype", [*((n, torch.float32) for n in LAYERS), ("CGConv", torch.bfloat16)])
def test_each_walk_is_one_pass_with_its_products(monkeypatch, name, dtype):
    assert [counts(each) for each in passes_of(monkeypatch, name, 64, 16, dtype)] == FOUND[name]


# Of each walk the results of lanes and the numbers that they sum over all edges, which decide whether it pays.
OF_LANES = {
    "GINEConv": [(1, 0), (2, 64)],
    "CGConv": [(1, 0), (2, 0), (2, 0)],
    "own attention": [(3, 0), (2, 64), (1, 0)],
}


@pytest.mark.parametrize("name", LAYERS)
def test_results_in_tiles_cost_lanes_nothing(monkeypatch, name):
    assert [walk.of_lanes() for walk in cuda_walks_of(monkeypatch, name, 64, 16)] == OF_LANES[name]


@pytest.mark.parametrize("width, features", [(60, 16), (64, 12), (64, 16)])
def test_other_shapes_and_float64_are_computed_by_each_lane(monkeypatch, width, features):
    dtype = torch.float64 if (width, features) == (64, 16) else torch.float32
    assert all(counts(each) == (0, 0, 0) for each in passes_of(monkeypatch, "GINEConv", width, features, dtype))


@pytest.mark.parametrize("columns, features", [(32, 16), (64, 16), (64, 32), (128, 16), (96, 16)])
def test_every_element_of_a_sum_has_a_place_of_its_own(columns, features):
    column, feature = (a.ravel() for a in np.meshgrid(np.arange(columns), np.arange(features), indexing="ij"))
    assert sorted(_places(column, feature, features)) == list(range(columns * features))


def test_matrices_are_read_by_their_steps():
    table = np.arange(12).reshape(3, 4)
    assert _steps(table) == (0, 4, 1) and _steps(table.T) == (0, 1, 4) and _steps(table[::-1]) == (8, -4, 1)
    assert _steps(table[:, [0, 1, 3]]) is None and _steps(table[[0, 2, 1]]) is None


@pytest.mark.parametrize("dtype, folds", [(torch.float32, [3, 1, 1]), (torch.bfloat16, [3, 2, 1])])
def test_a_sum_of_the_softmaxs_gradient_is_computed_on_nodes(monkeypatch, dtype, folds):
    walks = walks_of(monkeypatch, lambda: LAYERS["own attention"](8, 4), dtype, inputs(8, 4, 40, 300, 60), {})
    walks = {id(walk): walk for walk, *_ in walks}.values()
    assert [sum(map(is_fold, walk.ops)) for walk in walks] == folds  # what 16 bits keep is rounded


@NEEDS_NVRTC
@pytest.mark.parametrize("name", LAYERS)
def test_texts_with_products_compile(monkeypatch, name):
    for each in passes_of(monkeypatch, name, 64, 16):
        image = compiled(kernel_named(each.header, each.kernels[False][0]), 80, store=Store(None), packs=[])
        assert image.kind == "cubin" and image.code


ON_HOST = [
    *((name, 64, 16, 500, torch.float32) for name in LAYERS),
    ("GINEConv", 96, 32, 300, torch.float32),
    ("GINEConv", 32, 16, 3, torch.float32),
    ("GINEConv", 128, 16, 300, torch.bfloat16),
]


@pytest.mark.skipif(host.missing() is not None, reason=f"{host.missing()}")
@pytest.mark.parametrize("name, width, features, edges, dtype", ON_HOST)
def test_products_agree_with_the_layer_on_the_host(name, width, features, edges, dtype):
    torch.manual_seed(1)
    agree_on_the_host(LAYERS[name](width, features).double(), cut(width, features, edges), dtype)


@pytest.mark.skipif(host.missing() is not None, reason=f"{host.missing()}")
@pytest.mark.parametrize("kind, features", [("halves", 32), ("heads", 16), ("extremum", 16)])
def test_products_in_other_messages(kind, features):
    torch.manual_seed(1)
    agree_on_the_host(Own(kind).double(), cut(64, features, 400), torch.float32)


def cut(width, features, edges):
    """The first edges of a graph, with inputs."""
    x, ends, e = inputs(width, features, 60, 900, 300)
    return x, ends[:, :edges], e[:edges].detach().requires_grad_()


@pytest.mark.cuda
@pytest.mark.parametrize("edges", [1, 17, 60_000])
@pytest.mark.parametrize("width, features", [(32, 16), (64, 16), (64, 32), (96, 16), (128, 16)])
@pytest.mark.parametrize("name", LAYERS)
def test_products_agree_with_the_layer(name, width, features, edges):
    torch.manual_seed(1)
    layer = LAYERS[name](width, features).double()
    x, ends, e = inputs(width, features)
    if name == "own attention":  # an argument of leaky_relu that is a rounding from 0 has either slope
        mapped = layer.lin(x)
        apart = (mapped[ends[0]] + mapped[ends[1]] + layer.score(e)).abs().amin(1) > 1e-5
        ends, e = ends[:, apart], e[apart]
    e = e[:edges].detach().requires_grad_()
    args = (x, ends[:, :edges], e)
    expected = results(layer, args, {})
    ours = copy.deepcopy(layer).to("cuda", torch.float32)
    edgeless.accelerate(ours)
    first, second = (results(ours, cast(args, "cuda", torch.float32), {}) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    # The gradient of a softmax over one edge is 0, a difference of numbers around 1: its error is not relative to it.
    least = 1.0 if name == "own attention" and edges == 1 else 1e-3
    for a, b in zip(first, expected, strict=True):
        assert (a.cpu().double() - b).norm() < 1e-5 * b.norm().clamp(min=least)
