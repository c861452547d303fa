"""Layers whose ``propagate()`` the generator runs: PyG's that have no kernels of their own, and users'.

:class:`GeneratedLayer` precedes a layer's class and replaces its ``propagate()`` and ``edge_updater()``. Each call runs
as a program of :mod:`edgeless.programs`, or as the upstream method where a program might be wrong or slower.
"""

from __future__ import annotations

from typing import Optional

from torch_geometric.nn.conv import message_passing as stock

from edgeless.checks import compiling
from edgeless.programs.layers import GeneratedClasses, GeneratedMixin, generate_choice

from ..conv import Scriptable
from . import edge_values, forwards, known_forwards, part_calls
from .calls import run_step
from .stock_steps import ORIGINAL, keep_stock_steps, overrides, updates_edges


class GeneratedLayer(GeneratedMixin, Scriptable):
    """Mixin of layers whose messages the generator runs; it precedes the layer's class and has no state."""

    _runs_generated = _runs_on_parts = True
    _no_calls = "it does not propagate messages by itself"

    def __call__(self, *args, **kwargs):
        if part_calls.has_part(args, kwargs):
            return part_calls.call(self, super().__call__, args, kwargs)
        if not updates_edges(self) or compiling():
            return super().__call__(*args, **kwargs)
        return edge_values.call(self, super().__call__, args, kwargs)

    @staticmethod
    def _class_of(base: type) -> type:
        return _completed_class(base)

    def propagate(self, edge_index, *args, **kwargs):
        """The upstream method's result, without an edge tensor where a program can compute it."""
        run = part_calls.run if type(edge_index) in part_calls.KINDS else run_step
        return run(self, "propagate", self._user_args, edge_index, args, kwargs)

    def edge_updater(self, edge_index, *args, **kwargs):
        """The upstream method's result. No other tensor by edge is allocated where a program can run."""
        run = part_calls.run if type(edge_index) in part_calls.KINDS else run_step
        return run(self, "edge_updater", self._edge_user_args, edge_index, args, kwargs)

    def forward(self, *args, **kwargs):
        """The upstream forward. Where it runs as a program, its edge tensors are not allocated."""
        if compiling() or type(known_forwards.LAYERS.get(self)) is str or known_forwards.STATE.traced:
            return super().forward(*args, **kwargs)
        return forwards.run(self, super().forward, args, kwargs)

    def _recorded_calls(self, inputs: tuple, kwargs: dict) -> list:
        if part_calls.has_part(inputs, kwargs):
            return part_calls.recorded(self, inputs, kwargs)
        calls = super()._recorded_calls(inputs, kwargs)
        if updates_edges(self):  # a call knows the width of the propagate() before, so the second one decides
            calls = super()._recorded_calls(inputs, kwargs)
        if known_forwards.runs_whole(self):  # it does from the next call on
            calls = super()._recorded_calls(inputs, kwargs)
        return calls

    # PyG's ways of making and pickling layers -----------------------------------------------------------------------

    def _set_jittable_templates(self, *args, **kwargs):
        # PyG writes an optimized propagate() into the class of an instance, where it would hide ours.
        cls = type(self)
        if "_stock_steps_of" in vars(cls):
            return
        base = vars(cls).get("_generated_from")
        if base is not None:
            self.inspector._cls = base
            self.__class__ = base
        try:
            stock.MessagePassing._set_jittable_templates(self, *args, **kwargs)
        finally:
            self.__class__ = cls
        keep_stock_steps(cls, base)

    def __prepare_scriptable__(self):
        base = vars(type(self)).get("_generated_from")
        cls = base or _scriptable(type(self))
        scriptable = cls.__new__(cls)
        scriptable.__dict__ = self.__dict__
        return scriptable


class _MessagePassingType(type):
    """Makes PyG's own layers, and ours with kernels, instances of our MessagePassing as well."""

    def __instancecheck__(cls, instance) -> bool:
        if cls.__dict__.get("_is_base"):
            return isinstance(instance, stock.MessagePassing)
        return super().__instancecheck__(instance)

    def __subclasscheck__(cls, subclass) -> bool:
        if cls.__dict__.get("_is_base"):
            return issubclass(subclass, stock.MessagePassing)
        return super().__subclasscheck__(subclass)


class MessagePassing(GeneratedLayer, stock.MessagePassing, metaclass=_MessagePassingType):
    """Base class for users' layers: :class:`torch_geometric.nn.MessagePassing` with generated messages.

    A user's class runs without an edge tensor where its ``message()``, ``aggregate()`` and ``update()`` can be traced;
    ``edgeless.explain(layer, *inputs)`` says whether they can, and why not.
    """

    _is_base = True
    stock = stock.MessagePassing


_CLASSES = GeneratedClasses(GeneratedLayer)


def generated_class(cls: type, module: Optional[str] = None) -> type:
    """The class with the bases :class:`GeneratedLayer` and ``cls``; the same class every time.

    Args:
        cls: a subclass of PyG's MessagePassing.
        module: the ``__module__`` of the class; by default that of ``cls``.
    """
    return _CLASSES.of(cls, module)


def class_to_swap(cls: type) -> Optional[type]:
    """The class that ``edgeless.accelerate`` gives to a layer of a class without kernels; None to leave it."""
    ours = hasattr(cls, "_fusion_refusals") or issubclass(cls, GeneratedLayer)
    if ours or generate_choice() == "off" or any(overrides(cls, step) for step in ORIGINAL):
        return None
    return _completed_class(cls)


def _completed_class(base: type) -> type:
    """The generated class for an instance of ``base`` that was made: torch.compile's tracer cannot complete a class."""
    cls = generated_class(base)
    if "_stock_steps_of" not in vars(cls):
        keep_stock_steps(cls, base)
    return cls


def _scriptable(cls: type) -> type:
    """A class with PyG's own methods, which TorchScript compiles."""
    steps = {step: method for step, method in (vars(cls).get("_stock_steps_of") or {}).items() if method}
    return type(cls.__name__, (cls,), {**steps, "__module__": cls.__module__, "_stock_steps_of": {}})
