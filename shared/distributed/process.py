"""The processes that share a graph: torch.distributed as it is, and what makes its failures readable."""

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
    """Joins the processes that torchrun started, and chooses this one's device.

    Without torchrun's variables there is one process and no process group: everything works the same. A process group
    that exists already is used as it is.

    Args:
        device: ``"auto"`` (the GPU of this local rank where there are GPUs), ``"cpu"``, ``"cuda"``.
        backend: ``"nccl"`` or ``"gloo"``; by default what suits the device. NCCL runs on a stream of high priority,
            without which exchanges wait behind kernels that fill the GPU.
        timeout: seconds after which a collective that some rank does not join is an error.
    Returns:
        The device of this process.
    Raises:
        ValueError: device is none of these.
        RuntimeError: there is no GPU for this rank, or the processes do not find one another in time.
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

    The first ``checked`` collectives (None: all) compare beforehand what every rank is about to do: unequal sizes would
    hang until the timeout, or be taken for one another's rows.
    """

    def __init__(self, checked: Optional[int] = 64):
        alone = not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if alone else dist.get_rank()
        self.size = 1 if alone else dist.get_world_size()
        self._left = checked

    @property
    def checks(self) -> bool:
        """Whether the next collective is compared beforehand."""
        return self._left != 0 and self.size > 1

    def agree(self, *doing: Any) -> None:
        """Raises RuntimeError on every rank unless all of them say the same."""
        if not self.checks:
            return
        if self._left is not None:
            self._left -= 1
        said = self.all_say(doing)
        if any(other != doing for other in said):
            listed = "; ".join(f"rank {rank}: {' '.join(map(str, other))}" for rank, other in enumerate(said))
            raise RuntimeError(f"edgeless.distributed: all ranks must do the same, in the same order, but {listed}")

    def all_say(self, value: Any) -> list:
        """``value`` of every rank."""
        if self.size == 1:
            return [value]
        said: list = [None] * self.size
        with self.failing("comparing what the ranks do"):
            dist.all_gather_object(said, value)
        return said

    def all_to_all(self, out: Tensor, rows: Tensor, received: list[int], sent: list[int]):
        """Begins to send ``sent[r]`` of ``rows`` to every rank r, and to receive ``received[r]`` of each in ``out``."""
        with self.failing("sending halo rows"):
            return dist.all_to_all_single(out, rows, received, sent, async_op=True)

    def finish(self, work) -> None:
        """Waits for :meth:`all_to_all`; on a GPU the current stream does."""
        with self.failing("receiving halo rows"):
            work.wait()

    def sum(self, values: Tensor) -> Tensor:
        """``values`` summed over the ranks, in place."""
        if self.size > 1:
            with self.failing("summing over the ranks"):
                dist.all_reduce(values)
        return values

    def of_first(self, values: Tensor) -> Tensor:
        """``values`` of rank 0, in place."""
        if self.size > 1:
            with self.failing("taking the values of rank 0"):
                dist.broadcast(values, 0)
        return values

    def gather(self, rows: Tensor, sizes: list[int]) -> Tensor:
        """The rows of all ranks, ``sizes[r]`` of rank r, one after the other."""
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
        """What torch raises in here, in words."""
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"edgeless.distributed: {doing} failed on rank {self.rank} of {self.size}. Another rank has ended, "
                "failed before this collective or not come to it within the timeout; its own error says why. "
                f"({error})"
            ) from error
