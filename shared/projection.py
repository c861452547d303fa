"""The linear maps in front of a layer's kernel and the bias behind it: on large CPU graphs most of a layer's time.

A layer calls its submodules unless that is known to be the same as the compiled op: see :func:`is_plain`.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.modules import module as _module

from .adapter import is_hooked
from .autocast import autocasts
from .graph_checks import compiling
from .ops import projection as _projection_op  # noqa: F401  registers the autograd of the ops

# Numbers of the results from which on the op is faster: below 4 MB, first touches of memory cost little.
_LEAST = 1 << 20
_PLAIN = (Tensor, Parameter)


def is_plain(linear: nn.Module, kinds: tuple[type, ...] = (nn.Linear,)) -> bool:
    """Whether calling ``linear`` does nothing but ``x @ weight.T + bias``: no subclass, no hooks."""
    return type(linear) in kinds and not (
        is_hooked(linear)
        or _module._global_forward_hooks
        or _module._global_forward_pre_hooks
        or _module._global_backward_hooks
        or _module._global_backward_pre_hooks
        or "forward" in linear.__dict__
    )


def pays(x: Tensor, width: int) -> bool:
    """Whether maps of ``x`` ``[N, F]`` to ``width`` numbers a row should be one op: large, float32, on the CPU."""
    return (
        x.device.type == "cpu"
        and type(x) in _PLAIN
        and x.dtype == torch.float32
        and x.dim() == 2
        and x.size(0) * width >= _LEAST
        and not autocasts("cpu")
        and not compiling()
    )


def project(x: Tensor, *linears: nn.Module, kinds: tuple[type, ...] = (nn.Linear,)) -> list[Tensor]:
    """``[linear(x) for linear in linears]`` for ``x`` ``[N, F]``, in one op where that is the same and faster.

    Args:
        kinds: the classes whose forward is ``x @ weight.T + bias``.
    """
    if x.device.type != "cpu" or not all(is_plain(linear, kinds) for linear in linears):
        return [linear(x) for linear in linears]
    weights = [linear.weight for linear in linears]
    biases = [linear.bias for linear in linears]
    if not _fits(x, weights, biases):
        return [linear(x) for linear in linears]
    return torch.ops.edgeless.project(x, weights, biases)


def project_with_logits(x: Tensor, linear: nn.Module, *vectors: Tensor, kinds=(nn.Linear,)) -> Optional[list[Tensor]]:
    """``y = linear(x)`` ``[N, H * C]`` and ``(y * a).sum(-1)`` ``[N, H]`` for every ``a`` ``[1, H, C]``, in one op.

    The logits are linear in x, so the vectors are applied to the weight and not to y. None where the submodule has to
    be called, or where that is as fast.
    """
    if x.device.type != "cpu" or not is_plain(linear, kinds) or linear.bias is not None:
        return None
    weight = linear.weight
    if not _fits(x, [weight], list(vectors)):
        return None
    _, heads, channels = vectors[0].shape
    per_head = weight.view(heads, channels, -1)
    logits = [torch.einsum("hcf,hc->hf", per_head, a[0]) for a in vectors]
    return torch.ops.edgeless.project(x, [weight, *logits], [None] * (1 + len(logits)))


def product(x: Tensor, weight: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    """``x @ weight``, and ``+ bias``, for ``x`` ``[N, F]`` and ``weight`` ``[F, C]``."""
    if weight.dim() == 2 and _fits(x, [weight.t()], [bias]):
        return torch.ops.edgeless.project(x, [weight.t()], [bias])[0]
    return torch.matmul(x, weight) if bias is None else torch.addmm(bias, x, weight)


def add(x: Tensor, y: Tensor, own: bool) -> Tensor:
    """``x + y``; in place of a large x where nobody else has it and its gradient does not need it (``own``)."""
    if own and x.dim() == 2 and pays(x, x.size(1)) and type(y) in _PLAIN and y.shape == x.shape and y.dtype == x.dtype:
        return x.add_(y)
    return x + y


def add_row(x: Tensor, row: Tensor) -> Tensor:
    """``x + row`` for ``x`` ``[N, F]`` and ``row`` ``[F]``; a large result lies on large pages."""
    if x.dim() == 2 and pays(x, x.size(1)) and type(row) in _PLAIN and row.dtype == x.dtype and row.device == x.device:
        return torch.ops.edgeless.add_row(x, row)
    return x + row


def _fits(x: Tensor, weights: list[Tensor], biases: list[Optional[Tensor]]) -> bool:
    width = sum(weight.size(0) for weight in weights)
    return (
        pays(x, width)
        and all(weight.size(1) == x.size(1) for weight in weights)  # else torch knows the error
        and all(
            t is None or (type(t) in _PLAIN and t.dtype == torch.float32 and t.device.type == "cpu")
            for t in (*weights, *biases)
        )
    )
