"""The longest rows of a graph, once they are known: nothing changes but that nobody looks for segments to merge."""

import pytest
import torch
from attention_cases import SCORES
from devices import star
from test_room import call
from torch.profiler import ProfilerActivity, profile

from edgeless import Graph, functional

pytestmark = pytest.mark.cuda
NAMES = [*SCORES, "none", "both", "min", "max"]


def flat_graph():
    """Both directions have rows of 0 to 40 edges, too few to be cut, and more edges than fit one segment."""
    gen = torch.Generator().manual_seed(0)
    return Graph.from_edge_index(torch.randint(0, 2000, (2, 40_000), generator=gen), 2000, 2000).to("cuda")


def never_asks(graph):
    graph._max_degrees.times_asked = -(10**9)
    return graph


def knows(graph):
    graph._max_degrees.known = [int(graph.in_degrees().max()), int(graph.out_degrees().max())]
    return graph


def step(name, graph, x):
    out = call(name, graph, x)
    return [out, *torch.autograd.grad(out, [x], torch.cos(out.detach()))]


def kernels(run):
    run()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    return [event.name for event in found.events() if event.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.parametrize("make", [flat_graph, lambda: star(20_000).to("cuda")], ids=["flat", "star"])
@pytest.mark.parametrize("name", NAMES)
def test_results_do_not_depend_on_it(name, make):
    graph = make()
    x = torch.randn(graph.num_src, 24, device="cuda", requires_grad=True)
    expected = step(name, never_asks(make()), x)
    found = step(name, knows(make()), x)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", NAMES)
def test_merges_only_where_a_row_may_be_cut(name):
    x = torch.randn(2000, 24, device="cuda", requires_grad=True)
    unknown, known = never_asks(flat_graph()), knows(flat_graph())
    before, after = (kernels(lambda g=g: step(name, g, x)) for g in (unknown, known))
    assert any("merge" in k for k in before)
    assert not any("merge" in k for k in after)
    assert len(after) < len(before)


def test_a_gpu_is_asked_the_fourth_time_and_nobody_waits():
    graph, x = flat_graph(), torch.randn(2000, 24, device="cuda", requires_grad=True)
    graph.csc  # noqa: B018  built on first use
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step("none", graph, x)
        assert graph._max_degrees.coming is None and graph.cached_max_degrees() == []
        assert graph._max_degrees.coming is not None
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert graph.cached_max_degrees() == [int(graph.in_degrees().max()), int(graph.out_degrees().max())]
    assert graph.cached_max_in_degree() == graph.max_in_degree == graph.cached_max_degrees()[0]


def test_the_other_direction_is_asked_for_when_it_is_there():
    graph = flat_graph()
    with torch.no_grad():
        for _ in range(5):
            functional.spmm(graph, torch.randn(2000, 8, device="cuda"))
    torch.cuda.synchronize()
    assert graph.cached_max_degrees() == [graph.max_in_degree] and not graph.has_csc
    graph.csc  # noqa: B018  built on first use
    graph.cached_max_degrees()
    torch.cuda.synchronize()
    assert graph.cached_max_degrees() == [graph.max_in_degree, int(graph.out_degrees().max())]


def test_no_nodes():
    graph = Graph.from_edge_index(torch.zeros(2, 0, dtype=torch.int64), 0, 0).to("cuda")
    for _ in range(5):
        graph.cached_max_degrees()
    torch.cuda.synchronize()
    assert graph.cached_max_degrees() == [0]


def test_is_not_asked_for_within_a_capture():
    graph, x = flat_graph(), torch.randn(2000, 24, device="cuda")
    stream = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        functional.spmm(graph, x)
        graph._max_degrees.times_asked = 10
        capture = torch.cuda.CUDAGraph()
        with torch.cuda.graph(capture, stream=stream):
            out = functional.spmm(graph, x)
    assert graph._max_degrees.coming is None and graph._max_degrees.known == []
    capture.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(out, functional.spmm(graph, x))
