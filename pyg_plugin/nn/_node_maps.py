"""HGTConv's maps of nodes by type, stacked for one op over all types if its submodules are plain."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Optional, Union

import torch
from torch import Tensor
from torch_geometric.nn.dense import linear
from torch_geometric.nn.parameter_dict import ParameterDict

from edgeless.checks import compiling
from edgeless.layers.adapter import is_plain

from ..conv import LINEAR, PLAIN
from .hetero_linear import HeteroDictLinear

_DICTS = (linear.HeteroDictLinear, HeteroDictLinear)


def stacked_maps(maps: torch.nn.Module, keys: Sequence[str], like: Tensor, rounded: Optional[torch.dtype] = None):
    """Weights ``[T, C, F]`` and biases ``[T, C]`` (or None) of the maps of these types, for features like ``like``;
    None if the submodule has to be called. ``rounded`` is as in :func:`stacked`.
    """
    if not is_plain(maps, _DICTS) or hasattr(maps, "_hook"):
        return None
    lins = [maps.lins._modules[key] for key in keys]
    if not all(is_plain(lin, LINEAR) for lin in lins):
        return None
    weights = stacked([lin.weight for lin in lins], like, rounded)
    biases = [lin.bias for lin in lins]
    if weights is None or weights.dim() != 3 or weights.size(2) != like.size(1):
        return None
    if not any(bias is not None for bias in biases):
        return weights, None
    biases = stacked(biases, like, rounded)
    return None if biases is None else (weights, biases)


def stacked(
    tensors: Sequence[Optional[Tensor]], like: Tensor, rounded: Optional[torch.dtype] = None
) -> Optional[Tensor]:
    """Stacks ``tensors`` in one launch; None unless they are plain, of one shape and of ``like``'s dtype and device.

    With ``rounded``, the autocast dtype, they may have any one dtype and are converted to ``rounded``.
    """
    first = tensors[0]
    if first is None:
        return None
    shape, dtype, device = first.shape, like.dtype if rounded is None else first.dtype, like.device
    for t in tensors:
        if type(t) not in PLAIN or t.shape != shape or t.dtype != dtype or t.device != device or t.is_sparse:
            return None
    joined = torch.stack(tensors) if len(tensors) > 1 else first.unsqueeze(0)
    return joined if rounded is None else joined.to(rounded)


def parameters_of(parameters: torch.nn.Module, keys: Iterable[Union[str, tuple]]) -> list[Tensor]:
    """The parameters of node or edge types in PyG's ParameterDict, whose own look-up takes microseconds for each."""
    keys = tuple(keys)
    if type(parameters) is ParameterDict:
        names = tuple(map(_name_of, keys)) if compiling() else _names_of(keys)  # a tracer warns of the cache
        found = list(map(parameters._parameters.get, names))
        if not [t for t in found if t is None]:  # parametrized ones are not in _parameters
            return found
    return [parameters[_joined(key)] for key in keys]


def _joined(key: Union[str, tuple]) -> str:
    return key if isinstance(key, str) else "__".join(key)


def _name_of(key: Union[str, tuple]) -> str:
    return ParameterDict.to_internal_key(_joined(key))


@lru_cache(maxsize=1 << 10)
def _names_of(keys: tuple) -> tuple[str, ...]:
    return tuple(map(_name_of, keys))
