"""Graphs whose edges have types: a :class:`Graph` and the relation of every edge, sorted for typed products.

The edges of one type at one node, a destination or a source, form a *pair*: a unique (node, relation). A layer over
relations is linear in their sum, so it multiplies one row per pair and not one per edge. Kernels take pairs cut into
segments of bounded length. No array here has relations times nodes elements.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor
from torch.utils.weak import WeakIdRef

from .. import cache
from ..checks import as_index, check_integers, check_num_nodes, compiling
from ..ops.graph import coo_to_csr, index_dtype
from ..ops.relational import OF_SEGMENT, OF_TILE, pairs_of_edges, segment_tiles, typed_edges
from ..plan.steps import most_fused_width
from .adjacency import Compressed, transpose
from .formats import CSC, Formats, Keeper, num_bytes
from .handle import Graph

__all__ = ["Compact", "Ends", "Pairs", "TypedGraph", "typed_graph_for"]

# Most edges of a segment: enough that cutting costs little beside the sum, few enough that many threads share a hub.
CUT = 512
# The same for the fused kernels, where a thread block takes tiles of segments: few, so that tiles take equally long.
_TILED_CUT = 64
_UNCUT = 2**62
# Unused elements behind the segments that do not justify a copy to free them.
_SPARE = 1 << 18


class Pairs(NamedTuple):
    """The unique (destination, type) pairs, sorted by type.

    ``offsets`` ``[R + 1]`` has the first pair of every type; ``neighbors`` has a row for every pair and the sources as
    columns, with the graph's edge ids; ``sums`` has the destinations as rows and their pairs as columns.
    """

    offsets: Tensor
    neighbors: Graph
    sums: Graph


class Compact(NamedTuple):
    """Compact materialization: the unique (source, type) pairs take the place of the sources, so that the product of a
    source and a type's matrix is computed once for all the source's edges of that type.

    ``pairs`` is a typed graph from the sources to their pairs, with one edge per pair; ``edges`` has the edges of the
    typed graph, with their ids, from the pairs to the destinations.
    """

    pairs: TypedGraph
    edges: Graph


class Ends(NamedTuple):
    """The (node, type) pairs at both ends of the edges, as edges from nodes to types: a scalar that a layer computes
    for a node and a type is then an edge value.

    ``graph`` has the nodes as sources. Its ``2 * R`` destinations are the types of the destinations' pairs, then those
    of the sources' pairs. Its edges are the pairs of ``reversed.compact``, then those of ``compact``; ``counts`` has
    the number of each.
    """

    graph: Graph
    counts: tuple[int, int]


class TypedGraph(Keeper):
    """An immutable :class:`Graph` with a type for every edge.

    Attributes:
        graph (Graph): sources, destinations and the order of edges.
        edge_type (Tensor): ``[E]``, int32 or int64, in the order of the edges, from 0 to ``num_types - 1``.
        num_types (int): R.

    Its formats, in both directions, are built at their first use and kept.

    Example:
        >>> import torch
        >>> from edgeless import Graph, TypedGraph
        >>> graph = Graph.from_edge_index(torch.tensor([[0, 1, 2, 0], [1, 2, 0, 2]]))
        >>> TypedGraph(graph, torch.tensor([0, 1, 0, 1]), 2).num_types
        2
    """

    def __init__(self, graph: Graph, edge_type: Tensor, num_types: int):
        """Keeps the arguments; the values of edge_type are checked when the edges are sorted.

        Raises:
            TypeError, ValueError: edge_type is not an integer tensor ``[E]`` on the graph's device, or num_types not an
                int.
        """
        check_integers("TypedGraph", "edge_type", edge_type, "[E]")
        check_num_nodes("TypedGraph", "num_types", num_types)
        if tuple(edge_type.shape) != (graph.num_edges,):
            raise ValueError(
                f"TypedGraph: edge_type must have shape [E] = [{graph.num_edges}], got {list(edge_type.shape)}"
            )
        if edge_type.device != graph.device:
            raise ValueError(f"TypedGraph: edge_type must be on {graph.device}, got {edge_type.device}")
        self.graph = graph
        self.edge_type = as_index(edge_type)
        self.num_types = num_types
        self._formats: Formats = {}
        self._graphs: list[Any] = []

    @classmethod
    def from_edge_index(
        cls,
        edge_index: Tensor,
        edge_type: Tensor,
        num_types: int,
        num_src: Optional[int] = None,
        num_dst: Optional[int] = None,
    ) -> TypedGraph:
        """From ``edge_index`` ``[2, E]`` and ``edge_type`` ``[E]``; sizes as in :meth:`Graph.from_edge_index`.

        Raises:
            TypeError, ValueError, IndexError: as :meth:`Graph.from_edge_index`, or edge_type does not fit.
        """
        return cls(Graph.from_edge_index(edge_index, num_src, num_dst), edge_type, num_types)

    # Facts -----------------------------------------------------------------------------------------------------------

    @property
    def num_src(self) -> int:
        """Number of source nodes."""
        return self.graph.num_src

    @property
    def num_dst(self) -> int:
        """Number of destination nodes."""
        return self.graph.num_dst

    @property
    def num_edges(self) -> int:
        """Number of edges."""
        return self.graph.num_edges

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.graph.device

    # What kernels walk -----------------------------------------------------------------------------------------------

    @property
    def by_dst(self) -> list[Tensor]:
        """In-edges sorted by (type, destination), as ``typed_edges`` returns them (``core_cuda/library.cpp``)."""
        return self.format("by dst", lambda of: of._sorted(of.graph.csr))

    @property
    def by_src(self) -> list[Tensor]:
        """Out-edges sorted by (type, source)."""
        return self.format("by src", TypedGraph._by_src)

    def tiled(self, by_dst: bool, mean: Optional[torch.dtype] = None) -> list[Tensor]:
        """:attr:`by_dst` or :attr:`by_src` on CUDA, followed by the arrays of the fused sum-and-multiply kernels.

        Args:
            mean: the dtype of weights that turn sums into means; None for plain sums.
        Returns:
            The six tensors of the segments; int ``[R + 1]``, the first tile of every type; int ``[tiles + 1]``, the
            first segment of every tile; int ``[tiles + 1]``, the first row of every tile of rows; the segments and hub
            parts that rows add up; the parts of hubs ``[2, parts]`` (``segment_tiles`` in ``core_cuda/library.cpp``);
            and the weights of a mean: by destination one per segment ``[segments, 1]``, whose edges all share it, by
            source ``[E]`` in the order of by_src's edges.
        """
        side = "by dst" if by_dst else "by src"
        segments = self.by_dst if by_dst else self.by_src

        type_ptr, rows, ptr, _, edge_ids, by_row = segments

        def cut(graph: TypedGraph) -> list[Tensor]:
            *tiles, of_rows, parts = segment_tiles(type_ptr, rows, ptr, by_row, graph.num_edges, not compiling())
            return [*tiles, of_rows if of_rows.numel() else by_row, parts]

        def weights(graph: TypedGraph) -> Tensor:
            if by_dst:
                return torch.ops.edgeless.typed_means(type_ptr, rows, ptr, None, mean).unsqueeze(1)
            of_edges = graph._formats.get(("mean", mean))  # not built and kept for this alone
            return (graph._means(mean) if of_edges is None else of_edges).index_select(0, edge_ids)

        found = [*segments, *self.format(("tiles", side), cut)]
        if mean is not None:
            found.append(self.format(("mean", side, mean), weights))
        return found

    def mean_weight(self, dtype: torch.dtype) -> Tensor:
        """``[E]``: for every edge, one over the number of edges of its type into its destination."""
        return self.format(("mean", dtype), lambda of: of._means(dtype))

    @property
    def pairs(self) -> Pairs:
        """The (destination, type) pairs, not cut into segments."""
        return self.format("pairs", TypedGraph._pairs)

    @property
    def compact(self) -> Compact:
        """The sources split into (source, type) pairs."""
        return self.format("compact", TypedGraph._compact)

    def pair_of_edge(self) -> Tensor:
        """``[E]``: by edge id, the :attr:`compact` pair of the edge's source; recomputed by each call if the CSR has
        edge ids.
        """
        csr, csc = self.compact.edges.csr, self.compact.edges.csc
        return csr.indices if csr.edge_ids is None else pairs_of_edges(csc.indptr, csc.edge_ids)

    @property
    def ends(self) -> Ends:
        """The pairs at both ends of the edges, for a graph whose destinations are the first of its sources, or all."""
        return self.format("ends", TypedGraph._ends)

    @property
    def reversed(self) -> TypedGraph:
        """Every edge reversed, with its id and type; ``reversed.compact`` splits the destinations by type."""
        _ = self.graph.csc  # built once for both
        return self.format("reversed", lambda of: TypedGraph(of.graph.reverse(), of.edge_type, of.num_types))

    @property
    def split(self) -> Graph:
        """Edges from sources' pairs (``compact``) to destinations' pairs (``reversed.compact``), with edge ids."""

        def build(_):
            turned = self.reversed  # first: it builds and keeps the graph's CSC, which both sort
            sides = self.compact, turned.compact
            ends = torch.stack([self.pair_of_edge(), turned.pair_of_edge()])
            return Graph.from_edge_index(ends, *(side.edges.num_src for side in sides), validate=False)

        return self.format("split", build)

    def _sorted(self, direction: Compressed, cut: Optional[int] = None) -> list[Tensor]:
        """The result of :func:`typed_edges` for a direction, trimmed: the op allocates as many segments as edges."""
        if cut is None:
            # Layers of all dtypes share the segments. A device that fuses any dtype also fuses 16-bit ones.
            tiled = self.device.type == "cuda" and most_fused_width(self.device, torch.float16) > 0
            cut = _TILED_CUT if tiled else CUT
        type_ptr, rows, ptr, indices, edge_ids, by_row, count = typed_edges(
            *direction, self.edge_type, self.num_types, cut
        )
        if not compiling():
            segments = int(count)
            copies = self.num_edges - segments > min(segments, _SPARE)  # a view would keep all of the memory

            def first(t: Tensor, length: int) -> Tensor:
                return t[:length].clone() if copies else t[:length]

            rows, ptr = first(rows, segments), first(ptr, segments + 1)
            if by_row.dim() == 1:  # on CUDA: the CSR from rows to their segments
                by_row = first(by_row, direction.indptr.numel() + segments)
        elif cut == _UNCUT:  # the number of pairs sizes other tensors: in a program it is an unbacked size
            segments = (torch.arange(self.num_edges, device=rows.device) < type_ptr[-1]).nonzero().squeeze(1)
            rows, ptr = rows.index_select(0, segments), torch.cat((ptr[:1], ptr[1:].index_select(0, segments)))
        return [type_ptr, rows, ptr, indices, edge_ids, by_row]

    def _out_edges(self) -> Compressed:
        """The graph's CSC. If it is not cached yet, it is built but not kept: the sorted edges replace it."""
        return self.graph._formats.get(CSC) or transpose(self.graph.csr, self.num_src)

    def _by_src(self) -> list[Tensor]:
        offsets = self._formats.get("offsets")
        if offsets is None or self.device.type != "cuda":
            return self._sorted(self._out_edges())
        pairs, none = self.graph.csr, offsets.new_empty(0)  # the graph of Compact.pairs, where every edge is a pair
        by_row = self._formats.get("by row")
        by_row = torch.cat(self.graph.csc[:2]) if by_row is None else by_row
        return [offsets, pairs.indices, none, pairs.indptr[:-1], pairs.indptr[:-1], by_row]

    def _means(self, dtype: torch.dtype) -> Tensor:
        type_ptr, rows, ptr, _, edge_ids, _ = self.by_dst
        if not ptr.numel():  # every edge is a pair
            return torch.ones(self.num_edges, dtype=dtype, device=self.device)
        return torch.ops.edgeless.typed_means(type_ptr, rows, ptr, edge_ids, dtype)

    def _pairs(self) -> Pairs:
        offsets, rows, ptr, indices, edge_ids, _ = self._sorted(self.graph.csr, _UNCUT)
        ids = torch.arange(rows.numel(), dtype=rows.dtype, device=rows.device)
        sums = Compressed(*coo_to_csr(rows, ids, self.num_dst, rows.numel(), False))
        neighbors = Graph(Compressed(ptr, indices, edge_ids), None, self.num_src, rows.numel())
        return Pairs(offsets, neighbors, Graph(sums, None, rows.numel(), self.num_dst))

    def _compact(self) -> Compact:
        offsets, rows, ptr, indices, edge_ids, by_row = self._sorted(self._out_edges(), _UNCUT)
        ids = torch.arange(rows.numel() + 1, dtype=rows.dtype, device=rows.device)
        by_node = None
        if by_row.dim() == 1 and not compiling():  # on CUDA, where the sort has built it
            numbers = by_row[self.num_src + 1 :]
            by_node = Compressed(by_row[: self.num_src + 1], numbers, numbers)
        pairs = Graph(Compressed(ids, rows, None), by_node, self.num_src, rows.numel())
        types = torch.searchsorted(offsets[1:], ids[:-1], right=True, out_int32=ids.dtype is torch.int32)
        csr, in_edges = self.graph.csr, pairs_of_edges(ptr, edge_ids)
        in_edges = in_edges if csr.edge_ids is None else in_edges.index_select(0, csr.edge_ids)
        edges = Graph(
            Compressed(csr.indptr, in_edges, csr.edge_ids),
            Compressed(ptr, indices, edge_ids),
            rows.numel(),
            self.num_dst,
        )
        split = TypedGraph(pairs, types, self.num_types)
        split.format("offsets", lambda _: offsets)
        if by_node is not None:
            split.format("by row", lambda _: by_row)
        if self.device.type == "cuda":  # already sorted; empty arrays say that segment i is one edge, and row i
            none, ids = rows.new_empty(0), ids[:-1]
            split.format("by dst", lambda _: [offsets, ids, none, rows, ids, none])
        return Compact(split, edges)

    def _ends(self) -> Ends:
        sides = self.reversed.compact.pairs, self.compact.pairs
        counts = sides[0].num_edges, sides[1].num_edges
        dtype = index_dtype(self.num_src, 2 * self.num_types, sum(counts))
        first, second = (side._formats["offsets"].to(dtype) for side in sides)
        offsets = torch.cat((first, second[1:] + counts[0]))
        nodes = torch.cat([side.graph.csr.indices for side in sides]).to(dtype)
        return Ends(Graph(Compressed(offsets, nodes, None), None, self.num_src, 2 * self.num_types), counts)

    # Housekeeping ----------------------------------------------------------------------------------------------------

    def memory_bytes(self) -> int:
        """Bytes in the tensors of this graph and of its formats."""
        return num_bytes((self.graph, self.edge_type, self._formats))

    def memory_bytes_at_most(self) -> int:
        """Bytes that :meth:`memory_bytes` can grow to by building the other direction."""
        missing = sum(key not in self._formats for key in ("by dst", "by src"))
        grown = self.graph.memory_bytes_at_most() + num_bytes((self.edge_type, self._formats))
        numbers = 4 * self.num_edges
        if self.device.type == "cuda":  # the segments of every row, tiles, and the weights of a mean
            numbers += 2 * self.num_edges + max(self.num_src, self.num_dst) + 1
            numbers += (OF_SEGMENT + 1) * self.num_edges // OF_TILE + 2 * self.num_types + 2
            numbers += 2 * self.num_edges + 2 * max(self.num_src, self.num_dst) + 2  # rows' summands, if there are hubs
        return grown + missing * numbers * self.graph.index_dtype.itemsize

    def num_formats(self) -> int:
        """The number of formats kept, including those of :attr:`graph`."""
        return super().num_formats() + self.graph.num_formats()

    def __getstate__(self):
        return {**self.__dict__, "_formats": {}, "_graphs": []}

    def __repr__(self) -> str:
        return f"TypedGraph({self.graph!r}, num_types={self.num_types})"


def typed_graph_for(
    edge_type: Tensor,
    other: Any,
    key: Hashable,
    build: Callable[[], TypedGraph],
    *,
    tensors: tuple[Tensor, ...] = (),
    compare: bool = False,
) -> TypedGraph:
    """The cached typed graph of the user's ``edge_type`` tensor and the user's source of edges, or ``build()``.

    Args:
        edge_type: ``[E]``; the cached graph lives as long as this tensor.
        other: the user's source of edges, an edge_index or a graph; compared by identity.
        key: further parts of the cache key.
        tensors, compare: as in :func:`edgeless.cache.graph_for`; tensors without edge_type.
    """
    if compiling():
        return build()
    key = ("typed", WeakIdRef(other), key)
    return cache.graph_for(edge_type, key, build, tensors=(edge_type, *tensors), compare=compare)
