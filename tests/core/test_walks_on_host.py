"""Generated CUDA kernels that the host runs: they agree with the interpreter, and with its rules for equal messages."""

from __future__ import annotations

import on_host as host
import pytest
import torch
from test_compiled_walks import FUNCTIONS, NODES, WIDTH, gated, inputs, per_edge, program_of, result_by_place, results
from test_programs import BY_ROUNDING, error_of_gated_maxima

from edgeless import Graph

pytestmark = pytest.mark.skipif(host.missing() is not None, reason=f"{host.missing()}")


@pytest.fixture
def on_host():
    with host.on_host() as interpreted:
        yield interpreted


@pytest.mark.parametrize("processors", [2, 40])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_same_as_the_interpreter(function, processors, monkeypatch):
    expected = results(program_of(function))
    monkeypatch.setattr(host, "PROCESSORS", processors)
    program = program_of(function)
    with host.on_host():
        found, again = results(program), results(program)
    assert {w.code.text() for w in program.walks() if "kernel" not in w.code.text()} <= {
        "interpreted (sums over all edges into rows that the edges choose)"
    }
    for a, b, c in zip(found, expected, again, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
        assert torch.equal(a, c)


@pytest.mark.parametrize("dtype", BY_ROUNDING)
def test_shares_of_messages_that_are_almost_equal_sum_to_one(dtype, on_host):
    assert error_of_gated_maxima(dtype) < BY_ROUNDING[dtype]
    assert not on_host


def test_places_from_the_end_and_outside(on_host):
    found, right, walks = result_by_place()
    assert {walk.code.text() for walk in walks} == {"a generated kernel"}
    torch.testing.assert_close(found, right)
    assert f", {WIDTH})" in walks[0].code.on_cuda.passes[0].text.code.split("within(", 1)[1]  # else it reads anywhere


@pytest.mark.parametrize("function", [gated, per_edge])
def test_results_are_no_views(function, on_host):
    ends, tensors = inputs()
    found = program_of(function)(Graph.from_edge_index(ends, NODES, NODES), tensors)[0]
    assert not on_host and not found._is_view()
