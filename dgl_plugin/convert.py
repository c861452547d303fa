"""Converts a DGLGraph, a block or one relation of a heterograph to a cached :class:`edgeless.Graph`, the handle.

DGL never changes the structure of a graph in place: ``add_edges``, ``remove_nodes``, ``formats``, ``int``, ``to`` and
the like all put a new index object into ``graph._graph``, and ``local_scope`` keeps the old one. So a handle that is
cached under a weak reference to the index object is never stale and is freed with that object.

A relation sliced from a heterograph, ``hg['follows']``, gets a new index object at every slicing. It shares with its
parent the frame of edge features and the memory of DGL's CSC arrays, so handles are cached by frame too. Such a handle
is valid while the relation's CSC arrays are the same memory as when it was built. The cache holds these arrays, so no
other graph's arrays can take their memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Union

import torch
from torch.utils.weak import WeakIdKeyDictionary

from edgeless import Graph
from edgeless.cache import graph_from_object
from edgeless.choices.gpus import gpu_refusal
from edgeless.distributed.graph import DistGraph

from ._framework import DGLError, DGLGraph, heterograph

__all__ = ["Relation", "relation_of", "to_dgl", "to_graph"]

_HOMOGENEOUS = "_E"  # the edge type that DGL gives to a graph without types


def to_graph(graph, etype=None) -> Graph:
    """The cached handle of one relation of ``graph``; the first call builds it.

    Writing to DGL's arrays through ``graph.adj_tensors`` does not invalidate the handle.

    Args:
        graph (DGLGraph): homogeneous, bipartite, a heterograph or a block, with int32 or int64 ids.
        etype (str or (str, str, str), optional): the edge type; optional if there is only one.

    Returns:
        edgeless.Graph: its edge ids are those of DGL; its nodes are the relation's source and destination nodes.

    Raises:
        TypeError: graph is not a DGLGraph.
        dgl.DGLError: etype is not an edge type of the graph, or is needed and missing.

    Example:
        >>> import dgl
        >>> from edgeless.dgl import to_graph
        >>> to_graph(dgl.graph(([0, 1, 2], [2, 2, 0])))
        Graph(num_src=3, num_dst=3, num_edges=3, device='cpu', int32)
    """
    if not isinstance(graph, DGLGraph):
        raise TypeError(f"to_graph: graph must be a DGLGraph, got {type(graph).__name__}")
    return _cached(graph, graph.get_etype_id(etype))


class Relation(NamedTuple):
    """The graph argument of a layer call and its handle, looked up once.

    If edgeless' layers do not support the graph, ``handle`` is None and ``refusal`` is the unsupported reason.
    """

    graph: Any  # as the caller passed it
    handle: Union[Graph, DistGraph, None]
    refusal: Optional[str] = None
    is_block: bool = False  # the destination nodes are the first of the source nodes
    one_node_type: bool = False  # sources and destinations are the same nodes


def relation_of(graph) -> Relation:
    """The :class:`Relation` of a DGLGraph with one edge type or of a handle; a Relation is returned as it is."""
    if isinstance(graph, Relation):
        return graph
    if isinstance(graph, (Graph, DistGraph)):
        return Relation(graph, graph)
    return _relation_of_dgl(graph)


@torch.compiler.disable  # DGL's calls cannot be traced: one graph break here instead of one in each of them
def _relation_of_dgl(graph) -> Relation:
    refusal = None
    if not isinstance(graph, DGLGraph):
        refusal = f"graph is a {type(graph).__name__}, not a DGLGraph"
    elif len(graph.canonical_etypes) != 1:
        refusal = f"graph has {len(graph.canonical_etypes)} edge types, and the layer works on one"
    elif len(graph.srctypes) != 1 or len(graph.dsttypes) != 1:
        refusal = f"graph has {len(graph.ntypes)} node types, and not all of them at one end of its edges"
    elif graph.device.type == "cuda":  # before kernels build the handle
        refusal = gpu_refusal(graph.device, "graph")
    if refusal is not None:
        return Relation(graph, None, refusal)
    return Relation(graph, _cached(graph, 0), None, graph.is_block, len(graph.ntypes) == 1)


def to_dgl(handle: Graph) -> DGLGraph:
    """A new DGLGraph with the edges of ``handle`` in their order, from one node type to another."""
    src, dst = handle.edge_index()
    sizes = {"_SRC": handle.num_src, "_DST": handle.num_dst}
    return heterograph({("_SRC", _HOMOGENEOUS, "_DST"): (src, dst)}, sizes)


def _cached(graph, relation: int) -> Graph:
    etype = graph.canonical_etypes[relation]
    if etype[1] == _HOMOGENEOUS:
        return graph_from_object(graph._graph, relation, lambda: Graph.from_dgl(graph, etype))
    frame = graph._edge_frames[relation]
    known = _relations.get(frame)
    arrays = None if known is None else _csc_arrays(graph, etype)
    if known is not None and known == arrays:
        return graph_from_object(known, None, lambda: Graph.from_dgl(graph, etype))
    return graph_from_object(graph._graph, relation, lambda: _build_and_remember(graph, etype, frame, arrays))


def _build_and_remember(graph, etype, frame, arrays) -> Graph:
    """Builds a handle and caches it by frame too, if DGL gives the CSC arrays."""
    arrays = arrays or _csc_arrays(graph, etype)
    handle = Graph.from_dgl(graph, etype)
    if arrays is not None:
        _relations[frame] = arrays
        graph_from_object(arrays, None, lambda: handle)
    return handle


class _Arrays:
    """The CSC arrays of a relation. Two of these objects are equal if their arrays are the same memory."""

    def __init__(self, tensors):
        self._tensors = tuple(tensors)  # keeps the memory allocated
        self._identity = tuple((t.data_ptr(), t.numel(), t.dtype, t.device) for t in self._tensors)

    def __eq__(self, other):
        return isinstance(other, _Arrays) and self._identity == other._identity

    __hash__ = None


# Frame of a relation's edge features -> the arrays that the relation had when its handle was built.
_relations = WeakIdKeyDictionary()


def _csc_arrays(graph, etype) -> Optional[_Arrays]:
    """DGL's own CSC arrays, which DGL builds on first use and keeps; None if ``graph.formats()`` forbids them."""
    try:
        return _Arrays(graph.adj_tensors("csc", etype))
    except DGLError:
        return None
