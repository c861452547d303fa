"""Exchanges halo rows over symmetric memory: the GPU's copy engine moves them while its SMs go on computing.

Every rank has a buffer of the same size, which all others can read and write. On a side stream:

    send       after the caller has packed its rows into its own buffer:
               barrier: all have packed
               copy this rank's halo rows out of their owners' buffers
               barrier: all have copied, the buffers are free
    send_back  barrier: all buffers are free
               copy the gradients of this rank's halo rows into their owners' buffers
               barrier: all have copied
               then the caller sums the gradients in its own buffer

In both directions a buffer holds the rows that its owner sends, ordered by receiver.

There is no deadlock. Kernels of barriers and of NCCL spin on the GPU for other ranks. But all ranks enqueue the same
exchanges and collectives in program order, and each waits only for earlier ones: on its own rank through streams and
events, on other ranks through the same barrier or collective. So the earliest unfinished one can always run: a barrier
takes one warp, a collective a few thread blocks, and spinning kernels leave the rest of the GPU free. DDP's hooks may
start its reductions at different points between two exchanges on different ranks; these reductions have a stream of
their own, and no exchange waits for them.

Only this file uses torch's symmetric memory, which is a private API. Multicast is neither needed nor used.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import math
import socket
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from ..checks import normal_tensors
from .process import Ranks

PRIVATE = "torch.distributed._symmetric_memory"


def refusal(ranks: Ranks, device: torch.device) -> str:
    """Returns why symmetric memory is unsupported for a part on ``device``, the same text on every rank; empty if
    supported.
    """
    own, where = _own_refusal(device)
    said = ranks.all_say((own, where))
    if not any(reason for reason, _ in said):
        try:
            own = _peer_refusal([where for _, where in said], ranks.rank, device)
        except Exception as error:  # any error: the other ranks must not hang waiting for this one
            own = f"its GPU cannot say what it has access to ({error!r})"
        said = ranks.all_say((own, where))
    reasons = [(rank, reason) for rank, (reason, _) in enumerate(said) if reason]
    if len({reason for _, reason in reasons}) == 1 and len(reasons) == ranks.size:
        return reasons[0][1]
    return "; ".join(f"rank {rank}: {reason}" for rank, reason in reasons)


def _own_refusal(device: torch.device) -> tuple[str, tuple[str, str]]:
    """(why this rank does not support it, or an empty text; (host, GPU) of this rank)."""
    nowhere = ("", "")
    if device.type != "cuda":
        return f"it needs parts on GPUs, and they are on {device.type}", nowhere
    if "nccl" not in (backend := str(dist.get_backend())):
        return f"it needs a process group of NCCL, and this one is of {backend}", nowhere
    try:
        private = importlib.import_module(PRIVATE)
        kind = private.get_backend(device) if hasattr(private, "get_backend") else "CUDA"
        private.rendezvous, private._SymmetricMemory.empty_strided_p2p  # noqa: B018  an AttributeError where missing
        gpu = str(torch.cuda.get_device_properties(device).uuid)
        boot = Path("/proc/sys/kernel/random/boot_id")
        host = f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"
    except Exception as error:  # a private module may be missing, changed or broken in any way
        return f"torch {torch.__version__} has no symmetric memory that is known here ({error!r})", nowhere
    if kind not in ("CUDA", None):
        return f"torch's symmetric memory is set to {kind}, and it needs CUDA's", nowhere
    return "", (host, gpu)


def _peer_refusal(where: list[tuple[str, str]], rank: int, device: torch.device) -> str:
    """Returns why this rank cannot access the memory of some other rank; empty if it can."""
    host, gpu = where[rank]
    visible = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    for other, (its_host, its_gpu) in enumerate(where):
        if other == rank:
            continue
        if its_host != host:
            return f"it needs all ranks on one host, and rank {other} is on {its_host.split()[0]}"
        if its_gpu == gpu:
            return f"it needs a GPU for every rank, and rank {other} has the same"
        if its_gpu not in visible:
            return f"the GPU of rank {other} is not visible"
        if not torch.cuda.can_device_access_peer(device, visible[its_gpu]):
            return f"its GPU has no access to that of rank {other}"
        if not _has_atomics(device.index, visible[its_gpu]):
            return f"it needs NVLink, and the GPU of rank {other} is not reached by it"
    return ""


def _has_atomics(device: int, peer: int) -> bool:
    """Returns whether a GPU has native atomics in a peer's memory, which barriers need: over NVLink, not over PCIe."""
    native_atomics, found = 3, ctypes.c_int(0)  # a CUdevice_P2PAttribute of cuda.h, which torch does not expose
    driver = ctypes.CDLL("libcuda.so.1")
    return driver.cuDeviceGetP2PAttribute(ctypes.byref(found), native_atomics, device, peer) == 0 and found.value == 1


def connect(ranks: Ranks, sent: list[list[int]], device: torch.device) -> Symmetric:
    """The carrier between GPUs. All ranks call it; if it fails on one, it raises RuntimeError on all."""
    memory = _together(ranks, "symmetric memory", lambda: _Memory(device))
    return Symmetric(ranks, sent, memory, _Side(device))


def _together(ranks: Ranks, what: str, work: Callable[[], Any]):
    """The result of ``work``; if it fails on one rank, raises RuntimeError on all."""
    result = failure = None
    try:
        result = work()
    except Exception as error:  # any error: the other ranks must not hang waiting for this one
        failure = f"{type(error).__name__}: {error}"
    said = ranks.all_say(failure)
    if failed := [f"rank {rank}: {reason}" for rank, reason in enumerate(said) if reason is not None]:
        raise RuntimeError(f"edgeless.distributed: {what} cannot be had on every rank: {'; '.join(failed)}")
    return result


class _Memory:
    """Torch's symmetric memory on one GPU, for the group of all ranks."""

    def __init__(self, device: torch.device):
        self._private: Any = importlib.import_module(PRIVATE)
        self._device, self._group = device, dist.group.WORLD
        # Barriers fail after the process group's timeout, as NCCL's collectives do.
        self.timeout_ms = int(1000 * self._group._get_backend(device).options._timeout.total_seconds())

    def take(self, nbytes: int) -> Tensor:
        """Allocates bytes that :meth:`share` can share, outside torch's caching allocator."""
        make = self._private._SymmetricMemory.empty_strided_p2p
        try:
            return make((nbytes,), (1,), torch.uint8, self._device)
        except RuntimeError:
            torch.cuda.empty_cache()  # frees torch's unused cached blocks for a second try
            return make((nbytes,), (1,), torch.uint8, self._device)

    def share(self, tensor: Tensor):
        """The handle through which ranks access one another's tensor from :meth:`take`. All ranks call it."""
        return self._private.rendezvous(tensor, self._group)


class _Side:
    """A high-priority side stream: barriers would otherwise wait behind kernels that fill the GPU."""

    def __init__(self, device: torch.device):
        self._device, self._stream = device, torch.cuda.Stream(device, priority=-1)

    def mark(self) -> torch.cuda.Event:
        """An event after all work queued so far on the current stream."""
        return torch.cuda.current_stream(self._device).record_event()

    def wait(self, mark: torch.cuda.Event) -> None:
        """Makes the current stream wait for an event."""
        torch.cuda.current_stream(self._device).wait_event(mark)

    def run(self, after: torch.cuda.Event, *works: Callable[[], None]) -> list[torch.cuda.Event]:
        """Enqueues ``works`` on the side stream, after an event, and returns an event at the end of each."""
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            return [(work(), self._stream.record_event())[1] for work in works]

    def settle(self, seconds: float = math.inf) -> None:
        """The host waits until the side stream is idle, but at most this many seconds."""
        end = time.monotonic() + seconds
        while not self._stream.query() and time.monotonic() < end:
            time.sleep(1e-4)


class _Slot:
    """One symmetric buffer, with an instance on every rank, and its state.

    Attributes:
        way: weak reference to the :class:`_Way` that uses the buffer; None while it is free.
        idle: the event after which the buffer may be overwritten.
        held: the storage that the side stream reads or writes. The slot keeps it alive: the allocator knows only the
            stream of the allocation, and would reuse the memory as soon as the caller drops it. It is the storage and
            not the tensor, since the tensor's autograd graph refers to the exchange, which would then never be freed.
    """

    def __init__(self, memory: Tensor, handle, timeout_ms: int, idle):
        self._memory, self._handle, self._timeout_ms = memory, handle, timeout_ms
        self.bytes = memory.numel()
        self.way: Optional[weakref.ref] = None
        self.idle = idle
        self.held: Optional[torch.UntypedStorage] = None

    def rows(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, first: int = 0) -> Tensor:
        """A tensor of ``shape`` in the buffer of ``rank``, from row ``first`` on."""
        return self._handle.get_buffer(rank, shape, dtype, first * torch.Size(shape[1:]).numel())

    def barrier(self) -> None:
        """A barrier on the current stream: later work runs when all ranks have reached it."""
        self._handle.barrier(0, self._timeout_ms)

    def free(self) -> None:
        self.way = self.held = None


class _Way:
    """One direction of an exchange in flight. If it is dropped before its end, ``_reclaim`` frees its slot."""

    def __init__(self, slot: _Slot):
        self.slot, self.done, self.returned = slot, None, None
        slot.way = weakref.ref(self)


class Symmetric:
    """The carrier over symmetric memory; methods as in :class:`edgeless.distributed.carriers.AllToAll`.

    Slots are allocated as needed: one, or more where several exchanges are in flight at once. All ranks must choose the
    same slot for an exchange, so the choice depends only on the program: on the bytes of a row, the largest number of
    rows that a rank sends, and which exchanges have ended, but not on garbage collection.
    """

    name, why, keeps_features = "symmetric", "", True

    def __init__(self, ranks: Ranks, sent: list[list[int]], memory, side):
        """``sent[r][q]``: rows from rank r to rank q; ``memory``, ``side``: like :class:`_Memory`, :class:`_Side`."""
        self._ranks, self._memory, self._side = ranks, memory, side
        self._begins = [sum(to[: ranks.rank]) for to in sent]  # first row for this rank in every rank's buffer
        self._most = max(map(sum, sent))
        self._others = [(ranks.rank + step) % ranks.size for step in range(1, ranks.size)]  # staggered over the ranks
        self._slots: list[_Slot] = []
        self._check(self._new(1))
        # A process that exits during its last barrier would leave the others waiting in it. The wait is short, since
        # after a failure of another rank the barrier never completes.
        weakref.finalize(self, side.settle, 5.0)

    @property
    def bytes(self) -> int:
        """Bytes of the buffers on this rank."""
        return sum(slot.bytes for slot in self._slots)

    def send(self, halo, rows: Tensor, out: Tensor) -> _Way:
        way = self._take(out)
        slot = way.slot
        halo.packed(rows, slot.rows(self._ranks.rank, (halo.sent.numel(), *out.shape[1:]), out.dtype))

        def fetch() -> None:
            slot.barrier()  # all have packed
            for mine, theirs in self._pairs(slot, out, halo.num_received):
                mine.copy_(theirs)

        # After the last barrier all have fetched; only the slot's next use has to wait for it.
        way.done, slot.idle = self._side.run(self._side.mark(), fetch, slot.barrier)
        return way

    def arrive(self, way: _Way) -> None:
        self._side.wait(way.done)
        way.slot.free()

    def send_back(self, halo, grad: Tensor) -> _Way:
        way = self._take(grad)
        slot = way.slot

        def put() -> None:
            slot.barrier()  # all have summed the buffer's previous gradients
            for mine, theirs in self._pairs(slot, grad, halo.num_received):
                theirs.copy_(mine)
            slot.barrier()  # all have put

        (way.done,) = self._side.run(self._side.mark(), put)
        slot.idle = way.done
        way.returned = slot.rows(self._ranks.rank, (halo.sent.numel(), *grad.shape[1:]), grad.dtype)
        return way

    def come_back(self, halo, way: _Way) -> Tensor:
        self._side.wait(way.done)
        total = halo.summed(way.returned)
        way.slot.idle = self._side.mark()
        way.slot.free()
        return total

    def forget(self) -> None:
        self._drop_free()

    def _pairs(self, slot: _Slot, rows: Tensor, counts: list[int]):
        """For every other rank, its part of the halo's ``rows`` and the matching rows of its buffer."""
        parts = rows.split(counts)
        for rank in self._others:
            if parts[rank].numel():
                yield parts[rank], slot.rows(rank, tuple(parts[rank].shape), rows.dtype, self._begins[rank])

    # Slots -----------------------------------------------------------------------------------------------------------

    def _take(self, rows: Tensor) -> _Way:
        """Takes a slot that fits exchanges of rows like these. The current stream waits until the slot is idle, and the
        slot keeps the storage of ``rows`` alive for the side stream.
        """
        need = max(1, self._most * rows.element_size() * rows.shape[1:].numel())
        slot = self._fitting(need)
        if slot is None and self._slots:
            self._reclaim()
            slot = self._fitting(need)
        if slot is None:
            slot = self._new(need)
        self._side.wait(slot.idle)
        slot.held = rows.untyped_storage()
        return _Way(slot)

    def _fitting(self, need: int) -> Optional[_Slot]:
        free = [slot for slot in self._slots if slot.way is None and slot.bytes >= need]
        return min(free, key=lambda slot: slot.bytes, default=None)

    def _reclaim(self) -> None:
        """Frees slots whose exchange was dropped before its end, after an error or without a backward.

        Garbage collection runs at different times on every rank, so the ranks agree on the slots. This collective runs
        only before a new allocation, which is rare.
        """
        taken = [number for number, slot in enumerate(self._slots) if slot.way is not None]
        if not taken:
            return
        gc.collect()
        dropped = {number for number in taken if self._slots[number].way() is None}
        for number in set.intersection(*self._ranks.all_say(dropped)):
            self._side.wait(self._slots[number].idle)
            self._slots[number].free()

    def _drop_free(self) -> None:
        """Releases free slots on all ranks before any goes on: memory is only freed when no rank has it mapped."""
        kept = [slot for slot in self._slots if slot.way is not None]
        if len(kept) < len(self._slots):
            self._side.settle()
            self._slots = kept
            self._ranks.all_say("gave memory back")

    def _new(self, nbytes: int) -> _Slot:
        """Allocates a slot in place of the free ones, which are too small."""
        self._drop_free()
        what = f"symmetric memory of {nbytes:,} bytes"
        with normal_tensors():
            memory = _together(self._ranks, what, lambda: self._memory.take(nbytes))
            handle = _together(self._ranks, what, lambda: self._memory.share(memory))
        slot = _Slot(memory, handle, self._memory.timeout_ms, self._side.mark())
        self._slots.append(slot)
        return slot

    def _check(self, slot: _Slot) -> None:
        """Reads every other rank's number through the slot, so that broken memory is detected before it loses rows."""
        slot.rows(self._ranks.rank, (1,), torch.uint8).fill_(self._ranks.rank)
        found: list[Tensor] = []

        def fetch() -> None:
            slot.barrier()
            found.extend(slot.rows(rank, (1,), torch.uint8).clone() for rank in self._others)
            slot.barrier()

        def read() -> None:
            self._side.wait(*self._side.run(self._side.mark(), fetch))
            if (numbers := [int(t) for t in found]) != self._others:
                raise RuntimeError(f"read {numbers} from ranks {self._others}")

        _together(self._ranks, "what other ranks write to symmetric memory", read)
