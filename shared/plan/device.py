"""The devices that calls are planned for: the present one, a named one, or one that this thread plans for."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Optional

import torch

from .. import _C

__all__ = ["DEVICES", "Device", "dtype_name", "planned", "planned_for"]


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Device:
    """The properties of a device that plans and rooflines depend on.

    Attributes:
        multiprocessors, l2_bytes, shared_bytes, clusters: as CUDA reports them; ``shared_bytes`` is the opt-in limit of
            shared memory per block. Zero for a CPU, whose kernels choose by the row alone.
        capability: the compute capability, 80 for 8.0; zero for a CPU.
        hbm_roof: measured bandwidth in bytes per second of a bare gather of rows from a set much larger than the L2; 0
            where it was not measured.
        gather_roofs: the same by the bytes of the set that is gathered from, in ascending order; between two sizes the
            bandwidth is interpolated.
    """

    name: str
    multiprocessors: int = 0
    l2_bytes: int = 0
    shared_bytes: int = 0
    clusters: bool = False
    hbm_roof: float = 0.0
    gather_roofs: tuple[tuple[int, float], ...] = ()
    capability: int = 0

    @classmethod
    def of(cls, device: torch.device) -> Device:
        """The device of a tensor."""
        if device.type != "cuda":
            return cls(f"CPU ({_C.cpu_capability()})")
        if (other := planned()) is not None:
            return other
        if not torch.cuda.is_available():  # tracing for a GPU of another machine, where the ops decide again
            return DEVICES["h200"]
        index = torch.cuda.current_device() if device.index is None else device.index
        found = torch.cuda.get_device_properties(device)
        known = next((d for d in DEVICES.values() if d.name in found.name), cls(found.name))
        return replace(
            known,
            name=found.name,
            multiprocessors=found.multi_processor_count,
            l2_bytes=found.L2_cache_size,
            shared_bytes=_C.shared_bytes_of_block(index),  # older versions of torch do not say
            clusters=found.major >= 9,
            capability=10 * found.major + found.minor,
        )

    def gather_roof(self, gathered: int) -> float:
        """The bandwidth, in bytes per second, of a gather from a set of ``gathered`` bytes; 0 where not measured."""
        for (low, fast), (high, slow) in itertools.pairwise(self.gather_roofs):
            if gathered <= low:
                return fast
            if gathered < high:
                return fast + (slow - fast) * (gathered - low) / (high - low)
        return self.hbm_roof

    def most_fused_width(self, dtype: torch.dtype, wide_index: bool) -> int:
        """:func:`edgeless.plan.most_fused_width` on this device."""
        return _C.most_fused_width(
            dtype=dtype_name(dtype), wide_index=wide_index, capability=self.capability, shared_bytes=self.shared_bytes
        )


# The gather bandwidths were measured on an H200 with rows of 128 bytes and more of synthetic replicas, 2026-11-21.
_H200_GATHERS = ((45 * 2**20, 9.3e12), (82 * 2**20, 7.7e12), (330 * 2**20, 6.2e12), (400 * 2**20, 4.7e12))
DEVICES = {
    "h200": Device("H200", 132, 60 * 2**20, 232448, True, 4.7e12, _H200_GATHERS, 90),
    "a100": Device("A100", 108, 40 * 2**20, 166912, False, capability=80),
    "rtx4090": Device("RTX 4090", 128, 72 * 2**20, 101376, False, capability=89),
    "rtx5090": Device("RTX 5090", 170, 96 * 2**20, 101376, True, capability=120),
}


_planned: ContextVar[Optional[Device]] = ContextVar("planned", default=None)


def planned() -> Optional[Device]:
    """The device of :func:`planned_for`, or None."""
    return _planned.get()


@contextlib.contextmanager
def planned_for(device: Device) -> Iterator[None]:
    """Within this context tensors on any GPU are planned for ``device``; this thread's calls must be on stand-ins."""
    token = _planned.set(device)
    try:
        yield
    finally:
        _planned.reset(token)
