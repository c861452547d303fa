"""The states of the random generators at the start of a call, so that a function can be called again with them."""

from __future__ import annotations

import torch


class Generators:
    """The states of torch's generators of the CPU and of a device, which can be restored."""

    def __init__(self, device: torch.device):
        self._device, self._states = device, self._now(device)

    @staticmethod
    def _now(device: torch.device) -> list[torch.Tensor]:
        cuda = device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if cuda else [])]

    def have_drawn(self) -> bool:
        """Returns whether random numbers were drawn since."""
        now = self._now(self._device)
        return any(not torch.equal(a, b) for a, b in zip(self._states, now))

    def restore(self) -> None:
        """Restores the states."""
        torch.set_rng_state(self._states[0])
        if len(self._states) > 1:
            torch.cuda.set_rng_state(self._states[1], self._device)
