"""Batches of DGL from packed arrays: those of its GraphCollator, bit by bit, without Python for every graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional

import dgl
import torch
from torch import Tensor

from edgeless.packed import Column, NotPacked, PackedGraphs, Places, Watched, refusal
from edgeless.padding import Size

from ._framework import DGLGraph

__all__ = ["PackedItems"]

NODES, EDGES = 0, 1  # levels
_OF_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}


class _Label(NamedTuple):
    """A part of every item beside its graph: a column, or a list of text."""

    column: Optional[Column]
    items: list[Any]


class PackedItems:
    """The items of a data set, packed: graphs, or tuples of a graph and labels.

    Args:
        dataset: of homogeneous graphs on the CPU.
        padding: an item with a graph of no nodes and labels of zeros.
    Raises:
        NotPacked: the data set may give other graphs at every access, or something of it cannot be packed.
    """

    def __init__(self, dataset: Any, padding: Any):
        if (reason := refusal(dataset, _may_vary)) is not None:
            raise NotPacked(reason)
        self.watched = Watched(dataset, _values_of)
        items = [dataset[place] for place in range(len(dataset))]
        self._alone = not isinstance(items[0], (tuple, list))
        graphs = items if self._alone else [item[0] for item in items]
        _check_graphs(graphs)
        self.nodes, self.edges = [g.num_nodes() for g in graphs], [g.num_edges() for g in graphs]
        ends = [g.edges(order="eid") for g in graphs]
        self._ends = [_column(f"edges[{row}]", [pair[row] for pair in ends], EDGES) for row in (0, 1)]
        self._ndata = {n: _column(n, [g.ndata[n] for g in graphs], NODES) for n in graphs[0].ndata}
        self._edata = {n: _column(n, [g.edata[n] for g in graphs], EDGES) for n in graphs[0].edata}
        self._labels = [] if self._alone else _labels(items, padding)
        counts = [torch.tensor(self.nodes), torch.tensor(self.edges)]
        self._packed = PackedGraphs(counts, [0, 0], [torch.tensor([*self.nodes, 0])], torch.device("cpu"))

    def batch(self, ids: Sequence[int], fit: Callable[[int, int], Size], graphs: int) -> tuple[Any, ...]:
        """Returns the batched graph of the items with these ids, their labels, and the mask of real graphs.

        Args:
            fit: returns the numbers of nodes and edges of a batch, padding included, given those without.
            graphs: the least number of graphs before the padding; empty ones are added.
        """
        chosen, real = self._packed.find(ids)
        size = fit(*real)
        padding = [size.nodes - real[NODES], size.edges - real[EDGES]]
        places = self._packed.places(chosen, real, max(0, graphs - len(ids)), padding)
        graph = dgl.graph(self._ends_of(places), num_nodes=size.nodes)
        graph.set_batch_num_nodes(places.counts[NODES])
        graph.set_batch_num_edges(places.counts[EDGES])
        numbers = self._packed.numbers
        nodes = {name: places.gather(column) for name, column in self._ndata.items()}
        edges = {name: places.gather(column) for name, column in self._edata.items()}
        graph.ndata.update({**nodes, "node_mask": numbers(size.nodes) < real[NODES]})
        graph.edata.update({**edges, "edge_mask": numbers(size.edges) < real[EDGES]})
        labels = [self._label(label, places, ids) for label in self._labels]
        return (graph, *labels, numbers(places.num_graphs) < len(ids))

    def _ends_of(self, places: Places) -> tuple[Tensor, ...]:
        padded, found = places.padded_edges, []
        for column, more in zip(self._ends, padded, strict=True):
            ids = places.gather(column)
            ids.add_(places.offsets(0, EDGES))
            ids.narrow(0, ids.numel() - more.numel(), more.numel()).add_(more)
            found.append(ids)
        return tuple(found)

    @staticmethod
    def _label(label: _Label, places: Places, ids: Sequence[int]) -> Any:
        if label.column is not None:
            return places.gather(label.column)
        added = places.num_graphs - len(ids)
        return (*(label.items[place] for place in ids), *[label.items[-1]] * added)


def _may_vary(dataset: Any) -> Optional[str]:
    return f"a {type(dataset).__name__} may make its graphs when they are read; list(dataset) can be packed"


def _values_of(item: Any) -> list[Any]:
    graph, *labels = item if isinstance(item, (tuple, list)) else (item,)
    found = [*graph.edges(order="eid"), *labels]
    for data in (graph.ndata, graph.edata):
        for name in data:
            found += [name, data[name]]
    return found


def _check_graphs(graphs: list[DGLGraph]) -> None:
    first = graphs[0]
    for graph in graphs:
        if not graph.is_homogeneous or graph.batch_size != 1 or graph.device.type != "cpu":
            raise NotPacked("a graph is heterogeneous, a batch, or not on the CPU")
        if graph.idtype != first.idtype:
            raise NotPacked(f"graphs have ids of {first.idtype} and {graph.idtype}")
        if graph.ndata.keys() != first.ndata.keys() or graph.edata.keys() != first.edata.keys():
            raise NotPacked("graphs differ in their data")


def _labels(items: list[Any], padding: Any) -> list[_Label]:
    found = []
    for place, first in enumerate(items[0][1:], 1):
        values = [item[place] for item in items]
        if any(type(value) is not type(first) for value in values):
            raise NotPacked(f"labels {place} differ in class")
        if type(first) is Tensor:
            values += [padding[place]] * 2
            found.append(_Label(_column(f"labels {place}", [value.unsqueeze(0) for value in values], None), []))
        elif type(first) in _OF_NUMBERS:
            numbers = torch.tensor([*values, padding[place], padding[place]], dtype=_OF_NUMBERS[type(first)])
            found.append(_Label(Column(numbers, 0, None), []))
        elif type(first) is str:
            found.append(_Label(None, [*values, padding[place]]))
        else:
            raise NotPacked(f"labels {place} are of {type(first).__name__}")
    return found


def _column(name: str, values: list[Tensor], level: Optional[int]) -> Column:
    first = values[0]
    for value in values:
        if type(value) is not Tensor or value.layout is not torch.strided or value.requires_grad:
            raise NotPacked(f"{name} is no plain tensor, or requires a gradient")
        if value.dtype != first.dtype or value.shape[1:] != first.shape[1:] or value.device.type != "cpu":
            raise NotPacked(f"{name} differs between graphs in dtype, width or device")
    padding = [] if level is None else [first.new_zeros((1, *first.shape[1:]))]
    return Column(torch.cat([*values, *padding]), 0, level)
