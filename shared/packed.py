"""Attributes of many graphs, concatenated once, from which batches are gathered without Python for every graph.

A *level* is what an attribute has entries for: nodes, edges, or something of its own, of which every graph has its own
number. The entries of a batch are those of the chosen graphs, then of empty graphs and of one graph of padding, which
fill it to its size (:mod:`edgeless.padding`). The numbers of entries stay on the CPU, so that all sizes are known there
and nothing waits for a GPU; the arrays may be on any device.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from . import _C
from .padding import pad_edges

__all__ = ["Column", "Fetcher", "NotPacked", "PackedGraphs", "Places", "Watched", "refusal"]

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
        data: the graphs' entries one after the other along ``dim``, then one of padding. Without a level: along the
            first dimension one entry of every graph, one of an empty graph and one of padding.
        dim: the dimension along which entries are concatenated.
        level: its place among the levels, or None for one entry a graph.
    """

    data: Tensor
    dim: int
    level: Optional[int]


class PackedGraphs:
    """The numbers of entries of all graphs.

    Args:
        counts: of every level, the number of entries of every graph ``[num_graphs]``.
        empty: of every level, the number of entries of an empty graph.
        increments: tables ``[num_graphs + 1]`` of what a graph adds to the ids of later ones, an empty one last.
        device: of the arrays.
    """

    def __init__(
        self, counts: Sequence[Tensor], empty: Sequence[int], increments: Sequence[Tensor], device: torch.device
    ):
        self.num_graphs, self.device = counts[0].numel(), device
        self.num_levels = len(counts)
        self.empty = list(empty)
        ends = [count.cumsum(0) for count in counts]
        self.totals = [int(end[-1]) for end in ends]
        # Columns num_graphs and num_graphs + 1 are the empty graph and the padding, whose entries begin behind all.
        filled = [torch.cat((count, count.new_tensor([none, 0]))) for count, none in zip(counts, empty)]
        adding = [torch.cat((table, table.new_zeros(1))) for table in increments]
        begins = [
            torch.cat((end - count, end.new_tensor([total, total])))
            for end, count, total in zip(ends, counts, self.totals)
        ]
        self._table = torch.stack((*filled, *adding, *begins))  # [2 * levels + increments, num_graphs + 2]
        self._numbers = torch.arange(1024, device=device)
        self._tails: dict[int, Tensor] = {}

    def numbers(self, count: int) -> Tensor:
        """0, 1, ... ``count - 1`` on the device; not to be written to."""
        if count > self._numbers.numel():
            self._numbers = torch.arange(count + count // 4, device=self.device)
        return self._numbers[:count]

    def find(self, ids: Sequence[int]) -> tuple[Tensor, list[int]]:
        """Returns the ids of graphs as a tensor ``[num_chosen]`` and how many entries the graphs have of every level.

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
        return chosen, self._table[: self.num_levels].index_select(1, chosen).sum(1).tolist()

    def places(self, chosen: Tensor, real: Sequence[int], empty: int, padding: Sequence[int]) -> Places:
        """Returns where the entries of a batch are.

        Args:
            chosen, real: as :meth:`find` returns them.
            empty: the number of empty graphs.
            padding: of every level, the number of entries of the padding. Those of the first two are nodes and edges.
        """
        if empty not in self._tails:
            self._tails[empty] = torch.tensor([*[self.num_graphs] * empty, self.num_graphs + 1])
        ids = torch.cat((chosen, self._tails[empty]))
        sizes = [count + none * empty + rest for count, none, rest in zip(real, self.empty, padding)]
        return Places(self, ids, sizes, padding)


class Places:
    """Where the entries of one batch stand in the packed arrays and in the batch.

    Attributes:
        sizes: of every level, the number of entries.
        counts: of every level, the number of entries of every graph ``[levels, graphs]``, on the CPU.
        starts: of every level and increment, the sum over the graphs before ``[levels + increments, graphs]``.
        ids: of the graphs, on the device.
        padded_edges: the edges of the padding ``[2, num_padded]`` among its own nodes, on the device.
    """

    def __init__(self, packed: PackedGraphs, ids: Tensor, sizes: list[int], padding: Sequence[int]):
        self.packed, self.sizes, self.num_graphs = packed, sizes, ids.numel()
        levels = packed.num_levels
        picked = packed._table.index_select(1, ids)
        for level, count in enumerate(padding):
            picked[level, -1] = count
        counts, begins = picked[:-levels], picked[-levels:]
        ends = counts.cumsum(1)
        self.counts, self.starts = counts[:levels], ends - counts
        self._bounds = torch.cat((self.starts[:levels], ends[:levels, -1:]), 1)
        shifts, padded = begins - self.starts[:levels], pad_edges(*padding[:2])
        tables = (self.counts, self._bounds, shifts, self.starts[levels:], ids, padded)
        moved = _on(packed.device, tables)
        self._counts, self._bounds_there, self._shifts, self._offsets, self.ids, self.padded_edges = moved
        self._graphs: dict[int, Tensor] = {}
        self._rows: dict[int, Tensor] = {}

    def bounds(self, level: int) -> Tensor:
        """Where the entries of every graph begin, and the number of all: ``[graphs + 1]`` on the CPU."""
        return self._bounds[level]

    def ptr(self, level: int) -> Tensor:
        """The same on the device, as a tensor of its own."""
        return self._bounds_there[level].clone()

    def graph_of(self, level: int) -> Tensor:
        """The graph of every entry of the batch."""
        if level not in self._graphs:
            self._graphs[level] = torch.repeat_interleave(self._counts[level], output_size=self.sizes[level])
        return self._graphs[level]

    def offsets(self, increment: int, level: Optional[int]) -> Tensor:
        """What is added to the ids of every entry, or of every graph where there is no level."""
        offsets = self._offsets[increment]
        return offsets if level is None else offsets.index_select(0, self.graph_of(level))

    def gather(self, column: Column) -> Tensor:
        """The attribute of the batch."""
        if column.level is None:
            return column.data.index_select(0, self.ids)
        return column.data.index_select(column.dim, self._rows_of(column.level))

    def _rows_of(self, level: int) -> Tensor:
        if level not in self._rows:
            shifts = self._shifts[level].index_select(0, self.graph_of(level))
            rows = shifts.add_(self.packed.numbers(self.sizes[level]))
            self._rows[level] = rows.clamp_(max=self.packed.totals[level])  # the entry of padding, behind all others
        return self._rows[level]


def _on(device: torch.device, tables: Sequence[Tensor]) -> Sequence[Tensor]:
    """The tables on a device, by one copy that does not wait."""
    if device.type == "cpu":
        return tables
    sizes = [table.numel() for table in tables]
    joined = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=True)
    torch.cat([table.flatten() for table in tables], out=joined)
    moved = joined.to(device, non_blocking=True).split(sizes)
    return [part.view(table.shape) for part, table in zip(moved, tables)]
