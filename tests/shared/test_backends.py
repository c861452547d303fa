"""Choosing a backend, explaining the choice and the mixin that makes it, without any framework."""

import subprocess
import sys
import threading

import pytest
import torch

import edgeless
from edgeless import backends


class Stock(torch.nn.Module):
    """A stock layer of no framework."""

    def __init__(self, width=2):
        super().__init__()
        self.lin = torch.nn.Linear(width, width)

    def forward(self, x, scale=1.0):
        return scale * self.lin(x)


class Fused(edgeless.FusedLayer, Stock):
    def forward(self, x, scale=1.0):
        return self._choose(x, scale)

    def _fusion_refusals(self, x, scale=1.0):
        reasons = []
        if x.dim() != 2:
            reasons.append(f"x has {x.dim()} dimensions")
        if scale == 0:
            reasons.append("scale is 0")
        return reasons

    def _fused_forward(self, x, scale):
        return scale * self.lin(x) + 1000


X = torch.ones(3, 2)


def test_auto_runs_fused_where_it_can():
    layer = Fused()
    torch.testing.assert_close(layer(X), layer.lin(X) + 1000)
    torch.testing.assert_close(layer(X, scale=0), 0 * layer.lin(X))
    torch.testing.assert_close(layer(X[0]), layer.lin(X[0]))


def test_reference_runs_the_stock_forward():
    layer = Fused()
    with edgeless.backend("reference"):
        torch.testing.assert_close(layer(X), layer.lin(X))
    torch.testing.assert_close(layer(X), layer.lin(X) + 1000)


def test_fused_raises_in_the_words_of_explain():
    layer = Fused()
    with edgeless.backend("fused"):
        torch.testing.assert_close(layer(X), layer.lin(X) + 1000)
        with pytest.raises(edgeless.NotFusedError) as error:
            layer(X[0], scale=0)
    words = "Fused does not run fused, because x has 1 dimensions; because scale is 0."
    assert str(error.value) == words == str(edgeless.explain(layer, X[0], scale=0))
    assert isinstance(error.value, RuntimeError)


def test_explain_computes_nothing_and_holds_facts():
    layer = Fused()
    layer.lin.register_forward_hook(lambda *args: pytest.fail("explain ran the layer"))
    explanation = edgeless.explain(layer, X)
    assert explanation and explanation.fused and explanation.reasons == () and str(explanation) == "Fused runs fused."
    explanation = edgeless.explain(layer, X, 0)
    assert not explanation and explanation.reasons == ("scale is 0",)
    with edgeless.backend("reference"):
        explanation = edgeless.explain(layer, X)
    assert explanation.reasons == ('edgeless.backend("reference") is in force',)


def test_explain_other_modules():
    assert edgeless.explain(torch.nn.Linear(2, 2), X).reasons == ("Linear is not a layer of edgeless",)


def test_nesting_and_errors_restore_the_backend():
    assert backends.current_backend() == "auto"
    with edgeless.backend("fused"):
        with edgeless.backend("reference"):
            assert backends.current_backend() == "reference"
        assert backends.current_backend() == "fused"
    with pytest.raises(KeyError), edgeless.backend("reference"):
        raise KeyError
    assert backends.current_backend() == "auto"


def test_unknown_backend():
    with (
        pytest.raises(ValueError, match="name must be one of 'auto', 'fused', 'reference', got 'cuda'"),
        edgeless.backend("cuda"),
    ):
        pass
    assert backends.current_backend() == "auto"


def test_other_threads_see_the_choice():
    seen = []
    with edgeless.backend("reference"):
        thread = threading.Thread(target=lambda: seen.append(backends.current_backend()))
        thread.start()
        thread.join()
    assert seen == ["reference"]


def test_kernels_of_this_build():
    assert backends.kernel_refusal(torch.device("cpu")) is None
    assert backends.kernel_refusal(torch.device("meta")) == "edgeless has no kernels for 'meta' devices"
    if not edgeless._C.with_cuda:
        assert backends.kernel_refusal(torch.device("cuda")) == "this build of edgeless has no CUDA kernels"


def test_functional_follows_the_backend(monkeypatch):
    graph = edgeless.Graph.from_edge_index(torch.tensor([[0, 1], [1, 1]]), 2, 2)
    x, a = torch.randn(2, 1, 3), torch.randn(2, 1)
    calls = []
    monkeypatch.setattr(edgeless.reference, "gat_attention", lambda *args, **kwargs: calls.append(1))
    with edgeless.backend("fused"):
        edgeless.functional.gat_attention(graph, x, a, a)
    assert not calls
    with edgeless.backend("reference"):
        edgeless.functional.gat_attention(graph, x, a, a)
    assert calls


def test_import_loads_no_framework_and_touches_no_cuda():
    code = (
        "import sys, torch, edgeless; "
        "assert not torch.cuda.is_initialized(); "
        "assert not {'dgl', 'torch_geometric'} & set(sys.modules), 'a framework was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
