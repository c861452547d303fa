r"""The order of a layer's linear map and its sum over neighbours, since :math:`A (X W) = (A X) W`.

Each edge gathers a row in the forward, and once more for every gradient that goes back through the edges, so the
narrower side should be gathered (docs/decisions/0055). If x needs no gradient, as in a first layer, none goes back
through the edges when the sum comes first, because the map's gradient uses the sums alone. In a block with few
destinations, a map after the sum multiplies fewer rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Optional

import torch
from torch import Tensor, nn

from ..autocast import autocasts
from ..checks import compiling
from ..graph.handle import Graph
from ..layers.adapter import is_plain
from .projection import PLAIN

# The least fraction of the default order's gathered values that the other order must save, since that order has passes
# over nodes of its own and rounds differently.
_SAVED = 0.25
# The least bytes of gathers that it must save on CUDA, 30 us of HBM bandwidth: on a small graph the default order is
# one op.
_LEAST_BYTES = 1 << 27
# Multiply-adds that take as long as gathering one value: conservative values for additional ones (_PRODUCTS) and for
# saved ones (_SPARED). Measured rates have quotients of 10 to 30 on the CPU and 30 to 200 on CUDA.
_PRODUCTS = 16
_SPARED = {"cpu": 32, "cuda": 256}


def _gathered(x: Tensor, weight: Tensor, by: Optional[Tensor], dtype: Optional[torch.dtype]) -> Optional[tuple]:
    """Returns the values gathered per edge if the sum comes first, and if the map does; None if the order must stay."""
    if type(x) not in PLAIN or type(weight) not in PLAIN or x.dim() != 2 or weight.dim() != 2:
        return None
    if x.layout is not torch.strided or weight.layout is not torch.strided:
        return None
    if weight.dtype != x.dtype or dtype not in (None, x.dtype) or autocasts(x.device.type):
        return None  # the order decides which values are rounded to which dtype
    grads = torch.is_grad_enabled()
    weights = grads and by is not None and by.requires_grad
    sums = 1 + weights + (grads and x.requires_grad)
    maps = 1 + weights + (grads and (x.requires_grad or weight.requires_grad))
    return weight.size(1) * sums, weight.size(0) * maps


def _pays(graph: Graph, x: Tensor, usual: int, other: int, products: int = 0) -> bool:
    """Returns whether the other order is profitable.

    Args:
        graph: the layer's graph.
        x: the layer's input; only its device and dtype are read.
        usual, other: values gathered per edge in the default order and in the other one.
        products: multiply-adds that the other order has in addition; negative if it saves some.
    """
    if type(graph) is not Graph:
        return False
    if compiling():  # a guard on the number of edges would recompile the program
        return other <= (1 - _SAVED) * usual
    usual, other = graph.num_edges * usual, graph.num_edges * other
    if products < 0:
        usual -= products / _SPARED["cuda" if x.is_cuda else "cpu"]
    saved = usual - other
    if saved < _SAVED * usual or saved * _PRODUCTS < products:
        return False
    return not x.is_cuda or saved * x.element_size() >= _LEAST_BYTES


def narrows(linear: nn.Module) -> bool:
    """Returns whether ``linear`` narrows rows enough for :func:`maps_first` to be true for some set of gradients."""
    weight = linear._parameters.get("weight")
    return type(weight) in PLAIN and weight.dim() == 2 and weight.size(0) <= (1 - _SAVED) * weight.size(1)


def maps_first(graph: Graph, x: Tensor, weight: Tensor, by: Optional[Tensor], dtype: Optional[torch.dtype]) -> bool:
    """Returns whether a layer that sums first by default should map first.

    Args:
        graph: its sources are the rows of x. While torch.compile traces, its destinations must be the same nodes.
        x: ``[Ns, F]``.
        weight: the weight of the map, ``[C, F]``.
        by: the edge weights of the sum, ``[E]`` or None.
        dtype: the dtype of the edge weights as the user gave them; None: the dtype of x.
    """
    if type(weight) in PLAIN and weight.dim() == 2 and weight.size(0) > (1 - _SAVED) * weight.size(1):
        return False  # for any set of gradients
    gathered = _gathered(x, weight, by, dtype)
    if gathered is None:
        return False
    more = 0 if compiling() else max(0, graph.num_src - graph.num_dst)  # additional rows to map
    return _pays(graph, x, gathered[0], gathered[1], more * weight.numel())


def sums_first(graph: Graph, x: Tensor, weight: Tensor, by: Optional[Tensor], dtype: Optional[torch.dtype]) -> bool:
    """Returns whether a layer that maps first by default should sum first. The arguments are as in :func:`maps_first`.

    If there are fewer destinations than sources, as in sampled blocks, fewer rows are then mapped.
    """
    gathered = _gathered(x, weight, by, dtype)
    if gathered is None:
        return False
    rows = 0 if compiling() else graph.num_dst - graph.num_src  # additional rows to map
    if rows:  # mapped in the forward, and once more for each gradient
        rows *= 1 + torch.is_grad_enabled() * (weight.requires_grad + x.requires_grad)
    return _pays(graph, x, gathered[1], gathered[0], rows * weight.numel())


def first_map(
    network: nn.Module, kinds: tuple[type, ...] = (nn.Linear,)
) -> Optional[tuple[nn.Module, Callable[[Tensor], Tensor]]]:
    """Splits ``network`` into its first linear map, of a class in ``kinds``, and the rest.

    Returns None if the network is not known to begin with such a map.
    """
    if is_plain(network, kinds):
        return network, lambda x: x
    if is_plain(network, (nn.Sequential,)) and len(network) and is_plain(network[0], kinds):
        return network[0], lambda x: functools.reduce(lambda x, step: step(x), list(network)[1:], x)
    return None
