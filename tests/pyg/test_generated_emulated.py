"""Generated kernels agree with the stock layers where coroutines on the CPU are a block's threads."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch
from emulated_cuda import Emulator
from generated_cases import error
from test_generated_cuda import call_of, cast, results
from test_generated_tiles import LAYERS, inputs

import edgeless
from edgeless.pyg import generated

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    monkeypatch.setenv("EDGELESS_GENERATE", "on")
    generated.PROGRAMS.clear()
    yield
    generated.PROGRAMS.clear()  # what was made of its walks knows the emulator


def check(emulator, layer, args, kwargs, monkeypatch, dtype=torch.float32):
    expected = results(layer, args, kwargs)
    args, kwargs = cast(args, "cpu", dtype), cast(kwargs, "cpu", dtype)
    theirs, ours = (copy.deepcopy(layer).to(dtype) for _ in range(2))
    edgeless.accelerate(ours)
    emulator.install(monkeypatch)
    found = results(ours, args, kwargs)
    assert emulator.ran
    for mine, other, exact in zip(found, results(theirs, args, kwargs), expected, strict=True):
        assert error(mine.double(), exact) < max(1e-5, 2 * error(other.double(), exact))


@pytest.mark.parametrize(
    "name, last_first", [("GINEConv", False), ("GINEConv", True), ("CGConv", False), ("own attention", True)]
)
def test_products_of_narrow_features(monkeypatch, tmp_path, name, last_first):
    torch.manual_seed(1)
    args = inputs(64, 16, 60, 500, 150)
    check(Emulator(tmp_path, last_first), LAYERS[name](64, 16).double(), args, {}, monkeypatch)


@pytest.mark.parametrize(
    "width, features, edges, dtype",
    [(96, 32, 300, torch.float32), (32, 16, 3, torch.float32), (128, 16, 300, torch.bfloat16)],
)
def test_products_of_other_shapes(monkeypatch, tmp_path, width, features, edges, dtype):
    torch.manual_seed(1)
    x, ends, e = inputs(width, features, 60, 900, 300)
    args = x, ends[:, :edges], e[:edges].detach().requires_grad_()
    check(Emulator(tmp_path), LAYERS["GINEConv"](width, features).double(), args, {}, monkeypatch, dtype)


def test_other_walks(monkeypatch, tmp_path):
    make, args, kwargs = call_of("GENConv softmax")
    torch.manual_seed(1)
    check(Emulator(tmp_path), make().double(), args, kwargs, monkeypatch)
