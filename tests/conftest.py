"""Fixtures of all tests: real data sets if available, and skipped CUDA tests without a GPU."""

import gc
import os
from pathlib import Path

os.environ.setdefault("DGLBACKEND", "pytorch")  # before anything imports dgl, which would else write a config file
os.environ.setdefault("EDGELESS_COMPILE_WALKS", "off")  # tests of compiled code ask for it

import pytest
import torch

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder with Cora and the heterophilous graphs, kept beside the repository."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"needs the data sets in {SHARED_DATA}")
    return SHARED_DATA


@pytest.fixture
def fresh_dynamo():
    """Resets torch.compile's state before and after the test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=["avx512", "avx2", "baseline"])
def every_capability(request):
    """Runs the test once for each instruction set that the CPU kernels are compiled for."""
    from devices import narrowed

    with narrowed(request.param):
        yield


@pytest.fixture
def short_turns(monkeypatch):
    """Makes a bench on the CPU run each peer once per turn, not for a third of a second; no test reads the times."""
    from edgeless.tools import timing

    monkeypatch.setattr(timing, "LEAST_SECONDS", 0.0)


@pytest.fixture
def changed(monkeypatch):
    """Records whether layers change the order of their map and sum, which is allowed for small graphs on CUDA too."""
    from edgeless.functional import map_order

    answers, pays = [], map_order._pays

    def spy(*args):
        answers.append(pays(*args))
        return answers[-1]

    monkeypatch.setattr(map_order, "_pays", spy)
    monkeypatch.setattr(map_order, "_LEAST_BYTES", -(1 << 62))
    return answers


def pytest_collection_modifyitems(config, items):
    wanting = [item for item in items if item.get_closest_marker("cuda")]
    if wanting and not torch.cuda.is_available():
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason="torch sees no GPU"))


def pytest_collection_finish():
    """Freezes the objects that exist before the first test. Many tests collect garbage, and scanning torch, a framework
    and thousands of tests takes a quarter of a second each time.
    """
    gc.collect()
    gc.freeze()
