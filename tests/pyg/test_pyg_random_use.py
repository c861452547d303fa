"""Layers and graphs that are used, edited and replaced over time, against the stock layers in float64: every call sees
the graph as it is.
"""

from __future__ import annotations

import pytest
import torch
import torch_geometric.nn as stock
from drawn import DrawnUse, assert_alike
from pyg_cases import assert_close, run

import edgeless.pyg.nn as fused

IN, OUT, RELATIONS, NODES = 4, 6, 3, 12
LAYERS = {
    "GCNConv": lambda package: package.GCNConv(IN, OUT),
    "GCNConv, cached": lambda package: package.GCNConv(IN, OUT, cached=True),
    "SAGEConv": lambda package: package.SAGEConv(IN, OUT),
    "SAGEConv of maxima": lambda package: package.SAGEConv(IN, OUT, aggr="max"),
    "GINConv": lambda package: package.GINConv(torch.nn.Linear(IN, OUT)),
    "GraphConv": lambda package: package.GraphConv(IN, OUT),
    "GATConv": lambda package: package.GATConv(IN, OUT, heads=2),
    "GATv2Conv": lambda package: package.GATv2Conv(IN, OUT, heads=2, add_self_loops=False),
    "TransformerConv": lambda package: package.TransformerConv(IN, OUT),
    "RGCNConv": lambda package: package.RGCNConv(IN, OUT, RELATIONS),
    "RGATConv": lambda package: package.RGATConv(IN, OUT, RELATIONS),
}
TYPED = ("RGCNConv", "RGATConv")


class Held:
    """A graph as a user holds it: ids and types of edges, which change together or each for itself."""

    def __init__(self, edge_index, edge_type):
        self.edge_index, self.edge_type = edge_index, edge_type

    def __str__(self):
        return f"{self.edge_index.dtype} {self.edge_index.tolist()} {self.edge_type.tolist()}"


class Use(DrawnUse):
    """What is done in turn, drawn from a seed."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.x = self.randn(NODES, IN)

    def ids(self, *sizes):
        return torch.randint(NODES, sizes, generator=self.generator)

    def graph(self):
        count = self.one_of((1, 5, 30, 200))
        dtype = self.one_of((torch.int64, torch.int64, torch.int32))
        edge_type = torch.randint(RELATIONS, (count,), generator=self.generator)
        edge_index = self.ids(2, count).to(dtype)
        kind = self.one_of(("plain", "plain", "columns", "transposed", "inference"))
        if kind == "columns":  # of a larger one
            edge_index = torch.cat((edge_index, edge_index), 1)[:, :count]
        elif kind == "transposed":
            edge_index = edge_index.t().contiguous().t()
        elif kind == "inference":
            with torch.inference_mode():
                edge_index = edge_index.clone()
        return Held(edge_index, edge_type)

    # What is done

    def call(self):
        name, mode = self.one_of(LAYERS), self.one_of(("gradients", "no_grad", "inference", "eval"))
        i = self.rng.randrange(len(self.graphs))
        held = self.graphs[i]
        self.log.append(f"{name} of graph {i}, {mode}: {held}")
        theirs, ours = self.layers_of(name, LAYERS[name], stock, fused)
        # What is made in inference mode the stock layers cannot keep for a backward: neither ids nor a cached norm.
        as_good = "no_grad" if mode == "inference" else mode
        want = self.outcome(theirs, name, as_good, held.edge_index.long().clone(), held.edge_type)
        have = self.outcome(ours, name, mode, held.edge_index, held.edge_type)
        assert_alike("\n".join(self.log), have, want, assert_close)

    def outcome(self, layer, name, mode, edge_index, edge_type):
        rest = (edge_index, edge_type) if name in TYPED else (edge_index,)
        try:
            if mode == "gradients":
                return run(lambda x: layer(x, *rest), layer.train(), self.x)
            with torch.inference_mode() if mode == "inference" else torch.no_grad():
                return {"out": layer.train(mode != "eval")(self.x, *rest)}
        except Exception as error:
            return error

    def edit(self):
        """Writes that raise torch's counter of versions, and writes that do not."""
        held = self.one_of(self.graphs)
        e, t = held.edge_index, held.edge_type
        count = e.size(1)
        i, j = self.rng.randrange(count), self.rng.randrange(count)
        ids, edge_type = self.ids(2).to(e.dtype), self.rng.randrange(RELATIONS)
        how = self.one_of(("an edge", "a view", "data", "numpy", "swap", "all", "a type", "type data", "set"))
        self.log.append(f"edit graph {self.graphs.index(held)}: {how}")
        with torch.inference_mode(e.is_inference()):
            if how == "an edge":
                e[:, i] = ids
            elif how == "a view":
                e[self.one_of((0, 1))][i] = ids[0]
            elif how == "data":
                e.data[:, i] = ids
            elif how == "numpy":
                e.numpy()[:, i] = ids.numpy()
            elif how == "swap":
                e[:, [i, j]] = e[:, [j, i]]
                t[[i, j]] = t[[j, i]]
            elif how == "all":
                e.copy_(self.ids(2, count))
            elif how == "a type":
                t[i] = edge_type
            elif how == "type data":
                t.numpy()[i] = edge_type
            elif not e.is_inference():
                other = self.graph()
                e.set_(other.edge_index.to(e.dtype).clone()), t.set_(other.edge_type.clone())

    def replace(self):
        i = self.rng.randrange(len(self.graphs))
        how = self.one_of(("new", "a copy", "turned", "some", "reordered", "other types"))
        self.log.append(f"graph {i}: {how}")
        held = self.graphs[i]
        e, t = held.edge_index, held.edge_type
        if how == "new":
            del held, e, t
            self.graphs[i] = None  # so that what follows may stand in its memory
            self.graphs[i] = self.graph()
        elif how == "a copy":
            self.graphs[i] = Held(e.clone(), t.clone())
        elif how == "turned":
            self.graphs[i] = Held(e.flip(0), t)
        elif how == "some":
            some = (e.size(1) + 1) // 2
            self.graphs[i] = Held(e[:, :some], t[:some])
        elif how == "reordered":
            order = torch.randperm(e.size(1), generator=self.generator)
            self.graphs[i] = Held(e[:, order], t[order])
        else:
            self.graphs[i] = Held(e, torch.randint(RELATIONS, t.shape, generator=self.generator))


@pytest.mark.parametrize("seed", range(6))
def test_random_use(seed):
    for i in range(4):
        Use(seed * 4 + i).run()
