"""Keys of programs: everything outside of a call's tensors that a message function may read.

A key is made of plain values, so equal state gives equal keys whatever object holds it. Where a value cannot be read,
the object itself is in the key, by identity.
"""

from __future__ import annotations

import enum
import types
import weakref
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as _modules

from .spaces import Refused

_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.layout, enum.Enum, type)
_CONTAINERS = ("_parameters", "_buffers", "_modules")
_LIBRARIES = ("torch", "torch_geometric", "edgeless", "numpy", "math", "typing", "builtins", "dgl")
_DEPTH = 4
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Same:
    """An object in a key, compared by identity and kept alive by the key."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def value_key(value: Any, depth: int = 0) -> Hashable:
    """A key of a value: its contents as far as they can be read."""
    if isinstance(value, _PLAIN):
        return (type(value), value) if value == value else (type(value), "nan")
    if isinstance(value, Tensor):
        return Tensor, tuple(value.shape), value.dtype, value.device, value.requires_grad
    if depth < _DEPTH:
        if isinstance(value, (list, tuple)):
            return type(value), tuple(value_key(v, depth + 1) for v in value)
        if isinstance(value, dict):
            return type(value), tuple((value_key(k, depth + 1), value_key(v, depth + 1)) for k, v in value.items())
        if isinstance(value, (set, frozenset)):
            return type(value), frozenset(value_key(v, depth + 1) for v in value)
        if isinstance(value, types.MethodType):
            return types.MethodType, function_key(value.__func__, depth), Same(value.__self__)
        if isinstance(value, types.FunctionType):
            return function_key(value, depth)
        if type(value).__module__.partition(".")[0] == "numpy" and hasattr(value, "tobytes"):
            return type(value), value.tobytes()
        if hasattr(value, "__dict__") and not isinstance(value, (torch.nn.Module, types.ModuleType)):
            return Same(value), tuple((k, value_key(v, depth + 1)) for k, v in vars(value).items())
    return Same(value)


def function_key(function: types.FunctionType, depth: int = 0) -> Hashable:
    """A key of a function: itself, what it closes over and its defaults."""
    cells = function.__closure__ or ()
    contents = tuple(value_key(c.cell_contents, depth + 1) for c in cells if _is_filled(c))
    return Same(function), contents, value_key(function.__defaults__, depth + 1)


def _is_filled(cell) -> bool:
    try:
        cell.cell_contents  # noqa: B018  raises when empty
    except ValueError:
        return False
    return True


def module_key(module: torch.nn.Module, skipped: frozenset[str] = frozenset()) -> Hashable:
    """A key of the attributes of a module and of all modules in it; parameters and buffers are arguments.

    Raises:
        Refused: a module inside has a hook or another forward than its class.
    """
    if any(getattr(_modules, f"_global{name}") for name in _HOOKS):
        raise Refused("a global hook of modules is registered")
    found = []
    for name, inner in module.named_modules():
        state = inner.__dict__
        if inner is not module and (any(map(state.get, _HOOKS)) or "forward" in state):
            raise Refused(f"{name} ({type(inner).__name__}) has a hook or another forward than its class")
        attributes = tuple(
            (key, value_key(value))
            for key, value in state.items()
            if key not in skipped and key not in _CONTAINERS and not key.endswith("_hooks")
        )
        found.append((name, type(inner), attributes))
    return tuple(found)


class Watch:
    """The global values that methods of a class read, found once for a class."""

    def __init__(self, cls: type):
        self.places: list[tuple[dict, str]] = []
        self.closures: list[types.FunctionType] = []
        seen: set[int] = set()
        for base in cls.__mro__:
            if base.__module__.partition(".")[0] in _LIBRARIES:
                continue
            for value in vars(base).values():
                function = getattr(value, "__func__", getattr(value, "fget", value))
                if isinstance(function, types.FunctionType):
                    self._add(function, function.__code__, seen, 0)

    def _add(self, function: types.FunctionType, code, seen: set[int], depth: int) -> None:
        if id(code) in seen or depth > 3:
            return
        seen.add(id(code))
        scope = function.__globals__
        if function.__code__ is code and function.__closure__:
            self.closures.append(function)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._add(function, constant, seen, depth)
        for name in code.co_names:
            if name not in scope:
                continue
            value = scope[name]
            if isinstance(value, types.ModuleType):
                if value.__name__.partition(".")[0] not in _LIBRARIES:
                    self.places += [(vars(value), n) for n in code.co_names if _is_data(vars(value).get(n))]
            elif isinstance(value, types.FunctionType):
                self.places.append((scope, name))
                if value.__module__.partition(".")[0] not in _LIBRARIES:
                    self._add(value, value.__code__, seen, depth + 1)
            elif not isinstance(value, type):
                self.places.append((scope, name))

    def key(self) -> Hashable:
        """The values now."""
        values = tuple(value_key(scope.get(name)) for scope, name in self.places)
        return values, tuple(function_key(function) for function in self.closures)


def _is_data(value: Any) -> bool:
    return value is not None and not isinstance(value, (type, types.ModuleType))


_WATCHES: weakref.WeakKeyDictionary[type, tuple[Hashable, Watch]] = weakref.WeakKeyDictionary()


def globals_key(cls: type, methods: Hashable) -> Hashable:
    """A key of the globals and closures that a class's methods read.

    Args:
        methods: the methods that may have been replaced since; the search is repeated when they differ.
    """
    entry = _WATCHES.get(cls)
    if entry is None or entry[0] != methods:
        entry = _WATCHES[cls] = (methods, Watch(cls))
    return methods, entry[1].key()


def modes_key(device: torch.device) -> Hashable:
    """A key of torch's modes that change what ops compute."""
    from ..autocast import rounds_to

    return rounds_to(device.type), torch.get_default_dtype()
