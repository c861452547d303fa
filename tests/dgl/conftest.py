"""Setup of the DGL tests: makes DGL importable, and resets the state before every test."""

import importlib.util

import pytest

_spec = importlib.util.find_spec("dgl")
_missing = _spec is None or _spec.origin is None  # this folder is found as a package without origin

if _missing:
    collect_ignore_glob = ["*"]
else:
    from edgeless.dgl import graphbolt

    graphbolt.stub()


def pytest_report_header(config):
    return "tests/dgl: left out, DGL is not installed" if _missing else None


@pytest.fixture(autouse=True)
def known_state():
    import torch

    import edgeless

    edgeless.cache.clear_cache()
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def every_size_is_large(monkeypatch):
    """Projections in float32 go through the compiled op, as in large graphs; in float64 through the modules."""
    from edgeless.functional import projection

    monkeypatch.setattr(projection, "_LEAST", 0)
