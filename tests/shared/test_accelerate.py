"""Swapping the layers of a model in place, without any framework: tests/pyg and tests/dgl have the real ones."""

import copy
import subprocess
import sys

import pytest
import torch

import edgeless
from edgeless.choices import backends
from edgeless.tools.cli import devices


class Stock(torch.nn.Linear):
    """A stock layer of no framework."""


class Fused(edgeless.FusedLayer, Stock):
    def forward(self, x):
        return self._choose(x)

    def _fusion_refusals(self, x):
        return []

    def _fused_forward(self, x):
        return super()._stock_forward(x) + 1000


class Changed(Stock):
    pass


class Uncovered(torch.nn.Module):
    pass


backends.register_layer(Stock, Fused)
backends.register_family("these tests", lambda module: isinstance(module, Uncovered))


def _model():
    return torch.nn.ModuleDict(
        {
            "plain": torch.nn.Linear(2, 2),
            "deep": torch.nn.Sequential(torch.nn.ReLU(), Stock(2, 2)),
            "changed": Changed(2, 2),
            "uncovered": Uncovered(),
            "ready": Fused(2, 2),
        }
    )


def test_report():
    report = edgeless.accelerate(_model())
    assert report.swapped == [("deep.1", Stock, Fused)]
    assert report.kept == [
        ("changed", Changed, "it is a subclass of Stock, whose changes the fused layer does not know"),
        ("uncovered", Uncovered, "edgeless has no fused Uncovered"),
    ]
    assert str(report) == (
        "swapped 1, kept 2\n"
        f"  deep.1: Stock -> {__name__}.Fused\n"
        "  changed: Changed kept, it is a subclass of Stock, whose changes the fused layer does not know\n"
        "  uncovered: Uncovered kept, edgeless has no fused Uncovered"
    )


def test_again_changes_nothing():
    model = _model()
    edgeless.accelerate(model)
    assert edgeless.accelerate(model).swapped == []


def test_the_model_itself_can_be_the_layer():
    layer = Stock(2, 2)
    assert edgeless.accelerate(layer).swapped == [("", Stock, Fused)]
    assert type(layer) is Fused and "(the model): Stock" in str(edgeless.accelerate(Stock(2, 2)))


def test_a_layer_that_stands_twice_is_swapped_once():
    layer = Stock(2, 2)
    assert len(edgeless.accelerate(torch.nn.Sequential(layer, layer)).swapped) == 1


def test_everything_but_the_class_is_kept():
    layer = Stock(2, 2)
    layer.note = "mine"
    layer.register_buffer("extra", torch.ones(1))
    layer.register_forward_hook(lambda module, inputs, output: output + 5)
    layer.eval()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    before, plain = dict(vars(layer)), copy.deepcopy(layer)
    edgeless.accelerate(layer)
    assert vars(layer) == before and not layer.training and layer.note == "mine"
    assert optimizer.param_groups[0]["params"][0] is layer.weight
    torch.testing.assert_close(layer(torch.ones(1, 2)), plain(torch.ones(1, 2)) + 1000)


def test_what_is_no_module():
    with pytest.raises(TypeError, match="accelerate: model must be a torch.nn.Module, got list"):
        edgeless.accelerate([Stock(2, 2)])


def test_only_a_subclass_can_be_registered():
    with pytest.raises(TypeError, match="fused must be a subclass of Stock, got Uncovered"):
        backends.register_layer(Stock, Uncovered)


@pytest.mark.parametrize("framework,package", (("torch_geometric", "edgeless.pyg"), ("dgl", "edgeless.dgl")))
def test_only_the_adapters_of_imported_frameworks_are_loaded(framework, package):
    if not devices.installed(package.split(".")[1]):
        pytest.skip(f"{framework} is not installed")
    other = {"torch_geometric": "dgl", "dgl": "torch_geometric"}[framework]
    code = f"""
import sys
import torch, edgeless
edgeless.accelerate(torch.nn.Linear(2, 2))
assert not [m for m in sys.modules if m.startswith(("edgeless.pyg", "edgeless.dgl"))]
assert not {{"dgl", "torch_geometric"}} & sys.modules.keys(), "a framework was imported"
sys.modules["{other}"] = None  # from here on nothing may ask for the other one
try:
    import {framework}
except ImportError:
    print("skip")
    raise SystemExit
edgeless.accelerate(torch.nn.Linear(2, 2))
assert [m for m in sys.modules if m.startswith("{package}.")]
import {package}.nn
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    if done.stdout.strip() == "skip":
        pytest.skip(f"{framework} cannot be imported here")
