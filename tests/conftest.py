"""Fixtures of all tests: real graphs where they are at hand, and no CUDA test without a GPU."""

import gc
import os
from pathlib import Path

os.environ.setdefault("DGLBACKEND", "pytorch")  # before anything imports dgl, which would else write a config file

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
    """torch.compile without what earlier tests compiled, and nothing left for later ones."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=["avx512", "avx2", "baseline"])
def every_capability(request):
    """The test, once for each instruction set that the CPU's kernels are compiled for."""
    from devices import narrowed

    with narrowed(request.param):
        yield


@pytest.fixture
def short_turns(monkeypatch):
    """On the CPU a bench runs each peer once a turn, where else it fills a third of a second; no test reads times."""
    from edgeless import timing

    monkeypatch.setattr(timing, "LEAST_SECONDS", 0.0)


@pytest.fixture
def changed(monkeypatch):
    """The answers to whether the order of a layer's map and sum changes, which it does for small graphs on CUDA too."""
    from edgeless import map_order

    answers, pays = [], map_order._pays

    def spy(*args):
        answers.append(pays(*args))
        return answers[-1]

    monkeypatch.setattr(map_order, "_pays", spy)
    monkeypatch.setattr(map_order, "_LEAST_BYTES", -(1 << 62))
    return answers


def _cuda_refusal() -> str:
    if not torch.cuda.is_available():
        return "needs a CUDA device"
    from edgeless import _C

    return "" if _C.with_cuda else "needs edgeless built with its CUDA kernels"


def pytest_collection_modifyitems(config, items):
    wanting = [item for item in items if item.get_closest_marker("cuda")]
    refusal = _cuda_refusal() if wanting else ""
    if refusal:
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason=refusal))


def pytest_collection_finish():
    """What is there before the first test stays, and the collector of garbage, which many tests call, need not look at
    it: with torch, a framework and thousands of tests that takes a quarter of a second each time.
    """
    gc.collect()
    gc.freeze()
