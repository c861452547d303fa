"""Counts of what calls ran, warnings of fall-backs, and explanations of whole models, without any framework."""

import logging
import os
import subprocess
import sys
import threading

import pytest
import torch

import edgeless
from edgeless.choices import backends
from edgeless.layers import calls
from edgeless.layers.explanation import Printed

X = torch.ones(3, 2)


class Stock(torch.nn.Linear):
    """A stock layer of no framework."""


class Fused(edgeless.FusedLayer, Stock):
    """A layer that does not like negative numbers."""

    def forward(self, x, scale=1.0):
        return self._choose(x, scale)

    def _fusion_refusals(self, x, scale=1.0):
        return [f"scale is {scale}"] if scale < 0 else []

    def _fused_forward(self, x, scale):
        return torch.nn.Linear.forward(self, x)

    def _stock_forward(self, x, scale):
        return torch.nn.Linear.forward(self, x)


class Off(Fused):
    def _fusion_refusals(self, x, scale=1.0):
        return ["it is off"]


backends.register_layer(Stock, Fused)
NAME = f"{__name__}.Fused"


@pytest.fixture(autouse=True)
def fresh():
    edgeless.report(reset=True)
    yield
    edgeless.report(reset=True)


def counts():
    return edgeless.report().layers.get(NAME, calls.LayerCalls())


def test_counts_by_outcome_and_reason():
    layer = Fused(2, 2)
    for scale in (1.0, 1.0, -1.0, -2.0, -1.0):
        layer(X, scale)
    with edgeless.backend("reference"):
        layer(X)
    found = counts()
    assert found.fused == 2 and found.generated == {} and found.traced == 0
    assert found.stock == {"scale is -1.0": 2, "scale is -2.0": 1, 'edgeless.backend("reference") is in force': 1}
    assert str(edgeless.report()).splitlines()[:2] == [f"{NAME}: 2 fused", f"{NAME}: 2 stock, scale is -1.0"]


def test_a_call_that_raises_under_fused_is_not_counted():
    with edgeless.backend("fused"), pytest.raises(edgeless.NotFusedError):
        Fused(2, 2)(X, -1.0)
    assert counts() == calls.LayerCalls()


def test_reset():
    layer = Fused(2, 2)
    layer(X)
    assert edgeless.report(reset=True).layers[NAME].fused == 1
    assert NAME not in edgeless.report().layers
    layer(X)
    assert counts().fused == 1


def test_threads_are_added_up_while_they_run_and_after():
    layer, ran, go_on = Fused(2, 2), threading.Event(), threading.Event()

    def work():
        for _ in range(50):
            layer(X)
        ran.set()
        go_on.wait(30)

    thread = threading.Thread(target=work)
    thread.start()
    assert ran.wait(30)
    layer(X)
    assert counts().fused == 51
    go_on.set()
    thread.join()
    assert counts().fused == 51
    known = len(calls._threads)
    for _ in range(5):
        thread = threading.Thread(target=lambda: layer(X))
        thread.start()
        thread.join()
    assert counts().fused == 56 and len(calls._threads) <= known  # ended threads leave nothing but their sums


def test_many_threads_count_every_call():
    layer = Fused(2, 2)
    threads = [threading.Thread(target=lambda: [layer(X, s) for s in (1.0, -1.0) * 200]) for _ in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert counts().fused == 1600 and counts().stock == {"scale is -1.0": 1600}


def test_reasons_do_not_grow_without_bounds():
    layer = Fused(2, 2)
    for i in range(100):
        layer(X, -1.0 - i)
    found = counts().stock
    assert len(found) == calls.MOST_REASONS + 1 and found[calls.OTHER] == 100 - calls.MOST_REASONS


def test_a_warning_for_each_layer_and_reason(caplog):
    layer = Fused(2, 2)
    with caplog.at_level(logging.WARNING, "edgeless"):
        for scale in (1.0, -1.0, -1.0, -2.0):
            layer(X, scale)
        with edgeless.backend("reference"):  # the user's own wish
            layer(X)
    assert [record.getMessage() for record in caplog.records] == [
        f"{NAME} does not run fused, because scale is -1.0",
        f"{NAME} does not run fused, because scale is -2.0",
    ]


@pytest.mark.parametrize("value,lines", (("1", 1), ("0", 0), ("", 0)))
def test_the_environment_variable_prints_warnings(value, lines):
    code = (
        "import torch, edgeless\n"
        "g = edgeless.Graph.from_edge_index(torch.zeros(2, 2, dtype=torch.int64), 2, 2)\n"
        "for _ in range(2):\n"
        "    with torch.autograd.forward_ad.dual_level():\n"
        "        edgeless.functional.spmm(g, torch.ones(2, 2))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        env={**_environment(), "EDGELESS_LOG": value},
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("edgeless: ")]
    assert len(said) == lines
    if lines:
        assert said[0].startswith(
            "edgeless: edgeless.functional.spmm does not run fused, because a transform of torch.func"
        )


def _environment():

    return dict(os.environ)


def test_functions_are_listed_where_they_run_plain_pytorch():
    graph = edgeless.Graph.from_edge_index(torch.zeros(2, 2, dtype=torch.int64), 2, 2)
    edgeless.functional.spmm(graph, torch.ones(2, 2))
    with torch.autograd.forward_ad.dual_level():
        edgeless.functional.spmm(graph, torch.ones(2, 2))
    (name,) = edgeless.report().layers
    assert name == "edgeless.functional.spmm" and sum(edgeless.report().layers[name].stock.values()) == 1


# torch.compile -------------------------------------------------------------------------------------------------------


def test_compiled_calls_are_noted_once_for_a_trace(fresh_dynamo):
    layer = Fused(2, 2)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    for _ in range(4):
        torch.testing.assert_close(compiled(X), torch.nn.Linear.forward(layer, X))
    assert counts() == calls.LayerCalls(traced=1)
    layer(X)  # a count in between asks for no new trace
    compiled(X)
    assert counts() == calls.LayerCalls(fused=1, traced=1)
    torch.compile(Off(2, 2), backend="eager", fullgraph=True)(X)
    assert edgeless.report().layers[f"{__name__}.Off"].stock == {calls.TRACED: 1}


# Explanations of models ----------------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(2)
        self.layers = torch.nn.ModuleList([Fused(2, 2), Fused(2, 2), Stock(2, 2), Fused(2, 2)])

    def forward(self, x, scale=1.0):
        x = torch.nn.functional.dropout(self.norm(x))
        x = self.layers[0](x)
        return self.layers[2](self.layers[1](self.layers[1](x, scale), scale))


def test_explain_a_model():
    model = Model()
    state = {name: t.clone() for name, t in model.state_dict().items()}
    torch.manual_seed(3)
    before = torch.get_rng_state()
    found = edgeless.explain(model, X, scale=-1.0)
    assert isinstance(found, edgeless.ModelExplanation) and not found
    assert [(name, e.fused) for name, e in found.calls] == [
        ("layers.0", True),
        ("layers.1", False),
        ("layers.2", False),
    ]
    assert found.calls[1][1].reasons == ("scale is -1.0",) and found.idle == ("layers.3",)
    assert "it is the stock layer, which edgeless.accelerate(model) turns into" in found.calls[2][1].reasons[0]
    assert str(found).splitlines()[:3] == [
        "Model: 1 of 3 graph layers run fused.",
        "  layers.0: Fused runs fused.",
        "  layers.1: Fused does not run fused, because scale is -1.0.",
    ]
    # Nothing of the model, its state or the generators has changed, and nothing was counted.
    assert torch.equal(torch.get_rng_state(), before) and counts() == calls.LayerCalls()
    assert all(torch.equal(state[name], t) for name, t in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_explain_a_model_that_raises_leaves_no_recording():
    with pytest.raises(RuntimeError):
        edgeless.explain(Model(), torch.ones(3, 7))
    Fused(2, 2)(X)
    assert counts().fused == 1


def test_explain_checks_the_arguments_of_a_model():
    with pytest.raises(TypeError, match="explain: Model cannot be called with these arguments"):
        edgeless.explain(Model())


# How reports print ---------------------------------------------------------------------------------------------------


def test_a_repr_is_the_text_and_notebooks_get_a_table():
    layer = Fused(2, 2)
    layer(X, -1.0)
    shown = {
        "report": edgeless.report(),
        "explanation": edgeless.explain(layer, X, -1.0),
        "model": edgeless.explain(Model(), X),
        "accelerate": edgeless.accelerate(Model()),
    }
    for found in shown.values():
        assert isinstance(found, Printed) and repr(found) == str(found)
        table = found._repr_html_()
        assert table.startswith("<table>") and table.count("<tr>") == 1 + len(found._rows()[1])
    assert "scale is -1.0" in shown["report"]._repr_html_()


def test_a_table_escapes_what_it_shows():
    class Bad(Printed):
        def _rows(self):
            return ("<a>",), [("<b> & c",)]

    assert "&lt;a&gt;" in Bad()._repr_html_() and "&lt;b&gt; &amp; c" in Bad()._repr_html_()


def test_a_model_shows_what_is_swapped():
    class Edgeless(Fused):
        pass

    Edgeless.__module__ = "edgeless.pyg.nn.some"
    text = "(in_features=2, out_features=2, bias=True)"
    assert repr(Edgeless(2, 2)) == "edgeless.Edgeless" + text
    assert repr(Fused(2, 2)) == "Fused" + text  # a class of the user's keeps its name
