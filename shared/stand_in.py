"""Modules that stand for a framework's: an import that was swapped finds every name that it found before.

The modules of the adapters that stand for one call :func:`stand_in` at the end of their bodies. What such a module does
not define is then the stock module's own object, but for what edgeless replaces, which is ours under whatever name the
framework has it. The inner modules of the stock package are there too: as a file of the adapter, or else made when
they are first imported.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec, PathFinder
from types import FunctionType, ModuleType
from typing import Any, Optional

from .backends import LAYERS

__all__ = ["StandIn", "stand_in"]

_STOCK: dict[str, str] = {}  # name of a module that stands for another -> name of that one
_ROOTS = {  # name of a stock module -> name of the adapter's module that stands for it
    "dgl.nn": "edgeless.dgl.nn",
    "dgl.ops": "edgeless.dgl.ops",
    "dgl.transforms": "edgeless.dgl.transforms",
    "torch_geometric.nn": "edgeless.pyg.nn",
    "torch_geometric.transforms": "edgeless.pyg.transforms",
}
_FUNCTIONS: dict[FunctionType, Any] = {}  # stock function -> what replaces it; for layers there is LAYERS


class StandIn(ModuleType):
    """A module that has, beside its own names, those of the stock module that it stands for."""

    def __getattr__(self, name: str) -> Any:
        stock = _STOCK[self.__name__]
        try:
            if _is_special(name):  # of the import system and of tools: they mean this module
                raise AttributeError
            _import_root_of(self.__name__)
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
    names = getattr(stock, "__all__", None)
    if names is None:
        names = [name for name in vars(stock) if not name.startswith("_")]
    own = vars(module).get("__all__", ())
    module.__dict__["__all__"] = [*own, *(name for name in names if name not in own)]
    if hasattr(stock, "__path__"):
        module.__dict__.setdefault("__path__", [])  # nowhere: the inner modules are found below
    _STOCK[module.__name__] = stock_name
    module.__class__ = StandIn
    for name, value in list(vars(module).items()):  # inner modules that another thread imported meanwhile
        if isinstance(value, StandIn) and not isinstance(getattr(stock, name, value), ModuleType):
            del module.__dict__[name]


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
        """Imports nothing: Python 3.11 holds the lock of all imports meanwhile, and whoever is waited for needs it."""
        package, _, inner = name.rpartition(".")
        if _own_root(package) is None:
            return None
        stock = sys.modules.get(_STOCK.get(package, ""))
        # Another thread may be importing the package, whose inner modules are not known then. The loader knows.
        if stock is not None and _inner_name(stock, inner) is None:
            return None
        return ModuleSpec(name, _Loader, is_package=True)


class _Loader:
    """Makes a module that stands for a stock module."""

    @staticmethod
    def create_module(spec: ModuleSpec) -> None:
        """None: the import system makes it."""

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        name = _stock_name(module.__name__)
        stock = importlib.import_module(name)
        module.__doc__ = f"``{name}``, with what edgeless replaces in its place."
        if not hasattr(stock, "__path__"):
            del module.__path__
        _become(module, stock, name)


def _stock_name(name: str) -> str:
    """The name of the stock module that an adapter's module stands for.

    The adapter is not imported for it: the thread holds the import system's lock of ``name``, and the thread that
    imports the adapter may come to need that one.
    """
    for stock, own in _ROOTS.items():
        if name == own:
            return stock
    package, _, inner = name.rpartition(".")
    found = _inner_name(importlib.import_module(_stock_name(package)), inner)
    if found is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return found


def _inner_name(package: ModuleType, inner: str) -> Optional[str]:
    """The name of a module within a stock package, None where it has none of this name."""
    bound = vars(package).get(inner)
    if isinstance(bound, ModuleType) and _root_of(bound.__name__) is not None:
        return bound.__name__  # dgl.nn.conv is dgl.nn.pytorch.conv
    name = f"{package.__name__}.{inner}"
    if name in sys.modules or PathFinder.find_spec(name, getattr(package, "__path__", [])) is not None:
        return name
    return None


def _own_root(name: str) -> Optional[str]:
    """The adapter's module of ``_ROOTS`` that a module of this name is, or is within."""
    return next((own for own in _ROOTS.values() if f"{name}.".startswith(f"{own}.")), None)


def _import_root_of(name: str) -> None:
    """Waits for the adapter's module around a module ``name``: only then is known what edgeless replaces.

    Another thread may have begun that import. None of the import system's locks on inner modules is held here.
    """
    root = _own_root(name)
    if root is not None and root not in _STOCK:
        importlib.import_module(root)


# Not when an adapter is imported: a thread does not wait for a package that another one is importing before it imports
# an inner module of that package. The last place is for what no file is found for.
if _Finder not in sys.meta_path:
    sys.meta_path.append(_Finder)
