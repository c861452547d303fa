"""The closed list of pointwise ops: how primitives make each op of ATen.

To add an op, register a function with ``@op("name")``. It gets items (broadcast later, cast to the result's dtype) and
numbers as the op's arguments, and returns an item. A new primitive gets its text in
:data:`edgeless.programs.lowering.scalar_texts.TEXTS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Union

import torch

from ..front.ops import tolerance
from .items import Item, NotLowered, apply, cast, number

Value = Union[Item, int, float, bool]
OPS: dict[str, Callable[..., Item]] = {}
COMPARISONS = {"lt", "le", "gt", "ge", "eq", "ne"}
MIXED = {"where", "masked_fill"} | COMPARISONS  # ops whose operands are not all cast to the result's dtype


def op(*names: str):
    """Registers a function that makes an op of ATen of primitives."""

    def register(function):
        OPS.update(dict.fromkeys(names, function))
        return function

    return register


def same(*names: str) -> None:
    """Registers ops for which there is a primitive of the same name."""
    for name in names:
        OPS[name] = lambda *args, name=name: apply(name, *args)


same("exp", "log", "log1p", "tanh", "sqrt", "neg", "floor", "ceil", "trunc", "atan2", "hypot", "round")
same(
    "expm1", "exp2", "log2", "log10", "erf", "erfc", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "fmod"
)

add = lambda a, b: apply("add", a, b)  # noqa: E731
sub = lambda a, b: apply("sub", a, b)  # noqa: E731
mul = lambda a, b: apply("mul", a, b)  # noqa: E731
div = lambda a, b: apply("div", a, b)  # noqa: E731


def compare(name: str, a: Value, b: Value) -> Item:
    """A comparison as a bool."""
    return apply(name, a, b, dtype=torch.bool)


def where(condition: Item, a: Value, b: Value, dtype=None) -> Item:
    """``a`` where the condition holds, else ``b``."""
    dtype = dtype or next(x for x in (a, b) if isinstance(x, Item)).dtype
    a, b = (x if isinstance(x, Item) else cast(number(x, torch.float64), dtype) for x in (a, b))
    return apply("where", condition, a, b, dtype=dtype)


def sigmoid_of(x: Item) -> Item:
    return div(1.0, add(1.0, apply("exp", apply("neg", x))))


OPS["sigmoid"] = sigmoid_of


@op("add")
def _add(a, b, *, alpha=1):
    return add(a, b if alpha == 1 else mul(b, alpha))


@op("sub")
def _sub(a, b, *, alpha=1):
    return sub(a, b if alpha == 1 else mul(b, alpha))


@op("rsub")
def _rsub(a, b, alpha=1):
    return sub(b, a if alpha == 1 else mul(a, alpha))


@op("mul")
def _mul(a, b):
    if a.dtype is torch.bool:
        return apply("and", a, b)
    return mul(a, b)


@op("div", "true_divide")
def _div(a, b, *, rounding_mode=None):
    if rounding_mode is None:
        return div(a, b)
    if not _dtype(a, b).is_floating_point:
        raise NotLowered("a division of integers")
    return apply({"floor": "floor", "trunc": "trunc"}[rounding_mode], div(a, b))


def _dtype(*args: Value) -> torch.dtype:
    return next(a for a in args if isinstance(a, Item)).dtype


@op("reciprocal")
def _reciprocal(x):
    return div(1.0, x)


@op("rsqrt")
def _rsqrt(x):
    return div(1.0, apply("sqrt", x))


@op("abs")
def _abs(x):
    return apply("abs" if x.dtype.is_floating_point else "iabs", x)


@op("sign", "sgn")
def _sign(x):
    one = where(compare("gt", x, 0), 1, where(compare("lt", x, 0), -1, x, x.dtype), x.dtype)
    return where(compare("eq", x, 0), 0, one, x.dtype)


@op("square")
def _square(x):
    return mul(x, x)


@op("pow")
def _pow(x, y):
    if isinstance(y, (int, float)):
        if y == 2:
            return mul(x, x)
        if y == 1:
            return x
        if y == 3:
            return mul(mul(x, x), x)
        if y == 0.5 and x.dtype.is_floating_point:
            return apply("sqrt", x)
        if y == -1 and x.dtype.is_floating_point:
            return div(1.0, x)
        if y == 0:
            return number(1, x.dtype, x.shape)
    if not _dtype(x, y).is_floating_point:
        raise NotLowered("a power of integers")
    return apply("pow", x, y)


@op("maximum")
def _maximum(a, b):
    return apply("max", a, b)


@op("minimum")
def _minimum(a, b):
    return apply("min", a, b)


@op("clamp", "clip")
def _clamp(x, min=None, max=None):
    # NaN stays: a comparison with it is false.
    if min is not None:
        x = _clamp_min(x, min)
    return x if max is None else _clamp_max(x, max)


@op("clamp_min")
def _clamp_min(x, bound):
    if isinstance(bound, Item):
        return apply("max", x, bound)
    return where(compare("lt", x, bound), bound, x)


@op("clamp_max")
def _clamp_max(x, bound):
    if isinstance(bound, Item):
        return apply("min", x, bound)
    return where(compare("gt", x, bound), bound, x)


@op("hardtanh")
def _hardtanh(x, min_val=-1.0, max_val=1.0):
    return _clamp(x, min_val, max_val)


@op("relu")
def _relu(x):
    return _clamp_min(x, 0)


@op("relu6")
def _relu6(x):
    return _clamp(x, 0, 6)


@op("threshold_backward")
def _threshold_backward(grad, x, threshold):
    return where(compare("le", x, threshold), 0, grad)


@op("hardtanh_backward")
def _hardtanh_backward(grad, x, low, high):
    return where(apply("or", compare("le", x, low), compare("ge", x, high)), 0, grad)


@op("leaky_relu")
def _leaky_relu(x, slope=0.01):
    return where(compare("gt", x, 0), x, mul(x, slope))


@op("leaky_relu_backward")
def _leaky_relu_backward(grad, x, slope, _):
    return where(compare("gt", x, 0), grad, mul(grad, slope))


@op("_prelu_kernel")
def _prelu(x, weight):
    return where(compare("gt", x, 0), x, mul(weight, x))


@op("elu")
def _elu(x, alpha=1.0, scale=1.0, input_scale=1.0):
    negative = mul(apply("expm1", mul(x, input_scale)), alpha * scale)
    return where(compare("le", x, 0), negative, mul(x, scale))


@op("elu_backward")
def _elu_backward(grad, alpha, scale, input_scale, is_result, x):
    if is_result:
        negative = mul(mul(grad, input_scale), add(x, alpha * scale))
    else:
        negative = mul(mul(grad, input_scale * alpha * scale), apply("exp", mul(x, input_scale)))
    return where(compare("le", x, 0), negative, mul(grad, scale))


@op("sigmoid_backward")
def _sigmoid_backward(grad, y):
    return mul(mul(grad, sub(1.0, y)), y)


@op("tanh_backward")
def _tanh_backward(grad, y):
    return mul(grad, sub(1.0, mul(y, y)))


@op("silu")
def _silu(x):
    return div(x, add(1.0, apply("exp", apply("neg", x))))


@op("silu_backward")
def _silu_backward(grad, x):
    s = sigmoid_of(x)
    return mul(mul(grad, s), add(1.0, mul(x, sub(1.0, s))))


@op("softplus")
def _softplus(x, beta=1, threshold=20):
    scaled = mul(x, beta)
    return where(compare("gt", scaled, threshold), x, div(apply("log1p", apply("exp", scaled)), beta))


@op("softplus_backward")
def _softplus_backward(grad, x, beta, threshold):
    scaled = mul(x, beta)
    z = apply("exp", scaled)
    return where(compare("gt", scaled, threshold), grad, div(mul(grad, z), add(z, 1.0)))


@op("log_sigmoid_forward")
def _log_sigmoid(x):
    out = sub(_clamp_max(x, 0), apply("log1p", apply("exp", apply("neg", _abs(x)))))
    return out, out


@op("log_sigmoid_backward")
def _log_sigmoid_backward(grad, x, _):
    z = apply("exp", apply("neg", _abs(x)))
    small = div(z, add(1.0, z))
    return mul(grad, where(compare("lt", x, 0), sub(1.0, small), small))


@op("gelu")
def _gelu(x, *, approximate="none"):
    if approximate == "none":
        return mul(mul(x, 0.5), add(1.0, apply("erf", mul(x, math.sqrt(0.5)))))
    inner = mul(add(x, mul(mul(mul(x, x), x), 0.044715)), math.sqrt(2 / math.pi))
    return mul(mul(x, 0.5), add(1.0, apply("tanh", inner)))


@op("gelu_backward")
def _gelu_backward(grad, x, *, approximate="none"):
    if approximate == "none":
        cdf = mul(add(1.0, apply("erf", mul(x, math.sqrt(0.5)))), 0.5)
        pdf = mul(apply("exp", mul(mul(x, x), -0.5)), 1 / math.sqrt(2 * math.pi))
        return mul(grad, add(cdf, mul(x, pdf)))
    beta = math.sqrt(2 / math.pi)
    t = apply("tanh", mul(add(x, mul(mul(mul(x, x), x), 0.044715)), beta))
    slope = mul(add(mul(mul(x, x), 3 * 0.044715), 1.0), beta)
    inner = mul(mul(mul(x, 0.5), sub(1.0, mul(t, t))), slope)
    return mul(grad, add(mul(add(t, 1.0), 0.5), inner))


@op("addcmul")
def _addcmul(x, a, b, *, value=1):
    return add(x, mul(mul(a, b), value) if value != 1 else mul(a, b))


@op("addcdiv")
def _addcdiv(x, a, b, *, value=1):
    return add(x, mul(div(a, b), value) if value != 1 else div(a, b))


@op("lerp")
def _lerp(a, b, weight):
    return add(a, mul(sub(b, a), weight))


@op("where")
def _where(condition, a, b):
    return where(condition, a, b)


@op("masked_fill")
def _masked_fill(x, mask, value):
    return where(mask, value, x, x.dtype)


@op("fill")
def _fill(x, value):
    return cast(value, x.dtype) if isinstance(value, Item) else cast(number(value, torch.float64, x.shape), x.dtype)


for _name in COMPARISONS:
    OPS[_name] = lambda a, b, name=_name: compare(name, a, b)


@op("isnan")
def _isnan(x):
    return compare("ne", x, x)


@op("isinf")
def _isinf(x):
    return compare("eq", _abs(x), float("inf"))


@op("isfinite")
def _isfinite(x):
    return compare("lt", _abs(x), float("inf"))


@op("bitwise_not", "logical_not")
def _not(x):
    if x.dtype is not torch.bool:
        raise NotLowered("bits of integers are negated")
    return apply("not", x)


for _name in ("and", "or", "xor"):
    for _kind in ("bitwise", "logical"):
        OPS[f"{_kind}_{_name}"] = lambda a, b, name=_name: apply(name, a, b)


@op("remainder")
def _remainder(a, b):
    if not _dtype(a, b).is_floating_point:
        raise NotLowered("a remainder of integers")
    rest = apply("fmod", a, b)
    wrong = apply("and", compare("ne", rest, 0), compare("ne", compare("lt", rest, 0), compare("lt", b, 0)))
    return where(wrong, add(rest, b), rest)


def share(src: Item, best: Item, arg: Item, edge_id: Item) -> Item:
    """:func:`edgeless.programs.front.ops.share_rows` for one edge."""
    single = compare("ge", arg, 0)
    if src.dtype.itemsize == 2:
        equal = compare("eq", apply("rounded", src), best)
    else:
        near = compare("lt", _abs(sub(src, best)), mul(_abs(best), tolerance(src.dtype)))
        equal = apply("or", compare("eq", src, best), near)
    wins = apply("where", single, compare("eq", arg, edge_id), equal, dtype=torch.bool)
    zero = compare("eq", best, 0)
    count = add(where(single, 1, apply("neg", arg)), cast(zero, torch.int64))
    part = div(where(wins, 1.0, 0.0, src.dtype), cast(_clamp_min(count, 1), src.dtype))
    alone = where(compare("eq", arg, edge_id), where(zero, 0.5, 1.0, src.dtype), number(0.0, src.dtype))
    part.usual = single, alone
    return part


def arguments_of(name: str, args: tuple[Any, ...], dtype: torch.dtype, common: torch.dtype) -> list[Any]:
    """The arguments of a pointwise op, its items in the dtype that it computes in.

    Args:
        dtype: the dtype of the result.
        common: the dtype to which the operands are promoted.
    """
    if name == "where":
        return [cast(args[0], torch.bool), *(cast(a, dtype) if isinstance(a, Item) else a for a in args[1:])]
    if name == "masked_fill":
        value = cast(args[2], dtype) if isinstance(args[2], Item) else args[2]
        return [cast(args[0], dtype), cast(args[1], torch.bool), value]
    into = common if name in COMPARISONS or name in ("isnan", "isinf", "isfinite") else dtype
    return [cast(a, into) if isinstance(a, Item) else a for a in args]
