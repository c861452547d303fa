"""Batches of few sizes: which sizes, and norms that do not see the padding.

A batch of small graphs gets more graphs, whose nodes and edges fill it to one of few sizes, so that a captured step
(:func:`edgeless.capture_step`) can be replayed for it. The padding's edges are within its graphs: messages, pooling and
losses of the real graphs are as without it. The loaders are in ``edgeless.pyg.loader`` and
``edgeless.dgl.dataloading``.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Optional, Union

import torch
from torch import Tensor

from .graph_checks import compiling

__all__ = [
    "BatchNorm1d",
    "Padding",
    "Size",
    "Sizes",
    "choose_sizes",
    "convert_batchnorm",
    "pad_edges",
    "real_rows",
]

LEAST_NODES = 2  # of the padding: its edges are no self loops, which some layers would replace
_DRAWS = 1_000  # batches that are drawn to see how the sizes of batches are spread
_MARGIN = 1.02  # by which the largest size exceeds the largest batch drawn
_USUAL = 0.9  # the part of batches that have no larger graph than usual
# Times as many nodes as usual: attention among all nodes of a graph takes 2.3 times as long.
_MUCH_LARGER = 1.5


# Sizes ---------------------------------------------------------------------------------------------------------------


class Size(NamedTuple):
    """Numbers of nodes and edges of a padded batch, and of the graphs that its padding may be split over."""

    nodes: int
    edges: int
    graphs: int = 1


class Padding(NamedTuple):
    """What is added to a batch.

    Attributes:
        nodes, edges: of every graph that is added, in equal parts; graphs without nodes, if there are any, come first.
        most_nodes: a number that no graph of the batch exceeds, and one of few.
    """

    nodes: list[int]
    edges: list[int]
    most_nodes: int


@dataclass
class Sizes:
    """The sizes to which batches are padded, and what that wasted so far.

    Attributes:
        sizes: from the smallest to the largest.
        expected: the parts of nodes and edges that are padding, of the batches that were drawn when they were chosen.
        most_nodes: the nodes of the largest graph, before it a smaller number if graphs of most batches do not exceed
            it. No graph of padding has more nodes than the first. Empty: they are not known.
        batches: batches that were padded, by the place of their size.
        too_large: batches larger than the largest size, which were given a graph of no nodes instead.
    """

    sizes: list[Size]
    expected: tuple[float, float] = (0.0, 0.0)
    most_nodes: tuple[int, ...] = ()
    batches: dict[int, int] = field(default_factory=dict)
    too_large: int = 0
    _real: list[int] = field(default_factory=lambda: [0, 0])
    _padded: list[int] = field(default_factory=lambda: [0, 0])

    def padding(self, nodes: int, edges: int, largest: int, missing: int = 0) -> Padding:
        """Returns what fills a batch of so many nodes and edges, and counts the batch.

        Args:
            nodes, edges: of the batch.
            largest: the nodes of its largest graph.
            missing: how many graphs fewer than others it has.
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
        """Returns the smallest size that a batch of so many nodes and edges can be padded to, None if there is none."""
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
        """The parts of nodes and edges of padded batches that were padding; those expected before the first batch."""
        if not self.batches:
            return self.expected
        return tuple(1 - real / max(1, padded) for real, padded in zip(self._real, self._padded))

    def __str__(self) -> str:
        nodes, edges = self.waste
        count = sum(self.batches.values())
        of = f"of {count} batches" if count else "expected"
        lines = [
            f"{len(self.sizes)} sizes, {100 * nodes:.1f} % of nodes and {100 * edges:.1f} % of edges padding, {of}"
        ]
        lines += [f"  {size.nodes} nodes, {size.edges} edges, {size.graphs} more graphs" for size in self.sizes]
        return "\n".join(lines + ([f"  {self.too_large} batches were larger"] if self.too_large else []))


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
    """Chooses the sizes for batches of random graphs of a data set: as few as waste little.

    The sizes are geometric, from the smallest to the largest of many batches that are drawn, and nodes and edges grow
    together. Each gets as many graphs as its padding needs to be no larger than the data set's own graphs.

    Args:
        nodes, edges: of every graph of the data set, or of a sample of it.
        batch_size: graphs in a batch.
        most: the most sizes.
        waste: the part of nodes, and of edges, that may be padding; fewer sizes than ``most`` are chosen if they do.
        sizes: pairs of nodes and edges, which are used instead.
        largest: the nodes of the data set's largest graph; the largest of ``nodes`` by default.
        seed: of the draws.
    Raises:
        ValueError: no graphs, unequal lengths, or a number that makes no sense.
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
    """Numbers of nodes that the largest graphs of batches are rounded up to, given those of drawn batches.

    A second one is worth its recordings if the data set has few graphs that are much larger than the others.
    """
    most = max(LEAST_NODES + 1, most)
    usual = max(LEAST_NODES + 1, math.ceil(float(largest.quantile(_USUAL))))
    return (usual, most) if usual * _MUCH_LARGER <= most else (most,)


def _geometric(totals: Tensor, most: int, waste: float, margin: float) -> tuple[list[Size], tuple[float, float]]:
    """The fewest sizes that waste little, and what they waste, given nodes and edges of drawn batches ``[2, B]``."""
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
    """The size, enlarged by what makes numbers of nodes, edges and graphs differ: norms tell rows by their number."""
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
    """
    if isinstance(nodes, int):
        nodes, edges = [nodes], [edges]
    total = sum(edges)
    if not total:
        return torch.empty(2, 0, dtype=torch.int64)
    if any(count and room < LEAST_NODES for room, count in zip(nodes, edges)):
        raise ValueError(f"pad_edges: nodes must be at least {LEAST_NODES}, got {nodes} for {edges} edges")
    table = torch.tensor([nodes, edges])
    first = table.cumsum(1) - table
    room, count, node, edge = torch.cat((table, first)).repeat_interleave(table[1], 1, output_size=total)
    ids = torch.arange(total) - edge
    src, turn = ids % room, ids // room
    steps = torch.where(count <= room * (room - 1), turn, turn % (room - 1)) + 1
    return torch.stack((src + node, (src + steps) % room + node))


# Norms ---------------------------------------------------------------------------------------------------------------


class _Masks(threading.local):
    def __init__(self):
        self.masks: tuple[Tensor, ...] = ()


_active = _Masks()


@contextlib.contextmanager
def real_rows(
    batch: Any = None,
    *,
    nodes: Optional[Tensor] = None,
    edges: Optional[Tensor] = None,
    graphs: Optional[Tensor] = None,
) -> Iterator[None]:
    """Lets norms that :func:`convert_batchnorm` has converted ignore a batch's padding inside the block.

    Args:
        batch: a batch of ``edgeless.pyg.loader.PaddedLoader``, or None.
        nodes, edges, graphs: masks ``[N]``, ``[E]`` and ``[G]``, true for real ones, instead of those of the batch.
    Raises:
        TypeError: neither a batch nor a mask is given.
    """
    given = (nodes, edges, graphs)
    if batch is not None:
        given = (batch.node_mask, batch.edge_mask, batch.graph_mask)
    masks = tuple(mask for mask in given if mask is not None)
    if not masks:
        raise TypeError("real_rows: a batch or a mask must be given")
    before, _active.masks = _active.masks, masks
    try:
        yield
    finally:
        _active.masks = before


class BatchNorm1d(torch.nn.BatchNorm1d):
    """``torch.nn.BatchNorm1d`` whose statistics are those of the real rows within a block of :func:`real_rows`.

    Outside of one, and where it uses its running statistics, it is the class itself. Rows of padding are normalised
    with the statistics of the others.
    """

    def forward(self, input: Tensor) -> Tensor:
        """``[R, C]`` to ``[R, C]``, where R is the number of nodes, of edges or of graphs of the batch.

        Raises:
            ValueError: another number of rows, or more than two dimensions.
        """
        if not _active.masks or not (self.training or self.running_mean is None):
            return super().forward(input)
        if input.dim() != 2:
            raise ValueError(f"BatchNorm1d: input must be [rows, channels] in a padded batch, got {list(input.shape)}")
        real = next((mask for mask in _active.masks if mask.numel() == len(input)), None)
        if real is None:
            sizes = ", ".join(str(mask.numel()) for mask in _active.masks)
            raise ValueError(
                f"BatchNorm1d: input must have as many rows as the batch has nodes, edges or graphs, {sizes}, got "
                f"{len(input)}"
            )
        if input.device.type == "cpu" and not compiling() and type(input) is Tensor:
            return self._of_rows(input, real)
        wide = torch.promote_types(input.dtype, torch.float32)
        rows, real = input.to(wide), real.unsqueeze(1)
        count = real.sum().to(wide)
        mean = torch.where(real, rows, 0).sum(0) / count
        centred = rows - mean
        variance = torch.where(real, centred, 0).square().sum(0) / count
        if self.training and self.track_running_stats and self.running_mean is not None:
            self._follow(mean.detach(), variance.detach() * (count / (count - 1)))
        out = centred * torch.rsqrt(variance + self.eps)
        if self.weight is not None:
            out = out * self.weight + self.bias
        return out.to(input.dtype)

    def _of_rows(self, input: Tensor, real: Tensor) -> Tensor:
        """The same on the CPU, where the real rows can be counted and torch's own norm of them is faster."""
        count = int(real.sum())
        begins = bool(real[:count].all())  # as in batches of a PaddedLoader
        places = None if begins else torch.cat((real.nonzero().squeeze(1), (~real).nonzero().squeeze(1)))
        rows = input if begins else input.index_select(0, places)
        rows, rest = rows.split([count, len(rows) - count])
        out, mean, scale = torch.native_batch_norm(
            rows,
            self.weight,
            self.bias,
            self.running_mean if self.training else None,
            self.running_var if self.training else None,
            True,
            self._share_of_this_batch(),
            self.eps,
        )
        padded = (rest.to(mean.dtype) - mean) * scale
        if self.weight is not None:
            padded = padded * self.weight + self.bias
        out = torch.cat((out, padded.to(out.dtype)))
        return out if begins else torch.empty_like(out).index_copy(0, places, out)

    def _share_of_this_batch(self) -> float:
        """The share of a batch's statistics in the running ones, after it is counted."""
        if not self.training or self.num_batches_tracked is None:
            return 0.0
        self.num_batches_tracked.add_(1)
        return 1 / int(self.num_batches_tracked) if self.momentum is None else self.momentum

    def _follow(self, mean: Tensor, variance: Tensor) -> None:
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            share = 1 / self.num_batches_tracked if self.momentum is None else self.momentum
            for running, now in ((self.running_mean, mean), (self.running_var, variance)):
                running.copy_(running * (1 - share) + now.to(running.dtype) * share)


# Norms whose result for a row depends on other graphs' rows, or whose statistics do, and why they are not converted.
_REFUSED = {
    "SyncBatchNorm": "its statistics are those of several processes",
    "BatchNorm2d": "its rows are no nodes",
    "BatchNorm3d": "its rows are no nodes",
    "HeteroBatchNorm": "its statistics are by type",
    "PairNorm": "it centres all nodes of a batch together",
    "MeanSubtractionNorm": "it centres all nodes of a batch together unless it is given the batch",
    "DiffGroupNorm": "its statistics are weighted by cluster",
}


def convert_batchnorm(model: torch.nn.Module) -> torch.nn.Module:
    """Makes the batch norms of a model ignore the padding of batches, in place.

    ``torch.nn.BatchNorm1d``, and PyG's BatchNorm, which has one, keep their parameters, statistics and ``state_dict``;
    their class becomes :class:`BatchNorm1d`. Norms within graphs or rows (GraphNorm, LayerNorm, InstanceNorm without
    running statistics, given the batch) need no change.

    Returns:
        ``model`` itself.
    Raises:
        TypeError: model is no module.
        ValueError: a norm's result would depend on the padding and cannot be converted.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"convert_batchnorm: model must be a torch.nn.Module, got {type(model).__name__}")
    refused = []
    for name, module in model.named_modules():
        kind = next((cls.__name__ for cls in type(module).__mro__ if cls.__name__ in _REFUSED), None)
        if kind is not None:
            refused.append(f"{name or 'the model'} ({kind}): {_REFUSED[kind]}")
        elif "InstanceNorm" in type(module).__name__ and getattr(module, "track_running_stats", False):
            refused.append(f"{name or 'the model'} ({type(module).__name__}): it averages statistics over graphs")
        elif isinstance(module, torch.nn.BatchNorm1d) and type(module) not in (torch.nn.BatchNorm1d, BatchNorm1d):
            refused.append(f"{name or 'the model'} ({type(module).__name__}): it is a subclass with changes of its own")
    if refused:
        raise ValueError("convert_batchnorm: norms that would see the padding remain: " + "; ".join(refused))
    for module in model.modules():
        if type(module) is torch.nn.BatchNorm1d:
            module.__class__ = BatchNorm1d
    return model
