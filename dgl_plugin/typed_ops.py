"""Drop-ins for ``segment_mm`` and ``gather_mm`` of ``dgl.ops``, which ``edgeless.dgl.ops`` exports."""

from __future__ import annotations

import torch
from torch import Tensor

from edgeless import functional
from edgeless.checks import INTEGERS, compiling
from edgeless.choices.backends import NotFusedError, current_backend, explain
from edgeless.layers.adapter import typed_rows_refusals
from edgeless.layers.calls import REFERENCE, ran_fused, ran_stock

from ._autocast import as_products_read
from ._framework import stock_ops
from .generated.deferred import computed, watched_calls


def segment_mm(a, b, seglen_a):
    """Multiplies each row by the matrix of its type; rows are sorted by type.

    Args:
        a (Tensor): ``[N, F]``, sorted by type: float32, float64, bfloat16 or float16.
        b (Tensor): ``[R, F, C]`` of the same dtype.
        seglen_a (Tensor): ``[R]`` integers on any device, the number of rows of each type.

    Returns:
        Tensor ``[N, C]`` of the same dtype; under autocast, of the autocast dtype.

    Raises:
        ValueError: the lengths do not add up to N; DGL's CPU function does not check this.

    Example:
        >>> import torch
        >>> from edgeless.dgl import ops
        >>> ops.segment_mm(torch.ones(3, 2), torch.tensor([[[1.0], [1.0]], [[2.0], [2.0]]]), torch.tensor([1, 2]))
        tensor([[2.],
                [4.],
                [4.]])
    """
    if not compiling() and watched_calls():
        a, b, seglen_a = computed((a, b, seglen_a))
    if _runs_fused(segment_mm, a, b, seglen_a):
        return functional.segment_mm(*as_products_read(a, b), seglen_a.to(a.device))
    return stock_ops.segment_mm(a, b, seglen_a)


def gather_mm(a, b, *, idx_b):
    """Multiplies each row by the matrix of its type: row i of the result is ``a[i] @ b[idx_b[i]]``.

    Args:
        a (Tensor): ``[N, F]``: float32, float64, bfloat16 or float16.
        b (Tensor): ``[R, F, C]`` of the same dtype.
        idx_b (Tensor): ``[N]`` integers, the type of every row.

    Returns:
        Tensor ``[N, C]`` of the same dtype; under autocast, of the autocast dtype.

    Raises:
        IndexError: a type is negative or not below R.

    Example:
        >>> import torch
        >>> from edgeless.dgl import ops
        >>> matrices = torch.tensor([[[1.0], [1.0]], [[2.0], [2.0]]])
        >>> ops.gather_mm(torch.ones(3, 2), matrices, idx_b=torch.tensor([1, 0, 1]))
        tensor([[4.],
                [2.],
                [4.]])
    """
    if not compiling() and watched_calls():
        a, b, idx_b = computed((a, b, idx_b))
    if _runs_fused(gather_mm, a, b, idx_b=idx_b):
        return functional.gather_mm(*as_products_read(a, b), idx_b)
    return stock_ops.gather_mm(a, b, idx_b=idx_b)


def _runs_fused(function, *inputs, **kwargs) -> bool:
    choice, refusals = current_backend(), [REFERENCE]
    if choice != "reference" and not (refusals := function._fusion_refusals(*inputs, **kwargs)):
        ran_fused(function, function, None)
        return True
    if choice == "fused":
        raise NotFusedError(str(explain(function, *inputs, **kwargs)))
    ran_stock(function, function, refusals)
    return False


def _segment_refusals(a, b, seglen_a) -> list[str]:
    if not isinstance(b, Tensor) or b.dim() != 3:
        return ["b is not a Tensor of shape [R, F, C]"]
    if not isinstance(seglen_a, Tensor) or seglen_a.dtype not in INTEGERS or tuple(seglen_a.shape) != (b.size(0),):
        return [f"seglen_a is no Tensor of {b.size(0)} integers"]
    rows = a.size(0) if isinstance(a, Tensor) and a.dim() else 0
    types = torch.empty(rows, dtype=torch.int32, device=b.device)
    return typed_rows_refusals(a, types, b.size(1), b)


def _gather_refusals(a, b, *, idx_b) -> list[str]:
    if not isinstance(b, Tensor) or b.dim() != 3:
        return ["b is not a Tensor of shape [R, F, C]"]
    return typed_rows_refusals(a, idx_b, b.size(1), b)


segment_mm._fusion_refusals = _segment_refusals
gather_mm._fusion_refusals = _gather_refusals
