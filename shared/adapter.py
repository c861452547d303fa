"""The one place where a drop-in layer chooses between its own path and the stock layer's."""

from __future__ import annotations

from collections.abc import Container
from typing import Any, NoReturn, Optional

import torch
from torch.nn.modules import module as _modules

from .autocast import autocasts
from .backends import Explanation, NotFusedError, current_backend, explain, kernel_refusal
from .graph_checks import PLAIN, STAND_INS, compiling


def is_plain(module: torch.nn.Module, kinds: Container[type] = (torch.nn.Linear,)) -> bool:
    """Whether calling ``module`` runs the forward of its class, which is one of ``kinds``, and nothing else.

    A layer may take over what such a submodule does and has to call every other: one that has hooks, its own or those
    of all modules, or whose ``forward`` was replaced, as libraries for offloading and for adapters do.
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
    """Why ``x`` cannot be saved for a backward, whose kernels read their inputs again where stock ones read copies; or
    why it cannot be read at all.
    """
    if compiling():
        return None
    if type(x) in STAND_INS:
        return f"the features are a {type(x).__name__}, which has no contents"
    if torch.is_grad_enabled() and x.is_inference():
        return "the features were made in inference mode, which keeps them from being saved for gradients"
    return None


def typed_rows_refusals(
    x: Any, types: Any, width: int, weight: torch.Tensor, follows_autocast: bool = False
) -> list[str]:
    """Why rows and their types are nothing for the kernels; the stock layer knows the right error for them.

    ``follows_autocast``: the caller rounds rows and weights as autocast asks.
    """
    if type(x) not in PLAIN or x.layout is not torch.strided or not x.is_floating_point():
        return ["x is not a plain floating tensor"]
    if x.dim() != 2 or x.size(1) != width:
        return [f"x has shape {list(x.shape)}, not [N, {width}]"]
    autocast = autocasts(x.device.type)
    rounded = follows_autocast and autocast and torch.float64 not in (x.dtype, weight.dtype)
    if (x.dtype != weight.dtype and not rounded) or x.device != weight.device:
        return [f"x is {x.dtype} on {x.device}, and the weights {weight.dtype} on {weight.device}"]
    if type(types) not in PLAIN or types.dtype not in (torch.int32, torch.int64):
        return ["the types are no plain int64 or int32 tensor"]
    if tuple(types.shape) != (x.size(0),) or types.device != x.device:
        return [f"the types have shape {list(types.shape)} on {types.device}, not [{x.size(0)}] on {x.device}"]
    if autocast and not rounded:
        return ["autocast is on"]
    return [reason for reason in (kernel_refusal(x.device, "typed_mm"), inference_refusal(x)) if reason]


class FusedLayer:
    """Mixin of every drop-in layer; stands before the stock class among the bases and holds no state of its own.

    A layer of an adapter looks like this, with the stock forward's own signature three times::

        class GATConv(FusedLayer, stock.GATConv):
            def forward(self, graph, feat, edge_weight=None, get_attention=False):
                return self._choose(graph, feat, edge_weight, get_attention)

            def _fusion_refusals(self, graph, feat, edge_weight=None, get_attention=False):
                return ["..."]  # one clause per reason, no capital, no full stop; [] when the kernels cover the call

            def _fused_forward(self, graph, feat, edge_weight, get_attention):
                ...

    ``_fusion_refusals`` computes nothing, raises nothing on any input that the stock forward accepts and stays cheap:
    it runs on every call. Input that the stock forward rejects is refused too, so that the stock layer's own error is
    what the user sees. The class must not define ``__init__`` state: ``edgeless.accelerate`` turns a stock instance
    into a fused one by assigning ``__class__``.
    """

    def _fusion_refusals(self, *inputs: Any) -> list[str]:
        """Why a call with these inputs cannot run on the kernels; empty when it can."""
        raise NotImplementedError

    def _fused_forward(self, *inputs: Any) -> Any:
        """The stock forward's result by way of ``edgeless.functional``."""
        raise NotImplementedError

    def _stock_forward(self, *inputs: Any) -> Any:
        """The stock layer's own forward. Overridden where an input of ours has to be translated for it first."""
        return super().forward(*inputs)

    def _refuse_parts(self, *inputs: Any) -> NoReturn:
        """What takes the place of the stock forward where the graph is a part of one."""
        raise NotFusedError(f"{explain(self, *inputs)} The stock layer knows no edgeless.distributed.DistGraph.")

    def _choose(self, *inputs: Any) -> Any:
        """Runs the fused or the stock forward, as ``edgeless.backend`` says.

        Raises:
            NotFusedError: under ``backend("fused")``, or on a part of a graph, if the kernels do not cover this call.
        """
        choice = current_backend()
        if choice != "reference":
            if not (refusals := self._fusion_refusals(*inputs)):
                return self._fused_forward(*inputs)
            if choice == "fused":
                raise NotFusedError(str(Explanation(type(self).__name__, False, tuple(refusals))))
        return self._stock_forward(*inputs)
