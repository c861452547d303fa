"""edgeless.capture: models, calls and places that are not captured run as they are, and the handle says why."""

import copy
import random

import pytest
import torch
from tape import ENDS, Layer, X, captured, eager, taped
from torch import nn
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import edgeless
from edgeless.capture.keys import State, Unfit, leaf_key


class SetsAttributes(Layer):
    def forward(self, x, ends):
        self.last = super().forward(x, ends)
        return self.last


class RebindsABuffer(Layer):
    def forward(self, x, ends):
        self.shift = self.shift + 1
        return super().forward(x, ends)


class RebindsAndReturnsWords(RebindsABuffer):
    def forward(self, x, ends):
        return super().forward(x, ends), "words"


class CountsInPlace(Layer):
    def __init__(self):
        super().__init__()
        self.count = torch.zeros(1)

    def forward(self, x, ends):
        self.count.add_(1)
        return super().forward(x, ends) + self.count


class WritesToItsArgument(Layer):
    def forward(self, x, ends):
        return super().forward(x.mul_(2), ends)


class DrawsOnTheHost(Layer):
    def forward(self, x, ends):
        return super().forward(x, ends) * (1 if random.random() < 0.5 else 2)


class LearnsWhatIsNoParameter(Layer):
    def __init__(self):
        super().__init__()
        self.extra = torch.ones(4, requires_grad=True)

    def forward(self, x, ends):
        return super().forward(x, ends) * self.extra


class ReturnsWords(Layer):
    def forward(self, x, ends):
        return super().forward(x, ends), "words"


class ReturnsItsArgument(Layer):
    def forward(self, x, ends):
        return super().forward(x, ends), x[:1]


class Fails(Layer):
    def forward(self, x, ends):
        if torch.is_grad_enabled() and x.sum() == 0:
            raise ValueError("zero")
        return x


WAYWARD = {
    SetsAttributes: "SetsAttributes.last is set to something else",
    RebindsABuffer: "parameters, buffers or modules are replaced",
    RebindsAndReturnsWords: "an output is no plain tensor on a GPU",
    CountsInPlace: "the model writes to a tensor that is neither a buffer nor its own result",
    WritesToItsArgument: "the model writes to a tensor that is neither a buffer nor its own result",
    DrawsOnTheHost: "the model draws random numbers on the CPU",
    LearnsWhatIsNoParameter: "gradients go to a tensor that is neither an argument nor a parameter",
    ReturnsWords: "an output is no plain tensor on a GPU",
    ReturnsItsArgument: "an output is an argument or a parameter itself",
}


@pytest.mark.parametrize("kind,why", WAYWARD.items(), ids=[kind.__name__ for kind in WAYWARD])
def test_models_that_do_more_than_compute(kind, why):
    torch.manual_seed(0)
    model = kind()
    twin, handle, found = copy.deepcopy(model), taped(model), []
    for m in (model, twin):
        random.seed(3)
        x, outs = torch.ones(3, 4), []
        for _ in range(6):
            out = m(x, ENDS)
            outs.append(out[0] if isinstance(out, tuple) else out)
            outs[-1].sum().backward()
        found.append([*outs, x, *m.buffers(), *(p.grad for p in m.parameters()), *vars(m).get("count", ())])
        assert not hasattr(m, "extra") or m.extra.grad is not None
    assert all(map(torch.equal, *found))
    assert why in handle.report() and handle.num_replays == 0


def test_errors_of_the_model_come_as_they_are():
    model = Fails()
    taped(model)
    for _ in range(4):
        with pytest.raises(ValueError, match="zero"):
            model(torch.zeros(1), ENDS)


def test_hooks_within_are_refused_and_those_of_the_model_run():
    model, handle = captured()
    ran = []
    model.register_forward_hook(lambda *args: ran.append(1))
    model(X, ENDS)
    assert handle.num_replays == 2 and ran == [1]
    for register in ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_pre_hook"):
        hook = getattr(model.linear, register)(lambda *args: ran.append(2))
        model(X.clone().requires_grad_(), ENDS).sum().backward()
        hook.remove()
        assert 2 in ran, register
        ran.clear()
    for _ in range(3):
        model(X, ENDS)
    assert handle.num_replays == 5  # the capture from before is as good as it was
    model.linear.register_forward_hook(lambda *args: None)
    for _ in range(3):
        model(X, ENDS)
    assert handle.num_replays == 5 and "a module within has hooks" in handle.report()


def global_hooks():
    return nn.modules.module.register_module_forward_hook(lambda *args: None)


class _Removed:
    def __init__(self, begin):
        self.begin = begin

    def __enter__(self):
        self.handle = self.begin()

    def __exit__(self, *exception):
        self.handle.remove()


PLACES = {
    "hooks of saved tensors are active": lambda: torch.autograd.graph.save_on_cpu(),
    "a transform of torch.func or forward-mode differentiation is active": forward_ad.dual_level,
    "a TorchDispatchMode is active": lambda: FlopCounterMode(display=False),
    "there are hooks of all modules": lambda: _Removed(global_hooks),
}


@pytest.mark.parametrize("why,place", PLACES.items())
def test_places_where_calls_run_as_they_are(why, place):
    model, handle = captured()
    with place():
        assert torch.equal(model(X, ENDS), eager(model, X, ENDS))
    assert f"1 not captured: {why}" in handle.report() and handle.num_replays == 1
    model(X, ENDS)
    assert handle.num_replays == 2


def test_transforms_checkpoints_compile_and_trace():
    model, handle = captured()
    expected = eager(model, X, ENDS)
    rows = torch.func.vmap(lambda row: model(row, ENDS))(X)
    assert torch.allclose(rows, expected)
    with forward_ad.dual_level():
        out = model(forward_ad.make_dual(X, torch.ones_like(X)), ENDS)
        assert forward_ad.unpack_dual(out).tangent is not None
    assert torch.equal(torch.jit.trace(model, (X, ENDS), check_trace=False)(X + 1, ENDS), eager(model, X + 1, ENDS))
    assert handle.num_replays == 1
    out = torch.utils.checkpoint.checkpoint(model, X, ENDS, use_reentrant=False)
    out.sum().backward()
    assert torch.equal(out, expected)
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(X, ENDS), expected)


def test_parameters_of_functional_call_get_their_gradients():
    model, _ = captured()
    others = {name: p.detach().requires_grad_() for name, p in model.named_parameters()}
    out = torch.func.functional_call(model, others, (X, ENDS))
    assert all(grad is not None for grad in torch.autograd.grad(out.sum(), list(others.values())))


def test_another_capture_goes_first():
    inner = Layer()

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def forward(self, x, ends):
            return self.inner(x, ends) * 2

    within, outer = taped(inner), Outer()
    handle, expected = taped(outer), eager(inner, X, ENDS) * 2
    for _ in range(5):
        assert torch.equal(outer(X, ENDS), expected)
    assert handle.num_replays >= 3 and "another capture is going on" in within.report()
    handle._graphs.capturing = True
    outer(X, ENDS)
    assert "1 not captured: another capture is going on" in handle.report()


def test_lazy_parameters_and_tensors_elsewhere():
    model = nn.LazyLinear(3)
    taped(model)
    assert model(X).shape == model(X).shape == (6, 3)
    with pytest.raises(Unfit, match="not on the current GPU"):
        State(Layer(), 0, "training")
    with pytest.raises(Unfit, match="not on the current GPU"):
        leaf_key(X, 0)
    for value, why in ((X.to_sparse(), "sparse"), (object(), "an argument is a object"), ({1}, "an argument is a set")):
        with pytest.raises(Unfit, match=why):
            leaf_key(value, -1)


@pytest.mark.parametrize("mode", ["verify", "0"])
def test_a_cache_that_trusts_no_version_is_not_bypassed(monkeypatch, mode):
    monkeypatch.setenv("EDGELESS_CACHE", mode)
    model = Layer()
    handle = taped(model)
    for _ in range(3):
        model(X, ENDS)
    assert "EDGELESS_CACHE asks for more than versions" in handle.report() and handle.num_captured == 0


def test_on_the_cpu_models_run_as_they_are():
    model = Layer()
    expected, handle = model(X, ENDS), edgeless.capture(model).captured
    for _ in range(5):
        assert torch.equal(model(X, ENDS), expected)
    assert handle.report() == "0 captured, 0 replayed\n  5 not captured: a tensor is not on the current GPU"
    for _ in range(40):
        model(X, ENDS)
    assert "gave up after 32 calls in a row" in handle.report() and "forward" not in model.__dict__
