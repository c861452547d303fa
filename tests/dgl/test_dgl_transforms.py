"""The transform that reorders nodes: what it carries along, what it refuses, and results on reordered graphs."""

import functools

import dgl
import pytest
import torch
from dgl_cases import assert_close, graph_named, hetero

import edgeless
import edgeless.dgl.nn as fused
from edgeless.dgl.transforms import Reorder, restore

N, E = 30, 200
LIBRARIES = {"community": "sknetwork", "metis": "pymetis", "rcm": "scipy"}


@pytest.fixture(params=["community", "degree", "metis", "rcm", "given"])
def transform(request):
    if request.param in LIBRARIES:
        pytest.importorskip(LIBRARIES[request.param], reason=f"method {request.param!r} needs it")
    if request.param == "given":
        return Reorder(torch.randperm(N, generator=torch.Generator().manual_seed(4)))
    return Reorder(request.param, num_parts=5 if request.param == "metis" else None)


def graph(idtype=torch.int64):
    gen = torch.Generator().manual_seed(3)
    ends = torch.randint(N - 2, (2, E), generator=gen, dtype=idtype)  # two nodes are isolated
    g = dgl.graph((ends[0], ends[1]), num_nodes=N)
    g.ndata["x"] = torch.randn(N, 5, generator=gen, dtype=torch.float64)
    g.ndata["y"] = torch.arange(N)
    g.ndata["mask"] = torch.arange(N) < 9
    g.edata["w"] = torch.rand(E, generator=gen, dtype=torch.float64)
    g.edata["id"] = torch.arange(E)
    return g


def assert_same_edges(before, after):
    """Of every type, by their ids, between the same nodes."""
    for etype in before.canonical_etypes:
        new, was = (g.formats(["coo", "csr", "csc"]).edges(order="eid", etype=etype) for g in (after, before))
        for kind, ids, old in ((etype[0], new[0], was[0]), (etype[2], new[1], was[1])):
            assert ids.dtype == old.dtype
            assert torch.equal(after.nodes[kind].data["original_node"][ids.long()], old.long())


@pytest.mark.parametrize("idtype", [torch.int64, torch.int32])
def test_data_of_nodes_and_edges(transform, idtype):
    before = graph(idtype)
    after = transform(before)
    assert "original_node" not in before.ndata
    assert set(after.ndata) == {"x", "y", "mask", "original_node"} and set(after.edata) == {"w", "id"}
    old = after.ndata["original_node"]
    assert torch.equal(old.sort().values, torch.arange(N))
    assert after.idtype == idtype and after.is_homogeneous and after.num_nodes() == N
    assert_same_edges(before, after)
    for name in ("x", "y", "mask"):
        assert torch.equal(after.ndata[name], before.ndata[name][old])
        assert torch.equal(restore(after.ndata[name], after), before.ndata[name])
    for name in ("w", "id"):
        assert torch.equal(after.edata[name], before.edata[name])


@pytest.mark.parametrize("formats", ["coo", "csr", "csc", ["csr", "csc"]])
def test_formats_stay(transform, formats):
    before = graph()
    after = transform(before.formats(formats))
    allowed = [name for group in after.formats().values() for name in group]
    assert sorted(allowed) == sorted([formats] if isinstance(formats, str) else formats)
    if set(allowed) & {"coo", "csc"}:
        assert_same_edges(before, after)


def test_node_types_have_permutations_of_their_own():
    before = hetero()
    before.nodes["game"].data["y"] = torch.arange(6)
    before.nodes["user"].data["x"] = torch.randn(9, 2)
    before.edges["plays"].data["w"] = torch.randn(20)
    for method in ("degree", *(name for name, library in LIBRARIES.items() if _have(library))):
        after = Reorder(method)(before)
        assert after.ntypes == before.ntypes and after.canonical_etypes == before.canonical_etypes
        assert_same_edges(before, after)
        assert torch.equal(after.edges["plays"].data["w"], before.edges["plays"].data["w"])
        assert torch.equal(restore(after.nodes["game"].data["y"], after, "game"), torch.arange(6))
        assert torch.equal(restore(after.nodes["user"].data["x"], after, "user"), before.nodes["user"].data["x"])
    back = Reorder({"user": edgeless.reordering.inverse(after.nodes["user"].data["original_node"])})(after)
    assert torch.equal(back.nodes["user"].data["x"], before.nodes["user"].data["x"])
    assert torch.equal(back.nodes["game"].data["y"], after.nodes["game"].data["y"])


def _have(library):
    try:
        __import__(library)
    except ImportError:
        return False
    return True


@pytest.mark.parametrize("nodes", [0, 4])
def test_no_edges(nodes):
    after = Reorder("degree")(dgl.graph(([], []), num_nodes=nodes))
    assert torch.equal(after.ndata["original_node"], torch.arange(nodes))


def test_twice_leads_back_to_the_first(transform):
    before = graph()
    after = Reorder("degree")(transform(before))
    assert torch.equal(after.ndata["original_node"], after.ndata["y"])
    assert torch.equal(restore(after.ndata["x"], after), before.ndata["x"])
    assert torch.equal(transform(before).ndata["y"], transform(graph()).ndata["y"])


LAYERS = {
    "GATv2Conv": functools.partial(fused.GATv2Conv, 5, 4, num_heads=2, attn_drop=0.4, allow_zero_in_degree=True),
    "GATConv": functools.partial(fused.GATConv, 5, 4, num_heads=2, residual=True, allow_zero_in_degree=True),
    "DotGatConv": functools.partial(fused.DotGatConv, 5, 4, num_heads=2, allow_zero_in_degree=True),
    "AGNNConv": functools.partial(fused.AGNNConv, allow_zero_in_degree=True),
    "GraphConv": functools.partial(fused.GraphConv, 5, 4, allow_zero_in_degree=True),
    "SAGEConv": functools.partial(fused.SAGEConv, 5, 4, "pool"),
    "GINConv": functools.partial(fused.GINConv, None, "max"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_and_all_gradients(transform, name):
    before = graph()
    after = transform(before)
    torch.manual_seed(0)
    layer = LAYERS[name]().double()
    found = []
    for g in (before, after):
        x = before.ndata["x"].clone().requires_grad_()
        weight = before.edata["w"].clone().requires_grad_()
        more = {"edge_weight": weight} if name in ("GATConv", "GraphConv") else {}
        leaves = [x, *more.values(), *layer.parameters()]
        torch.manual_seed(1)  # of dropout
        with edgeless.backend("fused"):
            out = layer(g, x[g.ndata["original_node"]] if g is after else x, **more)
        out = restore(out, g) if g is after else out
        grad = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        grads = torch.autograd.grad(out, leaves, grad, allow_unused=True)
        found.append({"out": out, **{f"grad {i}": g for i, g in enumerate(grads) if g is not None}})
    assert_close(found[1], found[0])


def test_in_a_chain_of_transforms_and_its_name():
    chain = dgl.transforms.Compose([dgl.AddSelfLoop(), Reorder("degree")])
    assert chain(graph()).num_edges() >= E
    assert isinstance(Reorder(), dgl.transforms.BaseTransform)
    assert repr(Reorder("degree")) == "Reorder('degree', num_parts=None, seed=0)"


def test_what_is_refused():
    reorder = Reorder("degree")
    with pytest.raises(TypeError, match="Reorder: g must be a DGLGraph, got list"):
        reorder([])
    with pytest.raises(dgl.DGLError, match="Reorder: g is a block, whose destinations must stay"):
        reorder(graph_named("block"))
    with pytest.raises(dgl.DGLError, match="Reorder: g is a batch, whose graphs must stay apart"):
        reorder(dgl.batch([graph(), graph()]))
    with pytest.raises(ValueError, match="Reorder: method must be one of"):
        Reorder("best")(graph())
    with pytest.raises(ValueError, match=r"Reorder: method must have shape \[N\] = \[30\], got \[3\]"):
        Reorder(torch.arange(3))(graph())
    with pytest.raises(TypeError, match="for each of the graph's 2 sets of nodes, got Tensor"):
        Reorder(torch.arange(3))(hetero())
    with pytest.raises(ValueError, match=r"Reorder: method must name sets of nodes of .*, got 'shop'"):
        Reorder({"shop": torch.arange(3)})(hetero())


def test_restore_says_what_is_missing():
    with pytest.raises(KeyError, match="restore: g must have the node data original_node, which Reorder writes"):
        restore(torch.zeros(N), graph())
    after = Reorder("degree")(hetero())
    with pytest.raises(dgl.DGLError, match="restore: ntype must be one of .*, got None"):
        restore(torch.zeros(9), after)
    with pytest.raises((ValueError, IndexError), match="inverse: permutation"):
        some = Reorder("degree")(graph()).subgraph(torch.tensor([0, 1, 2]))
        restore(torch.zeros(3), some)
