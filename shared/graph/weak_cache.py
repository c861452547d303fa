"""The weak cache from a user's graph object to a :class:`Graph`, which builds a graph once for many uses.

A graph is tied by a weak reference to the object that it was built from, its anchor (an edge_index tensor, a DGL graph
index, a sparse matrix), and is freed with it. It is valid while the anchor's tensors have the same address and version:
an in-place edit through any view raises PyTorch's version counter. Tensors without a reliable counter (made under
``torch.inference_mode``, or wrapped like PyG's EdgeIndex) are copied, and compared at every use.

Some writers raise no counter: collectives of torch.distributed, other processes, ``tensor.data``, numpy, DLPack. On
the CPU every use therefore also hashes the contents (``core_cuda/graph/stamp.h``): all of them up to 4,096 elements, in
shared memory, and while torch.distributed runs with several processes; otherwise a sample, which detects a new graph
but may miss an edit of a few ids. On CUDA nothing is read, since that would wait for the GPU. Under
``EDGELESS_CACHE=verify`` the cache compares all contents on every device; ``EDGELESS_CACHE=0`` rebuilds every time.
Programs of torch.compile look up the graph of an edge_index when they run (:mod:`edgeless.graph.program_cache`); all
other graphs are built by ops of the program.

The cache holds at most :func:`set_cache_limit` bytes and evicts the least recently used graph first. The graph used
last stays even if it alone exceeds the limit, since otherwise every layer would rebuild it; a limit of 0 keeps nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Optional

import torch
from torch import Tensor

from .. import _C
from ..checks import check_number, check_sizes, compiling
from .formats import tensors_of
from .graph_cache import CacheInfo, Entry, GraphCache, several_processes
from .handle import Graph

__all__ = [
    "CacheInfo",
    "cache_info",
    "clear_cache",
    "graph_for",
    "graph_of_edge_index",
    "set_cache_limit",
]

_MODES = {"": "on", "1": "on", "0": "off", "verify": "verify"}


def held_graphs(tensors: list[Tensor]) -> list[Graph]:
    """Returns the cached graphs that hold the memory of one of ``tensors``, so that a caller can keep them alive."""
    places = {t.untyped_storage()._cdata for t in tensors}
    return [g for g in _cache.graphs() if any(t.untyped_storage()._cdata in places for t in tensors_of(g))]


def forget_graphs(tensors: Iterable[Tensor]) -> None:
    """Drops the cached graphs of ``tensors``, whose arrays have values in replays of a CUDA graph only."""
    _cache.forget(tensors)


_cache = GraphCache()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_cache.after_fork)


def _mode() -> str:
    setting = _C.cache_setting()
    if setting not in _MODES:
        raise ValueError(f"EDGELESS_CACHE must be 0, 1 or verify, got {setting!r}")
    return _MODES[setting]


def trusts_versions() -> bool:
    """Returns whether a GPU tensor counts as unchanged as long as its version is."""
    return _mode() == "on"


def graph_for(
    anchor: Any, key: Hashable, build: Callable[[], Graph], *, tensors: tuple[Tensor, ...] = (), compare: bool = False
) -> Graph:
    """Returns the cached graph of ``anchor`` under ``key``, or the result of ``build()``.

    Args:
        anchor: the user's object, to which the graph is tied by a weak reference.
        key: hashable; distinguishes the graphs that can be built from one anchor.
        build: makes the graph. The graph must not refer to the anchor, or neither is ever freed.
        tensors: the dense tensors that ``build`` reads, if the anchor can change; an edit makes the graph stale.
        compare: whether to compare the contents of tensors, because their version counters are not reliable.

    Raises:
        TypeError: an argument has another type.
    """
    if not callable(build):
        raise TypeError(f"graph_for: build must be a function, got {type(build).__name__}")
    if type(tensors) is not tuple and not isinstance(tensors, (tuple, list)):
        raise TypeError(f"graph_for: tensors must be a tuple of Tensors, got {type(tensors).__name__}")
    if compiling():
        return build()
    mode = _mode()
    if mode == "off":
        return build()
    compare = compare or mode == "verify"
    concrete, inference = _C.are_concrete(tensors)
    if not concrete:  # a tracer's tensors have no contents
        for t in tensors:
            if not isinstance(t, Tensor):
                raise TypeError(f"graph_for: tensors must be Tensors, got {type(t).__name__} among them")
        return build()
    compare = compare or inference
    return _cache.get(anchor, key, build, tensors, compare)


def _quickly(edge_index: Tensor, key: tuple) -> Optional[Graph]:
    """The fast path of :func:`graph_for` for a plain tensor with a reliable version counter; None if it does not apply.

    It returns a cached graph or builds one of few edges. Every layer looks up its graph, and on a small graph the
    general path takes longer than the layer's op.
    """
    if compiling() or _C.cache_setting() not in ("", "1") or _C.are_concrete((edge_index,)) != (True, False):
        return None
    stamps = _C.stamps((edge_index,), several_processes())
    entry = _cache._find(edge_index, key, stamps)
    if entry is not None:
        return entry.graph
    _, flow, num_src, num_dst, self_loops = key
    if type(num_src) is not int or type(num_dst) is not int or torch.is_inference_mode_enabled():
        return None
    ends = edge_index.unbind(0) if flow == "source_to_target" else edge_index.unbind(0)[::-1]
    graph = Graph._of_few_edges(*ends, num_src, num_dst, self_loops)
    if graph is not None:
        _cache._store(edge_index, key, Entry(graph, stamps, None))
    return graph


def graph_of_edge_index(
    edge_index: Tensor, plain: Tensor, num_src: Optional[int], num_dst: Optional[int], flow: str, self_loops: bool
) -> Graph:
    """Returns the cached graph of an ``edge_index`` outside of compiled programs; ``plain`` is the tensor in it.

    The arguments and errors are those of :func:`edgeless.cache.graph_from_edge_index`, which has checked them.
    """

    def build():
        rows, names = plain.unbind(0), ("edge_index[0]", "edge_index[1]")
        if flow == "target_to_source":
            rows, names = rows[::-1], names[::-1]
        return Graph._from_ends("graph_from_edge_index", names, *rows, num_src, num_dst, self_loops=self_loops)

    key = ("edge_index", flow, num_src, num_dst, self_loops)
    try:
        if (found := _quickly(edge_index, key)) is not None:
            return found
        # Operations of a wrapper, such as EdgeIndex, change the inner tensor without raising its version counter.
        return graph_for(edge_index, key, build, tensors=(plain,), compare=plain is not edge_index)
    except TypeError:
        check_sizes("graph_from_edge_index", num_src, num_dst)  # with sizes that cannot be hashed, build() does not run
        raise


def cache_info() -> CacheInfo:
    """Returns statistics of the cache since the last :func:`clear_cache`.

    Example:
        >>> import edgeless
        >>> edgeless.cache_info().graphs >= 0
        True
    """
    return _cache.info()


def clear_cache() -> None:
    """Drops every cached graph, sets the statistics to zero and gives pooled memory back to the system.

    Afterwards the cache has no weak references to user tensors, which ``torch.utils.swap_tensors`` does not allow.

    Example:
        >>> import edgeless
        >>> edgeless.clear_cache()
        >>> edgeless.cache_info().graphs
        0
    """
    _cache.clear()
    _C.release_pool()


def set_cache_limit(bytes: int) -> None:
    """Limits the bytes that cached graphs may hold; 0 caches nothing. The default is 4 GiB.

    Raises:
        TypeError: bytes is no number.
        ValueError: bytes is negative or NaN.

    Example:
        >>> import edgeless
        >>> edgeless.set_cache_limit(2**32)  # the default
    """
    check_number("set_cache_limit", "bytes", bytes)
    if not bytes >= 0:
        raise ValueError(f"set_cache_limit: bytes must not be negative, got {bytes}")
    _cache.set_limit(bytes)
