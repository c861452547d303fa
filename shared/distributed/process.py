"""The processes that share a graph: torch.distributed's collectives, with readable errors when one fails."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Ranks", "init"]


def init(device: str = "auto", *, backend: Optional[str] = None, timeout: float = 300.0) -> torch.device:
    """Joins the process group of torchrun's processes, and chooses this process' device.

    Without torchrun's environment variables there is one process and no process group, and the same program works. An
    existing process group is used as it is.

    Args:
        device: ``"auto"`` (the GPU of this local rank where there are GPUs), ``"cpu"``, ``"cuda"``.
        backend: ``"nccl"`` or ``"gloo"``; by default NCCL for a GPU and gloo for the CPU. NCCL gets a high-priority
            stream, since exchanges would otherwise wait behind kernels that fill the GPU.
        timeout: seconds after which a collective that some rank does not join fails.
    Returns:
        The device of this process.
    Raises:
        ValueError: device is none of these.
        RuntimeError: there is no GPU for this rank, or the processes do not find one another in time.

    Example:
        >>> import edgeless.distributed as ed
        >>> ed.init("cpu")  # without torchrun there is one process
        device(type='cpu')
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"init: device must be 'auto', 'cpu' or 'cuda', got {device!r}")
    local = int(os.environ.get("LOCAL_RANK", 0))
    gpus = torch.cuda.device_count() if device != "cpu" else 0
    if device == "cuda" and local >= gpus:
        raise RuntimeError(f"init: local rank {local} needs a GPU of its own, and torch sees {gpus}")
    chosen = torch.device("cuda", local) if gpus > local else torch.device("cpu")
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if "WORLD_SIZE" not in os.environ or not dist.is_available() or dist.is_initialized():
        return chosen
    backend = backend or ("nccl" if chosen.type == "cuda" else "gloo")
    options: dict[str, Any] = {"backend": backend, "timeout": timedelta(seconds=timeout)}
    if backend == "nccl":
        options["pg_options"] = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options["device_id"] = chosen
    dist.init_process_group(**options)
    return chosen


class Ranks:
    """The processes of one graph, and their collectives.

    Before each of the first ``checked`` collectives (None: all), the ranks compare what they are about to do. Unequal
    sizes would otherwise hang until the timeout, or mix up rows.
    """

    def __init__(self, checked: Optional[int] = 64):
        alone = not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if alone else dist.get_rank()
        self.size = 1 if alone else dist.get_world_size()
        self._left = checked

    @property
    def checks(self) -> bool:
        """True if the ranks compare the next collective beforehand."""
        return self._left != 0 and self.size > 1

    def agree(self, *doing: Any) -> None:
        """Raises RuntimeError on every rank unless ``doing`` is the same on all of them."""
        if not self.checks:
            return
        if self._left is not None:
            self._left -= 1
        said = self.all_say(doing)
        if any(other != doing for other in said):
            listed = "; ".join(f"rank {rank}: {' '.join(map(str, other))}" for rank, other in enumerate(said))
            raise RuntimeError(f"edgeless.distributed: all ranks must do the same, in the same order, but {listed}")

    def all_say(self, value: Any) -> list:
        """The ``value`` of every rank, in the order of ranks."""
        if self.size == 1:
            return [value]
        said: list = [None] * self.size
        with self.failing("comparing what the ranks do"):
            dist.all_gather_object(said, value)
        return said

    def all_to_all(self, out: Tensor, rows: Tensor, received: list[int], sent: list[int]):
        """Starts sending ``sent[r]`` of ``rows`` to every rank r, and receiving ``received[r]`` from it in ``out``."""
        with self.failing("sending halo rows"):
            return dist.all_to_all_single(out, rows, received, sent, async_op=True)

    def finish(self, work) -> None:
        """Waits for :meth:`all_to_all`; on a GPU only the current stream waits."""
        with self.failing("receiving halo rows"):
            work.wait()

    def sum(self, values: Tensor) -> Tensor:
        """Sums ``values`` over the ranks, in place."""
        if self.size > 1:
            with self.failing("summing over the ranks"):
                dist.all_reduce(values)
        return values

    def of_first(self, values: Tensor) -> Tensor:
        """Broadcasts ``values`` from rank 0, in place."""
        if self.size > 1:
            with self.failing("taking the values of rank 0"):
                dist.broadcast(values, 0)
        return values

    def gather(self, rows: Tensor, sizes: list[int]) -> Tensor:
        """The rows of all ranks, ``sizes[r]`` of rank r, concatenated."""
        if self.size == 1:
            return rows
        padded = rows.new_zeros(max(sizes), *rows.shape[1:])
        padded[: rows.size(0)] = rows
        found = [torch.empty_like(padded) for _ in sizes]
        with self.failing("gathering rows"):
            dist.all_gather(found, padded)
        return torch.cat([t[:size] for t, size in zip(found, sizes)])

    @contextlib.contextmanager
    def failing(self, doing: str) -> Iterator[None]:
        """Adds to a RuntimeError of torch inside the block which collective failed, and why that happens."""
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"edgeless.distributed: {doing} failed on rank {self.rank} of {self.size}. Another rank has ended, "
                "failed before this collective or not come to it within the timeout; its own error says why. "
                f"({error})"
            ) from error
