"""First and second derivatives, as penalties on gradients and forces take them."""

import torch


def drawn(tensors, seed):
    """A weight for every number, whatever the device."""
    gen = torch.Generator().manual_seed(seed)
    return [torch.randn(t.shape, dtype=torch.float64, generator=gen).to(t.device) for t in tensors]


def gradients(tensors, leaves, seed, **options):
    """Of a number that depends on the tensors and on their squares, zeros where it does not depend on a leaf."""
    pairs = [(t, w) for t, w in zip(tensors, drawn(tensors, seed), strict=True) if t.requires_grad]
    if not pairs:
        return [torch.zeros_like(leaf) for leaf in leaves]
    loss = sum(((w + 0.5 * t.double()) * t.double()).sum() for t, w in pairs)
    found = torch.autograd.grad(loss, leaves, allow_unused=True, **options)
    return [torch.zeros_like(leaf) if grad is None else grad for grad, leaf in zip(found, leaves, strict=True)]


def derivatives(outs, leaves, order=2):
    """The gradients of the leaves, those of a function of these gradients, and so on up to an order."""
    outs, found = list(outs) if isinstance(outs, (tuple, list)) else [outs], []
    for k in range(order):
        outs = gradients(outs, leaves, 5 + k, create_graph=k + 1 < order)
        found += [t.detach() for t in outs]
    return found


def assert_same_derivatives(found, want, tolerance=1e-9):
    """Relative by norm, and where a derivative is what is left of sums that cancel, to the largest of its order."""
    for i, (a, b) in enumerate(zip(found, want, strict=True)):
        assert a.shape == b.shape and a.dtype == b.dtype, (i, a.shape, b.shape, a.dtype, b.dtype)
        a, b = a.double().cpu(), b.double().cpu()
        size = max(float(b.norm()), 1e-3 * max(float(t.double().norm()) for t in want))
        assert float((a - b).norm()) <= tolerance * size, f"derivative {i}: {float((a - b).norm()) / size:.2e}"
