"""The cache on DGL's graph index: replaced by every change of structure, kept by everything else."""

import pytest
import torch

import edgeless
from edgeless import Graph
from edgeless.cache import graph_from_object

dgl = pytest.importorskip("dgl", reason="needs DGL")


@pytest.fixture(autouse=True)
def empty_cache():
    edgeless.clear_cache()
    yield
    edgeless.clear_cache()


def lookup(g, etype=None):
    return graph_from_object(g._graph, g.get_etype_id(etype), lambda: Graph.from_dgl(g, etype))


def new_graph():
    return dgl.graph((torch.tensor([0, 1, 1, 2]), torch.tensor([1, 1, 2, 0])))


CHANGES = {
    "add_edges": lambda g: g.add_edges([0, 2], [2, 2]),
    "add_nodes": lambda g: g.add_nodes(2),
    "remove_edges": lambda g: g.remove_edges([1]),
    "remove_nodes": lambda g: g.remove_nodes([0]),
}
DERIVED = {
    "add_self_loop": lambda g: dgl.add_self_loop(g),
    "remove_self_loop": lambda g: dgl.remove_self_loop(g),
    "reverse": lambda g: dgl.reverse(g),
    "int": lambda g: g.int(),
    "formats": lambda g: g.formats("csr"),
    "subgraph": lambda g: dgl.node_subgraph(g, [1, 2]),
}


def assert_current(g):
    graph = lookup(g)
    src, dst = g.formats("coo").edges(order="eid")
    assert (graph.num_src, graph.num_dst) == (g.num_nodes(), g.num_nodes())
    assert torch.equal(graph.edge_index(), torch.stack((src, dst)).long())


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_changed_graph_is_a_new_one(change):
    g = new_graph()
    before = lookup(g)
    change(g)
    assert lookup(g) is not before
    assert_current(g)
    assert edgeless.cache_info().graphs == 1  # the old index died


@pytest.mark.parametrize("derive", DERIVED.values(), ids=DERIVED.keys())
def test_a_derived_graph_is_another_one(derive):
    g = new_graph()
    before = lookup(g)
    assert_current(derive(g))
    assert lookup(g) is before


def test_features_and_scopes_leave_it():
    g = new_graph()
    graph = lookup(g)
    g.ndata["h"] = torch.ones(3, 2)
    with g.local_scope():
        g.edata["w"] = torch.ones(4)
        assert lookup(g) is graph
    assert lookup(g.local_var()) is graph


def test_edge_types_are_told_apart():
    g = dgl.heterograph({("u", "r", "v"): ([0, 1], [1, 0]), ("u", "s", "v"): ([0], [1])})
    assert lookup(g, "r") is lookup(g, "r") is not lookup(g, "s")
    assert lookup(g, "s").num_edges == 1


def test_it_dies_with_the_dgl_graph():
    g = new_graph()
    lookup(g)
    del g
    assert edgeless.cache_info().graphs == 0


def test_minibatches_leave_nothing():
    for seed in range(100):
        edges = torch.randint(500, (2, 2000), generator=torch.Generator().manual_seed(seed))
        g = dgl.graph(tuple(edges), num_nodes=500)
        lookup(g).csc  # noqa: B018
        assert edgeless.cache_info().graphs == 1
        del g
