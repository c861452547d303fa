"""``dgl.dataloading`` with :class:`PaddedLoader`, whose batches have few sizes."""

from __future__ import annotations

__path__: list[str] = []  # a package from the start, whose inner modules edgeless.layers.stand_in finds

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional

import dgl
import numpy as np
import torch
from dgl.dataloading import GraphCollator, GraphDataLoader
from torch import Tensor

from edgeless.layers.stand_in import stand_in
from edgeless.padding import Sizes, choose_sizes, pad_edges
from edgeless.padding.packed import Fetcher, NotPacked
from edgeless.padding.sizes import counts_of

from ._framework import DGLGraph
from .packed import PackedItems

if TYPE_CHECKING:
    from dgl.dataloading import *  # noqa: F403

    def __getattr__(name: str) -> Any: ...


__all__ = ["PaddedLoader"]


class PaddedLoader(GraphDataLoader):
    """DGL's GraphDataLoader, whose batches get graphs of padding that fill them to one of few sizes.

    All batches of a size have equal shapes, and equally many graphs: the last ones are padding, some of them without
    nodes, and none larger than the graphs of the data set. The last element of a batch is ``graph_mask`` ``[G]``, true
    for real graphs; ``graph.ndata["node_mask"]`` and ``graph.edata["edge_mask"]`` are true for real nodes and edges.
    Padded data and labels are zero. A loss has to leave padded graphs out; norms over nodes do after
    :func:`edgeless.padding.convert_batchnorm`, within ``edgeless.padding.real_rows(nodes=..., edges=..., graphs=...)``.

    ``loader.sizes`` has the sizes, and reports the part of padding (``print(loader.sizes)``). It counts only batches
    made in this process, so none with worker processes. A batch larger than all sizes, which is rare, gets a graph
    without nodes, and so has a shape of its own.

    A list of graphs on the CPU is read once and packed, as by PyG's PaddedLoader, and batches are gathered from its
    arrays. DGL's collation serves worker processes, other data sets (``list(dataset)`` can be packed), and data that
    cannot be packed; ``loader.not_packed`` says why. Every epoch begins by comparing 64 graphs, and packs the data set
    again if they have changed; make another loader after changes of a few graphs.

    Args:
        dataset: homogeneous graphs, or tuples of a graph and labels, which are tensors or numbers.
        batch_size, kwargs: as in GraphDataLoader, except ``collate_fn``.
        most: the largest number of sizes.
        waste: the fraction of nodes, and of edges, that may be padding; see :func:`edgeless.padding.choose_sizes`.
        sizes: pairs of nodes and edges to use, instead of choosing them.
        packed: False keeps no packed copy of the data set, and leaves all batches to DGL's collation.
    Raises:
        TypeError: the data set has other items.

    Example:
        >>> graphs = [dgl.rand_graph(n, 2 * n) for n in range(3, 9)]
        >>> loader = PaddedLoader(graphs, batch_size=3, shuffle=True)
        >>> len({batch.num_nodes() for batch, graph_mask in loader}) <= 8
        True
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        *,
        most: int = 8,
        waste: float = 0.06,
        sizes: Optional[Sequence[tuple[int, int]]] = None,
        packed: bool = True,
        **kwargs: Any,
    ):
        if "collate_fn" in kwargs:
            raise TypeError("PaddedLoader: collate_fn cannot be given, since the loader has one of its own")
        item = dataset[0] if len(dataset) else None
        graph = item[0] if isinstance(item, (tuple, list)) and item else item
        if not isinstance(graph, DGLGraph) or not graph.is_homogeneous:
            raise TypeError(
                f"PaddedLoader: dataset must have homogeneous graphs, or tuples that begin with one, got "
                f"{type(graph).__name__}"
            )
        self._kept: Optional[PackedItems] = None
        self.not_packed = "packed=False" if not packed else "num_workers" if kwargs.get("num_workers") else None
        if self.not_packed is None:
            self._kept, self.not_packed = _packed(dataset)
        largest = None if self._kept is None else max(self._kept.nodes)
        counts = counts_of(dataset, _counts, self._kept)
        self.sizes = choose_sizes(*counts, batch_size, most=most, waste=waste, sizes=sizes, largest=largest)
        collate = _Collate(item, self.sizes, batch_size)
        super().__init__(dataset, collate_fn=collate, batch_size=batch_size, **kwargs)

    def _get_iterator(self) -> Iterator[tuple[Any, ...]]:
        if self._kept is not None and self._kept.watched.has_changed():
            self._kept, self.not_packed = _packed(self.dataset)
            self.collate_fn = _Collate(self.dataset[0], self.sizes, self.collate_fn.graphs)
        found = super()._get_iterator()
        if self._kept is not None:  # so there are no worker processes
            collate, kept = self.collate_fn, self._kept
            found._dataset_fetcher = Fetcher(lambda ids: kept.batch(ids, self.sizes.padding, collate.graphs))
        return found


def _packed(dataset: Any) -> tuple[Optional[PackedItems], Optional[str]]:
    """The packed data set, or None and the reason why it cannot be packed."""
    try:
        return PackedItems(dataset, _padding(dataset[0], 0, 0)), None
    except NotPacked as reason:
        return None, str(reason)


def _graph_of(item: Any) -> DGLGraph:
    return item[0] if isinstance(item, (tuple, list)) else item


def _counts(item: Any) -> tuple[int, int]:
    graph = _graph_of(item)
    return graph.num_nodes(), graph.num_edges()


class _Collate:
    def __init__(self, item: Any, sizes: Sizes, graphs: int):
        self.item, self.sizes, self.graphs = item, sizes, graphs
        self.collate = GraphCollator().collate

    def __call__(self, items: list[Any]) -> tuple[Any, ...]:
        graphs = [_graph_of(item) for item in items]
        counts = [graph.num_nodes() for graph in graphs]
        nodes, edges = sum(counts), sum(graph.num_edges() for graph in graphs)
        added = self.sizes.padding(nodes, edges, max(counts), max(0, self.graphs - len(items)))
        found = self.collate([*items, *(_padding(self.item, *each) for each in zip(added.nodes, added.edges))])
        parts = list(found) if isinstance(found, (tuple, list)) else [found]
        parts[0].ndata["node_mask"] = torch.arange(parts[0].num_nodes()) < nodes
        parts[0].edata["edge_mask"] = torch.arange(parts[0].num_edges()) < edges
        return (*parts, torch.arange(len(items) + len(added.nodes)) < len(items))


def _padding(item: Any, nodes: int, edges: int) -> Any:
    """A graph of zeros with these numbers of nodes and edges, and labels of zeros, like those of ``item``."""
    like = _graph_of(item)
    src, dst = pad_edges(nodes, edges).to(like.idtype)
    graph = dgl.graph((src, dst), num_nodes=nodes, idtype=like.idtype)
    for name, data in like.ndata.items():
        graph.ndata[name] = data.new_zeros((nodes, *data.shape[1:]))
    for name, data in like.edata.items():
        graph.edata[name] = data.new_zeros((edges, *data.shape[1:]))
    if not isinstance(item, (tuple, list)):
        return graph
    return (graph, *map(_zeros, item[1:]))


def _zeros(label: Any) -> Any:
    """A label of zeros like another one, in the containers that DGL collates."""
    if isinstance(label, Tensor):
        return torch.zeros_like(label)
    if isinstance(label, (np.ndarray, np.generic)):
        return np.zeros_like(label)[()]
    if isinstance(label, Mapping):
        return {name: _zeros(part) for name, part in label.items()}
    if isinstance(label, (tuple, list)):
        parts = map(_zeros, label)
        return type(label)(*parts) if hasattr(label, "_fields") else type(label)(parts)
    if isinstance(label, (int, float, str)):
        return type(label)(0)
    raise TypeError(
        f"PaddedLoader: labels must be tensors, arrays, numbers, text, or tuples, lists and dictionaries of them, got "
        f"{type(label).__name__}"
    )


stand_in(__name__, "dgl.dataloading")
