"""``torch_geometric.loader`` with :class:`PaddedLoader`, whose batches have few sizes."""

from __future__ import annotations

__path__: list[str] = []  # a package from the start, whose inner modules edgeless.layers.stand_in finds

import copy
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Optional, Union

import torch
from torch import Tensor
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader

from edgeless.checks import as_device
from edgeless.layers.stand_in import stand_in
from edgeless.padding import Sizes, choose_sizes, pad_edges
from edgeless.padding.packed import Fetcher, NotPacked
from edgeless.padding.sizes import counts_of

from .packed import MASKS, PackedData

if TYPE_CHECKING:
    from torch_geometric.loader import *  # noqa: F403

    def __getattr__(name: str) -> Any: ...


__all__ = ["PaddedLoader"]

_LOOKED_AT = 32  # graphs by which the level of an attribute is found


class PaddedLoader(DataLoader):
    """PyG's DataLoader, whose batches get graphs of padding that fill them to one of few sizes.

    So steps on them can be captured (:func:`edgeless.capture_step`). All batches of a size have equal shapes, and
    equally many graphs: the last ones are padding, some of them without nodes, and none larger than the graphs of the
    data set. ``batch.node_mask`` ``[N]``, ``batch.edge_mask`` ``[E]`` and ``batch.graph_mask`` ``[G]`` are true for
    real entries, and real graphs, nodes and edges come first. Padded entries of all attributes are zero.

    A loss has to leave padded graphs out; norms over nodes do after :func:`edgeless.padding.convert_batchnorm`, within
    ``edgeless.padding.real_rows(batch)``. Give pooling the number of graphs, ``global_add_pool(x, batch.batch,
    batch.num_graphs)``, and dense batches the most nodes of a graph too, ``to_dense_batch(x, batch.batch,
    max_num_nodes=batch.max_num_nodes, batch_size=batch.num_graphs)``: else they wait for the GPU. ``max_num_nodes``
    takes few values, mostly the number of nodes of the data set's largest graph.

    ``loader.sizes`` has the sizes, and reports the part of padding (``print(loader.sizes)``). It counts only batches
    made in this process, so none with worker processes. A batch larger than all sizes, which is rare, gets masks and a
    graph without nodes, and so has a shape of its own.

    The data set is read once and packed: its attributes are concatenated, and a batch is gathered from them without
    Python for every graph, on the CPU or, with ``device``, on a GPU. Batches are those of PyG's collation, which makes
    them where packing is not possible: worker processes, data sets that may give other graphs at every access (with a
    transform, or of a class of their own; ``list(dataset)`` can be packed), sparse and nested attributes, and ones that
    differ between graphs in more than their length. ``loader.not_packed`` says why. Every epoch begins by comparing 64
    graphs, and packs the data set again if they have changed; make another loader after changes of a few graphs.

    Args:
        dataset: a data set of ``Data``, or a DataLoader of one, whose settings are used.
        batch_size, shuffle, follow_batch, exclude_keys, kwargs: as DataLoader has them; not together with a loader.
        most: the largest number of sizes.
        waste: the fraction of nodes, and of edges, that may be padding; see :func:`edgeless.padding.choose_sizes`.
        sizes: pairs of nodes and edges to use, instead of choosing them.
        packed: False keeps no packed copy of the data set, and leaves all batches to PyG's collation.
        device: the device of the packed data set and of the batches; None: that of the data. On a GPU only the ids
            of a batch's graphs are copied for it, and nothing waits. A loader with worker processes has no device.
    Raises:
        TypeError: the data are no ``Data``, or a loader was given settings.
        ValueError: an attribute has a size of its own in every graph, which belongs to neither nodes nor edges; or
            ``device`` together with worker processes.

    Example:
        >>> graphs = [Data(x=torch.ones(n, 2), edge_index=torch.tensor([[0, 1], [1, 0]])) for n in range(3, 9)]
        >>> loader = PaddedLoader(graphs, batch_size=3, shuffle=True)
        >>> len({batch.x.shape for batch in loader}) <= 8
        True
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        shuffle: bool = False,
        follow_batch: Optional[list[str]] = None,
        exclude_keys: Optional[list[str]] = None,
        *,
        most: int = 8,
        waste: float = 0.06,
        sizes: Optional[Sequence[tuple[int, int]]] = None,
        packed: bool = True,
        device: Union[torch.device, str, int, None] = None,
        **kwargs: Any,
    ):
        if isinstance(dataset, torch.utils.data.DataLoader):
            if batch_size != 1 or shuffle or follow_batch or exclude_keys or kwargs:
                raise TypeError("PaddedLoader: a loader has settings of its own; pass its data set to change them")
            dataset, batch_size, follow_batch, exclude_keys, kwargs = _settings(dataset)
        if not len(dataset) or not isinstance(dataset[0], Data):
            kind = type(dataset[0]).__name__ if len(dataset) else "nothing"
            raise TypeError(f"PaddedLoader: dataset must have graphs of class Data, got {kind}")
        self._device = None if device is None else as_device("PaddedLoader", device)
        if self._device is not None and kwargs.get("num_workers"):
            raise ValueError("PaddedLoader: device must be None with num_workers, since worker processes have no GPU")
        if self._device is not None:
            kwargs["pin_memory"] = False  # the batch is on the device already
        template = _Template(dataset, exclude_keys or ())
        self._kept: Optional[PackedData] = None
        self.not_packed = "packed=False" if not packed else "num_workers" if kwargs.get("num_workers") else None
        if self.not_packed is None:
            self._kept, self.not_packed = _packed(dataset, template, follow_batch, exclude_keys, self._device)
        largest = None if self._kept is None else max(self._kept.nodes)
        counts = counts_of(dataset, lambda graph: (graph.num_nodes, graph.num_edges), self._kept)
        self.sizes = choose_sizes(*counts, batch_size, most=most, waste=waste, sizes=sizes, largest=largest)
        super().__init__(dataset, batch_size, shuffle, follow_batch, exclude_keys, **kwargs)
        self.collate_fn = _Collate(template, self.sizes, batch_size, follow_batch, exclude_keys)

    def _get_iterator(self) -> Iterator[Batch]:
        if self._kept is not None and self._kept.watched.has_changed():
            template = _Template(self.dataset, self.exclude_keys or ())
            settings = (self.follow_batch, self.exclude_keys, self._device)
            self._kept, self.not_packed = _packed(self.dataset, template, *settings)
            self.collate_fn = self.collate_fn.of(template)
        found = super()._get_iterator()
        if self._kept is not None or self._device is not None:  # so there are no worker processes
            found._dataset_fetcher = Fetcher(self._fetch)
        return found

    def _fetch(self, ids: Sequence[int]) -> Batch:
        if self._kept is not None:
            return self._kept.batch(ids, self.sizes.padding, self.collate_fn.graphs)
        batch = self.collate_fn([self.dataset[place] for place in ids])
        return batch if self._device is None else batch.to(self._device, non_blocking=True)


def _packed(dataset: Any, template: _Template, *settings: Any) -> tuple[Optional[PackedData], Optional[str]]:
    """The packed data set, or None and the reason why it cannot be packed."""
    try:
        return PackedData(dataset, template.made, *settings), None
    except NotPacked as reason:
        return None, str(reason)


def _settings(loader: torch.utils.data.DataLoader) -> tuple[Any, int, Any, Any, dict[str, Any]]:
    if loader.batch_size is None:
        raise TypeError("PaddedLoader: the loader must have a batch_size; pass its data set and batch_size instead")
    names = ("num_workers", "pin_memory", "drop_last", "timeout", "worker_init_fn", "prefetch_factor", "generator")
    kwargs = {name: getattr(loader, name) for name in (*names, "persistent_workers", "multiprocessing_context")}
    kwargs["sampler"] = loader.sampler
    return (
        loader.dataset,
        loader.batch_size,
        getattr(loader, "follow_batch", None),
        getattr(loader, "exclude_keys", None),
        kwargs,
    )


class _Template:
    """The attributes of a data set's graphs with their levels, by which graphs of padding are made."""

    def __init__(self, dataset: Any, exclude_keys: Sequence[str]):
        looked = [dataset[place] for place in range(min(len(dataset), _LOOKED_AT))]
        self.graph = copy.copy(looked[0])
        if "edge_index" not in self.graph:
            raise TypeError("PaddedLoader: graphs must have an edge_index")
        names = [name for name in self.graph.to_dict() if name != "edge_index" and name not in exclude_keys]
        self.levels = {name: _level(name, looked) for name in names}
        if "node" not in self.levels.values() and "num_nodes" not in self.levels:
            raise TypeError("PaddedLoader: graphs must have a node attribute or num_nodes")
        # A graph finds its number of nodes also by attributes that batches leave out.
        for name in {*self.graph.to_dict()} - {*names, "edge_index"}:
            try:
                self.levels[name] = _level(name, looked)
            except ValueError:
                del self.graph[name]

    def made(self, nodes: int, edges: int) -> Data:
        """A graph of zeros with these numbers of nodes and edges."""
        graph = copy.copy(self.graph)
        for name, level in self.levels.items():
            value = self.graph[name]
            if isinstance(value, Tensor) and level != "graph":
                dim = self.graph.__cat_dim__(name, value)
                shape = list(value.shape)
                shape[dim] = nodes if level == "node" else edges
                graph[name] = value.new_zeros(shape)
            elif isinstance(value, Tensor):
                graph[name] = torch.zeros_like(value)
            elif name == "num_nodes":
                graph[name] = nodes
        graph.edge_index = pad_edges(nodes, edges).to(self.graph.edge_index.dtype)
        return graph


def _level(name: str, graphs: list[Data]) -> str:
    """Returns whether an attribute belongs to nodes, to edges, or to the graph."""
    values = [graph[name] for graph in graphs]
    if not all(isinstance(value, Tensor) and value.dim() for value in values):
        return "graph"
    if any(value.layout is not torch.strided for value in values):
        raise ValueError(f"PaddedLoader: {name} must be a dense tensor, got {values[0].layout}: it cannot be padded")
    lengths = [value.size(graph.__cat_dim__(name, value) or 0) for value, graph in zip(values, graphs, strict=True)]
    of_nodes = lengths == [graph.num_nodes for graph in graphs]
    of_edges = lengths == [graph.num_edges for graph in graphs]
    if of_nodes and of_edges:
        return "edge" if "edge" in name else "node"
    if of_nodes or of_edges:
        return "node" if of_nodes else "edge"
    if len(set(lengths)) > 1:
        raise ValueError(
            f"PaddedLoader: {name} must belong to nodes, edges or graphs, got {lengths[:4]} entries in graphs of "
            f"{[graph.num_nodes for graph in graphs][:4]} nodes; exclude_keys=[{name!r}] leaves it out"
        )
    return "graph"


class _Collate:
    def __init__(self, template: _Template, sizes: Sizes, graphs: int, follow_batch, exclude_keys):
        self.template, self.sizes, self.graphs = template, sizes, graphs
        self.follow_batch, self.exclude_keys = follow_batch, exclude_keys

    def of(self, template: _Template) -> _Collate:
        """This collation with another template."""
        return _Collate(template, self.sizes, self.graphs, self.follow_batch, self.exclude_keys)

    def __call__(self, graphs: list[Data]) -> Batch:
        counts = [graph.num_nodes for graph in graphs]
        nodes, edges = sum(counts), sum(graph.num_edges for graph in graphs)
        added = self.sizes.padding(nodes, edges, max(counts), max(0, self.graphs - len(graphs)))
        padding = [self.template.made(*each) for each in zip(added.nodes, added.edges)]
        batch = Batch.from_data_list([*graphs, *padding], self.follow_batch, self.exclude_keys)
        whole = (nodes + sum(added.nodes), edges + sum(added.edges), len(graphs) + len(padding))
        for name, count, of in zip(MASKS, whole, (nodes, edges, len(graphs)), strict=True):
            batch[name] = torch.arange(count) < of
        batch.max_num_nodes = added.most_nodes
        return batch


stand_in(__name__, "torch_geometric.loader")
