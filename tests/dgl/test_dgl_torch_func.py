"""Layers and functions under transforms of torch.func and in forward mode: what DGL's own can do, ours can."""

import dgl
import dgl.nn as stock
import dgl.ops
import pytest
import torch
from test_dgl_hetero import hetero, nodes_of, pair_of
from test_dgl_random_use import IN, LAYERS, NODE_TYPES, NODES, RELATIONS
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacrev, jvp, vmap

import edgeless
import edgeless.dgl.nn as fused
from edgeless.dgl import ops

REASON = "a transform of torch.func or forward-mode differentiation is active"


def dual(function, x, tangent):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, tangent))).tangent


TRANSFORMS = {
    "grad": lambda f, x, tangent: grad(lambda x: f(x).square().sum())(x),
    "jvp": lambda f, x, tangent: jvp(f, (x,), (tangent,)),
    "jacrev": lambda f, x, tangent: jacrev(f)(x),
    "vmap": lambda f, x, tangent: vmap(f)(torch.stack((x, tangent))),
    "forward mode": dual,
}
every_transform = pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)


def outcome(transform, function, x):
    """What comes of it: tensors, or the kind of the error."""
    tangent = torch.randn(x.shape, generator=torch.Generator().manual_seed(2), dtype=x.dtype)
    try:
        return transform(function, x, tangent)
    except Exception as error:
        return type(error)


def assert_alike(transform, ours, theirs, x):
    have, want = outcome(transform, ours, x), outcome(transform, theirs, x)
    if isinstance(want, type) or want is None:
        assert have is want
    else:
        torch.testing.assert_close(have, want, rtol=1e-10, atol=1e-12)
    return want


def drawn(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@every_transform
@pytest.mark.parametrize("regularizer", [None, "basis", "bdd"])
def test_typed_linear(transform, regularizer):
    theirs = stock.TypedLinear(IN, 6, RELATIONS, regularizer, regularizer and 2).double()
    ours = fused.TypedLinear(IN, 6, RELATIONS, regularizer, regularizer and 2).double()
    ours.load_state_dict(theirs.state_dict())
    x, types = drawn(NODES, IN), torch.arange(NODES) % RELATIONS
    want = assert_alike(transform, lambda x: ours(x, types), lambda x: theirs(x, types), x)
    assert isinstance(want, (torch.Tensor, tuple))
    name, parameter = next(iter(theirs.named_parameters()))
    of = [lambda w, layer=layer: functional_call(layer, {name: w}, (x, types)) for layer in (ours, theirs)]
    assert_alike(transform, *of, parameter.detach())


@every_transform
@pytest.mark.parametrize("name", ["gather_mm", "segment_mm"])
def test_products_of_ops(transform, name):
    w, types = drawn(RELATIONS, IN, 6), torch.arange(NODES) * RELATIONS // NODES
    given = {"idx_b": types} if name == "gather_mm" else {"seglen_a": torch.bincount(types, minlength=RELATIONS)}
    of = [lambda x, module=module: getattr(module, name)(x, w, **given) for module in (ops, dgl.ops)]
    assert isinstance(assert_alike(transform, *of, drawn(NODES, IN)), (torch.Tensor, tuple))


def the_graph():
    generator = torch.Generator().manual_seed(3)
    graph = dgl.graph(tuple(torch.randint(0, NODES, (2, 40), generator=generator)), num_nodes=NODES)
    return graph.formats(["coo", "csr", "csc"])


MORE = {
    "RelGraphConv": lambda graph: (torch.arange(graph.num_edges()) % RELATIONS,),
    "HGTConv": lambda graph: (torch.arange(NODES) % NODE_TYPES, torch.arange(graph.num_edges()) % RELATIONS),
}


@every_transform
@pytest.mark.parametrize("name", LAYERS)
def test_every_layer(transform, name):
    theirs, ours = (LAYERS[name](package).double().eval() for package in (stock, fused))
    ours.load_state_dict(theirs.state_dict())
    graph, x = the_graph(), drawn(NODES, IN)
    more = MORE.get(name, lambda graph: ())(graph)
    assert_alike(transform, lambda x: ours(graph, x, *more), lambda x: theirs(graph, x, *more), x)
    for key, parameter in theirs.named_parameters():
        of = [lambda w, layer=layer: functional_call(layer, {key: w}, (graph, x, *more)) for layer in (ours, theirs)]  # noqa: B023
        assert_alike(transform, *of, parameter.detach())
    with forward_ad.dual_level(), edgeless.backend("fused"), pytest.raises(edgeless.NotFusedError, match=REASON):
        ours(graph, x, *more)
    with edgeless.backend("fused"):  # nothing that a transform made is kept with the graph
        torch.testing.assert_close(ours(graph, x, *more), theirs(graph, x, *more))


@every_transform
@pytest.mark.parametrize("name,options", [("GraphConv", {"norm": "both"}), ("SAGEConv", {"aggregator_type": "mean"})])
def test_hetero_graph_conv(transform, name, options):
    theirs, ours = pair_of(name, torch.float64, **options)
    graph = hetero()
    inputs = nodes_of(graph, torch.float64)
    for key in inputs:
        of = [lambda x, layer=layer: layer(graph, {**inputs, key: x})["a"] for layer in (ours, theirs)]  # noqa: B023
        assert_alike(transform, *of, inputs[key])
    for key, parameter in theirs.named_parameters():
        of = [lambda w, layer=layer: functional_call(layer, {key: w}, (graph, inputs))["a"] for layer in (ours, theirs)]  # noqa: B023
        assert_alike(transform, *of, parameter.detach())
    torch.testing.assert_close(ours(graph, inputs), theirs(graph, inputs))
