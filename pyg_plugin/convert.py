"""Converts a PyG user's ``edge_index`` to an :class:`edgeless.Graph`, and returned attention back.

PyG accepts several kinds of graph. Each is one class here, with the same static methods, chosen by
:func:`kind_of`. The rules of each kind (which row holds destinations, where added self loops stand, whose values are
edge features) are PyG's own.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.typing import SparseTensor, torch_sparse
from torch_geometric.utils import add_self_loops, remove_self_loops
from torch_geometric.utils.loop import compute_loop_attr
from torch_geometric.utils.sparse import set_sparse_value

from edgeless import cache
from edgeless.checks import STAND_INS, compiling
from edgeless.distributed.graph import DistGraph
from edgeless.functional.aggregation import spmm
from edgeless.graph.handle import Graph
from edgeless.graph.weak_cache import graph_of_edge_index

_INDEX_DTYPES = (torch.int64, torch.int32)
_EDGE_LISTS = (Tensor, *STAND_INS)
_COMPRESSED = {
    torch.sparse_csr: (Tensor.crow_indices, Tensor.col_indices),
    torch.sparse_csc: (Tensor.ccol_indices, Tensor.row_indices),
}
_NO_REVERSE = "flow 'target_to_source' is not defined for a sparse matrix"


class EdgeList:
    """A plain tensor ``[2, E]``: row 0 sends, row 1 receives (the other way round for flow 'target_to_source')."""

    @staticmethod
    def refusal(edge_index: Tensor, num_src: int, num_dst: int, layer, loops: bool) -> Optional[str]:
        """Returns why the kernels do not support this graph, or None. They support no graph that upstream rejects."""
        if edge_index.dtype not in _INDEX_DTYPES or edge_index.dim() != 2 or edge_index.size(0) != 2:
            is_transposed = edge_index.dim() == 2 and edge_index.size(1) == 2
            return "edge_index is not an int64 or int32 tensor of shape [2, E]" + (
                ", and edge_index.t() may be" if is_transposed and edge_index.dtype in _INDEX_DTYPES else ""
            )
        if layer.flow != "source_to_target" and num_src != num_dst:
            return "flow 'target_to_source' is combined with different numbers of sources and destinations"
        return None

    @staticmethod
    def device(edge_index: Tensor) -> torch.device:
        """The graph's device."""
        return edge_index.device

    @staticmethod
    def num_edges(edge_index: Tensor) -> int:
        """Number of edges before self loops are added."""
        return edge_index.size(1)

    @staticmethod
    def features(edge_index: Tensor) -> Optional[Tensor]:
        """Edge features that the graph itself carries, for a call without ``edge_attr``."""
        return None

    @staticmethod
    def weights(edge_index: Tensor) -> Optional[Tensor]:
        """The values of a sparse matrix, whatever their dimensions; None if there are none."""
        return None

    @staticmethod
    def graph(edge_index: Tensor, num_src: int, num_dst: int, flow: str, loops: bool, by_edge: bool = True) -> Graph:
        """The cached graph; with ``loops``, self loops are replaced by one at every node.

        ``by_edge``: whether the call has tensors of the size of the edge set, see :func:`cache.graph_from_edge_index`.
        """
        if type(edge_index) is Tensor and not compiling():  # refusal() has checked it
            return graph_of_edge_index(edge_index, edge_index, num_src, num_dst, flow, loops)
        return cache.graph_from_edge_index(edge_index, num_src, num_dst, flow=flow, self_loops=loops, by_edge=by_edge)

    @staticmethod
    def targets(edge_index: Tensor) -> Tensor:
        """The row of node ids whose in-edges a ``fill_value`` reduces: PyG takes row 1 whatever the flow."""
        return edge_index[1]

    @staticmethod
    def with_attention(edge_index: Tensor, weights: Tensor, loops: bool, graph: Graph) -> Any:
        """The upstream layer's second result, given ``weights`` ``[E, H]`` in the order of ``graph``'s edges."""
        if loops:
            if type(edge_index) not in _EDGE_LISTS:
                edge_index, _ = remove_self_loops(edge_index)
            elif graph._kept is not None:  # to search for loops again would wait for the GPU
                edge_index = edge_index.index_select(1, graph._kept)
            edge_index, _ = add_self_loops(edge_index, num_nodes=min(graph.num_src, graph.num_dst))
        return edge_index, weights


class SortedEdgeList(EdgeList):
    """PyG's EdgeIndex: an edge list that knows its own sizes."""

    @staticmethod
    def refusal(edge_index: EdgeIndex, num_src: int, num_dst: int, layer, loops: bool) -> Optional[str]:
        if edge_index.num_rows not in (None, num_src) or edge_index.num_cols not in (None, num_dst):
            return "the EdgeIndex has other sizes than the node features"
        return EdgeList.refusal(edge_index, num_src, num_dst, layer, loops)

    @staticmethod
    def targets(edge_index: EdgeIndex) -> Tensor:
        return edge_index.as_tensor()[1]


class SparseMatrix(EdgeList):
    """A ``torch.sparse`` COO or CSR matrix ``[num_dst, num_src]``."""

    @staticmethod
    def refusal(adj_t: Tensor, num_src: int, num_dst: int, layer, loops: bool) -> Optional[str]:
        if layer.flow != "source_to_target":
            return _NO_REVERSE
        if adj_t.layout not in (torch.sparse_coo, torch.sparse_csr):
            return f"edge_index has the layout {adj_t.layout}"
        if adj_t.layout == torch.sparse_coo and not adj_t.is_coalesced():
            return "edge_index is a sparse matrix that is not coalesced"
        dims = adj_t.values().dim()
        if dims > 2 or adj_t.dim() != dims + 1 or tuple(adj_t.shape[:2]) != (num_dst, num_src):
            return "edge_index is not a matrix of shape [num_dst, num_src]"
        if loops and (dims > 1 or isinstance(layer.fill_value, Tensor)):
            return "self loops are added to a sparse matrix with features"
        return None

    @staticmethod
    def num_edges(adj_t: Tensor) -> int:
        return adj_t.values().size(0)

    @staticmethod
    def features(adj_t: Tensor) -> Optional[Tensor]:
        values = adj_t.values()
        return values if values.dim() > 1 else None

    @staticmethod
    def weights(adj_t: Tensor) -> Optional[Tensor]:
        return adj_t.values()

    @staticmethod
    def _looped(adj_t: Tensor) -> Tensor:
        adj_t = adj_t.detach().clone()  # PyG sets the coalesced flag of its argument
        return add_self_loops(remove_self_loops(adj_t)[0])[0]

    @staticmethod
    def graph(adj_t: Tensor, num_src: int, num_dst: int, flow: str, loops: bool, by_edge: bool = True) -> Graph:
        if adj_t.layout == torch.sparse_coo:
            arrays = (adj_t.indices(),)
        else:
            arrays = (adj_t.crow_indices(), adj_t.col_indices())

        def build():
            return Graph.from_torch_sparse(SparseMatrix._looped(adj_t) if loops else adj_t)

        return cache.graph_from_object(adj_t, loops, build, tensors=arrays)

    @staticmethod
    def with_attention(adj_t: Tensor, weights: Tensor, loops: bool, graph: Graph) -> Any:
        return set_sparse_value(SparseMatrix._looped(adj_t) if loops else adj_t, weights), weights


class SparseStorage(EdgeList):
    """A ``torch_sparse.SparseTensor`` ``[num_dst, num_src]``."""

    @staticmethod
    def refusal(adj_t: SparseTensor, num_src: int, num_dst: int, layer, loops: bool) -> Optional[str]:
        if layer.flow != "source_to_target":
            return _NO_REVERSE
        if (adj_t.size(0), adj_t.size(1)) != (num_dst, num_src):
            return "the SparseTensor has another shape than [num_dst, num_src]"
        if loops and layer.edge_dim is not None:
            return "the stock layer does not add self loops with edge features to a SparseTensor"
        return None

    @staticmethod
    def device(adj_t: SparseTensor) -> torch.device:
        return adj_t.device()

    @staticmethod
    def num_edges(adj_t: SparseTensor) -> int:
        return adj_t.nnz()

    @staticmethod
    def features(adj_t: SparseTensor) -> Optional[Tensor]:
        value = adj_t.storage.value()
        return value if value is not None and value.dim() > 1 else None

    @staticmethod
    def weights(adj_t: SparseTensor) -> Optional[Tensor]:
        return adj_t.storage.value()

    @staticmethod
    def graph(adj_t: SparseTensor, num_src: int, num_dst: int, flow: str, loops: bool, by_edge: bool = True) -> Graph:
        row, col, _ = adj_t.coo()

        def build():
            return Graph.from_sparse_tensor(torch_sparse.set_diag(adj_t) if loops else adj_t)

        return cache.graph_from_object(adj_t.storage, loops, build, tensors=(row, col))

    @staticmethod
    def with_attention(adj_t: SparseTensor, weights: Tensor, loops: bool, graph: Graph) -> Any:
        return (torch_sparse.set_diag(adj_t) if loops else adj_t).set_value(weights, layout="coo")


class Handle(EdgeList):
    """An :class:`edgeless.Graph`, which upstream layers do not accept: nothing is cached or looked up."""

    @staticmethod
    def refusal(graph: Graph, num_src: int, num_dst: int, layer, loops: bool) -> Optional[str]:
        return None

    @staticmethod
    def num_edges(graph: Graph) -> int:
        return graph.num_edges

    @staticmethod
    def graph(graph: Graph, num_src: int, num_dst: int, flow: str, loops: bool, by_edge: bool = True) -> Graph:
        check_flow(flow)
        return graph.with_self_loops() if loops else graph

    @staticmethod
    def targets(graph: Graph) -> Tensor:
        return graph.edge_index()[1]

    @staticmethod
    def with_attention(edge_index: Graph, weights: Tensor, loops: bool, graph: Graph) -> Any:
        return graph.edge_index(), weights


class Part(Handle):
    """An :class:`edgeless.distributed.DistGraph`. Source and destination rows are those of this process' nodes."""

    @staticmethod
    def refusal(graph: DistGraph, num_src: int, num_dst: int, layer, loops: bool) -> Optional[str]:
        if layer.flow != "source_to_target":
            return "a DistGraph has in-edges and the layer's flow is 'target_to_source'"
        return None

    @staticmethod
    def targets(graph: DistGraph) -> Tensor:
        return graph.local.edge_index()[1]


def check_flow(flow: str) -> None:
    """Raises ValueError unless ``flow`` is source_to_target: an edgeless.Graph has its own direction."""
    if flow != "source_to_target":
        raise ValueError(
            f"edge_index: an edgeless.Graph needs a layer with flow 'source_to_target', got {flow!r}; "
            "pass graph.reverse() instead"
        )


SPARSE = (SparseMatrix, SparseStorage)
_KINDS = {
    **dict.fromkeys(_EDGE_LISTS, EdgeList),
    EdgeIndex: SortedEdgeList,
    SparseTensor: SparseStorage,
    Graph: Handle,
    DistGraph: Part,
}


def kind_of(edge_index: Any):
    """The class above that reads ``edge_index``, or None for anything else."""
    kind = _KINDS.get(type(edge_index))
    if kind is EdgeList and edge_index.layout is not torch.strided:
        return SparseMatrix
    return kind


def for_stock(edge_index: Any) -> Any:
    """``edge_index`` with int64 ids, as PyG's code needs it.

    PyG aggregates by torch's ``gather`` and ``scatter``, which accept int32 ids but compute wrong gradients.
    """
    if type(edge_index) is Graph:
        return edge_index.edge_index()
    if not isinstance(edge_index, Tensor):
        return edge_index
    if edge_index.layout in _COMPRESSED:
        pointers, ids = (array(edge_index) for array in _COMPRESSED[edge_index.layout])
        if ids.dtype != torch.int32:
            return edge_index
        arrays = (pointers.long(), ids.long(), edge_index.values())
        return torch.sparse_compressed_tensor(*arrays, edge_index.shape, layout=edge_index.layout)
    return edge_index.long() if edge_index.dtype == torch.int32 else edge_index


def _ends(graph: Graph, targets: Tensor) -> Graph:
    """A graph from each of the user's edges that ``graph`` kept to its destination in ``targets``; cached with it."""

    def build(_):
        edges = torch.arange(targets.numel(), dtype=targets.dtype, device=targets.device)
        ends = torch.stack((edges, targets))
        ends = ends if graph._kept is None else ends.index_select(1, graph._kept)
        return Graph.from_edge_index(ends, targets.numel(), graph.num_dst)

    return graph.format("destinations of edges", build)


def _chosen(graph: Graph, num_edges: int) -> Graph:
    """A graph that gathers, from rows of the user's edges, those of the edges that ``graph`` kept; cached with it."""

    def build(_):
        return Graph.from_csr(torch.arange(graph._kept.numel() + 1, device=graph.device), graph._kept, num_edges)

    return graph.format("kept edges", build)


def with_loop_features(kind, edge_index, graph: Graph, edge_attr: Tensor, fill_value) -> Tensor:
    """Edge features for a graph with added self loops: those of the kept edges, then one row per loop.

    Args:
        graph: the result of ``kind.graph(..., loops=True)`` for ``edge_index``.
        edge_attr: features ``[E]`` or ``[E, De]`` of the user's edges.
        fill_value: as upstream; a name reduces the features of a node's kept in-edges.
    """
    targets, kept = kind.targets(edge_index), graph._kept
    num_loops = min(graph.num_src, graph.num_dst)  # upstream raises if other nodes have features to reduce
    sums = isinstance(fill_value, str) and fill_value in ("mean", "add", "sum")
    if sums and edge_attr.is_cuda and type(graph) is Graph and graph.num_dst == num_loops:
        # PyG sums with atomics on CUDA, so its results differ from run to run.
        rows = edge_attr.unsqueeze(1) if edge_attr.dim() == 1 else edge_attr
        loops = spmm(_ends(graph, targets), rows, reduce="mean" if fill_value == "mean" else "sum")
        if kept is not None:  # torch's indexing launches a thread block per row of whole 16-byte vectors
            rows = spmm(_chosen(graph, targets.numel()), rows)
        rows = torch.cat((rows, loops))
        return rows.squeeze(1) if edge_attr.dim() == 1 else rows
    targets = targets.long()
    if kept is not None:
        targets, edge_attr = targets[kept], edge_attr[kept]
    loop_attr = compute_loop_attr((None, targets), edge_attr, num_loops, False, fill_value)
    return torch.cat((edge_attr, loop_attr))
