"""The choice between the fused and the upstream forward of layers, and its explanation.

``backend("auto" | "fused" | "reference")`` chooses for everything inside a ``with`` block; ``explain(layer, *inputs)``
tells whether one call would run fused and, if not, why. Layers read :func:`current_backend`; adapters call
:func:`register_layer` for each upstream class that they replace.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Optional

import torch
from torch.autograd import forward_ad

from .. import _C  # also registers the ops
from ..checks import compiling, exporting_to_onnx
from ..layers.calls import REFERENCE, NotFusedError, recording  # noqa: F401  the error belongs to backends
from ..layers.explanation import Explanation, ModelExplanation, without_repeats
from ..plan.recording import record
from ..plan.steps import Step
from .gpus import gpu_refusal
from .scoped import block

BACKENDS = ("auto", "fused", "reference")
ONNX_REFUSAL = "the model is being exported to ONNX, which has no ops of edgeless"


class _Traced(threading.local):
    """The choice of a ``backend`` block in a function that torch.compile traces; it holds after a graph break, too."""

    def __init__(self):
        self.name: Optional[str] = None


_choice, _traced = _C.Choice("edgeless.backend", BACKENDS), _Traced()


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

    Example:
        >>> import edgeless
        >>> with edgeless.backend("reference"):
        ...     pass  # upstream forwards and plain PyTorch
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


def explain(layer, *inputs, plan: bool = False, **kwargs) -> Explanation | ModelExplanation:
    """Explains whether ``layer(*inputs, **kwargs)`` runs fused and, if not, why.

    For a layer with kernels nothing is computed. For a model, or a layer whose messages are generated, a copy runs
    once, and its calls are not counted by :func:`edgeless.report`. The answer covers the forward and the gradients.
    Second derivatives of attention, minima, maxima and sums over relations always run in PyTorch ops, with edge
    tensors.

    Args:
        layer: a layer, of edgeless or not, a function of ``edgeless.dgl.ops``, or a model, whose graph layers are
            explained one by one.
        *inputs: the arguments of the call by position.
        plan: whether to list for each op its engine, kernel, tile, feature or head tiles, bytes and roofline time.
            This runs the call once, and its backward if a parameter or an input needs a gradient; no ``.grad`` changes.
        **kwargs: the arguments of the call by name.
    Returns:
        An explanation, true if everything runs fused, that prints as text and shows as a table in notebooks.

    Raises:
        TypeError: layer cannot be called, or not with these arguments.

    Example:
        >>> import torch, edgeless
        >>> edgeless.explain(torch.nn.Linear(2, 2), torch.ones(1, 2))
        Linear does not run fused, because Linear is not a layer of edgeless.
    """
    if not callable(layer):
        raise TypeError(f"explain: layer must be a torch.nn.Module or a function, got {type(layer).__name__}")
    name = getattr(layer, "__name__", type(layer).__name__)
    if not hasattr(layer, "_fusion_refusals") and not hasattr(layer, "_explanation"):
        if isinstance(layer, torch.nn.Module) and not is_graph_layer(layer) and next(layers_of(layer), None):
            _check_arguments(layer, name, inputs, kwargs)
            return _explain_model(layer, inputs, kwargs, plan)
        return Explanation(name, False, (_of_stock(layer, name),))
    _check_arguments(layer, name, inputs, kwargs)
    if hasattr(layer, "_explanation"):
        return layer._explanation(inputs, kwargs, plan)
    reasons = layer._fusion_refusals(*inputs, **kwargs)
    if current_backend() == "reference":
        reasons = [REFERENCE, *reasons]
    steps: tuple[Step, ...] = ()
    if plan and not reasons:
        parameters = list(layer.parameters()) if isinstance(layer, torch.nn.Module) else []
        with recording():  # so that the calls are not counted
            steps = tuple(record(lambda: layer(*inputs, **kwargs), [*parameters, *inputs, *kwargs.values()]))
    return Explanation(name, not reasons, tuple(reasons), steps)


def _check_arguments(layer, name: str, inputs: tuple, kwargs: dict) -> None:
    called = layer.forward if isinstance(layer, torch.nn.Module) else layer
    try:
        inspect.signature(called).bind(*inputs, **kwargs)
    except TypeError as error:
        raise TypeError(f"explain: {name} cannot be called with these arguments: {error}") from None


def _of_stock(layer, name: str) -> str:
    """The reason why a layer or function of another package does not run fused."""
    if (fused := LAYERS.get(type(layer))) is None:
        return f"{name} is not a layer of edgeless"
    if why := why_never_fused(layer, fused):
        return why
    package = fused.__module__.rpartition(".")[0]
    reason = f"it is the stock layer, which edgeless.accelerate(model) turns into {package}.{name}"
    return reason + (" if EDGELESS_GENERATE allows it" if hasattr(fused, "_runs_generated") else "")


def why_never_fused(layer: torch.nn.Module, fused: type) -> str:
    """The reason why a layer's own state rules out every fused call of class ``fused``; "" if it does not."""
    if not hasattr(fused, "_state_refusals"):
        return ""
    swapped = fused.__new__(fused)
    swapped.__dict__ = layer.__dict__
    refusals = swapped._state_refusals()
    return "; because ".join(refusals)


def _explain_model(model: torch.nn.Module, inputs: tuple, kwargs: dict, plan: bool) -> ModelExplanation:
    """Runs a copy of the model once and collects the explanations of its graph layers."""
    copied = copy.deepcopy(model)
    names = {id(module): name for name, module in copied.named_modules()}
    layers = dict(layers_of(copied))
    gpus = {parameter.device.index for parameter in copied.parameters() if parameter.is_cuda}
    with torch.random.fork_rng(gpus), recording(plan, ahead=True) as calls:
        for module in layers.values():
            if not is_ours(module) and not _joins(module):
                found = Explanation(type(module).__name__, False, (_of_stock(module, type(module).__name__),))
                module.register_forward_pre_hook(partial(_note, calls, found))
        copied(*inputs, **kwargs)
    told = without_repeats((names.get(id(layer), found.layer), found) for layer, found in calls)
    called = {id(layer) for layer, _ in calls}
    joined = {id(inner) for layer, _ in calls if isinstance(layer, torch.nn.Module) for inner in _joined_by(layer)}
    idle = (name for name, module in layers.items() if id(module) not in called | joined and not _joins(module))
    return ModelExplanation(type(model).__name__, told, tuple(idle))


def _joined_by(layer: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The modules whose calls one call of a layer replaces, be they inside of it or not."""
    return getattr(layer, "_layers", layer).modules()


def _joins(module: torch.nn.Module) -> bool:
    """Returns whether a module is a layer that calls other layers and joins their results."""
    return hasattr(LAYERS.get(type(module), type(module)), "_joins_layers")


def _note(calls: list, found: Explanation, module: torch.nn.Module, inputs: tuple) -> None:
    calls.append((module, found))


def _look_for_kernels(kind: str, op: str) -> Optional[str]:
    key = {"cpu": "CPU", "cuda": "CUDA"}.get(kind)
    if key is None:
        return f"edgeless has no kernels for {kind!r} devices"
    if kind == "cuda" and torch.version.hip is not None:  # a ROCm build calls AMD's devices cuda too
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
    """Returns a clause that names the active transform which rules out all kernels, or None.

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
# Framework -> the function that joins calls of fused layers.
JOINS: dict[str, Callable[[torch.nn.Module], list[tuple[str, int]]]] = {}


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
    join: Optional[Callable[[torch.nn.Module], list[tuple[str, int]]]] = None,
) -> None:
    """Registers the layers of a framework for which edgeless has no fused version, for ``edgeless.accelerate``.

    Args:
        framework: its name.
        is_layer: whether a module is a layer of the framework.
        generated: maps a layer's class to the class that generates its messages, or to None. Without it such layers are
            reported only.
        join: joins fused layers of a model that are called one by one, and returns the name and the number of layers of
            each group.
    """
    FAMILIES[framework] = is_layer
    if generated is not None:
        GENERATORS[framework] = generated
    if join is not None:
        JOINS[framework] = join


def is_ours(module: torch.nn.Module) -> bool:
    """Returns whether a module is a layer of edgeless, whose calls are reported."""
    return hasattr(module, "_fusion_refusals") or hasattr(module, "_explanation")


def is_family(module: torch.nn.Module) -> bool:
    """Returns whether a module is a layer of a framework that edgeless knows."""
    return any(is_layer(module) for is_layer in FAMILIES.values())


def is_graph_layer(module: torch.nn.Module) -> bool:
    """Returns whether a module is a layer of edgeless, or one of a framework that passes messages or has a fused
    version.
    """
    return is_ours(module) or type(module) in LAYERS or is_family(module)


def layers_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The graph layers of a model and their names, without parts of a layer, such as its aggregation; layers that
    another layer only joins, as HeteroConv does, are included.
    """
    inside = ""  # the name of the layer whose parts follow
    for name, module in model.named_modules():
        if inside and name.startswith(inside):
            continue
        if is_graph_layer(module):
            yield name, module
            inside = "" if _joins(module) else f"{name}." if name else "."
            if inside == ".":
                return
        else:
            inside = ""
