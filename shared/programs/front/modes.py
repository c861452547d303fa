"""Calls that are replaced while a function is traced: dropout, batch norms, the largest node id.

The modes here also find the line of the user's code that each op of a trace comes from, and refuse some calls.
"""

from __future__ import annotations

import sys
import threading

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from . import ops
from .spaces import Refused

_DROPOUTS = {
    torch.nn.functional.dropout: ("input", "p", "training", "inplace"),
    torch.dropout: ("input", "p", "train"),
    torch.dropout_: ("input", "p", "train"),
}
_NORM = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_NORM_DEFAULTS = {"weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5}
_ROWS = (torch.Tensor.__getitem__, torch.Tensor.select, torch.select)
_MAXIMA = (torch.Tensor.max, torch.max, torch.Tensor.amax)
_REFUSED = {
    torch.Tensor.register_hook: "registers a hook on a tensor",
    torch.Tensor.requires_grad.__get__: "reads requires_grad",
    torch.Tensor.requires_grad_: "calls requires_grad_()",
    torch.Tensor.backward: "calls backward()",
    torch.Tensor.data.__get__: "reads .data",
    torch.Tensor.data.__set__: "writes .data",
    torch.autograd.grad: "calls torch.autograd.grad()",
    torch.Tensor.numpy: "calls numpy()",
    torch.Tensor.tolist: "reads the values of a tensor",
}


class Number(int):
    """An int where the code expects a tensor with one element."""

    def item(self) -> int:
        return int(self)


class Modes(TorchFunctionMode):
    """Replaces calls while a function runs with stand-ins (``tracing``) or, in a self-check, with tensors.

    Attributes:
        draws: the number of dropouts so far.
        largest: whether the largest id of an end was assumed to be the last node's.
        least_edges: below this number of edges the function raises an error, as a norm over one edge does.
        reason: the clause of a refusal that was raised inside, kept because the function may catch exceptions.
    """

    def __init__(self, ends: Tensor, ids: Tensor, seed: Tensor, sizes, tracing: bool):
        super().__init__()
        self.ends, self.ids, self.seed, self.sizes, self.tracing = ends, ids, seed, sizes, tracing
        self.draws, self.largest, self.least_edges, self.rows, self.reason = 0, False, 1, [], None
        self.line = None

    def refuse(self, clause: str):
        """Refuses the call, and names the line that is running."""
        self.reason = self.reason or f"{clause}{at(self.line)}"
        raise Refused(self.reason)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.tracing:
            self.line = user_line(sys._getframe(1)) or self.line
            if func == torch.Tensor.requires_grad.__get__ and _warns_only(sys._getframe(1)):
                return False
            if func in _REFUSED:
                self.refuse(f"message() {_REFUSED[func]}")
        if func in _DROPOUTS:
            return self._dropout(dict(zip(_DROPOUTS[func], args)) | kwargs)
        if func is torch.nn.functional.batch_norm:
            given = _NORM_DEFAULTS | dict(zip(_NORM, args)) | kwargs
            if given["training"] and given["input"].size(0) == self.sizes.edges:
                self.least_edges = 2
            return _batch_norm(**given)
        if func in _MAXIMA and len(args) == 1 and not kwargs:
            for row, end in self.rows:
                if args[0] is row:
                    self.largest = True
                    return Number((self.sizes.sources, self.sizes.destinations)[end] - 1)
        result = func(*args, **kwargs)
        if func in _ROWS and args[0] is self.ends and isinstance(args[-1], int) and isinstance(result, Tensor):
            self.rows.append((result, args[-1] % 2))
        elif self.tracing and not torch.is_grad_enabled():  # a trace records no gradients, so it stops them itself
            return pytree.tree_map(_stopped, result)
        return result

    def _dropout(self, given):
        x, p = given["input"], given.get("p", 0.5)
        if not given.get("training", given.get("train", True)) or p == 0:
            return x
        if not 0 <= p <= 1:
            self.refuse(f"dropout has the probability {p}")
        if given.get("inplace"):
            self.refuse("dropout writes in place")
        if x.dim() == 0 or x.size(0) != self.sizes.edges:
            self.refuse("dropout is applied to something else than rows of edges")
        self.draws += 1
        return x * ops.dropout_scale(x.detach(), self.seed, self.ids, self.draws, float(p))


def _warns_only(frame) -> bool:
    """Returns whether PyG's scatter reads requires_grad: without torch_scatter it only warns, and computes the same."""
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "edgeless"):
        frame = frame.f_back
    caller = "" if frame is None else frame.f_globals.get("__name__", "")
    return caller == "torch_geometric.utils._scatter" and "torch_scatter" not in sys.modules


def _stopped(value):
    return value.detach() if isinstance(value, Tensor) and value.is_floating_point() else value


def _batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps):
    """``batch_norm`` by sums, which are sums over edges where the rows are edges."""
    shape = [1, -1] + [1] * (input.dim() - 2)
    if training or running_mean is None:
        dims = [d for d in range(input.dim()) if d != 1]
        count = input.new_ones(input.shape).select(1, 0).sum()
        mean = input.sum(dims) / count
        centred = input - mean.view(shape)
        var = (centred * centred).sum(dims) / count
        if running_mean is not None and training:
            running_mean.mul_(1 - momentum).add_(mean.detach() * momentum)
            running_var.mul_(1 - momentum).add_(var.detach() * count / (count - 1) * momentum)
    else:
        centred, var = input - running_mean.view(shape), running_var
    out = centred * torch.rsqrt(var + eps).view(shape)
    if weight is not None:
        out = out * weight.view(shape)
    return out if bias is None else out + bias.view(shape)


_PATCH = threading.RLock()


class NoCustomFunctions:
    """Refuses ``torch.autograd.Function`` in a trace, which would replace its gradient by the gradient of its ops."""

    def __init__(self, modes: Modes):
        self.modes = modes

    def __enter__(self):
        _PATCH.acquire()
        self.apply = torch.autograd.Function.__dict__["apply"]
        thread, original, modes = threading.get_ident(), self.apply, self.modes

        def apply(cls, *args, **kwargs):
            if threading.get_ident() == thread and cls.__module__ != ops.__name__:
                modes.line = user_line(sys._getframe(1)) or modes.line
                modes.refuse(f"message() calls the autograd function {cls.__name__}")
            return original.__get__(None, cls)(*args, **kwargs)  # a descriptor of Python, or of C from torch 2.14 on

        torch.autograd.Function.apply = classmethod(apply)

    def __exit__(self, *_):
        torch.autograd.Function.apply = self.apply
        _PATCH.release()


def user_line(frame) -> str | None:
    """``file:line`` of the innermost frame outside of torch and edgeless; PyG's own only where there is no other."""
    in_framework = None
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        root = module.partition(".")[0]
        if root == "torch_geometric":
            in_framework = in_framework or (None if frame.f_code.co_filename.startswith("<") else frame)
        elif root == "edgeless" and in_framework is not None:
            break  # outer frames belong to the callers of the layer
        elif root not in ("torch", "edgeless"):
            break
        frame = frame.f_back
    if frame is None or frame.f_globals.get("__name__", "").partition(".")[0] == "edgeless":
        frame = in_framework
    return None if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def at(line: str | None) -> str:
    """The end of a clause that names a line of code."""
    return f" ({line})" if line else ""
