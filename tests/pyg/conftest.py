"""Setup of the PyG tests: leaves them out without torch_geometric, and resets the state before every test."""

import importlib.util

import pytest

_missing = importlib.util.find_spec("torch_geometric") is None

if _missing:
    collect_ignore_glob = ["*"]


def pytest_report_header(config):
    return "tests/pyg: left out, torch_geometric is not installed" if _missing else None


@pytest.fixture(autouse=True)
def known_state():
    import torch

    import edgeless

    edgeless.clear_cache()
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def every_size_is_large(monkeypatch):
    """Projections in float32 go through the compiled op, as in large graphs; in float64 through the modules."""
    from edgeless.functional import projection

    monkeypatch.setattr(projection, "_LEAST", 0)
