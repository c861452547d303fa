"""Decides by the name of a function of torch whether it writes into its arguments."""

from __future__ import annotations

import inspect
from typing import Any

from torch.nn import functional

__all__ = ["inplace_place", "writes", "writes_inside"]

_DUNDERS = {f"__i{name}__" for name in ("add", "sub", "mul", "div", "truediv", "pow", "and", "or", "xor")}
_DUNDERS |= {"__setitem__", "__delitem__", "__ifloordiv__", "__imod__", "__ilshift__", "__irshift__"}
_PLACES = {
    name: list(inspect.signature(function).parameters).index("inplace")
    for name, function in vars(functional).items()
    if inspect.isfunction(function) and "inplace" in inspect.signature(function).parameters
}


def writes(name: str) -> bool:
    """Returns whether a function of this name writes into its first argument."""
    return name in _DUNDERS or (name.endswith("_") and not name.endswith("__"))


def inplace_place(name: str) -> int:
    """The position of the argument ``inplace`` of a function that has one."""
    return _PLACES[name]


def writes_inside(name: str, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Returns whether a call passes a true ``inplace``."""
    place = _PLACES.get(name)
    if place is None:
        return False
    return bool(kwargs.get("inplace", args[place] if len(args) > place else False))
