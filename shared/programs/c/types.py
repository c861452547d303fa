"""Types and numbers of C."""

from __future__ import annotations

import math

import torch

from ..lowering.items import NotLowered

_TYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.int64: "long",
    torch.int32: "int",
    torch.int16: "short",
    torch.int8: "signed char",
    torch.uint8: "unsigned char",
    torch.bool: "unsigned char",
}


def scalar_type(dtype: torch.dtype) -> str:
    """The type of a scalar."""
    return "int" if dtype is torch.bool else memory_type(dtype)


def memory_type(dtype: torch.dtype) -> str:
    """The type of an element in memory."""
    if dtype not in _TYPES:
        raise NotLowered(f"{str(dtype).replace('torch.', '')} on the CPU")
    return _TYPES[dtype]


def literal(value, dtype: torch.dtype) -> str:
    """A number in C."""
    if not dtype.is_floating_point:
        return f"({scalar_type(dtype)}){int(value)}L"
    suffix = "f" if dtype is torch.float32 else ""
    value = float(value)
    if math.isnan(value):
        return f'__builtin_nan{suffix}("")'
    if math.isinf(value):
        return f"{'-' if value < 0 else ''}__builtin_inf{suffix}()"
    return value.hex() + suffix


def suffix(dtype: torch.dtype) -> str:
    """The suffix of the names of math.h's functions for a dtype."""
    return "f" if dtype is torch.float32 else ""


def bytes_of(dtype: torch.dtype) -> int:
    """The bytes of an element."""
    return torch.empty((), dtype=dtype).element_size()
