"""Prepares torch's optimizers for CUDA graphs: step counters on the GPU, and learning rates that are tensors."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["Prepared"]

#  all their implementations accept tensors; other optimizers only if they are fused.
_TAKE_TENSORS = (torch.optim.Adam, torch.optim.AdamW)


class Prepared:
    """Optimizers whose steps can be captured, if torch supports that.

    Args:
        optimizers: the optimizers; the first :meth:`renew` changes those whose parameters are on devices of ``kind``.
        kind: the type of the device, ``"cuda"``.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer], kind: str):
        self._optimizers = list(optimizers)
        self._kind = kind
        self._rates: dict[tuple[int, int], Tensor] = {}  # the tensor that recordings read, by optimizer and group

    def renew(self) -> None:
        """Makes all groups capturable, and writes learning rates that were replaced into the tensors.

        Groups change by new groups, by checkpoints, and by schedulers of torch versions that do not write to tensors.
        """
        for place, optimizer in enumerate(self._optimizers):
            for number, group in enumerate(optimizer.param_groups):
                rate = self._rates.get((place, number))
                if rate is None or group["lr"] is not rate or not group.get("capturable", True):
                    self._prepare(optimizer, group, (place, number), rate)

    def _prepare(self, optimizer, group: dict, place: tuple[int, int], rate: Tensor | None) -> None:
        parameters = group["params"]
        if not parameters or any(p.device.type != self._kind for p in parameters):
            return
        if "capturable" in group and not group["capturable"]:
            optimizer._warned_capturable_if_run_uncaptured = True  # torch need not warn: some calls run uncaptured
            group["capturable"] = True
            for p in parameters:
                step = optimizer.state.get(p, {}).get("step")
                if step is not None:
                    optimizer.state[p]["step"] = torch.as_tensor(step, dtype=torch.float32, device=p.device)
        given = group["lr"]
        if rate is not None:
            rate.copy_(given) if isinstance(given, Tensor) else rate.fill_(given)
        elif isinstance(optimizer, _TAKE_TENSORS) or group.get("fused") or isinstance(given, Tensor):
            rate = torch.as_tensor(given, dtype=torch.float32, device=parameters[0].device)
        if rate is not None:
            group["lr"] = self._rates[place] = rate
