"""The upstream methods of a generated layer's class, which PyG writes anew for each class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

from torch_geometric.nn.conv import message_passing as stock

# The original methods. PyG writes faster copies of them for each class.
ORIGINAL = {
    step: vars(stock.MessagePassing).get(f"_orig_{step}", vars(stock.MessagePassing)[step])
    for step in ("propagate", "edge_updater")
}


def keep_stock_steps(cls: type, base: Optional[type]) -> None:
    """Keeps the upstream methods of a class, and deletes those that PyG has written into it, which would hide ours."""
    steps = {}
    for step in ORIGINAL:
        holder = base or cls
        written = vars(holder).get(step)
        if is_template(written, holder, step):
            steps[step] = written
            if holder is cls:
                delattr(cls, step)
        else:
            steps[step] = None
    cls._stock_steps_of = steps


def stock_step(layer, step: str):
    """The upstream method ``step`` of a layer, as a function of the layer."""
    if layer._explain or layer._decomposed_layers != 1:
        return ORIGINAL[step]
    steps = vars(type(layer)).get("_stock_steps_of")
    if steps is None:  # the layer was an instance of a class that PyG had completed
        keep_stock_steps(type(layer), vars(type(layer)).get("_generated_from"))
        steps = vars(type(layer))["_stock_steps_of"]
    return steps[step] or ORIGINAL[step]


def stock_forward(cls: type) -> Callable:
    """The forward of the class that the mixin precedes."""
    mixin = next(base for base in cls.__mro__ if "_runs_generated" in vars(base))
    bases = cls.__mro__[cls.__mro__.index(mixin) + 1 :]
    return next(vars(base)["forward"] for base in bases if "forward" in vars(base))


def updates_edges(layer) -> bool:
    return type(layer).edge_update is not stock.MessagePassing.edge_update


def overrides(cls: type, step: str) -> bool:
    """Returns whether a user's class overrides ``step``, ``propagate()`` or ``edge_updater()``."""
    for base in cls.__mro__:
        found = vars(base).get(step)
        if found in (None, ORIGINAL[step]) or "_runs_generated" in vars(base):
            continue
        if not is_template(found, base, step):
            return True
    return False


def is_template(function: Any, cls: type, step: str) -> bool:
    """Returns whether a method ``step`` of a class is the one that PyG has written for it."""
    return getattr(function, "__module__", "").endswith(f"_{cls.__name__}_{step}")
