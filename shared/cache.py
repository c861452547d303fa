"""Weak caches from a user's graph object to a :class:`Graph`."""

from __future__ import annotations

from .graph import Graph


def graph_from_edge_index(edge_index, num_src, num_dst, *, flow="source_to_target", self_loops=False) -> Graph:
    graph = Graph.from_edge_index(edge_index if flow == "source_to_target" else edge_index.flip(0), num_src, num_dst)
    return graph.with_self_loops() if self_loops else graph


def graph_from_object(anchor, extra_key, build) -> Graph:
    return build()
