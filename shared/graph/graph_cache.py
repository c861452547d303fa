"""A cache of graphs by weakly held anchors, whose least recently used graphs make room for others.

:mod:`edgeless.graph.weak_cache` decides which graphs are cached, and for which objects.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from .. import _C
from ..checks import normal_tensors, transforming
from .formats import num_bytes
from .handle import Graph

DEFAULT_LIMIT = 4 * 2**30  # room for both directions of 250 million edges

_DISTRIBUTED = torch.distributed.is_available()


class CacheInfo(NamedTuple):
    """Statistics of the cache.

    Attributes:
        hits: lookups that found a graph.
        misses: lookups that built one.
        graphs: cached graphs.
        bytes: the bytes that they hold now.
        limit: the most bytes that they may hold.
        pooled: bytes of large CPU results that were freed and are kept for later results of their size; the system may
            reclaim them when memory is short. ``EDGELESS_POOL=0`` keeps none.
    """

    hits: int
    misses: int
    graphs: int
    bytes: int
    limit: int
    pooled: int = 0


class _AnchorRef(weakref.ref):
    """A weak reference that keeps the id of its object after the object is freed."""

    __slots__ = ("anchor_id",)

    def __init__(self, anchor, callback):
        super().__init__(anchor, callback)
        self.anchor_id = id(anchor)


class Entry:
    """A cached graph with the stamps or copies of the tensors that it was built from."""

    __slots__ = ("charge", "copies", "formats", "graph", "place", "stamps")

    def __init__(self, graph: Graph, stamps: bytes, copies: Optional[tuple[Tensor, ...]]):
        self.graph = graph
        self.stamps = stamps
        self.copies = copies  # None if equal stamps prove that the tensors are unchanged
        self.charge = 0  # bytes that count against the limit
        self.formats = -1  # num_formats() of the graph when it was charged
        self.place: Any = None  # its key in the cache's entries; the same object, so lookups compare no long keys

    def bytes_at_most(self) -> int:
        grown = self.graph.memory_bytes_at_most()
        return grown if self.copies is None else grown + num_bytes(self.copies)


class _Section:
    """Holds the lock of a cache; after releasing it, drops the entries of anchors that died meanwhile."""

    __slots__ = ("_lock", "_sweep")

    def __init__(self, lock: threading.Lock, sweep: Callable[[], None]):
        self._lock, self._sweep = lock, sweep

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exception) -> None:
        self._lock.release()
        self._sweep()


class GraphCache:
    """A thread-safe LRU cache of graphs by weakly held anchors.

    Anchors are identified by their ids; they are neither hashed nor compared. A graph is charged with the bytes to
    which it can grow, so that its transpose, built later, stays within the limit.
    """

    def __init__(self, limit: int = DEFAULT_LIMIT):
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[int, Hashable], Entry] = OrderedDict()  # by (anchor's id, key), oldest first
        self._anchors: dict[int, tuple[_AnchorRef, set]] = {}  # id of the anchor -> its reference, its keys
        self._dead: deque[_AnchorRef] = deque()  # dead anchors whose entries are still to be dropped
        self._charged = 0
        self._limit = limit
        self._hits = self._misses = 0

    def graphs(self) -> list[Graph]:
        """Returns all cached graphs."""
        with self._lock:
            return [entry.graph for entry in self._entries.values()]

    def after_fork(self) -> None:
        """Call this in a forked child, which inherits the lock but not the thread that may hold it."""
        if self._lock.acquire(blocking=False):
            self._lock.release()
            return
        # That thread may have left the entries half changed.
        self._lock = threading.Lock()
        self._dead.clear()
        self._reset()

    def get(self, anchor: Any, key: Hashable, build: Callable[[], Graph], tensors=(), compare: bool = False) -> Graph:
        """Returns the graph of ``anchor`` under ``key``, or the result of ``build()`` if no valid one is cached.

        Args:
            anchor: the object with which the graph is freed; it must support weak references.
            key: distinguishes the graphs of one anchor.
            build: makes the graph.
            tensors: dense tensors that the graph is built from; a graph is valid while they are unchanged.
            compare: whether to compare their contents, not only their version counters.
        """
        stamps = _C.stamps(tensors, several_processes()) if tensors else b""
        entry = self._find(anchor, key, stamps)
        if entry is not None:
            if not compare or _same_contents(entry.copies, tensors):
                return entry.graph
            with self._locked():
                self._hits -= 1
        # Stamps and copies are taken before the build, so an edit meanwhile makes the entry stale, never wrong.
        copies = tuple(t.clone() for t in tensors) if compare else None
        with normal_tensors():
            graph = build()
        if transforming():
            return graph
        entry = Entry(graph, stamps, copies)
        self._store(anchor, key, entry)
        return entry.graph

    def forget(self, anchors: Iterable[Any]) -> None:
        """Drops the graphs of ``anchors``."""
        with self._locked():
            for anchor in anchors:
                if id(anchor) in self._anchors:
                    self._forget(id(anchor))

    def info(self) -> CacheInfo:
        """See :func:`cache_info`."""
        with self._locked():
            entries = list(self._entries.values())
            hits, misses, limit = self._hits, self._misses, self._limit
        graphs = {id(e.graph): e.graph.memory_bytes() for e in entries}  # one graph may have two anchors
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
        # Runs wherever the last reference to the anchor is dropped, maybe in a locked section of this thread, so it
        # must not wait for the lock. The holder of the lock sweeps after releasing it.
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

    # The methods below run under the lock, except _find and _store, which take it.

    def _reset(self) -> None:
        self._entries.clear()
        self._anchors.clear()
        self._charged = self._hits = self._misses = 0

    def _find(self, anchor, key, stamps) -> Optional[Entry]:
        try:
            with self._lock:  # hot: every call of a layer comes here
                return self._found(anchor, key, stamps)
        finally:
            if self._dead:
                self._sweep()

    def _found(self, anchor, key, stamps) -> Optional[Entry]:
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

    def _store(self, anchor, key, entry: Entry) -> None:
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
        """Drops the entries of a dead anchor whose id a new object got before the sweep."""
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

    def _charge(self, entry: Entry) -> None:
        entry.formats = entry.graph.num_formats()  # read before the bytes: a format built meanwhile is charged later
        charge = entry.bytes_at_most()
        self._charged += charge - entry.charge
        entry.charge = charge

    def _shrink(self) -> None:
        fewest = 1 if self._limit > 0 else 0
        while self._charged > self._limit and len(self._entries) > fewest:
            self._drop(next(iter(self._entries)))


def several_processes() -> bool:
    """Returns whether collectives may write into tensors of this process, which raises no version counter."""
    return _DISTRIBUTED and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


def _same_contents(copies: Optional[tuple[Tensor, ...]], tensors) -> bool:
    return copies is not None and all(map(torch.equal, copies, tensors))
