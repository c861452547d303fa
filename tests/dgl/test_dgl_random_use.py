"""Layers and graphs that are used, edited and replaced over time, against the stock layers in float64: every call sees
the graph as it is.
"""

from __future__ import annotations

import dgl
import dgl.nn as stock
import pytest
import torch
from dgl_cases import assert_close
from drawn import DrawnUse, assert_alike

import edgeless.dgl.nn as fused

IN, OUT, RELATIONS, NODE_TYPES, NODES = 4, 6, 3, 2, 12
LOOSE = {"allow_zero_in_degree": True}
LAYERS = {
    "GraphConv": lambda package: package.GraphConv(IN, OUT, **LOOSE),
    "SAGEConv": lambda package: package.SAGEConv(IN, OUT, "mean"),
    "SAGEConv of maxima": lambda package: package.SAGEConv(IN, OUT, "pool"),
    "GINConv": lambda package: package.GINConv(torch.nn.Linear(IN, OUT), "sum"),
    "GATConv": lambda package: package.GATConv(IN, OUT, 2, **LOOSE),
    "GATv2Conv": lambda package: package.GATv2Conv(IN, OUT, 2, **LOOSE),
    "DotGatConv": lambda package: package.DotGatConv(IN, OUT, 1, **LOOSE),
    "RelGraphConv": lambda package: package.RelGraphConv(IN, OUT, RELATIONS),
    "HGTConv": lambda package: package.HGTConv(IN, 3, 2, NODE_TYPES, RELATIONS),
}


class Use(DrawnUse):
    """What is done in turn, drawn from a seed."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.x = self.randn(NODES, IN)
        self.ntypes = self.ids(NODES, NODE_TYPES)

    def ids(self, count, high=NODES):
        return torch.randint(high, (count,), generator=self.generator)

    def graph(self):
        count = self.one_of((2, 5, 30, 200))
        graph = dgl.graph((self.ids(count), self.ids(count)), num_nodes=NODES)
        graph.edata["type"] = self.ids(count, RELATIONS)
        return graph.int() if self.one_of((True, False, False)) else graph

    # What is done

    def call(self):
        name, mode = self.one_of(LAYERS), self.one_of(("gradients", "no_grad", "inference", "eval"))
        i = self.rng.randrange(len(self.graphs))
        graph = self.graphs[i]
        edges = [t.tolist() for t in (*graph.formats("coo").edges(), graph.edata["type"])]
        self.log.append(f"{name} of graph {i}, {mode}: {graph.idtype} {edges}")
        theirs, ours = self.layers_of(name, LAYERS[name], stock, fused)
        every_format = graph.formats(["coo", "csr", "csc"])  # some of which the stock layers need
        want, have = self.outcome(theirs, name, mode, every_format), self.outcome(ours, name, mode, graph)
        assert_alike("\n".join(self.log), have, want, assert_close)

    def outcome(self, layer, name, mode, graph):
        rest = (self.ntypes,) if name == "HGTConv" else ()
        if name in ("RelGraphConv", "HGTConv"):
            rest = (*rest, graph.edata["type"])
        layer.eval()  # HGTConv drops, by other draws than ours
        try:
            if mode == "gradients":
                x = self.x.clone().requires_grad_()
                out = layer(graph, x, *rest)
                weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(23), dtype=torch.float64)
                grads = torch.autograd.grad((out * weight).sum(), [x, *layer.parameters()], allow_unused=True)
                names = ("x", *(name for name, _ in layer.named_parameters()))
                return {"out": out.detach(), **{f"grad of {n}": g for n, g in zip(names, grads, strict=True)}}
            with torch.inference_mode() if mode == "inference" else torch.no_grad():
                return {"out": layer(graph, self.x, *rest)}
        except Exception as error:
            return error

    def edit(self):
        """Of the graph object, and of the types of its edges, with and without torch's counter of versions."""
        i = self.rng.randrange(len(self.graphs))
        graph = self.graphs[i]
        types, count = graph.edata["type"], graph.num_edges()
        how = self.one_of(("more edges", "fewer edges", "a type", "type data", "all types", "other types"))
        self.log.append(f"edit graph {i}: {how}")
        if how == "more edges":
            more = self.one_of((1, 10))
            ends = (self.ids(more).to(graph.idtype), self.ids(more).to(graph.idtype))
            graph.add_edges(*ends, data={"type": self.ids(more, RELATIONS)})
        elif how == "fewer edges":
            if count > 2:
                graph.remove_edges(self.ids(1, count).to(graph.idtype))
        elif how == "a type":
            types[self.rng.randrange(count)] = self.rng.randrange(RELATIONS)
        elif how == "type data":
            types.numpy()[self.rng.randrange(count)] = self.rng.randrange(RELATIONS)
        elif how == "all types":
            types.copy_(self.ids(count, RELATIONS))
        else:
            graph.edata["type"] = self.ids(count, RELATIONS)

    def replace(self):
        i = self.rng.randrange(len(self.graphs))
        how = self.one_of(("new", "a clone", "turned", "some", "other ids", "loops", "formats", "a local variable"))
        self.log.append(f"graph {i}: {how}")
        graph = self.graphs[i]
        if how == "new":
            del graph
            self.graphs[i] = None  # so that what follows may stand in its memory
            self.graphs[i] = self.graph()
        elif how == "a clone":
            self.graphs[i] = graph.clone()
        elif how == "turned":
            self.graphs[i] = dgl.reverse(graph, copy_edata=True)
        elif how == "some":
            some = torch.arange(0, graph.num_edges(), 2, dtype=graph.idtype)
            self.graphs[i] = dgl.edge_subgraph(graph, some, relabel_nodes=False)
        elif how == "other ids":
            self.graphs[i] = graph.long() if graph.idtype == torch.int32 else graph.int()
        elif how == "loops":
            if graph.num_edges() < 400:
                self.graphs[i] = dgl.add_self_loop(graph)
        elif how == "formats":
            self.graphs[i] = graph.formats(self.one_of(("coo", ["coo", "csr"], ["coo", "csc"])))
        else:
            self.graphs[i] = graph.local_var()


@pytest.mark.parametrize("seed", range(6))
def test_random_use(seed):
    for i in range(4):
        Use(seed * 4 + i).run()
