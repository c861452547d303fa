"""Products by edge in generated kernels: which are found, and what they compute."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import on_host as host
import pytest
import torch
import torch_geometric.nn as stock
from test_generated_cuda import NEEDS_NVRTC, agree_on_the_host, cast, results, skewed, walks_of
from torch import nn
from torch_geometric.nn.aggr import MaxAggregation
from torch_geometric.utils import softmax

import edgeless
from edgeless.kernels import Store, compiled
from edgeless.kernels.provider import kernel_named
from edgeless.programs import worth
from edgeless.programs.cuda.products import _places
from edgeless.programs.cuda.rows import Rows, allocate, padded
from edgeless.programs.front.spaces import Refused
from edgeless.programs.run.cuda_walks import CudaWalk
from edgeless.tools.cli.own_perceptrons import edge_filter, perceptron, point_net


class Attention(stock.MessagePassing):
    """A softmax whose scores are a perceptron's of both rows, and whose values are another's."""

    def __init__(self, width):
        super().__init__(aggr="sum")
        self.score, self.values = perceptron(2 * width, width, width), perceptron(width, width, width)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x, size=None)

    def message(self, x_i, x_j, index, size_i):
        scores = self.score(torch.cat([x_i, x_j], -1))
        return softmax(scores, index, num_nodes=size_i) * self.values(x_i - x_j)


LAYERS = {
    "max": lambda f: stock.EdgeConv(perceptron(2 * f, f, f)),
    "relu": lambda f: stock.EdgeConv(nn.Sequential(perceptron(2 * f, f, f), nn.ReLU())),
    "deep": lambda f: stock.EdgeConv(perceptron(2 * f, f, f, f)),
    "deep sum": lambda f: stock.EdgeConv(perceptron(2 * f, f, f, f), aggr="add"),
    "widening": lambda f: stock.EdgeConv(perceptron(2 * f, 32, f), aggr="max"),
    "narrowing": lambda f: stock.EdgeConv(perceptron(2 * f, f, 32), aggr="max"),
    "filter": lambda f: edge_filter(stock.MessagePassing)(f, f, 16),
    "attention": Attention,
    "PointNet": lambda f: point_net(stock.PointNetConv)(f, f),
}
WITH_FEATURES = ("filter",)
MARGIN = 2e-5  # some twenty roundings of float32 products


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    monkeypatch.setenv("EDGELESS_GENERATE", "on")


def inputs(name, width, nodes, edges, hub):
    g = torch.Generator().manual_seed(4)
    x = torch.randn(nodes, width, dtype=torch.float64, generator=g).requires_grad_()
    ends = skewed(nodes, edges, hub)
    e = torch.randn(ends.size(1), 16, dtype=torch.float64, generator=g).requires_grad_()
    return (x, ends, e) if name in WITH_FEATURES else (x, ends)


def shortened(args, edges):
    x, ends, *features = args
    return (x, ends[:, :edges], *(e[:edges].detach().requires_grad_() for e in features))


def passes_of(monkeypatch, name, width, dtype=torch.float32):
    args = inputs(name, width, 40, 300, 60)
    walks = walks_of(monkeypatch, lambda: LAYERS[name](width), dtype, args, {})
    walks = {id(walk): CudaWalk(walk, sizes, needed) for walk, sizes, needed in walks}.values()
    return [each for walk in walks for each in walk.passes]


def counts(each):
    """Products and sums over all edges that tensor cores compute."""
    return each.text.code.count(" multiply_rows<"), each.text.code.count(" BlockTotals<")


FOUND = {
    "max": [(1, 0), (2, 1), (2, 0)],
    "deep sum": [(1, 0), (2, 1), (2, 0)],
    "widening": [(1, 0), (2, 1), (2, 0)],
}


@pytest.mark.parametrize("name", FOUND)
def test_each_walk_is_one_pass_with_its_products(monkeypatch, name):
    assert [counts(each) for each in passes_of(monkeypatch, name, 64)] == FOUND[name]


@pytest.mark.parametrize("width", [50, 60])
def test_other_widths_are_filled_up_with_zeros(monkeypatch, width):
    assert [counts(each) for each in passes_of(monkeypatch, "max", width)] == FOUND["max"]
    assert [padded(n) for n in (16, 17, 50, 64, 65)] == [16, 32, 64, 64, 96]


def test_rows_take_the_place_of_those_that_are_read_no_more():
    h, z, g, later = Rows(64, "h", 0, 2), Rows(64, "z", 2, 3), Rows(64, "g", 3, 5), Rows(64, "l", 6, 9)
    h.readers, h.own = 1, False
    assert allocate([h, z, g, later], {id(z): h}) == [68]  # in place, by the same lanes, and when all is read
    other = Rows(50, "g", 3, 5)  # as wide with its zeros, but lanes have other parts
    assert allocate([h, z, other], {id(z): h}) == [68, 68] and (z.slot, other.slot) == (0, 1)
    assert allocate([h, z, Rows(64, "g", 3, 5, fresh=True)], {id(z): h}) == [68, 68]
    h.readers = 2
    assert allocate([h, z], {id(z): h}) == [68, 68]
    halves = Rows(64, "h", 0, 2, readers=1, dtype=torch.bfloat16)
    assert allocate([halves, z], {id(z): halves}) == [68]
    wide = Rows(128, "z", 2, 3)  # of which 16 edges are written before others are read
    assert allocate([halves, wide], {id(wide): halves}) == [36, 132]


@pytest.mark.parametrize("width, dtype", [(64, torch.float64), (12, torch.float32)])
def test_float64_and_narrow_values_are_computed_by_each_lane(monkeypatch, width, dtype):
    assert all(counts(each) == (0, 0) for each in passes_of(monkeypatch, "max", width, dtype))


@pytest.mark.parametrize("rows, columns", [(32, 32), (64, 64), (32, 64), (128, 64), (96, 32), (128, 128)])
def test_every_element_of_a_sum_has_a_place_of_its_own(rows, columns):
    row, column = (a.ravel() for a in np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"))
    assert sorted(_places(row, column, rows, columns)) == list(range(rows * columns))


def test_products_run_only_where_they_are_asked_for(monkeypatch):
    walks = walks_of(monkeypatch, lambda: LAYERS["max"](64), torch.float32, inputs("max", 64, 40, 300, 60), {})
    walk, sizes, needed = walks[0]
    code = SimpleNamespace(on_cuda=CudaWalk(walk, sizes, needed))
    assert code.on_cuda.has_products_by_edge()
    program = SimpleNamespace(
        width=64,
        divides_extrema=False,
        whole=False,
        landing=None,
        ready=lambda graph: True,
        walks=lambda: [SimpleNamespace(code=code)],
    )
    with pytest.raises(Refused, match="on tensor cores, of which no times are known"):
        worth.refuse_slow(program, SimpleNamespace(num_edges=1 << 24, device=torch.device("cuda")))


@NEEDS_NVRTC
@pytest.mark.parametrize("name, architecture", [("max", 80), ("max", 120), ("attention", 90)])
def test_texts_with_products_compile(monkeypatch, name, architecture):
    for each in passes_of(monkeypatch, name, 32):
        image = compiled(kernel_named(each.header, each.kernels[False][0]), architecture, store=Store(None), packs=[])
        assert image.kind == "cubin" and image.code


ON_HOST = [
    ("max", 64, 500, torch.float32),
    ("max", 64, 3, torch.float32),
    ("filter", 32, 300, torch.bfloat16),
    ("deep sum", 64, 300, torch.bfloat16),
    ("deep sum", 64, 300, torch.float16),
    ("relu", 32, 300, torch.float32),
    ("deep", 32, 300, torch.float32),
    ("deep sum", 64, 300, torch.float32),
    ("widening", 64, 300, torch.float32),
    ("narrowing", 96, 300, torch.float32),
    ("filter", 64, 300, torch.float32),
    ("attention", 32, 300, torch.float32),
    ("PointNet", 64, 300, torch.float32),
    ("max", 50, 300, torch.float32),
    ("deep", 40, 300, torch.float32),
    ("deep sum", 50, 300, torch.bfloat16),
    ("filter", 48, 300, torch.float32),
]


@pytest.mark.skipif(host.missing() is not None, reason=f"{host.missing()}")
@pytest.mark.parametrize("name, width, edges, dtype", ON_HOST)
def test_products_agree_with_the_layer_on_the_host(name, width, edges, dtype):
    torch.manual_seed(1)
    layer = LAYERS[name](width).double()
    agree_on_the_host(layer, shortened(inputs(name, width, 60, 900, 300), edges), dtype)


@pytest.mark.skipif(host.missing() is not None, reason=f"{host.missing()}")
def test_edges_that_are_equal_share_a_gradient_on_the_host():
    torch.manual_seed(1)
    x, ends = shortened(inputs("max", 32, 60, 900, 300), 200)
    single = torch.cat([ends, ends[:, :150]], 1)  # some windows have equal edges, others none
    agree_on_the_host(LAYERS["max"](32).double(), (x, single), torch.float32)


def away_from_kinks(layer, args):
    """The call without the edges at which a rounding decides: of the slope of a ReLU, or of which edge is the maximum.

    Gradients jump there, so the float64 reference says nothing about them. Edges that are equal keep their tie.
    """
    x, ends, *features = args
    seen, hooks = [], []
    for each in layer.modules():
        if isinstance(each, nn.ReLU):
            hooks.append(each.register_forward_pre_hook(lambda _, given: seen.append(given[0].abs().amin(1) > MARGIN)))
    messages = getattr(layer, "local_nn", None) or getattr(layer, "nn", layer)
    hooks.append(messages.register_forward_hook(lambda _, given, found: seen.append(found)))
    with torch.no_grad():
        layer(*args)
    for hook in hooks:
        hook.remove()
    *slopes, values = seen
    kept = torch.stack(slopes).all(0).nonzero().flatten()
    if isinstance(layer.aggr_module, MaxAggregation):
        to, values = ends[1, kept], values[kept]
        most = values.new_full((len(x), values.size(1)), -torch.inf)
        most.scatter_reduce_(0, to[:, None].expand_as(values), values, "amax")
        below = most[to] - values
        kept = kept[~((below > 1e-12) & (below < MARGIN)).any(1)]
    return (x, ends[:, kept], *(e[kept].detach().requires_grad_() for e in features))


@pytest.mark.parametrize("name", LAYERS)
def test_few_edges_are_near_a_kink(name):
    torch.manual_seed(1)
    layer, args = LAYERS[name](32).double(), inputs(name, 32, 3000, 60_000, 9000)
    assert 59_000 < away_from_kinks(layer, args)[1].size(1) < 60_000


def agree_on_cuda(layer, args, least=1e-3):
    """Compares float32 results with float64, relative to their norm or to the least one, and two runs bit by bit.

    The gradient of the bias of a score is 0 up to roundings, of which we may have twice as many as the stock layer.
    """
    args = away_from_kinks(layer, args)
    expected = results(layer, args, {})
    theirs = copy.deepcopy(layer).to("cuda", torch.float32)
    ours = copy.deepcopy(theirs)
    edgeless.accelerate(ours)
    first, second, stock_ones = (results(m, cast(args, "cuda", torch.float32), {}) for m in (ours, ours, theirs))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    mine, other = (
        [float((a.cpu().double() - b).norm() / b.norm().clamp(min=least)) for a, b in zip(found, expected, strict=True)]
        for found in (first, stock_ones)
    )
    beyond = {i: (a, b) for i, (a, b) in enumerate(zip(mine, other, strict=True)) if a >= max(1e-5, 2 * b)}
    assert not beyond


@pytest.mark.cuda
@pytest.mark.parametrize("width", [32, 64, 128])
def test_edges_that_are_equal_share_a_gradient(width):
    torch.manual_seed(1)
    x, ends = shortened(inputs("max", width, 3000, 60_000, 9000), 40_000)
    agree_on_cuda(LAYERS["max"](width).double(), (x, torch.cat([ends, ends[:, :20_000]], 1)))


@pytest.mark.cuda
@pytest.mark.parametrize("edges", [1, 33, 60_000])
@pytest.mark.parametrize("width", [32, 50, 64, 96, 128])
@pytest.mark.parametrize("name", LAYERS)
def test_products_agree_with_the_layer(name, width, edges):
    torch.manual_seed(1)
    args = shortened(inputs(name, width, 3000, 60_000, 9000), edges)
    # The gradient of a softmax over one edge is 0, a difference of numbers around 1: its error is not relative to it.
    agree_on_cuda(LAYERS[name](width).double(), args, 1.0 if (name, edges) == ("attention", 1) else 1e-3)
