"""PyG's layers on a DistGraph; spawned processes import this module by name."""

import copy

import torch
from part_cases import (
    EDGE_FEATURES,
    FEATURES,
    compare,
    differences,
    doubled,
    edges,
    node_data,
    partitions,
    run_parts,
    run_whole,
)

import edgeless
import edgeless.distributed as ed
import edgeless.pyg.nn as nn

MULTIPLICATIVE = "multiplicative-self-attention"


def plain(graph):
    return lambda layer, x, given: [layer(x, graph)]


def with_features(graph):
    return lambda layer, x, given: [layer(x, graph, given["e"])]


def with_weight(graph):
    return lambda layer, x, given: [layer(x, graph, given["w"])]


def with_attention(graph):
    def call(layer, x, given):
        out, (_, alpha) = layer(x, graph, given.get("e"), return_attention_weights=True)
        return [out, alpha]

    return call


def attention_cases():
    for name in ("GATv2Conv", "GATConv", "TransformerConv"):
        cls, loops = getattr(nn, name), name != "TransformerConv"

        def case(what, call, *given, cls=cls, name=name, loops=loops, channels=3, heads=3, **options):
            return f"{name} {what}", lambda: cls(FEATURES, channels, heads=heads, **options), call, loops, given

        yield case("wide", plain)
        yield case("narrow", plain, channels=2, heads=1)
        yield case("mean of heads", plain, concat=False, bias=False)
        yield case("dropout", plain, dropout=0.4)
        yield case("edge features", with_features, "e", edge_dim=EDGE_FEATURES)
        yield case("edge features, dropout, attention", with_attention, "e", edge_dim=EDGE_FEATURES, dropout=0.4)
        yield case("attention", with_attention)
        yield case("dropout, attention", with_attention, dropout=0.4)
    yield (
        "GATv2Conv shared, residual",
        lambda: nn.GATv2Conv(FEATURES, 3, heads=2, share_weights=True, residual=True),
        plain,
        True,
        (),
    )
    yield "GATv2Conv without loops", lambda: nn.GATv2Conv(FEATURES, 3, add_self_loops=False), plain, False, ()
    yield "TransformerConv beta", lambda: nn.TransformerConv(FEATURES, 3, heads=2, beta=True), plain, False, ()
    yield "TransformerConv without root", lambda: nn.TransformerConv(FEATURES, 3, root_weight=False), plain, False, ()
    yield "AGNNConv", nn.AGNNConv, plain, True, ()
    yield "AGNNConv without loops", lambda: nn.AGNNConv(add_self_loops=False), plain, False, ()


def sum_cases():
    def perceptron(width=4):
        return torch.nn.Sequential(torch.nn.Linear(FEATURES, width), torch.nn.ReLU(), torch.nn.Linear(width, width))

    for width in (4, 8):
        yield f"GCNConv to {width}", lambda width=width: nn.GCNConv(FEATURES, width), plain, True, ()
        yield f"GCNConv weighted to {width}", lambda width=width: nn.GCNConv(FEATURES, width), with_weight, True, "w"
        for aggr in ("sum", "mean", "max", "min"):
            yield (
                f"SAGEConv {aggr} to {width}",
                lambda width=width, aggr=aggr: nn.SAGEConv(FEATURES, width, aggr=aggr),
                plain,
                False,
                (),
            )
            yield (
                f"GraphConv {aggr} to {width}",
                lambda width=width, aggr=aggr: nn.GraphConv(FEATURES, width, aggr=aggr),
                plain,
                False,
                (),
            )
        yield (
            f"GraphConv weighted to {width}",
            lambda width=width: nn.GraphConv(FEATURES, width),
            with_weight,
            False,
            "w",
        )
    yield "GCNConv improved", lambda: nn.GCNConv(FEATURES, 4, improved=True), with_weight, True, "w"
    yield "GCNConv without loops", lambda: nn.GCNConv(FEATURES, 4, add_self_loops=False), plain, False, ()
    yield "GCNConv unnormalised", lambda: nn.GCNConv(FEATURES, 4, normalize=False), plain, False, ()
    yield "GCNConv mean", lambda: nn.GCNConv(FEATURES, 4, aggr="mean"), plain, True, ()
    yield "GCNConv cached", lambda: nn.GCNConv(FEATURES, 4, cached=True), plain, True, ()
    yield (
        "SAGEConv projected, normalised, without root",
        lambda: nn.SAGEConv(FEATURES, 4, project=True, normalize=True, root_weight=False),
        plain,
        False,
        (),
    )
    for aggr in ("sum", "mean", "max"):
        yield f"GINConv {aggr}", lambda aggr=aggr: nn.GINConv(perceptron(), train_eps=True, aggr=aggr), plain, False, ()


RELATIONS = 3


def typed(*names):
    """Calls with the relation of every edge, which is a function of its id, and edge data of these names."""

    def with_types(graph):
        whole = not isinstance(graph, ed.DistGraph)
        ids = torch.arange(graph.size(1), device=graph.device) if whole else graph.edge_ids
        edge_type = ids * 7 // 5 % RELATIONS
        return lambda layer, x, given: [layer(x, graph, edge_type, *(given[name] for name in names))]

    return with_types


def relational_cases():
    def case(what, cls, *names, **options):
        return f"{cls.__name__} {what}", lambda: cls(FEATURES, 4, RELATIONS, **options), typed(*names), False, names

    for cls in (nn.RGCNConv, nn.FastRGCNConv):
        yield case("mean", cls)
        yield case("sum of bases", cls, aggr="add", num_bases=2)
        yield case("blocks without root", cls, num_blocks=2, root_weight=False, bias=False)
    yield case("max", nn.RGCNConv, aggr="max")
    for mechanism in ("within-relation", "across-relation"):
        for what, *names, options in (
            ("plain", {}),
            ("edge features", "e", {"edge_dim": EDGE_FEATURES}),
            ("8 heads, f-scaled", {"heads": 8, "mod": "f-scaled"}),
            ("additive", {"heads": 2, "mod": "additive"}),
            ("multiplicative", {"heads": 2, "dim": 2, "mod": "f-additive", "attention_mode": MULTIPLICATIVE}),
            ("dropout", {"heads": 2, "dropout": 0.4}),
            ("dropout, edge features", "e", {"dropout": 0.4, "edge_dim": EDGE_FEATURES}),
        ):
            yield case(f"{mechanism}, {what}", nn.RGATConv, *names, attention_mechanism=mechanism, **options)


def kept_twice(dg):
    """Yields layers that cache more than the halo's rows of constant features: the other rows are the user's."""
    for name in ("GATv2Conv", "GATConv", "TransformerConv"):
        x = dg.ndata["x"].clone()
        getattr(nn, name)(FEATURES, 4, heads=2).to(x)(x, dg)
        heights = [rows.size(0) for reference, _, rows in dg.halo._kept.values() if reference() is x]
        if heights != [dg.num_halo]:
            yield f"{name} keeps {heights} rows where the halo has {dg.num_halo}"


# Layers by their output width for 6 features; whether they add loops; and whether the halo's features are kept by
# default with an all-to-all, and with symmetric memory.
MADE_OF_A_ROW = (
    ("GATv2Conv to 8", lambda: nn.GATv2Conv(FEATURES, 4, heads=2), True, True, True),
    ("GATv2Conv to 6", lambda: nn.GATv2Conv(FEATURES, 3, heads=2), True, False, True),
    ("GATConv to 8", lambda: nn.GATConv(FEATURES, 4, heads=2), True, True, True),
    ("GATConv to 4", lambda: nn.GATConv(FEATURES, 2, heads=2), True, False, True),
    ("TransformerConv to 2 x 4", lambda: nn.TransformerConv(FEATURES, 2, heads=2), False, True, True),
    ("TransformerConv to 2 x 3", lambda: nn.TransformerConv(FEATURES, 3), False, False, True),
    ("SAGEConv", lambda: nn.SAGEConv(FEATURES, 4), False, True, True),
    ("GCNConv", lambda: nn.GCNConv(FEATURES, 4), True, True, True),
    ("RGCNConv", lambda: nn.RGCNConv(FEATURES, 4, RELATIONS), False, True, True),
)


def features_that_stay(rank, world, folder):
    """Checks which layers keep halo features under every ``keep_features``, that results are those of one process, and
    that a second run gives the same bits."""
    edge_index, x = edges("loops"), node_data()["x"]
    for keep in (None, True, False):
        dg = ed.load(folder / "random", keep_features=keep)
        for name, make, looped, by_all_to_all, by_symmetric in MADE_OF_A_ROW:
            alone = doubled(make()).to(dg.device)
            layer = copy.deepcopy(alone)
            call = typed() if isinstance(layer, nn.RGCNConv) else plain
            runs = [run_parts(layer, call(dg), dg, looped, {}, False, 9, torch.float64) for _ in range(2)]
            want = run_whole(alone, call(edge_index.to(dg.device)), x.to(dg.device), {}, False, 9)
            for wrong in differences(runs[0], want, torch.float64):
                yield f"{name}, keep_features={keep}: {wrong}"
            if any(not torch.equal(runs[1][key], value) for key, value in runs[0].items()):
                yield f"{name}, keep_features={keep}: two runs differ in their bits"
            expected = keep if keep is not None else by_symmetric if dg.carrier == "symmetric" else by_all_to_all
            rows = dg.ndata["x"].clone()
            call(dg)(layer, rows, {})
            if dg.halo.knows(rows) is not expected:
                yield f"{name}, keep_features={keep}: foreign rows are {'' if expected else 'not '}to be kept"
            with torch.no_grad():
                out = ed.gather(call(dg)(layer, rows, {})[0], dg)
            if not torch.allclose(out, want["result 0"], rtol=1e-10, atol=1e-12):
                yield f"{name}, keep_features={keep}: other results without gradients"
        if dg.to(dg.device).halo.keep_features is not keep:
            yield f"another device forgets keep_features={keep}"


def all_layers(rank, world, folder):
    cases = [*attention_cases(), *sum_cases(), *relational_cases()]
    with edgeless.backend("fused"):
        for name, (kind, *_) in partitions(world).items():
            dg, edge_index = ed.load(folder / name, checked=None if name == "random" else 64), edges(kind)
            for wrong in compare(cases, dg, edge_index, name, shared=True):
                yield f"{name}: {wrong}"
        yield from kept_twice(ed.load(folder / "random"))
