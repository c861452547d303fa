"""Keys of programs: everything outside of a call's tensors that a message function may read.

A key consists of plain values, so equal state gives equal keys whatever object holds it. Where a value cannot be read,
the key holds the object itself, which is compared by identity.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import threading
import types
import weakref
from collections.abc import Hashable, Iterator
from typing import Any, Optional

import torch
from torch import Tensor
from torch.nn.modules import module as _modules

from .front.spaces import Refused

_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.layout, enum.Enum, type)
_CONTAINERS = ("_parameters", "_buffers", "_modules")
_LIBRARIES = ("torch", "torch_geometric", "edgeless", "numpy", "math", "typing", "builtins", "dgl")
_CLASS_VALUES = (int, float, str, list, dict, tuple, set, Tensor)
_DEPTH = 6
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Notes(threading.local):
    """The objects that keys under construction in this thread have read: ``(kind, object, a, b)``, as SameCall
    (core_cuda/programs/same_call.cpp) compares them; None while no notes are taken.
    """

    taken: Optional[list[tuple[str, Any, Any, Any]]] = None


_notes = Notes()
_ABSENT = ...  # in a note: the value does not exist


@contextlib.contextmanager
def taking_notes() -> Iterator[list[tuple[str, Any, Any, Any]]]:
    """Notes the objects that keys made in the block read. The kind ``"unknown"`` stands for an object whose changes
    cannot be detected.
    """
    before, _notes.taken = _notes.taken, []
    try:
        yield _notes.taken
    finally:
        _notes.taken = before


def note(kind: str, read: Any, a: Any = None, b: Any = None) -> None:
    """Notes that ``read`` was read, if notes are being taken."""
    if _notes.taken is not None:
        _notes.taken.append((kind, read, a, b))


def note_attributes(instance: Any) -> None:
    """Notes that all attributes of an object were read."""
    note("object", instance, instance.__dict__, type(instance))
    note("dict", instance.__dict__)


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
        note("tensor" if type(value) in (Tensor, torch.nn.Parameter) else "unknown", value)
        return Tensor, tuple(value.shape), value.dtype, value.device, value.requires_grad
    if depth >= _DEPTH:
        if isinstance(value, (list, tuple, dict, set, frozenset)) or hasattr(value, "__dict__"):
            raise Refused(f"a value of {type(value).__name__} is nested too deeply to be followed")
    else:
        if isinstance(value, (list, tuple)):
            if isinstance(value, list):
                note("list", value)
            return type(value), tuple(value_key(v, depth + 1) for v in value)
        if isinstance(value, dict):
            note("dict", value)
            return type(value), tuple((value_key(k, depth + 1), value_key(v, depth + 1)) for k, v in value.items())
        if isinstance(value, (set, frozenset)):
            note("set", value, frozenset(value))
            return type(value), frozenset(value_key(v, depth + 1) for v in value)
        if isinstance(value, types.MethodType):
            return types.MethodType, function_key(value.__func__, depth), Same(value.__self__)
        if isinstance(value, types.FunctionType):
            return function_key(value, depth)
        if isinstance(value, functools.partial):
            return value_key((value.func, value.args, value.keywords), depth)
        if type(value).__module__.partition(".")[0] == "numpy" and hasattr(value, "tobytes"):
            note("unknown", value)
            return type(value), value.tobytes()
        if hasattr(value, "__dict__") and not isinstance(value, (torch.nn.Module, types.ModuleType)):
            note_attributes(value)
            state = tuple((k, value_key(v, depth + 1)) for k, v in vars(value).items())
            return Same(value), state, class_key(type(value), depth + 1)
    return Same(value)


def function_key(function: types.FunctionType, depth: int = 0) -> Hashable:
    """A key of a function: its code, what it closes over, its defaults and the globals that it reads.

    A function that a forward defines is another object at each call, of the same code.
    """
    contents = _cells_key(function, depth)
    for name in ("__code__", "__defaults__", "__kwdefaults__"):
        note("attribute", function, name, getattr(function, name))
    itself = Same(function) if vars(function) else (Same(function.__code__), Same(function.__globals__))
    defaults = [value_key(found, depth + 1) for found in (function.__defaults__, function.__kwdefaults__)]
    return itself, contents, *defaults, _watched(function, depth)


def _cells_key(function: types.FunctionType, depth: int) -> Hashable:
    cells = function.__closure__ or ()
    for cell in cells:
        note("cell", cell, cell.cell_contents if _is_filled(cell) else _ABSENT)
    return tuple(value_key(cell.cell_contents, depth + 1) for cell in cells if _is_filled(cell))


def class_key(cls: type, depth: int = 0) -> Hashable:
    """A key of the globals and closures that the methods of a class read."""
    return None if _is_library(cls.__module__) else _watched(cls, depth)


def _is_filled(cell) -> bool:
    try:
        cell.cell_contents  # noqa: B018  raises when empty
    except ValueError:
        return False
    return True


def module_key(module: torch.nn.Module, skipped: frozenset[str] = frozenset()) -> Hashable:
    """A key of the attributes of a module and of all modules in it, without parameters and buffers: they are arguments.

    Raises:
        Refused: a module inside has a hook or another forward than its class.
    """
    hooks = [getattr(_modules, f"_global{name}") for name in _HOOKS]
    for each in hooks:
        note("dict", each)
    if any(hooks):
        raise Refused("a global hook of modules is registered")
    found = []
    for name, inner in module.named_modules():
        state = inner.__dict__
        note_attributes(inner)
        for value in state.values():
            if isinstance(value, dict):  # the dictionaries of parameters, buffers, modules and hooks
                note("dict", value)
        if inner is not module and (any(map(state.get, _HOOKS)) or "forward" in state):
            raise Refused(f"{name} ({type(inner).__name__}) has a hook or another forward than its class")
        attributes = tuple(
            (key, value_key(value))
            for key, value in state.items()
            if key not in skipped and key not in _CONTAINERS and not key.endswith("_hooks")
        )
        found.append((name, type(inner), attributes, None if inner is module else class_key(type(inner))))
    return tuple(found)


class Watch:
    """The global variables that a function, or the methods of a class, read; they are found once."""

    def __init__(self, source: Any):
        self.places: list[tuple[dict, str]] = []
        self.closures: list[types.FunctionType] = []
        self.seen: set[int] = set()
        if isinstance(source, types.FunctionType):
            self._add(source, source.__code__, 0)
            self.closures = [function for function in self.closures if function is not source]
            return
        for base in source.__mro__:
            for value in () if _is_library(base.__module__) else list(vars(base).values()):
                function = getattr(value, "__func__", getattr(value, "fget", value))
                if isinstance(function, types.FunctionType):
                    self._add(function, function.__code__, 0)
            if not _is_library(base.__module__):  # class attributes that are numbers
                names = [name for name, value in vars(base).items() if isinstance(value, _CLASS_VALUES)]
                self.places += [(vars(base), name) for name in names if not name.startswith("__")]

    def _add(self, function: types.FunctionType, code, depth: int) -> None:
        if id(code) in self.seen or depth > 3:
            return
        self.seen.add(id(code))
        scope = function.__globals__
        if function.__code__ is code and function.__closure__:
            self.closures.append(function)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._add(function, constant, depth)
        for name in code.co_names:
            value = scope.get(name)
            if isinstance(value, types.ModuleType):
                if not _is_library(value.__name__):
                    self.places += [(vars(value), n) for n in code.co_names if _is_data(vars(value).get(n))]
            elif isinstance(value, types.FunctionType):
                self.places.append((scope, name))
                if not _is_library(value.__module__):
                    self._add(value, value.__code__, depth + 1)
            elif name in scope and not isinstance(value, type):
                self.places.append((scope, name))

    def key(self, depth: int) -> Hashable:
        """The current values."""
        for scope, name in self.places:
            note("item", scope, name, scope.get(name, _ABSENT))
        values = tuple(_global_key(scope.get(name), depth) for scope, name in self.places)
        return values, tuple(_cells_key(function, depth) for function in self.closures)


def _global_key(value: Any, depth: int) -> Hashable:
    """A key of a global value; a function has no key of its own, since it is watched with the code that calls it."""
    return Same(value) if isinstance(value, types.FunctionType) else value_key(value, depth + 1)


def _is_data(value: Any) -> bool:
    return value is not None and not isinstance(value, (type, types.ModuleType))


def _is_library(module: str) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES


_WATCHES: weakref.WeakKeyDictionary[Any, tuple[Hashable, Watch]] = weakref.WeakKeyDictionary()


def _watched(source: Any, depth: int, methods: Hashable = None) -> Hashable:
    if depth >= _DEPTH or (isinstance(source, types.FunctionType) and _is_library(source.__module__)):
        return None
    entry = _WATCHES.get(source)
    if entry is None or entry[0] != methods:
        entry = _WATCHES[source] = (methods, Watch(source))
    return entry[1].key(depth + 1)


def globals_key(cls: type, methods: Hashable) -> Hashable:
    """A key of the globals and closures that a class's methods read.

    Args:
        methods: the methods that may have been replaced since; the search is repeated when they differ.
    """
    return methods, _watched(cls, 0, methods)
