"""The transform that reorders nodes: what it carries along, what it refuses, and results on reordered data."""

import functools

import numpy as np
import pytest
import torch
from pyg_cases import assert_close, random_edges
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.transforms import BaseTransform, Compose, ToSparseTensor, ToUndirected
from torch_geometric.typing import WITH_TORCH_SPARSE

import edgeless
import edgeless.pyg.nn as fused
from edgeless.pyg.transforms import Reorder, restore

N, E = 30, 200


@pytest.fixture(params=["community", "degree", "metis", "rcm", "given"])
def transform(request):
    library = {"community": "sknetwork", "metis": "pymetis", "rcm": "scipy"}.get(request.param)
    if library is not None:
        pytest.importorskip(library, reason=f"method {request.param!r} needs it")
    if request.param == "given":
        return Reorder(torch.randperm(N, generator=torch.Generator().manual_seed(4)))
    return Reorder(request.param, num_parts=5 if request.param == "metis" else None)


def data(**more):
    gen = torch.Generator().manual_seed(3)
    return Data(
        x=torch.randn(N, 5, generator=gen, dtype=torch.float64),
        edge_index=random_edges(N - 2, N - 2, E),  # two nodes are isolated
        edge_attr=torch.randn(E, 2, generator=gen, dtype=torch.float64),
        y=torch.arange(N),
        **more,
    )


def hetero():
    gen = torch.Generator().manual_seed(3)
    graph = HeteroData()
    graph["user"].x = torch.randn(12, 5, generator=gen, dtype=torch.float64)
    graph["user"].mask = torch.arange(12) < 5
    graph["item"].num_nodes = 7
    graph["item"].y = torch.arange(7)
    graph["tag"].x = torch.randn(4, 3, generator=gen)  # no edges
    graph["user", "buys", "item"].edge_index = random_edges(12, 7, 40)
    graph["user", "buys", "item"].edge_attr = torch.randn(40, 2, generator=gen)
    graph["user", "buys", "item"].edge_label_index = random_edges(12, 7, 9, seed=1)
    graph["user", "knows", "user"].edge_index = random_edges(12, 12, 30)
    graph["item", "in", "user"].edge_index = torch.empty(2, 0, dtype=torch.int64)
    graph.name = "a shop"
    return graph


def dense(matrix):
    """The matrix with the values of its duplicates added, which a SparseTensor's own to_dense() does not do."""
    if isinstance(matrix, torch.Tensor):
        return matrix.to_dense()
    row, col, value = matrix.coo()
    value = torch.ones(row.numel()) if value is None else value
    return torch.zeros(matrix.sizes()).index_put((row, col), value, accumulate=True)


# What is carried along ------------------------------------------------------------------------------------------------


def test_every_kind_of_attribute(transform):
    before = data(
        train_mask=torch.arange(N) < 9,
        pos=torch.randn(N, 3),
        names=[f"node {i}" for i in range(N)],
        pairs=tuple(range(N)),
        array=np.arange(N),
        sparse=torch.eye(N).to_sparse_csr(),
        sparse_coo=torch.eye(N).to_sparse(),
        edge_weight=torch.randn(E),
        edge_label_index=random_edges(N, N, 11, seed=5),
        face=random_edges(N, N, 6, seed=6),
        train_index=torch.tensor([4, 29, 0], dtype=torch.int32),
        refractive_index=torch.randn(N),
        target=torch.tensor([[1.5]]),
        count=7,
        adj=torch.arange(N * N).view(N, N),
    )
    keys = set(before.keys())
    after = transform(before)
    assert set(before.keys()) == keys  # which stays as it is
    assert set(after.keys()) == keys | {"original_node"}
    old = after.original_node
    assert torch.equal(old.sort().values, torch.arange(N))
    for name in ("edge_index", "edge_label_index", "face", "train_index"):
        assert torch.equal(old[after[name].long()], before[name].long()), name
        assert after[name].dtype == before[name].dtype
    for name in ("x", "y", "train_mask", "pos", "refractive_index"):
        assert torch.equal(after[name], before[name][old]), name
        assert torch.equal(restore(after[name], after), before[name]), name
    assert torch.equal(after.sparse.to_dense(), torch.eye(N)[old]) and after.sparse.layout is torch.sparse_csr
    assert torch.equal(after.sparse_coo.to_dense(), torch.eye(N)[old])
    assert torch.equal(after.adj, before.adj[old][:, old])
    assert after.names == [before.names[i] for i in old.tolist()]
    assert after.pairs == tuple(old.tolist())
    assert np.array_equal(after.array, old.numpy())
    for name in ("edge_attr", "edge_weight", "target", "count"):
        assert after[name] is before[name], name
    assert after.num_nodes == N


def test_as_many_nodes_as_edges(transform):
    before = data(edge_weight=torch.arange(N), level=torch.arange(N))
    before.edge_index, before.edge_attr = before.edge_index[:, :N], before.edge_attr[:N]
    after = transform(before)
    assert torch.equal(after.edge_weight, before.edge_weight)
    assert torch.equal(after.level, after.original_node)
    assert torch.equal(after.original_node[after.edge_index], before.edge_index)


def test_nodes_that_only_num_nodes_knows():
    after = Reorder("degree")(Data(edge_index=torch.tensor([[5], [6]]), num_nodes=9))
    assert after.num_nodes == 9 and after.original_node[after.edge_index].flatten().tolist() == [5, 6]
    with pytest.warns(UserWarning, match="infer 'num_nodes'"):
        after = Reorder("degree")(Data(edge_index=torch.tensor([[5], [6]])))
    assert after.num_nodes == 7  # the isolated ones have the largest ids now


@pytest.mark.parametrize("nodes", [0, 3])
def test_no_edges(transform, nodes):
    if transform.method in ("metis", "community", "rcm", "degree"):
        after = transform(Data(x=torch.randn(nodes, 2), edge_index=torch.empty(2, 0, dtype=torch.int64)))
        assert torch.equal(after.original_node, torch.arange(nodes))
        assert torch.equal(transform(Data(x=torch.randn(nodes, 2))).original_node, torch.arange(nodes))


def test_twice_leads_back_to_the_first(transform):
    before = data()
    after = Reorder("degree")(transform(before))
    assert torch.equal(after.original_node, after.y)
    assert torch.equal(restore(after.x, after), before.x)


def test_there_and_back_is_nothing(transform):
    before, after = data(), transform(data())
    back = Reorder(edgeless.reordering.inverse(after.original_node))(after)
    for name in ("x", "y", "edge_index", "edge_attr"):
        assert torch.equal(back[name], before[name])
    assert torch.equal(back.original_node, torch.arange(N))


def test_edge_index_keeps_what_it_knows(transform):
    edges = ToUndirected()(Data(edge_index=random_edges(N, N, 40), num_nodes=N)).edge_index
    before = data()
    before.edge_index = EdgeIndex(edges, sparse_size=(N, N), is_undirected=True, sort_order="row")
    del before.edge_attr
    after = transform(before)
    assert isinstance(after.edge_index, EdgeIndex)
    assert after.edge_index.sparse_size() == (N, N) and after.edge_index.is_undirected
    assert after.edge_index.sort_order is None
    assert torch.equal(after.original_node[after.edge_index.as_tensor()], edges)
    after.edge_index.validate()


@pytest.mark.parametrize(
    "layout",
    [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, "uncoalesced",
     pytest.param("SparseTensor", marks=pytest.mark.skipif(not WITH_TORCH_SPARSE, reason="needs torch_sparse"))],
    ids=str,
)  # fmt: skip
def test_matrices_are_permuted_with_their_values(transform, layout):
    edges, weight = random_edges(N, N, E), torch.arange(1.0, E + 1)
    before = Data(x=torch.randn(N, 2), y=torch.arange(N))
    if layout == "SparseTensor":
        before = ToSparseTensor(attr="weight")(Data(x=before.x, y=before.y, edge_index=edges, weight=weight))
    else:
        adj_t = torch.sparse_coo_tensor(edges.flip(0), weight, (N, N))
        before.adj_t = adj_t if layout == "uncoalesced" else adj_t.coalesce().to_sparse(layout=layout)
    after = transform(before)
    old = after.original_node
    assert type(after.adj_t) is type(before.adj_t)
    assert torch.equal(dense(after.adj_t), dense(before.adj_t)[old][:, old])
    assert torch.equal(after.x, before.x[old])
    if layout != "SparseTensor":
        assert after.adj_t.layout == before.adj_t.layout
    if layout in (torch.sparse_coo, "uncoalesced"):
        assert after.adj_t.is_coalesced() == before.adj_t.is_coalesced()
    if transform.method in ("community", "metis", "rcm", "degree"):  # the order is that of the same edges elsewhere
        plain = transform(Data(x=before.x, edge_index=edges))
        assert torch.equal(old, plain.original_node)


@pytest.mark.parametrize("method", ["degree", "rcm", "metis", "community"])
def test_node_types_have_permutations_of_their_own(method):
    library = {"community": "sknetwork", "metis": "pymetis", "rcm": "scipy"}.get(method)
    if library is not None:
        pytest.importorskip(library, reason=f"method {method!r} needs it")
    before = hetero()
    after = Reorder(method)(before)
    old = {kind: after[kind].original_node for kind in before.node_types}
    for kind in before.node_types:
        assert torch.equal(old[kind].sort().values, torch.arange(before[kind].num_nodes))
        assert after[kind].num_nodes == before[kind].num_nodes
    for src, name, dst in before.edge_types:
        for key in ("edge_index", "edge_label_index"):
            if key in before[src, name, dst]:
                new, was = after[src, name, dst][key], before[src, name, dst][key]
                assert torch.equal(torch.stack((old[src][new[0]], old[dst][new[1]])), was)
    assert after["user", "buys", "item"].edge_attr is before["user", "buys", "item"].edge_attr
    assert torch.equal(restore(after["user"].x, after, "user"), before["user"].x)
    assert torch.equal(after["user"].mask, before["user"].mask[old["user"]])
    assert torch.equal(after["item"].y, old["item"])
    assert torch.equal(after["tag"].x, before["tag"].x[old["tag"]])
    assert after.name == "a shop"
    again = Reorder({"item": edgeless.reordering.inverse(old["item"])})(after)
    assert torch.equal(again["item"].y, torch.arange(7)) and torch.equal(again["user"].x, after["user"].x)


@pytest.mark.skipif(not WITH_TORCH_SPARSE, reason="needs torch_sparse")
def test_matrices_between_node_types():
    before = ToSparseTensor()(hetero())
    after = Reorder("degree")(before)
    rows, cols = after["item"].original_node, after["user"].original_node
    buys = [graph["user", "buys", "item"].adj_t for graph in (before, after)]
    assert torch.equal(dense(buys[1]), dense(buys[0])[rows][:, cols])


# Results --------------------------------------------------------------------------------------------------------------

LAYERS = {
    "GATv2Conv": functools.partial(fused.GATv2Conv, 5, 4, heads=2, edge_dim=2, residual=True),
    "GATConv": functools.partial(fused.GATConv, 5, 4, heads=2, edge_dim=2),
    "TransformerConv": functools.partial(fused.TransformerConv, 5, 4, heads=2, edge_dim=2, dropout=0.4),
    "AGNNConv": fused.AGNNConv,
    "GCNConv": functools.partial(fused.GCNConv, 5, 4),
    "SAGEConv": functools.partial(fused.SAGEConv, 5, 4, aggr="max"),
    "GraphConv": functools.partial(fused.GraphConv, 5, 4),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("backend", ["fused", "reference"])
def test_layers_and_all_gradients(transform, name, backend):
    before = data(edge_weight=torch.rand(E, dtype=torch.float64))
    after = transform(before)
    if backend == "reference" and name == "TransformerConv":
        pytest.skip("PyG draws the dropout mask of an edge by another rule")
    torch.manual_seed(0)
    layer = LAYERS[name]().double()
    found = []
    for graph in (before, after):
        x = before.x.clone().requires_grad_()
        inputs = [graph.edge_attr] if name in ("GATv2Conv", "GATConv", "TransformerConv") else []
        inputs = [graph.edge_weight] if name in ("GCNConv", "GraphConv") else inputs
        leaves = [*(t.clone().requires_grad_() for t in inputs)]
        torch.manual_seed(1)  # of dropout
        with edgeless.backend(backend):
            out = layer(x[graph.original_node] if "original_node" in graph else x, graph.edge_index, *leaves)
        out = restore(out, graph) if "original_node" in graph else out
        weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        grads = torch.autograd.grad((out * weight).sum(), [x, *leaves, *layer.parameters()], allow_unused=True)
        found.append({"out": out, **{f"grad {i}": g for i, g in enumerate(grads) if g is not None}})
    assert_close(found[1], found[0], 1e-10)


def test_in_a_chain_of_transforms_and_its_name():
    chain = Compose([ToUndirected(), Reorder("degree")])
    assert isinstance(chain.transforms[1], BaseTransform)
    assert repr(chain.transforms[1]) == "Reorder('degree', num_parts=None, seed=0)"
    assert "original_node" in chain(data())
    assert repr(Reorder(torch.arange(3))) == "Reorder(a permutation, num_parts=None, seed=0)"


def test_two_calls_give_the_same(transform):
    assert torch.equal(transform(data()).edge_index, transform(data()).edge_index)


# Errors ---------------------------------------------------------------------------------------------------------------


def test_what_is_refused():
    reorder = Reorder("degree")
    with pytest.raises(TypeError, match="Reorder: data must be a Data or a HeteroData, got Tensor"):
        reorder(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="Reorder: data is a Batch, whose graphs must stay apart"):
        reorder(Batch.from_data_list([data(), data()]))
    with pytest.raises(IndexError, match=r"Reorder: an edge has id 30 at position 0, expected 0 <= id < N = 30"):
        reorder(Data(x=torch.zeros(N, 1), edge_index=torch.tensor([[30], [0]])))
    with pytest.raises(IndexError, match=r"Reorder: data.face has id -1 at position 1"):
        reorder(data(face=torch.tensor([[0, -1]])))
    with pytest.raises(ValueError, match="Reorder: method must be one of"):
        Reorder("best")(data())
    with pytest.raises(ValueError, match=r"Reorder: method must have shape \[N\] = \[30\], got \[3\]"):
        Reorder(torch.arange(3))(data())
    with pytest.raises(TypeError, match="for each of the graph's 3 sets of nodes, got Tensor"):
        Reorder(torch.arange(3))(hetero())
    with pytest.raises(ValueError, match=r"Reorder: method must name sets of nodes of .*, got 'shop'"):
        Reorder({"shop": torch.arange(3)})(hetero())
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="data must say how many nodes it has"):
        reorder(Data())


def test_ids_of_other_things_than_nodes_are_refused():
    class Atoms(Data):
        def __inc__(self, key, value, *args, **kwargs):
            return 3 if key == "ring_index" else super().__inc__(key, value, *args, **kwargs)

    with pytest.raises(ValueError, match=r"Reorder: data.ring_index must hold ids of nodes, but its __inc__ is \[3\]"):
        Reorder("degree")(Atoms(x=torch.zeros(5, 1), ring_index=torch.tensor([1, 2])))


def test_restore_says_what_is_missing():
    with pytest.raises(KeyError, match="restore: data must have original_node, which Reorder writes"):
        restore(torch.zeros(N), data())
    after = Reorder("degree")(hetero())
    with pytest.raises(KeyError, match="restore: node_type must be one of .*'user', 'item', 'tag'.*, got None"):
        restore(torch.zeros(12), after)
    some = Reorder("degree")(data()).subgraph(torch.tensor([0, 1, 2]))
    with pytest.raises((ValueError, IndexError), match="inverse: permutation"):
        restore(torch.zeros(3), some)
