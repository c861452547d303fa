"""MaxAggregation and MinAggregation against the stock modules."""

import copy
import pickle

import pytest
import torch
import torch_geometric.nn as stock
import torch_geometric.typing
from pyg_cases import GRAPHS, node_features
from test_pyg_fallback import assert_falls_back

import edgeless
import edgeless.pyg.nn as fused

NAMES = ("MaxAggregation", "MinAggregation")
PTR = torch.tensor([0, 3, 3, 40, 41, 60, 60])


def _pair(name):
    return getattr(stock, name)(), getattr(fused, name)()


def _run(layer, x, ptr, **kwargs):
    x = x.detach().clone().requires_grad_()
    out = layer(x, ptr=ptr, **kwargs)
    weights = torch.arange(out.numel(), dtype=out.dtype).view_as(out)
    return out.detach(), torch.autograd.grad((out * weights).sum(), x)[0]


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("scatter", (True, False))
@pytest.mark.parametrize("ties", (True, False))
@pytest.mark.parametrize("name", NAMES)
def test_parity(name, ties, scatter, dtype, monkeypatch):
    if scatter and not torch_geometric.typing.WITH_TORCH_SCATTER:
        pytest.skip("torch_scatter is not installed")
    monkeypatch.setattr(torch_geometric.typing, "WITH_TORCH_SCATTER", scatter)
    theirs, ours = _pair(name)
    x = torch.randn(60, 7).to(dtype)
    x = x.round() if ties else x
    with edgeless.backend("fused"):
        have = _run(ours, x, PTR)
    for a, b in zip(have, _run(theirs, x, PTR), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", NAMES)
def test_empty_and_other_shapes(name):
    theirs, ours = _pair(name)
    for rows, ptr in ((0, [0]), (0, [0, 0]), (5, [0, 5]), (4, [0, 0, 4, 4])):
        x, ptr = torch.randn(2, rows).t(), torch.tensor(ptr)
        with edgeless.backend("fused"):
            have = ours(x, ptr=ptr)
        assert have.shape == (ptr.numel() - 1, 2)
        if rows:
            torch.testing.assert_close(have, theirs(x, ptr=ptr))
    ptr = torch.tensor([0, 2, 5])
    for split in (2, 4, 1):  # in place: the groups of before must not be used again
        ptr[1] = split
        x = torch.randn(5, 3)
        torch.testing.assert_close(ours(x, ptr=ptr, dim=0, dim_size=2), theirs(x, ptr=ptr, dim=0, dim_size=2))


@pytest.mark.parametrize("name", NAMES)
def test_what_falls_back(name):
    theirs, ours = _pair(name)
    x = torch.randn(60, 3)
    index = torch.repeat_interleave(torch.arange(6), PTR.diff())
    assert_falls_back(theirs, ours, "index is given", x, index)
    assert_falls_back(theirs, ours, "index is given", x, index, PTR)
    assert_falls_back(theirs, ours, "not a plain floating tensor", torch.randn(2, 60, 3), index)
    assert_falls_back(theirs, ours, "not a plain floating tensor", torch.ones(60, 3, dtype=torch.int64), index)
    assert_falls_back(theirs, ours, "dim is -1", x.t().contiguous(), index, dim=-1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ptr", ([0, 2], [1, 5], [0, 4, 2, 5], [0, 7]))
def test_ptr_that_does_not_fit(name, ptr):
    with pytest.raises(ValueError, match="indptr"):
        getattr(fused, name)()(torch.randn(5, 2), ptr=torch.tensor(ptr))


@pytest.mark.parametrize("name", NAMES)
def test_module(name):
    theirs, ours = _pair(name)
    x = torch.randn(60, 3)
    want = theirs(x, ptr=PTR)
    assert repr(ours) == f"edgeless.{theirs}" and isinstance(ours, getattr(stock, name))
    for clone in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), torch.jit.script(ours)):
        torch.testing.assert_close(clone(x, ptr=PTR), want)
    model = torch.nn.ModuleList([theirs])
    assert [new for _, _, new in edgeless.accelerate(model).swapped] == [type(ours)]
    with edgeless.backend("fused"):
        torch.testing.assert_close(model[0](x, ptr=PTR), want)


@pytest.mark.parametrize("aggr", ("max", "min"))
def test_accelerate_inside_a_convolution(aggr):
    """The aggregation, which the convolution calls with an index, is left alone; the convolution runs and scripts."""
    layer = stock.SAGEConv(5, 4, aggr=aggr)
    inputs = (node_features(GRAPHS["random"]), GRAPHS["random"][0])
    want = layer(*inputs)
    assert [name for name, _, _ in edgeless.accelerate(layer).swapped] == [""]
    assert type(layer.aggr_module) is type(stock.SAGEConv(5, 4, aggr=aggr).aggr_module)
    with edgeless.backend("fused"):
        torch.testing.assert_close(layer(*inputs), want)
    torch.testing.assert_close(torch.jit.script(layer)(*inputs), want)
