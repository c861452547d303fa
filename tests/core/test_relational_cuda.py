"""Typed products on CUDA, which run in plain PyTorch until their kernels are there."""

import pytest
import torch
from test_attention import assert_close

import edgeless
from edgeless import TypedGraph, functional

pytestmark = pytest.mark.cuda


def leaf(*shape, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=gen).requires_grad_()


def on_both_devices(call, *leaves):
    results = []
    for device in ("cpu", "cuda"):
        given = [t.detach().to(device).requires_grad_() for t in leaves]
        out = call(device, *given)
        grads = torch.autograd.grad(out.square().sum(), given)
        results.append([t.cpu() for t in (out, *grads)])
    return results


def test_products_are_those_of_the_cpu():
    lengths, index = torch.tensor([3, 0, 47]), torch.arange(50) % 3
    x, w = leaf(50, 6), leaf(3, 6, 4)
    assert_close(*on_both_devices(lambda on, *t: functional.segment_mm(*t, lengths.to(on)), x, w), 1e-10)
    assert_close(*on_both_devices(lambda on, *t: functional.gather_mm(*t, index.to(on)), x, w), 1e-10)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_sums_over_relations_are_those_of_the_cpu(reduce):
    gen = torch.Generator().manual_seed(1)
    edge_index, types = torch.randint(40, (2, 300), generator=gen), torch.randint(3, (300,), generator=gen)

    def layer(device, *tensors):
        graph = TypedGraph.from_edge_index(edge_index.to(device), types.to(device), 3, 40, 40)
        return functional.relational_sum(graph, *tensors, reduce=reduce)

    assert_close(*on_both_devices(layer, leaf(40, 6), leaf(3, 6, 4), leaf(300)), 1e-10)


def test_layers_say_that_they_take_the_stock_path():
    pyg = pytest.importorskip("edgeless.pyg.nn")
    layer = pyg.RGCNConv(6, 4, 3).cuda()
    inputs = (torch.randn(40, 6), torch.randint(40, (2, 300)), torch.randint(3, (300,)))
    explanation = edgeless.explain(layer, *(t.cuda() for t in inputs))
    assert "no CUDA kernels for relational_sum" in str(explanation)
    out, expected = layer(*(t.cuda() for t in inputs)), layer.cpu()(*inputs)
    assert torch.allclose(out.cpu(), expected, atol=1e-4)
