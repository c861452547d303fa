"""The graph handle: compressed adjacency in both directions, immutable, built once.

Messages flow from sources to destinations. CSR has destinations as rows (a row lists the sources of a node's
in-edges), CSC has sources as rows. Within a CSR row the edges keep their original order. Every edge has an id, its
position in the list that the graph was built from; edge tensors (features, weights) are indexed by it.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from .graph_checks import (
    as_device,
    as_index,
    check_choice,
    check_compressed,
    check_edge_index,
    check_has,
    check_ids,
    check_num_nodes,
    check_number,
    check_symmetric,
    compiling,
    normal_tensors,
    num_nodes_of,
    plain_tensor,
)
from .ops.graph import coo_to_csr, csr_transpose, index_dtype

__all__ = ["Compressed", "Graph"]


class Compressed(NamedTuple):
    """One direction of the adjacency: row ``r`` owns the positions ``indptr[r]`` to ``indptr[r + 1]``.

    Shapes: indptr ``[num_rows + 1]``, indices ``[E]`` (column of a position), edge_ids ``[E]`` (original id of the edge
    at a position, or None where position and id are the same). All of the graph's index dtype.
    """

    indptr: Tensor
    indices: Tensor
    edge_ids: Optional[Tensor]


class Graph:
    """An immutable directed graph from ``num_src`` source nodes to ``num_dst`` destination nodes.

    Build one with :meth:`from_edge_index`, :meth:`from_csr`, :meth:`from_csc`, :meth:`from_dgl`, :meth:`from_pyg`,
    :meth:`from_sparse_tensor` or :meth:`from_torch_sparse`. Multi-edges and self loops are edges like any others.
    The direction that was not given is built when it is first asked for, and kept. Index tensors are int32 where the
    numbers of nodes and edges are below 2**31 - 1, else int64. Pickles, copies and moves between devices.
    """

    def __init__(
        self,
        csr: Optional[Compressed],
        csc: Optional[Compressed],
        num_src: int,
        num_dst: int,
        is_symmetric: Optional[bool] = None,
        kept: Optional[Tensor] = None,
    ):
        # Takes arrays as they are: the class methods check and convert.
        self._csr = csr
        self._csc = csc
        self._csc_rows: Optional[list[Tensor]] = None  # in place of _csc, see csc_arrays
        self._num_src = num_src
        self._num_dst = num_dst
        self._is_symmetric = is_symmetric
        self._kept = kept  # set by with_self_loops
        self._looped: Optional[Graph] = None
        self._dense: Optional[tuple] = None  # see graph_rows.py
        self._zero_in_degree: Optional[bool] = None
        self._longest: list[int] = []  # see longest_at_hand
        self._longest_asked = 0  # how often
        self._longest_coming: Optional[tuple] = None
        self._scales: dict = {}  # see degree_scale

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
    ) -> Graph:
        """A graph from ``edge_index`` ``[2, E]`` of any integer dtype: sources in row 0, destinations in row 1.

        Args:
            num_src, num_dst: numbers of nodes. When both are None the graph is square, with as many nodes as the
                largest id asks for; when one is None it is that side's largest id plus one.
            is_symmetric: True when every edge has its reverse, if the caller knows; not verified.
            validate: check that ids are in range. Without it wrong ids are undefined behaviour.
        Raises:
            TypeError: edge_index is not a Tensor.
            ValueError: wrong shape, layout or dtype; a negative number of nodes; is_symmetric on a bipartite graph.
            IndexError: an id is negative or not below its number of nodes.
        """
        check_edge_index("Graph.from_edge_index", edge_index)
        src, dst = plain_tensor(edge_index).unbind(0)
        names = ("edge_index[0]", "edge_index[1]")
        return cls._from_ends(
            "Graph.from_edge_index", names, src, dst, num_src, num_dst, is_symmetric=is_symmetric, validate=validate
        )

    @classmethod
    def _from_ends(
        cls, call, names, src, dst, num_src, num_dst, *, is_symmetric=None, validate=True, self_loops=False
    ) -> Graph:
        """From the two ends of every edge. ``call`` and ``names`` (of src, dst) are for error messages."""
        with normal_tensors():
            src, dst = as_index(src), as_index(dst)
            num_src, num_dst = num_nodes_of(call, names, src, dst, num_src, num_dst)
            check_symmetric(call, is_symmetric, num_src, num_dst)
            ends, kept = (src, dst), None
            if self_loops:
                *ends, kept = _replace_self_loops(src, dst, min(num_src, num_dst))
            try:
                csr = Compressed(*coo_to_csr(ends[1], ends[0], num_dst, num_src, validate))
            except IndexError:  # say it in the caller's words
                check_ids(f"{call}: {names[0]}", src, "num_src", num_src)
                check_ids(f"{call}: {names[1]}", dst, "num_dst", num_dst)
                raise
            return cls(csr, None, num_src, num_dst, is_symmetric, kept)

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
        """A graph from compressed rows of destinations; shares the tensors where their dtype is the graph's.

        Args:
            indptr: ``[num_dst + 1]``, from 0 to E, never falling.
            indices: ``[E]``, the source of every edge.
            num_src: number of source nodes, ``num_dst`` when None.
            edge_ids: ``[E]``, a permutation: the id of the edge at every position. None: its position.
            is_symmetric, validate: as in :meth:`from_edge_index`.
        Raises:
            TypeError, ValueError: a wrong shape, dtype or device, or an indptr or edge_ids that is not as above.
            IndexError: an id is out of range.
        """
        csr = _compress("Graph.from_csr", indptr, indices, edge_ids, num_src, "num_src", validate)
        num_dst = csr.indptr.numel() - 1
        num_src = num_dst if num_src is None else num_src
        check_symmetric("Graph.from_csr", is_symmetric, num_src, num_dst)
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
        """A graph from compressed rows of sources: :meth:`from_csr` with the two sides swapped."""
        csc = _compress("Graph.from_csc", indptr, indices, edge_ids, num_dst, "num_dst", validate)
        num_src = csc.indptr.numel() - 1
        num_dst = num_src if num_dst is None else num_dst
        check_symmetric("Graph.from_csc", is_symmetric, num_src, num_dst)
        return cls(None, csc, num_src, num_dst, is_symmetric)

    @classmethod
    def from_dgl(cls, g, etype=None) -> Graph:
        """The edges of type ``etype`` of a DGLGraph or block (may be None when there is one type only).

        Reads the adjacency that DGL keeps, and shares its memory where the index dtypes agree.
        """
        check_has("Graph.from_dgl", "g", g, "canonical_etypes", "a DGLGraph")
        if etype is None and len(g.canonical_etypes) != 1:
            raise ValueError(f"Graph.from_dgl: etype must be one of {g.canonical_etypes}, got None")
        etype = g.canonical_etypes[g.get_etype_id(etype)]
        num_src, num_dst = g.num_src_nodes(etype[0]), g.num_dst_nodes(etype[2])
        # What DGL has already, in the order of its worth to us: asking for more would make DGL build and keep it. Its
        # arrays are checked like any, for users may have made them; to sort a small block anew is faster than that.
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
        """From a ``torch_sparse.SparseTensor`` ``[num_dst, num_src]``. Edge ids follow its stored order, by rows."""
        check_has("Graph.from_sparse_tensor", "adj_t", adj_t, "csr", "a torch_sparse.SparseTensor")
        rowptr, col, _ = adj_t.csr()
        return cls.from_csr(rowptr, col, adj_t.size(1))

    @classmethod
    def from_torch_sparse(cls, adj_t: Tensor) -> Graph:
        """From a ``torch.sparse`` COO or CSR matrix ``[num_dst, num_src]``. Edge ids follow its stored order.

        The duplicates of an uncoalesced matrix become multi-edges. Values are not looked at.

        Raises:
            TypeError: adj_t is not a Tensor.
            ValueError: another layout, or not a matrix.
            IndexError: an index is out of range.
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
        dst, src = adj_t._indices()  # indices() refuses what is not coalesced
        return cls._from_ends("Graph.from_torch_sparse", ("column", "row"), src, dst, num_src, num_dst)

    @classmethod
    def from_pyg(cls, edge_index) -> Graph:
        """From a ``torch_geometric.EdgeIndex``: row 0 has the sources, row 1 the destinations.

        The row pointers that an EdgeIndex caches are not used: they outlive in-place edits, and sorting takes no longer
        than checking them.
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
        """Where the index tensors are."""
        return self._any.indices.device

    @property
    def index_dtype(self) -> torch.dtype:
        """torch.int32 or torch.int64."""
        return self._any.indices.dtype

    @property
    def is_symmetric(self) -> Optional[bool]:
        """Whether every edge has its reverse, as the caller declared; None when unknown."""
        return self._is_symmetric

    @property
    def _any(self) -> Compressed:
        return self._csc if self._csr is None else self._csr

    # Adjacency -------------------------------------------------------------------------------------------------------

    @property
    def csr(self) -> Compressed:
        """In-edges: rows are destinations, indices are sources."""
        if self._csr is None:
            self._csr = _transpose(self._csc, self._num_dst)
        return self._csr

    @property
    def csc(self) -> Compressed:
        """Out-edges: rows are sources, indices are destinations. Built when a gradient first needs it."""
        if self._csc is None:
            self._csc, self._csc_rows = _transpose(self._csr, self._num_src), None
        return self._csc

    def csr_arrays(self, by_edge: bool) -> list[Tensor]:
        """:attr:`csr` as the ops take it.

        Args:
            by_edge: whether the op reads or writes something for every edge, and so needs the ids; dropout does.
        """
        return _arrays(self.csr, by_edge)

    def csc_arrays(self, by_edge: bool) -> list[Tensor]:
        """:attr:`csc` as the ops take it. Its edge ids are kept from when somebody first needs them."""
        if by_edge or self._csc is not None:
            return _arrays(self.csc, by_edge)
        if self._csc_rows is None:
            self._csc_rows = _arrays(_transpose(self._csr, self._num_src), False)
        return self._csc_rows

    @property
    def has_csc(self) -> bool:
        """Whether :attr:`csc` is already there, be it without edge ids."""
        return self._csc is not None or self._csc_rows is not None

    def _ends(self):
        """(src, dst) in original order and index dtype."""
        if self._csr is not None:
            dst, src = _uncompress(self._csr)
        else:
            src, dst = _uncompress(self._csc)
        return src, dst

    def edge_index(self) -> Tensor:
        """The edges as ``[2, E]`` int64 in their original order: sources in row 0, destinations in row 1."""
        src, dst = self._ends()
        return torch.stack((src, dst)).to(torch.int64)

    def in_degrees(self) -> Tensor:
        """Number of in-edges of every destination, ``[num_dst]`` int64."""
        if self._csr is not None:
            return self._csr.indptr.diff().to(torch.int64)
        return torch.bincount(self._csc.indices, minlength=self._num_dst)

    def out_degrees(self) -> Tensor:
        """Number of out-edges of every source, ``[num_src]`` int64."""
        if self.has_csc:
            return self.csc_arrays(False)[0].diff().to(torch.int64)
        return torch.bincount(self._csr.indices, minlength=self._num_src)

    @property
    def has_zero_in_degree(self) -> bool:
        """Whether some destination has no in-edge."""
        if self._zero_in_degree is None:
            self._zero_in_degree = bool((self.in_degrees() == 0).any())
        return self._zero_in_degree

    @property
    def max_in_degree(self) -> int:
        """The largest number of in-edges of a destination, 0 without destinations. Kept; waits for the GPU once."""
        if not self._longest:
            self._longest = [int(self.in_degrees().max()) if self._num_dst else 0]
        return self._longest[0]

    def max_in_degree_at_hand(self) -> Optional[int]:
        """:attr:`max_in_degree` if it can be had without waiting for a GPU, else None.

        A GPU is asked the second time, so that a graph used once costs nothing, and a later call finds the answer.
        """
        if self.device.type != "cuda":
            return self.max_in_degree
        if not self._longest:
            self._ask_longest(1)
        return self._longest[0] if self._longest else None

    def longest_at_hand(self) -> list[int]:
        """The most edges of a row of :attr:`csr`, and of :attr:`csc`, as far as known without waiting for a GPU.

        Known, they save a layer its looking for rows that were cut. A GPU is asked the fourth time: sampled graphs are
        rarely used as often.
        """
        if compiling():  # a program would be made anew once it is known
            return []
        if len(self._longest) < 1 + self.has_csc:
            self._ask_longest(3)
        return self._longest

    def _ask_longest(self, times_before: int) -> None:
        if self.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        if self._longest_coming is not None:
            answer, arrival = self._longest_coming
            if arrival.query():
                self._longest, self._longest_coming = answer.tolist(), None
            return
        self._longest_asked += 1
        if self._longest_asked > times_before and self._csr is not None:
            rows = [self._csr.indptr, *(self.csc_arrays(False)[:1] if self.has_csc else ())]
            if len(rows) > len(self._longest):
                self._longest_coming = _on_its_way([indptr.diff() for indptr in rows])

    def degree_scale(self, side: str, power: float, dtype: torch.dtype, isolated: float = 1.0) -> Tensor:
        """``degree ** power`` of every node (of 0: ``isolated``), kept; in-degrees for ``"dst"``, else out-degrees."""
        key = (side, power, dtype, isolated)
        scale = self._scales.get(key)
        if scale is None:
            check_choice("Graph.degree_scale", "side", side, ("src", "dst"))
            check_number("Graph.degree_scale", "power", power)
            with normal_tensors():
                degrees = self.in_degrees() if side == "dst" else self.out_degrees()
                scale = degrees.to(dtype).pow(power).masked_fill_(degrees == 0, isolated)
            self._scales[key] = scale
        return scale

    # Other graphs ----------------------------------------------------------------------------------------------------

    def reverse(self) -> Graph:
        """The graph with every edge turned round. Shares the index tensors and keeps the edge ids."""
        return Graph(self._csc, self._csr, self._num_dst, self._num_src, self._is_symmetric)

    def to(self, device) -> Graph:
        """This graph on ``device``: itself when it is there already, else a new handle.

        Raises:
            TypeError: device is no str, torch.device or int.
            ValueError: there is no such device.
        """
        device = as_device("Graph.to", device)
        with normal_tensors():
            csr, csc = _move(self._csr, device), _move(self._csc, device)
            kept = None if self._kept is None else self._kept.to(device)
        moved = Graph(csr, csc, self._num_src, self._num_dst, self._is_symmetric, kept)
        if moved._any.indices is self._any.indices:
            return self
        moved._zero_in_degree, moved._longest = self._zero_in_degree, self._longest
        return moved

    def with_self_loops(self) -> Graph:
        """The graph with its self loops replaced by exactly one at each of the first min(num_src, num_dst) nodes.

        Edges of the new graph: the kept edges in their original order, then the loops of node 0, 1, ... The result
        lives as long as this graph. Its ``_kept`` holds the ids ``[K]`` (int64) of the kept edges, None for all.
        """
        if self._looped is None:
            self._looped = Graph._from_ends(
                "Graph.with_self_loops",
                ("source", "destination"),
                *self._ends(),
                self._num_src,
                self._num_dst,
                is_symmetric=self._is_symmetric,
                validate=False,
                self_loops=True,
            )
        return self._looped

    # Housekeeping ----------------------------------------------------------------------------------------------------

    def memory_bytes(self) -> int:
        """Bytes in the index tensors of this graph and of the one derived from it; shared tensors count once."""
        tensors = {id(t): t for graph in self._family() for t in graph._tensors()}
        return sum(t.numel() * t.element_size() for t in tensors.values())

    def memory_bytes_at_most(self) -> int:
        """Bytes that :meth:`memory_bytes` can grow to by building the transposes."""
        return sum(graph._full_bytes() for graph in self._family())

    def num_formats(self) -> int:
        """How many graphs and tensors were derived from this one and kept: its bytes at most change with that alone."""
        others = self._family()[1:]
        return sum(1 + len(other._scales) for other in others) + len(self._scales)

    def _family(self):
        dense = self._dense and self._dense[0]
        return tuple(graph for graph in (self, self._looped, dense) if graph is not None)

    def _others(self):
        return (self._kept, self._dense and self._dense[1], *self._scales.values())

    def _tensors(self):
        arrays = (*(self._csr or ()), *(self._csc or self._csc_rows or ()), *self._others())
        return (t for t in arrays if t is not None)

    def _full_bytes(self) -> int:
        indices = self._any.indices
        entries = self._num_src + self._num_dst + 2 + 4 * indices.numel()  # indptr of both, indices and ids of both
        others = (t for t in self._others() if t is not None)
        return entries * indices.element_size() + sum(t.numel() * t.element_size() for t in others)

    def __getstate__(self):
        return {**self.__dict__, "_looped": None, "_dense": None, "_scales": {}, "_longest_coming": None}

    def __repr__(self) -> str:
        symmetric = ", symmetric" if self._is_symmetric else ""
        dtype = str(self.index_dtype).replace("torch.", "")
        return (
            f"Graph(num_src={self._num_src}, num_dst={self._num_dst}, num_edges={self.num_edges}, "
            f"device={str(self.device)!r}, {dtype}{symmetric})"
        )


def _on_its_way(degrees: list[Tensor]):
    """The largest numbers of some on the GPU, 0 of none, in the host's memory, and the event after which they are."""
    answer = torch.zeros(len(degrees), dtype=torch.int64, pin_memory=True)
    for place, numbers in zip(answer, degrees):
        if numbers.numel():
            place.copy_(numbers.amax(), non_blocking=True)
    arrival = torch.cuda.Event()
    arrival.record()
    return answer, arrival


def _compress(call, indptr, indices, edge_ids, num_cols, limit_name, validate) -> Compressed:
    """Check compressed arrays and bring them to one dtype and contiguous memory. ``num_cols`` None means square."""
    if num_cols is not None:
        check_num_nodes(call, limit_name, num_cols)
    check_compressed(call, indptr, indices, edge_ids, num_cols, limit_name, validate and not compiling())
    num_rows = indptr.numel() - 1
    dtype = index_dtype(num_rows, num_rows if num_cols is None else num_cols, indices.numel())
    with normal_tensors():
        return Compressed(*(None if t is None else _own(t, dtype) for t in (indptr, indices, edge_ids)))


def _own(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor`` as ``dtype`` in contiguous memory, fit to be saved for backward."""
    tensor = tensor.to(dtype).contiguous()
    return tensor.clone() if tensor.is_inference() else tensor


def _arrays(compressed: Compressed, by_edge: bool) -> list[Tensor]:
    indptr, indices, edge_ids = compressed
    return [indptr, indices] if edge_ids is None or not by_edge else [indptr, indices, edge_ids]


def _transpose(compressed: Compressed, num_cols: int) -> Compressed:
    with normal_tensors():
        return Compressed(*csr_transpose(*compressed, num_cols))


def _replace_self_loops(src: Tensor, dst: Tensor, num_loops: int):
    """Both ends of the edges that are no loops and of the new loops; ids of the former, None when these are all."""
    loops = torch.arange(num_loops, dtype=src.dtype, device=src.device)
    keep, kept = src != dst, None
    if compiling() or not bool(keep.all()):  # a traced program cannot branch on values
        kept = keep.nonzero().squeeze(1)
        src, dst = src.index_select(0, kept), dst.index_select(0, kept)
    return torch.cat((src, loops)), torch.cat((dst, loops)), kept


def _dgl_ids(ids: Tensor, indices: Tensor) -> Optional[Tensor]:
    """DGL writes the identity as an empty tensor."""
    return None if ids.numel() == 0 and indices.numel() > 0 else ids


def _uncompress(compressed: Compressed):
    """(row, column) of every edge in original order."""
    indptr, indices, edge_ids = compressed
    rows = torch.arange(indptr.numel() - 1, dtype=indptr.dtype, device=indptr.device)
    rows = rows.repeat_interleave(indptr.diff(), output_size=indices.numel())
    if edge_ids is None:
        return rows, indices
    edge_ids = edge_ids.to(torch.int64)
    return torch.empty_like(rows).scatter_(0, edge_ids, rows), torch.empty_like(indices).scatter_(0, edge_ids, indices)


def _move(compressed: Optional[Compressed], device) -> Optional[Compressed]:
    if compressed is None:
        return None
    return Compressed(*(None if t is None else t.to(device) for t in compressed))
