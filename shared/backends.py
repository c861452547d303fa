"""The choice between the fused and the upstream forward of layers, and its explanation.

``backend("auto" | "fused" | "reference")`` chooses for everything inside a ``with`` block; ``explain(layer, *inputs)``
says whether one call would run fused and, if not, why not. Layers read :func:`current_backend`; adapters call
:func:`register_layer` to say which upstream class they replace.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Optional

import torch
from torch.autograd import forward_ad

from . import _C  # also registers the ops
from .choices import block
from .gpus import gpu_refusal
from .graph_checks import compiling, exporting_to_onnx
from .plan import Step, table
from .plan_recording import record

BACKENDS = ("auto", "fused", "reference")
ONNX_REFUSAL = "the model is being exported to ONNX, which has no ops of edgeless"


class _Traced(threading.local):
    """The choice of a ``backend`` block in a function that torch.compile traces; it holds after a graph break, too."""

    def __init__(self):
        self.name: Optional[str] = None


_choice, _traced = _C.Choice("edgeless.backend", BACKENDS), _Traced()


class NotFusedError(RuntimeError):
    """Raised under ``backend("fused")`` by a call that the kernels do not cover; :func:`explain` gives the message."""


def current_backend() -> str:
    """Returns the backend in force: ``"auto"``, ``"fused"`` or ``"reference"``."""
    return _traced.name or _choice.name


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """Chooses how everything inside the ``with`` block runs.

    The choice belongs to the calling thread, as that of ``torch.no_grad()`` does. It also holds in the autograd threads
    that run a ``backward()`` called inside the block, where checkpoints run their forward again. Threads that a program
    starts have choices of their own, and so have those of ``nn.DataParallel``: open the block in the ``forward`` of the
    module that it replicates.

    Args:
        name: ``"auto"``: the kernels where they cover a call, otherwise the upstream forward (layers) or plain PyTorch
            (functional). ``"fused"``: the kernels or an error. ``"reference"``: the upstream forward or plain PyTorch.

    Raises:
        ValueError: for any other name.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend: name must be one of {', '.join(map(repr, BACKENDS))}, got {name!r}")
    tracing = compiling()
    before, _traced.name = _traced.name, name if tracing else None
    try:
        if tracing:
            yield
        else:
            with block(_choice, name):
                yield
    finally:
        _traced.name = before


@dataclass(frozen=True)
class Explanation:
    """The result of :func:`explain`. It is true in a boolean context when the call runs fused.

    Attributes:
        layer: the name of its class.
        fused: whether nothing of it runs by the upstream code.
        reasons: why it does not, in words.
        plan: the ops of a layer that has kernels of its own.
        how: for a layer whose messages are generated, "generated" or the op that they landed on.
        levels: for such a layer, what is computed and how.
    """

    layer: str
    fused: bool
    reasons: tuple[str, ...]
    plan: tuple[Step, ...] = ()
    how: str = ""
    levels: str = ""

    def __bool__(self) -> bool:
        return self.fused

    def __str__(self) -> str:
        if self.fused and self.how:
            return f"{self.layer} runs fused, {self.how}." + (f"\n{self.levels}" if self.levels else "")
        if self.fused:
            said = f"{self.layer} runs fused."
            return said if not self.plan else said + "\n" + table(self.plan)
        return f"{self.layer} does not run fused, because {'; because '.join(self.reasons)}."


def explain(layer: torch.nn.Module, *inputs, plan: bool = False, **kwargs) -> Explanation:
    """Says in words whether ``layer(*inputs, **kwargs)`` runs fused and, if not, why; nothing is computed.

    The answer covers the forward and the gradients. Second derivatives of attention, minima, maxima and sums over
    relations always run in PyTorch ops, with edge tensors.

    Args:
        layer: a layer, of edgeless or not, or a function of ``edgeless.dgl.ops``.
        *inputs, **kwargs: the arguments of the call.
        plan: whether to list for each op its engine, kernel, tile, feature or head tiles, bytes and roofline time.
            This runs the call once, and its backward if a parameter or an input needs a gradient; no ``.grad`` changes.

    Raises:
        TypeError: layer cannot be called, or not with these arguments.
    """
    if not callable(layer):
        raise TypeError(f"explain: layer must be a torch.nn.Module or a function, got {type(layer).__name__}")
    name = getattr(layer, "__name__", type(layer).__name__)
    if not hasattr(layer, "_fusion_refusals") and not hasattr(layer, "_explanation"):
        reason = f"{name} is not a layer of edgeless"
        if isinstance(layer, torch.nn.Module) and any(hasattr(m, "_fusion_refusals") for m in layer.modules()):
            reason += ", but holds some, which are to be explained one by one"
        if (fused := LAYERS.get(type(layer))) is not None:
            package = fused.__module__.rpartition(".")[0]
            reason = f"it is the stock layer, which edgeless.accelerate(model) turns into {package}.{name}"
            reason += " if EDGELESS_GENERATE allows it" if hasattr(fused, "_runs_generated") else ""
        return Explanation(name, False, (reason,))
    called = layer.forward if isinstance(layer, torch.nn.Module) else layer
    try:
        inspect.signature(called).bind(*inputs, **kwargs)
    except TypeError as error:
        raise TypeError(f"explain: {name} cannot be called with these arguments: {error}") from None
    if hasattr(layer, "_explanation"):
        return layer._explanation(inputs, kwargs, plan)
    reasons = layer._fusion_refusals(*inputs, **kwargs)
    if current_backend() == "reference":
        reasons = ['edgeless.backend("reference") is in force', *reasons]
    steps: tuple[Step, ...] = ()
    if plan and not reasons:
        parameters = list(layer.parameters()) if isinstance(layer, torch.nn.Module) else []
        steps = tuple(record(lambda: layer(*inputs, **kwargs), [*parameters, *inputs, *kwargs.values()]))
    return Explanation(name, not reasons, tuple(reasons), steps)


def _look_for_kernels(kind: str, op: str) -> Optional[str]:
    key = {"cpu": "CPU", "cuda": "CUDA"}.get(kind)
    if key is None:
        return f"edgeless has no kernels for {kind!r} devices"
    if kind == "cuda" and torch.version.hip is not None:  # which calls AMD's devices by this name too
        return "edgeless has no kernels for AMD GPUs"
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"edgeless::{op}", key):
        return None
    return f"this build of edgeless has no {key} kernels" + ("" if op == "attention" else f" for {op}")


# Filled at import, because torch.compile cannot trace the look-up.
_KERNELS = {
    (kind, op): _look_for_kernels(kind, op)
    for kind in ("cpu", "cuda")
    for op in ("attention", "spmm", "sddmm", "neighbor_reduce", "typed_mm", "relational_sum", "pair_attention")
}


def kernel_refusal(device: torch.device, op: str = "attention") -> Optional[str]:
    """Returns why the kernels of the compiled op ``op`` cannot run on ``device`` now, or None if they can."""
    if compiling() and exporting_to_onnx():
        return ONNX_REFUSAL
    key = (device.type, op)
    refusal = _KERNELS[key] if key in _KERNELS else _look_for_kernels(*key)
    if refusal is None and device.type == "cuda":
        refusal = gpu_refusal(device, op)
    return refusal or transform_refusal()


def transform_refusal() -> Optional[str]:
    """Returns the transform that is active and rules out all kernels, in words, or None.

    The ops have backward formulas, but no rules for torch.func transforms or forward-mode differentiation.
    """
    if not compiling() and (torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0):
        return "a transform of torch.func or forward-mode differentiation is active"
    return None


# Upstream layer class -> the class of edgeless that replaces it; framework -> the predicate of its graph layers.
LAYERS: dict[type, type] = {}
FAMILIES: dict[str, Callable[[torch.nn.Module], bool]] = {}
# Framework -> the function from a layer's class to the class whose messages are generated, or None.
GENERATORS: dict[str, Callable[[type], Optional[type]]] = {}


def register_layer(stock: type, fused: type) -> None:
    """Lets ``edgeless.accelerate`` turn instances of exactly the upstream class ``stock`` into ``fused``.

    Args:
        stock: the upstream class.
        fused: a subclass of it without state of its own.

    Raises:
        TypeError: ``fused`` does not subclass ``stock``, so a swap would break the instance.
    """
    if not issubclass(fused, stock):
        raise TypeError(f"register_layer: fused must be a subclass of {stock.__name__}, got {fused.__name__}")
    LAYERS[stock] = fused


def register_family(
    framework: str,
    is_layer: Callable[[torch.nn.Module], bool],
    generated: Optional[Callable[[type], Optional[type]]] = None,
) -> None:
    """Lets ``edgeless.accelerate`` know the layers of a framework for which edgeless has no fused version.

    Args:
        framework: its name.
        is_layer: whether a module is a layer of it.
        generated: the class that generates the messages of a layer of a class, or None where there is none. Without it
            such layers are reported only.
    """
    FAMILIES[framework] = is_layer
    if generated is not None:
        GENERATORS[framework] = generated
