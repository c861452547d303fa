"""Every key of the cache and of a graph's store, field by field: two users of one object that differ in that field.

The fields are read from the keys that the code makes while these users run. A field that no two users differ in fails
the test, and so does a user who gets what another one's key has kept.
"""

import ast
import importlib
from itertools import combinations
from pathlib import Path

import pytest
import torch
from torch import Tensor

import edgeless
from edgeless import Graph, TypedGraph, cache
from edgeless.graph.formats import Keeper
from edgeless.graph.graph_cache import GraphCache

EDGES = torch.tensor([[0, 1, 2, 3, 3, 0, 0], [1, 2, 2, 0, 3, 2, 2]])
TYPES = torch.tensor([0, 1, 1, 0, 1, 0, 1])


def installed(*modules):
    try:
        return [importlib.import_module(module) for module in modules]
    except ImportError as error:
        pytest.skip(str(error))


# Users: for every site that makes a key, functions that share their objects -------------------------------------------


def edge_lists():
    edges = EDGES.clone()
    plain = {"num_src": 4, "num_dst": 4, "flow": "source_to_target", "self_loops": False}
    for change in ({}, {"num_src": 5}, {"num_dst": 5}, {"flow": "target_to_source"}, {"self_loops": True}):
        yield lambda given={**plain, **change}: cache.graph_from_edge_index(edges, **given)


def sparse_matrices():
    (convert,) = installed("edgeless.pyg.convert")
    matrix = torch.sparse_coo_tensor(EDGES.unique(dim=1), torch.ones(6), (4, 4)).coalesce()
    for loops in (False, True):
        yield lambda loops=loops: convert.SparseMatrix.graph(matrix, 4, 4, "source_to_target", loops)


def sparse_tensors():
    sparse, convert = installed("torch_sparse", "edgeless.pyg.convert")
    adj_t = sparse.SparseTensor(row=EDGES[1], col=EDGES[0], sparse_sizes=(4, 4))
    for loops in (False, True):
        yield lambda loops=loops: convert.SparseStorage.graph(adj_t, 4, 4, "source_to_target", loops)


class Layer:
    """What the look-up of a typed graph asks of a layer."""

    def __init__(self, flow="source_to_target", num_relations=2):
        self.flow, self.num_relations = flow, num_relations


def typed_edge_lists():
    (relations,) = installed("edgeless.pyg.relations")
    edges, others, types = EDGES.clone(), EDGES.flip(1), TYPES.clone()
    plain = {"edge_index": edges, "num_src": 4, "num_dst": 4, "layer": Layer()}
    changes = ({"edge_index": others}, {"num_src": 5}, {"num_dst": 5})
    layers = ({"layer": Layer(flow="target_to_source")}, {"layer": Layer(num_relations=3)})
    for change in ({}, *changes, *layers):
        yield lambda given={**plain, **change}: relations.typed_graph(edge_type=types, **given)


def embeddings():
    (relations,) = installed("edgeless.pyg.relations")
    graphs = [TypedGraph(Graph.from_edge_index(edges, 4, 4), TYPES, 2) for edges in (EDGES, EDGES.flip(1))]
    ids = torch.tensor([3, 1, 0, 2])
    for graph, given, num_ids in ((0, ids, 4), (1, ids, 4), (0, ids, 5), (0, None, 4), (0, None, 5)):
        yield lambda graph=graphs[graph], of=(given, num_ids): relations.embedding_graph(graph, *of)


def joined_edge_lists():
    (hetero,) = installed("edgeless.pyg.hetero")
    one, two, three = EDGES.clone(), EDGES.flip(0), EDGES.flip(1)
    names = [("a", "r", "a"), ("a", "s", "a"), ("b", "s", "a")]
    numbers, sizes = {names[0]: 0, names[1]: 1, names[2]: 1}, {"a": 4, "b": 4}
    plain = {"edges": (one, two), "names": names[:2], "src": sizes, "dst": sizes, "types": numbers, "num_types": 2}
    changes = (
        {"edges": (one, three)}, {"names": [names[0], names[2]]}, {"src": {"a": 5, "b": 4}}, {"dst": {"a": 5, "b": 4}},
        {"types": {names[0]: 1, names[1]: 0, names[2]: 0}}, {"num_types": 3},
    )  # fmt: skip

    def look_up(edges, names, src, dst, types, num_types):
        return hetero.joined_graph("test", dict(zip(names, edges, strict=True)), src, dst, types, num_types)

    for change in ({}, *changes):
        yield lambda given={**plain, **change}: look_up(**given)


def dgl_relations():
    dgl, convert = installed("dgl", "edgeless.dgl.convert")
    graph = dgl.heterograph(
        {("a", "r", "a"): (EDGES[0], EDGES[1]), ("a", "s", "a"): (EDGES[1], EDGES[0])}, num_nodes_dict={"a": 4}
    )
    for relation in ("r", "s"):
        yield lambda relation=relation: convert.to_graph(graph, relation)


def dgl_types():
    dgl, relations = installed("dgl", "edgeless.dgl.nn._relations")
    handles = [Graph.from_edge_index(edges, 4, 4) for edges in (EDGES, EDGES.flip(1))]
    types = TYPES.clone()
    for handle, num_types in ((0, 2), (1, 2), (0, 3)):
        yield lambda handle=handles[handle], num_types=num_types: relations.typed_graph(handle, types, num_types)


def dgl_node_types():
    (node_types,) = installed("edgeless.dgl.nn._node_types")
    types = torch.tensor([1, 0, 1, 1])
    for num_types, count in ((2, 4), (3, 4), (2, 3)):
        yield lambda of=(num_types, count): node_types.nodes_by_type(types, *of)


def dgl_joined_relations():
    dgl, layers = installed("dgl", "edgeless.dgl.nn.heterographconv")
    keys = [("a", "r", "a"), ("a", "s", "a")]
    graph = dgl.heterograph({keys[0]: (EDGES[0], EDGES[1]), keys[1]: (EDGES[1], EDGES[0])}, num_nodes_dict={"a": 4})
    for relations in (keys, keys[::-1]):
        yield lambda relations=relations: layers._joined(graph, relations, {"a": 4}, {"a": 4})


def norms_of_dgl():
    (layers,) = installed("edgeless.dgl.nn.heterographconv")
    graph = TypedGraph(Graph.from_edge_index(EDGES, 4, 4), TYPES, 2)
    for norm, dtype in (("both", torch.float32), ("left", torch.float32), ("both", torch.float64)):
        yield lambda norm=norm, dtype=dtype: layers._normalization(graph, layers.GraphConv(2, 2, norm=norm), dtype)[0]


def scales():
    graph = Graph.from_edge_index(EDGES, 4, 5)
    plain = {"side": "dst", "power": -0.5, "dtype": torch.float32, "isolated": 1.0}
    for change in ({}, {"side": "src"}, {"power": -1.0}, {"dtype": torch.float64}, {"isolated": 0.0}):
        yield lambda given={**plain, **change}: graph.degree_scale(**given)


def means():
    graph = TypedGraph(Graph.from_edge_index(EDGES, 4, 4), TYPES, 2)
    for dtype in (torch.float32, torch.float64):
        yield lambda dtype=dtype: graph.mean_weight(dtype)


def orders():
    relational = importlib.import_module("edgeless.functional.relational")
    number = torch.arange(2000)  # 900 pairs of sources and types, 300 of destinations and types
    edges = torch.stack((number % 450, number % 150))
    graph = TypedGraph(Graph.from_edge_index(edges, 450, 150), number // 450 % 2, 2)
    for in_width, out_width, fused in ((20, 4, False), (12, 4, False), (20, 6, False), (20, 4, True)):
        weight = torch.zeros(2, in_width, out_width)
        yield lambda weight=weight, fused=fused: relational.transforms(graph, weight, fused)


def constants():
    (rgat,) = installed("edgeless.pyg.nn.rgat_conv")
    graph = Graph.from_edge_index(EDGES, 4, 4)
    for heads, dtype in ((2, torch.float32), (3, torch.float32), (2, torch.float64)):
        yield lambda of=(heads, dtype): rgat._constants(graph, *of)


def tiles():
    if not torch.cuda.is_available():
        pytest.skip("tiles are CUDA's")
    graph = TypedGraph(Graph.from_edge_index(EDGES.cuda(), 4, 4), TYPES.cuda(), 2)
    for by_dst, mean in ((True, torch.float32), (False, torch.float32), (True, torch.float64), (True, None)):
        yield lambda by_dst=by_dst, mean=mean: graph.tiled(by_dst, mean)


def every_pairs():
    (every_pair,) = installed("edgeless.pyg.every_pair")
    edges, others, types = EDGES.clone(), EDGES.flip(1).clone(), TYPES.clone()
    plain = {"edge_index": edges, "flow": "source_to_target", "num_nodes": 4, "num_types": 2}
    changes = {"edge_index": others}, {"flow": "target_to_source"}, {"num_nodes": 5}, {"num_types": 3}
    for change in ({}, *changes):
        yield lambda given={**plain, **change}: every_pair.graph_of_every_pair(edge_type=types, **given)


def blocks():
    from edgeless.programs.run.blocks import blocks_of

    graph = Graph.from_edge_index(torch.tensor([[0, 0, 0, 0, 1, 2, 3], [0, 1, 2, 3, 3, 3, 3]]), 4, 4)
    for receiving, edges in ((True, 2), (False, 2), (True, 5)):  # where to cut, which is what is kept
        yield lambda receiving=receiving, edges=edges: blocks_of(graph, receiving, edges)[1]


def sizes():
    from edgeless.programs.run.blocks import sizes_of

    graph = Graph.from_edge_index(torch.tensor([[0, 1, 2], [0, 1, 1]]), 3, 2)
    for receiving in (1, 0):
        yield lambda receiving=receiving: sizes_of(graph, receiving)


def walk_arrays():
    from edgeless.programs.run import compiled

    graph = Graph.from_edge_index(torch.tensor([[0, 0, 0, 0, 1, 2, 3], [0, 1, 2, 3, 3, 3, 3]]), 4, 4)
    for receives in (True, False):
        yield lambda receives=receives: compiled.walk_arrays(graph, receives).tensors


# File and function that make the keys -> their users.
USERS = {
    "graph/weak_cache.py:graph_of_edge_index": edge_lists,
    "pyg/convert.py:SparseMatrix.graph": sparse_matrices,
    "pyg/convert.py:SparseStorage.graph": sparse_tensors,
    "pyg/relations.py:typed_graph": typed_edge_lists,
    "pyg/relations.py:embedding_graph": embeddings,
    "pyg/hetero.py:joined_graph": joined_edge_lists,
    "pyg/nn/rgat_conv.py:_constants": constants,
    "pyg/every_pair.py:graph_of_every_pair": every_pairs,
    "programs/run/blocks.py:blocks_of": blocks,
    "programs/run/blocks.py:sizes_of": sizes,
    "programs/run/compiled.py:walk_arrays": walk_arrays,
    "dgl/convert.py:_cached": dgl_relations,
    "dgl/nn/_relations.py:typed_graph": dgl_types,
    "dgl/nn/_node_types.py:nodes_by_type": dgl_node_types,
    "dgl/nn/heterographconv.py:_joined": dgl_joined_relations,
    "dgl/nn/heterographconv.py:_normalization": norms_of_dgl,
    "graph/handle.py:Graph.degree_scale": scales,
    "functional/relational.py:transforms": orders,
    "graph/typed.py:TypedGraph.mean_weight": means,
    "graph/typed.py:TypedGraph.tiled": tiles,
}
# Functions that pass on the key of their caller, or whose key has no fields.
WITHOUT_FIELDS = {
    "cache.py:graph_from_object": "adds a name to its caller's key",
    "graph/typed.py:typed_graph_for": "adds a name and the other object to its caller's key",
    "pyg/nn/aggr.py:_graph_of": "the number of rows is the last number of ptr, or the graph cannot be built",
    "choices/engines.py:_keep": "the name of an engine",
    "programs/front/ops.py:without_edges": "a name and whether the receiving end is meant",
    "choices/engines.py:_prepare": "the name of an engine",
    "tools/cli/plan_layers.py:_Counts": "the keys of the typed graph that it stands for",
}


# Reading keys ------------------------------------------------------------------------------------------------------


def flat(key):
    """The fields of a key, those of a tuple within it one by one."""
    if type(key).__name__ == "_Objects":
        return [key._ids, *key._facts]
    if not isinstance(key, tuple) or key[:1] == ("joined",):
        return [key]
    return [field for part in key for field in flat(part)]


@pytest.fixture
def keys(monkeypatch):
    """The keys that were looked up: (what they hang on, fields)."""
    found = []

    def record(cls, name, place):
        plain = getattr(cls, name)

        def recording(self, *args, **kwargs):
            found.append((id(args[0]) if cls is GraphCache else id(self), flat(args[place])))
            return plain(self, *args, **kwargs)

        monkeypatch.setattr(cls, name, recording)

    record(GraphCache, "_find", 1)
    record(Keeper, "format", 0)
    edgeless.clear_cache()
    yield found
    edgeless.clear_cache()


def fields_never_alone(keys):
    """The places of fields, of keys of one kind, in which no two keys of one object differ alone."""
    num = max(len(fields) for _, fields in keys)
    differ = set()
    for (owner, one), (other_owner, other) in combinations(keys, 2):
        if owner == other_owner and len(one) == len(other):
            # A WeakIdRef knows == alone: its != would compare the tensors themselves.
            places = [place for place, (a, b) in enumerate(zip(one, other, strict=True)) if not a == b]  # noqa: SIM201
            if len(places) == 1:
                differ.update(places)
    return {place: keys[-1][1][place] for place in range(num) if place not in differ}


def described(value):
    """What a graph, a tensor or an answer is, for a comparison."""
    if isinstance(value, Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, TypedGraph):
        return described(value.graph), described(value.edge_type), value.num_types
    if isinstance(value, Graph):
        return value.num_src, value.num_dst, described(value.edge_index())
    if isinstance(value, (tuple, list)):
        return [described(part) for part in value]
    return value


# Tests -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "site", [pytest.param(s, marks=pytest.mark.cuda) if u is tiles else s for s, u in USERS.items()]
)
def test_users_of_one_object_that_differ_in_one_field(site, keys):
    alone = []
    for number in range(len(list(USERS[site]()))):
        edgeless.clear_cache()
        alone.append(described(list(USERS[site]())[number]()))
    edgeless.clear_cache()
    users = list(USERS[site]())
    keys.clear()
    assert [described(user()) for user in users] == alone
    assert [described(user()) for user in reversed(users)] == alone[::-1]
    assert alone[0] not in alone[1:], "these users show no difference"
    first = keys[0][1]
    kind = [(owner, fields) for owner, fields in keys if len(fields) == len(first) and fields[:1] == first[:1]]
    never = fields_never_alone(kind)
    never.pop(0, None)  # the name of the kind
    assert not never, f"no two users differ in these fields of {kind[0][1]} alone"


def makers():
    """Every function of edgeless that makes a key for the cache or for the store of a graph: file and name."""
    root = Path(edgeless.__file__).parent
    calls = {"graph_for": 1, "graph_from_object": 1, "typed_graph_for": 2, "format": 0}

    def within(node, name, file):
        for child in ast.iter_child_nodes(node):
            inner = name
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                inner = [*name, child.name]
            called = getattr(child, "func", None)
            place = calls.get(getattr(called, "attr", getattr(called, "id", None)))
            if isinstance(child, ast.Call) and place is not None and place < len(child.args):
                key = child.args[place]
                constant = isinstance(key, ast.Constant) or (isinstance(key, ast.Name) and key.id.isupper())
                texts = (ast.Constant, ast.JoinedStr, ast.Subscript)
                of = getattr(called, "value", None)
                text = isinstance(of, texts) or getattr(of, "id", "") == "text"
                if not constant and not text:
                    yield f"{file}:{'.'.join(inner[:2] if inner[:1] and inner[0][0].isupper() else inner[:1])}"
            yield from within(child, inner, file)

    for room in ("", "pyg", "dgl"):
        for file in sorted((root / room).rglob("*.py")):
            short = file.relative_to(root).as_posix()
            if room or not short.startswith(("pyg/", "dgl/")):
                yield from within(ast.parse(file.read_text()), [], short)


def test_every_function_that_makes_a_key_has_users_here():
    assert set(makers()) == {*USERS, *WITHOUT_FIELDS}
