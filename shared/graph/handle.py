"""The graph handle: compressed adjacency in both directions, immutable, built once.

Messages flow from sources to destinations. CSR has destinations as rows (a row lists the sources of a node's
in-edges), CSC has sources as rows. Within a CSR row the edges keep their original order. Every edge has an id, its
index in the list that the graph was built from; edge tensors (features, weights) are indexed by it.
"""

from __future__ import annotations

import contextlib
from typing import Optional, Union

import torch
from torch import Tensor

from .. import _C
from ..checks import (
    as_device,
    as_index,
    check_choice,
    check_edge_index,
    check_has,
    check_ids,
    check_number,
    check_symmetric,
    compiling,
    normal_tensors,
    num_nodes_of,
    plain_tensor,
)
from ..ops.graph import coo_to_csr
from ..reordering import reorder_graph
from .adjacency import Compressed, arrays_of, check_reverses, compress, move, replace_self_loops, transpose, uncompress
from .deferred_checks import building, deferred
from .fingerprint import of_graph
from .formats import CSC, CSC_ROWS, CSR, PLACES, POSITIONS, Formats, Keeper, facts, num_bytes, travelling
from .max_degrees import MaxDegrees

__all__ = ["Compressed", "Graph"]

_ADJACENCY = frozenset((CSR, CSC, CSC_ROWS))


class Graph(Keeper):
    """An immutable directed graph from ``num_src`` source nodes to ``num_dst`` destination nodes.

    Build one with :meth:`from_edge_index`, :meth:`from_csr`, :meth:`from_csc`, :meth:`from_dgl`, :meth:`from_pyg`,
    :meth:`from_sparse_tensor` or :meth:`from_torch_sparse`. Multi-edges and self loops are edges like any others.
    The direction that was not given is built at its first use, and kept. Index tensors are int32 if the numbers of
    nodes and edges are below 2**31 - 1, else int64. Graphs can be pickled, copied and moved between devices.

    Example:
        >>> import torch
        >>> from edgeless import Graph
        >>> Graph.from_edge_index(torch.tensor([[0, 1, 2, 0], [1, 2, 0, 2]]))
        Graph(num_src=3, num_dst=3, num_edges=4, device='cpu', int32)
    """

    _num_receiving: Optional[int] = None  # the number of destinations with in-edges, None if not counted

    def __init__(
        self,
        csr: Optional[Compressed],
        csc: Optional[Compressed],
        num_src: int,
        num_dst: int,
        is_symmetric: Optional[bool] = None,
        kept: Optional[Tensor] = None,
    ):
        # The arrays are not checked here: the class methods check and convert them.
        self._formats: Formats = {} if csr is None else {CSR: csr}
        if csc is not None:
            self._formats[CSC] = csc
        self._graphs: list[Graph] = []
        self._num_src = num_src
        self._num_dst = num_dst
        self._is_symmetric = is_symmetric
        self._kept = kept  # ids of the edges that with_self_loops kept
        self._has_loops = False  # if True, the only loops are those of with_self_loops, and they are the last edges
        self._max_degrees = MaxDegrees()

    # Constructors ----------------------------------------------------------------------------------------------------

    @classmethod
    def from_edge_index(
        cls,
        edge_index: Tensor,
        num_src: Optional[int] = None,
        num_dst: Optional[int] = None,
        *,
        is_symmetric: Optional[bool] = None,
        validate: bool = True,
        self_loops: bool = False,
    ) -> Graph:
        """A graph from ``edge_index`` ``[2, E]`` of any integer dtype: sources in row 0, destinations in row 1.

        Args:
            num_src, num_dst: numbers of nodes. When both are None the graph is square, with the largest id plus one
                nodes; when one is None it is that side's largest id plus one.
            is_symmetric: True if the caller knows that every edge has its reverse, with the same multiplicity. One
                array of neighbours then serves both directions in ops without per-edge data.
            validate: check that ids are in range, and that a graph declared symmetric is symmetric, which takes as long
                as building both directions. Without it, wrong ids and gradients over a graph that is not symmetric are
                undefined behaviour.
            self_loops: replace self loops as :meth:`with_self_loops` does. A later call of that method then sorts
                nothing, so that a new graph at every step is sorted once.
        Raises:
            TypeError: edge_index is not a Tensor.
            ValueError: wrong shape, layout or dtype; a negative number of nodes; is_symmetric of a graph that is not.
            IndexError: an id is negative or not below its number of nodes.

        Example:
            >>> import torch
            >>> from edgeless import Graph
            >>> Graph.from_edge_index(torch.tensor([[0, 1], [1, 1]]), num_src=5)
            Graph(num_src=5, num_dst=2, num_edges=2, device='cpu', int32)
        """
        check_edge_index("Graph.from_edge_index", edge_index)
        src, dst = plain_tensor(edge_index).unbind(0)
        names = ("edge_index[0]", "edge_index[1]")
        options = {"is_symmetric": is_symmetric, "validate": validate, "self_loops": self_loops}
        return cls._from_ends("Graph.from_edge_index", names, src, dst, num_src, num_dst, **options)

    @classmethod
    def _from_ends(
        cls, call, names, src, dst, num_src, num_dst, *, is_symmetric=None, validate=True, self_loops=False
    ) -> Graph:
        """Builds a graph from the ends of every edge. ``call`` and ``names`` (of src, dst) are for error messages."""
        with normal_tensors(), contextlib.nullcontext() if compiling() else building():
            src, dst = as_index(src), as_index(dst)
            num_src, num_dst = num_nodes_of(call, names, src, dst, num_src, num_dst)
            check_symmetric(call, is_symmetric, num_src, num_dst)
            if (checks := None if compiling() else deferred()) is not None:
                src = checks.ids(f"{call}: {names[0]}", src, "num_src", num_src)
                dst = checks.ids(f"{call}: {names[1]}", dst, "num_dst", num_dst)
                validate = False
            graph = None if compiling() else cls._of_few_edges(src, dst, num_src, num_dst, self_loops)
            if graph is not None:
                if is_symmetric and validate:
                    check_reverses(call, graph.csr, num_dst)
                graph._is_symmetric = is_symmetric
                return graph
            ends, kept = (src, dst), None
            if self_loops:
                *ends, kept = replace_self_loops(src, dst, min(num_src, num_dst))
            try:
                csr = Compressed(*coo_to_csr(ends[1], ends[0], num_dst, num_src, validate))
            except IndexError:  # repeat the check, whose message has the caller's names
                check_ids(f"{call}: {names[0]}", src, "num_src", num_src)
                check_ids(f"{call}: {names[1]}", dst, "num_dst", num_dst)
                raise
            if is_symmetric and validate:
                check_reverses(call, csr, num_dst)
            graph = cls(csr, None, num_src, num_dst, is_symmetric, kept)
            graph._has_loops = self_loops
            return graph

    @classmethod
    def _of_few_edges(cls, src, dst, num_src: int, num_dst: int, self_loops: bool) -> Optional[Graph]:
        """:meth:`_from_ends` for a small graph of int32 or int64 ids, without the dispatch of ops.

        Returns None if ``graph_of_few_edges`` (``core_cuda/graph/few_edges_cpu.h``) does not support the graph, and
        where a captured step has to record ops. It does not support ids out of range, which the ops report.
        """
        found = None if deferred() is not None else _C.graph_of_few_edges(src, dst, num_src, num_dst, self_loops)
        if found is None:
            return None
        indptr, indices, edge_ids, kept, num_receiving, most = found
        graph = cls(Compressed(indptr, indices, edge_ids), None, num_src, num_dst, None, kept)
        graph._has_loops, graph._num_receiving = self_loops, num_receiving
        graph._max_degrees.known = [most]
        return graph

    @classmethod
    def from_csr(
        cls,
        indptr: Tensor,
        indices: Tensor,
        num_src: Optional[int] = None,
        *,
        edge_ids: Optional[Tensor] = None,
        is_symmetric: Optional[bool] = None,
        validate: bool = True,
    ) -> Graph:
        """A graph from compressed rows of destinations; shares the tensors if they have the graph's index dtype.

        Args:
            indptr: ``[num_dst + 1]``, from 0 to E, never falling.
            indices: ``[E]``, the source of every edge.
            num_src: number of source nodes, ``num_dst`` when None.
            edge_ids: ``[E]``, a permutation: the id of the edge at every index. None: the index itself.
            is_symmetric, validate: as in :meth:`from_edge_index`.
        Raises:
            TypeError, ValueError: a wrong shape, dtype or device, or an indptr or edge_ids that is not as above.
            IndexError: an id is out of range.

        Example:
            >>> import torch
            >>> from edgeless import Graph
            >>> Graph.from_csr(torch.tensor([0, 0, 2]), torch.tensor([0, 1])).edge_index()
            tensor([[0, 1],
                    [1, 1]])
        """
        csr = compress("Graph.from_csr", indptr, indices, edge_ids, num_src, "num_src", validate)
        num_dst = csr.indptr.numel() - 1
        num_src = num_dst if num_src is None else num_src
        check_symmetric("Graph.from_csr", is_symmetric, num_src, num_dst)
        if is_symmetric and validate:
            check_reverses("Graph.from_csr", csr, num_dst)
        return cls(csr, None, num_src, num_dst, is_symmetric)

    @classmethod
    def from_csc(
        cls,
        indptr: Tensor,
        indices: Tensor,
        num_dst: Optional[int] = None,
        *,
        edge_ids: Optional[Tensor] = None,
        is_symmetric: Optional[bool] = None,
        validate: bool = True,
    ) -> Graph:
        """A graph from compressed rows of sources: :meth:`from_csr` with the two sides swapped.

        Example:
            >>> import torch
            >>> from edgeless import Graph
            >>> Graph.from_csc(torch.tensor([0, 0, 2]), torch.tensor([0, 1])).edge_index()
            tensor([[1, 1],
                    [0, 1]])
        """
        csc = compress("Graph.from_csc", indptr, indices, edge_ids, num_dst, "num_dst", validate)
        num_src = csc.indptr.numel() - 1
        num_dst = num_src if num_dst is None else num_dst
        check_symmetric("Graph.from_csc", is_symmetric, num_src, num_dst)
        if is_symmetric and validate:
            check_reverses("Graph.from_csc", csc, num_src)
        return cls(None, csc, num_src, num_dst, is_symmetric)

    @classmethod
    def from_dgl(cls, g, etype=None) -> Graph:
        """The edges of type ``etype`` of a DGLGraph or block (may be None when there is one type only).

        Reads the adjacency that DGL keeps, and shares its memory if the index dtypes agree.

        Example:
            >>> import dgl
            >>> from edgeless import Graph
            >>> Graph.from_dgl(dgl.graph(([0, 1], [1, 0])))
            Graph(num_src=2, num_dst=2, num_edges=2, device='cpu', int32)
        """
        check_has("Graph.from_dgl", "g", g, "canonical_etypes", "a DGLGraph")
        if etype is None and len(g.canonical_etypes) != 1:
            raise ValueError(f"Graph.from_dgl: etype must be one of {g.canonical_etypes}, got None")
        etype = g.canonical_etypes[g.get_etype_id(etype)]
        num_src, num_dst = g.num_src_nodes(etype[0]), g.num_dst_nodes(etype[2])
        # Takes a format that DGL has already, the most useful first: a request for another would make DGL build and
        # keep it. Users may have made these arrays, so they are checked. For a block, a new sort is faster than that.
        have = g.formats()["created"]
        if "csc" in have and not (g.is_block and "coo" in have):
            indptr, indices, ids = g.adj_tensors("csc", etype)
            return cls.from_csr(indptr, indices, num_src, edge_ids=_dgl_ids(ids, indices))
        if "coo" in have:
            src, dst = g.edges(order="eid", etype=etype)
            return cls._from_ends("Graph.from_dgl", ("source", "destination"), src, dst, num_src, num_dst)
        indptr, indices, ids = g.adj_tensors("csr", etype)
        return cls.from_csc(indptr, indices, num_dst, edge_ids=_dgl_ids(ids, indices))

    @classmethod
    def from_sparse_tensor(cls, adj_t) -> Graph:
        """A graph from a ``torch_sparse.SparseTensor`` ``[num_dst, num_src]``. Edge ids follow its stored order, by
        rows.

        Example:
            >>> import torch
            >>> from torch_sparse import SparseTensor
            >>> from edgeless import Graph
            >>> Graph.from_sparse_tensor(SparseTensor(row=torch.tensor([1, 1]), col=torch.tensor([0, 1])))
            Graph(num_src=2, num_dst=2, num_edges=2, device='cpu', int32)
        """
        check_has("Graph.from_sparse_tensor", "adj_t", adj_t, "csr", "a torch_sparse.SparseTensor")
        rowptr, col, _ = adj_t.csr()
        return cls.from_csr(rowptr, col, adj_t.size(1))

    @classmethod
    def from_torch_sparse(cls, adj_t: Tensor) -> Graph:
        """A graph from a ``torch.sparse`` COO or CSR matrix ``[num_dst, num_src]``. Edge ids follow its stored order.

        The duplicates of an uncoalesced matrix become multi-edges. Values are ignored.

        Raises:
            TypeError: adj_t is not a Tensor.
            ValueError: another layout, or not a matrix.
            IndexError: an index is out of range.

        Example:
            >>> import torch
            >>> from edgeless import Graph
            >>> adj_t = torch.tensor([[0.0, 1.0], [1.0, 0.0]]).to_sparse()
            >>> Graph.from_torch_sparse(adj_t)
            Graph(num_src=2, num_dst=2, num_edges=2, device='cpu', int32)
        """
        if not isinstance(adj_t, Tensor):
            raise TypeError(f"Graph.from_torch_sparse: adj_t must be a sparse Tensor, got {type(adj_t).__name__}")
        if adj_t.layout not in (torch.sparse_coo, torch.sparse_csr):
            raise ValueError(f"Graph.from_torch_sparse: adj_t must be sparse COO or CSR, got layout {adj_t.layout}")
        if adj_t.dim() - adj_t.dense_dim() != 2:
            raise ValueError(f"Graph.from_torch_sparse: adj_t must be a matrix, got shape {list(adj_t.shape)}")
        num_dst, num_src = adj_t.shape[:2]
        if adj_t.layout == torch.sparse_csr:
            return cls.from_csr(adj_t.crow_indices(), adj_t.col_indices(), num_src)
        dst, src = adj_t._indices()  # indices() raises for uncoalesced matrices
        return cls._from_ends("Graph.from_torch_sparse", ("column", "row"), src, dst, num_src, num_dst)

    @classmethod
    def from_pyg(cls, edge_index) -> Graph:
        """A graph from a ``torch_geometric.EdgeIndex``: row 0 has the sources, row 1 the destinations.

        The row pointers that an EdgeIndex caches are not used: they go stale after in-place edits, and checking them
        takes as long as sorting.

        Example:
            >>> import torch, torch_geometric
            >>> from edgeless import Graph
            >>> edge_index = torch_geometric.EdgeIndex([[0, 1], [1, 0]], sparse_size=(3, 3))
            >>> Graph.from_pyg(edge_index)
            Graph(num_src=3, num_dst=3, num_edges=2, device='cpu', int32)
        """
        check_has("Graph.from_pyg", "edge_index", edge_index, "sparse_size", "a torch_geometric.EdgeIndex")
        num_src, num_dst = edge_index.sparse_size()
        return cls.from_edge_index(edge_index, num_src, num_dst, is_symmetric=edge_index.is_undirected or None)

    # Facts -----------------------------------------------------------------------------------------------------------

    @property
    def num_src(self) -> int:
        """Number of source nodes."""
        return self._num_src

    @property
    def num_dst(self) -> int:
        """Number of destination nodes."""
        return self._num_dst

    @property
    def num_edges(self) -> int:
        """Number of edges."""
        return self._any.indices.size(0)

    @property
    def device(self) -> torch.device:
        """The device of the index tensors."""
        return self._any.indices.device

    @property
    def index_dtype(self) -> torch.dtype:
        """torch.int32 or torch.int64."""
        return self._any.indices.dtype

    @property
    def is_symmetric(self) -> Optional[bool]:
        """True if the caller declared that every edge has its reverse, with equal multiplicity; None when unknown."""
        return self._is_symmetric

    @property
    def fingerprint(self) -> str:
        """A hash of the sizes and the edges, regardless of edge order and device. Kept; waits for the GPU once."""
        return f"{self.format('fingerprint', of_graph):016x}"

    @property
    def _any(self) -> Compressed:
        return self._formats.get(CSR) or self._formats[CSC]

    # Adjacency -------------------------------------------------------------------------------------------------------

    @property
    def csr(self) -> Compressed:
        """In-edges: rows are destinations, indices are sources."""
        return self._formats.get(CSR) or self.format(CSR, lambda graph: transpose(graph.csc, graph.num_dst))

    @property
    def csc(self) -> Compressed:
        """Out-edges: rows are sources, indices are destinations. Built at its first use, as by a gradient."""
        csc = self._formats.get(CSC)
        if csc is None:
            csc = self.format(CSC, lambda graph: transpose(graph.csr, graph.num_src))
            self._formats.pop(CSC_ROWS, None)
        return csc

    def csr_arrays(self, by_edge: bool) -> list[Tensor]:
        """Returns :attr:`csr` as the ops take it.

        Args:
            by_edge: whether the op has per-edge data and so needs the edge ids. Dropout does, for its mask.
        """
        if self._is_symmetric and not by_edge and CSR not in self._formats:
            return arrays_of(self.csc, False)
        return arrays_of(self.csr, by_edge)

    def csc_arrays(self, by_edge: bool) -> list[Tensor]:
        """Returns :attr:`csc` as the ops take it. Its edge ids are kept from their first use on.

        Without edge ids, a symmetric graph returns its CSR: the same neighbours, in another order.
        """
        if by_edge or CSC in self._formats:
            return arrays_of(self.csc, by_edge)
        if self._is_symmetric:
            return arrays_of(self.csr, False)
        return self.format(CSC_ROWS, lambda graph: arrays_of(transpose(graph.csr, graph.num_src), False))

    def csc_with_positions(self) -> list[Tensor]:
        """Returns :attr:`csc` with edge ids and, for a reused graph, the position of every edge within its CSR row.

        The positions are ``[E]`` int32. Without them, each gradient of an extremum has to find them
        (docs/decisions/0016). A graph counts as reused once its largest degree is known, which on a GPU takes several
        calls. Nothing is made while a CUDA graph is captured, since it would have values only after the first replay.
        """
        csc = self.csc_arrays(True)
        if len(csc) < 3 or csc[0].dtype != torch.int32 or not self._keeps(POSITIONS):
            return csc
        return [*csc, self.format(POSITIONS, _positions)]

    def csc_with_places(self) -> list[Tensor]:
        """Returns :attr:`csc` with edge ids and, for a reused graph, the CSC-to-CSR permutation ``[E]`` (index dtype).

        Without it, each gradient of attention with edge features has to find the indices in :attr:`csr`. It is made
        under the conditions of :meth:`csc_with_positions`.
        """
        csc = self.csc_arrays(True)
        if len(csc) < 3 or not self._keeps(PLACES):
            return csc
        return [*csc, self.format(PLACES, _places)]

    def _keeps(self, key: str) -> bool:
        """Returns whether that format is kept already or should be built now."""
        if compiling():
            return False
        captured = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        return key in self._formats or (self._max_degrees.known and not captured)

    @property
    def has_csr(self) -> bool:
        """True if :attr:`csr` is already built."""
        return CSR in self._formats

    @property
    def has_csc(self) -> bool:
        """True if :attr:`csc` is already built, with or without edge ids."""
        return CSC in self._formats or CSC_ROWS in self._formats or bool(self._is_symmetric)

    def _ends(self):
        """Returns the sources and destinations of the edges in original order and the index dtype."""
        if CSR in self._formats:
            dst, src = uncompress(self.csr)
        else:
            src, dst = uncompress(self.csc)
        return src, dst

    def edge_index(self) -> Tensor:
        """The edges as ``[2, E]`` int64 in their original order: sources in row 0, destinations in row 1.

        Example:
            >>> import torch
            >>> from edgeless import Graph
            >>> Graph.from_edge_index(torch.tensor([[2, 0], [1, 1]])).edge_index()
            tensor([[2, 0],
                    [1, 1]])
        """
        src, dst = self._ends()
        return torch.stack((src, dst)).to(torch.int64)

    def in_degrees(self) -> Tensor:
        """Number of in-edges of every destination, ``[num_dst]`` int64."""
        if CSR in self._formats:
            return self.csr.indptr.diff().to(torch.int64)
        return torch.bincount(self.csc.indices, minlength=self._num_dst)

    def out_degrees(self) -> Tensor:
        """Number of out-edges of every source, ``[num_src]`` int64."""
        if self.has_csc:
            return self.csc_arrays(False)[0].diff().to(torch.int64)
        return torch.bincount(self.csr.indices, minlength=self._num_src)

    @property
    def has_zero_in_degree(self) -> bool:
        """True if some destination has no in-edge."""
        return self.format("zero in-degree", _has_zero_in_degree)

    @property
    def max_in_degree(self) -> int:
        """The largest number of in-edges of a destination, 0 without destinations. Kept; waits for the GPU once."""
        return self._max_degrees.of_csr(self)

    def cached_max_in_degree(self) -> Optional[int]:
        """Returns :attr:`max_in_degree` if it is available without waiting for a GPU, else None.

        On a GPU the second call starts an asynchronous copy, which a later call finds complete, so that a graph used
        once costs nothing.
        """
        return self._max_degrees.cached_of_csr(self)

    def cached_max_degrees(self) -> list[int]:
        """Returns the largest degree of :attr:`csr` and of :attr:`csc`, as far as available without waiting for a GPU.

        With them, a layer need not search for rows that are split. On a GPU the fourth call starts the asynchronous
        copy, because sampled graphs are rarely used that often.
        """
        return self._max_degrees.cached(self)

    def degree_scale(self, side: str, power: float, dtype: torch.dtype, isolated: float = 1.0) -> Tensor:
        """Returns ``degree ** power`` of every node, ``isolated`` for degree 0, and keeps it.

        Args:
            side: ``"dst"`` for in-degrees of destinations, ``"src"`` for out-degrees of sources.
            power: the exponent.
            dtype: the dtype of the result ``[num_dst]`` or ``[num_src]``.
            isolated: the value of nodes without edges.
        """
        key = ("scale", side, power, dtype, isolated)
        scale = self._formats.get(key)
        if scale is None:
            check_choice("Graph.degree_scale", "side", side, ("src", "dst"))
            check_number("Graph.degree_scale", "power", power)
            scale = self.format(key, lambda graph: power_of_degrees(graph, side, power, dtype, isolated))
        return scale

    # Other graphs ----------------------------------------------------------------------------------------------------

    def reverse(self) -> Graph:
        """The graph with every edge reversed. Shares the index tensors and keeps the edge ids.

        Example:
            >>> import torch
            >>> from edgeless import Graph
            >>> Graph.from_edge_index(torch.tensor([[2, 0], [1, 1]])).reverse().edge_index()
            tensor([[1, 1],
                    [2, 0]])
        """
        csr, csc = self._formats.get(CSR), self._formats.get(CSC)
        return Graph(csc, csr, self._num_dst, self._num_src, self._is_symmetric)

    def to(self, device) -> Graph:
        """This graph on ``device``: itself when it is there already, else a new handle.

        Raises:
            TypeError: device is no str, torch.device or int.
            ValueError: there is no such device.
        """
        device = as_device("Graph.to", device)
        with normal_tensors():
            csr, csc = (move(self._formats.get(key), device) for key in (CSR, CSC))
            kept = None if self._kept is None else self._kept.to(device)
        moved = Graph(csr, csc, self._num_src, self._num_dst, self._is_symmetric, kept)
        if moved._any.indices is self._any.indices:
            return self
        moved._formats.update(facts(self._formats))
        if self._num_receiving is None:  # else the degree was known from the start, which does not show reuse
            moved._max_degrees = self._max_degrees.moved()
        return moved

    def with_self_loops(self) -> Graph:
        """The graph with its self loops replaced by exactly one at each of the first min(num_src, num_dst) nodes.

        The edges of the new graph are the kept edges in their original order, then the loops of node 0, 1, ... The
        result is kept as long as this graph. Its ``_kept`` holds the ids ``[K]`` (int64) of the kept edges, None if
        all were kept.

        Example:
            >>> import torch
            >>> from edgeless import Graph
            >>> Graph.from_edge_index(torch.tensor([[1, 0], [1, 1]])).with_self_loops().edge_index()
            tensor([[0, 0, 1],
                    [1, 0, 1]])
        """
        return self.format("self loops", _with_self_loops)

    def reorder(
        self,
        method: Union[str, Tensor, tuple[Tensor, Tensor]],
        *,
        num_parts: Optional[int] = None,
        seed: int = 0,
        bipartite: Optional[bool] = None,
    ):
        """Renumbers the nodes so that neighbours are near in memory, and returns the new graph and the permutation.

        ``permutation[i]`` is the original id of the node that now has id ``i``: ``x[permutation]`` are the features of
        the new graph, and ``edgeless.reordering.restore(out, permutation)`` takes outputs back to the original order.
        Edges keep their ids, so edge tensors and dropout masks stay valid.

        Args:
            method: ``"community"`` (needs scikit-network), ``"metis"`` (pymetis), ``"rcm"`` (SciPy) or ``"degree"``;
                docs/choosing.md compares them. Or a permutation ``[N]`` of any integer dtype.
            num_parts: the number of METIS partitions; by default one per 512 nodes.
            seed: the seed of METIS; the other methods draw no random numbers. Every method gives the same order every
                time.
            bipartite: whether sources and destinations are two sets of nodes. Each set then gets a permutation, found
                together, and method may be a pair. None: they are if num_src and num_dst differ.
        Returns:
            (Graph, permutation): int64 ``[N]`` on the graph's device; for a bipartite graph the pair of permutations
            of the sources and of the destinations.
        Raises:
            TypeError, ValueError, IndexError: an argument is not as above.
            ImportError: the method's library is missing; ``pip install 'edgeless[reorder]'``.
            RuntimeError: METIS fails, as it does on some graphs of millions of nodes.

        Example:
            >>> import torch
            >>> from edgeless import Graph
            >>> graph = Graph.from_edge_index(torch.tensor([[0, 1, 2], [2, 2, 0]]))
            >>> reordered, permutation = graph.reorder("degree")
            >>> permutation
            tensor([2, 0, 1])
        """
        return reorder_graph(self, method, num_parts, seed, bipartite)

    # Housekeeping ----------------------------------------------------------------------------------------------------

    def memory_bytes(self) -> int:
        """Returns the bytes of this graph's index tensors and of its formats; shared tensors count once."""
        return num_bytes(self)

    def memory_bytes_at_most(self) -> int:
        """Returns the bytes to which :meth:`memory_bytes` can grow by building the transposes."""
        if self._kept is None and self._formats.keys() <= _ADJACENCY:  # the fast path of new graphs
            return self._bytes_of_both()
        return self.memory_bytes() + self._missing_bytes()

    def _bytes_of_both(self) -> int:
        """Returns the bytes of the arrays of both directions."""
        indices = self._any.indices
        entries = self._num_src + self._num_dst + 2 + 4 * indices.numel()  # indptr of both, indices and ids of both
        return entries * indices.element_size()

    def _missing_bytes(self) -> int:
        """Returns the bytes of the adjacency arrays that are not built yet, of this graph and of those in its store."""
        present = num_bytes([self._formats.get(key) for key in _ADJACENCY])
        return self._bytes_of_both() - present + sum(graph._missing_bytes() for graph in self._graphs)

    def __getstate__(self):
        return {
            **self.__dict__,
            "_formats": travelling(self._formats),
            "_graphs": [],
            "_max_degrees": self._max_degrees.moved(),
        }

    def __repr__(self) -> str:
        symmetric = ", symmetric" if self._is_symmetric else ""
        dtype = str(self.index_dtype).replace("torch.", "")
        return (
            f"Graph(num_src={self._num_src}, num_dst={self._num_dst}, num_edges={self.num_edges}, "
            f"device={str(self.device)!r}, {dtype}{symmetric})"
        )


def power_of_degrees(graph, side: str, power: float, dtype: torch.dtype, isolated: float) -> Tensor:
    """Computes :meth:`Graph.degree_scale` for any graph that has ``in_degrees()`` and ``out_degrees()``."""
    if type(graph) is Graph and dtype in (torch.float32, torch.float64) and not compiling():
        kept = [graph._formats.get(key) for key in ((CSR,) if side == "dst" else (CSC, CSC_ROWS))]
        for rows in filter(None, kept):
            powers = _C.powers_of_few_degrees(rows[0], power, isolated, dtype is torch.float64)
            if powers is not None:
                return powers
    degrees = graph.in_degrees() if side == "dst" else graph.out_degrees()
    return degrees.to(dtype).pow(power).masked_fill_(degrees == 0, isolated)


def _has_zero_in_degree(graph: Graph) -> bool:
    known = graph._num_receiving
    return bool((graph.in_degrees() == 0).any()) if known is None else known < graph.num_dst


def _positions(graph: Graph) -> Tensor:
    return torch.ops.edgeless.edge_positions(graph.csr_arrays(True)).index_select(0, graph.csc.edge_ids)


def _places(graph: Graph) -> Tensor:
    in_csr, in_csc = graph.csr.edge_ids, graph.csc.edge_ids
    if in_csr is None:
        return in_csc
    places, numbers = torch.empty_like(in_csr), torch.arange(graph.num_edges, dtype=in_csr.dtype, device=graph.device)
    # "amin" finds the true index: padding behind the last row repeats the id of some edge, always at a larger index.
    places.scatter_reduce_(0, in_csr.long(), numbers, "amin", include_self=False)
    return places.index_select(0, in_csc)


def _with_self_loops(graph: Graph) -> Graph:
    num_loops = min(graph.num_src, graph.num_dst)
    if graph._has_loops:
        kept = torch.arange(graph.num_edges - num_loops, device=graph.device) if num_loops else None
        csr, csc = (graph._formats.get(key) for key in (CSR, CSC))
        looped = Graph(csr, csc, graph.num_src, graph.num_dst, graph.is_symmetric, kept)
        looped._has_loops, looped._max_degrees = True, graph._max_degrees
        return looped
    call, names, size = "Graph.with_self_loops", ("source", "destination"), (graph.num_src, graph.num_dst)
    options = {"is_symmetric": graph.is_symmetric, "validate": False, "self_loops": True}
    return Graph._from_ends(call, names, *graph._ends(), *size, **options)


def _dgl_ids(ids: Tensor, indices: Tensor) -> Optional[Tensor]:
    """Returns None for an empty tensor, by which DGL denotes the identity."""
    return None if ids.numel() == 0 and indices.numel() > 0 else ids
