"""The next batch while the current one is trained on.

A new graph is checked and built on the GPU, and the host waits for that: behind everything that it has begun there,
which under DistributedDataParallel includes the other processes' gradients. On a stream of its own the wait is for the
next batch alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch

from .graph_checks import as_device

__all__ = ["prefetch"]

T = TypeVar("T")


def prefetch(batches: Iterable[Any], prepare: Callable[[Any], T], device) -> Iterator[T]:
    """``map(prepare, batches)``, one batch ahead and on a stream of its own where ``device`` is a GPU.

    ``prepare`` makes a batch's :class:`edgeless.Graph` on the device, then copies the rest: the host waits for the
    graph, and so for what this stream was given before it::

        def prepare(batch):
            edge_index = batch.edge_index.to(device, non_blocking=True)
            graph = edgeless.Graph.from_edge_index(edge_index, batch.num_nodes, batch.num_nodes)
            return batch.x.to(device, non_blocking=True), graph, batch.y.to(device, non_blocking=True)

        for x, graph, y in edgeless.prefetch(loader, prepare, device):  # NeighborLoader(..., pin_memory=True)
            out = model(x, graph)

    For layers that add self loops: ``Graph.from_edge_index(..., self_loops=True)``, which sorts the edges once.

    Args:
        batches: a loader; it runs on that stream, too. Whatever it and ``prepare`` read on the GPU is to be written
            before the loop, or they wait for it themselves.
        prepare: from what the loader gives to tensors, graphs, and batches of PyG and DGL, alone or in tuples, lists
            and dictionaries. Nothing else that it returns may hold memory of the GPU, and what shares memory that torch
            did not allocate needs its owner beside it: a block of DGL beside the Graph that was made of it.
        device: where training runs. On a CPU nothing is done ahead.
    Raises:
        TypeError, ValueError: prepare is no function, device no device.
    """
    device = as_device("prefetch", device)
    if not callable(prepare):
        raise TypeError(f"prefetch: prepare must be a function, got {type(prepare).__name__}")
    return _ahead(batches, prepare, device) if device.type == "cuda" else map(prepare, batches)


def _ahead(batches: Iterable[Any], prepare: Callable[[Any], T], device: torch.device) -> Iterator[T]:
    # Of high priority: its few small kernels are what the host waits for.
    side = torch.cuda.Stream(device, priority=-1)
    side.wait_stream(torch.cuda.current_stream(device))  # for what is there before the loop
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
        yield handed.pop()  # its memory is the caller's to free


def record_stream(value: Any, stream) -> None:
    """Tells the allocator that ``stream`` uses what a batch consists of, which another stream has made: its memory is
    used again when that stream has come to the place where it was freed.
    """
    if isinstance(value, (tuple, list)):
        for part in value:
            record_stream(part, stream)
    elif isinstance(value, dict):
        record_stream(list(value.values()), stream)
    elif hasattr(value, "record_stream"):
        device = getattr(value, "device", None)  # batches of PyG have none
        if device is None or device.type == "cuda":
            value.record_stream(stream)
