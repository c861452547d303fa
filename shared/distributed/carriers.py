"""What carries halo rows between processes: an all-to-all of torch.distributed everywhere, on one host the copy engine.

A carrier has the two directions of an exchange, each as a start and an end between which the caller computes: ``send``
and ``arrive`` bring own rows to those who hold them in their halo, ``send_back`` and ``come_back`` their gradients to
the owner. What the starts return is for the end alone. All ranks call them in the same order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import symmetric
from .process import Ranks

CARRIERS = ("auto", "all_to_all", "symmetric")


def choose(name: str, ranks: Ranks, sent: list[list[int]], device: torch.device):
    """The carrier that ``load(carrier=name)`` asks for. All ranks call it, and all get the same.

    Args:
        sent: ``sent[r][q]`` rows go from rank r to rank q in an exchange.
    Raises:
        RuntimeError: on every rank, where ``"symmetric"`` cannot be had.
    """
    if name == "all_to_all" or ranks.size == 1:
        return AllToAll(ranks)
    why = symmetric.refusal(ranks, device)
    if not why:
        try:
            return symmetric.connect(ranks, sent, device)
        except RuntimeError as error:  # on all ranks, which have told one another
            why = str(error)
    if name == "symmetric":
        raise RuntimeError(f"load: carrier must be 'auto' or 'all_to_all' here, got 'symmetric': {why}")
    return AllToAll(ranks, why)


class AllToAll:
    """By ``all_to_all_single``: NCCL or gloo, any number of hosts.

    Attributes:
        keeps_features: whether foreign features that a layer maps are kept where what it makes of them is no wider.
        bytes: device memory that is kept between exchanges and that torch's allocator does not count.
        why: why it is not symmetric memory, where that was to be if possible.
    """

    # Where memory is short this is the carrier: symmetric memory has buffers of its own.
    name, keeps_features, bytes = "all_to_all", False, 0

    def __init__(self, ranks: Ranks, why: str = ""):
        self._ranks, self.why = ranks, why

    def send(self, halo, rows: Tensor, out: Tensor):
        """Begins to bring the halo's rows of own ``rows`` ``[n, ...]`` to ``out`` ``[h, ...]``, contiguous."""
        packed = halo.packed(rows)  # kept until it was sent
        return self._ranks.all_to_all(out, packed, halo.num_received, halo.num_sent), packed

    def arrive(self, way) -> None:
        """From here on the current stream finds them there."""
        self._ranks.finish(way[0])

    def send_back(self, halo, grad: Tensor):
        """Begins to return gradients of the halo's rows, ``[h, ...]`` and contiguous, to the rows' owners."""
        returned = grad.new_empty(halo.sent.numel(), *grad.shape[1:])
        return self._ranks.all_to_all(returned, grad, halo.num_sent, halo.num_received), grad, returned

    def come_back(self, halo, way) -> Tensor:
        """What came back, summed for every own row: ``[n, ...]``."""
        work, _, returned = way
        self._ranks.finish(work)
        return halo.summed(returned)

    def forget(self) -> None:
        """Gives back what is kept between exchanges. All ranks call it at the same place of their program."""
