"""Second derivatives of the kernels of attention as programs: equal to the reference's, without an edge tensor."""

from __future__ import annotations

import pytest
import torch

from edgeless import Graph, functional, reference
from edgeless.programs import attention
from edgeless.programs.run import compiled

NODES, SOURCES, EDGES, HEADS, WIDTH = 30, 23, 90, 3, 4


@pytest.fixture(autouse=True)
def always(monkeypatch):
    monkeypatch.setenv("EDGELESS_GENERATE", "on")
    attention.PROGRAMS.clear()


def graph_of(bipartite: bool, edges=EDGES, nodes=NODES):
    torch.manual_seed(0)
    sources = SOURCES if bipartite else nodes
    ends = torch.stack([torch.randint(sources, (edges,)), torch.randint(nodes - 1, (edges,))])
    return Graph.from_edge_index(ends, sources, nodes)


def rows(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def call_of(score: str, graph, edge: bool, options: dict):
    """The function of a score, with the inputs whose gradients are taken."""
    own, other = rows(graph.num_dst, HEADS, WIDTH), rows(graph.num_src, HEADS, WIDTH)
    more = [rows(graph.num_edges, 2), rows(*((HEADS, 2) if score == "gat" else (HEADS, WIDTH, 2)))] if edge else []
    inputs = {"gatv2": [other, own, rows(HEADS, WIDTH)], "dot": [own, other, rows(graph.num_src, HEADS, WIDTH)]}.get(
        score, [other, rows(graph.num_src, HEADS), rows(graph.num_dst, HEADS)]
    )

    def run(module, *given):
        plain, edges = given[: len(inputs)], given[len(inputs) :]
        named = dict(zip(("edge_attr", "edge_proj"), edges, strict=False))
        return getattr(module, f"{score}_attention")(graph, *plain, **named, **options)

    return run, [*inputs, *more]


def both(function, inputs):
    """First and second derivatives."""
    out = function(*inputs)
    outs = [o for o in (out if isinstance(out, tuple) else (out,)) if o.requires_grad]
    first = torch.autograd.grad(sum(o.square().sum() for o in outs), inputs, create_graph=True)
    return [*first, *torch.autograd.grad(sum(f.square().sum() for f in first), inputs)]


def agree(ours, theirs, tolerance=1e-9):
    for a, b in zip(ours, theirs, strict=True):
        assert float((a.detach() - b.detach()).norm() / b.detach().norm().clamp(min=1e-3)) < tolerance


OPTIONS = {
    "plain": {},
    "weights": {"return_weights": "softmax"},
    "dropout": {"dropout": 0.4, "seed": 5},
    "dropped weights": {"dropout": 0.4, "seed": 5, "return_weights": "dropped"},
}


@pytest.mark.parametrize("edge", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("bipartite", [False, True])
@pytest.mark.parametrize("score", attention.SCORES)
def test_second_derivatives(score, bipartite, options, edge):
    run, inputs = call_of(score, graph_of(bipartite), edge, OPTIONS[options])
    agree(both(lambda *given: run(functional, *given), inputs), both(lambda *given: run(reference, *given), inputs))
    programs = list(attention.PROGRAMS._entries.values())
    assert programs and all(program.derivatives and not isinstance(program, str) for program in programs)
    assert not any(isinstance(d, str) for program in programs for d in program.derivatives.values())


@pytest.mark.parametrize("score", attention.SCORES)
def test_gradgradcheck(score):
    run, inputs = call_of(score, graph_of(False), True, {})
    assert torch.autograd.gradgradcheck(lambda *given: run(functional, *given), inputs, fast_mode=True)
    assert len(attention.PROGRAMS) == 1


def test_few_edges_take_the_plain_form(monkeypatch):
    monkeypatch.setenv("EDGELESS_GENERATE", "auto")
    run, inputs = call_of("gatv2", graph_of(False), False, {})
    agree(both(lambda *given: run(functional, *given), inputs), both(lambda *given: run(reference, *given), inputs))
    assert not len(attention.PROGRAMS)


def test_third_derivatives():
    run, inputs = call_of("gatv2", graph_of(False), False, {})
    found = []
    for module in (functional, reference):
        total = run(module, *inputs).square().sum()
        for _ in range(2):
            grads = torch.autograd.grad(total, inputs, create_graph=True)
            total = sum(grad.square().sum() for grad in grads)
        found.append(torch.autograd.grad(total, inputs))
    agree(*found)


def largest_allocation(call) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    return max(e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]")


def test_no_edge_tensor(monkeypatch):
    edges = 30_000
    run, inputs = call_of("gatv2", graph_of(False, edges), False, {})
    with compiled.compiling("now"):
        both(lambda *given: run(functional, *given), inputs)
        program = largest_allocation(lambda: both(lambda *given: run(functional, *given), inputs))
    monkeypatch.setenv("EDGELESS_GENERATE", "off")
    plain = largest_allocation(lambda: both(lambda *given: run(functional, *given), inputs))
    assert program < edges * HEADS * WIDTH * 8 <= plain
