"""The arguments of a captured step: nested containers and batches of a framework, taken apart into tensors and numbers.

An adapter registers its framework's classes here (:func:`register_batch`).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from ..graph.handle import Graph
from ..graph.typed import TypedGraph
from .keys import Unfit, parts_of

__all__ = ["Leaf", "leaves_of", "register_batch", "step_key", "with_leaves"]

_PLAIN = frozenset({type(None), bool, int, float, str, torch.dtype, torch.Size, torch.device})
_TENSORS = (Tensor, torch.nn.Parameter)
_GRAPHS = (Graph, TypedGraph)
_ADAPTERS = {"torch_geometric": "edgeless.pyg.batches"}


class _Kind(NamedTuple):
    take_apart: Callable[[Any], tuple[Hashable, list[Any]]]
    put_together: Callable[[Any, Hashable, list[Any]], Any]


_KINDS: dict[type, Optional[_Kind]] = {}  # None for classes that are no batches


def register_batch(
    cls: type,
    take_apart: Callable[[Any], tuple[Hashable, list[Any]]],
    put_together: Callable[[Any, Hashable, list[Any]], Any],
) -> None:
    """Lets :func:`edgeless.capture_step` take batches of a class and of its subclasses as arguments.

    Args:
        cls: the class.
        take_apart: returns the names of the batch's tensors and numbers, and their values. A captured step cannot read
            anything else of the batch.
        put_together: returns a copy of a batch with the given tensors and numbers under these names, and nothing else
            that differs between batches.
    """
    _KINDS.clear()  # a subclass may have been noted as no batch
    _REGISTERED[cls] = _Kind(take_apart, put_together)


_REGISTERED: dict[type, _Kind] = {}


def _kind_of(cls: type) -> Optional[_Kind]:
    try:
        return _KINDS[cls]
    except KeyError:
        pass
    for framework in {base.__module__.partition(".")[0] for base in cls.__mro__}:
        if framework in _ADAPTERS and sys.modules.get(framework) is not None:
            importlib.import_module(_ADAPTERS[framework])
    found = next((_REGISTERED[base] for base in cls.__mro__ if base in _REGISTERED), None)
    _KINDS[cls] = found
    return found


Leaf = Any  # a tensor, a number, text, None, a graph


def leaves_of(value: Any, leaves: list[Leaf]) -> Hashable:
    """Appends the leaves of an argument to ``leaves`` and returns their nesting and names."""
    kind = type(value)
    if kind in _TENSORS or kind in _PLAIN:
        leaves.append(value)
        return None
    if kind is tuple or kind is list:
        return kind, tuple([leaves_of(part, leaves) for part in value])
    if kind is dict:
        return kind, tuple([(key, leaves_of(part, leaves)) for key, part in value.items()])
    if (known := _kind_of(kind)) is not None:
        names, parts = known.take_apart(value)
        return kind, names, tuple([leaves_of(part, leaves) for part in parts])
    leaves.append(value)
    return None


def with_leaves(value: Any, leaves: Iterator[Leaf]) -> Any:
    """Returns a copy of an argument with other leaves, in the order of :func:`leaves_of`."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([with_leaves(part, leaves) for part in value])
    if kind is dict:
        return {key: with_leaves(part, leaves) for key, part in value.items()}
    if kind not in _TENSORS and kind not in _PLAIN and (known := _kind_of(kind)) is not None:
        names, parts = known.take_apart(value)
        return known.put_together(value, names, [with_leaves(part, leaves) for part in parts])
    return next(leaves)


def step_key(leaf: Leaf, kind: str, device: int) -> Hashable:
    """Returns the key of a leaf: the properties that a recorded step relies on. The values of tensors may differ.

    Raises:
        Unfit: no step with this argument can be captured on the device ``kind:device``.
    """
    cls = type(leaf)
    if cls in _TENSORS:
        if leaf.layout is not torch.strided:
            raise Unfit("an argument is a sparse tensor")
        if leaf.device.type != kind or leaf.get_device() != device:
            raise Unfit("an argument is a tensor that is not on the current GPU: move the batch before the step")
        if leaf.requires_grad:
            raise Unfit("an argument requires a gradient")
        if leaf.is_inference():
            raise Unfit("an argument was made in inference mode")
        return leaf.shape, leaf.stride(), leaf.dtype
    if cls in _PLAIN:
        return cls, leaf
    if cls in _GRAPHS or cls.__name__ == "DGLGraph":
        return id(leaf), tuple(map(id, parts_of(leaf)))
    raise Unfit(f"an argument is a {cls.__name__}")
