"""The functions by which layers get the cached :class:`Graph` of a user's object (:mod:`edgeless.graph.weak_cache`)."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Optional

from torch import Tensor

from .checks import check_edge_index, compiling, plain_tensor
from .graph.handle import Graph
from .graph.program_cache import caches, graph_in_program
from .graph.weak_cache import (
    CacheInfo,
    GraphCache,
    cache_info,
    clear_cache,
    graph_for,
    graph_of_edge_index,
    set_cache_limit,
)

__all__ = [
    "CacheInfo",
    "GraphCache",
    "cache_info",
    "clear_cache",
    "graph_for",
    "graph_from_edge_index",
    "graph_from_object",
    "set_cache_limit",
]

_FLOWS = ("source_to_target", "target_to_source")


def graph_from_edge_index(
    edge_index: Tensor,
    num_src: Optional[int] = None,
    num_dst: Optional[int] = None,
    *,
    flow: str = "source_to_target",
    self_loops: bool = False,
    by_edge: bool = True,
) -> Graph:
    """Returns the cached graph of an ``edge_index`` ``[2, E]``, a plain tensor or PyG's EdgeIndex.

    Args:
        edge_index: integers of any dtype.
        num_src, num_dst: numbers of source and destination nodes; None as in :meth:`Graph.from_edge_index`.
        flow: ``"source_to_target"``: row 0 has the sources. ``"target_to_source"``: row 1 has the sources.
        self_loops: whether to replace self loops as :meth:`Graph.with_self_loops` does.
        by_edge: whether the caller has tensors with a row for every edge, whose size depends on the number of replaced
            self loops. That number is known at run time only, so it makes torch.compile break the graph.
    Raises:
        ValueError: flow is something else.
        TypeError, ValueError, IndexError: as :meth:`Graph.from_edge_index`.
    """
    if flow not in _FLOWS:
        raise ValueError(f"graph_from_edge_index: flow must be one of {_FLOWS}, got {flow!r}")
    check_edge_index("graph_from_edge_index", edge_index)
    plain = plain_tensor(edge_index)
    if compiling() and plain is edge_index and None not in (num_src, num_dst) and caches():
        return graph_in_program(edge_index, num_src, num_dst, flow, self_loops, by_edge)

    return graph_of_edge_index(edge_index, plain, num_src, num_dst, flow, self_loops)


def graph_from_object(
    anchor: Any, extra_key: Hashable, build: Callable[[], Graph], *, tensors: tuple[Tensor, ...] = ()
) -> Graph:
    """Returns the cached graph of an object that allows weak references: a DGL graph index, a sparse matrix, a storage.

    The arguments are those of :func:`graph_for`. Without ``tensors`` the anchor must be immutable.
    """
    return graph_for(anchor, ("object", extra_key), build, tensors=tensors)
