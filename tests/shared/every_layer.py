"""Checks that hold for every layer: it trains as the upstream layer does, and changes to its submodules take effect."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from parity_on_cuda import moved
from torch import Tensor, nn
from torch.nn.modules import module as of_all_modules

import edgeless

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


class Case(NamedTuple):
    """A function that makes the layer from a package, and the inputs of its call, on the CPU in float64."""

    layer: Callable[[Any], nn.Module]
    inputs: tuple


def pair_of(case, stock, fused):
    """(upstream layer, fused layer) with equal parameters, none of them zero, in float64."""
    torch.manual_seed(0)
    theirs, ours = (case.layer(package).double() for package in (stock, fused))
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64) * 0.4)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def layers_of(case, package):
    """The classes of all modules in a case's layer of a package."""
    return {type(module) for module in case.layer(package).modules()}


def tensors_of(result, name="out"):
    """name -> floating tensor, for all tensors that a layer returns or a hook gets."""
    if isinstance(result, dict):
        found = [tensors_of(value, f"{name}[{key!r}]") for key, value in sorted(result.items(), key=str)]
    elif isinstance(result, (tuple, list)):
        found = [tensors_of(value, f"{name}[{i}]") for i, value in enumerate(result)]
    else:
        floats = isinstance(result, Tensor) and result.is_floating_point()
        return {name: result} if floats else {}
    return {key: t for some in found for key, t in some.items()}


def loss_of(outs):
    """A loss that weights all elements of all results differently."""
    generator, total = torch.Generator().manual_seed(23), 0.0
    for out in outs.values():
        weight = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.device)
        total = total + (out.double() * weight).sum()
    return total


class Call:
    """A layer with inputs on a device, in a dtype; ``leaves`` are its parameters and the floating inputs, by name."""

    def __init__(self, layer, inputs, device="cpu", dtype=torch.float64):
        self.layer, given = layer.to(device, dtype), []
        self.dtype, self.inputs = dtype, moved(inputs, device, dtype, given)
        self.leaves = {**dict(layer.named_parameters()), **{f"input {i}": leaf for i, leaf in enumerate(given)}}

    def __call__(self):
        default = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)  # some upstream layers allocate sums in it
        try:
            return tensors_of(self.layer(*self.inputs))
        finally:
            torch.set_default_dtype(default)

    def gradients(self):
        return {f"grad of {name}": leaf.grad for name, leaf in self.leaves.items() if leaf.grad is not None}


def assert_same(found, want, dtype=torch.float64):
    """Compares tensors by name, relative by norm; those that cancel, relative to the largest. None counts as zeros."""
    assert not [name for name, t in found.items() if name not in want and t.any()]
    largest = max((float(t.norm()) for t in want.values()), default=0.0)
    for name, right in want.items():
        have = found[name].detach().cpu() if name in found else torch.zeros_like(right)
        assert have.shape == right.shape, name
        size, error = float(right.norm()), float((have.double() - right.double()).norm())
        allowed = TOLERANCE[dtype] * (size if size > 1e-4 * largest else 0.1 * largest)
        assert error <= allowed, f"{name} is off by {error:.1e} of {size:.1e}"


# Gradients -----------------------------------------------------------------------------------------------------------


def addresses(t):
    """The addresses of all elements."""
    found = torch.tensor([t.data_ptr()])
    for size, stride in zip(t.shape, t.stride(), strict=True):
        found = (found.unsqueeze(1) + torch.arange(size) * stride * t.element_size()).flatten()
    return found.tolist()


def sharing(tensors):
    """The pairs of names whose tensors have an element in common; (name, name) if a tensor overlaps itself."""
    places = {name: addresses(t) for name, t in tensors.items()}
    found = {(name, name) for name, of in places.items() if len(set(of)) < len(of)}
    pairs = itertools.combinations(places, 2)
    return found | {(a, b) for a, b in pairs if not set(places[a]).isdisjoint(places[b])}


def assert_gradients_have_memory_of_their_own(case, stock, fused, device, dtype):
    theirs, ours = pair_of(case, stock, fused)
    call = Call(ours, case.inputs, device, dtype)
    with edgeless.backend("fused"):
        outs = call()
    assert not sharing({**outs, **call.leaves})
    loss_of(outs).backward()
    assert not sharing({**call.gradients(), **call.leaves})
    # Results of torch.autograd.grad are no .grad that an optimizer updates: they may share memory where upstream's do.
    found = []
    for other in (Call(theirs, case.inputs), call):
        grads = torch.autograd.grad(loss_of(other()), list(other.leaves.values()), allow_unused=True)
        found.append(sharing({name: g for name, g in zip(other.leaves, grads, strict=True) if g is not None}))
    assert found[1] <= found[0]


def trained(call, steps=3):
    """All leaves and their gradients after every step, which clips the gradients of two backwards."""
    found, leaves = {}, list(call.leaves.values())
    optimizer = torch.optim.SGD(leaves, lr=0.1, momentum=0.5)
    for step in range(steps):
        for _ in range(2):
            loss_of(call()).backward()
        nn.utils.clip_grad_norm_(leaves, 1.0)
        found.update({f"step {step}, {name}": grad.cpu().clone() for name, grad in call.gradients().items()})
        optimizer.step()
        found.update({f"step {step}, {name}": leaf.detach().cpu().clone() for name, leaf in call.leaves.items()})
        optimizer.zero_grad(set_to_none=False)
    return found


def assert_trains_alike(case, stock, fused, device, dtype):
    theirs, ours = pair_of(case, stock, fused)
    want = trained(Call(theirs, case.inputs))
    with edgeless.backend("fused"):
        assert_same(trained(Call(ours, case.inputs, device, dtype)), want, dtype)


def _relu(out):
    return nn.functional.relu(out, inplace=True)


def _add(out):
    out += 1
    return out


def _set_a_row(out):
    out[:1] = 0
    return out


WRITES = {"relu": _relu, "add": _add, "set a row": _set_a_row}


def written_over(call, name, write):
    """The results and gradients of a step that writes to one of the results, or its error."""
    for leaf in call.leaves.values():
        leaf.grad = None
    try:
        outs = call()
        outs[name] = write(outs[name])
        loss_of(outs).backward()
    except RuntimeError as error:
        return error
    return {**{key: out.detach().clone() for key, out in outs.items()}, **call.gradients()}


def assert_results_may_be_written_over(case, stock, fused, device):
    theirs, ours = pair_of(case, stock, fused)
    theirs, ours = Call(theirs, case.inputs), Call(ours, case.inputs, device)
    for name in theirs():
        for what, write in WRITES.items():
            want = written_over(theirs, name, write)
            with edgeless.backend("fused"):
                found = written_over(ours, name, write)
            if isinstance(want, dict):
                assert isinstance(found, dict), f"{what} on {name}: {found}"
                assert_same(found, want)


# Modules inside of a layer -------------------------------------------------------------------------------------------


def _doubled(value):
    if isinstance(value, dict):
        return {key: _doubled(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_doubled(item) for item in value)
    return 2 * value if isinstance(value, Tensor) and value.is_floating_point() else value


class Change:
    """Doubles a module's inputs, outputs or gradients, and records the tensors that it saw."""

    def __init__(self, module):
        self.module, self.seen = module, []

    def note(self, value):
        copies = [t.detach().cpu().clone() for t in tensors_of(value).values()]
        self.seen.append(copies)

    def forward(self, *args, **kwargs):
        self.note((args, tuple(kwargs.values())))
        out = self.own(*args, **kwargs)
        self.note(out)
        return _doubled(out)

    def after(self, module, args, out):
        if module is self.module:
            self.note((args, out))
            return _doubled(out)
        return None

    def before(self, module, args):
        if module is self.module:
            self.note(args)
            return _doubled(args)
        return None

    def gradients(self, module, of_inputs, of_outputs):
        if module is self.module:
            self.note((of_inputs, of_outputs))
            return _doubled(of_inputs)
        return None

    def gradients_before(self, module, of_outputs):
        if module is self.module:
            self.note(of_outputs)
            return _doubled(of_outputs)
        return None


def _replace_forward(change):
    change.own = change.module.forward
    change.module.forward = change.forward


# Name -> a function that makes the change and returns a handle to remove it, or None.
CHANGES = {
    "another forward": _replace_forward,
    "a forward hook": lambda change: change.module.register_forward_hook(change.after),
    "a pre-hook": lambda change: change.module.register_forward_pre_hook(change.before),
    "a backward hook": lambda change: change.module.register_full_backward_hook(change.gradients),
    "a backward pre-hook": lambda change: change.module.register_full_backward_pre_hook(change.gradients_before),
    "a forward hook of all": lambda change: of_all_modules.register_module_forward_hook(change.after),
    "a pre-hook of all": lambda change: of_all_modules.register_module_forward_pre_hook(change.before),
    "a backward hook of all": lambda change: of_all_modules.register_module_full_backward_hook(change.gradients),
    "a backward pre-hook of all": lambda change: of_all_modules.register_module_full_backward_pre_hook(
        change.gradients_before
    ),
}


def changed(call, path, way):
    """(results and gradients or the error, the tensors that the change recorded)."""
    change = Change(call.layer.get_submodule(path))
    handle = CHANGES[way](change)
    try:
        outs = call()
        loss_of(outs).backward()
    except Exception as error:
        return error, change.seen
    finally:
        if handle is not None:
            handle.remove()
    return {**{name: out.detach() for name, out in outs.items()}, **call.gradients()}, change.seen


def numbered(seen):
    return {f"seen {i}": t for i, t in enumerate(itertools.chain(*seen))}


def assert_changes_are_seen(case, stock, fused, way, device, dtype):
    """Asserts that both layers give the same results and their submodules see the same tensors, with each submodule
    changed in turn.

    Returns how many of the submodules the upstream layer called.
    """
    called = 0
    for path in [path for path, _ in case.layer(stock).named_modules() if path]:
        theirs, ours = pair_of(case, stock, fused)
        want, shown = changed(Call(theirs, case.inputs), path, way)
        found, seen = changed(Call(ours, case.inputs, device, dtype), path, way)
        called += bool(shown)
        if isinstance(want, Exception):
            assert type(found) is type(want), f"{path}: {found!r} in place of {want!r}"
            continue
        assert isinstance(found, dict), f"{path}: {found!r}"
        try:
            assert [len(some) for some in seen] == [len(some) for some in shown], "seen with other tensors"
            assert_same({**found, **numbered(seen)}, {**want, **numbered(shown)}, dtype)
        except AssertionError as error:
            raise AssertionError(f"{path}: {error}") from None
    return called
