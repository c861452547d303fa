"""Batches of DGL from packed arrays: those of its GraphCollator, bit by bit, without Python for every graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional, Union

import dgl
import torch
from torch import Tensor

from edgeless.padding import Padding, pad_edges
from edgeless.padding.packed import Column, NotPacked, PackedGraphs, Watched, in_last, mask_of, refusal

from ._framework import DGLGraph

__all__ = ["PackedItems"]

NODES, EDGES, GRAPHS = 0, 1, 2  # levels
# The levels of nodes and edges in which all padding belongs to the last graph, for which there are tables.
LAST_NODES, LAST_EDGES = 3, 4
_OF_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}


class PackedItems:
    """The items of a data set, packed: graphs, or tuples of a graph and labels.

    Args:
        dataset: of homogeneous graphs on the CPU.
        padding: the item of a padding graph: a graph without nodes, and labels of zeros.
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
        ends = [torch.stack(g.edges(order="eid")) for g in graphs]
        data = torch.cat([*ends, ends[0].new_zeros(2, 1)], 1)
        columns = [Column(data, 1, LAST_EDGES, increment=LAST_NODES, last="edges")]
        self._ndata, self._edata = list(graphs[0].ndata), list(graphs[0].edata)
        columns += [_column(name, [g.ndata[name] for g in graphs], NODES) for name in self._ndata]
        columns += [_column(name, [g.edata[name] for g in graphs], EDGES) for name in self._edata]
        self._labels = [] if self._alone else _labels(items, padding)
        columns += [label for label in self._labels if isinstance(label, Column)]
        columns += [
            mask_of(*each) for each in ((NODES, sum(self.nodes)), (EDGES, sum(self.edges)), (GRAPHS, len(items)))
        ]
        nodes, edges = torch.tensor(self.nodes), torch.tensor(self.edges)
        counts = [nodes, edges, torch.ones(len(items), dtype=torch.int64), nodes, edges]
        self._packed = PackedGraphs(counts, columns, torch.device("cpu"))

    def batch(self, ids: Sequence[int], pad: Callable[[int, int, int, int], Padding], graphs: int) -> tuple[Any, ...]:
        """Returns the batched graph of the items with these ids, their labels, and the mask of real graphs.

        Args:
            pad: returns the padding of a batch, as :meth:`edgeless.padding.Sizes.padding` does.
            graphs: the least number of graphs without the padding of a whole batch.
        """
        chosen = self._packed.find(ids)
        real = chosen.entries
        nodes, edges, _ = pad(real[NODES], real[EDGES], chosen.largest, max(0, graphs - len(ids)))
        padding = [nodes, edges, [1] * len(nodes), in_last(nodes), in_last(edges)]
        gathered = self._packed.gather(chosen, padding, {"edges": pad_edges(nodes, edges)})
        *parts, node_mask, edge_mask, graph_mask = gathered.attributes
        found, added = iter(parts), gathered.sizes[GRAPHS] - len(ids)
        graph = dgl.graph(next(found).unbind(0), num_nodes=gathered.sizes[NODES])
        graph.set_batch_num_nodes(gathered.counts[NODES])
        graph.set_batch_num_edges(gathered.counts[EDGES])
        graph.ndata.update({**{name: next(found) for name in self._ndata}, "node_mask": node_mask})
        graph.edata.update({**{name: next(found) for name in self._edata}, "edge_mask": edge_mask})
        labels = [
            next(found) if isinstance(label, Column) else (*(label[i] for i in ids), *label[-1:] * added)
            for label in self._labels
        ]
        return (graph, *labels, graph_mask)


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


def _labels(items: list[Any], padding: Any) -> list[Union[Column, list[str]]]:
    """Returns the parts of items beside their graphs: columns, and lists of texts that end with the padding's text."""
    found: list[Union[Column, list[str]]] = []
    for place, first in enumerate(items[0][1:], 1):
        values = [item[place] for item in items]
        if any(type(value) is not type(first) for value in values):
            raise NotPacked(f"labels {place} differ in class")
        if type(first) is Tensor:
            found.append(_column(f"labels {place}", [value.unsqueeze(0) for value in values], GRAPHS))
        elif type(first) in _OF_NUMBERS:
            numbers = torch.tensor([*values, padding[place]], dtype=_OF_NUMBERS[type(first)])
            found.append(Column(numbers, 0, GRAPHS))
        elif type(first) is str:
            found.append([*values, padding[place]])
        else:
            raise NotPacked(f"labels {place} are of {type(first).__name__}")
    return found


def _column(name: str, values: list[Tensor], level: int) -> Column:
    first = values[0]
    for value in values:
        if type(value) is not Tensor or value.layout is not torch.strided or value.requires_grad:
            raise NotPacked(f"{name} is no plain tensor, or requires a gradient")
        if value.dtype != first.dtype or value.shape[1:] != first.shape[1:] or value.device.type != "cpu":
            raise NotPacked(f"{name} differs between graphs in dtype, width or device")
    return Column(torch.cat([*values, first.new_zeros((1, *first.shape[1:]))]), 0, level)
