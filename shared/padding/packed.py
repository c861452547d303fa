"""Attributes of many graphs, concatenated once, from which batches are gathered without Python for every graph.

A *level* is the kind of entries of an attribute: nodes, edges, or another kind, of which each graph has some number.
The entries of a batch are those of the chosen graphs, followed by those of graphs of padding, which fill it to its size
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

_WATCHED = 64  # graphs that are compared to detect that a data set has changed


# Data sets -----------------------------------------------------------------------------------------------------------


class NotPacked(Exception):
    """Raised with the reason why the graphs of a data set cannot be packed."""


def refusal(dataset: Any, other: Callable[[Any], Optional[str]]) -> Optional[str]:
    """Returns why a data set may give other graphs at every access, or None if it does not.

    Args:
        dataset: a list or a tuple, a Subset or a ConcatDataset of these, or a data set that ``other`` supports.
        other: the function that answers the same for the framework's data sets.
    """
    if type(dataset) in (list, tuple):
        return None
    if isinstance(dataset, torch.utils.data.Subset):
        return refusal(dataset.dataset, other)
    if isinstance(dataset, torch.utils.data.ConcatDataset):
        return next(filter(None, (refusal(part, other) for part in dataset.datasets)), None)
    return other(dataset)


class Watched:
    """A data set whose changes can be detected.

    Args:
        dataset: a data set.
        values_of: returns the tensors and other values of an item.
    """

    def __init__(self, dataset: Any, values_of: Callable[[Any], Iterable[Any]]):
        self._dataset, self._values_of = dataset, values_of
        self._items = list(dataset) if type(dataset) in (list, tuple) else None
        self._state = self._look()

    def has_changed(self) -> bool:
        """Returns whether the data set has other items now, or whether some of them have other contents.

        The contents of 64 evenly spread items are compared, which detects a change of all items.
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
    """Replaces the fetcher of a torch.utils.data.DataLoader without worker processes: it turns ids into a batch."""

    def __init__(self, fetch: Callable[[Sequence[int]], Any]):
        self.fetch = fetch


# Arrays --------------------------------------------------------------------------------------------------------------


class Column(NamedTuple):
    """One attribute of all graphs.

    Attributes:
        data: the graphs' entries one after the other along ``dim``, then one of padding.
        dim: the dimension along which entries are concatenated.
        level: the index of its level.
        increment: the level whose number of entries in the graphs before is added to a graph's integers, or None.
        last: the name of a table with the padding's entries, which all belong to the last graph of padding; None if
            they are copies of the last entry of ``data``.
    """

    data: Tensor
    dim: int
    level: int
    increment: Optional[int] = None
    last: Optional[str] = None


class PackedGraphs:
    """The attributes of all graphs.

    Args:
        counts: for every level, the number of entries of every graph ``[num_graphs]``. The first level is nodes.
        columns: the attributes.
        device: the device of the attributes and of batches.
    """

    def __init__(self, counts: Sequence[Tensor], columns: Sequence[Column], device: torch.device):
        self.num_graphs, self.num_levels, self.device = counts[0].numel(), len(counts), device
        ends = [count.cumsum(0) for count in counts]
        # Column num_graphs is a graph of padding, whose entries follow all others.
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
        """Returns a batch of the chosen graphs and graphs of padding.

        Args:
            padding: for every level, the numbers of entries of every graph of padding.
            tables: name in :attr:`Column.last` -> entries of the padding on the CPU, int64 ``[..., entries]``.
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
    """The chosen graphs of a batch.

    Attributes:
        ids: int64 ``[num_chosen]``.
        entries: for every level, the number of their entries.
        largest: the largest number of nodes of one of them.
    """

    ids: Tensor
    entries: list[int]
    largest: int


class Gathered(NamedTuple):
    """A batch of packed graphs.

    Attributes:
        attributes: the attributes in the order of the columns.
        sizes: for every level, the number of entries.
        counts: for every level, the number of entries of every graph ``[levels, graphs]``, on the CPU.
        bounds: for every level, the first entry of every graph and the number of entries, on the CPU: ``[levels, graphs
            + 1]``.
        bounds_there: ``bounds`` on the device; the same tensor if that is the CPU.
    """

    attributes: list[Tensor]
    sizes: list[int]
    counts: Tensor
    bounds: Tensor
    bounds_there: Tensor


def in_last(numbers: Sequence[int]) -> list[int]:
    """Moves all entries of padding to the last graph."""
    return [0] * (len(numbers) - 1) + [sum(numbers)]


def graph_of(level: int, graphs: int) -> Column:
    """The column that has for every entry of a level the index of its graph in the batch.

    Args:
        graphs: the level with one entry per graph.
    """
    return Column(torch.zeros(1, dtype=torch.int64), 0, level, graphs)


def mask_of(level: int, count: int) -> Column:
    """The column that is true for the real entries of a level, of which the data set has ``count``."""
    return Column(torch.arange(count + 1) < count, 0, level)


def _on(device: torch.device, tables: Sequence[Tensor]) -> Sequence[Tensor]:
    """Copies tables to a device, by one asynchronous copy."""
    if device.type == "cpu":
        return tables
    sizes = [table.numel() for table in tables]
    joined = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=True)
    torch.cat([table.flatten() for table in tables], out=joined)
    moved = joined.to(device, non_blocking=True).split(sizes)
    return [part.view(table.shape) for part, table in zip(moved, tables)]
