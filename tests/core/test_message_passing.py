"""functional.message_passing against plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import edgeless
from edgeless import Graph, NotFusedError, functional
from edgeless.functional.message_passing import PROGRAMS


@pytest.fixture
def given():
    g = torch.Generator().manual_seed(0)
    edge_index = torch.stack([torch.randint(n, (80,), generator=g) for n in (23, 11)])
    rows = [torch.randn(n, 4, generator=g, dtype=torch.float64).requires_grad_() for n in (23, 11, 80)]
    return Graph.from_edge_index(edge_index, 23, 11), *rows


def both(graph, message, wrt, **options):
    """Asserts that the fused and the plain call agree, with gradients."""
    results = []
    for backend in ("fused", "reference"):
        with edgeless.backend(backend):
            out = functional.message_passing(graph, message, **options)
        results.append([out, *torch.autograd.grad(out.sin().sum(), wrt, allow_unused=True)])
    for a, b in zip(*results, strict=True):
        assert (a is None) == (b is None) and (a is None or float((a - b).abs().max()) < 1e-10)
    return results[0][0]


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_values(given, reduce):
    graph, x, y, e = given
    weight = torch.rand(4, 4, dtype=torch.float64).requires_grad_()
    out = both(
        graph, lambda x, y, e: torch.relu(x @ weight + y) * e, [x, y, e, weight], src=x, dst=y, edge=e, reduce=reduce
    )
    assert out.shape == (11, 4)


@pytest.mark.parametrize("heads", [None, 2])
def test_scores_and_values(given, heads):
    graph, x, y, e = given
    lin = nn.Linear(12, heads or 1).double()

    def message(x, y, e):
        score = lin(torch.cat([x, y, e], dim=-1))
        return (score.squeeze(-1), x) if heads is None else (score, x.view(-1, 2, 2))

    out = both(graph, message, [x, y, e, *lin.parameters()], src=x, dst=y, edge=e)
    assert out.shape == ((11, 4) if heads is None else (11, 2, 2))


def test_several_rows_and_a_module(given):
    graph, x, y, e = given
    both(graph, lambda a, b, w: (a + b) * w, [x, e], src=(x, x), edge=e)
    both(graph, lambda w: w.exp(), [e], edge=e)


def test_what_it_closes_over_may_change(given):
    graph, x, _, _ = given
    factor, weight = 2.0, torch.ones(4, dtype=torch.float64)

    def call():
        return functional.message_passing(graph, message, src=x)

    def message(x):
        return x * factor * weight

    first = call()
    factor = 4.0
    assert torch.allclose(call(), 2 * first)
    weight = weight * 3
    traces = PROGRAMS.traces
    assert torch.allclose(call(), 6 * first) and PROGRAMS.traces == traces


def test_what_cannot_be_traced_runs_whole(given):
    graph, x, _, _ = given
    out = functional.message_passing(graph, lambda x: x.cumsum(0), src=x)
    assert out.shape == (11, 4)
    with edgeless.backend("fused"), pytest.raises(NotFusedError, match="cumsum goes over the edges"):
        functional.message_passing(graph, lambda x: x.cumsum(0), src=x)


def test_errors(given):
    graph, x, y, _ = given
    with pytest.raises(TypeError, match="message_passing: message must be a function, got int"):
        functional.message_passing(graph, 3, src=x)
    with pytest.raises(ValueError, match=r"message_passing: src must have shape \[23, ...\], got \[11, 4\]"):
        functional.message_passing(graph, torch.relu, src=y)
    with pytest.raises(TypeError, match="message_passing: edge must be a Tensor or several, got str"):
        functional.message_passing(graph, torch.relu, edge=["a"])
    with pytest.raises(ValueError, match="message_passing: reduce must be one of"):
        functional.message_passing(graph, torch.relu, src=x, reduce="median")
    empty = Graph.from_edge_index(torch.empty(2, 0, dtype=torch.long), 3, 2)
    assert functional.message_passing(empty, torch.relu, src=torch.rand(3, 4)).abs().sum() == 0


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_destinations_without_edges_get_zeros(reduce):
    x = torch.rand(4, 3, dtype=torch.float64).requires_grad_()
    out = both(Graph.from_edge_index(torch.tensor([[0, 1, 3], [2, 0, 2]]), 4, 5), torch.exp, [x], src=x, reduce=reduce)
    assert not out[[1, 3, 4]].any() and bool(out[[0, 2]].all())


def test_complex_rows_run_whole():
    graph = Graph.from_edge_index(torch.tensor([[0, 1, 3], [2, 0, 2]]), 4, 4)
    x = torch.rand(4, 3, dtype=torch.complex64)
    out = functional.message_passing(graph, lambda x: x * 2, src=x)
    torch.testing.assert_close(out, torch.zeros_like(x).index_add(0, torch.tensor([2, 0, 2]), 2 * x[[0, 1, 3]]))
    with edgeless.backend("fused"), pytest.raises(NotFusedError, match="a tensor is not plain"):
        functional.message_passing(graph, lambda x: x * 2, src=x)


def test_a_norm_over_one_edge_is_an_error():
    graph = Graph.from_edge_index(torch.tensor([[0], [1]]), 2, 2)
    norm = nn.BatchNorm1d(4, track_running_stats=False).double()
    x = torch.randn(2, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        functional.message_passing(graph, norm, src=x)
