"""Compares layers on CUDA with the upstream ones, in float64 on the CPU and in the same dtype on CUDA."""

import copy

import torch

import edgeless


def moved(value, device, dtype=None, leaves=None):
    """Copies of ``value``'s tensors on ``device``; floating ones in ``dtype``, as leaves, which go to ``leaves``."""
    if isinstance(value, torch.Tensor):
        floating = value.is_floating_point()
        value = value.detach().to(device, dtype if floating else None, copy=True)
        if floating and leaves is not None:
            leaves.append(value.requires_grad_())
        return value
    if isinstance(value, dict):
        return {key: moved(item, device, dtype, leaves) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(moved(item, device, dtype, leaves) for item in value)
    return value.to(device) if hasattr(value, "to") else value


def _flat(result):
    if isinstance(result, dict):
        return [t for key in sorted(result, key=str) for t in _flat(result[key])]
    if isinstance(result, (tuple, list)):
        return [t for item in result for t in _flat(item)]
    return [result] if result.is_floating_point() else []


def _kinds(layer):
    """The layer's parameters in lists whose errors are measured together. A parameter of a ParameterDict, such as
    HGTConv's priors of relations, may be a single number whose gradient sums terms that are hundreds of times as large
    and cancel: its error is meaningful only relative to the whole dictionary.
    """
    kinds = []
    for module in layer.modules():
        own = list(module.parameters(recurse=False))
        kinds += [own] if isinstance(module, torch.nn.ParameterDict) else [[parameter] for parameter in own]
    return kinds


def _or_zeros(grad, parameter, count):
    return torch.zeros_like(parameter) if grad is None and count > 1 else grad  # none and zeros are the same


def _joined(grads):
    """One vector of several gradients; None where there is none at all."""
    grads = [grad for grad in grads if grad is not None]
    return torch.cat([grad.flatten() for grad in grads]) if grads else None


def results(layer, inputs, device, dtype):
    """Outputs and the gradients of inputs and parameters, on the CPU; None where there is none."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # some upstream layers allocate sums in it
    try:
        layer, leaves = copy.deepcopy(layer).to(device, dtype), []
        outs = _flat(layer(*moved(inputs, device, dtype, leaves)))
    finally:
        torch.set_default_dtype(default)
    gen = torch.Generator().manual_seed(23)
    weights = [torch.randn(out.shape, generator=gen, dtype=torch.float64).to(device) for out in outs]
    loss = sum((out.double() * weight).sum() for out, weight in zip(outs, weights, strict=True))
    kinds = _kinds(layer)
    grads = iter(torch.autograd.grad(loss, [*leaves, *(p for kind in kinds for p in kind)], allow_unused=True))
    given = [next(grads) for _ in leaves]
    of_kinds = [_joined([_or_zeros(next(grads), p, len(kind)) for p in kind]) for kind in kinds]
    return [None if t is None else t.detach().cpu() for t in (*outs, *given, *of_kinds)]


def _errors(theirs, ours, inputs, dtype):
    """Our and upstream's error of every result, relative by norm. A second run of ours must have the same bits."""
    exact = results(theirs, inputs, "cpu", torch.float64)
    with edgeless.backend("fused"):
        found = results(ours, inputs, "cuda", dtype)
        again = results(ours, inputs, "cuda", dtype)
    stock = exact if dtype == torch.float64 else results(theirs, inputs, "cuda", dtype)
    errors = []
    for i, (want, mine, repeated, other) in enumerate(zip(exact, found, again, stock, strict=True)):
        if want is None or mine is None:  # no gradient and one of zeros are the same
            assert all(t is None or not t.any() for t in (want, mine)), i
            errors.append((0.0, 0.0))
            continue
        assert torch.equal(mine, repeated), f"result {i} differs from run to run"
        size = want.norm().clamp_min(1e-30)
        errors.append([float((t.double() - want).norm() / size) if t is not None else 0.0 for t in (mine, other)])
    return torch.tensor(errors)


def assert_parity_on_cuda(theirs, ours, inputs, dtype, draws=5):
    """Allows errors of twice the upstream layer's, or of 1e-10 in float64, 1e-5 in float32, the dtype's eps in 16 bits.

    Errors are medians over draws of the parameters: in one draw the terms of a gradient of few numbers may cancel, or
    rounding may flip the sign of a logit, which inflates the error of either layer. In 16 bits the errors of the
    parameters' gradients are averaged.
    """
    errors = [_errors(theirs, ours, inputs, dtype)]
    if dtype != torch.float64:
        theirs, ours = copy.deepcopy(theirs), copy.deepcopy(ours)
        for seed in range(1, draws):
            gen = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                for parameter in theirs.parameters():
                    parameter.copy_(torch.randn(parameter.shape, generator=gen) * 0.3)
            ours.load_state_dict(theirs.state_dict())
            errors.append(_errors(theirs, ours, inputs, dtype))
    errors = torch.stack(errors).median(0).values
    if dtype.itemsize == 2:
        given = len(errors) - len(_kinds(ours))
        errors = torch.cat([errors[:given], errors[given:].mean(0, keepdim=True)])
    bound = {torch.float64: 1e-10, torch.float32: 1e-5}.get(dtype, torch.finfo(dtype).eps)
    assert (errors[:, 0] <= (2 * errors[:, 1]).clamp_min(bound)).all(), errors.tolist()


def assert_compiles_on_cuda(layer, inputs, backend="aot_eager"):
    """Asserts that torch.compile, without graph breaks, gives the fused layer's outputs and gradients in float32."""
    layer, found = copy.deepcopy(layer).cuda(), []
    for call in (torch.compile(layer, fullgraph=True, backend=backend), layer):
        leaves = []
        given = moved(inputs, "cuda", torch.float32, leaves)
        with edgeless.backend("fused"):
            outs = _flat(call(*given))
        leaves += list(layer.parameters())
        grads = torch.autograd.grad(sum(out.square().sum() for out in outs), leaves, allow_unused=True)
        found.append([*outs, *(grad for grad in grads if grad is not None)])
    for mine, want in zip(*found, strict=True):
        assert (mine - want).norm() <= 1e-5 * want.norm()
