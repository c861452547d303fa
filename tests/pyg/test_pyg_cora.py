"""Training on Cora: the same losses without dropout, the same accuracy with it."""

import statistics

import cora
import pytest
import torch
import torch_geometric.nn as stock

import edgeless
import edgeless.pyg.nn as fused


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """The many small steps of an epoch get slower with threads where something else wants the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def data(shared_data):
    pytest.importorskip("scipy")  # of which PyG's reader makes what Cora's files hold
    return cora.load(shared_data / "planetoid" / "Cora" / "raw")


@pytest.mark.parametrize("layer", cora.LAYERS)
def test_losses_without_dropout(data, layer):
    options = {"layer": layer, "epochs": 4, "dropout": 0.0, "rate": 0.02}
    want, _ = cora.train(stock, data, 0, **options)
    with edgeless.backend("fused"):
        have, _ = cora.train(fused, data, 0, **options)
    assert have == pytest.approx(want, rel=1e-4)
    assert have[-1] < 0.995 * have[0]


def test_accuracy_with_dropout(data):
    """Means within two standard errors of their difference; tests/pyg/cora.py takes more seeds and epochs."""
    theirs, ours = cora.compare(data, 3, layer="gat", epochs=20, rate=0.02)
    error = (sum(statistics.variance(found) for found in (theirs, ours)) / 3) ** 0.5
    assert abs(statistics.mean(ours) - statistics.mean(theirs)) <= max(2 * error, 0.02), (theirs, ours)
    assert statistics.mean(ours) > 0.7
