"""Replaces the upstream layers of an existing model by fused ones, in place."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, field

import torch

from ..capture.model import Capture
from ..capture.model import capture as capture_calls
from ..choices.backends import FAMILIES, GENERATORS, JOINS, LAYERS, is_family, is_ours, why_never_fused
from .explanation import Printed

# Framework -> the module that registers its fused layers, imported only if the program has imported the framework.
ADAPTERS = {"torch_geometric": "edgeless.pyg.nn", "dgl": "edgeless.dgl.nn"}


@dataclass(repr=False)
class AccelerateReport(Printed):
    """The result of :func:`accelerate`.

    Attributes:
        swapped: (name in the model, old class, new class) of every layer that was swapped.
        kept: (name in the model, class, reason) of every graph layer that was not swapped.
        joined: (name in the model, number) of groups of layers that are now called as one sum over relations.
        captured: ``model.captured``, the report on the captured model; None without ``capture``.
    """

    swapped: list[tuple[str, type, type]] = field(default_factory=list)
    kept: list[tuple[str, type, str]] = field(default_factory=list)
    joined: list[tuple[str, int]] = field(default_factory=list)
    captured: Capture | None = None

    @property
    def generated(self) -> list[str]:
        """The names of the swapped layers that have no kernels of their own, and whose messages are generated."""
        return [name for name, _, new in self.swapped if _generates(new)]

    def __str__(self) -> str:
        generated = len(self.generated)
        how = f" ({len(self.swapped) - generated} with kernels, {generated} generated)" if generated else ""
        lines = [f"swapped {len(self.swapped)}{how}, kept {len(self.kept)}"]
        lines += [f"  {name}: {text}" for name, text in self._lines()]
        return "\n".join(lines)

    def _lines(self) -> list[tuple[str, str]]:
        lines = []
        for name, old, new in self.swapped:
            how = ", generated" if _generates(new) else ""
            lines.append((name, f"{old.__name__} -> {new.__module__}.{new.__name__}{how}"))
        lines += [(name, f"{cls.__name__} kept, {why}") for name, cls, why in self.kept]
        lines += [(name, f"{count} layers are called as one sum over relations") for name, count in self.joined]
        return [(name or "(the model)", text) for name, text in lines]

    def _rows(self):
        return ("name", "what was done"), self._lines()


def accelerate(model: torch.nn.Module, *, capture: bool = False) -> AccelerateReport:
    """Swaps every upstream layer inside ``model``, at any depth, that edgeless has a fused version of.

    A layer whose own state, such as its aggregation, rules out every fused call is kept, with the reason: to swap it
    would cost time and gain nothing. So are aggregations inside a layer, which it calls with an index. Layers of PyG
    without a fused version, and those of the user's own classes, get a class that generates their messages, unless
    ``EDGELESS_GENERATE`` is ``off``. The calls of at least four SAGEConv or GraphConv that PyG's ``to_hetero`` adds up
    become one call, which runs as one sum over relations where HeteroConv does.

    The modules stay the same objects: parameters, the optimizer's references to them, hooks, buffers and training mode
    are kept; only the class changes. A second call changes nothing. ``print(model)`` shows swapped layers as
    ``edgeless.GATConv(...)``.

    Args:
        model: any module, or a single layer.
        capture: also replay repeated calls from CUDA graphs, as :func:`edgeless.capture` does; the report
            has ``model.captured``.
    Returns:
        A report, which prints as text and shows as a table in notebooks.

    Raises:
        TypeError: if ``model`` is not a module.
        ValueError: ``capture`` is set, and the model is captured already.

    Example:
        >>> import torch, edgeless
        >>> edgeless.accelerate(torch.nn.Linear(2, 2))
        swapped 0, kept 0
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"accelerate: model must be a torch.nn.Module, got {type(model).__name__}")
    for framework, adapter in ADAPTERS.items():
        if sys.modules.get(framework) is not None:
            importlib.import_module(adapter)
    report = AccelerateReport()
    layers = [name for name, module in model.named_modules() if is_family(module)]
    for name, module in model.named_modules():
        cls = type(module)
        new = _generated_class(module) if _generates(LAYERS.get(cls)) or cls not in LAYERS else LAYERS[cls]
        if new is not None and hasattr(new, "_called_with_index") and _is_inside(name, layers):
            continue
        if new is None:
            why = _why_kept(module)
        elif why := why_never_fused(module, new):
            why = f"no call of it would run fused, because {why}"
        else:
            module.__class__ = new
            report.swapped.append((name, cls, new))
        if why:
            report.kept.append((name, cls, why))
    for join in JOINS.values():
        report.joined += join(model)
    if capture:
        report.captured = capture_calls(model).captured
    return report


def _generates(cls: type | None) -> bool:
    return hasattr(cls, "_runs_generated")


def _is_inside(name: str, layers: list[str]) -> bool:
    """Returns whether a module is part of one of these layers."""
    return any(layer != name and (not layer or name.startswith(layer + ".")) for layer in layers)


def _generated_class(module: torch.nn.Module) -> type | None:
    """Returns the class that generates the messages of a layer without kernels of its own, or None."""
    for framework, is_layer in FAMILIES.items():
        if framework in GENERATORS and is_layer(module):
            return GENERATORS[framework](type(module))
    return None


def _why_kept(module: torch.nn.Module) -> str | None:
    """Returns the reason why a graph layer is not swapped; None for fused layers and for other modules."""
    cls = type(module)
    if is_ours(module):
        return None
    for stock in cls.__mro__[1:]:
        if stock in LAYERS and "_is_base" not in vars(LAYERS[stock]):
            return f"it is a subclass of {stock.__name__}, whose changes the fused layer does not know"
    if not is_family(module):
        return None
    hint = "; unless EDGELESS_GENERATE is off, its messages are generated" if _generates(LAYERS.get(cls)) else ""
    return f"edgeless has no fused {cls.__name__}{hint}"
