"""The cache on PyG's graph objects: EdgeIndex, torch_sparse.SparseTensor, torch.sparse."""

import pytest
import torch

import edgeless
from edgeless import Graph
from edgeless.cache import graph_from_edge_index, graph_from_object

pytestmark = pytest.mark.filterwarnings("ignore:Sparse .* (beta|implicitly)")


@pytest.fixture(autouse=True)
def empty_cache():
    edgeless.clear_cache()
    yield
    edgeless.clear_cache()


# EdgeIndex -----------------------------------------------------------------------------------------------------------


EDITS = {
    "setitem": lambda e: e.__setitem__((0, 0), 3),
    "view": lambda e: e[:, 1:].__setitem__((0, 0), 3),
    "add_": lambda e: e.add_(1),
    "inner tensor": lambda e: e.as_tensor().__setitem__((0, 0), 3),
    "shared copy": lambda e: e._shallow_copy().__setitem__((0, 0), 3),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
def test_edge_index(edit):
    # Its in-place operations reach the inner tensor below the version counter: only contents tell.
    pyg = pytest.importorskip("torch_geometric", reason="needs PyG")
    edge_index = pyg.EdgeIndex(torch.tensor([[0, 1, 2], [1, 1, 2]]), sort_order="row", sparse_size=(4, 4)).fill_cache_()
    graph = graph_from_edge_index(edge_index, 4, 4)
    assert graph_from_edge_index(edge_index, 4, 4) is graph
    edit(edge_index)
    edited = graph_from_edge_index(edge_index, 4, 4)
    assert torch.equal(edited.edge_index(), edge_index.as_tensor())
    assert not torch.equal(edited.edge_index(), graph.edge_index())
    del edge_index
    assert edgeless.cache_info().graphs == 0


# Sparse matrices -----------------------------------------------------------------------------------------------------


def test_sparse_tensor_on_its_storage():
    torch_sparse = pytest.importorskip("torch_sparse", reason="needs torch_sparse")
    adj_t = torch_sparse.SparseTensor(row=torch.tensor([0, 1, 2]), col=torch.tensor([2, 0, 1]), sparse_sizes=(3, 3))

    def lookup(adj_t):
        row, col, _ = adj_t.coo()
        return graph_from_object(adj_t.storage, 0, lambda: Graph.from_sparse_tensor(adj_t), tensors=(row, col))

    graph = lookup(adj_t)
    assert lookup(adj_t) is graph
    adj_t.storage.col()[0] = 1
    assert lookup(adj_t).edge_index().tolist() == [[1, 0, 1], [0, 1, 2]]
    del adj_t
    assert edgeless.cache_info().graphs == 0


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_torch_sparse(layout):
    edges = torch.tensor([[0, 1, 2], [2, 0, 1]])
    adj_t = torch.sparse_coo_tensor(edges, torch.ones(3), (3, 3)).coalesce()
    adj_t = adj_t if layout == torch.sparse_coo else adj_t.to_sparse_csr()

    def indices(adj_t):
        return (adj_t._indices(),) if layout == torch.sparse_coo else (adj_t.crow_indices(), adj_t.col_indices())

    def lookup(adj_t):
        return graph_from_object(adj_t, 0, lambda: Graph.from_torch_sparse(adj_t), tensors=indices(adj_t))

    graph = lookup(adj_t)
    assert lookup(adj_t) is graph
    indices(adj_t)[-1].view(-1)[-1] = 2
    assert lookup(adj_t).edge_index().tolist() == [[2, 0, 2], [0, 1, 2]]
    del adj_t
    assert edgeless.cache_info().graphs == 0
