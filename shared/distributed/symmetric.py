"""Halo rows by symmetric memory: the GPU's copy engine carries them, and its multiprocessors go on computing.

Every rank has a buffer of the same size, which all others can read and write. A stream beside the caller's does this:

    send       after the caller has packed its rows into its own buffer
               barrier: all have packed
               copy the own halo's rows out of their owners' buffers
               barrier: all have copied, the buffers are free
    send_back  barrier: all buffers are free
               copy the gradients of the own halo's rows into their owners' buffers
               barrier: all have copied
               then the caller sums what stands in its own buffer

In both directions a buffer holds the rows that its owner sends, ordered by receiver.

Nothing can wait in a circle. Kernels of barriers and of NCCL wait on the GPU for other ranks. But all ranks enqueue the
same exchanges and collectives in the same order, that of the program, and whatever is enqueued waits only for what was
before it: on its own rank by streams and events, on the others by a barrier or a collective, which is the same there.
So the first that is not done can always run: a barrier is one warp, a collective some blocks, and what spins leaves the
rest of the GPU to them. Where hooks begin DDP's reductions at another place between two exchanges than on other ranks,
those are on a stream of their own, and no exchange waits for them.

This file alone knows torch's symmetric memory, which is private to torch. Multicast is neither needed nor used.
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

from ..graph_checks import normal_tensors
from .process import Ranks

PRIVATE = "torch.distributed._symmetric_memory"


def refusal(ranks: Ranks, device: torch.device) -> str:
    """Why a part on ``device`` cannot be carried so, in words and the same on every rank; empty where it can."""
    own, where = _own_refusal(device)
    said = ranks.all_say((own, where))
    if not any(reason for reason, _ in said):
        try:
            own = _peer_refusal([where for _, where in said], ranks.rank, device)
        except Exception as error:  # whatever it is, the other ranks must not wait for this one
            own = f"its GPU cannot say what it has access to ({error!r})"
        said = ranks.all_say((own, where))
    reasons = [(rank, reason) for rank, (reason, _) in enumerate(said) if reason]
    if len({reason for _, reason in reasons}) == 1 and len(reasons) == ranks.size:
        return reasons[0][1]
    return "; ".join(f"rank {rank}: {reason}" for rank, reason in reasons)


def _own_refusal(device: torch.device) -> tuple[str, tuple[str, str]]:
    """Why this rank cannot, and where it is: host and GPU."""
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
    """Why the memory of some other rank is out of reach."""
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
    """Whether a GPU has atomics in another's memory, which barriers are made of: over NVLink, not over PCIe."""
    native_atomics, found = 3, ctypes.c_int(0)  # of CUdevice_P2PAttribute in cuda.h, which torch does not tell
    driver = ctypes.CDLL("libcuda.so.1")
    return driver.cuDeviceGetP2PAttribute(ctypes.byref(found), native_atomics, device, peer) == 0 and found.value == 1


def connect(ranks: Ranks, sent: list[list[int]], device: torch.device) -> Symmetric:
    """The carrier between GPUs. All ranks call it; RuntimeError on all of them where it fails on one."""
    memory = _together(ranks, "symmetric memory", lambda: _Memory(device))
    return Symmetric(ranks, sent, memory, _Side(device))


def _together(ranks: Ranks, what: str, work: Callable[[], Any]):
    """What ``work`` returns, or RuntimeError on every rank where it raises on one of them."""
    result = failure = None
    try:
        result = work()
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        failure = f"{type(error).__name__}: {error}"
    said = ranks.all_say(failure)
    if failed := [f"rank {rank}: {reason}" for rank, reason in enumerate(said) if reason is not None]:
        raise RuntimeError(f"edgeless.distributed: {what} cannot be had on every rank: {'; '.join(failed)}")
    return result


class _Memory:
    """Torch's symmetric memory on one GPU, of the group of all ranks."""

    def __init__(self, device: torch.device):
        self._private: Any = importlib.import_module(PRIVATE)
        self._device, self._group = device, dist.group.WORLD
        # Barriers end with an error where NCCL's collectives would: after the group's timeout.
        self.timeout_ms = int(1000 * self._group._get_backend(device).options._timeout.total_seconds())

    def take(self, nbytes: int) -> Tensor:
        """Bytes that :meth:`share` can share, outside of torch's caching allocator."""
        make = self._private._SymmetricMemory.empty_strided_p2p
        try:
            return make((nbytes,), (1,), torch.uint8, self._device)
        except RuntimeError:
            torch.cuda.empty_cache()  # what torch keeps unused counts as taken
            return make((nbytes,), (1,), torch.uint8, self._device)

    def share(self, tensor: Tensor):
        """The handle by which all ranks reach one another's tensor of :meth:`take`. All ranks call it."""
        return self._private.rendezvous(tensor, self._group)


class _Side:
    """A stream beside the caller's; of high priority, as barriers would else wait behind kernels that fill the GPU."""

    def __init__(self, device: torch.device):
        self._device, self._stream = device, torch.cuda.Stream(device, priority=-1)

    def mark(self) -> torch.cuda.Event:
        """The end of what the current stream was given so far."""
        return torch.cuda.current_stream(self._device).record_event()

    def wait(self, mark: torch.cuda.Event) -> None:
        """Makes the current stream wait for a mark."""
        torch.cuda.current_stream(self._device).wait_event(mark)

    def run(self, after: torch.cuda.Event, *works: Callable[[], None]) -> list[torch.cuda.Event]:
        """Enqueues, after a mark, what each of ``works`` does, and returns the mark of the end of each."""
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            return [(work(), self._stream.record_event())[1] for work in works]

    def settle(self, seconds: float = math.inf) -> None:
        """Waits on the host until nothing is left to do, but not longer than this."""
        end = time.monotonic() + seconds
        while not self._stream.query() and time.monotonic() < end:
            time.sleep(1e-4)


class _Slot:
    """A buffer of every rank, and what uses it.

    Attributes:
        way: weak reference to the :class:`_Way` that has it; None while it is free.
        idle: the mark after which it may be written again.
        held: memory that the stream beside reads or writes. It is kept here: the allocator, which knows only the
            stream that it was taken on, would give it away when the caller drops it. Not the tensor, of which autograd
            leads to the exchange: that could then never be dropped.
    """

    def __init__(self, memory: Tensor, handle, timeout_ms: int, idle):
        self._memory, self._handle, self._timeout_ms = memory, handle, timeout_ms
        self.bytes = memory.numel()
        self.way: Optional[weakref.ref] = None
        self.idle = idle
        self.held: Optional[torch.UntypedStorage] = None

    def rows(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, first: int = 0) -> Tensor:
        """Rows of ``shape`` in the buffer of ``rank``, from row ``first`` on."""
        return self._handle.get_buffer(rank, shape, dtype, first * torch.Size(shape[1:]).numel())

    def barrier(self) -> None:
        """On the current stream: what comes after it runs when all ranks have come to it."""
        self._handle.barrier(0, self._timeout_ms)

    def free(self) -> None:
        self.way = self.held = None


class _Way:
    """One direction of an exchange under way; whoever drops it before its end leaves its slot to :meth:`_reclaim`."""

    def __init__(self, slot: _Slot):
        self.slot, self.done, self.returned = slot, None, None
        slot.way = weakref.ref(self)


class Symmetric:
    """The carrier; methods as those of :class:`edgeless.distributed.carriers.AllToAll`.

    Slots are made as they are needed: one, and more where several exchanges are under way at once. Which slot an
    exchange takes must be the same on all ranks, so it depends only on the program: on the bytes of a row, the largest
    number of rows that a rank sends, and which exchanges have ended. Whether a tensor was collected does not count.
    """

    name, why, keeps_features = "symmetric", "", True

    def __init__(self, ranks: Ranks, sent: list[list[int]], memory, side):
        """Of ``sent[r][q]`` rows from rank r to rank q; ``memory`` and ``side`` as :class:`_Memory`, :class:`_Side`."""
        self._ranks, self._memory, self._side = ranks, memory, side
        self._begins = [sum(to[: ranks.rank]) for to in sent]  # of this rank's rows in the buffer of every other
        self._most = max(map(sum, sent))
        self._others = [(ranks.rank + step) % ranks.size for step in range(1, ranks.size)]  # not all to one at a time
        self._slots: list[_Slot] = []
        self._check(self._new(1))
        # A process that ends while its last barrier runs would leave the others in it. It does not wait for long: where
        # another rank has failed, nobody comes.
        weakref.finalize(self, side.settle, 5.0)

    @property
    def bytes(self) -> int:
        """Memory of the buffers on this rank."""
        return sum(slot.bytes for slot in self._slots)

    def send(self, halo, rows: Tensor, out: Tensor) -> _Way:
        way = self._take(out)
        slot = way.slot
        halo.packed(rows, slot.rows(self._ranks.rank, (halo.sent.numel(), *out.shape[1:]), out.dtype))

        def fetch() -> None:
            slot.barrier()  # all have packed
            for mine, theirs in self._pairs(slot, out, halo.num_received):
                mine.copy_(theirs)

        # The last barrier: all have fetched, for which only the slot's next use has to wait.
        way.done, slot.idle = self._side.run(self._side.mark(), fetch, slot.barrier)
        return way

    def arrive(self, way: _Way) -> None:
        self._side.wait(way.done)
        way.slot.free()

    def send_back(self, halo, grad: Tensor) -> _Way:
        way = self._take(grad)
        slot = way.slot

        def put() -> None:
            slot.barrier()  # all have summed what came before
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
        """The halo's ``rows`` of every other rank, and their place in its buffer."""
        parts = rows.split(counts)
        for rank in self._others:
            if parts[rank].numel():
                yield parts[rank], slot.rows(rank, tuple(parts[rank].shape), rows.dtype, self._begins[rank])

    # Slots -----------------------------------------------------------------------------------------------------------

    def _take(self, rows: Tensor) -> _Way:
        """A slot for rows like these, which the current stream may write and the one beside may read ``rows`` for."""
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
        """Frees slots whose exchange was dropped before its end, by an error or a gradient that nobody asked for.

        Python collects on every rank in its own time, so the ranks agree; only before memory is taken, which is rare.
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
        """Gives free slots back, on all ranks before any goes on: memory is free when nobody has it mapped."""
        kept = [slot for slot in self._slots if slot.way is not None]
        if len(kept) < len(self._slots):
            self._side.settle()
            self._slots = kept
            self._ranks.all_say("gave memory back")

    def _new(self, nbytes: int) -> _Slot:
        """A new slot, in place of those that are free, which are too small."""
        self._drop_free()
        what = f"symmetric memory of {nbytes:,} bytes"
        with normal_tensors():
            memory = _together(self._ranks, what, lambda: self._memory.take(nbytes))
            handle = _together(self._ranks, what, lambda: self._memory.share(memory))
        slot = _Slot(memory, handle, self._memory.timeout_ms, self._side.mark())
        self._slots.append(slot)
        return slot

    def _check(self, slot: _Slot) -> None:
        """Fetches the number of every other rank, so that memory which does not work is known before rows are lost."""
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
