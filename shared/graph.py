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
    check_compressed,
    check_edge_index,
    check_ids,
    check_num_nodes,
    compiling,
    num_nodes_of,
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
        self._num_src = num_src
        self._num_dst = num_dst
        self._is_symmetric = is_symmetric
        self._kept = kept  # set by with_self_loops
        self._looped: Optional[Graph] = None
        self._zero_in_degree: Optional[bool] = None

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
        src, dst = edge_index[0], edge_index[1]
        num_src, num_dst = num_nodes_of("Graph.from_edge_index", src, dst, num_src, num_dst)
        return cls._from_coo(src, dst, num_src, num_dst, is_symmetric, validate)

    @classmethod
    def _from_coo(cls, src, dst, num_src, num_dst, is_symmetric=None, validate=True, kept=None) -> Graph:
        _check_symmetric("Graph.from_edge_index", is_symmetric, num_src, num_dst)
        try:
            csr = Compressed(*coo_to_csr(dst, src, num_dst, num_src, validate))
        except IndexError:
            check_ids("Graph.from_edge_index: edge_index[0]", src, "num_src", num_src)
            check_ids("Graph.from_edge_index: edge_index[1]", dst, "num_dst", num_dst)
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
        _check_symmetric("Graph.from_csr", is_symmetric, num_src, num_dst)
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
        _check_symmetric("Graph.from_csc", is_symmetric, num_src, num_dst)
        return cls(None, csc, num_src, num_dst, is_symmetric)

    @classmethod
    def from_dgl(cls, g, etype=None) -> Graph:
        """The edges of type ``etype`` of a DGLGraph or block (may be None when there is one type only).

        Reads the adjacency that DGL keeps, and shares its memory where the index dtypes agree.
        """
        stype, etype, dtype = g.to_canonical_etype(etype) if etype is not None else g.canonical_etypes[0]
        etype = (stype, etype, dtype)
        num_src, num_dst = g.num_src_nodes(stype), g.num_dst_nodes(dtype)
        available = {name for names in g.formats().values() for name in names}
        if "csc" in available:
            indptr, indices, ids = g.adj_tensors("csc", etype)
            return cls.from_csr(indptr, indices, num_src, edge_ids=_dgl_ids(ids, indices), validate=False)
        if "csr" in available:
            indptr, indices, ids = g.adj_tensors("csr", etype)
            return cls.from_csc(indptr, indices, num_dst, edge_ids=_dgl_ids(ids, indices), validate=False)
        src, dst = g.edges(order="eid", etype=etype)
        return cls._from_coo(src, dst, num_src, num_dst)

    @classmethod
    def from_sparse_tensor(cls, adj_t) -> Graph:
        """From a ``torch_sparse.SparseTensor`` whose rows are destinations. Edge ids follow its stored order."""
        rowptr, col, _ = adj_t.csr()
        return cls.from_csr(rowptr, col, adj_t.size(1))

    @classmethod
    def from_torch_sparse(cls, adj_t: Tensor) -> Graph:
        """From a ``torch.sparse`` COO or CSR matrix ``[num_dst, num_src]``. Edge ids follow its stored order.

        An uncoalesced matrix keeps its duplicates as multi-edges.
        """
        num_dst, num_src = adj_t.shape
        if adj_t.layout == torch.sparse_coo:
            dst, src = adj_t._indices()
            return cls._from_coo(src, dst, num_src, num_dst)
        if adj_t.layout == torch.sparse_csr:
            return cls.from_csr(adj_t.crow_indices(), adj_t.col_indices(), num_src)
        raise ValueError(f"Graph.from_torch_sparse: adj_t must be sparse COO or CSR, got {adj_t.layout}")

    @classmethod
    def from_pyg(cls, edge_index) -> Graph:
        """From a ``torch_geometric.EdgeIndex``: row 0 has the sources, row 1 the destinations."""
        return cls.from_edge_index(edge_index.as_tensor(), edge_index.num_rows, edge_index.num_cols)

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
            self._csr = Compressed(*csr_transpose(*self._csc, self._num_dst))
        return self._csr

    @property
    def csc(self) -> Compressed:
        """Out-edges: rows are sources, indices are destinations. Built by the first gradient that needs it."""
        if self._csc is None:
            self._csc = Compressed(*csr_transpose(*self._csr, self._num_src))
        return self._csc

    @property
    def has_csc(self) -> bool:
        """Whether :attr:`csc` is already there."""
        return self._csc is not None

    def _edges(self):
        """(src, dst) in original order and index dtype."""
        if self._csr is not None:
            dst, src = _uncompress(self._csr)
        else:
            src, dst = _uncompress(self._csc)
        return src, dst

    def edge_index(self) -> Tensor:
        """The edges as ``[2, E]`` int64 in their original order: sources in row 0, destinations in row 1."""
        src, dst = self._edges()
        return torch.stack((src, dst)).to(torch.int64)

    def in_degrees(self) -> Tensor:
        """Number of in-edges of every destination, ``[num_dst]`` int64."""
        if self._csr is not None:
            return self._csr.indptr.diff().to(torch.int64)
        return torch.bincount(self._csc.indices, minlength=self._num_dst)

    def out_degrees(self) -> Tensor:
        """Number of out-edges of every source, ``[num_src]`` int64."""
        if self._csc is not None:
            return self._csc.indptr.diff().to(torch.int64)
        return torch.bincount(self._csr.indices, minlength=self._num_src)

    @property
    def has_zero_in_degree(self) -> bool:
        """Whether some destination has no in-edge."""
        if self._zero_in_degree is None:
            self._zero_in_degree = bool((self.in_degrees() == 0).any())
        return self._zero_in_degree

    # Other graphs ----------------------------------------------------------------------------------------------------

    def reverse(self) -> Graph:
        """The graph with every edge turned round. Shares the index tensors and keeps the edge ids."""
        return Graph(self._csc, self._csr, self._num_dst, self._num_src, self._is_symmetric)

    def to(self, device) -> Graph:
        """This graph on ``device``: itself when it is there already, else a new handle."""
        device = torch.device(device)
        here = self.device
        if device == here or (device.type == here.type and device.index is None):
            return self
        csr, csc = _move(self._csr, device), _move(self._csc, device)
        kept = None if self._kept is None else self._kept.to(device)
        moved = Graph(csr, csc, self._num_src, self._num_dst, self._is_symmetric, kept)
        moved._zero_in_degree = self._zero_in_degree
        return moved

    def with_self_loops(self) -> Graph:
        """The graph with its self loops replaced by exactly one at each of the first min(num_src, num_dst) nodes.

        Edges of the new graph: the kept edges in their original order, then the loops of node 0, 1, ... The result
        lives as long as this graph. Its ``_kept`` holds the ids ``[K]`` (int64) of the kept edges, None for all.
        """
        if self._looped is None:
            self._looped = self._coo_with_self_loops(*self._edges(), self._num_src, self._num_dst, self._is_symmetric)
        return self._looped

    @classmethod
    def _coo_with_self_loops(cls, src, dst, num_src, num_dst, is_symmetric=None, validate=False) -> Graph:
        loops = torch.arange(min(num_src, num_dst), dtype=src.dtype, device=src.device)
        keep = src != dst
        kept = None
        if not bool(keep.all()):
            kept = keep.nonzero().squeeze(1)
            src, dst = src[kept], dst[kept]
        src, dst = torch.cat((src, loops)), torch.cat((dst, loops))
        return cls._from_coo(src, dst, num_src, num_dst, is_symmetric, validate, kept)

    # Housekeeping ----------------------------------------------------------------------------------------------------

    def memory_bytes(self) -> int:
        """Bytes held by the index tensors of this graph and of the graphs derived from it; shared tensors count once."""
        tensors = {}
        _collect(self, tensors)
        return sum(t.numel() * t.element_size() for t in tensors.values())

    def __getstate__(self):
        return {**self.__dict__, "_looped": None}

    def __repr__(self) -> str:
        symmetric = ", symmetric" if self._is_symmetric else ""
        dtype = str(self.index_dtype).replace("torch.", "")
        return (
            f"Graph(num_src={self._num_src}, num_dst={self._num_dst}, num_edges={self.num_edges}, "
            f"device={str(self.device)!r}, {dtype}{symmetric})"
        )


def _check_symmetric(call: str, is_symmetric: Optional[bool], num_src: int, num_dst: int) -> None:
    if is_symmetric and num_src != num_dst:
        raise ValueError(f"{call}: is_symmetric needs as many sources as destinations, got {num_src} and {num_dst}")


def _compress(call, indptr, indices, edge_ids, num_cols, limit_name, validate) -> Compressed:
    """Check compressed arrays and bring them to one dtype and contiguous memory. ``num_cols`` None means square."""
    if num_cols is not None:
        check_num_nodes(call, limit_name, num_cols)
    check_compressed(call, indptr, indices, edge_ids, num_cols, limit_name, validate and not compiling())
    num_rows = indptr.numel() - 1
    dtype = index_dtype(num_rows, num_rows if num_cols is None else num_cols, indices.numel())
    return Compressed(*(None if t is None else t.to(dtype).contiguous() for t in (indptr, indices, edge_ids)))


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


def _collect(graph: Optional[Graph], tensors: dict) -> None:
    if graph is None:
        return
    for compressed in (graph._csr, graph._csc):
        for tensor in compressed or ():
            if tensor is not None:
                tensors[id(tensor)] = tensor
    if graph._kept is not None:
        tensors[id(graph._kept)] = graph._kept
    _collect(graph._looped, tensors)
