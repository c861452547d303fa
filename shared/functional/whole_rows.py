"""Pads rows with zeros to whole vectors of 16 bytes, which the tensor-core kernels on CUDA need.

The number of classes of a last layer is seldom a multiple of four. Products with zeros cost far less than rows that
cannot be read and multiplied as vectors.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor
from torch.nn.functional import pad


def lacking(device: torch.device, rows: torch.dtype, weight: Tensor) -> tuple[int, int]:
    """Columns that the input and output rows of ``weight`` (of each block, if any) lack to be whole vectors."""
    if device.type != "cuda" or rows.itemsize > 4:
        return 0, 0
    whole = 16 // rows.itemsize
    return -weight.size(-2) % whole, -weight.size(-1) % whole


def blocks_of(weight: Tensor) -> int:
    """The number of diagonal blocks: 1 for ``[R, K, M]``, B for ``[R, B, K / B, M / B]``."""
    return weight.size(1) if weight.dim() == 4 else 1


def longer(rows: Optional[Tensor], by: int, blocks: int = 1) -> Optional[Tensor]:
    """Pads ``[..., B * K]`` to ``[..., B * (K + by)]``, with zeros behind every block."""
    if rows is None or not by:
        return rows
    return pad(rows.unflatten(-1, (blocks, -1)), (0, by)).flatten(-2)


def longer_matrices(weight: Tensor, rows: int, columns: int) -> Tensor:
    """Pads ``[..., K, M]`` to ``[..., K + rows, M + columns]``, with zeros below and to the right."""
    return pad(weight, (0, columns, 0, rows))


def shorter(rows: Tensor, by: int, blocks: int = 1) -> Tensor:
    """Cuts ``[..., B * (M + by)]`` to a contiguous ``[..., B * M]``, without the padding behind every block."""
    if not by:
        return rows
    return rows.unflatten(-1, (blocks, -1))[..., :-by].flatten(-2).contiguous()
