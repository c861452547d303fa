"""Keys that decide whether calls of a captured model are equal: arguments, settings and the state of the model."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from itertools import chain
from typing import Any, Optional

import torch
from torch import Tensor
from torch.nn.modules import module as torch_module
from torch.nn.parameter import UninitializedTensorMixin

from .. import _C
from ..autocast import rounds_to
from ..choices.backends import current_backend, transform_refusal
from ..choices.engines import current_engine
from ..graph.graph_cache import several_processes
from ..graph.handle import Graph
from ..graph.typed import TypedGraph

__all__ = ["State", "Unfit", "call_refusal", "flatten", "is_moving", "leaf_key", "parts_of", "settings", "unflatten"]

_PLAIN = frozenset({type(None), bool, int, float, str, torch.dtype, torch.Size})
_TENSORS = (Tensor, torch.nn.Parameter)
_GRAPHS = (Graph, TypedGraph)


class Unfit(Exception):
    """Raised with the reason why a call cannot be captured."""


# Arguments -----------------------------------------------------------------------------------------------------------


def flatten(value: Any, leaves: list[Any]) -> Hashable:
    """Appends the contents of nested tuples, lists and dictionaries to ``leaves`` and returns the nesting as a tree."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind, tuple([flatten(part, leaves) for part in value])
    if kind is dict:
        return kind, tuple([(key, flatten(part, leaves)) for key, part in value.items()])
    leaves.append(value)
    return None


def unflatten(tree: Any, leaves: Iterator[Any]) -> Any:
    """The inverse of :func:`flatten`."""
    if tree is None:
        return next(leaves)
    kind, parts = tree
    if kind is dict:
        return {key: unflatten(part, leaves) for key, part in parts}
    return kind(unflatten(part, leaves) for part in parts)


def is_moving(leaf: Any) -> bool:
    """Returns whether an argument's values may differ between equal calls; all others are constants of a capture."""
    return isinstance(leaf, Tensor) and _C.is_moving(leaf)


def leaf_key(leaf: Any, device: Optional[int]) -> Hashable:
    """Returns the key of an argument for a capture on ``device``: equal keys may share the capture.

    The key of a constant has its identity, since a new tensor may get the address and the version of a freed one.

    Raises:
        Unfit: the argument cannot be captured.
    """
    kind = type(leaf)
    if kind in _TENSORS:
        if leaf.layout is not torch.strided:
            raise Unfit("a tensor is sparse")
        if leaf.get_device() != device:
            raise Unfit("a tensor is not on the current GPU")
        if _C.is_moving(leaf):
            if leaf.is_inference() and torch.is_grad_enabled():
                raise Unfit("a tensor was made in inference mode")
            return leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad
        if leaf.is_inference():  # PyTorch counts no versions of it
            raise Unfit("a tensor of integers was made in inference mode")
        return id(leaf), leaf._version, leaf.data_ptr()
    if kind in _PLAIN:
        return kind, leaf
    if kind in _GRAPHS or kind.__name__ == "DGLGraph":
        return id(leaf), tuple(map(id, parts_of(leaf)))
    raise Unfit(f"an argument is a {kind.__name__}")


def parts_of(leaf: Any) -> list[Any]:
    """Returns the objects that DGL replaces when a DGLGraph's edges or data change: its index and frame columns."""
    frames = (*getattr(leaf, "_node_frames", ()), *getattr(leaf, "_edge_frames", ()))
    columns = [column for frame in frames for column in frame._columns.values()]
    found = [getattr(leaf, "_graph", None)]
    for column in columns:
        found += (column, column.storage, column.index)
    return found


# Settings ------------------------------------------------------------------------------------------------------------


def settings() -> Hashable:
    """Returns the settings that decide what runs, and the thread, since threads must not share a capture's memory."""
    return (
        threading.get_ident(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        rounds_to("cuda"),
        current_backend(),
        current_engine(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch._C._get_cublas_allow_tf32(),
    )


def call_refusal() -> Optional[str]:
    """Returns why a call can be neither captured nor replayed now, or None if it can."""
    if reason := transform_refusal():
        return reason
    if torch._C._get_tracing_state() is not None:
        return "torch.jit is tracing"
    if torch._C._len_torch_dispatch_stack():
        return "a TorchDispatchMode is active"
    if not _C.saves_unseen():
        return "hooks of saved tensors are active"
    if any(_GLOBAL_HOOKS):
        return "there are hooks of all modules"
    if several_processes():
        return "several processes may write to a graph without PyTorch's knowledge"
    return None


_GLOBAL_HOOKS = [
    getattr(torch_module, f"_global_{name}", {})
    for name in ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
]
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


# The model -----------------------------------------------------------------------------------------------------------


class State:
    """The state of a model on which a capture relies: modules, attributes, parameters, buffers and their addresses.

    It holds references to the parts of the model but not to the model, which may be freed.

    Args:
        model: the model, whose current state is kept.
        device: the index of the GPU that all its tensors must be on.
        apart: the name of an attribute of the model that is ignored.
    Raises:
        Unfit: a model in this state cannot be captured.
    """

    def __init__(self, model: torch.nn.Module, device: int, apart: str):
        self._inner = [module for module in model.modules() if module is not model]
        self._hooks = [getattr(module, name, {}) for module in self._inner for name in _HOOKS]
        if any(self._hooks):
            raise Unfit("a module within has hooks")
        modules = (model, *self._inner)
        self._tables = [table for m in modules for table in (m._parameters, m._buffers, m._modules)]
        tensors = [value for table in self._tables for value in table.values() if isinstance(value, Tensor)]
        if any(isinstance(t, UninitializedTensorMixin) for t in tensors):
            raise Unfit("a parameter is not initialised yet")
        self._apart = list(model.__dict__).index(apart)
        self._attributes = self._attributes_of(model)
        self._names = [tuple(module.__dict__) for module in modules]
        given = [t for t in chain(tensors, *self._attributes) if isinstance(t, Tensor)]
        if any(t.get_device() != device for t in given):
            raise Unfit("a parameter, buffer or attribute is a tensor that is not on the current GPU")
        # Strides of matrices are compared, since .data may become a transposed view of the same memory. Integer tensors
        # with dimensions may be ids from which graphs are built; scalars are counters, which may change.
        matrices = [t for t in tensors if t.dim() > 1]
        integers = [t for t in given if t.dim() and not _C.is_moving(t)]
        # References to all that the state compares, so that no other object gets the id or the address of a part.
        self._entries = [dict(table) for table in self._tables]
        self._held = [tensors, [t.detach() for t in tensors], integers]
        self._state = _C.ModelState(
            tables=self._tables,
            hooks=self._hooks,
            inner=self._inner,
            own=model.__dict__,
            apart=self._apart,
            tensors=tensors,
            matrices=matrices,
            integers=integers,
        )

    def holds(self, model: torch.nn.Module) -> bool:
        """Returns whether the model is still in this state."""
        return self._state.holds(model.__dict__)

    def has_memory(self) -> bool:
        """Returns whether modules, parameters and buffers are the same objects at the same addresses."""
        return self._state.has_memory()

    def change(self, model: torch.nn.Module) -> str:
        """Returns a description of what differs from this state."""
        if not self.has_memory():
            return "parameters, buffers or modules are replaced"
        for module, before, after in zip((model, *self._inner), self._attributes, self._attributes_of(model)):
            for name, old, new in zip(module.__dict__, before, after):
                if old is not new:
                    return f"{type(module).__name__}.{name} is set to something else"
        return "the model changes"

    def restore(self, model: torch.nn.Module) -> None:
        """Sets the model's attributes, parameters and buffers back to this state."""
        for table, entries in zip(self._tables, self._entries):
            table.clear()
            table.update(entries)
        for module, names, values in zip((model, *self._inner), self._names, self._attributes):
            for name in set(module.__dict__).difference(names):
                del module.__dict__[name]
            module.__dict__.update((name, value) for name, value in zip(names, values) if value is not _APART)

    def _attributes_of(self, model: torch.nn.Module) -> list:
        found = [tuple(module.__dict__.values()) for module in self._inner]
        own = list(model.__dict__.values())
        own[self._apart] = _APART
        return [own, *found]


_APART = object()
