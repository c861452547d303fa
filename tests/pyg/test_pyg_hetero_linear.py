"""HeteroLinear and HeteroDictLinear against the stock layers."""

import copy
import io
import re

import pytest
import torch
import torch_geometric.nn as stock
from devices import EVERY_DEVICE
from pyg_cases import assert_close, features, run, run_fused
from torch_geometric.nn.dense.linear import HeteroDictLinear, HeteroLinear

import edgeless
import edgeless.pyg.nn as fused

TYPES = {
    "mixed": torch.tensor([3, 0, 0, 3, 1, 3, 0] * 9),
    "sorted": torch.arange(63) // 16,
    "one": torch.full((63,), 2),
    "none": torch.zeros(0, dtype=torch.int64),
}


def layer_pair(dtype=torch.float32, **options):
    theirs = HeteroLinear(6, 4, 4, **options)
    ours = fused.HeteroLinear(6, 4, 4, **options)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(features(parameter.numel(), 1).view(parameter.shape))
    ours.load_state_dict(theirs.state_dict())
    return theirs.to(dtype), ours.to(dtype)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"is_sorted": True}])
def test_every_type(kind, dtype, options):
    if options.get("is_sorted") and kind == "mixed":
        pytest.skip("the stock layer takes rows for sorted that are not")
    types = TYPES[kind]
    theirs, ours = layer_pair(dtype, **options)
    x = features(len(types), 6, dtype)
    expected = run(theirs, theirs, x, types)
    assert_close(run_fused(ours, x, types), expected)
    assert_close(run_fused(ours, x, types.int()), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_errs_at_most_twice_as_much(dtype):
    theirs, ours = layer_pair(dtype)
    x, types = features(63, 6, dtype), TYPES["mixed"]
    exact_layer = copy.deepcopy(theirs).double()
    exact = run(exact_layer, exact_layer, x.double(), types)
    found, stocks = run_fused(ours, x, types), run(theirs, theirs, x, types)
    for key, want in exact.items():
        errors = [float((t[key].double() - want).norm() / want.norm()) for t in (found, stocks)]
        assert found[key].dtype == stocks[key].dtype and errors[0] <= 2 * errors[1] + 1e-6, (key, errors)


def test_lazy_parameters():
    torch.manual_seed(2)
    theirs = HeteroLinear(-1, 4, 4)
    torch.manual_seed(2)
    ours = fused.HeteroLinear(-1, 4, 4)
    x, types = features(63, 6), TYPES["mixed"]
    torch.manual_seed(3)
    expected = theirs(x, types)
    torch.manual_seed(3)
    assert not edgeless.explain(ours, x, types)
    assert torch.allclose(ours(x, types), expected, atol=1e-5)
    assert edgeless.explain(ours, x, types)


def test_compiles_whole():
    theirs, ours = layer_pair()
    x, types = features(63, 6), TYPES["mixed"]
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    with edgeless.backend("fused"):
        assert_close(run(compiled, ours, x, types), run(theirs, theirs, x, types))


def test_a_type_out_of_range_is_named():
    _, ours = layer_pair()
    types = TYPES["mixed"].clone()
    types[5] = 4
    with pytest.raises(IndexError, match="index has id 4 at position 5, expected 0 <= id < R = 4"):
        ours(features(63, 6), types)


def test_refusals_are_said_in_words():
    _, ours = layer_pair()
    x, types = features(63, 6), TYPES["mixed"]
    for inputs, words in (
        ((x[None], types[None]), "x has shape"),
        ((x.double(), types), "x is torch.float64"),
        ((x, types.float()), "no plain int64 or int32"),
        ((x, types[1:]), r"the types have shape \[62\]"),
    ):
        assert re.search(words, str(edgeless.explain(ours, *inputs)))
    with torch.autocast("cpu", torch.bfloat16):
        assert re.search("autocast is on", str(edgeless.explain(ours.double(), x.double(), types)))


@EVERY_DEVICE
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", ["float32", "autocast"])
@pytest.mark.parametrize("kind", ["mixed", "sorted", "none"])
@pytest.mark.parametrize("options", [{}, {"bias": False}], ids=str)
def test_autocast(options, kind, dtype, autocast, device):
    """The stock layer's dtypes, and at most twice its distance from float64."""
    theirs, ours = layer_pair(**options)
    types = TYPES[kind]
    x = features(len(types), 6).to(autocast).to(autocast if dtype == "autocast" else torch.float32)
    weight = features(len(types), 4, seed=3)

    def results(layer, x, autocast=None):
        leaf = x.detach().clone().requires_grad_()
        with torch.autocast(x.device.type, autocast, autocast is not None):
            out = layer(leaf, types.to(x.device))
        grads = torch.autograd.grad(out, [leaf, *layer.parameters()], weight.to(out))
        return [t.detach().cpu() for t in (out, *grads)]

    exact = results(copy.deepcopy(theirs).double(), x.double())
    with edgeless.backend("fused"):
        found = results(ours.to(device), x.to(device), autocast)
    stocks = results(theirs.to(device), x.to(device), autocast)
    assert [t.dtype for t in found] == [t.dtype for t in stocks]
    for mine, stock_one, want in zip(found, stocks, exact, strict=True):
        size = want.norm().clamp_min(1e-30)
        assert (mine.double() - want).norm() / size <= max(2 * (stock_one.double() - want).norm() / size, 1e-6)


def test_dictionaries_in_any_order():
    torch.manual_seed(1)
    theirs = HeteroDictLinear({"a": 5, "b": 3, "c": 4}, 7)
    ours = fused.HeteroDictLinear({"a": 5, "b": 3, "c": 4}, 7)
    ours.load_state_dict(theirs.state_dict())
    inputs = {"c": features(9, 4), "a": features(11, 5, seed=2)}
    with edgeless.backend("fused"):
        found = ours(inputs)
    expected = theirs(inputs)
    assert list(found) == list(expected)
    assert all(torch.allclose(found[key], expected[key], atol=1e-5) for key in expected)


@EVERY_DEVICE
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_autocast_of_dictionaries(given, device):
    """The stock layer's dtypes, and at most twice its distance from float64."""
    torch.manual_seed(1)
    theirs = HeteroDictLinear({"a": 5, "b": 3}, 7).to(device)
    ours = fused.HeteroDictLinear({"a": 5, "b": 3}, 7).to(device)
    ours.load_state_dict(theirs.state_dict())
    inputs = {"a": features(90, 5).to(given), "b": features(110, 3, seed=2).to(given)}
    weights = {"a": features(90, 7, seed=3), "b": features(110, 7, seed=4)}

    def results(layer, dtype=None, autocast=True):
        leaves = {key: x.to(device, dtype).requires_grad_() for key, x in inputs.items()}
        with torch.autocast(device, torch.bfloat16, autocast):
            outs = layer(leaves)
        loss = sum((out * weights[key].to(out)).sum() for key, out in outs.items())
        return [*outs.values(), *torch.autograd.grad(loss, [*leaves.values(), *layer.parameters()])]

    exact = results(copy.deepcopy(theirs).double(), torch.float64, False)
    with edgeless.backend("fused"):
        found = results(ours)
    for mine, stocks, want in zip(found, results(theirs), exact, strict=True):
        assert mine.dtype == stocks.dtype
        assert (mine - want).norm() <= max(2 * (stocks - want).norm(), 1e-6 * want.norm())


def test_lazy_dictionaries():
    ours = fused.HeteroDictLinear(-1, 7, types=["a", "b"])
    inputs = {"a": features(9, 4), "b": features(11, 5, seed=2)}
    assert not edgeless.explain(ours, inputs)
    assert {key: tuple(out.shape) for key, out in ours(inputs).items()} == {"a": (9, 7), "b": (11, 7)}
    assert edgeless.explain(ours, inputs)


def test_accelerate_turns_stock_layers():
    model = torch.nn.ModuleList([stock.HeteroLinear(6, 4, 2), stock.HeteroDictLinear(6, 4, types=["a"])])
    report = edgeless.accelerate(model)
    assert [new for _, _, new in report.swapped] == [fused.HeteroLinear, fused.HeteroDictLinear]


# TorchScript and transforms ------------------------------------------------------------------------------------------


class Net(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor, types: torch.Tensor) -> torch.Tensor:
        return self.layer(x, types).relu()


def saved(module):
    file = io.BytesIO()
    torch.jit.save(module, file)
    file.seek(0)
    return torch.jit.load(file)


@pytest.mark.parametrize("wrap", [Net, lambda layer: layer], ids=("in a model", "alone"))
@pytest.mark.parametrize("options", [{}, {"bias": False}])
def test_script(wrap, options):
    theirs, ours = layer_pair(**options)
    x, types = features(63, 6), TYPES["mixed"]
    net, expected = wrap(ours), wrap(theirs)(x, types)
    scripted = torch.jit.script(net)
    for module in (scripted, saved(scripted)):
        torch.testing.assert_close(module(x, types), expected)
    assert_close(run(scripted, scripted, x, types), run(wrap(theirs), wrap(theirs), x, types))
    torch.testing.assert_close(ours(x, types), theirs(x, types))


def test_script_of_dictionaries():
    theirs, ours = HeteroDictLinear({"a": 5, "b": 3}, 7), fused.HeteroDictLinear({"a": 5, "b": 3}, 7)
    ours.load_state_dict(theirs.state_dict())
    inputs = {"b": features(9, 3), "a": features(11, 5, seed=2)}
    scripted = torch.jit.script(ours)
    for module in (scripted, saved(scripted), ours):
        torch.testing.assert_close(module(inputs), theirs(inputs))


def test_a_subclass_is_scripted_as_it_is():
    class Mine(fused.HeteroLinear):
        def forward(self, x: torch.Tensor, type_vec: torch.Tensor) -> torch.Tensor:
            return x * 2

    torch.testing.assert_close(
        torch.jit.script(Mine(6, 4, 4))(torch.ones(2, 6), torch.zeros(2)), torch.full((2, 6), 2.0)
    )


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).square().sum())(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x.flip(0),))[1],
    "vmap": lambda f, x: torch.func.vmap(f)(torch.stack((x, x.flip(0)))),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms(transform):
    theirs, ours = layer_pair(torch.float64)
    x, types = features(63, 6, torch.float64), TYPES["mixed"]
    found, expected = (TRANSFORMS[transform](lambda x, layer=layer: layer(x, types), x) for layer in (ours, theirs))
    torch.testing.assert_close(found, expected)
    theirs, ours = HeteroDictLinear({"a": 6}, 7).double(), fused.HeteroDictLinear({"a": 6}, 7).double()
    ours.load_state_dict(theirs.state_dict())
    found, expected = (
        TRANSFORMS[transform](lambda x, layer=layer: layer({"a": x})["a"], x) for layer in (ours, theirs)
    )
    torch.testing.assert_close(found, expected)
