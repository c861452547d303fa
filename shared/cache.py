"""From a user's object to its :class:`Graph`, kept as :mod:`edgeless.graph_cache` says: what layers ask."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Optional

from torch import Tensor

from .graph import Graph
from .graph_cache import (
    CacheInfo,
    GraphCache,
    cache_info,
    clear_cache,
    graph_for,
    graph_of_edge_index,
    set_cache_limit,
)
from .graph_checks import check_edge_index, compiling, plain_tensor
from .program_cache import caches, graph_in_program

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
    """The cached graph of an ``edge_index`` ``[2, E]``, a plain tensor or PyG's EdgeIndex.

    Args:
        num_src, num_dst: how many nodes send and receive; as in :meth:`Graph.from_edge_index` when None.
        flow: ``"source_to_target"``: row 0 sends to row 1. ``"target_to_source"``: row 1 sends to row 0.
        self_loops: whether to replace self loops as :meth:`Graph.with_self_loops` does.
        by_edge: whether the caller gives or takes tensors with a row for every edge. Without them torch.compile needs
            not know how many self loops were replaced, which is known at run time only and breaks its program in two.
    Raises:
        ValueError: for another flow.
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
    """The cached graph of any object that allows weak references: a DGL graph index, a sparse matrix or its storage.

    Args as in :func:`graph_for`. Without ``tensors`` the anchor must be immutable.
    """
    return graph_for(anchor, ("object", extra_key), build, tensors=tensors)
