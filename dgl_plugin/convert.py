"""From a DGLGraph, a block or one relation of a heterograph to the cached :class:`edgeless.Graph`.

DGL never changes the structure of a graph in place: ``add_edges``, ``remove_nodes``, ``formats``, ``int``, ``to`` and
the like all put a new index object into ``graph._graph``, and ``local_scope`` keeps the old one. So a handle that
hangs weakly on that object is never stale and dies with it.

A relation sliced from a heterograph, ``hg['follows']``, gets a new index object at every slicing, but it shares its
arrays and its frame of edge features with the parent. There the handle hangs weakly on that frame, and is valid as long
as the arrays are the same memory.
"""

from __future__ import annotations

from typing import Optional

from edgeless import Graph
from edgeless.cache import graph_from_object

from ._framework import DGLGraph

__all__ = ["relation_refusal", "to_graph"]

_HOMOGENEOUS = "_E"  # the edge type that DGL gives to a graph without types


def relation_refusal(graph) -> Optional[str]:
    """Why ``to_graph(graph)`` cannot choose a relation, or None where there is exactly one."""
    if not isinstance(graph, DGLGraph):
        return f"graph is a {type(graph).__name__}, not a DGLGraph"
    if len(graph.canonical_etypes) != 1:
        return f"graph has {len(graph.canonical_etypes)} edge types, and the layer works on one"
    return None


def to_graph(graph, etype=None) -> Graph:
    """The handle of one relation of ``graph``, built at the first call and found again at the next.

    Args:
        graph (DGLGraph): homogeneous, bipartite, a heterograph or a block, with int32 or int64 ids.
        etype (str or (str, str, str), optional): the edge type; may be left out when there is one only.

    Returns:
        edgeless.Graph: its edge ids are those of DGL; its nodes are the relation's source and destination nodes.

    Raises:
        TypeError: graph is not a DGLGraph.
        dgl.DGLError: etype is not an edge type of the graph, or is needed and missing.
    """
    if not isinstance(graph, DGLGraph):
        raise TypeError(f"to_graph: graph must be a DGLGraph, got {type(graph).__name__}")
    relation = graph.get_etype_id(etype)
    return graph_from_object(graph._graph, relation, lambda: _build(graph, relation))


def _build(graph, relation: int) -> Graph:
    """The handle of a relation that hangs on no index object yet."""
    etype = graph.canonical_etypes[relation]
    if etype[1] == _HOMOGENEOUS or "csc" not in _formats(graph):
        return Graph.from_dgl(graph, etype)
    # Maybe a slice. The key holds the arrays, so that their memory cannot become another graph's while it is a key.
    key = _Arrays(graph.adj_tensors("csc", etype))
    return graph_from_object(graph._edge_frames[relation], key, lambda: Graph.from_dgl(graph, etype))


def _formats(graph) -> set:
    """The sparse formats that the graph has or is allowed to make."""
    return {name for names in graph.formats().values() for name in names}


class _Arrays:
    """Index tensors as a key: equal to others that are the same memory."""

    __slots__ = ("_identity", "_tensors")

    def __init__(self, tensors):
        self._tensors = tuple(tensors)
        self._identity = tuple((t.data_ptr(), t.numel(), t.dtype, t.device) for t in self._tensors)

    def __eq__(self, other):
        return isinstance(other, _Arrays) and self._identity == other._identity

    def __hash__(self):
        return hash(self._identity)
