"""Batches of PyG from packed arrays: those of ``Batch.from_data_list``, bit by bit, without Python for every graph."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union

import torch
from torch import Tensor
from torch_geometric.data import Batch, Data, InMemoryDataset
from torch_geometric.data import Dataset as GraphDataset
from torch_geometric.typing import SparseTensor, TensorFrame

from edgeless.padding import Padding, pad_edges
from edgeless.padding.packed import (
    Column,
    Gathered,
    NotPacked,
    PackedGraphs,
    Watched,
    graph_of,
    in_last,
    mask_of,
    refusal,
)

__all__ = ["MASKS", "PackedData"]

NODES, EDGES, GRAPHS = 0, 1, 2  # levels
# The levels of nodes and edges in which all padding belongs to the last graph, for which there are tables.
LAST_NODES, LAST_EDGES = 3, 4
MASKS = ("node_mask", "edge_mask", "graph_mask")
_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)


class _Key(NamedTuple):
    """One attribute: a column, or a list with an item for every graph and one for the padding.

    Attributes:
        is_float: whether the values are Python floats, which get torch's default dtype.
    """

    name: str
    column: Optional[Column] = None
    items: Optional[list] = None
    is_float: bool = False

    @property
    def level(self) -> int:
        """The level of the column; a list has the level of graphs."""
        return GRAPHS if self.column is None else self.column.level


class _Level(NamedTuple):
    """The numbers of entries of every graph, and those of graphs of padding, as numbers or as the level they equal."""

    counts: list[int]
    padding: Union[tuple[int, int], str]

    def of_padding(self, known: dict[str, list[int]]) -> list[int]:
        """The numbers of entries of graphs of padding, given their numbers of nodes and edges."""
        if isinstance(self.padding, str):
            return known[self.padding]
        return [self.padding[nodes > 0] for nodes in known["node"]]


class PackedData:
    """The graphs of a data set, packed.

    Args:
        dataset: a data set of ``Data``.
        made: makes a graph of padding with given numbers of nodes and edges.
        follow_batch, exclude_keys: as in PyG's DataLoader.
        device: the device of the arrays and the batches; None for that of the data.
    Raises:
        NotPacked: the data set may give other graphs at every access, or an attribute cannot be packed.
    """

    def __init__(
        self,
        dataset: Any,
        made: Callable[[int, int], Data],
        follow_batch: Optional[Iterable[str]],
        exclude_keys: Optional[Iterable[str]],
        device: Optional[torch.device],
    ):
        if (reason := refusal(dataset, _may_vary)) is not None:
            raise NotPacked(reason)
        self.watched = Watched(dataset, _values_of)
        reader = _Reader([dataset[place] for place in range(len(dataset))], made)
        first, excluded = reader.graphs[0], {*(exclude_keys or ()), "ptr"}
        keys = [reader.key(name) for name in first._store._mapping if name not in excluded]
        self.device, self._keys, self._levels = _device_of(keys, device), keys, reader.levels
        self._follow = {*(follow_batch or ())}
        columns = [_of_last(key.column) for key in keys if key.column is not None]
        levels = dict.fromkeys([NODES, *(key.level for key in keys if key.name in self._follow)])
        self._graph_of = {level: len(columns) + place for place, level in enumerate(levels)}
        columns += [graph_of(level, GRAPHS) for level in levels]
        columns += [mask_of(level, sum(self._levels[level].counts)) for level in (NODES, EDGES, GRAPHS)]
        self._packed = PackedGraphs(
            [torch.tensor(level.counts) for level in self._levels],
            columns,
            self.device,
        )
        self._blank = Batch(_base_cls=type(first)).stores_as(first)
        self._has_batch = first._store.can_infer_num_nodes

    @property
    def nodes(self) -> list[int]:
        """The number of nodes of every graph."""
        return self._levels[NODES].counts

    @property
    def edges(self) -> list[int]:
        """The number of edges of every graph."""
        return self._levels[EDGES].counts

    # Batches ---------------------------------------------------------------------------------------------------------

    def batch(self, ids: Sequence[int], pad: Callable[[int, int, int, int], Padding], graphs: int) -> Batch:
        """Returns the batch of the graphs with these ids, in the attributes' order of the first graph of the data set.

        Args:
            pad: returns the padding of a batch, as :meth:`edgeless.padding.Sizes.padding` does.
            graphs: the least number of graphs without the padding of a whole batch.
        """
        chosen = self._packed.find(ids)
        nodes, edges, most = pad(
            chosen.entries[NODES], chosen.entries[EDGES], chosen.largest, max(0, graphs - len(ids))
        )
        known = {"node": nodes, "edge": edges, "last node": in_last(nodes), "last edge": in_last(edges)}
        padding = [level.of_padding(known) for level in self._levels]
        batch = self._put_together(self._packed.gather(chosen, padding, {"edges": pad_edges(nodes, edges)}), ids)
        batch._store._mapping["max_num_nodes"] = most
        return batch

    def _put_together(self, gathered: Gathered, ids: Sequence[int]) -> Batch:
        batch = copy.copy(self._blank)
        store, graphs, found = batch._store, gathered.sizes[GRAPHS], iter(gathered.attributes)
        mapping, slices, increments = store._mapping, {}, {}
        nothing = torch.zeros(graphs, dtype=torch.int64)
        for key in self._keys:
            if key.name == "num_nodes":
                store._num_nodes, mapping["num_nodes"] = gathered.counts[NODES].tolist(), gathered.sizes[NODES]
                continue
            slices[key.name] = gathered.bounds[key.level]
            if key.column is None:
                mapping[key.name] = [*(key.items[place] for place in ids), *key.items[-1:] * (graphs - len(ids))]
                increments[key.name] = None
            else:
                value = next(found)
                mapping[key.name] = value.to(torch.get_default_dtype()) if key.is_float else value
                level = key.column.increment
                increments[key.name] = nothing if level is None else gathered.bounds[level, :-1]
            if key.name in self._follow:
                mapping[f"{key.name}_batch"] = gathered.attributes[self._graph_of[key.level]].clone()
                mapping[f"{key.name}_ptr"] = gathered.bounds_there[key.level].clone()
        if self._has_batch:
            mapping["batch"] = gathered.attributes[self._graph_of[NODES]]
            on_cpu = gathered.bounds_there is gathered.bounds
            mapping["ptr"] = gathered.bounds[NODES].clone() if on_cpu else gathered.bounds_there[NODES]
        mapping.update(zip(MASKS, gathered.attributes[-len(MASKS) :]))
        batch._num_graphs, batch._slice_dict, batch._inc_dict = graphs, slices, increments
        return batch


# Reading a data set --------------------------------------------------------------------------------------------------


class _Reader:
    """Packs the attributes of graphs one after the other, and collects their levels and increments."""

    def __init__(self, graphs: list[Data], made: Callable[[int, int], Data]):
        _check_alike(graphs)
        self.graphs, self._empty, self._padding = graphs, made(0, 0), [made(2, 3), made(4, 7)]
        nodes = [graph.num_nodes for graph in graphs]
        if not all(type(count) is int for count in nodes):
            raise NotPacked("the number of nodes of a graph is not known, or no int")
        edges, each = [graph.num_edges for graph in graphs], [1] * len(graphs)
        self.levels = [_Level(nodes, "node"), _Level(edges, "edge"), _Level(each, (1, 1))]
        self.levels += [_Level(nodes, "last node"), _Level(edges, "last edge")]

    def key(self, name: str) -> _Key:
        """Returns an attribute, packed.

        Raises:
            NotPacked: PyG's collation does more than concatenate the attribute.
        """
        values = [graph[name] for graph in self.graphs]
        if name == "num_nodes":
            return _Key(name)
        kinds = {type(value) for value in values}
        if kinds == {Tensor}:
            column = self._tensors(name, values)
        elif len(kinds) == 1 and kinds <= {*_NUMBERS}:
            numbers = torch.tensor([*values, self._empty[name]], dtype=_NUMBERS[type(values[0])])
            column = Column(numbers, 0, GRAPHS, self._increment(name, values))
        elif any(map(_is_collated, values)):
            raise NotPacked(f"{name} is of {', '.join(sorted(kind.__name__ for kind in kinds))}")
        else:
            return _Key(name, items=[*values, self._empty[name]])
        if column.increment is not None and column.data.dtype not in _INTEGERS:
            raise NotPacked(f"{name} has increments and is not of integers")
        if name == "edge_index":
            if (column.level, column.dim, column.data.dim()) != (EDGES, 1, 2) or column.data.dtype not in _INTEGERS:
                raise NotPacked("edge_index has no integers [2, E] that are concatenated along its edges")
            column = column._replace(last="edges")
        return _Key(name, column, is_float=kinds == {float})

    def _tensors(self, name: str, values: list[Tensor]) -> Column:
        first = values[0]
        dim = self.graphs[0].__cat_dim__(name, first, self.graphs[0]._store)
        stacked = dim is None or first.dim() == 0
        if not stacked and not isinstance(dim, int):
            raise NotPacked(f"{name} is concatenated along {dim}")
        dim = 0 if stacked else dim % first.dim()
        _check_tensors(name, values, None if stacked else dim)
        increment = self._increment(name, values)
        if stacked:
            return Column(torch.stack([*values, torch.zeros_like(first)]), 0, GRAPHS, increment)
        counts = [value.size(dim) for value in values]
        level = _Level(counts, _of_padding(name, [graph[name].size(dim) for graph in (self._empty, *self._padding)]))
        shape = list(first.shape)
        shape[dim] = 1
        return Column(torch.cat([*values, first.new_zeros(shape)], dim), dim, self._place(level), increment)

    def _place(self, level: _Level) -> int:
        if level not in self.levels:
            self.levels.append(level)
        return self.levels.index(level)

    def _increment(self, name: str, values: list[Any]) -> Optional[int]:
        """Returns the level by whose number of entries each graph increments later graphs, None for no increment."""
        graphs = self.graphs
        if type(graphs[0]).__inc__ is Data.__inc__ and "batch" not in name:
            return NODES if "index" in name or name == "face" else None
        table = [graph.__inc__(name, value, graph._store) for graph, value in zip(graphs, values, strict=True)]
        if any(isinstance(one, Tensor) and one.dim() for one in table):
            raise NotPacked(f"{name} has increments of several numbers")
        added = []
        for graph in (self._empty, *self._padding):
            try:
                added.append(graph.__inc__(name, graph[name], graph._store))
            except RuntimeError:  # a graph without ids has no largest one
                added.append(0)
        if any(one != int(one) or one < 0 for one in (*table, *added)):
            raise NotPacked(f"{name} has increments that are no natural numbers")
        counts = list(map(int, table))
        if not any(counts):
            return None
        return self._place(_Level(counts, _of_padding(name, list(map(int, added)))))


def _of_padding(name: str, numbers: list[int]) -> Union[tuple[int, int], str]:
    """The rule for the numbers of graphs of padding, found by graphs with 0, 2 and 4 nodes and 0, 3 and 7 edges."""
    found = {(0, 2, 4): "node", (0, 3, 7): "edge"}.get(tuple(numbers))
    if found is None and numbers[1] != numbers[2]:
        raise NotPacked(f"{name} has increments that neither nodes nor edges have")
    return found or (numbers[0], numbers[1])


def _of_last(column: Column) -> Column:
    """A column for :class:`PackedGraphs`, where all edges of padding come from a table and belong to the last graph."""
    return column if column.last is None else column._replace(level=LAST_EDGES, increment=LAST_NODES)


def _may_vary(dataset: Any) -> Optional[str]:
    name = type(dataset).__name__
    if not isinstance(dataset, InMemoryDataset):
        return f"a {name} may make its graphs when they are read; list(dataset) can be packed"
    if dataset.transform is not None:
        return "the data set has a transform, which runs at every access; list(dataset) can be packed"
    if type(dataset).get is not InMemoryDataset.get or type(dataset).__getitem__ is not GraphDataset.__getitem__:
        return f"{name} reads its graphs in a way of its own; list(dataset) can be packed"
    return None


def _values_of(graph: Data) -> list[Any]:
    return [value for item in graph._store._mapping.items() for value in item]


def _check_alike(graphs: list[Data]) -> None:
    kind, names = type(graphs[0]), graphs[0]._store._mapping.keys()
    for graph in graphs:
        if type(graph) is not kind or isinstance(graph, Batch):
            raise NotPacked(f"graphs are of {kind.__name__} and {type(graph).__name__}")
        if (own := graph._store._mapping.keys()) != names:
            raise NotPacked(f"graphs differ in attributes: {', '.join(sorted(names ^ own))}")


def _check_tensors(name: str, values: list[Tensor], dim: Optional[int]) -> None:
    first = values[0]
    shape = [size for at, size in enumerate(first.shape) if at != dim]
    for value in values:
        if value.layout is not torch.strided or value.is_nested:
            raise NotPacked(f"{name} is sparse or nested")
        if value.requires_grad:
            raise NotPacked(f"{name} requires a gradient")
        if value.dtype != first.dtype or value.device != first.device:
            raise NotPacked(f"{name} is {first.dtype} on {first.device} and {value.dtype} on {value.device}")
        if value.dim() != first.dim() or [size for at, size in enumerate(value.shape) if at != dim] != shape:
            raise NotPacked(f"{name} has the shapes {list(first.shape)} and {list(value.shape)}")


def _is_collated(value: Any) -> bool:
    """Returns whether PyG collates such values to something else than a list of them."""
    if isinstance(value, (Tensor, SparseTensor, TensorFrame, Mapping, *_NUMBERS)):
        return True
    several = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
    return several and isinstance(value[0], (Tensor, SparseTensor))


def _device_of(keys: list[_Key], device: Optional[torch.device]) -> torch.device:
    """The device of the batches: ``device`` if given, else the GPU that holds data, or the CPU if none does."""
    devices = {key.column.data.device for key in keys if key.column is not None} - {torch.device("cpu")}
    if device is None and len(devices) > 1:
        raise NotPacked("attributes are on several devices")
    return device or next(iter(devices), torch.device("cpu"))
