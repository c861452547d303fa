"""Attributes of many graphs, concatenated once, from which batches are gathered without Python for every graph.

A *level* is what an attribute has entries for: nodes, edges, or something of its own, of which every graph has its own
number. The entries of a batch are those of the chosen graphs, then of graphs of padding, which fill it to its size
(:mod:`edgeless.padding`). The numbers of entries stay on the CPU, so that all sizes are known there and nothing waits
for a GPU; the arrays may be on any device.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from .. import _C
from ..ops.packed import gather_packed

__all__ = [
    "Chosen",
    "Column",
    "Fetcher",
    "Gathered",
    "NotPacked",
    "PackedGraphs",
    "Watched",
    "graph_of",
    "in_last",
    "mask_of",
    "refusal",
]

_WATCHED = 64  # graphs that are looked at to see whether a data set has changed


# Data sets -----------------------------------------------------------------------------------------------------------


class NotPacked(Exception):
    """Says in words why the graphs of a data set cannot be packed."""


def refusal(dataset: Any, other: Callable[[Any], Optional[str]]) -> Optional[str]:
    """Returns why a data set may give other graphs at every access, or None if it does not.

    Args:
        dataset: a list or a tuple, parts and chains of such ones, or something that ``other`` knows.
        other: the same function for the framework's data sets.
    """
    if type(dataset) in (list, tuple):
        return None
    if isinstance(dataset, torch.utils.data.Subset):
        return refusal(dataset.dataset, other)
    if isinstance(dataset, torch.utils.data.ConcatDataset):
        return next(filter(None, (refusal(part, other) for part in dataset.datasets)), None)
    return other(dataset)


class Watched:
    """A data set, and what it looked like.

    Args:
        dataset: of items.
        values_of: the tensors and other values of an item.
    """

    def __init__(self, dataset: Any, values_of: Callable[[Any], Iterable[Any]]):
        self._dataset, self._values_of = dataset, values_of
        self._items = list(dataset) if type(dataset) in (list, tuple) else None
        self._state = self._look()

    def has_changed(self) -> bool:
        """Returns whether the data set has other items now, or whether some of them have other contents.

        Contents are looked at in 64 items, evenly spread, so that a change of all is noticed.
        """
        if self._items is not None:
            now = self._dataset
            if len(now) != len(self._items) or any(one is not other for one, other in zip(self._items, now)):
                return True
        return self._state != self._look()

    def _look(self) -> tuple[list[Any], bytes]:
        count = len(self._dataset)
        others: list[Any] = [count]
        tensors: list[Tensor] = []
        for place in range(0, count, max(1, count // _WATCHED)):
            for value in self._values_of(self._dataset[place]):
                if type(value) is Tensor and value.dim() <= 4 and value.layout is torch.strided:
                    tensors.append(value)
                    others.append(value.requires_grad)
                else:
                    others.append(value if isinstance(value, (int, float, str)) else type(value))
            others.append(len(tensors))
        return others, _C.stamps(tensors, False)


class Fetcher:
    """Stands for the fetcher of a torch.utils.data.DataLoader of one process: it turns ids into a batch."""

    def __init__(self, fetch: Callable[[Sequence[int]], Any]):
        self.fetch = fetch


# Arrays --------------------------------------------------------------------------------------------------------------


class Column(NamedTuple):
    """One attribute of all graphs.

    Attributes:
        data: the graphs' entries one after the other along ``dim``, then one of padding.
        dim: the dimension along which entries are concatenated.
        level: its place among the levels.
        increment: the level whose number of entries in the graphs before is added to a graph's integers, or None.
        last: the name of a table with the padding's entries, whose level has none in graphs of padding but the last, or
            None if they are copies of the last one in ``data``.
    """

    data: Tensor
    dim: int
    level: int
    increment: Optional[int] = None
    last: Optional[str] = None


class PackedGraphs:
    """The attributes of all graphs.

    Args:
        counts: of every level, the number of entries of every graph ``[num_graphs]``. The first level is that of nodes.
        columns: the attributes.
        device: of the attributes and of batches.
    """

    def __init__(self, counts: Sequence[Tensor], columns: Sequence[Column], device: torch.device):
        self.num_graphs, self.num_levels, self.device = counts[0].numel(), len(counts), device
        ends = [count.cumsum(0) for count in counts]
        # Column num_graphs is a graph of padding, whose entries begin behind all.
        filled = [torch.cat((count, count.new_zeros(1))) for count in counts]
        begins = [torch.cat((end - count, end[-1:])) for end, count in zip(ends, counts)]
        self._table = torch.stack((*filled, *begins))
        self._columns = [column._replace(data=column.data.to(device)) for column in columns]
        self._arguments = (
            [column.data for column in self._columns],
            [column.dim for column in self._columns],
            [column.level for column in self._columns],
            [-1 if column.increment is None else column.increment for column in self._columns],
        )
        self._tails: dict[int, Tensor] = {}

    def find(self, ids: Sequence[int]) -> Chosen:
        """Returns the graphs with these ids.

        Raises:
            IndexError: an id is out of range; negative ones count from the end, as those of a list do.
        """
        chosen = torch.frombuffer(array("q", ids), dtype=torch.int64)
        least, most = min(ids), max(ids)
        if most >= self.num_graphs or least < -self.num_graphs:
            wrong = most if most >= self.num_graphs else least
            raise IndexError(f"a batch has graph {wrong}, expected an id below {self.num_graphs}")
        if least < 0:
            chosen = torch.where(chosen < 0, chosen + self.num_graphs, chosen)
        counts = self._table[: self.num_levels].index_select(1, chosen)
        return Chosen(chosen, counts.sum(1).tolist(), int(counts[0].max()))

    def gather(self, chosen: Chosen, padding: Sequence[Sequence[int]], tables: dict[str, Tensor]) -> Gathered:
        """Returns a batch: the chosen graphs, and those of padding.

        Args:
            padding: of every level, the numbers of entries of every graph of padding.
            tables: entries of the padding on the CPU, int64 ``[..., entries]``, by the names that columns have.
        """
        added = len(padding[0])
        if added not in self._tails:
            self._tails[added] = torch.full((added,), self.num_graphs)
        picked = self._table.index_select(1, torch.cat((chosen.ids, self._tails[added])))
        picked[: self.num_levels, -added:] = torch.tensor(padding)
        counts, begins = picked[: self.num_levels], picked[self.num_levels :]
        bounds = torch.zeros(self.num_levels, picked.size(1) + 1, dtype=torch.int64)
        torch.cumsum(counts, 1, out=bounds[:, 1:])
        sizes = [count + sum(rest) for count, rest in zip(chosen.entries, padding)]
        there, begins, *rest = _on(self.device, (bounds, begins, *tables.values()))
        moved = dict(zip(tables, rest))
        last = [None if column.last is None else moved[column.last] for column in self._columns]
        return Gathered(gather_packed(*self._arguments, last, there, begins, sizes), sizes, counts, bounds, there)


class Chosen(NamedTuple):
    """Graphs of a batch.

    Attributes:
        ids: int64 ``[num_chosen]``.
        entries: of every level, the number of their entries.
        largest: the most entries that one of them has of the first level.
    """

    ids: Tensor
    entries: list[int]
    largest: int


class Gathered(NamedTuple):
    """A batch of packed graphs.

    Attributes:
        attributes: in the order of the columns.
        sizes: of every level, the number of entries.
        counts: of every level, the number of entries of every graph ``[levels, graphs]``, on the CPU.
        bounds: of every level, where the entries of every graph begin, and how many there are, on the CPU: ``[levels,
            graphs + 1]``.
        bounds_there: the same on the device; the same tensor if that is the CPU.
    """

    attributes: list[Tensor]
    sizes: list[int]
    counts: Tensor
    bounds: Tensor
    bounds_there: Tensor


def in_last(numbers: Sequence[int]) -> list[int]:
    """The same number of entries of padding, all in the last graph."""
    return [0] * (len(numbers) - 1) + [sum(numbers)]


def graph_of(level: int, graphs: int) -> Column:
    """The column of the number of its graph in the batch, for every entry of a level.

    Args:
        graphs: the level with one entry a graph.
    """
    return Column(torch.zeros(1, dtype=torch.int64), 0, level, graphs)


def mask_of(level: int, count: int) -> Column:
    """The column that is true for the entries of a level that are no padding. The graphs have ``count`` of them."""
    return Column(torch.arange(count + 1) < count, 0, level)


def _on(device: torch.device, tables: Sequence[Tensor]) -> Sequence[Tensor]:
    """The tables on a device, by one copy that does not wait."""
    if device.type == "cpu":
        return tables
    sizes = [table.numel() for table in tables]
    joined = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=True)
    torch.cat([table.flatten() for table in tables], out=joined)
    moved = joined.to(device, non_blocking=True).split(sizes)
    return [part.view(table.shape) for part, table in zip(moved, tables)]
