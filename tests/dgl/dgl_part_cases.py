"""DGL's layers on a DistGraph; spawned processes import this module by name."""

from edgeless.dgl import graphbolt

graphbolt.stub()

import dgl  # noqa: E402
import torch  # noqa: E402
from part_cases import FEATURES, NODES, compare, edges, partitions  # noqa: E402

import edgeless  # noqa: E402
import edgeless.dgl.nn as nn  # noqa: E402
import edgeless.distributed as ed  # noqa: E402
from edgeless.dgl import ops  # noqa: E402

RELATIONS = 3


def taken(graph):
    """The graph argument of DGL's layers: this process' part, or the whole graph."""
    return graph if isinstance(graph, ed.DistGraph) else dgl.graph((graph[0], graph[1]), num_nodes=NODES)


def plain(graph):
    graph = taken(graph)
    return lambda layer, x, given: [layer(graph, x)]


def with_weight(graph):
    graph = taken(graph)
    return lambda layer, x, given: [layer(graph, x, edge_weight=given["w"])]


def with_attention(graph):
    graph = taken(graph)
    return lambda layer, x, given: list(layer(graph, x, get_attention=True))


def with_both(graph):
    graph = taken(graph)
    return lambda layer, x, given: list(layer(graph, x, edge_weight=given["w"], get_attention=True))


def types_of(graph):
    """The types of nodes and of edges, which are functions of their ids."""
    parts = isinstance(graph, ed.DistGraph)
    nodes, edges = (graph.nodes, graph.edge_ids) if parts else (graph.nodes(), torch.arange(graph.num_edges()))
    return nodes % RELATIONS, edges.to(nodes.device) * 7 // 5 % RELATIONS


def typed(graph):
    graph = taken(graph)
    etypes = types_of(graph)[1]
    return lambda layer, x, given: [layer(graph, x, etypes)]


def typed_with_norm(graph):
    graph = taken(graph)
    etypes = types_of(graph)[1]
    return lambda layer, x, given: [layer(graph, x, etypes, given["w"])]


def typed_nodes(graph):
    graph = taken(graph)
    types = types_of(graph)
    return lambda layer, x, given: [layer(graph, x, *types)]


class Batched(torch.nn.Module):
    """A layer that is given features ``[N, 2, F / 2]``."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, graph, x):
        return self.layer(graph, x.view(x.size(0), 2, x.size(1) // 2))


class Op(torch.nn.Module):
    """Applies a function of ``edgeless.dgl.ops`` to the features times a parameter."""

    def __init__(self, name):
        super().__init__()
        self.name, self.scale = name, torch.nn.Parameter(torch.ones(FEATURES))

    def forward(self, graph, x):
        return getattr(ops, self.name)(graph, x * self.scale)


def cases():
    loose = {"allow_zero_in_degree": True}
    for name in ("GATv2Conv", "GATConv"):
        cls = getattr(nn, name)

        def case(what, call, *given, cls=cls, name=name, channels=3, heads=3, **options):
            options = {**loose, **options}
            return f"{name} {what}", lambda: cls(FEATURES, channels, heads, **options), call, False, given

        yield case("wide", plain)
        yield case("narrow", plain, channels=2, heads=1, bias=False)
        yield case("residual", plain, residual=True, activation=torch.tanh)
        yield case("dropout", plain, attn_drop=0.4)
        yield case("attention", with_attention)
        yield case("dropout, attention", with_attention, attn_drop=0.4)
    yield "GATv2Conv shared", lambda: nn.GATv2Conv(FEATURES, 3, 3, share_weights=True, **loose), plain, False, ()
    yield "GATConv weighted", lambda: nn.GATConv(FEATURES, 3, 3, **loose), with_weight, False, "w"
    yield (
        "GATConv weighted, dropout, attention",
        lambda: nn.GATConv(FEATURES, 3, 3, attn_drop=0.4, **loose),
        with_both,
        False,
        "w",
    )
    yield "GATConv batched", lambda: Batched(nn.GATConv(FEATURES // 2, 3, 2, **loose)), plain, False, ()
    yield "DotGatConv", lambda: nn.DotGatConv(FEATURES, 3, 2, **loose), plain, False, ()
    yield "DotGatConv attention", lambda: nn.DotGatConv(FEATURES, 1, 2, **loose), with_attention, False, ()
    yield "AGNNConv", lambda: nn.AGNNConv(**loose), plain, False, ()
    yield "AGNNConv batched", lambda: Batched(nn.AGNNConv(**loose)), plain, False, ()
    for width in (4, 8):
        for norm in ("both", "left", "right", "none"):
            yield (
                f"GraphConv {norm} to {width}",
                lambda width=width, norm=norm: nn.GraphConv(FEATURES, width, norm=norm, **loose),
                plain,
                False,
                (),
            )
        yield (
            f"GraphConv weighted to {width}",
            lambda width=width: nn.GraphConv(FEATURES, width, **loose),
            with_weight,
            False,
            "w",
        )
        for kind in ("mean", "gcn", "pool"):
            yield (
                f"SAGEConv {kind} to {width}",
                lambda width=width, kind=kind: nn.SAGEConv(FEATURES, width, kind),
                plain,
                False,
                (),
            )
        yield (
            f"SAGEConv weighted to {width}",
            lambda width=width: nn.SAGEConv(FEATURES, width, "mean"),
            with_weight,
            False,
            "w",
        )
    for kind in ("sum", "mean", "max"):
        yield (
            f"GINConv {kind}",
            lambda kind=kind: nn.GINConv(torch.nn.Linear(FEATURES, 4), kind, learn_eps=True),
            plain,
            False,
            (),
        )
    for name, options in (
        ("basis", {"regularizer": "basis", "num_bases": 2}),
        ("bdd", {"regularizer": "bdd", "num_bases": 2, "self_loop": False}),
        ("normalised", {"layer_norm": True}),
    ):
        yield (
            f"RelGraphConv {name}",
            lambda options=options: nn.RelGraphConv(FEATURES, 4, RELATIONS, **options),
            typed,
            False,
            (),
        )
    yield "RelGraphConv with norm", lambda: nn.RelGraphConv(FEATURES, 4, RELATIONS), typed_with_norm, False, "w"
    for width in (3, 4):
        yield (
            f"HGTConv to {2 * width}",
            lambda width=width: nn.HGTConv(FEATURES, width, 2, RELATIONS, RELATIONS, 0.0),
            typed_nodes,
            False,
            (),
        )
    for name in ("copy_u_sum", "copy_u_mean"):
        yield name, lambda name=name: Op(name), plain, False, ()


def all_layers(rank, world, folder):
    with edgeless.backend("fused"):
        for name, (kind, *_) in partitions(world).items():
            dg, edge_index = ed.load(folder / name), edges(kind)
            for wrong in compare(cases(), dg, edge_index, name, shared=True):
                yield f"{name}: {wrong}"
