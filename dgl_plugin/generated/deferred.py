"""Edge tensors that are computed when they are read.

A :class:`Deferred` has the shape of the tensor that it represents, and ops of torch on it are recorded. An op that
cannot be recorded makes a :class:`edgeless.dgl.generated.recorder.Recorder` compute the tensor.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Optional

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from edgeless.programs import Refused
from edgeless.programs.front.in_place import inplace_place, writes, writes_inside

from .expressions import Value


class Unrecorded(Exception):
    """Raised if the upstream layer has to repeat the call; the text is a clause with the reason."""


_VIEWS = {
    *("view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten", "transpose", "permute", "movedim", "expand"),
    *("expand_as", "view_as", "reshape_as", "swapaxes", "swapdims", "t", "contiguous", "__getitem__", "select"),
    *("narrow", "chunk", "split", "tensor_split", "unbind", "to", "type", "type_as", "float", "double", "half"),
    *("bfloat16", "detach", "diagonal", "identity"),
}
_POINTWISE = {
    *("add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "pow", "neg", "negative", "rsub"),
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__div__", "__rdiv__", "__truediv__"),
    *("__rtruediv__", "__pow__", "__rpow__", "__neg__", "__abs__", "float_power", "reciprocal", "square", "sqrt"),
    *("rsqrt", "exp", "expm1", "log", "log1p", "log2", "log10", "sin", "cos", "tan", "asin", "acos", "atan", "atan2"),
    *("sinh", "cosh", "tanh", "sigmoid", "erf", "abs", "absolute", "sign", "floor", "ceil", "round", "trunc", "frac"),
    *("maximum", "minimum", "fmod", "remainder", "lerp", "addcmul", "addcdiv", "hypot", "sinc", "logaddexp"),
    *("clamp", "clip", "clamp_min", "clamp_max", "where", "masked_fill", "relu", "relu6", "leaky_relu", "elu"),
    *("selu", "celu", "gelu", "silu", "mish", "softplus", "softsign", "softshrink", "hardshrink", "tanhshrink"),
    *("hardtanh", "hardsigmoid", "hardswish", "logsigmoid", "threshold", "prelu", "logit"),
    *("lt", "le", "gt", "ge", "eq", "ne", "__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"),
    *("logical_and", "logical_or", "logical_not", "zeros_like", "ones_like", "full_like"),
}
_OTHERS = {
    *("linear", "matmul", "__matmul__", "mm", "bmm", "einsum", "baddbmm", "addmm", "cat", "concat", "concatenate"),
    *("stack", "hstack", "sum", "mean", "amax", "amin", "logsumexp", "softmax", "log_softmax", "norm", "normalize"),
    *("prod", "var", "std", "max", "min", "glu", "layer_norm", "group_norm", "batch_norm", "embedding", "clone"),
    *("cross", "linalg_vector_norm", "linalg_norm", "linalg_cross", "cosine_similarity", "pairwise_distance"),
    *("tile", "repeat", "rms_norm"),
}
RECORDED = _VIEWS | _POINTWISE | _OTHERS
_OVER_EVERYTHING = {"max", "min", "amax", "amin", "prod", "logsumexp", "norm", "var", "std", "mean"}
_INFO = {
    *(getattr(Tensor, name).__get__ for name in ("dtype", "device", "layout", "ndim", "is_cuda", "is_sparse")),
    *(getattr(Tensor, name).__get__ for name in ("is_quantized", "is_meta", "is_nested", "itemsize")),
    *(Tensor.dim, Tensor.ndimension, Tensor.is_floating_point, Tensor.is_complex, Tensor.element_size),
    *(Tensor.get_device, Tensor.is_contiguous, torch.is_floating_point, torch.is_complex, Tensor.stride),
}
_FACTORIES = frozenset(("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"))
_OF_GRADIENTS = frozenset(("register_hook", "register_post_accumulate_grad_hook", "retain_grad"))
_LEAVES = frozenset((Tensor, torch.nn.Parameter, int, float, bool, str, type(None), slice))
_SHAPE = Tensor.shape.__get__
_REQUIRES_GRAD = Tensor.requires_grad.__get__


class Deferred(Tensor):
    """A tensor that is computed when it is read.

    Attributes:
        value: its expression.
        recorder: the recorder that computes it.
        known: the tensor, once it is computed.
    """

    value: Value
    recorder: Any
    known: Optional[Tensor]

    @staticmethod
    def __new__(cls, recorder, value: Value):
        sizes = [int(n) for n in value.sizes(recorder.counts)]
        made = Tensor._make_wrapper_subclass(cls, sizes, dtype=value.dtype, device=recorder.device)
        made.value, made.recorder, made.known = value, recorder, None
        return made

    __slots__ = ()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise Unrecorded(f"{func} is called with an edge tensor that is computed later")

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        first = args[0] if args else None
        if type(first) is Deferred and first.known is None:
            if func in _INFO:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if func == _SHAPE:
                return torch.Size(first.value.sizes(first.recorder.counts))
        name = getattr(func, "__name__", "")
        if type(first) is Deferred and first.known is None:
            if name == "size" and len(args) + len(kwargs) <= 2:
                shape = first.value.sizes(first.recorder.counts)
                dim = args[1] if len(args) == 2 else kwargs.get("dim")
                return torch.Size(shape) if dim is None else shape[dim]
            if name in ("numel", "nelement") and len(args) == 1:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(first)
            if name == "__len__":
                return int(first.value.sizes(first.recorder.counts)[0])
            if name in _FACTORIES:
                return func(torch.empty(0, dtype=first.value.dtype, device=first.recorder.device), *args[1:], **kwargs)
            if func == _REQUIRES_GRAD:
                return first.recorder.requires_grad(first.value)
            if writes(name):
                return _write(first, func, args, kwargs)
        if name in _OF_GRADIENTS or func is torch.autograd.grad:
            _check_passed(args[1:] if func is torch.autograd.grad else first, kwargs.get("inputs"))
        recorder = deferred_in((args, kwargs))[0].recorder
        if "out" not in kwargs:
            try:
                if name == "dropout" and type(first) is Deferred and first.known is None:
                    return _dropout(first, *args[1:], **kwargs)
                if writes_inside(name, args, kwargs):
                    return _write_inside(first, recorder, func, name, args, kwargs)
                return recorder.record(func, name, args, kwargs)
            except Refused:
                pass
        args, kwargs = computed((args, kwargs))
        return func(*args, **kwargs)

    def __deepcopy__(self, memo):
        return self.recorder.tensor_of(self).__deepcopy__(memo)

    def __reduce_ex__(self, protocol):
        return self.recorder.tensor_of(self).__reduce_ex__(protocol)


def deferred_in(tree: Any) -> list[Deferred]:
    """The deferred tensors in nested containers."""
    if type(tree) is Deferred:
        return [tree]
    if type(tree) in (tuple, list):
        return [found for each in tree for found in deferred_in(each)]
    if type(tree) is dict:
        return [found for each in tree.values() for found in deferred_in(each)]
    if type(tree) in _LEAVES:
        return []
    return [a for a in pytree.tree_leaves(tree) if type(a) is Deferred]


def computed(tree: Any) -> Any:
    """Replaces each deferred tensor in nested containers by its computed tensor."""
    found = deferred_in(tree)
    if not found:
        return tree
    found[0].recorder.compute(found)
    return pytree.tree_map(lambda a: a.recorder.tensor_of(a) if type(a) is Deferred else a, tree)


def is_view(name: str) -> bool:
    """Returns whether the result of a function of this name may share memory with its argument."""
    return name in _VIEWS


def may_record(name: str, args: tuple, kwargs: dict, by_edge: bool) -> bool:
    """Returns whether a call may be recorded, judged by its name and its plain arguments.

    Args:
        by_edge: whether edge values are among the arguments; on node values only views are recorded.
    """
    if name not in RECORDED:
        return False
    if not by_edge:
        return is_view(name)
    if name == "__getitem__":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return len(index) > 1 and index[0] in (..., slice(None)) and all(_is_plain_index(i) for i in index)
    return not (name in _OVER_EVERYTHING and len(args) == 1 and not kwargs)


def _is_plain_index(index: Any) -> bool:
    return index is None or index is ... or type(index) in (int, slice)


def _write(target: Deferred, func, args: tuple, kwargs: dict) -> Any:
    """Writes into a deferred tensor, after computing it and the values that were recorded from it."""
    value = target.value
    if value.viewed or (value.op is not None and is_view(getattr(value.op, "__name__", ""))):
        raise Unrecorded("an edge tensor that others are views of is written in place")
    target.recorder.compute_all()
    known = target.recorder.tensor_of(target)
    args, kwargs = computed((args[1:], kwargs))
    result = func(known, *args, **kwargs)
    return target if result is known else result


def _check_passed(*trees: Any) -> None:
    """Checks that the gradients of values that were computed from edge tensors pass through these tensors."""
    if any(each.value.passed for each in deferred_in(trees)):
        raise Unrecorded("a gradient of an edge tensor is taken after something was computed of it")


def _dropout(x: Deferred, p: float = 0.5, training: bool = True, inplace: bool = False) -> Deferred:
    if not training or p == 0:
        return x
    if inplace or not 0 <= p <= 1:
        raise Refused("dropout writes in place")
    return x.recorder.dropout(x, p)


def _write_inside(first, recorder, func, name: str, args: tuple, kwargs: dict) -> Any:
    """Records a call with ``inplace``: from then on its argument has the value of its result."""
    if type(first) is not Deferred or first.known is not None:
        raise Refused("a tensor is written in place")
    value = first.value
    if value.op is None or value.viewed or is_view(getattr(value.op, "__name__", "")):
        raise Unrecorded("an edge tensor that others are views of is written in place")
    place = inplace_place(name)
    args = tuple(False if i == place else a for i, a in enumerate(args))
    result = recorder.record(func, name, args, {k: v for k, v in kwargs.items() if k != "inplace"})
    if type(result) is not Deferred or result.value.shape != value.shape or result.value.dtype != value.dtype:
        raise Unrecorded("an edge tensor is written in place")
    first.value = result.value
    return first


class _State(threading.local):
    """The state of a thread: whether the recorder is computing, and the number of calls that are watched."""

    at_work = False
    watched = 0


_state = _State()


@contextlib.contextmanager
def at_work() -> Iterator[None]:
    """Marks a block whose calls are the recorder's own and not the layer's."""
    before, _state.at_work = _state.at_work, True
    try:
        yield
    finally:
        _state.at_work = before


def watched_calls() -> int:
    """The number of nested calls of this thread that are watched."""
    return _state.watched


class Watch(torch.overrides.TorchFunctionMode):
    """Computes recorded values before a tensor that they read is written in place.

    Args:
        recorder: the recorder of the call.
        keep: called with each tensor that will be written.
    """

    def __init__(self, recorder, keep: Callable[[Tensor], None]):
        super().__init__()
        self.recorder, self.keep = recorder, keep

    def __enter__(self):
        _state.watched += 1
        return super().__enter__()

    def __exit__(self, *error):
        _state.watched -= 1
        return super().__exit__(*error)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not _state.at_work:
            name = getattr(func, "__name__", "")
            if (writes(name) or writes_inside(name, args, kwargs)) and args and isinstance(args[0], Tensor):
                self.keep(args[0])
                self.recorder.before_write(args[0])
            elif "out" in kwargs:
                for each in pytree.tree_leaves(kwargs["out"]):
                    self.keep(each)
                self.recorder.compute_all()
        return func(*args, **kwargs)
