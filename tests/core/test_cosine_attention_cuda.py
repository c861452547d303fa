"""What is particular to cosine attention on CUDA: norms near nothing, one tensor for both sides, a beta of zero."""

import pytest
import torch
from test_attention import TOLERANCE, assert_close, error, graph_of, inputs_of, raised, run
from test_attention_cuda import DEVICE, run_cuda

from edgeless import functional, reference

pytestmark = pytest.mark.cuda


def cosine_results(call, graph, leaves, device, **options):
    leaves = [t.detach().to(device).requires_grad_() for t in leaves]
    out = call(graph.to(device), *leaves, **options)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return [t.cpu() for t in (out, *torch.autograd.grad(out, leaves, grad.to(device, out.dtype)))]


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("eps", [1e-12, 1.5])
@pytest.mark.parametrize("heads,channels", [(3, 5), (2, 8), (3, 40), (1, 128), (1, 250)])
def test_cosine_of_rows_shorter_than_eps(dtype, tolerance, eps, heads, channels):
    """Zero rows, rows below the clamp and above it: values and gradients are those of F.normalize."""
    gen = torch.Generator().manual_seed(1)
    graph = graph_of("square")
    x, x_dst = (torch.randn(40, heads, channels, dtype=torch.float64, generator=gen) for _ in range(2))
    for t in (x, x_dst):
        t[::5] = 0
        t[1::5] *= 0.1
        t[2::5] *= eps * 1e-3
    for both in (True, False):
        leaves = [t.to(dtype) for t in ((x, x_dst) if both else (x,))]
        found = cosine_results(functional.cosine_attention, graph, leaves, DEVICE, beta=3.0, eps=eps)
        expected = cosine_results(reference.cosine_attention, graph, raised(leaves), "cpu", beta=3.0, eps=eps)
        for a, b in zip(found, expected, strict=True):
            assert torch.isfinite(a).all()
            short = b.norm(dim=-1) > 1e3  # rows whose gradient is that of a division by eps
            assert error(a[short], b[short]) <= tolerance and error(a[~short], b[~short]) <= tolerance


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("channels", [32, 64, 128])
def test_cosine_of_short_rows_in_half_precision(dtype, channels):
    """On and off the tensor cores. The short rows are not so short that their gradients leave the type."""
    gen = torch.Generator().manual_seed(1)
    x = torch.randn(40, 2, channels, dtype=torch.float64, generator=gen)
    x[::5] = 0
    x[1::5] *= 0.05
    leaf = x.to(dtype)
    found = cosine_results(functional.cosine_attention, graph_of("square"), [leaf], DEVICE, beta=3.0, eps=2.0)
    exact = cosine_results(reference.cosine_attention, graph_of("square"), raised([leaf]), "cpu", beta=3.0, eps=2.0)
    bound = 0.02 if dtype == torch.bfloat16 else 0.003
    assert all(torch.isfinite(a).all() and error(a, b) < bound for a, b in zip(found, exact, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels", [7, 64])
def test_cosine_with_one_tensor_for_both_sides(dtype, channels):
    """Whose norms and padded copy are made once."""
    gen = torch.Generator().manual_seed(1)
    graph = graph_of("square")
    x, beta = torch.randn(40, 2, channels, generator=gen).to(dtype), torch.tensor([1.7]).to(dtype)
    one = cosine_results(lambda g, x, b: functional.cosine_attention(g, x, None, b), graph, [x, beta], DEVICE)
    copied = cosine_results(lambda g, x, b: functional.cosine_attention(g, x, x.clone(), b), graph, [x, beta], DEVICE)
    assert all(torch.equal(a, b) for a, b in zip(one, copied, strict=True))


def test_cosine_of_zero_beta_still_has_its_gradient():
    for dtype in (torch.float32, torch.float64):
        graph = graph_of("hub")
        args, _, _ = inputs_of("cosine", graph, 3, 16, (), dtype)
        with torch.no_grad():
            args[2].zero_()
        assert_close(run_cuda("cosine", graph, args, {}, {}), run(reference, "cosine", graph, raised(args), {}, {}),
                     TOLERANCE[dtype])  # fmt: skip
