"""Graphs from what PyG users hold: EdgeIndex, torch_sparse.SparseTensor, torch.sparse COO and CSR."""

import pytest
import torch

from edgeless import Graph

pytestmark = pytest.mark.filterwarnings("ignore:Sparse .* (beta|implicitly)")

EDGES = torch.tensor([[0, 4, 1, 0, 2, 4], [1, 1, 3, 1, 2, 0]])  # with a multi-edge and a self loop


# torch.sparse --------------------------------------------------------------------------------------------------------


def test_uncoalesced_coo_keeps_multi_edges():
    adj_t = torch.sparse_coo_tensor(EDGES.flip(0), torch.ones(6), (7, 5))
    graph = Graph.from_torch_sparse(adj_t)
    assert (graph.num_src, graph.num_dst) == (5, 7)
    assert torch.equal(graph.edge_index(), EDGES)


def test_coalesced_coo_in_stored_order():
    adj_t = torch.sparse_coo_tensor(EDGES.flip(0), torch.arange(6.0), (7, 5)).coalesce()
    graph = Graph.from_torch_sparse(adj_t)
    assert torch.equal(graph.edge_index(), adj_t.indices().flip(0))
    assert graph.num_edges == 5


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_csr(index_dtype):
    crow, col = torch.tensor([0, 2, 2, 3], dtype=index_dtype), torch.tensor([1, 3, 0], dtype=index_dtype)
    graph = Graph.from_torch_sparse(torch.sparse_csr_tensor(crow, col, torch.ones(3), (3, 4)))
    assert (graph.num_src, graph.num_dst) == (4, 3)
    assert graph.csr.edge_ids is None
    assert graph.edge_index().tolist() == [[1, 3, 0], [0, 0, 2]]


def test_values_with_features():
    adj_t = torch.sparse_coo_tensor(EDGES.flip(0), torch.ones(6, 3), (7, 5, 3))
    assert torch.equal(Graph.from_torch_sparse(adj_t).edge_index(), EDGES)


def test_sparse_tensors_that_are_refused():
    cases = [
        (EDGES, ValueError, "adj_t must be sparse COO or CSR, got layout torch.strided"),
        (torch.eye(2).to_sparse_csc(), ValueError, "adj_t must be sparse COO or CSR, got layout torch.sparse_csc"),
        (torch.ones(2, 2, 2).to_sparse(), ValueError, r"adj_t must be a matrix, got shape \[2, 2, 2\]"),
        ("adj", TypeError, "adj_t must be a sparse Tensor, got str"),
    ]
    for adj_t, error, message in cases:
        with pytest.raises(error, match=message):
            Graph.from_torch_sparse(adj_t)


# torch_sparse --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(7, 5), (4, 5)])
def test_sparse_tensor(sizes):
    torch_sparse = pytest.importorskip("torch_sparse", reason="needs torch_sparse")
    adj_t = torch_sparse.SparseTensor(row=EDGES[1], col=EDGES[0], sparse_sizes=sizes)
    graph = Graph.from_sparse_tensor(adj_t)
    row, col, _ = adj_t.coo()
    assert (graph.num_dst, graph.num_src) == sizes
    assert torch.equal(graph.edge_index(), torch.stack((col, row)))  # torch_sparse has sorted them by row
    assert graph.csr.edge_ids is None


# EdgeIndex -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def edge_index_class():
    pyg = pytest.importorskip("torch_geometric", reason="needs PyG")
    return pyg.EdgeIndex


@pytest.mark.parametrize("sort_order", [None, "row", "col"])
@pytest.mark.parametrize("fill_cache", [False, True])
@pytest.mark.parametrize("build", [Graph.from_pyg, Graph.from_edge_index])
def test_edge_index(edge_index_class, sort_order, fill_cache, build):
    edges = EDGES
    if sort_order is not None:
        edges = EDGES[:, EDGES[0 if sort_order == "row" else 1].argsort(stable=True)]
    wrapped = edge_index_class(edges, sparse_size=(5, 4), sort_order=sort_order)
    if fill_cache and sort_order is not None:
        wrapped.fill_cache_()
    graph = build(wrapped) if build == Graph.from_pyg else build(wrapped, 5, 4)
    assert (graph.num_src, graph.num_dst) == (5, 4)
    assert type(graph.edge_index()) is type(graph.csr.indices) is torch.Tensor
    assert torch.equal(graph.edge_index(), edges)
    if sort_order == "row":  # the permutation that EdgeIndex knows is where our CSR finds the edges
        (colptr, row), perm = wrapped.get_csc()
        assert torch.equal(graph.csr.edge_ids.long(), perm)
        assert torch.equal(graph.csr.indices.long(), row)
        assert torch.equal(graph.csr.indptr.long(), colptr)


def test_edge_index_edited_in_place(edge_index_class):
    wrapped = edge_index_class(torch.tensor([[0, 1, 2], [1, 1, 2]]), sort_order="row", sparse_size=(3, 3)).fill_cache_()
    wrapped[0, 0] = 2  # PyG keeps the row pointers it has cached
    assert Graph.from_pyg(wrapped).edge_index().tolist() == [[2, 1, 2], [1, 1, 2]]


def test_edge_index_declares_symmetry_and_sizes(edge_index_class):
    edges = torch.tensor([[0, 1], [1, 0]])
    assert Graph.from_pyg(edge_index_class(edges, is_undirected=True)).is_symmetric
    plain = Graph.from_pyg(edge_index_class(edges))
    assert plain.is_symmetric is None
    assert (plain.num_src, plain.num_dst) == (2, 2)
