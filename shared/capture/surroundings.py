"""The surroundings of a captured step: closures, globals, models, optimizers and their tensors, which it may read.

A replay runs no Python, so every call compares all of them with their state at the recording.
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any, Optional

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedTensorMixin

from .. import _C
from .keys import Unfit

__all__ = ["Change", "Surroundings", "counts_versions"]

_SIMPLE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, enum.Enum, type)
_SETTABLE = (bool, int, float, str, type(None))  # types of values that a replay sets as the step did
# Packages whose functions and objects are compared by identity and not searched, except for those of _FOLLOWED.
_LIBRARIES = frozenset({"torch", "torch_geometric", "edgeless", "dgl", "numpy", "math", "typing", "builtins"})
_FOLLOWED = ("torch_geometric.data", "torch_geometric.utils._mixin", "dgl.frame", "dgl.heterograph")
_SCHEDULERS = ("torch.optim.lr_scheduler", "torch.optim.swa_utils")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OPTIMIZER_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_SCALER_PASSES = "_per_optimizer_states"  # a GradScaler replaces it in every step
_DEPTH = 8
_MOST = 50_000  # most objects; a step that reaches more is not captured


class Change:
    """A number or text that the step has set, and that a replay sets too."""

    __slots__ = ("name", "scope", "value")

    def __init__(self, scope: dict, name: Any, value: Any):
        self.scope, self.name, self.value = scope, name, value

    def apply(self) -> None:
        self.scope[self.name] = self.value


class Surroundings:
    """The state that a step reads beside its arguments, at the time when this object is made.

    Args:
        function: the step.
        roots: the models and optimizers that the user has named.
        kind, device: the type and the index of the device on which the step runs.
    Raises:
        Unfit: a step with these surroundings cannot be captured.
    """

    def __init__(self, function: Any, roots: Iterable[Any], kind: str, device: int):
        self._kind, self._device = kind, device
        self._names: set[str] = set()
        self._known: dict[int, Any] = {}  # visited objects, kept alive so that no other gets their ids
        self._dicts: list[tuple[str, dict]] = []
        self._lists: list[tuple[str, list]] = []
        self._entries: list[tuple[str, dict, str]] = []
        self._cells: list[tuple[str, Any]] = []
        self._sets: list[tuple[str, set, frozenset]] = []
        self.tensors: list[Tensor] = []
        names = -1
        while names != len(self._names):  # each method that is found adds names
            names = len(self._names)
            self._clear()
            for root in roots:
                self._add(root, type(root).__name__, 0)
            self._add(function, "the step", 0)
        # The gradients of these parameters belong to the state that a step reads and leaves.
        self.leaves = [t for t in self.tensors if t.is_leaf and t.requires_grad]
        integers = [t for t in self.tensors if counts_versions(t, kind)]
        # References to all that is compared, so that no other object gets the id or the address of a part.
        self._values: list[Any] = [dict(found) for _, found in self._dicts]
        self._items = [list(found) for _, found in self._lists]
        self._places = [scope.get(name, _MISSING) for _, scope, name in self._entries]
        self._contents = [_content(cell) for _, cell in self._cells]
        self._held = [t.detach() for t in self.tensors]
        matrices = [t for t in self.tensors if t.dim() > 1]  # their .data may become a view of the same memory
        self._memory = _model_state([], self.tensors, matrices, integers)
        self._notice()

    def _notice(self) -> None:
        """Notes the identities of the objects in the dictionaries, which are quick to compare."""
        self._identities = _model_state([found for _, found in self._dicts], [], [], [])

    def holds(self) -> bool:
        """Returns whether the surroundings are unchanged."""
        return (
            self._memory.holds(_NOTHING)
            and not any(t._backward_hooks or t._post_accumulate_grad_hooks for t in self.leaves)
            and all(found == before for _, found, before in self._sets)
            and all(len(found) == len(items) for (_, found), items in zip(self._lists, self._items))
            and all(all(map(_same, items, found)) for (_, found), items in zip(self._lists, self._items))
            and all(_same(was, scope.get(name, _MISSING)) for (_, scope, name), was in zip(self._entries, self._places))
            and all(_same(was, _content(cell)) for (_, cell), was in zip(self._cells, self._contents))
            and (self._identities.holds(_NOTHING) or self._equals())
        )

    def _equals(self) -> bool:
        """Returns whether the dictionaries have equal values, if not the same objects."""
        if not all(map(_same_dicts, (found for _, found in self._dicts), self._values)):
            return False
        self._values = [dict(found) for _, found in self._dicts]
        self._notice()
        return True

    def difference(self) -> str:
        """Returns a description of what differs."""
        for label, *_ in self._differences():
            return f"{label} changes"
        return "a tensor that the step reads has moved, was edited or has hooks"

    def changes(self) -> list[Change]:
        """Returns the values that differ, if a replay can set them.

        Raises:
            Unfit: more than numbers and text differs.
        """
        found = []
        for label, name, scope, before, now in self._differences():
            if scope is None or type(now) not in _SETTABLE or type(before) not in _SETTABLE:
                raise Unfit(f"the step changes {label}")
            found.append(Change(scope, name, now))
        if not found and not self.holds():
            raise Unfit("the step moves, edits or hooks a tensor")
        return found

    def restore(self) -> None:
        """Restores dictionaries, lists and closures."""
        for (_, found), values in zip(self._dicts, self._values):
            if not _same_dicts(found, values):
                found.clear()
                found.update(values)
        for (_, found), items in zip(self._lists, self._items):
            found[:] = items
        for (_, scope, name), value in zip(self._entries, self._places):
            if value is not _MISSING:
                scope[name] = value
            else:
                scope.pop(name, None)
        for (_, cell), value in zip(self._cells, self._contents):
            if value is not _MISSING:
                cell.cell_contents = value

    def _differences(self) -> Iterator[tuple[str, Any, Optional[dict], Any, Any]]:
        """Yields for each difference its description, its name, the dictionary where it may be set, and the values
        before and now.
        """
        for (label, found), values in zip(self._dicts, self._values):
            for name in [*values, *(name for name in found if name not in values)]:
                before, now = values.get(name, _MISSING), found.get(name, _MISSING)
                if not _same(before, now):
                    yield f"{label}.{name}", name, found, before, now
        for (label, found), items in zip(self._lists, self._items):
            if len(found) != len(items) or not all(map(_same, items, found)):
                yield label, None, None, items, found
        for (label, scope, name), before in zip(self._entries, self._places):
            if not _same(before, now := scope.get(name, _MISSING)):
                yield f"{label}{name}", name, scope, before, now
        for (label, cell), before in zip(self._cells, self._contents):
            if not _same(before, now := _content(cell)):
                yield label, None, None, before, now
        for label, found, before in self._sets:
            if found != before:
                yield label, None, None, before, found

    # The search ------------------------------------------------------------------------------------------------------

    def _clear(self) -> None:
        for found in (self._known, self._dicts, self._lists, self._entries, self._cells, self._sets, self.tensors):
            found.clear()

    def _add(self, value: Any, label: str, depth: int) -> None:
        if isinstance(value, _SIMPLE) or id(value) in self._known:
            return
        if len(self._known) > _MOST:
            raise Unfit(f"more than {_MOST} objects can be reached from the step")
        self._known[id(value)] = value
        if isinstance(value, Tensor):
            self._add_tensor(value, label)
        elif isinstance(value, torch.nn.Module):
            self._add_module(value, label, depth)
        elif isinstance(value, torch.optim.Optimizer):
            self._add_optimizer(value)
        elif depth >= _DEPTH:
            return
        elif isinstance(value, list):
            self._lists.append((label, value))
            self._add_all(enumerate(value), label, depth)
        elif isinstance(value, (tuple, frozenset)):
            self._add_all(enumerate(value), label, depth)
        elif isinstance(value, dict):
            self._dicts.append((label, value))
            self._add_all(value.items(), label, depth)
        elif isinstance(value, set):
            self._sets.append((label, value, frozenset(value)))
        elif isinstance(value, types.FunctionType):
            self._add_function(value, label, depth)
        elif isinstance(value, types.MethodType):
            self._add(value.__func__, label, depth)
            self._add(value.__self__, type(value.__self__).__name__, depth)
        elif isinstance(value, functools.partial):
            self._add_all(enumerate((value.func, value.args, value.keywords)), label, depth)
        elif isinstance(value, types.ModuleType):
            if not _is_library(value.__name__):
                self._add_entries(vars(value), f"{value.__name__}.", depth)
        elif hasattr(value, "__dict__"):
            self._add_object(value, label, depth)

    def _add_all(self, pairs: Iterable[tuple[Any, Any]], label: str, depth: int) -> None:
        for name, value in list(pairs):
            self._add(value, f"{label}[{name!r}]" if isinstance(name, (int, str)) else label, depth + 1)

    def _add_entries(self, scope: dict, label: str, depth: int, names: Optional[Iterable[str]] = None) -> None:
        for name in sorted(self._names if names is None else names):
            if name in scope and not isinstance(scope[name], type):
                self._entries.append((label, scope, name))
                self._add(scope[name], f"{label}{name}", depth + 1)

    def _add_function(self, function: types.FunctionType, label: str, depth: int) -> None:
        if _is_library(function.__module__):
            return
        names = set(_names_in(function.__code__))
        self._names |= names
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            self._cells.append((name, cell))
            self._add(_content(cell), name, depth + 1)
        self._add_entries(function.__globals__, "", depth, names)
        self._add_all(enumerate(function.__defaults__ or ()), label, depth)
        if function.__kwdefaults__:
            self._add(function.__kwdefaults__, label, depth + 1)

    def _add_methods(self, kind: type, label: str, depth: int) -> None:
        """Adds the methods of a user's class that the step may call, by their names."""
        for base in kind.__mro__:
            if _is_library(base.__module__):
                continue
            for name, value in list(vars(base).items()):
                function = getattr(value, "__func__", getattr(value, "fget", value))
                called = name in self._names or name in ("forward", "__call__")
                if called and isinstance(function, types.FunctionType):
                    self._add(function, f"{label}.{name}", depth + 1)

    def _add_object(self, value: Any, label: str, depth: int) -> None:
        kind = type(value)
        label = label or kind.__name__
        if kind.__module__.startswith(_FOLLOWED) or hasattr(value, "_store") or kind.__module__ in _SCHEDULERS:
            self._dicts.append((kind.__name__, vars(value)))
            self._add_all(vars(value).items(), kind.__name__, depth)
        elif kind.__name__ == "GradScaler":
            names = [name for name in vars(value) if name != _SCALER_PASSES]
            self._add_entries(vars(value), "GradScaler.", depth, names)
        elif not _is_library(kind.__module__):
            self._add_methods(kind, kind.__name__, depth)
            self._add_entries(vars(value), f"{label}.", depth)

    def _add_module(self, model: torch.nn.Module, label: str, depth: int) -> None:
        for module in model.modules():
            self._known[id(module)] = module
            if any(getattr(module, name, None) for name in _HOOKS):
                raise Unfit(f"{type(module).__name__} has hooks, which a replay would not call")
            scope = vars(module)
            name = type(module).__name__
            self._dicts.append((name, scope))
            for key, value in scope.items():
                if isinstance(value, dict):
                    if id(value) not in self._known:
                        self._known[id(value)] = value
                        self._dicts.append((name, value))
                        for inner, part in value.items():
                            if not isinstance(part, torch.nn.Module):
                                self._add(part, f"{name}.{inner}", depth + 1)
                elif not isinstance(value, torch.nn.Module):
                    self._add(value, f"{name}.{key}", depth + 1)
            self._add_methods(type(module), name, depth)

    def _add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        name = type(optimizer).__name__
        for hooks in (getattr(optimizer, hooks, {}) for hooks in _OPTIMIZER_HOOKS):
            if hooks:
                raise Unfit(f"{name} has hooks, which a replay would not call")
            self._dicts.append((name, hooks))
        for attribute in ("state", "param_groups"):  # load_state_dict() replaces both
            self._entries.append((f"{name}.", vars(optimizer), attribute))
        self._lists.append((f"{name}.param_groups", optimizer.param_groups))
        for group in optimizer.param_groups:
            self._dicts.append((name, group))
            self._add_all(group.items(), name, 1)
        self._dicts.append((f"{name}.state", optimizer.state))
        for state in optimizer.state.values():
            self._dicts.append((f"{name}.state", state))
            self._add_all(state.items(), f"{name}.state", 1)

    def _add_tensor(self, tensor: Tensor, label: str) -> None:
        if isinstance(tensor, UninitializedTensorMixin):
            raise Unfit("a parameter is not initialised yet")
        if tensor.layout is not torch.strided:
            raise Unfit(f"{label} is a sparse tensor")
        if tensor.is_inference():
            raise Unfit(f"{label} was made in inference mode")
        if tensor.device.type == self._kind and tensor.get_device() != self._device:
            raise Unfit(f"{label} is a tensor on another GPU")
        if getattr(tensor, "_backward_hooks", None) or getattr(tensor, "_post_accumulate_grad_hooks", None):
            raise Unfit(f"{label} has hooks, which a replay would not call")
        self.tensors.append(tensor)


_MISSING = object()
_NOTHING: dict = {}


def _model_state(dicts: list[dict], tensors: list[Tensor], matrices: list[Tensor], integers: list[Tensor]):
    return _C.ModelState(
        tables=dicts,
        hooks=[],
        inner=[],
        own=_NOTHING,
        apart=0,
        tensors=tensors,
        matrices=matrices,
        integers=integers,
    )


def counts_versions(tensor: Tensor, kind: str) -> bool:
    """Returns whether an edit of a tensor makes a recording on devices of type ``kind`` stale.

    Integers may be ids from which graphs are built; numbers elsewhere may have become constants of the recording.
    Integers without dimensions are counters, which may change.
    """
    return tensor.device.type != kind or (tensor.dim() > 0 and not _C.is_moving(tensor))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is empty
        return _MISSING


def _same(before: Any, now: Any) -> bool:
    return before is now or (type(before) is type(now) and isinstance(now, (int, float, str)) and before == now)


def _same_dicts(one: dict, other: dict) -> bool:
    return len(one) == len(other) and all(name in one and _same(one[name], value) for name, value in other.items())


def _names_in(code: types.CodeType) -> Iterator[str]:
    """Yields the names of globals and attributes that code and its nested functions read."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _is_library(module: Optional[str]) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES
