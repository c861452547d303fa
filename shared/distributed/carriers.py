"""Carriers transport halo rows between processes: by an all-to-all of torch.distributed or, on one host, by the GPUs'
copy engines.

A carrier has the two directions of an exchange, each split into a start and an end between which the caller computes:
``send`` and ``arrive`` bring own rows to the ranks that have them in their halo, ``send_back`` and ``come_back`` return
the gradients to the owners. The result of a start is an opaque handle for its end. All ranks make the same calls in the
same order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import symmetric
from .process import Ranks

CARRIERS = ("auto", "all_to_all", "symmetric")


def choose(name: str, ranks: Ranks, sent: list[list[int]], device: torch.device):
    """The carrier of ``load(carrier=name)``. All ranks call it, and all get the same kind.

    Args:
        sent: an exchange sends ``sent[r][q]`` rows from rank r to rank q.
    Raises:
        RuntimeError: on every rank, where ``"symmetric"`` is unsupported.
    """
    if name == "all_to_all" or ranks.size == 1:
        return AllToAll(ranks)
    why = symmetric.refusal(ranks, device)
    if not why:
        try:
            return symmetric.connect(ranks, sent, device)
        except RuntimeError as error:  # connect raises on all ranks or on none
            why = str(error)
    if name == "symmetric":
        raise RuntimeError(f"load: carrier must be 'auto' or 'all_to_all' here, got 'symmetric': {why}")
    return AllToAll(ranks, why)


class AllToAll:
    """Carries rows by ``all_to_all_single``: NCCL or gloo, any number of hosts.

    Attributes:
        keeps_features: whether to cache halo features that a layer maps even if the mapped rows are no wider.
        bytes: device memory kept between exchanges outside torch's allocator.
        why: the unsupported reason of symmetric memory, where ``"auto"`` would have preferred it.
    """

    # False, since this is the carrier for little memory: symmetric memory needs buffers of its own.
    name, keeps_features, bytes = "all_to_all", False, 0

    def __init__(self, ranks: Ranks, why: str = ""):
        self._ranks, self.why = ranks, why

    def send(self, halo, rows: Tensor, out: Tensor):
        """Starts sending own ``rows`` ``[n, ...]`` and receiving halo rows in ``out`` ``[h, ...]``, contiguous."""
        packed = halo.packed(rows)  # the handle keeps it alive until it is sent
        return self._ranks.all_to_all(out, packed, halo.num_received, halo.num_sent), packed

    def arrive(self, way) -> None:
        """Makes the current stream wait until the halo rows of ``send`` have arrived in ``out``."""
        self._ranks.finish(way[0])

    def send_back(self, halo, grad: Tensor):
        """Starts returning the gradients of halo rows, ``[h, ...]`` and contiguous, to the rows' owners."""
        returned = grad.new_empty(halo.sent.numel(), *grad.shape[1:])
        return self._ranks.all_to_all(returned, grad, halo.num_sent, halo.num_received), grad, returned

    def come_back(self, halo, way) -> Tensor:
        """The returned gradients, summed per own row: ``[n, ...]``."""
        work, _, returned = way
        self._ranks.finish(work)
        return halo.summed(returned)

    def forget(self) -> None:
        """Frees memory kept between exchanges. All ranks call it at the same place of their program."""
