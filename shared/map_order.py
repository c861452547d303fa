r"""Whether a layer's linear map comes before its sum over neighbours or behind it: :math:`A (X W) = (A X) W`.

Edges gather a row's numbers once forward, and once more for every gradient that has to go back through them. The
narrower side is the one to be gathered, but for one thing: where x needs no gradient, as in a model's first layer, none
goes back through the edges if the sum comes first, since the map's own needs the sums alone.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from .autocast import autocasts
from .graph import Graph
from .graph_checks import compiling
from .projection import PLAIN

# Of the numbers that the usual order gathers, at least this many have to be saved: the other order has its own passes
# over nodes, and rounds differently.
_SAVED = 0.25
# Bytes that edges have to gather less on CUDA, 30 us at HBM's rate: on a small graph the usual order is one op.
_LEAST_BYTES = 1 << 27
# Products that take no longer than gathering a number: an estimate, from rates whose quotients are 20 to 30.
_PRODUCTS = 16


def _gathered(x: Tensor, weight: Tensor, by: Optional[Tensor], dtype: Optional[torch.dtype]) -> Optional[tuple]:
    """Numbers gathered for every edge if the sum comes first, and if the map does; None where the order must stay."""
    if type(x) not in PLAIN or type(weight) not in PLAIN or x.layout is not torch.strided or x.dim() != 2:
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
    if other > (1 - _SAVED) * usual or type(graph) is not Graph:
        return False
    if compiling():  # a program would be compiled again for another number of edges
        return True
    saved = graph.num_edges * (usual - other)
    return saved * _PRODUCTS >= products and (not x.is_cuda or saved * x.element_size() >= _LEAST_BYTES)


def maps_first(graph: Graph, x: Tensor, weight: Tensor, by: Optional[Tensor], dtype: Optional[torch.dtype]) -> bool:
    """Whether a layer that usually sums first had better map first.

    Args:
        graph: from the rows of x to others, which are the same where torch.compile traces.
        x: ``[Ns, F]``.
        weight: of the map, ``[C, F]``.
        by: what the sum multiplies by, ``[E]`` or None.
        dtype: of the sum's weights as the user gave them; None: of x.
    """
    gathered = _gathered(x, weight, by, dtype)
    if gathered is None:
        return False
    more = 0 if compiling() else max(0, graph.num_src - graph.num_dst)  # rows to be mapped
    return _pays(graph, x, gathered[0], gathered[1], more * weight.numel())


def sums_first(graph: Graph, x: Tensor, weight: Tensor, by: Optional[Tensor], dtype: Optional[torch.dtype]) -> bool:
    """Whether a layer that usually maps first, among the nodes of ``graph``, had better sum first; as above."""
    gathered = _gathered(x, weight, by, dtype)
    return gathered is not None and _pays(graph, x, gathered[1], gathered[0])
