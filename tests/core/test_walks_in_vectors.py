"""Walks in C by vectors of each width, sums that the forward keeps, and edges that are passed over."""

from __future__ import annotations

import pytest
import torch
from test_compiled_walks import (
    EDGES,
    FUNCTIONS,
    NODES,
    WIDTH,
    inputs,
    largest,
    program_of,
    reduced,
    results,
)
from test_compiled_walks import compiler as compiler  # skips where there is none
from test_compiled_walks import now as now
from test_programs import arguments

from edgeless import Graph
from edgeless.programs import EDGE, NODE, Space
from edgeless.programs.program import Program
from edgeless.programs.run import c_compiler, compiled


def softplus_gate(sizes, ends, ids, seed, x, e, w, kind):
    z = x[ends[0]] + x[ends[1]] + e @ w[:4]
    return (reduced(torch.sigmoid(z) * torch.nn.functional.softplus(3 * z), ends[1], sizes.destinations),)


def one_gate_of_logs(sizes, ends, ids, seed, x, e, w, kind):
    """No threshold: the log of an exp that overflows is infinite, as in torch."""
    return (reduced(torch.log1p(torch.exp(400 * x[ends[0]])) + 0 * x[ends[1]], ends[1], sizes.destinations),)


def extrema_of_both_kinds(sizes, ends, ids, seed, x, e, w, kind):
    message = torch.relu(x[ends[0]] - x[ends[1]]) @ w
    first = reduced(message, ends[1], sizes.destinations, "amax")
    return (first + reduced(message.abs() * 2, ends[1], sizes.destinations, "amin"),)


def texts_of(program):
    return [v.code.text for walk in program.walks() for v in walk.code._variants.values()]


@pytest.mark.parametrize("size", [16, 32, 64])
@pytest.mark.parametrize("function", [*FUNCTIONS, softplus_gate, extrema_of_both_kinds])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_vectors_of_every_width(function, size, dtype, now, monkeypatch):
    monkeypatch.setattr(c_compiler, "vector_bytes", lambda: size)
    program = program_of(function, dtype, checked=dtype is torch.float64)
    found = results(program, dtype)
    assert {walk.code.text() for walk in program.walks()} == {"compiled"}
    with compiled.compiling("off"):
        exact = results(program_of(function, checked=False))
    bound = 3e-6 if dtype is torch.float32 else 1e-11
    for a, b in zip(found, exact, strict=True):
        assert float((a - b).norm()) <= bound * float(b.norm())


def test_a_log_of_an_exp_that_overflows_stays_infinite(now):
    program = program_of(one_gate_of_logs, torch.float32, checked=False)
    ends, tensors = inputs(torch.float32)
    found = program(Graph.from_edge_index(ends, NODES, NODES), tensors)[0]
    assert found.isinf().any() and "el_softplus_vf(t" not in "".join(texts_of(program))


def test_gates_are_fused(now):
    text = "".join(texts_of(program_and_run(softplus_gate)))
    assert "= el_sigmoid_vf(t" in text and "= el_softplus_vf(t" in text


def program_and_run(function, dtype=torch.float32):
    program = program_of(function, dtype, checked=False)
    results(program, dtype)
    return program


# Sums that the forward keeps ----------------------------------------------------------------------------------------


def mask(sizes, ends, ids, seed, x, e, w, kind):
    return (reduced(torch.relu(x[ends[1]] * x[ends[0]] + x[ends[1]]), ends[1], sizes.destinations),)


def test_a_walk_less():
    program = program_of(softplus_gate)
    assert [walk.end for walk in program.plan.walks()] == [1]
    assert [walk.end for walk in program.backward_plan.walks()] == [0]
    assert "sums of its gradients are kept by the forward" in program.notes


@pytest.mark.parametrize("function", [mask, FUNCTIONS[0]])
def test_gradients_that_are_not_finite(function, now):
    """Those of a node without edges, and behind a mask that is 0 for all of a node's edges, reach nothing."""
    ends, (x, e, w, kind) = inputs()
    x[3] = -x[:1].abs() - 1
    ends[0, ends[1] == 3] = 2
    x[2] = x[2].abs() + 1
    graph = Graph.from_edge_index(ends, NODES, NODES)
    weight = torch.randn(NODES, WIDTH, dtype=x.dtype)
    weight[NODES - 1], weight[3], weight[5] = float("nan"), float("inf"), float("inf")
    program, found = program_of(function, checked=False), []
    x.requires_grad_()
    whole = function(program_sizes(), ends, None, None, x, e, w, kind)[0]
    for out in (program(graph, [x, e, w, kind])[0], whole):
        found.append(torch.autograd.grad(out, x, weight)[0])
    assert torch.equal(found[0].isfinite(), found[1].isfinite())
    finite = found[1].isfinite()
    torch.testing.assert_close(found[0][finite], found[1][finite])


def program_sizes():
    from edgeless.programs import Sizes

    return Sizes(NODES, NODES, EDGES)


# Edges that are passed over -----------------------------------------------------------------------------------------


def test_edges_without_an_extremum_are_passed_over(now):
    walks = program_and_run(largest).backward_plan.walks()
    texts = [v.code.text for walk in walks for v in walk.code._variants.values()]
    assert len(texts) == 2 and all("if (several) {" in text and "el_wins(&" in text for text in texts)
    assert any("_k[s][q]" in text for text in texts)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", ["x", "w", "gradient"])
def test_nothing_is_passed_over_if_a_number_is_not_finite(place, bad, now):
    program = program_of(largest, checked=False)
    found = []
    for mode in ("now", "off"):
        ends, (x, e, w, kind) = inputs()
        weight = torch.ones(NODES, WIDTH, dtype=x.dtype)
        {"x": x, "w": w, "gradient": weight}[place][4, 1] = bad
        with compiled.compiling(mode):
            out = program(Graph.from_edge_index(ends, NODES, NODES), [x.requires_grad_(), e, w.requires_grad_(), kind])
            found.append(torch.autograd.grad(out[0], [x, w], weight))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)
    assert place == "x" or any(b.isnan().any() for b in found[1])


def test_equal_extrema_beside_single_ones(now):
    found = []
    program = program_of(largest, checked=False)
    for mode in ("now", "off"):
        ends, (x, e, w, kind) = inputs()
        ends[:, 100:200] = ends[:, 200:300]  # every edge of these rows twice
        x[:, ::2] = x[:, ::2].round()
        with compiled.compiling(mode):
            out = program(Graph.from_edge_index(ends, NODES, NODES), [x.requires_grad_(), e, w.requires_grad_(), kind])
            found.append(torch.autograd.grad(out[0].sin().sum(), [x, w]))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


# Results by edge that are larger than the caches --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_results_by_edge(dtype, now):
    def function(sizes, ends, ids, seed, x, e):
        return (torch.relu(x[ends[0]] + e), reduced(torch.relu(x[ends[0]] + e), ends[1], sizes.destinations))

    edges, width = 140_001, 64
    draw = torch.Generator().manual_seed(0)
    ends = torch.randint(NODES, (2, edges), generator=draw)
    x = torch.randn(NODES, width, generator=draw, dtype=dtype)
    e = torch.randn(edges, width, generator=draw, dtype=dtype)
    args = arguments(("x", x, Space(NODE, 0)), ("e", e[:7], Space(EDGE, 0)))
    program = Program(function, args, True, 1, ())
    found = [program(Graph.from_edge_index(ends, NODES, NODES), [x, e])[0] for _ in range(2)]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], torch.relu(x[ends[0]] + e))
