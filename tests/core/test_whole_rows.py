"""Rows that are given zeros until they are whole vectors: the same results and gradients. The ops are CUDA's and the
CPU's; there it is as if vectors had four numbers of 64 bits.
"""

import pytest
import torch

from edgeless import TypedGraph
from edgeless.functional.relational import relational_sum
from edgeless.functional.relational_layer import relational_layer
from edgeless.functional.whole_rows import lacking, longer, shorter

GRAPH_SIZES = 40, 3  # nodes, types


def graph():
    gen = torch.Generator().manual_seed(0)
    nodes, types = GRAPH_SIZES
    edges = torch.randint(nodes, (2, 300), generator=gen)
    return TypedGraph.from_edge_index(edges, torch.randint(types, (300,), generator=gen), types, nodes, nodes)


def leaf(*shape, seed):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def given(weight, own, root, bias):
    blocks = weight[1] if len(weight) == 4 else 1
    in_width, out_width = blocks * weight[-2], blocks * weight[-1]
    made = {"x": leaf(GRAPH_SIZES[0], in_width, seed=0), "weight": leaf(*weight, seed=1)}
    if own:
        made["own"] = leaf(GRAPH_SIZES[0], own, seed=2)
    if root:
        made["root"] = leaf(own or in_width, out_width, seed=3)
    if bias:
        made["bias"] = leaf(out_width, seed=4)
    return made


def step(function, inputs, **options):
    out = function(graph(), **inputs, **options)
    grad = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(9))
    return [out.detach(), *torch.autograd.grad(out, list(inputs.values()), grad)]


@pytest.fixture
def widened(monkeypatch):
    """A function that makes rows of the CPU be widened from then on, and the widths it has been asked for."""
    seen = []

    def lacks(device, rows, weight):
        seen.append(tuple(weight.shape[-2:]))
        return -weight.size(-2) % 4, -weight.size(-1) % 4

    def widen():
        monkeypatch.setattr("edgeless.functional.relational.lacking", lacks)
        monkeypatch.setattr("edgeless.functional.relational_layer.lacking", lacks)

    return widen, seen


@pytest.mark.parametrize("own,root,bias", [(0, False, False), (0, True, True), (5, True, False), (0, False, True)])
@pytest.mark.parametrize("weight", [(3, 7, 5), (3, 8, 3), (3, 6, 4), (3, 2, 3, 5), (3, 3, 4, 1)])
def test_layers(weight, own, root, bias, widened):
    inputs = given(weight, own, root, bias)
    expected = step(relational_layer, inputs, reduce="mean", out_dtype=torch.float64)
    widened[0]()
    found = step(relational_layer, inputs, reduce="mean", out_dtype=torch.float64)
    assert [w % 4 for w in widened[1][-1]] == [0, 0]
    assert found[0].is_contiguous()
    for ours, want in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("order", ["aggregate", "transform"])
@pytest.mark.parametrize("weight", [(3, 7, 5), (3, 8, 3), (3, 2, 3, 5)])
def test_sums(weight, order, widened):
    inputs = given(weight, 0, False, False)
    expected = step(relational_sum, inputs, order=order)
    widened[0]()
    for ours, want in zip(step(relational_sum, inputs, order=order), expected, strict=True):
        torch.testing.assert_close(ours, want, rtol=1e-12, atol=1e-12)
    assert [w % 4 for w in widened[1][-1]] == [0, 0]


def test_what_rows_lack():
    weight = torch.empty(2, 7, 5)
    assert lacking(torch.device("cuda"), torch.float32, weight) == (1, 3)
    assert lacking(torch.device("cuda"), torch.bfloat16, weight) == (1, 3)
    assert lacking(torch.device("cuda"), torch.float16, weight[:, :2, :1]) == (6, 7)
    assert lacking(torch.device("cuda"), torch.float64, weight) == (0, 0)
    assert lacking(torch.device("cpu"), torch.float32, weight) == (0, 0)


def test_zeros_come_behind_every_block():
    rows = torch.arange(1.0, 13).view(2, 6)
    wide = longer(rows, 2, blocks=2)
    assert wide[0].tolist() == [1, 2, 3, 0, 0, 4, 5, 6, 0, 0]
    assert torch.equal(shorter(wide, 2, blocks=2), rows)
    assert longer(rows, 0) is rows and shorter(rows, 0) is rows and longer(None, 3) is None
