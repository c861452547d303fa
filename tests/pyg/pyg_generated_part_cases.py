"""Generated layers of PyG on a DistGraph; spawned processes import this module by name."""

import contextlib
import copy
import os

import torch
from part_cases import (
    EDGE_FEATURES,
    FEATURES,
    compare,
    differences,
    doubled,
    edge_data,
    edges,
    node_data,
    partitions,
    run_parts,
    run_whole,
)
from pyg_part_cases import plain, with_features
from torch import nn
from torch_geometric.utils import softmax

import edgeless.distributed as ed
from edgeless.programs.run import compiled
from edgeless.pyg import nn as layers


def perceptron(inputs, width=8, outputs=4):
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, outputs))


class OwnAttention(layers.MessagePassing):
    """Weights by ``edge_updater()``, which the forward passes to ``propagate()``."""

    def __init__(self):
        super().__init__(aggr="add", node_dim=0)
        self.score, self.value = nn.Linear(2 * FEATURES, 2), nn.Linear(FEATURES, 4)

    def forward(self, x, edge_index):
        alpha = self.edge_updater(edge_index, x=x)
        return self.propagate(edge_index, x=self.value(x), alpha=alpha)

    def edge_update(self, x_i, x_j, index, ptr, size_i):
        return softmax(self.score(torch.cat([x_i, x_j], dim=-1)).tanh(), index, ptr, size_i)

    def message(self, x_j, alpha):
        return (alpha.unsqueeze(-1) * x_j.unsqueeze(1)).flatten(1)


class DroppedMessages(layers.MessagePassing):
    """A map that widens rows, so that its input travels, and dropout by edge."""

    def __init__(self):
        super().__init__(aggr="mean")
        self.lin = nn.Linear(FEATURES, 9)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_i, x_j):
        return nn.functional.dropout(torch.relu(self.lin(x_j)) * self.lin(x_i), 0.4, self.training)


class Columns(layers.MessagePassing):
    """Rows in the second dimension, and ids of nodes as features, which have no gradient."""

    def __init__(self):
        super().__init__(aggr="max", node_dim=1)
        self.embedding = nn.Embedding(5, FEATURES)

    def forward(self, x, edge_index):
        kinds = (x.detach()[:, 0].abs() * 10).long() % 5
        return self.propagate(edge_index, x=torch.stack((x, x * x)), kinds=kinds.view(1, -1))[0]

    def message(self, x_j, x_i, kinds_j):
        return torch.tanh(x_j + self.embedding(kinds_j)) * x_i


def cases():
    """(name, layer, call, whether it adds loops, names of edge data)."""

    def case(name, make, call=plain, given=()):
        return name, make, call, False, given

    degrees = torch.tensor([3, 0, 5, 9, 7, 4, 2])
    statistics = ["mean", "max", "min", "std"], ["identity", "amplification", "attenuation"], degrees
    yield case("GINEConv", lambda: layers.GINEConv(perceptron(FEATURES), True, edge_dim=2), with_features, "e")
    yield case("ResGatedGraphConv", lambda: layers.ResGatedGraphConv(FEATURES, 4))
    yield case("ResGatedGraphConv, e", lambda: layers.ResGatedGraphConv(FEATURES, 4, edge_dim=2), with_features, "e")
    yield case("CGConv", lambda: layers.CGConv(FEATURES, EDGE_FEATURES), with_features, "e")
    yield case("PNAConv", lambda: layers.PNAConv(FEATURES, 4, *statistics, edge_dim=2, towers=2), with_features, "e")
    yield case("EdgeConv max", lambda: layers.EdgeConv(perceptron(2 * FEATURES)))
    yield case("EdgeConv mean to 2", lambda: layers.EdgeConv(nn.Linear(2 * FEATURES, 2), aggr="mean"))
    yield case("GENConv", lambda: layers.GENConv(FEATURES, 4, learn_t=True, edge_dim=2, norm=None), with_features, "e")
    yield case("FiLMConv", lambda: layers.FiLMConv(FEATURES, 4))
    yield case("NNConv", lambda: layers.NNConv(FEATURES, 4, perceptron(2, 3, 4 * FEATURES)), with_features, "e")
    yield case("GMMConv", lambda: layers.GMMConv(FEATURES, 2, 2, 2), with_features, "e")
    yield case("GeneralConv", lambda: layers.GeneralConv(FEATURES, 4, attention=True, heads=2))
    yield case("FeaStConv", lambda: layers.FeaStConv(FEATURES, 4, heads=2, add_self_loops=False))
    yield case("TAGConv", lambda: layers.TAGConv(FEATURES, 4, normalize=False))
    yield case("own attention", OwnAttention)
    yield case("rows in the second dimension", Columns)


@contextlib.contextmanager
def generating(choice):
    before = os.environ.get("EDGELESS_GENERATE")
    os.environ["EDGELESS_GENERATE"] = choice
    try:
        yield
    finally:
        os.environ.pop("EDGELESS_GENERATE") if before is None else os.environ.update(EDGELESS_GENERATE=before)


def generated_layers(rank, world, folder):
    with compiled.compiling("off"):
        for name, (kind, *_) in partitions(world).items():
            for wrong in compare(list(cases()), ed.load(folder / name), edges(kind), name, shared=True):
                yield f"{name}: {wrong}"
    dg = ed.load(folder / "random")
    yield from compiled_walks(dg)
    yield from what_travels(dg)
    with compiled.compiling("off"):
        yield from dropped(dg)


def compiled_walks(dg):
    """Yields what differs where walks run as compiled code, and between two runs."""
    whole, x, given = edges("loops"), node_data()["x"], {"e": edge_data(edges("loops"))["e"]}
    layer = doubled(layers.GINEConv(perceptron(FEATURES), True, edge_dim=2))
    with compiled.compiling("now"):
        runs = [run_parts(layer, with_features(dg), dg, False, given, True, 9, torch.float64) for _ in range(2)]
    want = run_whole(copy.deepcopy(layer), with_features(whole), x, given, True, 9)
    yield from differences(runs[1], want, torch.float64)
    if any(not torch.equal(runs[1][key], value) for key, value in runs[0].items()):
        yield "two runs differ in their bits"


def what_travels(dg):
    """Yields layers of which other rows travel than the narrowest."""

    def narrow():
        return layers.EdgeConv(nn.Linear(2 * FEATURES, 2), aggr="mean")

    makes = (
        (2, narrow),
        (FEATURES, lambda: layers.EdgeConv(nn.Linear(2 * FEATURES, 9))),
        (FEATURES, lambda: layers.CGConv(FEATURES)),  # which has two maps of one input
    )
    sent, send = [], dg.halo.carrier.send

    def noted(halo, rows, out):
        sent.append(rows.shape)
        return send(halo, rows, out)

    dg.halo.carrier.send = noted
    for width, make in makes:
        del sent[:]
        make().double()(dg.ndata["x"].clone().requires_grad_(), dg).sum().backward()
        if [list(shape[1:]) for shape in sent] != [[width]]:
            yield f"rows {sent} travel where {width} numbers would do"
    kept = dg.ndata["x"].clone()  # features without a gradient travel once, though what is computed of them is narrower
    dg.halo.keep_features = True
    for _ in range(2):
        del sent[:]
        narrow().double()(kept, dg)
    if sent:
        yield "features that stay have travelled twice"
    dg.halo.keep_features, dg.halo.carrier.send = None, send


def dropped(dg):
    """Yields what differs from one process where messages are dropped."""
    layer, x = doubled(DroppedMessages()), node_data()["x"]
    have = run_parts(layer, plain(dg), dg, False, {}, True, 9, torch.float64)
    with generating("on"):
        want = run_whole(copy.deepcopy(layer), plain(edges("loops")), x, {}, True, 9)
    yield from differences(have, want, torch.float64)
