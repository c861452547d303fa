"""The part of a graph that receives: what is left out has no edges, and all edges stay."""

import pickle

import pytest
import torch

from edgeless import Graph
from edgeless.functional import neighbor_reduce, spmm
from edgeless.graph.rows import receiving

SPARSE = torch.tensor([[3, 0, 5, 5, 1, 9, 3], [7, 2, 7, 2, 7, 2, 0]])  # three of ten destinations


@pytest.mark.parametrize("transposed", [False, True])
def test_destinations_without_edges_are_left_out(transposed):
    graph = Graph.from_edge_index(SPARSE, 10, 10)
    if transposed:
        graph = Graph.from_edge_index(SPARSE.flip(0), 10, 10).reverse()
    part, rows = receiving(graph)
    assert rows.tolist() == [0, 2, 7]
    assert (part.num_src, part.num_dst) == (10, 3)
    src, dst = part.edge_index()
    assert torch.equal(torch.stack((src, rows[dst])), SPARSE)
    assert torch.equal(part.csc.indptr, graph.csc.indptr)


@pytest.mark.parametrize("reduce", ["sum", "mean", "min", "max"])
def test_its_rows_are_those_of_the_graph(reduce):
    graph = Graph.from_edge_index(SPARSE, 10, 10)
    part, rows = receiving(graph)
    x = torch.randn(10, 5, dtype=torch.float64)
    call = spmm if reduce in ("sum", "mean") else neighbor_reduce
    assert torch.equal(call(part, x, reduce=reduce), call(graph, x, reduce=reduce)[rows])


def test_it_is_made_once_counted_and_not_pickled():
    graph = Graph.from_edge_index(SPARSE, 10, 10)
    before = graph.memory_bytes()
    part, rows = receiving(graph)
    assert receiving(graph)[0] is part
    assert graph.memory_bytes() == before + part.csr.indptr.nbytes + rows.nbytes  # the indices are shared
    assert graph.memory_bytes_at_most() >= graph.memory_bytes()
    assert "receiving" not in pickle.loads(pickle.dumps(graph))._formats


def test_a_graph_where_most_receive_is_left_as_it_is():
    graph = Graph.from_edge_index(torch.tensor([[0, 1, 2], [0, 1, 2]]), 4, 4)
    assert receiving(graph) == (None, None)
    assert graph.memory_bytes_at_most() > 0


def test_no_edges_and_no_nodes():
    for num_dst in (0, 4):
        part, rows = receiving(Graph.from_edge_index(torch.zeros(2, 0, dtype=torch.int64), 3, num_dst))
        assert (part.num_dst, part.num_edges, rows.numel()) == (0, 0, 0)
