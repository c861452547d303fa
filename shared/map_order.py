r"""Whether a layer's linear map comes before its sum over neighbours or behind it: :math:`A (X W) = (A X) W`.

Edges gather a row's numbers once forward, and once more for every gradient that has to go back through them. The
narrower side is the one to be gathered, but for one thing: where x needs no gradient, as in a model's first layer, none
goes back through the edges if the sum comes first, since the map's own needs the sums alone. And of a block with few
destinations fewer rows are mapped behind the sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Optional

import torch
from torch import Tensor, nn

from .adapter import is_plain
from .autocast import autocasts
from .graph import Graph
from .graph_checks import compiling
from .projection import PLAIN

# Of the numbers that the usual order gathers, at least this many have to be saved: the other order has its own passes
# over nodes, and rounds differently.
_SAVED = 0.25
# Bytes that edges have to gather less on CUDA, 30 us at HBM's rate: on a small graph the usual order is one op.
_LEAST_BYTES = 1 << 27
# Products that take no longer than gathering a number, and those that take no less: estimates on the safe side, from
# rates whose quotients are 10 to 30 on the CPU and 30 to 200 on CUDA.
_PRODUCTS = 16
_SPARED = {"cpu": 32, "cuda": 256}


def _gathered(x: Tensor, weight: Tensor, by: Optional[Tensor], dtype: Optional[torch.dtype]) -> Optional[tuple]:
    """Numbers gathered for every edge if the sum comes first, and if the map does; None where the order must stay."""
    if type(x) not in PLAIN or type(weight) not in PLAIN or x.dim() != 2 or weight.dim() != 2:
        return None
    if x.layout is not torch.strided or weight.layout is not torch.strided:
        return None
    if weight.dtype != x.dtype or dtype not in (None, x.dtype) or autocasts(x.device.type):
        return None  # the order decides what is rounded to what
    grads = torch.is_grad_enabled()
    weights = grads and by is not None and by.requires_grad
    sums = 1 + weights + (grads and x.requires_grad)
    maps = 1 + weights + (grads and (x.requires_grad or weight.requires_grad))
    return weight.size(1) * sums, weight.size(0) * maps


def _pays(graph: Graph, x: Tensor, usual: int, other: int, products: int = 0) -> bool:
    """Whether the other order pays: numbers gathered for every edge in both, and products that the other has more."""
    if type(graph) is not Graph:
        return False
    if compiling():  # a program would be compiled again for another number of edges
        return other <= (1 - _SAVED) * usual
    usual, other = graph.num_edges * usual, graph.num_edges * other
    if products < 0:
        usual -= products / _SPARED["cuda" if x.is_cuda else "cpu"]
    saved = usual - other
    if saved < _SAVED * usual or saved * _PRODUCTS < products:
        return False
    return not x.is_cuda or saved * x.element_size() >= _LEAST_BYTES


def narrows(linear: nn.Module) -> bool:
    """Whether ``linear`` makes rows so much narrower that :func:`maps_first` may say so; whatever needs gradients."""
    weight = linear._parameters.get("weight")
    return type(weight) in PLAIN and weight.dim() == 2 and weight.size(0) <= (1 - _SAVED) * weight.size(1)


def maps_first(graph: Graph, x: Tensor, weight: Tensor, by: Optional[Tensor], dtype: Optional[torch.dtype]) -> bool:
    """Whether a layer that usually sums first had better map first.

    Args:
        graph: from the rows of x to others, which are the same where torch.compile traces.
        x: ``[Ns, F]``.
        weight: of the map, ``[C, F]``.
        by: what the sum multiplies by, ``[E]`` or None.
        dtype: of the sum's weights as the user gave them; None: of x.
    """
    if type(weight) in PLAIN and weight.dim() == 2 and weight.size(0) > (1 - _SAVED) * weight.size(1):
        return False  # whatever needs gradients
    gathered = _gathered(x, weight, by, dtype)
    if gathered is None:
        return False
    more = 0 if compiling() else max(0, graph.num_src - graph.num_dst)  # rows to be mapped
    return _pays(graph, x, gathered[0], gathered[1], more * weight.numel())


def sums_first(graph: Graph, x: Tensor, weight: Tensor, by: Optional[Tensor], dtype: Optional[torch.dtype]) -> bool:
    """Whether a layer that usually maps first had better sum first; as above.

    Where destinations are fewer than sources, as in sampled blocks, fewer rows are then mapped.
    """
    gathered = _gathered(x, weight, by, dtype)
    if gathered is None:
        return False
    rows = 0 if compiling() else graph.num_dst - graph.num_src  # to be mapped more
    if rows:  # forward, and for each gradient
        rows *= 1 + torch.is_grad_enabled() * (weight.requires_grad + x.requires_grad)
    return _pays(graph, x, gathered[1], gathered[0], rows * weight.numel())


def first_map(
    network: nn.Module, kinds: tuple[type, ...] = (nn.Linear,)
) -> Optional[tuple[nn.Module, Callable[[Tensor], Tensor]]]:
    """The linear map, of one of these classes, that ``network`` begins with, and the rest of it; None where it is not
    known to begin with one.
    """
    if is_plain(network, kinds):
        return network, lambda x: x
    if is_plain(network, (nn.Sequential,)) and len(network) and is_plain(network[0], kinds):
        return network[0], lambda x: functools.reduce(lambda x, step: step(x), list(network)[1:], x)
    return None
