"""Graphs, layers and the comparison that the DGL tests share."""

from __future__ import annotations

import copy
import warnings

import dgl
import dgl.nn as stock
import torch

import edgeless
import edgeless.dgl.nn as fused

LAYERS = ("GATv2Conv", "GATConv", "DotGatConv")
IN, OUT, HEADS = 5, 4, 3


# Graphs ----------------------------------------------------------------------------------------------------------


def _random_edges(num_src, num_dst, num_edges, seed=7):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randint(num_src, (num_edges,), generator=generator),
        torch.randint(num_dst, (num_edges,), generator=generator),
    )


def _homogeneous(src, dst, num_nodes):
    return dgl.graph(
        (torch.as_tensor(src, dtype=torch.int64), torch.as_tensor(dst, dtype=torch.int64)), num_nodes=num_nodes
    )


def hetero():
    """Two node types, three relations, every id scrambled, some nodes without in-edges."""
    return dgl.heterograph(
        {
            ("user", "follows", "user"): _random_edges(9, 9, 30, 1),
            ("user", "plays", "game"): _random_edges(9, 6, 20, 2),
            ("game", "likes", "user"): _random_edges(6, 9, 0, 3),
        },
        num_nodes_dict={"user": 9, "game": 6},
    )


def _sampled_block():
    """A block from DGL's loader, of edges that are drawn here: DGL's own draw depends on the number of threads, and
    with several threads the order of nodes and edges differs from run to run.
    """
    graph = random_graph()
    graph.edata["drawn"] = torch.rand(graph.num_edges(), generator=torch.Generator().manual_seed(3)) < 0.5
    sampler = dgl.dataloading.NeighborSampler([-1], mask="drawn")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dgl.seed(4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DGL warns about CPU affinity
        loader = dgl.dataloading.DataLoader(graph, torch.arange(12), sampler, batch_size=12, shuffle=False)
        _, _, (block,) = next(iter(loader))
    torch.set_num_threads(threads)
    return block


def random_graph():
    return _homogeneous(*_random_edges(40, 40, 300), 40)


_SEEDS = torch.arange(0, 40, 3)

GRAPHS = {
    "zero_nodes": lambda: _homogeneous([], [], 0),
    "no_edges": lambda: _homogeneous([], [], 4),
    "one_edge": lambda: _homogeneous([2], [1], 4),
    "isolated": lambda: _homogeneous([0, 5, 5, 0], [2, 2, 7, 7], 10),
    "hub": lambda: _homogeneous([*range(300), 0, 0], [*[0] * 300, 1, 2], 300),
    "multi_edges": lambda: _homogeneous([0, 0, 0, 1, 1, 2, 0], [1, 1, 1, 2, 2, 0, 1], 3),
    "self_loops": lambda: _homogeneous([0, 1, 2, 0, 0, 2], [0, 1, 2, 0, 1, 2], 3),
    "random": random_graph,
    "with_self_loops": lambda: dgl.add_self_loop(random_graph()),
    "bipartite": lambda: dgl.heterograph({("a", "r", "b"): _random_edges(20, 11, 90)}, {"a": 20, "b": 11}),
    "relation": lambda: hetero()["follows"],
    "bipartite_relation": lambda: hetero()["plays"],
    "empty_relation": lambda: hetero()["likes"],
    "reverse": lambda: dgl.reverse(random_graph()),
    "edge_subgraph": lambda: dgl.edge_subgraph(random_graph(), torch.arange(1, 300, 3)),
    "after_add_edges": lambda: dgl.add_edges(random_graph(), [3, 4], [5, 5]),
    "batched": lambda: dgl.batch([random_graph(), _homogeneous([0], [1], 3), _homogeneous([], [], 2)]),
    "block": lambda: dgl.to_block(dgl.in_subgraph(random_graph(), _SEEDS), _SEEDS),
    "sampled_block": _sampled_block,
}


def graph_named(name, idtype=torch.int64):
    """The graph of that name, with its ids in ``idtype``."""
    graph = GRAPHS[name]()
    return graph.int() if idtype == torch.int32 else graph


def features(graph, dtype=torch.float32, pair=None, sizes=(IN, IN), batch=(), seed=11):
    """Leaf features for ``graph``: one Tensor for a block or equal numbers of sources and destinations, else a pair."""
    generator = torch.Generator().manual_seed(seed)
    num_src, num_dst = graph.num_src_nodes(), graph.num_dst_nodes()
    if pair is None:
        pair = not graph.is_block and num_src != num_dst

    def leaf(rows, size):
        return torch.randn(rows, *batch, size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    return (leaf(num_src, sizes[0]), leaf(num_dst, sizes[1])) if pair else leaf(num_src, sizes[0])


# Layers ----------------------------------------------------------------------------------------------------------


def options_for(layer, **options):
    """The ``options`` that the layer's constructor takes; DotGatConv has only allow_zero_in_degree."""
    return {k: v for k, v in options.items() if layer != "DotGatConv" or k == "allow_zero_in_degree"}


def layer_pair(layer, in_feats=IN, out_feats=OUT, heads=HEADS, dtype=torch.float32, seed=5, **options):
    """(upstream layer, fused layer) with equal parameters, none of them zero."""
    options = {"allow_zero_in_degree": True, **options}
    theirs, ours = (getattr(module, layer)(in_feats, out_feats, heads, **options) for module in (stock, fused))
    return _with_equal_parameters(theirs, ours, dtype, seed)


def sum_pair(name, args, dtype=torch.float32, **options):
    """:func:`layer_pair` of a layer that adds or compares its neighbours, constructed with ``args``."""
    if name == "GraphConv":
        options = {"allow_zero_in_degree": True, **options}
    theirs, ours = (getattr(module, name)(*copy.deepcopy(args), **copy.deepcopy(options)) for module in (stock, fused))
    return _with_equal_parameters(theirs, ours, dtype)


def _with_equal_parameters(theirs, ours, dtype, seed=5):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)
    ours.load_state_dict(theirs.state_dict())
    return theirs.to(dtype), ours.to(dtype)


# Comparison ------------------------------------------------------------------------------------------------------


def in_feats_for(feat):
    """The constructor's ``in_feats`` for ``feat``. GAT and GATv2 also accept a single number for pairs."""
    return tuple(f.size(-1) for f in feat) if isinstance(feat, tuple) else feat.size(-1)


def run(layer, graph, feat, feat_grads=True, **inputs):
    """Outputs, and the gradients of all features and parameters for a loss that weights every output differently.

    Features need no gradient without ``feat_grads``, as those of a model's first layer do not.
    """
    feats = feat if isinstance(feat, tuple) else (feat,)
    leaves = {f"feat[{i}]": f.detach().clone().requires_grad_(feat_grads) for i, f in enumerate(feats)}
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor) and value.requires_grad:
            leaves[name] = inputs[name] = value.detach().clone().requires_grad_()
    given = tuple(leaves[f"feat[{i}]"] for i in range(len(feats)))
    found = layer(graph, given if isinstance(feat, tuple) else given[0], **inputs)
    found = found if isinstance(found, tuple) else (found,)
    outputs = dict(zip(("out", "attention")[: len(found)], found, strict=True))
    leaves = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    leaves.update(layer.named_parameters())
    generator = torch.Generator().manual_seed(23)
    loss = sum(
        (o.double() * torch.randn(o.shape, generator=generator, dtype=torch.float64)).sum() for o in outputs.values()
    )
    grads = torch.autograd.grad(loss, leaves.values(), allow_unused=True)
    outputs.update({f"grad of {name}": grad for name, grad in zip(leaves, grads, strict=True)})
    return {name: None if t is None else t.detach() for name, t in outputs.items()}


def run_fused(layer, graph, feat, **inputs):
    """:func:`run`, which fails if any part of the call does not run on the kernels."""
    with edgeless.backend("fused"):
        return run(layer, graph, feat, **inputs)


TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


def assert_close(ours, theirs):
    """Equal tensor by tensor: same shape and dtype, and ``|ours - theirs| <= tolerance * |theirs|`` in the 2-norm.

    A gradient that cancels, such as that of a softmax along a direction in which it does not change, is rounding noise
    in both; it must be within a few roundings of the largest gradient in both.
    """
    assert ours.keys() == theirs.keys()
    largest = max((_size(t) for name, t in theirs.items() if name.startswith("grad") and t is not None), default=0.0)
    for name, want in theirs.items():
        have = ours[name]
        assert (have is None) == (want is None), f"{name}: {have} instead of {want}"
        if want is None:
            continue
        assert have.shape == want.shape and have.dtype == want.dtype, f"{name}: {have.shape} {have.dtype}"
        noise = 16 * torch.finfo(want.dtype).eps * largest
        if name.startswith("grad") and _size(want) <= noise:
            assert _size(have) <= noise, f"{name}: size {_size(have):.2e} instead of none"
            continue
        error, limit = _size(have.double() - want.double()), TOLERANCE[want.dtype]
        assert error <= limit * _size(want), f"{name}: relative error {error / _size(want):.2e} is over {limit:.0e}"


def _size(tensor):
    return tensor.double().norm().item()
