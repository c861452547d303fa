"""Layers of DGL whose messages are generated, on a GPU."""

from __future__ import annotations

import copy

import pytest
import torch
from dgl_generated_cases import CASES, Inputs, compare, error, pair_of_layers, tensors_in
from test_dgl_generated_modules import CASES as MODULES
from test_dgl_generated_modules import given, nets
from torch.utils import _pytree as pytree

from edgeless.layers.calls import recording

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    monkeypatch.setenv("EDGELESS_GENERATE", "on")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def on_gpu(tree, dtype=torch.float64):
    def move(a):
        if not isinstance(a, torch.Tensor):
            return a.to("cuda") if hasattr(a, "to") else a
        moved = a.detach().to("cuda")
        return moved.to(dtype).requires_grad_(a.requires_grad) if a.is_floating_point() else moved

    return pytree.tree_map(move, tree)


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_stock_layer(name):
    layer, ours = (each.cuda() for each in pair_of_layers(name))
    args = on_gpu(CASES[name][1](Inputs()))
    with recording() as calls:
        copy.deepcopy(ours)(*args)
    assert any(found.fused for _, found in calls) or name == "TWIRLSConv", calls
    compare(layer, ours, args)


@pytest.mark.parametrize("name", ["GINEConv", "EdgeConv", "EGATConv", "CFConv", "EdgeGATConv"])
@pytest.mark.parametrize("kind", ["float32", "autocast"])
def test_in_other_types(name, kind):
    torch.set_default_dtype(torch.float32)
    layer, ours = (each.cuda() for each in pair_of_layers(name))
    args = CASES[name][1](Inputs())
    expected = tensors_in(layer(*on_gpu(args)))
    short, found = on_gpu(args, torch.float32), []
    for each in (ours, layer):
        with torch.autocast("cuda", torch.bfloat16, enabled=kind == "autocast"):
            found.append(tensors_in(each.float()(*short)))
    for a, b, c in zip(*found, expected, strict=True):
        assert a.dtype == b.dtype and error(a.double(), c) <= 2 * error(b.double(), c) + 1e-5


@pytest.mark.parametrize("cls", MODULES, ids=lambda cls: cls.__name__)
def test_modules_agree(cls):
    net, ours = (each.cuda() for each in nets(cls))
    compare(net, ours, on_gpu(given(cls)))
