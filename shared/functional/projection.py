"""The linear maps before a layer's kernel and the bias after it: most of a layer's time on large CPU graphs, most of
its launches on CUDA.

A layer calls its submodules unless the compiled op is known to be equivalent: see
:func:`edgeless.layers.adapter.is_plain`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Optional

import torch
from torch import Tensor, nn

from ..autocast import autocasts, cuda_autocast_dtype
from ..checks import COMPUTED_IN_FLOAT32, FLOATS, PLAIN, compiling
from ..layers.adapter import is_plain
from ..ops import projection as _projection_op  # noqa: F401  registers the fake kernels of the ops

# Least number of result elements for which the op is profitable on the CPU: below 4 MB, page faults cost little.
_LEAST = 1 << 20
_WIDE = 2048  # columns of a row: the maps of one input hardly ever have more in all
# On the CPU, most elements of a map's input or result for which the time of its module is mostly Python's
# (docs/decisions/0066). core_cuda/projection/projection_cpu.cpp knows this number as kFew.
_FEW = 1 << 17
_PROJECT_SUM = torch.ops.edgeless.project_sum.default


def are_own_rows(rows: Tensor, linears: Iterable[nn.Module], kinds: tuple[type, ...] = (nn.Linear,)) -> bool:
    """Returns whether only the attention uses the outputs of ``linears``, since no hook has seen them: the attention's
    backward may then overwrite them. CPU only; on CUDA, layers that are one node of autograd overwrite outputs
    themselves.
    """
    return rows.device.type == "cpu" and all(is_plain(linear, kinds) for linear in linears)


def pays(x: Tensor, width: int) -> bool:
    """Returns whether one op for the maps of ``x`` ``[N, F]`` to ``width`` columns is profitable: on CUDA, and on the
    CPU for large float32 results.
    """
    if type(x) not in PLAIN or x.layout is not torch.strided or x.dim() != 2 or x.dtype not in FLOATS or compiling():
        return False
    if x.is_cuda:
        return True
    return x.device.type == "cpu" and x.dtype == torch.float32 and x.size(0) * width >= _LEAST and not autocasts("cpu")


def _calls_modules(x: Tensor, linears: Sequence[nn.Module] = (), joined: bool = True) -> bool:
    """Returns whether to call the modules of the maps without further checks: ``x`` is on the CPU and has so few rows
    that the checks take longer than the maps.

    Args:
        joined: whether the maps would be one op together, or one op each.
    """
    if not x.is_cpu or compiling():  # a compiler would guard on the size
        return False
    rows = x.size(0)
    if rows * _WIDE < _LEAST:
        return True
    weights = [linear._parameters.get("weight") for linear in linears]
    if not weights or any(type(weight) not in PLAIN or weight.dim() != 2 for weight in weights):
        return False
    widths = [weight.size(0) for weight in weights]
    return rows * (sum(widths) if joined else max(widths)) < _LEAST


def small_weights(
    xs: Sequence[Tensor], linears: Sequence[nn.Module], kinds: tuple[type, ...]
) -> Optional[list[Tensor]]:
    """Returns the weights of ``linears`` if one op should compute ``linears[0](xs[0]) + linears[1](xs[1]) + ...``: the
    maps are small, on the CPU and in float32, and only the first has a bias. Their modules then spend most of their
    time in Python. Else returns None.
    """
    if compiling() or autocasts("cpu"):
        return None
    rows, width, weights = xs[0].size(0), None, []
    for x, linear in zip(xs, linears):  # one loop without helpers: every call of a layer runs it
        if type(x) not in PLAIN or x.dtype is not torch.float32 or not x.is_cpu or x.layout is not torch.strided:
            return None
        if not is_plain(linear, kinds):
            return None
        weight, bias = linear._parameters["weight"], linear._parameters["bias"]
        if type(weight) not in PLAIN or weight.dtype is not torch.float32 or not weight.is_cpu:
            return None
        if x.dim() != 2 or weight.dim() != 2 or weight.layout is not torch.strided or x.size(0) != rows:
            return None
        outputs, inputs = weight.shape
        if rows * max(outputs, inputs) >= _FEW or x.size(1) != inputs or width not in (None, outputs):
            return None
        if bias is not None:
            if width is not None or type(bias) not in PLAIN or bias.dtype is not torch.float32 or not bias.is_cpu:
                return None
            if bias.layout is not torch.strided or bias.shape != (outputs,):
                return None
        width = outputs
        weights.append(weight)
    return weights


def _pays_in_program(x: Tensor) -> bool:
    """Returns whether the op is profitable in a torch.compile program: for float32 on CUDA, where its products are
    faster.
    """
    if type(x) not in PLAIN or x.layout is not torch.strided or x.dim() != 2:
        return False
    if x.dtype != torch.float32 or not x.is_cuda:
        return False
    return compiling() and not autocasts("cuda")


def project(
    x: Tensor,
    *linears: nn.Module,
    kinds: tuple[type, ...] = (nn.Linear,),
    joined: int = 0,
    heads: Sequence[int] = (),
) -> list[Tensor]:
    """``[linear(x) for linear in linears]`` for ``x`` ``[N, F]``, in one op where that is equivalent and profitable.

    Args:
        kinds: the classes whose forward is ``x @ weight.T + bias``.
        joined: how many of the first results may be views of one tensor, whose memory lives as long as any of them.
        heads: for every map, the number of heads of its result ``[N, heads, C]``, or 0 for ``[N, C]``.
    """
    called = _calls_modules(x, linears) or x.device.type not in ("cpu", "cuda")
    if not called and all(is_plain(linear, kinds) for linear in linears):
        weights = [linear.weight for linear in linears]
        if (outs := _project(x, weights, [linear.bias for linear in linears], joined, heads)) is not None:
            return outs
    outs = [linear(x) for linear in linears]
    if not any(heads):
        return outs
    return [out.view(*out.shape[:-1], n, out.size(-1) // n) if n else out for out, n in zip(outs, heads)]


def project_sum(xs: Sequence[Tensor], linears: Sequence[nn.Module], kinds=(nn.Linear,)) -> Tensor:
    """``linears[0](xs[0]) + linears[1](xs[1]) + ...``, in one op where that is equivalent and profitable."""
    if _calls_modules(xs[0], linears, joined=False):
        if (weights := small_weights(xs, linears, kinds)) is not None:
            return _PROJECT_SUM(xs, weights, linears[0].bias, None)
        out = linears[0](xs[0])
        for x, linear in zip(xs[1:], linears[1:]):
            out = linear(x) + out
        return out
    if all(is_plain(linear, kinds) for linear in linears) and all(linear.bias is None for linear in linears[1:]):
        weights, bias = [linear.weight for linear in linears], linears[0].bias
        if all(fits(x, [w], [bias if i == 0 else None]) for i, (x, w) in enumerate(zip(xs, weights))):
            x, rounded = xs[0], rounds(xs)
            if all(len(t) == len(x) and (rounded or t.dtype == x.dtype) for t in xs[1:]):
                return torch.ops.edgeless.project_sum(xs, weights, bias, cuda_autocast_dtype() if rounded else None)
    (out,) = project(xs[0], linears[0], kinds=kinds)
    for x, linear in zip(xs[1:], linears[1:]):
        out = add(project(x, linear, kinds=kinds)[0], out, own=is_plain(linear, kinds))
    return out


def project_with_logits(x: Tensor, linear: nn.Module, *vectors: Tensor, kinds=(nn.Linear,)) -> Optional[list[Tensor]]:
    """``y = linear(x)`` ``[N, H * C]`` and ``(y * a).sum(-1)`` ``[N, H]`` for every ``a`` ``[1, H, C]``, in one op.

    The logits are linear in x, so the op applies the vectors to the weight and not to y. Returns None where the
    submodule must be called, or where calling it is as fast.
    """
    if x.device.type != "cpu" or _calls_modules(x, (linear,)) or not is_plain(linear, kinds) or linear.bias is not None:
        return None
    weight = linear.weight
    if not fits(x, [weight], list(vectors)):
        return None
    _, heads, channels = vectors[0].shape
    per_head = weight.view(heads, channels, -1)
    logits = [torch.einsum("hcf,hc->hf", per_head, a.squeeze(0)) for a in vectors]
    return torch.ops.edgeless.project(x, [weight, *logits], [None] * (1 + len(logits)))


def node_logits(x: Tensor, *vectors: Tensor) -> Optional[list[Tensor]]:
    """``(x * a).sum(-1)`` ``[N, H]`` for ``x`` ``[N, H, C]`` and every ``a`` ``[1, H, C]``, in the dtype of ``x * a``
    but without that tensor; None for dtypes and tensors that the op does not support.
    """
    dtype = vectors[0].dtype
    if x.device.type not in ("cpu", "cuda") or type(x) not in PLAIN or x.dim() != 3 or x.dtype not in FLOATS:
        return None
    if any(type(a) not in PLAIN or a.dtype != dtype or a.device != x.device for a in vectors):
        return None
    if dtype != x.dtype and (dtype != torch.float32 or x.dtype == torch.float64):
        return None
    return torch.ops.edgeless.node_logits(x, vectors)


def product(x: Tensor, weight: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    """``x @ weight``, and ``+ bias``, for ``x`` ``[N, F]`` and ``weight`` ``[F, C]``."""
    if weight.dim() == 2 and (outs := _project(x, [weight.t()], [bias])) is not None:
        return outs[0]
    return torch.matmul(x, weight) if bias is None else torch.addmm(bias, x, weight)


def products(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Optional[Tensor]]) -> list[Tensor]:
    """``[F.linear(x, weight, bias), ...]`` for ``x`` ``[N, F]``, in one op where that is profitable."""
    if not _calls_modules(x) and (outs := _project(x, list(weights), list(biases))) is not None:
        return outs
    return [nn.functional.linear(x, weight, bias) for weight, bias in zip(weights, biases)]


def add(x: Tensor, y: Tensor, own: bool) -> Tensor:
    """``x + y``. ``own``: nobody else holds x and no gradient needs it, so the sum may overwrite it."""
    if own and pays(x, x.size(-1)) and type(y) in PLAIN and y.shape == x.shape and y.dtype == x.dtype:
        return x.add_(y)
    return x + y


def add_row(x: Tensor, row: Tensor) -> Tensor:
    """``x + row`` for ``x`` ``[N, F]`` and ``row`` ``[F]``; torch broadcasts any other row, or raises its own error."""
    alike = type(row) in PLAIN and row.dtype == x.dtype and row.device == x.device and row.shape == x.shape[1:]
    return torch.ops.edgeless.add_row(x, row) if alike and pays(x, x.size(-1)) else x + row


def add_map(out: Tensor, x: Optional[Tensor], weight: Optional[Tensor], bias: Optional[Tensor]) -> Tensor:
    """``out + x @ weight + bias`` for ``out`` ``[N, C]``, ``x`` ``[N, F]`` and ``weight`` ``[F, C]``."""
    if weight is not None:
        # Under autocast, a bias inside the product and its gradient would be rounded to 16 bits.
        if bias is not None and bias.dtype == x.dtype == out.dtype and not autocasts(x.device.type):
            return out + product(x, weight, bias)
        out = out + product(x, weight)
    return out if bias is None else add_row(out, bias)


def add_row_to_heads(x: Tensor, row: Tensor) -> Tensor:
    """``x + row`` as ``[N, H * C]`` for ``x`` ``[N, H, C]`` and ``row`` ``[H * C]``."""
    fits = type(row) in PLAIN and row.dtype == x.dtype and row.device == x.device
    if fits and type(x) in PLAIN and x.is_cuda and x.dtype in FLOATS and not compiling():
        return torch.ops.edgeless.add_row(x, row)
    return add_row(x.view(-1, row.size(0)), row)


def _project(
    x: Tensor, weights: list[Tensor], biases: list[Optional[Tensor]], joined: int = 0, heads: Sequence[int] = ()
) -> Optional[list[Tensor]]:
    """:func:`project` by the op; None where the op does not support the tensors or torch is to raise the error."""
    if not fits(x, weights, biases):
        return None
    if compiling():  # a compiler assumes that results share no memory
        joined = 0
    dtype = cuda_autocast_dtype() if rounds([x]) else None
    return torch.ops.edgeless.project(x, weights, biases, joined, dtype, heads)


def rounds(xs: Sequence[Tensor]) -> bool:
    """Returns whether autocast rounds these inputs of maps; it never rounds float64."""
    return all(x.is_cuda and x.dtype in COMPUTED_IN_FLOAT32 for x in xs) and autocasts("cuda")


def fits(x: Tensor, weights: list[Tensor], biases: list[Optional[Tensor]]) -> bool:
    """Returns whether the ops support maps of ``x`` by these weights and biases without a conversion."""
    width = sum(weight.size(0) for weight in weights if type(weight) in PLAIN)
    if not (pays(x, width) or _pays_in_program(x)):
        return False
    if any(type(w) not in PLAIN or w.dim() != 2 or w.size(1) != x.size(1) for w in weights):
        return False
    others = [t for t in (*weights, *biases) if t is not None]
    if any(type(t) not in PLAIN or t.device != x.device or t.layout is not torch.strided for t in others):
        return False
    if all(t.dtype == x.dtype for t in others):
        return True
    return x.is_cuda and autocasts("cuda") and all(t.dtype in COMPUTED_IN_FLOAT32 for t in (x, *others))
