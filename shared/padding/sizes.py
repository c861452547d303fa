"""The sizes that batches of small graphs are padded to, and the edges of padding; see :mod:`edgeless.padding`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Optional, Union

import torch
from torch import Tensor

__all__ = ["Padding", "Size", "Sizes", "choose_sizes", "pad_edges"]

LEAST_NODES = 2  # nodes of the padding, since its edges must not be self loops, which some layers would replace
_SAMPLE = 10_000  # most graphs of a data set whose sizes are read
_DRAWS = 1_000  # batches that are drawn to estimate the distribution of their sizes
_MARGIN = 1.02  # the largest size divided by the largest batch drawn
_USUAL = 0.9  # the fraction of batches whose largest graph counts as usual
# From this multiple of the usual number of nodes a second bound is profitable: attention among all nodes of a graph
# takes 2.3 times as long.
_MUCH_LARGER = 1.5


class Size(NamedTuple):
    """Numbers of nodes and edges of a padded batch, and of the graphs that its padding may be split over."""

    nodes: int
    edges: int
    graphs: int = 1


class Padding(NamedTuple):
    """The graphs that are added to a batch.

    Attributes:
        nodes, edges: their numbers of nodes and edges, in equal parts; graphs without nodes, if any, come first.
        most_nodes: an upper bound for the nodes of the batch's graphs, which takes few values.
    """

    nodes: list[int]
    edges: list[int]
    most_nodes: int


@dataclass
class Sizes:
    """The sizes to which batches are padded, and the fraction of padding so far.

    Attributes:
        sizes: the sizes from the smallest to the largest.
        expected: the fractions of nodes and edges that are padding in the batches that were drawn to choose the sizes.
        most_nodes: the number of nodes of the largest graph, preceded by a smaller number if the graphs of most batches
            do not exceed it. No graph of padding has more nodes than the first. Empty if they are not known.
        batches: for each size the number of batches that were padded to it.
        too_large: batches larger than the largest size, which were given a graph without nodes instead.
    """

    sizes: list[Size]
    expected: tuple[float, float] = (0.0, 0.0)
    most_nodes: tuple[int, ...] = ()
    batches: dict[int, int] = field(default_factory=dict)
    too_large: int = 0
    _real: list[int] = field(default_factory=lambda: [0, 0])
    _padded: list[int] = field(default_factory=lambda: [0, 0])

    def padding(self, nodes: int, edges: int, largest: int, missing: int = 0) -> Padding:
        """Returns the padding of a batch with these numbers of nodes and edges, and counts the batch.

        Args:
            nodes, edges: the numbers of the batch.
            largest: the number of nodes of its largest graph.
            missing: the number of graphs by which it is smaller than other batches.
        """
        size = self.fit(nodes, edges) or Size(nodes, edges)
        rest, added = size.nodes - nodes, missing + size.graphs
        filled = min(added, max(1, rest // LEAST_NODES))
        empty, own = [0] * (added - filled), _shares(rest, filled)
        most = max(largest, own[0])
        for room in self.most_nodes:
            if most <= room:
                most = room
                break
        else:
            most = -(-most // self.most_nodes[-1]) * self.most_nodes[-1] if self.most_nodes else most
        return Padding(empty + own, empty + _shares(size.edges - edges, filled), most)

    def fit(self, nodes: int, edges: int) -> Optional[Size]:
        """Returns the smallest size that fits a batch with these numbers of nodes and edges, or None."""
        for place, size in enumerate(self.sizes):
            if nodes + LEAST_NODES <= size.nodes and edges <= size.edges:
                return self._note(place, nodes, edges)
        self.too_large += 1
        return None

    def _note(self, place: int, nodes: int, edges: int) -> Size:
        size = self.sizes[place]
        self.batches[place] = self.batches.get(place, 0) + 1
        for i, (real, padded) in enumerate(((nodes, size.nodes), (edges, size.edges))):
            self._real[i] += real
            self._padded[i] += padded
        return size

    @property
    def waste(self) -> tuple[float, float]:
        """The fractions of nodes and edges of padded batches that were padding; before the first batch, the expected
        ones.
        """
        if not self.batches:
            return self.expected
        return tuple(1 - real / max(1, padded) for real, padded in zip(self._real, self._padded))

    def __str__(self) -> str:
        nodes, edges = self.waste
        count = sum(self.batches.values())
        of = f"of {count} batches" if count else "expected"
        sizes = f"{len(self.sizes)} size{'s' * (len(self.sizes) != 1)}"
        lines = [f"{sizes}, {100 * nodes:.1f} % of nodes and {100 * edges:.1f} % of edges padding, {of}"]
        lines += [f"  {size.nodes} nodes, {size.edges} edges, {size.graphs} more graphs" for size in self.sizes]
        return "\n".join(lines + ([f"  {self.too_large} batches were larger"] if self.too_large else []))


def counts_of(dataset: Any, counts: Callable[[Any], tuple[int, int]], packed: Any = None) -> list[tuple[int, ...]]:
    """The numbers of nodes and the numbers of edges of a data set's graphs, or of a sample of a large data set.

    Args:
        dataset: the data set, whose items ``counts`` reads.
        counts: returns the numbers of nodes and edges of an item.
        packed: the packed data set, if there is one, whose ``nodes`` and ``edges`` are read instead.
    """
    places = range(len(dataset))
    if len(dataset) > _SAMPLE:
        drawn = torch.Generator().manual_seed(0)
        places = torch.randperm(len(dataset), generator=drawn)[:_SAMPLE].tolist()
    if packed is not None:
        return [tuple(packed.nodes[place] for place in places), tuple(packed.edges[place] for place in places)]
    return list(zip(*(counts(dataset[place]) for place in places)))


def choose_sizes(
    nodes: Sequence[int],
    edges: Sequence[int],
    batch_size: int,
    *,
    most: int = 8,
    waste: float = 0.06,
    sizes: Optional[Sequence[tuple[int, int]]] = None,
    largest: Optional[int] = None,
    seed: int = 0,
) -> Sizes:
    """Chooses the fewest sizes for batches of random graphs of a data set with which little is padding.

    The sizes are a geometric series from the smallest to the largest of many batches that are drawn, and nodes and
    edges grow together. The padding of each size is split into so many graphs that none is larger than the data set's
    own.

    Args:
        nodes, edges: the numbers of nodes and edges of every graph of the data set, or of a sample of it.
        batch_size: the number of graphs in a batch.
        most: the largest number of sizes.
        waste: the fraction of nodes, and of edges, that may be padding; fewer sizes than ``most`` are chosen if they
            suffice.
        sizes: pairs of nodes and edges to use instead of choosing them.
        largest: the number of nodes of the data set's largest graph; the largest of ``nodes`` by default.
        seed: the seed of the draws.
    Raises:
        ValueError: there are no graphs, the lengths differ, or a number is out of range.

    Example:
        >>> from edgeless.padding import choose_sizes
        >>> sizes = choose_sizes([9, 12, 20], [18, 24, 40], batch_size=2)
        >>> size = sizes.fit(25, 50)
        >>> size.nodes >= 25, size.edges >= 50
        (True, True)
    """
    if not len(nodes) or len(nodes) != len(edges):
        raise ValueError(
            f"choose_sizes: nodes and edges must have one number a graph, got {len(nodes)} and {len(edges)}"
        )
    if batch_size < 1 or most < 1 or not 0 < waste < 1:
        raise ValueError(
            "choose_sizes: batch_size and most must be at least 1, and waste between 0 and 1, got "
            f"{batch_size}, {most} and {waste}"
        )
    counts = torch.tensor([list(map(int, nodes)), list(map(int, edges))], dtype=torch.float64)
    drawn = torch.Generator().manual_seed(seed)
    if batch_size < len(nodes):
        # Without replacement within a batch, as loaders draw.
        picks = torch.stack([torch.randperm(len(nodes), generator=drawn)[:batch_size] for _ in range(_DRAWS)])
        totals = counts[:, picks].sum(-1)
        largest_of_batches = counts[0][picks].amax(1)
    else:
        totals, largest_of_batches = counts.sum(1, keepdim=True), counts[0].amax(0, keepdim=True)
    rooms = _rooms(largest_of_batches, max(int(counts[0].max()), largest or 0))
    if sizes is None:
        found, expected = _geometric(totals, most, waste, _MARGIN if batch_size < len(nodes) else 1)
    else:
        found, expected = [Size(*size) for size in sorted(sizes)], (0.0, 0.0)
    found = [_with_graphs(size, totals[0], smaller, rooms[0]) for size, smaller in zip(found, [None, *found])]
    if sizes is None:
        found = [_distinct(size, batch_size) for size in found]
    return Sizes(found, expected, rooms)


def _rooms(largest: Tensor, most: int) -> tuple[int, ...]:
    """The upper bounds for the largest graph of a batch, given the largest graphs of drawn batches.

    A second bound is profitable despite its recordings if the data set has few graphs that are much larger than others.
    """
    most = max(LEAST_NODES + 1, most)
    usual = max(LEAST_NODES + 1, math.ceil(float(largest.quantile(_USUAL))))
    return (usual, most) if usual * _MUCH_LARGER <= most else (most,)


def _geometric(totals: Tensor, most: int, waste: float, margin: float) -> tuple[list[Size], tuple[float, float]]:
    """The fewest sizes with little padding, and its fractions, given nodes and edges of drawn batches ``[2, B]``."""
    totals = totals + torch.tensor([[LEAST_NODES], [0]])
    mean = totals.mean(1, keepdim=True).clamp(min=1)
    scale = (totals / mean).amax(0)
    low, high = float(scale.min()), float(scale.max()) * margin
    for count in range(1, most + 1):
        steps = [low * (high / low) ** ((i + 1) / count) for i in range(count)]
        bounds = torch.tensor(steps, dtype=torch.float64)
        bounds[-1] = high
        place = torch.searchsorted(bounds, scale - 1e-12).clamp(max=count - 1)
        padded = (bounds[place] * mean).ceil()
        expected = tuple((1 - totals.sum(1) / padded.sum(1).clamp(min=1)).tolist())
        if max(expected) <= waste:
            break
    return [Size(math.ceil(float(mean[0]) * s), math.ceil(float(mean[1]) * s)) for s in bounds.tolist()], expected


def _with_graphs(size: Size, nodes: Tensor, smaller: Optional[Size], room: int) -> Size:
    """The size with as many graphs as its padding needs, and one more, given the nodes of drawn batches ``[B]``.

    Few batches have fewer nodes than the next smaller size, namely those with many edges. Graphs of padding exceed
    ``room`` there if need be.
    """
    least = min(size.nodes - LEAST_NODES, int(nodes.min()) if smaller is None else smaller.nodes - LEAST_NODES + 1)
    return size._replace(graphs=-(-(size.nodes - least) // room) + 1)


def _distinct(size: Size, batch_size: int) -> Size:
    """The size, enlarged until its numbers of nodes, edges and graphs differ, since norms identify rows by their
    number.
    """
    graphs = batch_size + size.graphs
    edges = size.edges + (size.edges == graphs)
    nodes = size.nodes
    while nodes in (edges, graphs):
        nodes += 1
    return Size(nodes, edges, size.graphs)


def _shares(total: int, parts: int) -> list[int]:
    """Natural numbers that add up to ``total`` and differ by one at most, the larger ones first."""
    each, more = divmod(total, parts)
    return [each + 1] * more + [each] * (parts - more)


def pad_edges(nodes: Union[int, Sequence[int]], edges: Union[int, Sequence[int]]) -> Tensor:
    """Edges ``[2, edges]`` without self loops, and with equal degrees as far as possible.

    Args:
        nodes, edges: numbers of nodes and edges of a graph, or of several, whose nodes are numbered one after the
            other.

    Example:
        >>> from edgeless.padding import pad_edges
        >>> pad_edges(3, 4)
        tensor([[0, 1, 2, 0],
                [1, 2, 0, 2]])
    """
    import numpy as np  # both frameworks require it; on so few numbers its ops take half of torch's time

    if isinstance(nodes, int):
        nodes, edges = [nodes], [edges]
    total = sum(edges)
    if not total:
        return torch.empty(2, 0, dtype=torch.int64)
    if any(count and room < LEAST_NODES for room, count in zip(nodes, edges)):
        raise ValueError(f"pad_edges: nodes must be at least {LEAST_NODES}, got {nodes} for {edges} edges")
    table = np.array([nodes, edges])
    first = table.cumsum(1) - table
    room, count, node, edge = np.concatenate((table, first)).repeat(table[1], axis=1)
    turn, src = np.divmod(np.arange(total) - edge, room)
    steps = np.where(count <= room * (room - 1), turn, turn % (room - 1)) + 1
    return torch.from_numpy(np.stack((src, (src + steps) % room)) + node)
