"""First and second derivatives, as gradient penalties and forces need them."""

import torch


def drawn(tensors, seed):
    """Random weights of the tensors' shapes, the same on every device."""
    gen = torch.Generator().manual_seed(seed)
    return [torch.randn(t.shape, dtype=torch.float64, generator=gen).to(t.device) for t in tensors]


def gradients(tensors, leaves, seed, **options):
    """Gradients of a loss of the tensors and their squares; zeros for leaves that it does not depend on."""
    pairs = [(t, w) for t, w in zip(tensors, drawn(tensors, seed), strict=True) if t.requires_grad]
    if not pairs:
        return [torch.zeros_like(leaf) for leaf in leaves]
    loss = sum(((w + 0.5 * t.double()) * t.double()).sum() for t, w in pairs)
    found = torch.autograd.grad(loss, leaves, allow_unused=True, **options)
    return [torch.zeros_like(leaf) if grad is None else grad for grad, leaf in zip(found, leaves, strict=True)]


def derivatives(outs, leaves, order=2):
    """The gradients of the leaves, then the gradients of a loss of these gradients, and so on up to ``order``."""
    outs, found = list(outs) if isinstance(outs, (tuple, list)) else [outs], []
    for k in range(order):
        outs = gradients(outs, leaves, 5 + k, create_graph=k + 1 < order)
        found += [t.detach() for t in outs]
    return found


def assert_same_derivatives(found, want, tolerance=1e-9):
    """Compares relative to each derivative's norm or, where its terms cancel, to a thousandth of the largest norm."""
    for i, (a, b) in enumerate(zip(found, want, strict=True)):
        assert a.shape == b.shape and a.dtype == b.dtype, (i, a.shape, b.shape, a.dtype, b.dtype)
        a, b = a.double().cpu(), b.double().cpu()
        size = max(float(b.norm()), 1e-3 * max(float(t.double().norm()) for t in want))
        assert float((a - b).norm()) <= tolerance * size, f"derivative {i}: {float((a - b).norm()) / size:.2e}"
