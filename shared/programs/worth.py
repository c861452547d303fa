"""Decides whether a program is profitable, for ``EDGELESS_GENERATE=auto``: it must not be slower than upstream.

Work is counted in elements of messages: edges times the elements of the widest edge value. The thresholds are those of
note 0073.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from ..graph.handle import Graph
from .cache import hooks_of_saved_tensors
from .front.spaces import Refused

# The least number of elements from which compiled code, generated kernels and existing ops are faster, forward and
# backward. Below it edge tensors stay in the caches, and the time of Python decides.
LEAST = {"cpu": 1 << 20, "cuda": 1 << 26}
TINY = 1 << 10  # edges; with fewer, no width reaches the limit
OF_TINY = f"fewer than {TINY:,} edges take the stock ops less time than a closer look"
# The same for ops on blocks of edges where nothing is compiled, except for gradients of extrema.
INTERPRETED = 1 << 25
# A program is made once a layer has computed this many elements: PyG takes about as long for them as a trace takes.
TRACED = {"cpu": 1 << 25, "cuda": 1 << 30}
# A call of this many elements gets its program at once, since their tensors may not fit into memory.
AT_ONCE = 1 << 28
# On CUDA, walks with more sums over all edges or more results than those of GINEConv and GENConv were measured to be
# slower, except where tensor cores compute them (0075).
MOST_SUMS, MOST_SINKS = 1 << 11, 4
# On the CPU, products of edge values that every pass computes again cost more than edge tensors in the caches (0078).
MANY_PRODUCTS, LEAST_OF_PRODUCTS = 64, 1 << 23
_HOOKED = "saved tensors have hooks, under which a call that is repeated must run the same way"
UNMEASURED = ", of which no times are known (0077)"
ANYWAY = " (EDGELESS_GENERATE=on runs it all the same)"

_computed: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def width_of(kwargs: dict[str, Any]) -> int:
    """The largest number of elements that an argument has for a node or an edge."""
    most = 1
    for value in kwargs.values():
        for x in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(x, Tensor) and x.dim() > 1 and x.size(0):
                most = max(most, x.numel() // x.size(0))
    return most


def refuse_small(num_edges: int, kwargs: dict[str, Any], device: torch.device, width: int = 1) -> None:
    """Refuses a call that computes too little, before any other check.

    Args:
        width: the elements per edge of a later call that this one may become a part of.
    """
    _refuse_fewer(num_edges, max(width, width_of(kwargs)), device)


def _refuse_fewer(num_edges: int, width: int, device: torch.device) -> None:
    least = LEAST.get(device.type)
    if least is None:
        raise Refused(f"on {device.type} programs do not run by default{ANYWAY}")
    if num_edges * width < least:
        raise Refused(
            f"{num_edges:,} edges with {width:,} numbers each are fewer than the {least:,} numbers from which a "
            f"program is faster{ANYWAY}"
        )


def refuse_early(layer, num_edges: int, kwargs: dict[str, Any], device: torch.device, width: int = 1) -> None:
    """Refuses to make a program for a layer that has not yet computed as much as a trace costs."""
    numbers = num_edges * max(width, width_of(kwargs))
    if are_hooked():
        if numbers < _large(device):
            raise Refused(f"{_HOOKED}{ANYWAY}")
        return
    total = _computed.get(layer, 0) + numbers
    worth = TRACED[device.type]
    if total < worth and numbers < AT_ONCE:
        _computed[layer] = total
        raise Refused(
            f"a program is made when the layer has computed {worth} numbers, and it has computed {total}{ANYWAY}"
        )
    _computed[layer] = 0


def refuse_slow(program, graph: Graph, width: int = 1) -> None:
    """Refuses a program that would be slower on this graph with the code that it has now."""
    width = max(width, program.width)
    numbers = graph.num_edges * width
    _refuse_fewer(graph.num_edges, width, graph.device)
    if are_hooked() and (numbers < _large(graph.device) or program.divides_extrema):
        raise Refused(f"{_HOOKED}{ANYWAY}")
    if program.landing is not None:
        return
    if program.whole:
        refuse_products(program, graph)
    if graph.device.type == "cuda":
        if not program.ready(graph):
            raise Refused(f"some of its walks have no generated kernels{ANYWAY}")
        for walk in program.walks():
            if walk.code.on_cuda.has_products_by_edge():
                raise Refused(f"a walk multiplies values of edges by a matrix on tensor cores{UNMEASURED}{ANYWAY}")
            results, sums = walk.code.on_cuda.of_lanes()
            if sums >= MOST_SUMS or results > MOST_SINKS:
                raise Refused(f"a walk has {results} results and sums {sums} numbers over all edges{ANYWAY}")
    if program.ready(graph):
        return
    if program.divides_extrema:
        raise Refused(f"walks of a minimum's or maximum's gradient are faster only where they are compiled{ANYWAY}")
    if numbers < INTERPRETED:
        raise Refused(
            f"its walks are not compiled, and {graph.num_edges} edges with {width} numbers each are fewer than "
            f"the {INTERPRETED} from which they are faster{ANYWAY}"
        )


def refuse_products(program, graph: Graph) -> None:
    """Refuses a program that computes products by edge in every pass, where edge tensors fit in the CPU's caches."""
    numbers = graph.num_edges * program.width
    if graph.device.type == "cpu" and program.products > MANY_PRODUCTS and numbers < LEAST_OF_PRODUCTS:
        raise Refused(
            f"{graph.num_edges} edges with {program.width} numbers each and {program.products:.0f} multiplications for "
            f"each are fewer than the {LEAST_OF_PRODUCTS} numbers from which computing them again is faster{ANYWAY}"
        )


def are_hooked() -> bool:
    """Returns whether hooks see saved tensors. A checkpoint, which has such hooks, calls a function twice and compares
    the saved tensors, so nothing that was computed or compiled in between may change the choice.
    """
    return torch.is_grad_enabled() and hooks_of_saved_tensors() is not None


def _large(device: torch.device) -> int:
    """The elements from which a program runs, whatever the layer has computed before."""
    return INTERPRETED if device.type == "cpu" else AT_ONCE
