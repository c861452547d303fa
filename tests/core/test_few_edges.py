"""Graphs of few edges on the CPU, which are made without ops: the same as those that the ops make."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from edgeless import _C, Graph
from edgeless.graph.adjacency import replace_self_loops
from edgeless.graph.handle import power_of_degrees
from edgeless.graph.rows import MOST, receiving

MANY = 1 << 14  # edges or nodes from which on there are ops


def draw(num_edges, num_src, num_dst, seed=0, dtype=torch.int64):
    generator = torch.Generator().manual_seed(seed)
    src, dst = (torch.randint(max(n, 1), (num_edges,), generator=generator) for n in (num_src, num_dst))
    return torch.stack((src, dst)).to(dtype)


def by_ops(edge_index, num_src, num_dst, self_loops=False):
    src, dst, kept = *edge_index, None
    if self_loops:
        src, dst, kept = replace_self_loops(src, dst, min(num_src, num_dst))
    return (*torch.ops.edgeless.coo_to_csr(dst, src, num_dst, num_src, True), kept)


@pytest.mark.parametrize("self_loops", [False, True])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("sizes", [(0, 5, 5), (60, 29, 29), (300, 7, 40), (300, 40, 7), (1, 1, 1), (5000, 300, 300)])
def test_it_is_the_graph_that_the_ops_make(sizes, dtype, self_loops):
    edge_index = draw(*sizes, dtype=dtype)
    assert _C.graph_of_few_edges(*edge_index, *sizes[1:], self_loops) is not None
    graph = Graph.from_edge_index(edge_index, *sizes[1:], self_loops=self_loops)
    *arrays, kept = by_ops(edge_index, *sizes[1:], self_loops)
    for mine, theirs in zip(graph.csr, arrays, strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    assert (graph._kept is None) == (kept is None)
    assert kept is None or torch.equal(graph._kept, kept)


@pytest.mark.parametrize("sizes", [(60, 29, 29), (20, 40, 60), (0, 5, 5), (0, 0, 0), (300, 7, 3)])
def test_what_was_counted_is_what_the_ops_count(sizes):
    edge_index = draw(*sizes)
    graph = Graph.from_edge_index(edge_index, *sizes[1:])
    degrees = torch.bincount(edge_index[1], minlength=sizes[2])
    assert graph._num_receiving == int((degrees > 0).sum())
    assert graph.has_zero_in_degree == bool((degrees == 0).any())
    assert graph.max_in_degree == max(degrees.tolist(), default=0)
    counted = receiving(graph)
    graph._num_receiving = None
    looked = receiving(graph)
    assert (counted[0] is None) == (looked[0] is None) == (int((degrees > 0).sum()) > MOST * sizes[2])


def test_columns_of_another_tensor_and_rows_far_apart_are_read_in_place():
    edges = draw(60, 29, 29).t().contiguous()
    wide = torch.full((2, 120), -1)
    wide[:, ::2] = edges.t()
    for edge_index in (edges.t(), wide[:, ::2]):
        assert not edge_index.is_contiguous()
        graph = Graph.from_edge_index(edge_index, 29, 29)
        for mine, theirs in zip(graph.csr, by_ops(edges.t(), 29, 29)[:3], strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("bad", [-1, 29, 2**40])
@pytest.mark.parametrize("side", [0, 1])
def test_an_id_out_of_range_is_an_error_that_names_it(side, bad):
    edge_index = draw(60, 29, 29)
    edge_index[side, 17] = bad
    assert _C.graph_of_few_edges(*edge_index, 29, 29, False) is None
    name = ("num_src", "num_dst")[side]
    with pytest.raises(IndexError, match=rf"edge_index\[{side}\] has id {bad} at position 17, expected .* {name} = 29"):
        Graph.from_edge_index(edge_index, 29, 29)


@pytest.mark.parametrize("sizes", [(MANY, 29, 29), (60, MANY + 1, 29), (60, 29, MANY + 1)])
def test_many_edges_or_nodes_are_for_the_ops(sizes):
    edge_index = draw(*sizes)
    assert _C.graph_of_few_edges(*edge_index, *sizes[1:], False) is None
    assert _C.graph_of_few_edges(*edge_index[:, : MANY - 1], *(min(n, MANY) for n in (29, 29)), False) is not None or (
        max(sizes[1:]) > MANY
    )
    graph = Graph.from_edge_index(edge_index, *sizes[1:])
    assert graph._num_receiving is None
    for mine, theirs in zip(graph.csr, by_ops(edge_index, *sizes[1:])[:3], strict=True):
        assert torch.equal(mine, theirs)


def test_who_follows_the_ops_sees_them():
    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    names, edge_index = [], draw(60, 29, 29)
    with Names():
        graph = Graph.from_edge_index(edge_index, 29, 29)
        graph.degree_scale("dst", -1.0, torch.float32)
    assert "edgeless.coo_to_csr.default" in names and "aten.pow.Tensor_Scalar" in names
    traced = torch.jit.trace(lambda edges: Graph.from_edge_index(edges, 29, 29).csr.indices, edge_index)
    other = draw(60, 29, 29, seed=1)
    assert torch.equal(traced(other), Graph.from_edge_index(other, 29, 29).csr.indices)  # not the first one's


@pytest.mark.parametrize("isolated", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("power", [-1.0, -0.5])
@pytest.mark.parametrize("side", ["dst", "src"])
def test_powers_of_degrees_have_the_bits_of_torchs(side, power, dtype, isolated):
    edge_index = draw(3000, 200, 150)
    edge_index[:, edge_index[1] == 3] = 5
    graph = Graph.from_edge_index(edge_index, 200, 150)
    _ = graph.csc
    degrees = graph.in_degrees() if side == "dst" else graph.out_degrees()
    found = graph.degree_scale(side, power, dtype, isolated)
    expected = degrees.to(dtype).pow(power).masked_fill(degrees == 0, isolated)
    assert found.dtype == dtype and torch.equal(found, expected)
    rows = graph.csr.indptr if side == "dst" else graph.csc.indptr
    assert torch.equal(_C.powers_of_few_degrees(rows, power, isolated, dtype == torch.float64), expected)
    assert _C.powers_of_few_degrees(rows, 2.0, isolated, False) is None
    assert torch.equal(
        power_of_degrees(graph, side, 2.0, dtype, isolated)[degrees > 0], degrees[degrees > 0].to(dtype) ** 2
    )


def test_a_graph_made_in_inference_mode_can_be_trained_on():
    x = torch.randn(29, 8, requires_grad=True)
    with torch.inference_mode():
        graph = Graph.from_edge_index(draw(60, 29, 29), 29, 29, self_loops=True)
        graph.degree_scale("dst", -1.0, torch.float32)
    from edgeless.functional import spmm

    spmm(graph, x, reduce="mean").sum().backward()
    assert x.grad.abs().sum() > 0


def test_the_short_look_at_inputs_takes_plain_tensors_and_nothing_else():
    x, edges = torch.randn(29, 8), draw(60, 29, 29)
    look = _C.are_rows_and_edges
    assert look(x, x, edges) and look(x, None, edges) and look(torch.nn.Parameter(x), x.double(), edges.int())

    class Own(torch.Tensor):
        pass

    for other in (x.int(), x[0], x.to_sparse(), x.as_subclass(Own), "x", torch.randn(29, 8, device="meta")):
        assert not look(other, other, edges)
        assert other is x or not look(x, other, edges) or getattr(other, "is_meta", False)
    for other in (
        edges.short(),
        edges[0],
        edges.t(),
        edges.to_sparse(),
        edges.as_subclass(Own),
        None,
        edges.to("meta"),
    ):
        assert not look(x, x, other)
    with torch.inference_mode():
        made = torch.randn(29, 8)
    assert not look(made, made, edges)  # which cannot be saved for a backward
    with torch.no_grad():
        assert look(made, made, edges)


def test_the_setting_of_the_cache_is_read_when_it_is_asked_for(monkeypatch):
    for setting in ("0", "verify", "1"):
        monkeypatch.setenv("EDGELESS_CACHE", setting)
        assert _C.cache_setting() == setting
    monkeypatch.delenv("EDGELESS_CACHE")
    assert _C.cache_setting() == ""
