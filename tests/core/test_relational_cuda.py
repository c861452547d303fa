"""Layers over relations on CUDA: their own kernels where those are asked for, else the stock path with the reason; and
rows of pairs for their edges.
"""

import importlib

import pytest
import torch

import edgeless
from edgeless.choices.backends import kernel_refusal

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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [0, 1, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_gathered_rows_of_every_width(dtype, width, index_dtype):
    edges = torch.randint(50, (2, 400), generator=torch.Generator().manual_seed(0)).to("cuda", index_dtype)
    csc, index = edgeless.Graph.from_edge_index(edges, 50, 50).csc, edges[0]
    base = torch.randn(52, width + 1).to("cuda", dtype)
    for x in (base[1:51, :width].clone(), base[1:51, :width], base.flatten()[1 : 1 + 50 * width].view(50, width)):
        x = x.detach().requires_grad_()
        out = torch.ops.edgeless.gather_rows(x, index, csc.indptr, csc.edge_ids)
        assert torch.equal(out, x.index_select(0, index))
        grad = torch.randn_like(out)
        (found,) = torch.autograd.grad(out, x, grad)
        expected = torch.zeros_like(x, dtype=torch.float64).index_add_(0, index, grad.double())
        assert torch.allclose(found.double(), expected, atol=1e-1 if dtype is torch.bfloat16 else 1e-5)
        with torch.no_grad():
            assert torch.equal(torch.ops.edgeless.gather_rows(x, index, csc.indptr, csc.edge_ids), out)
