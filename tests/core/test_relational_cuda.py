"""Layers over relations on CUDA: their own kernels where those are asked for, else the stock path with the reason."""

import importlib

import pytest
import torch

import edgeless
from edgeless.backends import kernel_refusal

pytestmark = pytest.mark.cuda


def test_layers_say_which_path_they_take():
    pytest.importorskip("torch_geometric", reason="needs PyG")
    pyg = importlib.import_module("edgeless.pyg.nn")
    layer = pyg.RGCNConv(6, 4, 3).cuda()
    inputs = (torch.randn(40, 6), torch.randint(40, (2, 300)), torch.randint(3, (300,)))
    explanation = edgeless.explain(layer, *(t.cuda() for t in inputs))
    refusal = kernel_refusal(torch.device("cuda"), "relational_sum")
    assert explanation.fused == (refusal is None) and (refusal or "") in str(explanation)
    out, expected = layer(*(t.cuda() for t in inputs)), layer.cpu()(*inputs)
    assert torch.allclose(out.cpu(), expected, atol=1e-4)
