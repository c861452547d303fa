"""Modules that stand in for a framework's: after a swapped import, every name of the upstream module is still found.

An adapter module that stands in for an upstream one calls :func:`stand_in` at the end of its body. A name that it does
not define then gives the upstream object or, where edgeless replaces that object, the replacement, under any name that
the framework has for it. Submodules of the upstream package exist too: as a file of the adapter, or else created when
they are first imported.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec, PathFinder
from types import FunctionType, ModuleType
from typing import Any, Optional

from ..choices.backends import LAYERS

__all__ = ["StandIn", "stand_in"]

_STOCK: dict[str, str] = {}  # name of a stand-in module -> name of its upstream module
_ROOTS = {  # name of an upstream module -> name of the adapter's stand-in
    "dgl.dataloading": "edgeless.dgl.dataloading",
    "dgl.nn": "edgeless.dgl.nn",
    "dgl.ops": "edgeless.dgl.ops",
    "dgl.transforms": "edgeless.dgl.transforms",
    "torch_geometric.loader": "edgeless.pyg.loader",
    "torch_geometric.nn": "edgeless.pyg.nn",
    "torch_geometric.transforms": "edgeless.pyg.transforms",
}
_FUNCTIONS: dict[FunctionType, Any] = {}  # upstream function -> its replacement; LAYERS has those of layers


class StandIn(ModuleType):
    """A module that has, beside its own names, those of its upstream module."""

    def __getattr__(self, name: str) -> Any:
        stock = _STOCK[self.__name__]
        try:
            if _is_special(name):  # the import system and tools ask for this module's own attribute
                raise AttributeError
            _import_root_of(self.__name__)
            value = getattr(sys.modules[stock], name)
        except AttributeError:
            both = f"module {self.__name__!r} has no attribute {name!r}, and neither has {stock!r}"
            raise AttributeError(both, name=name, obj=self) from None
        return _ours(value)

    def __setattr__(self, name: str, value: Any) -> None:
        # The import system binds a submodule to its package. torch_geometric.nn has a function ``summary`` from a
        # submodule of that name: the name must keep the function.
        if isinstance(value, StandIn) and not isinstance(getattr(_stock_of(self), name, value), ModuleType):
            return
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*vars(self), *(name for name in dir(_stock_of(self)) if not _is_special(name))})

    def __reduce__(self):  # cloudpickle, for example, pickles the modules that a function reads
        return importlib.import_module, (self.__name__,)


def stand_in(name: str, stock: str, functions: Optional[Mapping[FunctionType, Any]] = None) -> None:
    """Makes the module ``name`` stand in for the upstream module ``stock``; called at the end of its body.

    Its ``__all__`` gets the names of a star import of the upstream module.

    Args:
        name: name of a module that is being imported.
        stock: name of a module that can be imported.
        functions: upstream function -> replacement, for this and all other stand-in modules.
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
        module.__dict__.setdefault("__path__", [])  # no folder: _Finder finds the submodules
    _STOCK[module.__name__] = stock_name
    module.__class__ = StandIn
    for name, value in list(vars(module).items()):  # submodules that another thread imported meanwhile
        if isinstance(value, StandIn) and not isinstance(getattr(stock, name, value), ModuleType):
            del module.__dict__[name]


def _ours(value: Any) -> Any:
    """The replacement of a framework's object, or the object itself."""
    if isinstance(value, type):
        return LAYERS.get(value, value)
    if isinstance(value, FunctionType):
        return _FUNCTIONS.get(value, value)
    if isinstance(value, ModuleType) and (root := _root_of(value.__name__)) is not None:
        return importlib.import_module(_ROOTS[root] + value.__name__[len(root) :])
    return value


def _root_of(stock: str) -> Optional[str]:
    """The key of ``_ROOTS`` that an upstream module of this name is, or lies within."""
    return next((root for root in _ROOTS if stock == root or stock.startswith(root + ".")), None)


def _stock_of(module: ModuleType) -> ModuleType:
    return sys.modules[_STOCK[module.__name__]]


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


class _Finder:
    """Finds submodules of upstream packages under the names of their stand-ins."""

    @staticmethod
    def find_spec(name: str, path=None, target=None) -> Optional[ModuleSpec]:
        """Must import nothing: Python 3.11 holds the global import lock here, and a thread that this one would wait for
        needs that lock.
        """
        package, _, inner = name.rpartition(".")
        if _own_root(package) is None:
            return None
        stock = sys.modules.get(_STOCK.get(package, ""))
        # While another thread imports the package, its submodules are unknown here; the loader checks them.
        if stock is not None and _inner_name(stock, inner) is None:
            return None
        return ModuleSpec(name, _Loader, is_package=True)


class _Loader:
    """Creates a stand-in for an upstream submodule."""

    @staticmethod
    def create_module(spec: ModuleSpec) -> None:
        """Returns None, so that the import system creates the module."""

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        name = _stock_name(module.__name__)
        stock = importlib.import_module(name)
        module.__doc__ = f"``{name}``, with what edgeless replaces in its place."
        if not hasattr(stock, "__path__"):
            del module.__path__
        _become(module, stock, name)


def _stock_name(name: str) -> str:
    """The name of the upstream module of the stand-in ``name``.

    Does not import the adapter: this thread holds the import lock of ``name``, which the thread that imports the
    adapter may need.
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
    """The full name of the submodule ``inner`` of an upstream package; None if the package has no such submodule."""
    bound = vars(package).get(inner)
    if isinstance(bound, ModuleType) and _root_of(bound.__name__) is not None:
        return bound.__name__  # dgl.nn.conv is dgl.nn.pytorch.conv
    name = f"{package.__name__}.{inner}"
    if name in sys.modules or PathFinder.find_spec(name, getattr(package, "__path__", [])) is not None:
        return name
    return None


def _own_root(name: str) -> Optional[str]:
    """The adapter's module in ``_ROOTS`` that a module of this name is, or lies within."""
    return next((own for own in _ROOTS.values() if f"{name}.".startswith(f"{own}.")), None)


def _import_root_of(name: str) -> None:
    """Imports the adapter module around the module ``name``, which registers the replacements; waits for it if another
    thread has begun that import. This thread holds no import lock of a submodule here.
    """
    root = _own_root(name)
    if root is not None and root not in _STOCK:
        importlib.import_module(root)


# Registered here and not by an adapter: a thread may import a submodule while another thread is still importing its
# package. The finder comes last, so that a file of the adapter takes precedence.
if _Finder not in sys.meta_path:
    sys.meta_path.append(_Finder)
