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

from edgeless.packed import Column, NotPacked, PackedGraphs, Places, Watched, refusal
from edgeless.padding import Size

__all__ = ["MASKS", "PackedData"]

NODES, EDGES = 0, 1  # levels
MASKS = ("node_mask", "edge_mask", "graph_mask")
_NUMBERS = (bool, int, float)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)


class _Key(NamedTuple):
    """One attribute: a column, or a list with an item of every graph, of an empty one and of the padding.

    Attributes:
        each: of a column without a level, how many entries of every graph are concatenated; None if they are stacked.
        increment: the place of its table among the increments, or None.
        is_float: whether the values are numbers of Python, which get torch's default dtype.
    """

    name: str
    column: Optional[Column] = None
    items: Optional[list] = None
    each: Optional[int] = None
    increment: Optional[int] = None
    is_float: bool = False


class _Level(NamedTuple):
    """Numbers of entries: of every graph, of an empty one, and of the padding: a number, ``"node"`` or ``"edge"``."""

    counts: list[int]
    empty: int
    padding: Union[int, str]


class PackedData:
    """The graphs of a data set, packed.

    Args:
        dataset: of ``Data``.
        made: makes a graph of padding with so many nodes and edges.
        follow_batch, exclude_keys: as those of PyG's DataLoader.
        device: where the arrays and the batches are; None for where the data are.
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
        self.watched = Watched(dataset, lambda graph: [v for item in graph._store._mapping.items() for v in item])
        reader = _Reader([dataset[place] for place in range(len(dataset))], made)
        first, excluded = reader.graphs[0], {*(exclude_keys or ()), "ptr"}
        keys = [reader.key(name) for name in first._store._mapping if name not in excluded]
        if "edge_index" not in excluded:
            self._check_edge_index(keys)
        self.device, self._keys = _on_one_device(keys, device)
        self._levels = reader.levels
        self._packed = PackedGraphs(
            [torch.tensor(level.counts) for level in self._levels],
            [level.empty for level in self._levels],
            [torch.tensor(table) for table in reader.increments],
            self.device,
        )
        self._follow = set(follow_batch or ())
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

    @staticmethod
    def _check_edge_index(keys: list[_Key]) -> None:
        column = next(key.column for key in keys if key.name == "edge_index")
        if column is None or column.level != EDGES or column.dim != 1 or column.data.dim() != 2:
            raise NotPacked("edge_index is no tensor [2, E] that is concatenated along its edges")

    # Batches ---------------------------------------------------------------------------------------------------------

    def batch(self, ids: Sequence[int], fit: Callable[[int, int], Size], graphs: int) -> Batch:
        """Returns the batch of the graphs with these ids, in the attributes' order of the first graph of the data set.

        Args:
            fit: returns the numbers of nodes and edges of a batch, padding included, given those without.
            graphs: the least number of graphs before the padding; empty ones are added.
        """
        chosen, real = self._packed.find(ids)
        size = fit(real[NODES], real[EDGES])
        rest = {"node": size.nodes - real[NODES], "edge": size.edges - real[EDGES]}
        padding = [rest.get(level.padding, level.padding) for level in self._levels]
        places = self._packed.places(chosen, real, max(0, graphs - len(ids)), padding)
        made = _Made(self._blank, places, ids, self._follow)
        for key in self._keys:
            made.add(key)
        if self._has_batch:
            made.mapping["batch"], made.mapping["ptr"] = places.graph_of(NODES), places.ptr(NODES)
        for name, count, of in zip(MASKS, (*size, places.num_graphs), (*real[:2], len(ids)), strict=True):
            made.mapping[name] = self._packed.numbers(count) < of
        return made.finished()


class _Made:
    """A batch that is being put together."""

    def __init__(self, blank: Batch, places: Places, ids: Sequence[int], follow: set[str]):
        self._batch, self._places, self._ids, self._follow = copy.copy(blank), places, ids, follow
        self._store = self._batch._store
        self.mapping = self._store._mapping
        self._slices: dict[str, Tensor] = {}
        self._increments: dict[str, Optional[Tensor]] = {}
        self._count = torch.arange(places.num_graphs + 1)
        self._zeros = torch.zeros(places.num_graphs, dtype=torch.int64)

    def add(self, key: _Key) -> None:
        """Adds an attribute."""
        places, level = self._places, None if key.column is None else key.column.level
        if key.name == "num_nodes":
            self._store._num_nodes = places.counts[NODES].tolist()
            self.mapping["num_nodes"] = places.sizes[NODES]
            return
        each = 1 if key.each is None else key.each
        slices = places.bounds(level) if level is not None else self._count if each == 1 else self._count * each
        self.mapping[key.name] = self._items(key.items) if key.column is None else self._gathered(key)
        self._slices[key.name] = slices
        table = self._zeros if key.increment is None else places.starts[places.packed.num_levels + key.increment]
        self._increments[key.name] = None if key.column is None else table
        if key.name in self._follow:
            numbers = places.packed.numbers(places.num_graphs + 1)
            of = numbers[:-1].repeat_interleave(each) if level is None else places.graph_of(level).clone()
            self.mapping[f"{key.name}_batch"] = of
            self.mapping[f"{key.name}_ptr"] = numbers * each if level is None else places.ptr(level)

    def _items(self, items: list) -> list:
        added = self._places.num_graphs - len(self._ids) - 1
        return [*(items[place] for place in self._ids), *items[-2:-1] * added, items[-1]]

    def _gathered(self, key: _Key) -> Tensor:
        places, column = self._places, key.column
        found = places.gather(column)
        if key.is_float:
            found = found.to(torch.get_default_dtype())
        if key.increment is not None:
            offsets = places.offsets(key.increment, column.level).to(found.dtype)
            dim = 0 if column.level is None else column.dim
            found.add_(offsets.view(-1, *[1] * (found.dim() - 1 - dim)))
        if key.name == "edge_index":
            padded = places.padded_edges
            found.narrow(1, found.size(1) - padded.size(1), padded.size(1)).add_(padded)
        return found if key.each is None else found.flatten(0, 1)

    def finished(self) -> Batch:
        """The batch."""
        batch = self._batch
        batch._num_graphs, batch._slice_dict, batch._inc_dict = self._places.num_graphs, self._slices, self._increments
        return batch


# Reading a data set --------------------------------------------------------------------------------------------------


class _Reader:
    """Packs the attributes of graphs one by one, and collects their levels and increments."""

    def __init__(self, graphs: list[Data], made: Callable[[int, int], Data]):
        _check_alike(graphs)
        self.graphs, self._empty, self._padding = graphs, made(0, 0), made(2, 3)
        nodes = [graph.num_nodes for graph in graphs]
        if not all(type(count) is int for count in nodes):
            raise NotPacked("the number of nodes of a graph is not known, or no int")
        self.levels = [_Level(nodes, 0, "node"), _Level([graph.num_edges for graph in graphs], 0, "edge")]
        self.increments: list[list[int]] = []

    def key(self, name: str) -> _Key:
        """Returns an attribute, packed.

        Raises:
            NotPacked: PyG's collation does more with it than concatenating it.
        """
        values = [graph[name] for graph in self.graphs]
        if name == "num_nodes":
            return _Key(name)
        kinds = {type(value) for value in values}
        if kinds == {Tensor}:
            return self._tensors(name, values)
        if len(kinds) == 1 and kinds <= {*_NUMBERS}:
            numbers = torch.tensor([*values, *[self._empty[name]] * 2], dtype=_dtype_of(values[0]))
            increment = self._increment(name, values)
            if increment is not None and numbers.dtype is not torch.int64:
                raise NotPacked(f"{name} has increments and is not of integers")
            return _Key(name, Column(numbers, 0, None), increment=increment, is_float=kinds == {float})
        if any(map(_is_collated, values)):
            raise NotPacked(f"{name} is of {', '.join(sorted(kind.__name__ for kind in kinds))}")
        return _Key(name, items=[*values, self._empty[name], self._padding[name]])

    def _tensors(self, name: str, values: list[Tensor]) -> _Key:
        first, empty, padding = values[0], self._empty[name], self._padding[name]
        dim = self.graphs[0].__cat_dim__(name, first, self.graphs[0]._store)
        stacked = dim is None or first.dim() == 0
        if not stacked:
            if not isinstance(dim, int):
                raise NotPacked(f"{name} is concatenated along {dim}")
            dim = dim % first.dim()
        _check_tensors(name, values, None if stacked else dim)
        increment = self._increment(name, values)
        if increment is not None and first.dtype not in _INTEGERS:
            raise NotPacked(f"{name} has increments and is not of integers")
        if stacked:
            data = torch.stack([*values, empty, padding])
            return _Key(name, Column(data, 0, None), increment=increment)
        counts, fewest, most = [value.size(dim) for value in values], empty.size(dim), padding.size(dim)
        level = self._level(counts, fewest, most)
        if level not in (NODES, EDGES) and dim == 0 and {*counts, most} == {fewest}:
            data = torch.stack([*values, empty, padding])
            return _Key(name, Column(data, 0, None), each=fewest, increment=increment)
        if level is None:
            self.levels.append(_Level(counts, fewest, {(0, 2): "node", (0, 3): "edge"}.get((fewest, most), most)))
            level = len(self.levels) - 1
        shape = list(first.shape)
        shape[dim] = 1
        data = torch.cat([*values, first.new_zeros(shape)], dim)
        return _Key(name, Column(data, dim, level), increment=increment)

    def _level(self, counts: list[int], fewest: int, most: int) -> Optional[int]:
        for place in (NODES, EDGES):
            if fewest == 0 and most == 2 + place and counts == self.levels[place].counts:
                return place
        return None

    def _increment(self, name: str, values: list[Any]) -> Optional[int]:
        """Returns the place of the table of what graphs add to later ones, None where that is nothing."""
        graphs, nodes = self.graphs, self.levels[NODES].counts
        if type(graphs[0]).__inc__ is Data.__inc__ and "batch" not in name:
            table = [*nodes, 0] if "index" in name or name == "face" else [0]
        else:
            table = [graph.__inc__(name, value, graph._store) for graph, value in zip(graphs, values, strict=True)]
            if any(isinstance(one, Tensor) and one.dim() for one in table):
                raise NotPacked(f"{name} has increments of several numbers")
            try:
                table.append(self._empty.__inc__(name, self._empty[name], self._empty._store))
            except RuntimeError:  # of the largest id of a graph that has none
                table.append(0)
            if any(one != int(one) or one < 0 for one in table):
                raise NotPacked(f"{name} has increments that are no natural numbers")
            table = list(map(int, table))
        if not any(table):
            return None
        if table not in self.increments:
            self.increments.append(table)
        return self.increments.index(table)


def _may_vary(dataset: Any) -> Optional[str]:
    name = type(dataset).__name__
    if not isinstance(dataset, InMemoryDataset):
        return f"a {name} may make its graphs when they are read; list(dataset) can be packed"
    if dataset.transform is not None:
        return "the data set has a transform, which runs at every access; list(dataset) can be packed"
    if type(dataset).get is not InMemoryDataset.get or type(dataset).__getitem__ is not GraphDataset.__getitem__:
        return f"{name} reads its graphs in a way of its own; list(dataset) can be packed"
    return None


def _check_alike(graphs: list[Data]) -> None:
    kind, names = type(graphs[0]), set(graphs[0].keys())
    for graph in graphs:
        if type(graph) is not kind or isinstance(graph, Batch):
            raise NotPacked(f"graphs are of {kind.__name__} and {type(graph).__name__}")
        if set(graph.keys()) != names:
            raise NotPacked(f"graphs differ in attributes: {', '.join(sorted(names ^ set(graph.keys())))}")


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
    """Returns whether PyG makes something else of such values than a list of them."""
    if isinstance(value, (Tensor, SparseTensor, TensorFrame, Mapping, *_NUMBERS)):
        return True
    several = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
    return several and isinstance(value[0], (Tensor, SparseTensor))


def _dtype_of(number: Any) -> torch.dtype:
    return {bool: torch.bool, int: torch.int64, float: torch.float64}[type(number)]


def _on_one_device(keys: list[_Key], device: Optional[torch.device]) -> tuple[torch.device, list[_Key]]:
    if device is None:
        devices = {key.column.data.device for key in keys if key.column is not None}
        device = next((one for one in devices if one.type != "cpu"), torch.device("cpu"))
        if len(devices - {torch.device("cpu")}) > 1:
            raise NotPacked("attributes are on several devices")
    moved = [
        key if key.column is None else key._replace(column=key.column._replace(data=key.column.data.to(device)))
        for key in keys
    ]
    return device, moved
