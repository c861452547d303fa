"""Which of a layer's linear map and its sum over neighbours comes first."""

import pytest
import torch
from torch import nn

import edgeless
from edgeless.functional.map_order import maps_first, sums_first

GRAPH = edgeless.Graph.from_edge_index(torch.tensor([[0, 1, 2], [1, 2, 0]]), 3, 3)


def orders(width, outs, *, x_grad=False, frozen=False, by=None, dtype=torch.float32, by_dtype=None):
    """(whether a layer that sums first had better map first, and the other way round)"""
    x = torch.ones(3, width, dtype=dtype, requires_grad=x_grad)
    weight = nn.Parameter(torch.ones(outs, width), requires_grad=not frozen)
    return maps_first(GRAPH, x, weight, by, by_dtype), sums_first(GRAPH, x, weight, by, by_dtype)


def test_the_narrower_side_is_gathered():
    assert orders(16, 4, x_grad=True) == (True, False)
    assert orders(4, 16, x_grad=True) == (False, True)
    assert orders(16, 4, frozen=True) == (True, False)
    assert orders(16, 14, x_grad=True) == orders(14, 16, x_grad=True) == (False, False)  # too little is saved


def test_sums_of_what_needs_no_gradient_are_gathered_once():
    assert orders(16, 16) == (False, True)
    assert orders(16, 11) == (False, True)
    assert orders(16, 5) == (True, False)
    with torch.no_grad():
        assert orders(16, 16) == (False, False)
        assert orders(16, 11) == (True, False)
    # The gradient of edge weights is gathered in both orders.
    assert orders(16, 12, by=torch.ones(3)) == (False, True)
    assert orders(16, 14, by=torch.ones(3, requires_grad=True)) == (False, False)


@pytest.mark.parametrize("case", [{"dtype": torch.bfloat16}, {"by_dtype": torch.float64}])
def test_the_order_stays_where_dtypes_depend_on_it(case):
    assert orders(16, 4, **case) == (False, False)


def test_the_order_stays_under_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        assert orders(16, 4) == (False, False)
    assert orders(16, 4) == (True, False)


def test_sources_that_outnumber_their_edges_are_not_mapped():
    """Every source would be, and few of their numbers be gathered less."""
    weight, ends = nn.Parameter(torch.ones(16, 64)), torch.zeros(2, 400, dtype=torch.int64)
    for num_edges, maps in ((3, False), (400, True)):
        few = edgeless.Graph.from_edge_index(ends[:, :num_edges], 100, 4)
        assert maps_first(few, torch.ones(100, 64), weight, None, None) is maps
    many = edgeless.Graph.from_edge_index(ends[:, :3], 4, 100)
    assert maps_first(many, torch.ones(4, 64), weight, None, None)


def test_the_order_stays_for_tensors_of_other_kinds():
    weight = nn.Parameter(torch.ones(4, 16))
    for x in (torch.ones(3, 16).to_sparse(), torch.ones(3, 2, 16), nn.parameter.UninitializedParameter()):
        assert not maps_first(GRAPH, x, weight, None, None)
    assert not maps_first(GRAPH, torch.ones(3, 16), nn.parameter.UninitializedParameter(), None, None)


@pytest.mark.cuda
def test_small_graphs_on_cuda_keep_their_one_op():
    ids = torch.arange(1 << 18, device="cuda") % 512
    large = edgeless.Graph.from_edge_index(torch.stack((ids, ids.flip(0))), 512, 512)
    weight = nn.Parameter(torch.ones(16, 512, device="cuda"))
    x = torch.ones(512, 512, device="cuda")
    assert maps_first(large, x, weight, None, None)
    assert not maps_first(GRAPH.to("cuda"), x[:3], weight, None, None)
