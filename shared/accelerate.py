"""Replaces the upstream layers of an existing model by fused ones, in place."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, field

import torch

from .backends import FAMILIES, GENERATORS, LAYERS
from .capture import Capture
from .capture import capture as capture_calls

# Framework -> the module that registers its fused layers, imported only if the program has imported the framework.
ADAPTERS = {"torch_geometric": "edgeless.pyg.nn", "dgl": "edgeless.dgl.nn"}


@dataclass
class AccelerateReport:
    """What :func:`accelerate` did.

    Attributes:
        swapped: (name in the model, old class, new class) of every layer that was swapped.
        kept: (name in the model, class, reason) of every graph layer that was not swapped.
        captured: what reports on the captured model, ``model.captured``; None without ``capture``.
    """

    swapped: list[tuple[str, type, type]] = field(default_factory=list)
    kept: list[tuple[str, type, str]] = field(default_factory=list)
    captured: Capture | None = None

    def __str__(self) -> str:
        lines = [f"swapped {len(self.swapped)}, kept {len(self.kept)}"]
        for name, old, new in self.swapped:
            how = ", generated" if hasattr(new, "_runs_generated") else ""
            lines.append(f"  {name or '(the model)'}: {old.__name__} -> {new.__module__}.{new.__name__}{how}")
        for name, cls, why in self.kept:
            lines.append(f"  {name or '(the model)'}: {cls.__name__} kept, {why}")
        return "\n".join(lines)


def accelerate(model: torch.nn.Module, *, capture: bool = False) -> AccelerateReport:
    """Swaps every upstream layer inside ``model``, at any depth, that edgeless has a fused version of.

    Layers of PyG without one, and those of the user's own classes, get a class that generates their messages if
    ``EDGELESS_GENERATE`` is ``auto``, ``land`` or ``on``.

    The modules stay the same objects: parameters, the optimizer's references to them, hooks, buffers and training mode
    are kept; only the class changes. A second call changes nothing.

    Args:
        model: any module, or a single layer.
        capture: also replay repeated calls from CUDA graphs, as :func:`edgeless.capture` does; the report
            has ``model.captured``.

    Raises:
        TypeError: if ``model`` is not a module.
        ValueError: ``capture`` is set, and the model is captured already.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"accelerate: model must be a torch.nn.Module, got {type(model).__name__}")
    for framework, adapter in ADAPTERS.items():
        if sys.modules.get(framework) is not None:
            importlib.import_module(adapter)
    report = AccelerateReport()
    for name, module in model.named_modules():
        cls = type(module)
        generates = hasattr(LAYERS.get(cls), "_runs_generated")
        if new := _generated_class(module) if generates or cls not in LAYERS else LAYERS[cls]:
            module.__class__ = new
            report.swapped.append((name, cls, new))
        elif why := _why_kept(module):
            report.kept.append((name, cls, why))
    if capture:
        report.captured = capture_calls(model).captured
    return report


def _generated_class(module: torch.nn.Module) -> type | None:
    """Returns the class that generates the messages of a layer without kernels of its own, or None."""
    for framework, is_layer in FAMILIES.items():
        if framework in GENERATORS and is_layer(module):
            return GENERATORS[framework](type(module))
    return None


def _why_kept(module: torch.nn.Module) -> str | None:
    """Returns the reason why a graph layer is not swapped; None for fused layers and for other modules."""
    cls = type(module)
    if hasattr(module, "_fusion_refusals") or hasattr(module, "_explanation"):
        return None
    for stock in cls.__mro__[1:]:
        if stock in LAYERS and "_is_base" not in vars(LAYERS[stock]):
            return f"it is a subclass of {stock.__name__}, whose changes the fused layer does not know"
    if any(is_layer(module) for is_layer in FAMILIES.values()):
        return f"edgeless has no fused {cls.__name__}"
    return None
