"""The op that gives the logits of nodes, against the product that it does without."""

import pytest
import torch

from edgeless.functional.projection import node_logits as _node_logits


def node_logits(*args):
    return tuple(_node_logits(*args))


def inputs(num, heads, channels, vectors, dtype=torch.float64, seed=0):
    gen = torch.Generator().manual_seed(seed)
    shapes = [(num, heads, channels)] + [(1, heads, channels)] * vectors
    return [torch.randn(s, dtype=torch.float64, generator=gen).to(dtype).requires_grad_() for s in shapes]


def plain(x, *vectors):
    return tuple((x * a).sum(-1) for a in vectors)


@pytest.mark.parametrize("shape", [(7, 2, 5), (1, 1, 1), (0, 3, 4), (5, 1, 16), (6, 3, 1)])
@pytest.mark.parametrize("vectors", [1, 2, 3])
@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_values_and_gradients(shape, vectors, dtype, tolerance):
    given = inputs(*shape, vectors, dtype)
    found, want = node_logits(*given), plain(*given)
    grads = [torch.randn_like(t) for t in want]
    found += torch.autograd.grad(found, given, grads)
    want += torch.autograd.grad(want, given, grads)
    for a, b in zip(found, want, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert (a - b).norm() <= tolerance * b.norm()


@pytest.mark.parametrize("which", range(3))
def test_only_what_needs_a_gradient_gets_one(which):
    given = inputs(6, 2, 4, 2)
    wanted = [t.detach().requires_grad_(i == which) for i, t in enumerate(given)]
    (found,) = torch.autograd.grad(sum(t.sum() for t in node_logits(*wanted)), wanted[which])
    (want,) = torch.autograd.grad(sum(t.sum() for t in plain(*given)), given[which])
    torch.testing.assert_close(found, want)


def test_first_and_second_derivatives():
    given = inputs(4, 2, 3, 2)
    assert torch.autograd.gradcheck(node_logits, given)
    assert torch.autograd.gradgradcheck(node_logits, given)


def test_strided_rows():
    x, a = inputs(6, 2, 4, 1)
    rows = torch.cat((x, x), dim=2)[..., :4]
    torch.testing.assert_close(node_logits(rows, a), plain(x, a))


@pytest.mark.skipif(not hasattr(torch.library, "opcheck"), reason="torch.library.opcheck came with torch 2.4")
def test_opcheck():
    x, a, b = inputs(6, 2, 4, 2)
    torch.library.opcheck(torch.ops.edgeless.node_logits, (x, [a[0], b[0]]))
    torch.library.opcheck(torch.ops.edgeless.node_logits, (x.detach(), [a[0].detach()]))
    torch.library.opcheck(torch.ops.edgeless.node_logits, (x, [a, b]))
    args = [torch.randn(6, 2, dtype=x.dtype), None], x.detach(), [a.detach(), b.detach()], [True] * 3
    torch.library.opcheck(torch.ops.edgeless.node_logits_backward, args)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles(dynamic):
    given = inputs(6, 2, 4, 2)
    compiled = torch.compile(node_logits, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    torch.testing.assert_close(compiled(*given), plain(*given))
    grads = (torch.autograd.grad(f(*given)[1].sum(), given, allow_unused=True) for f in (compiled, node_logits))
    torch.testing.assert_close(*grads)


def test_nothing_is_rounded_that_the_product_would_not_round():
    x, a = inputs(6, 2, 4, 1, torch.bfloat16)
    exact = plain(x.float(), a.float())[0]
    assert torch.equal(node_logits(x, a.float())[0], exact)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(node_logits(x.float(), a.float())[0], exact)
    assert _node_logits(x.float(), a) is None and _node_logits(x.double(), a.float()) is None
