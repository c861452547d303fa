"""Weak caches from a user's graph object to a :class:`Graph`: a graph is built once, however often it is used.

A graph hangs weakly on the object that it was built from, its anchor (an edge_index tensor, a DGL graph index, a sparse
matrix), and dies with it. It counts as valid while the tensors behind the anchor are the same memory in the same
version: an in-place edit, through whatever view, raises PyTorch's version counter. Tensors without a counter to rely on
(made under ``torch.inference_mode``, or wrapped like PyG's EdgeIndex) are copied, and compared at every use.

Some writers raise no counter: collectives of torch.distributed, other processes, ``tensor.data``, numpy, DLPack. On
the CPU every use therefore also reads the contents (``core_cuda/graph/stamp.h``): all of them up to 4,096 numbers, in
shared memory, and while torch.distributed runs with several processes; otherwise a sample, which a new graph does not
pass and an edit of a few ids may. On CUDA nothing is read, since that would wait for the GPU. Under
``EDGELESS_CACHE=verify`` the cache compares all contents on every device; ``EDGELESS_CACHE=0`` builds anew every time.
Programs of torch.compile ask the cache for the graph of an edge_index when they run (:mod:`edgeless.program_cache`) and
build all others by ops of their own.

The cache holds at most :func:`set_cache_limit` bytes; what was not used for longest goes first. The graph used last
stays even when it alone is larger, for building it anew in every layer would help nobody; a limit of 0 keeps nothing.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from . import _C
from .formats import num_bytes, tensors_of
from .graph import Graph
from .graph_checks import check_number, check_sizes, compiling, normal_tensors, transforming

__all__ = [
    "CacheInfo",
    "GraphCache",
    "cache_info",
    "clear_cache",
    "graph_for",
    "graph_of_edge_index",
    "set_cache_limit",
]

DEFAULT_LIMIT = 4 * 2**30  # room for both directions of 250 million edges

_DISTRIBUTED = torch.distributed.is_available()
_MODES = {"": "on", "1": "on", "0": "off", "verify": "verify"}


class CacheInfo(NamedTuple):
    """Lookups that found a graph and lookups that built one, graphs held, bytes they hold now, and the byte limit.

    ``pooled`` are the bytes of large CPU results that were freed and wait for the next result of their size; the system
    may take them when memory is short. ``EDGELESS_POOL=0`` keeps none.
    """

    hits: int
    misses: int
    graphs: int
    bytes: int
    limit: int
    pooled: int = 0


class _AnchorRef(weakref.ref):
    """A weak reference that still knows the id of its object when that is gone."""

    __slots__ = ("anchor_id",)

    def __init__(self, anchor, callback):
        super().__init__(anchor, callback)
        self.anchor_id = id(anchor)


class _Entry:
    """A cached graph with what it was built from."""

    __slots__ = ("charge", "copies", "formats", "graph", "place", "stamps")

    def __init__(self, graph: Graph, stamps: bytes, copies: Optional[tuple[Tensor, ...]]):
        self.graph = graph
        self.stamps = stamps
        self.copies = copies  # None where the stamps are proof enough
        self.charge = 0
        self.formats = -1  # num_formats() of the graph when it was charged
        self.place: Any = None  # its key among the entries: found again without comparing long keys

    def bytes_at_most(self) -> int:
        return self.graph.memory_bytes_at_most() + num_bytes(self.copies or ())


class _Section:
    """What runs under the lock of a cache; anchors that died meanwhile are swept behind it."""

    __slots__ = ("_lock", "_sweep")

    def __init__(self, lock: threading.Lock, sweep: Callable[[], None]):
        self._lock, self._sweep = lock, sweep

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exception) -> None:
        self._lock.release()
        self._sweep()


class GraphCache:
    """A least recently used cache of graphs on weakly held anchors, safe to use from many threads.

    Anchors are told apart by identity; they are neither hashed nor compared. A graph is charged with the bytes it can
    grow to, so its transpose, built later, never breaks the limit.
    """

    def __init__(self, limit: int = DEFAULT_LIMIT):
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[int, Hashable], _Entry] = OrderedDict()  # by (anchor's id, key), oldest first
        self._anchors: dict[int, tuple[_AnchorRef, set]] = {}  # id of the anchor -> its reference, its keys
        self._dead: deque[_AnchorRef] = deque()  # of anchors that died and wait for the lock
        self._charged = 0
        self._limit = limit
        self._hits = self._misses = 0

    def graphs(self) -> list[Graph]:
        """All that are kept."""
        with self._lock:
            return [entry.graph for entry in self._entries.values()]

    def after_fork(self) -> None:
        """To be called in a forked child, which inherits the lock, but not the thread that may have held it."""
        if self._lock.acquire(blocking=False):
            self._lock.release()
            return
        # What that thread was changing is not to be relied on.
        self._lock = threading.Lock()
        self._dead.clear()
        self._reset()

    def get(self, anchor: Any, key: Hashable, build: Callable[[], Graph], tensors=(), compare: bool = False) -> Graph:
        """The graph of ``anchor`` under ``key``, from ``build()`` when there is none that is valid.

        Args:
            anchor: what the graph hangs on; must support weak references.
            key: tells the graphs of one anchor apart.
            tensors: dense tensors that the graph is built from; a graph is valid while they are unchanged.
            compare: whether to prove this by their contents, not by their version counters.
        """
        stamps = _C.stamps(tensors, several_processes()) if tensors else b""
        entry = self._find(anchor, key, stamps)
        if entry is not None:
            if not compare or _same_contents(entry.copies, tensors):
                return entry.graph
            with self._locked():
                self._hits -= 1
        # Stamps and copies are taken before building: an edit meanwhile makes the entry stale, never wrong.
        copies = tuple(t.clone() for t in tensors) if compare else None
        with normal_tensors():
            graph = build()
        if transforming():
            return graph
        entry = _Entry(graph, stamps, copies)
        self._store(anchor, key, entry)
        return entry.graph

    def info(self) -> CacheInfo:
        """See :func:`cache_info`."""
        with self._locked():
            entries = list(self._entries.values())
            hits, misses, limit = self._hits, self._misses, self._limit
        graphs = {id(e.graph): e.graph.memory_bytes() for e in entries}  # one graph may hang on two anchors
        copies = sum(num_bytes(e.copies or ()) for e in entries)
        return CacheInfo(hits, misses, len(entries), sum(graphs.values()) + copies, limit, _C.pooled_bytes())

    def clear(self) -> None:
        """See :func:`clear_cache`."""
        with self._locked():
            self._reset()

    def set_limit(self, limit: int) -> None:
        """See :func:`set_cache_limit`."""
        with self._locked():
            self._limit = limit
            self._shrink()

    def _locked(self) -> _Section:
        return _Section(self._lock, self._sweep)

    def _anchor_died(self, reference: _AnchorRef) -> None:
        # Runs wherever the last reference to the anchor goes away, maybe inside one of our own locked sections: never
        # wait for the lock here. Who holds it sweeps after releasing it.
        self._dead.append(reference)
        self._sweep()

    def _sweep(self) -> None:
        while self._dead and self._lock.acquire(blocking=False):
            try:
                while self._dead:
                    reference = self._dead.popleft()
                    record = self._anchors.get(reference.anchor_id)
                    if record is not None and record[0] is reference:
                        self._forget(reference.anchor_id)
            finally:
                self._lock.release()

    # The rest runs under the lock, or takes it.

    def _reset(self) -> None:
        self._entries.clear()
        self._anchors.clear()
        self._charged = self._hits = self._misses = 0

    def _find(self, anchor, key, stamps) -> Optional[_Entry]:
        try:
            with self._lock:  # hot: every call of a layer comes here
                return self._found(anchor, key, stamps)
        finally:
            if self._dead:
                self._sweep()

    def _found(self, anchor, key, stamps) -> Optional[_Entry]:
        self._check_identity(anchor)
        try:
            entry = self._entries.get((id(anchor), key))
        except TypeError:
            raise TypeError(f"graph_for: key must be hashable, got {key!r}") from None
        if entry is None:
            return None
        if entry.stamps != stamps:
            self._forget(id(anchor))
            return None
        self._entries.move_to_end(entry.place)
        if entry.formats != entry.graph.num_formats():
            self._charge(entry)
            self._shrink()
        self._hits += 1
        return entry

    def _store(self, anchor, key, entry: _Entry) -> None:
        entry.place = place = (id(anchor), key)
        try:
            with self._lock:
                self._misses += 1
                self._check_identity(anchor)
                self._drop(place)
                record = self._anchors.get(id(anchor))
                if record is None:
                    try:
                        record = self._anchors[id(anchor)] = (_AnchorRef(anchor, self._anchor_died), set())
                    except TypeError:
                        kind = type(anchor).__name__
                        raise TypeError(f"graph_for: anchor must allow weak references, got {kind}") from None
                record[1].add(key)
                self._entries[place] = entry
                self._charge(entry)
                self._shrink()
        finally:
            if self._dead:
                self._sweep()

    def _check_identity(self, anchor) -> None:
        """Forget a dead anchor whose id was given to a new object before its death was noticed."""
        record = self._anchors.get(id(anchor))
        if record is not None and record[0]() is not anchor:
            self._forget(id(anchor))

    def _forget(self, anchor_id: int) -> None:
        for key in list(self._anchors[anchor_id][1]):
            self._drop((anchor_id, key))

    def _drop(self, place: tuple[int, Hashable]) -> None:
        entry = self._entries.pop(place, None)
        if entry is None:
            return
        self._charged -= entry.charge
        anchor_id, key = place
        keys = self._anchors[anchor_id][1]
        keys.discard(key)
        if not keys:
            del self._anchors[anchor_id]

    def _charge(self, entry: _Entry) -> None:
        entry.formats = entry.graph.num_formats()  # before the bytes: what comes between is charged next time
        charge = entry.bytes_at_most()
        self._charged += charge - entry.charge
        entry.charge = charge

    def _shrink(self) -> None:
        fewest = 1 if self._limit > 0 else 0
        while self._charged > self._limit and len(self._entries) > fewest:
            self._drop(next(iter(self._entries)))


def several_processes() -> bool:
    """Whether collectives may write into any tensor of this process; they raise no version counter."""
    return _DISTRIBUTED and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


def held_graphs(tensors: list[Tensor]) -> list[Graph]:
    """The cached graphs that hold the memory of one of ``tensors``, for who needs what else these keep."""
    places = {t.untyped_storage()._cdata for t in tensors}
    return [g for g in _cache.graphs() if any(t.untyped_storage()._cdata in places for t in tensors_of(g))]


def _same_contents(copies: Optional[tuple[Tensor, ...]], tensors) -> bool:
    return copies is not None and all(map(torch.equal, copies, tensors))


_cache = GraphCache()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_cache.after_fork)


def _mode() -> str:
    setting = _C.cache_setting()
    if setting not in _MODES:
        raise ValueError(f"EDGELESS_CACHE must be 0, 1 or verify, got {setting!r}")
    return _MODES[setting]


def trusts_versions() -> bool:
    """Whether a tensor on a GPU counts as unchanged as long as its version is."""
    return _mode() == "on"


def graph_for(
    anchor: Any, key: Hashable, build: Callable[[], Graph], *, tensors: tuple[Tensor, ...] = (), compare: bool = False
) -> Graph:
    """The cached graph of ``anchor`` under ``key``, or ``build()``.

    Args:
        anchor: the user's object; the graph hangs weakly on it, so it must allow weak references.
        key: hashable; tells apart the graphs that can be built from one anchor.
        build: makes the graph. It must not keep the anchor alive through the graph, or neither ever dies.
        tensors: the dense tensors that ``build`` reads, when the anchor can change; edited, they make the graph stale.
        compare: whether their version counters cannot be relied on, so that contents have to be compared.

    Raises:
        TypeError: one of these is no such thing.
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
    if not concrete:  # a stand-in without contents, while a tracer runs
        for t in tensors:
            if not isinstance(t, Tensor):
                raise TypeError(f"graph_for: tensors must be Tensors, got {type(t).__name__} among them")
        return build()
    compare = compare or inference
    return _cache.get(anchor, key, build, tensors, compare)


def _quickly(edge_index: Tensor, key: tuple) -> Optional[Graph]:
    """What :func:`graph_for` would give for a plain tensor of which a version is proof enough: a graph that is known,
    or one of few edges. None for all else. A model asks in every layer, and of a small graph the way there takes longer
    than what it leads to.
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
        _cache._store(edge_index, key, _Entry(graph, stamps, None))
    return graph


def graph_of_edge_index(
    edge_index: Tensor, plain: Tensor, num_src: Optional[int], num_dst: Optional[int], flow: str, self_loops: bool
) -> Graph:
    """The cached graph of an ``edge_index`` outside of programs; ``plain`` is the tensor within it.

    Args and errors as of :func:`edgeless.cache.graph_from_edge_index`, which has checked them.
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
        # A wrapper's operations reach the inner tensor below its version counter.
        return graph_for(edge_index, key, build, tensors=(plain,), compare=plain is not edge_index)
    except TypeError:
        check_sizes("graph_from_edge_index", num_src, num_dst)  # what cannot be hashed never comes to build()
        raise


def cache_info() -> CacheInfo:
    """Statistics of the cache since the last :func:`clear_cache`."""
    return _cache.info()


def clear_cache() -> None:
    """Forget every cached graph, set the statistics to zero and give pooled memory back to the system.

    Nothing weakly refers to tensors of a user afterwards, as ``torch.utils.swap_tensors`` asks of those it swaps.
    """
    _cache.clear()
    _C.release_pool()


def set_cache_limit(bytes: int) -> None:
    """Let cached graphs hold at most ``bytes``; 0 caches nothing. The default is 4 GiB.

    Raises:
        TypeError: bytes is no number.
        ValueError: bytes is negative or NaN.
    """
    check_number("set_cache_limit", "bytes", bytes)
    if not bytes >= 0:
        raise ValueError(f"set_cache_limit: bytes must not be negative, got {bytes}")
    _cache.set_limit(bytes)
