"""The base class of drop-in layers: it alone chooses between the fused and the upstream forward of a call."""

from __future__ import annotations

from collections.abc import Container
from typing import Any, NoReturn, Optional

import torch
from torch.nn.modules import module as _modules

from ..autocast import autocasts
from ..checks import PLAIN, STAND_INS, compiling
from ..choices.backends import NotFusedError, current_backend, explain, kernel_refusal
from .call_errors import add_call
from .calls import REFERENCE, note_trace, ran_fused, ran_stock
from .explanation import Explanation


def is_plain(module: torch.nn.Module, kinds: Container[type] = (torch.nn.Linear,)) -> bool:
    """Returns whether a call of ``module`` runs the forward of its class, one of ``kinds``, and nothing else.

    A fused layer may compute such a submodule itself. It has to call any other submodule: one with hooks, be they its
    own or global ones, or with a replaced ``forward``, as libraries for offloading and for adapters install it.
    """
    return type(module) in kinds and not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or _modules._global_forward_hooks
        or _modules._global_forward_pre_hooks
        or _modules._global_backward_hooks
        or _modules._global_backward_pre_hooks
        or "forward" in module.__dict__
    )


def inference_refusal(x: torch.Tensor) -> Optional[str]:
    """Returns why the kernels cannot read ``x`` or cannot save it for the backward, or None if they can.

    A fused backward reads its inputs again, where upstream layers read copies of them.
    """
    if compiling():
        return None
    if type(x) in STAND_INS:
        return f"the features are a {type(x).__name__}, which has no contents"
    if torch.is_grad_enabled() and x.is_inference():
        return "the features were made in inference mode, which keeps them from being saved for gradients"
    return None


def typed_rows_refusals(x: Any, types: Any, width: int, weight: torch.Tensor) -> list[str]:
    """Returns the unsupported reasons of typed rows. Invalid input is unsupported too: the upstream layer reports it.

    Under autocast the caller casts rows and weights to the autocast dtype.

    Args:
        x: rows ``[N, width]``.
        types: ``[N]``, the type of each row.
        width: the number of features that the layer expects.
        weight: the layer's parameters, whose dtype and device the rows must have.
    """
    if type(x) not in PLAIN or x.layout is not torch.strided or not x.is_floating_point():
        return ["x is not a plain floating tensor"]
    if reason := kernel_refusal(x.device, "typed_mm"):
        return [reason]
    if x.dim() != 2 or x.size(1) != width:
        return [f"x has shape {list(x.shape)}, not [N, {width}]"]
    autocast = autocasts(x.device.type)
    rounded = autocast and torch.float64 not in (x.dtype, weight.dtype)
    if (x.dtype != weight.dtype and not rounded) or x.device != weight.device:
        return [f"x is {x.dtype} on {x.device}, and the weights {weight.dtype} on {weight.device}"]
    if type(types) not in PLAIN or types.dtype not in (torch.int32, torch.int64):
        return ["the types are no plain int64 or int32 tensor"]
    if tuple(types.shape) != (x.size(0),) or types.device != x.device:
        return [f"the types have shape {list(types.shape)} on {types.device}, not [{x.size(0)}] on {x.device}"]
    if autocast and not rounded:
        return ["autocast is on"]
    return [reason] if (reason := inference_refusal(x)) else []


def named(layer: Any, text: str) -> str:
    """The text of a layer in ``print(model)``, which says whether its class is one of edgeless or made by it."""
    cls = type(layer)
    ours = cls.__module__.startswith("edgeless.") or "_generated_from" in vars(cls)
    return f"edgeless.{text}" if ours else text


class FusedLayer:
    """Mixin of every drop-in layer; it precedes the upstream class among the bases and has no state of its own.

    A layer of an adapter looks like this, with the upstream forward's signature three times::

        class GATConv(FusedLayer, stock.GATConv):
            def forward(self, graph, feat, edge_weight=None, get_attention=False):
                return self._choose(graph, feat, edge_weight, get_attention)

            def _fusion_refusals(self, graph, feat, edge_weight=None, get_attention=False):
                return ["..."]  # one clause per reason, no capital, no full stop; [] when the kernels cover the call

            def _fused_forward(self, graph, feat, edge_weight, get_attention):
                ...

    ``_fusion_refusals`` returns the unsupported reasons of a call. It runs on every call, so it must be cheap; it
    computes nothing and raises nothing on input that the upstream forward accepts. It also returns a reason for input
    that the upstream forward rejects, so that the user sees the upstream error. The class must not define ``__init__``
    state: ``edgeless.accelerate`` turns an upstream instance into a fused one by assigning ``__class__``.
    """

    def _fusion_refusals(self, *inputs: Any) -> list[str]:
        """Returns why a call with these inputs cannot run on the kernels; empty when it can."""
        raise NotImplementedError

    def _state_refusals(self) -> list[str]:
        """Returns why no call can run on the kernels, whatever its inputs; ``edgeless.accelerate`` keeps the layer."""
        return []

    def _fused_forward(self, *inputs: Any) -> Any:
        """Computes the upstream forward's result by ``edgeless.functional``."""
        raise NotImplementedError

    def _stock_forward(self, *inputs: Any) -> Any:
        """Runs the upstream forward. Layers override it to convert inputs that only edgeless accepts."""
        return super().forward(*inputs)

    def _refuse_parts(self, *inputs: Any) -> NoReturn:
        """Replaces the upstream forward where the graph is one partition of a distributed graph."""
        raise NotFusedError(f"{explain(self, *inputs)} The stock layer knows no edgeless.distributed.DistGraph.")

    def __repr__(self) -> str:
        """The upstream text, after ``edgeless.`` for a class of edgeless."""
        return named(self, super().__repr__())

    def _choose(self, *inputs: Any) -> Any:
        """Runs the fused or the upstream forward, as ``edgeless.backend`` says.

        Raises:
            NotFusedError: under ``backend("fused")`` or on a partition, if the kernels do not cover this call.
        """
        choice = current_backend()
        if choice == "reference":
            refusals = [REFERENCE]
        elif not (refusals := self._fusion_refusals(*inputs)):
            if compiling():
                note_trace(type(self), True)
                return self._fused_forward(*inputs)
            ran_fused(type(self), self, inputs)
            try:
                return self._fused_forward(*inputs)
            except RuntimeError as error:
                if type(error) is RuntimeError:  # torch's error about widths or dtypes that do not fit
                    add_call(error, self, inputs)
                raise
        elif choice == "fused":
            raise NotFusedError(str(Explanation(type(self).__name__, False, tuple(refusals))))
        if compiling():
            note_trace(type(self), False)
            return self._stock_forward(*inputs)
        ran_stock(type(self), self, refusals)
        try:
            return self._stock_forward(*inputs)
        except Exception as error:
            if choice != "reference":
                add_call(error, self, inputs, refusals)
            raise
