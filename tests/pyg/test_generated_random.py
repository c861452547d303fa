"""Random message functions are refused, or right on several graphs with one program."""

from __future__ import annotations

import copy
import logging
import os

import pytest
import torch
from drawn_messages import Drawn, inputs
from generated_cases import compare, tensors
from torch import nn

from edgeless.pyg import generated

TIMES = int(os.environ.get("EDGELESS_DRAWN_TIMES", "1"))
GROUPS, OF_A_GROUP = 4 * TIMES, 10


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.ERROR)
    generated.PROGRAMS.clear()
    yield
    logging.disable(logging.NOTSET)


class Under(nn.Module):
    """A layer under a setting of EDGELESS_GENERATE."""

    def __init__(self, layer, choice):
        super().__init__()
        self.layer, self.choice = layer, choice

    def forward(self, *args):
        before = os.environ.get("EDGELESS_GENERATE")
        os.environ["EDGELESS_GENERATE"] = self.choice
        try:
            return self.layer(*args)
        finally:
            os.environ.pop("EDGELESS_GENERATE")
            if before is not None:
                os.environ["EDGELESS_GENERATE"] = before


def run(seed: int) -> list[str]:
    """Compares one drawn layer with PyG; returns what its calls did."""
    layer = Drawn(seed)
    stock = copy.deepcopy(layer)
    generated._recording.calls = calls = []
    try:
        for graph in range(3):
            args = inputs(layer, 1000 * seed + graph)
            if not any(t.requires_grad for t in tensors(list(args))):
                continue
            with torch.random.fork_rng():
                compare(Under(stock, "off"), Under(layer, "on"), args, tolerance=1e-8)
    finally:
        generated._recording.calls = None
    return ["taken" if text is not None else said for said, text in calls if said != "EDGELESS_GENERATE is off"]


@pytest.mark.parametrize("seed", range(100, 100 + 6 * TIMES))
def test_drawn_messages_as_compiled_code(seed, monkeypatch):
    monkeypatch.setenv("EDGELESS_COMPILE_WALKS", "now")
    assert not any("generator fails" in outcome for outcome in run(seed))


@pytest.mark.parametrize("group", range(GROUPS))
def test_drawn_messages(group):
    said = [outcome for seed in range(OF_A_GROUP * group, OF_A_GROUP * (group + 1)) for outcome in run(seed)]
    refused = [outcome for outcome in said if outcome != "taken"]
    assert len(refused) < 0.5 * len(said), refused
    assert not any("generator fails" in outcome for outcome in refused), refused
