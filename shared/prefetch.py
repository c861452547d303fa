"""Prefetches the next batch while the current one trains.

Building a graph checks it on the GPU, and the host waits for the check. On the training stream that wait includes all
work queued before it, under DistributedDataParallel also the other processes' gradients. On a side stream the host
waits for the next batch alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch

from .checks import as_device

__all__ = ["prefetch"]

T = TypeVar("T")


def prefetch(batches: Iterable[Any], prepare: Callable[[Any], T], device) -> Iterator[T]:
    """``map(prepare, batches)``, one batch ahead on a side stream where ``device`` is a GPU.

    ``prepare`` should build the batch's :class:`edgeless.Graph` first and copy the rest after it: the host waits for
    the graph, and with it for all work queued earlier on the side stream::

        def prepare(batch):
            edge_index = batch.edge_index.to(device, non_blocking=True)
            graph = edgeless.Graph.from_edge_index(edge_index, batch.num_nodes, batch.num_nodes)
            return batch.x.to(device, non_blocking=True), graph, batch.y.to(device, non_blocking=True)

        for x, graph, y in edgeless.prefetch(loader, prepare, device):  # NeighborLoader(..., pin_memory=True)
            out = model(x, graph)

    For layers that add self loops: ``Graph.from_edge_index(..., self_loops=True)``, which sorts the edges once.

    Args:
        batches: a loader; it runs on the side stream, too. GPU data that the loader and ``prepare`` read must be
            written before the loop, or they must synchronise with its writer themselves.
        prepare: turns a batch of the loader into tensors, graphs, and batches of PyG and DGL, alone or in tuples, lists
            and dictionaries. Nothing else that it returns may hold GPU memory. An object that shares memory which torch
            did not allocate must come with the memory's owner: a Graph made of a DGL block, with the block.
        device: the device of the training. On a CPU there is no prefetching.
    Raises:
        TypeError, ValueError: prepare is not a function, or device not a device.

    Example:
        >>> import torch, edgeless
        >>> batches = [torch.tensor([[0, 1], [1, 0]]), torch.tensor([[0], [1]])]
        >>> for graph in edgeless.prefetch(batches, edgeless.Graph.from_edge_index, "cpu"):
        ...     print(graph.num_edges)
        2
        1
    """
    device = as_device("prefetch", device)
    if not callable(prepare):
        raise TypeError(f"prefetch: prepare must be a function, got {type(prepare).__name__}")
    return _ahead(batches, prepare, device) if device.type == "cuda" else map(prepare, batches)


def _ahead(batches: Iterable[Any], prepare: Callable[[Any], T], device: torch.device) -> Iterator[T]:
    # High priority, since the host waits for this stream's few small kernels.
    side = torch.cuda.Stream(device, priority=-1)
    side.wait_stream(torch.cuda.current_stream(device))  # for data written before the loop
    with torch.cuda.stream(side):
        source, end = iter(batches), object()

    def following():
        with torch.cuda.stream(side):
            batch = next(source, end)
            return None if batch is end else (prepare(batch), side.record_event())

    found = following()
    while found is not None:
        (batch, done), found = found, following()
        current = torch.cuda.current_stream(device)
        current.wait_event(done)
        record_stream(batch, current)
        handed = [batch]
        del batch
        yield handed.pop()  # the caller holds the only reference, and so frees the memory


def record_stream(value: Any, stream) -> None:
    """Tells the allocator that ``stream`` uses the tensors of a batch, which another stream allocated: freed memory is
    then reused only after ``stream`` has passed the point where it was freed.
    """
    if isinstance(value, (tuple, list)):
        for part in value:
            record_stream(part, stream)
    elif isinstance(value, dict):
        record_stream(list(value.values()), stream)
    elif hasattr(value, "record_stream"):
        device = getattr(value, "device", None)  # PyG batches have no device
        if device is None or device.type == "cuda":
            value.record_stream(stream)
