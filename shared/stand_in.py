"""Modules that stand for a framework's: an import that was swapped finds every name that it found before.

An adapter says with :func:`declare` which of its modules stand for which, and each of these calls :func:`stand_in`.
What the module does not define is then the stock module's own object, but for what edgeless replaces, which is ours
under whatever name the framework has it. The inner modules of the stock package are there too: as a file of the
adapter, or else made when they are first imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any, Optional

from .backends import LAYERS

__all__ = ["StandIn", "declare", "stand_in"]

_STOCK: dict[str, str] = {}  # name of a module that stands for another -> name of that one
_ROOTS: dict[str, str] = {}  # name of a stock module -> name of the adapter's module that stands for it
_FUNCTIONS: dict[FunctionType, Any] = {}  # stock function -> what replaces it; for layers there is LAYERS


class StandIn(ModuleType):
    """A module that has, beside its own names, those of the stock module that it stands for."""

    def __getattr__(self, name: str) -> Any:
        stock = _STOCK[self.__name__]
        try:
            if _is_special(name):  # of the import system and of tools: they mean this module
                raise AttributeError
            value = getattr(sys.modules[stock], name)
        except AttributeError:
            both = f"module {self.__name__!r} has no attribute {name!r}, and neither has {stock!r}"
            raise AttributeError(both, name=name, obj=self) from None
        return _ours(value)

    def __setattr__(self, name: str, value: Any) -> None:
        # The import system binds an inner module to its package. torch_geometric.nn has a function ``summary`` out of
        # a module of that name: there the function is to stay.
        if isinstance(value, StandIn) and not isinstance(getattr(_stock_of(self), name, value), ModuleType):
            return
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*vars(self), *(name for name in dir(_stock_of(self)) if not _is_special(name))})

    def __reduce__(self):  # pickles of functions have the modules that these read, by cloudpickle for example
        return importlib.import_module, (self.__name__,)


def declare(adapter: str, **stock: str) -> None:
    """Says which modules of a package stand for which: ``declare("edgeless.pyg", nn="torch_geometric.nn")``.

    Nothing is imported. From now on imports of what is within these modules wait for :func:`stand_in`.
    """
    _ROOTS.update({module: f"{adapter}.{name}" for name, module in stock.items()})
    if _Finder not in sys.meta_path:
        sys.meta_path.append(_Finder)  # the last: what is there as a file comes first


def stand_in(name: str, stock: str, functions: Optional[Mapping[FunctionType, Any]] = None) -> None:
    """Lets the module ``name``, at the end of its body, stand for the module ``stock``.

    Its ``__all__`` gets the names that a star import of the stock module gives.

    Args:
        name: of a module that is being imported.
        stock: of a module that can be imported.
        functions: stock functions with what replaces them, here and in all other modules that stand for one.
    """
    _FUNCTIONS.update(functions or {})
    _become(sys.modules[name], importlib.import_module(stock), stock)


def _become(module: ModuleType, stock: ModuleType, stock_name: str) -> None:
    _STOCK[module.__name__] = stock_name
    names = getattr(stock, "__all__", None)
    if names is None:
        names = [name for name in vars(stock) if not name.startswith("_")]
    own = vars(module).get("__all__", ())
    module.__dict__["__all__"] = [*own, *(name for name in names if name not in own)]
    if hasattr(stock, "__path__"):
        module.__dict__.setdefault("__path__", [])  # nowhere: the inner modules are found below
    module.__class__ = StandIn


def _ours(value: Any) -> Any:
    """What stands for an object of a framework, or the object itself."""
    if isinstance(value, type):
        return LAYERS.get(value, value)
    if isinstance(value, FunctionType):
        return _FUNCTIONS.get(value, value)
    if isinstance(value, ModuleType) and (root := _root_of(value.__name__)) is not None:
        return importlib.import_module(_ROOTS[root] + value.__name__[len(root) :])
    return value


def _root_of(stock: str) -> Optional[str]:
    """The package that an adapter's module stands for, of a stock module of this name within it."""
    return next((root for root in _ROOTS if stock == root or stock.startswith(root + ".")), None)


def _stock_of(module: ModuleType) -> ModuleType:
    return sys.modules[_STOCK[module.__name__]]


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


class _Finder:
    """Finds the inner modules of stock packages under the names of the modules that stand for these."""

    @staticmethod
    def find_spec(name: str, path=None, target=None) -> Optional[ModuleSpec]:
        package, _, inner = name.rpartition(".")
        root = next((own for own in _ROOTS.values() if f"{package}.".startswith(f"{own}.")), None)
        if root is None:
            return None
        importlib.import_module(root)  # which another thread may have begun: only then is known what edgeless replaces
        stock = _inner_name(_STOCK[package], inner) if package in _STOCK else None
        return None if stock is None else importlib.util.spec_from_loader(name, _Loader(stock))


def _inner_name(package: str, inner: str) -> Optional[str]:
    """The name of a module within a stock package, None where it has none of this name."""
    bound = vars(sys.modules[package]).get(inner)
    if isinstance(bound, ModuleType) and _root_of(bound.__name__) is not None:
        return bound.__name__  # dgl.nn.conv is dgl.nn.pytorch.conv
    name = f"{package}.{inner}"
    return name if name in sys.modules or importlib.util.find_spec(name) is not None else None


class _Loader:
    """Makes a module that stands for a stock module."""

    def __init__(self, stock: str):
        self._stock = stock

    def is_package(self, name: str) -> bool:
        return hasattr(importlib.import_module(self._stock), "__path__")

    def create_module(self, spec: ModuleSpec) -> None:
        """None: the import system makes it."""

    def exec_module(self, module: ModuleType) -> None:
        stock = importlib.import_module(self._stock)
        module.__doc__ = f"``{self._stock}``, with what edgeless replaces in its place."
        _become(module, stock, self._stock)
