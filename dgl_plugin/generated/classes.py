"""Layers whose messages the generator runs: DGL's that have no kernels of their own, and users'.

:class:`GeneratedLayer` precedes a layer's class and replaces its ``forward()``: the upstream forward runs with a graph
that records the computations on all edges (:mod:`edgeless.dgl.generated.recorded_graph`). These run as programs of
:mod:`edgeless.programs`, or by DGL's functions where a program might be wrong or slower.
"""

from __future__ import annotations

import types
import weakref
from typing import Any, Optional

from edgeless.programs.layers import GeneratedClasses, GeneratedMixin, generate_choice

from .calls import run

_STEPS = frozenset(("apply_edges", "update_all", "edge_softmax"))


class GeneratedLayer(GeneratedMixin):
    """Mixin of layers whose messages the generator runs; it precedes the layer's class and has no state."""

    _runs_generated = True
    _no_calls = "it computes nothing on the edges of a graph by itself"

    @staticmethod
    def _class_of(base: type) -> type:
        return generated_class(base)

    def forward(self, *args, **kwargs):
        """The upstream forward's result, without an edge tensor where programs can compute it."""
        return run(self, super().forward, args, kwargs)


_CLASSES = GeneratedClasses(GeneratedLayer)


def generated_class(cls: type, module: Optional[str] = None) -> type:
    """The class with the bases :class:`GeneratedLayer` and ``cls``; the same class every time.

    Args:
        cls: a module whose ``forward()`` takes a graph.
        module: the ``__module__`` of the class; by default that of ``cls``.
    """
    return _CLASSES.of(cls, module)


def class_to_swap(cls: type) -> Optional[type]:
    """The class that ``edgeless.accelerate`` gives to a layer of a class without kernels; None to leave it."""
    ours = hasattr(cls, "_fusion_refusals") or issubclass(cls, GeneratedLayer)
    if ours or generate_choice() == "off" or not passes_messages(cls):
        return None
    return generated_class(cls)


_PASSES: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


def passes_messages(cls: type) -> bool:
    """Returns whether the methods of a class call ``apply_edges()``, ``update_all()`` or ``edge_softmax()``."""
    if cls not in _PASSES:
        own = [base for base in cls.__mro__ if base.__module__.partition(".")[0] != "torch" and base is not object]
        _PASSES[cls] = any(_calls(value) for base in own for value in vars(base).values())
    return _PASSES[cls]


def _calls(value: Any) -> bool:
    function = getattr(value, "__func__", getattr(value, "fget", value))
    return isinstance(function, types.FunctionType) and _names(function.__code__)


def _names(code: types.CodeType) -> bool:
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return not _STEPS.isdisjoint(code.co_names) or any(map(_names, inner))
