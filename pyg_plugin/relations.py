"""Converts a PyG user's ``edge_index`` and ``edge_type`` to an :class:`edgeless.TypedGraph`."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor
from torch.utils.weak import WeakIdRef

from edgeless import cache
from edgeless.checks import check_ids, compiling, plain_tensor
from edgeless.distributed.graph import DistGraph
from edgeless.graph.handle import Graph
from edgeless.graph.typed import TypedGraph, typed_graph_for

from .conv import PLAIN
from .convert import Handle, Part, SparseMatrix, SparseStorage, check_flow, kind_of

_INDEX_DTYPES = (torch.int64, torch.int32)


def is_ids(x: Any) -> bool:
    """True if ``x`` is a plain tensor of ids, ``[N]``."""
    return type(x) in PLAIN and x.dim() == 1 and x.dtype in _INDEX_DTYPES and x.layout is torch.strided


def types_of(edge_index: Any, edge_type: Any) -> Any:
    """The types of the edges: the values of a SparseTensor, else ``edge_type``."""
    return edge_index.storage.value() if kind_of(edge_index) is SparseStorage else edge_type


def typed_refusal(layer, edge_index: Any, edge_type: Any, num_src: int, num_dst: int, device) -> Optional[str]:
    """Returns why the kernels do not support these edges of a layer with ``num_relations`` and ``flow``, or None."""
    if isinstance(edge_index, TypedGraph):
        if edge_type is not None:
            return "edge_index is an edgeless.TypedGraph and edge_type is given as well"
        have = (edge_index.num_src, edge_index.num_dst, edge_index.num_types)
        want = (num_src, num_dst, layer.num_relations)
        if have != want:
            return f"the TypedGraph has (num_src, num_dst, num_types) = {have}, and the call has {want}"
        return (
            None if edge_index.device == device else f"edge_index is on {edge_index.device} and the layer on {device}"
        )
    kind = kind_of(edge_index)
    if kind is None or kind is SparseMatrix:
        return f"edge_index is a {type(edge_index).__name__}" + (" with a sparse layout" if kind else "")
    if kind.device(edge_index) != device:
        return f"edge_index is on {kind.device(edge_index)} and the layer is on {device}"
    if kind in (Handle, Part) and (edge_index.num_src, edge_index.num_dst) != (num_src, num_dst):
        have = (edge_index.num_src, edge_index.num_dst)
        return f"the {type(edge_index).__name__} has the sizes {have}, not {(num_src, num_dst)}"
    if reason := kind.refusal(edge_index, num_src, num_dst, layer, False):
        return reason
    edge_type, num_edges = types_of(edge_index, edge_type), kind.num_edges(edge_index)
    if not is_ids(edge_type) or edge_type.size(0) != num_edges:
        return f"edge_type is not an int64 or int32 tensor of shape [E] = [{num_edges}]"
    return None if edge_type.device == device else f"edge_type is on {edge_type.device} and the layer is on {device}"


def typed_graph(layer, edge_index: Any, edge_type: Any, num_src: int, num_dst: int) -> TypedGraph:
    """The cached typed graph of edges that :func:`typed_refusal` found supported. For a DistGraph its sources are local
    and halo nodes, whose rows :func:`source_rows` gives.

    Raises:
        IndexError: an id of edge_index or a type is out of range.
        ValueError: an edgeless graph is given to a layer with another flow.
    """
    if isinstance(edge_index, TypedGraph):
        check_flow(layer.flow)
        return edge_index
    kind, flow, num_types = kind_of(edge_index), layer.flow, layer.num_relations
    edge_type = types_of(edge_index, edge_type)
    own, compare = edge_index, False
    if kind in (Handle, Part):
        tensors: tuple = ()
    elif kind is SparseStorage:
        row, col, _ = edge_index.coo()
        own, tensors = edge_index.storage, (row, col)
    else:
        plain = plain_tensor(edge_index)
        tensors, compare = (plain,), plain is not edge_index

    def build():
        graph = kind.graph(edge_index, num_src, num_dst, flow, False)
        return TypedGraph(graph.local if kind is Part else graph, edge_type, num_types)

    return typed_graph_for(edge_type, own, (flow, num_src, num_dst, num_types), build, tensors=tensors, compare=compare)


def source_rows(edge_index: Any, x: Tensor) -> Tensor:
    """The rows of the sources of :func:`typed_graph`; for a DistGraph the rows of halo nodes are fetched."""
    return edge_index.sources(x)[0] if type(edge_index) is DistGraph else x


def embedding_graph(graph: TypedGraph, ids: Optional[Tensor], num_ids: int) -> Graph:
    """A graph of the same edges whose sources are ``num_types * num_ids`` pairs (type, id of the source).

    Args:
        ids: the id of every source, negative ones count from the end; None: the source's index is its id.
    Raises:
        IndexError: an id is out of range.
    """

    def build():
        src, dst = graph.graph.edge_index()
        of_src = src
        if ids is not None:
            if not compiling():
                check_ids("x", torch.where(ids < 0, ids + num_ids, ids), "in_channels", num_ids)
            of_src = ids.long().remainder(num_ids).index_select(0, src.long())
        ends = torch.stack((graph.edge_type.long() * num_ids + of_src, dst.long()))
        return Graph.from_edge_index(ends, graph.num_types * num_ids, graph.num_dst)

    if ids is None:
        return graph.format(("embedding", num_ids), lambda _: build())
    return cache.graph_for(ids, ("embedding", WeakIdRef(graph), num_ids), build, tensors=(ids,))
