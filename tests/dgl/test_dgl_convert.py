"""From DGL's graphs to the cached handle: the right edges, nothing built twice, never a stale one, no leak."""

from __future__ import annotations

import gc
import pickle

import dgl
import pytest
import torch
from dgl_cases import GRAPHS, IN, LAYERS, assert_close, features, graph_named, hetero, layer_pair, random_graph, run

import edgeless
from edgeless.cache import cache_info, clear_cache
from edgeless.dgl import convert, to_graph

EVERY_LAYER = pytest.mark.parametrize("layer", LAYERS)


def assert_is(handle, graph, etype=None):
    """The handle has the nodes and the edges of the graph, in the order of its edge ids."""
    graph = graph.formats(["coo", "csr", "csc"])  # with fewer of them DGL does not say which edge is which
    src, dst = graph.edges(order="eid", etype=etype)
    assert torch.equal(handle.edge_index(), torch.stack((src, dst)).long())
    stype, _, dtype = graph.to_canonical_etype(etype)
    assert (handle.num_src, handle.num_dst) == (graph.num_src_nodes(stype), graph.num_dst_nodes(dtype))
    degrees = graph.in_degrees(etype=etype)
    assert torch.equal(handle.in_degrees(), degrees.long())
    assert handle.has_zero_in_degree == bool((degrees == 0).any())


# What is built ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("idtype", (torch.int32, torch.int64), ids=str)
@pytest.mark.parametrize("graph", GRAPHS)
def test_every_kind_of_graph(graph, idtype):
    graph = graph_named(graph, idtype)
    handle = to_graph(graph)
    assert_is(handle, graph)
    assert handle.index_dtype == torch.int32
    assert to_graph(graph) is handle


@pytest.mark.parametrize("made", (None, "csr", "csc"))
@pytest.mark.parametrize("formats", (["coo"], ["csr"], ["csc"], ["coo", "csr"], ["csr", "csc"], ["coo", "csr", "csc"]))
@pytest.mark.parametrize("name", ("random", "bipartite", "no_edges"))
def test_formats(name, formats, made):
    """Whatever formats DGL has made, or may make, the edges are the same."""
    graph = graph_named(name)
    if made:
        graph.adj_tensors(made)
    graph = graph.formats(formats)
    assert_is(to_graph(graph), graph)
    assert to_graph(graph) is to_graph(graph)


@EVERY_LAYER
@pytest.mark.parametrize("formats", ("coo", "csr", "csc"))
def test_layers_run_on_a_single_format(layer, formats):
    """The stock layers need two or more of them for a forward and backward pass."""
    graph = random_graph()
    theirs, ours = layer_pair(layer)
    feat = features(graph)
    assert_close(run(ours, graph.formats(formats), feat), run(theirs, graph, feat))


def test_relations_of_a_heterograph():
    graph = hetero()
    for etype in graph.canonical_etypes:
        assert_is(to_graph(graph, etype), graph, etype)
        assert_is(to_graph(graph[etype]), graph, etype)
        assert to_graph(graph, etype[1]) is to_graph(graph, etype)


def test_wrong_arguments():
    with pytest.raises(TypeError, match="to_graph: graph must be a DGLGraph, got Tensor"):
        to_graph(torch.ones(2, 2))
    with pytest.raises(dgl.DGLError, match="edge type"):
        to_graph(hetero())
    with pytest.raises(dgl.DGLError, match="owns"):
        to_graph(hetero(), "owns")


@EVERY_LAYER
def test_a_handle_in_place_of_the_graph(layer):
    graph = graph_named("bipartite")
    theirs, ours = layer_pair(layer, (IN, IN))
    feat = features(graph)
    want = run(theirs, graph, feat, get_attention=True)
    handle = to_graph(graph)
    with edgeless.backend("fused"):
        assert_close(run(ours, handle, feat, get_attention=True), want)
    with edgeless.backend("reference"):
        assert_close(run(ours, handle, feat, get_attention=True), want)
    strict = layer_pair(layer, (IN, IN), allow_zero_in_degree=False)[1]
    with pytest.raises(dgl.DGLError, match="0-in-degree"):
        strict(to_graph(graph_named("empty_relation")), features(graph_named("empty_relation")))


# Built once ------------------------------------------------------------------------------------------------------


def builds(monkeypatch):
    """Counts the graphs that are built."""
    built = []
    build = edgeless.Graph.from_dgl.__func__
    monkeypatch.setattr(
        edgeless.Graph, "from_dgl", classmethod(lambda cls, *args: built.append(args) or build(cls, *args))
    )
    return built


def _in_local_scope(graph, call):
    with graph.local_scope():
        graph.srcdata["h"] = torch.ones(graph.num_src_nodes(), 1)
        call(graph)


CALLS = {
    "again": lambda graph, call: call(graph),
    "in a local scope": _in_local_scope,
    "as a local variable": lambda graph, call: call(graph.local_var()),
}


@EVERY_LAYER
@pytest.mark.parametrize("again", CALLS)
@pytest.mark.parametrize("graph", ("random", "block", "bipartite"))
def test_second_call_builds_nothing(layer, graph, again, monkeypatch):
    graph = graph_named(graph)
    _, ours = layer_pair(layer, (IN, IN))
    feat = features(graph, pair=True)
    ours(graph, feat)
    built = builds(monkeypatch)
    CALLS[again](graph, lambda g: ours(g, feat))
    assert built == []


@EVERY_LAYER
def test_forward_after_the_first_asks_dgl_for_no_degrees_and_no_arrays(layer, monkeypatch):
    graph = dgl.add_self_loop(random_graph())
    _, ours = layer_pair(layer, allow_zero_in_degree=False)
    feat = features(graph)
    ours(graph, feat)
    for name in ("in_degrees", "adj_tensors", "edges", "local_scope", "update_all", "apply_edges"):
        monkeypatch.setattr(dgl.DGLGraph, name, None)
    ours(graph, feat).sum().backward()


@pytest.mark.parametrize("block", (False, True))
def test_slices_of_a_heterograph_build_nothing_after_the_first(block, monkeypatch):
    graph = hetero()
    if block:
        seeds = {"user": torch.arange(4), "game": torch.arange(3)}
        graph = dgl.to_block(dgl.in_subgraph(graph, seeds), seeds)
    first = {etype: to_graph(graph[etype]) for etype in graph.canonical_etypes}
    built = builds(monkeypatch)
    for _ in range(3):
        assert all(to_graph(graph[etype]) is handle for etype, handle in first.items())
    assert built == []


def test_hetero_graph_conv_builds_each_relation_once(monkeypatch):
    graph = hetero()
    layers = {e: layer_pair("GATv2Conv", (IN, IN))[1] for e in graph.etypes}
    conv = dgl.nn.HeteroGraphConv(layers)
    feats = {n: torch.randn(graph.num_nodes(n), IN) for n in graph.ntypes}
    built = builds(monkeypatch)
    for _ in range(3):
        conv(graph, feats)
    assert len(built) == 3


def test_relations_of_one_graph_do_not_mix():
    edges = (torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0]))
    graph = dgl.heterograph({("u", "a", "u"): edges, ("u", "b", "u"): edges[::-1], ("u", "c", "u"): edges})
    for _ in range(2):
        for etype in "abc":
            assert_is(to_graph(graph, etype), graph, etype)
            assert_is(to_graph(graph[etype]), graph, etype)


# Never stale -----------------------------------------------------------------------------------------------------

IN_PLACE = {
    "add_edges": lambda g: g.add_edges([3, 4], [5, 6]),
    "remove_edges": lambda g: g.remove_edges([0, 7, 9]),
    "add_nodes": lambda g: g.add_nodes(3),
    "remove_nodes": lambda g: g.remove_nodes([2, 5]),
    "remove and add as many": lambda g: (g.remove_edges([0, 1]), g.add_edges([1, 2], [2, 1])),
}

NEW_GRAPH = {
    "add_self_loop": lambda g: dgl.add_self_loop(g),
    "remove_self_loop": lambda g: dgl.remove_self_loop(g),
    "add_edges": lambda g: dgl.add_edges(g, [3, 4], [5, 6]),
    "reverse": lambda g: dgl.reverse(g),
    "shuffle": lambda g: dgl.graph(tuple(ids.flip(0) for ids in g.edges())),
    "int": lambda g: g.int(),
    "long": lambda g: g.int().long(),
    "to": lambda g: g.to("cpu"),
    "clone": lambda g: g.clone(),
    "formats": lambda g: g.formats("csr"),
    "reorder": lambda g: dgl.reorder_graph(g, "custom", permute_config={"nodes_perm": list(range(39, -1, -1))}),
    "edge_subgraph": lambda g: dgl.edge_subgraph(g, torch.arange(0, 300, 2), relabel_nodes=False),
    "pickle": lambda g: pickle.loads(pickle.dumps(g)),
}


def assert_layers_agree(graph):
    for layer in LAYERS:
        theirs, ours = layer_pair(layer)
        feat = features(graph)
        stock_graph = graph.formats(["coo", "csr", "csc"])
        assert_close(run(ours, graph, feat), run(theirs, stock_graph, feat))


@pytest.mark.parametrize("change", IN_PLACE)
def test_never_stale_after_a_change_in_place(change):
    graph = random_graph()
    assert_layers_agree(graph)
    IN_PLACE[change](graph)
    assert_is(to_graph(graph), graph)
    assert_layers_agree(graph)


@pytest.mark.parametrize("change", NEW_GRAPH)
def test_never_stale_in_a_graph_made_from_another(change):
    graph = random_graph()
    before = to_graph(graph)
    other = NEW_GRAPH[change](graph)
    assert_is(to_graph(other), other)
    assert_layers_agree(other)
    assert to_graph(graph) is before


@pytest.mark.parametrize("change", IN_PLACE)
@pytest.mark.parametrize("etype", ("follows", "plays"))
def test_slices_are_never_stale(change, etype):
    if "nodes" in change:
        changes = {
            "add_nodes": lambda g: g.add_nodes(2, ntype="user"),
            "remove_nodes": lambda g: g.remove_nodes([1, 4], ntype="user"),
        }
    else:
        changes = {
            "add_edges": lambda g: g.add_edges([3, 4], [5, 1], etype=etype),
            "remove_edges": lambda g: g.remove_edges([0, 7, 9], etype=etype),
            "remove and add as many": lambda g: (
                g.remove_edges([0, 1], etype=etype),
                g.add_edges([1, 2], [2, 1], etype=etype),
            ),
        }
    graph = hetero()
    for _ in range(20):  # so often that an allocator hands out the same addresses again
        assert_is(to_graph(graph[etype]), graph, etype)
        changes[change](graph)
        if graph.num_edges(etype) < 10 or graph.num_nodes("user") < 6:
            graph = hetero()
        assert_is(to_graph(graph[etype]), graph, etype)


def test_reused_addresses_are_not_taken_for_the_old_graph():
    for seed in range(200):
        src, dst = torch.randint(5, (2, 8), generator=torch.Generator().manual_seed(seed))
        assert_is(to_graph(graph := dgl.graph((src, dst), num_nodes=5)), graph)
        relation = dgl.heterograph({("u", "r", "v"): (src, dst)}, {"u": 5, "v": 5})["r"]
        assert_is(to_graph(relation), relation)


def test_arrays_that_identify_a_relation_keep_their_addresses():
    """No other tensor can be where they are, as long as they are compared with."""
    tensors = [torch.arange(1000) for _ in range(3)]
    addresses = {t.data_ptr() for t in tensors}
    arrays = convert._Arrays(tensors)
    del tensors
    others = [torch.arange(1000) for _ in range(100)]
    assert addresses.isdisjoint(t.data_ptr() for t in others)
    assert arrays != convert._Arrays(others[:3]) and arrays == arrays


# No leak ---------------------------------------------------------------------------------------------------------


def test_handles_die_with_their_graphs():
    graph, relations = random_graph(), hetero()
    ours = layer_pair("GATConv")[1]
    ours(graph, features(graph)).sum().backward()
    for etype in relations.etypes:
        to_graph(relations[etype])
    assert cache_info().graphs >= 4
    del graph, relations
    gc.collect()
    assert cache_info().graphs == 0 and cache_info().bytes == 0


@pytest.mark.parametrize("kind", ("homogeneous", "heterogeneous", "changed in place"))
def test_a_thousand_sampled_graphs_leave_nothing(kind):
    gc.collect()
    before = len(convert._relations)  # of graphs that DGL 2 still holds from an earlier test
    graph, relations = random_graph(), hetero()
    sampler = dgl.dataloading.NeighborSampler([3])
    ours = layer_pair("GATv2Conv", (IN, IN))[1]
    most = 0
    for step in range(1000):
        if kind == "homogeneous":
            _, _, (block,) = sampler.sample_blocks(graph, torch.tensor([step % 40]))
        elif kind == "heterogeneous":
            _, _, (block,) = sampler.sample_blocks(relations, {"user": torch.tensor([step % 9])})
            block = block["follows"]
        else:
            relations.add_edges([step % 9], [step % 6], etype="plays")
            block = relations["plays"]
        ours(block, features(block, pair=True))
        most = max(most, cache_info().graphs + len(convert._relations))
    assert most <= 6 + before
    del block, relations, graph
    gc.collect()
    assert cache_info().graphs == 0 and len(convert._relations) == before


@EVERY_LAYER
def test_a_used_layer_and_its_graph_pickle_as_if_unused(layer):
    graph = hetero()
    for etype in graph.etypes:
        graph.adj_tensors("csc", etype)  # DGL pickles the formats that it has made
    ours = layer_pair(layer, (IN, IN))[1]
    before = pickle.dumps(graph), pickle.dumps(ours)
    ours(graph["plays"], features(graph["plays"])).sum().backward()
    ours.zero_grad()
    assert (len(pickle.dumps(graph)), len(pickle.dumps(ours))) == tuple(map(len, before))


def test_clearing_the_cache_builds_again(monkeypatch):
    graph, relations = random_graph(), hetero()
    handles = [to_graph(graph), to_graph(relations["plays"])]
    clear_cache()
    built = builds(monkeypatch)
    again = [to_graph(graph), to_graph(relations["plays"])]
    assert len(built) == 2 and all(a is not b for a, b in zip(handles, again, strict=True))
    assert_is(again[1], relations, "plays")


def test_cache_switched_off(monkeypatch):
    monkeypatch.setenv("EDGELESS_CACHE", "0")
    graph, relations = random_graph(), hetero()
    assert to_graph(graph) is not to_graph(graph)
    assert to_graph(relations["plays"]) is not to_graph(relations["plays"])
    assert_is(to_graph(relations["plays"]), relations, "plays")
    assert cache_info().graphs == 0
