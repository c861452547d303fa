"""Whether a program is worth while, for ``EDGELESS_GENERATE=auto``: it must not be slower than the stock layer.

Work is counted in numbers of messages: edges times the most numbers that a value has for an edge. The thresholds are
those of note 0073.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from ..graph.handle import Graph
from .cache import hooks_of_saved_tensors
from .front.spaces import Refused

# From these numbers on compiled code, generated kernels and existing ops are faster, forward and backward. Below, edge
# tensors stay in the caches and calls of Python decide.
LEAST = {"cpu": 1 << 20, "cuda": 1 << 26}
TINY = 1 << 10  # edges, below which no width has so many
OF_TINY = f"fewer than {TINY:,} edges take the stock ops less time than a closer look"
# From these on ops on blocks of edges are, but for gradients of extrema, where nothing is compiled.
INTERPRETED = 1 << 25
# A program is made once a layer has computed so many: PyG takes about as long for them as a trace.
TRACED = {"cpu": 1 << 25, "cuda": 1 << 30}
# Or at once for so many, whose tensors may not fit into memory.
AT_ONCE = 1 << 28
# On CUDA walks with more sums over all edges, or more results, than those of GINEConv and GENConv were measured slower,
# but for those that tensor cores compute (0075).
MOST_SUMS, MOST_SINKS = 1 << 11, 4
# Products by edge that are computed again in each pass cost the CPU more than edge tensors in its caches (0078).
MANY_PRODUCTS, LEAST_OF_PRODUCTS = 64, 1 << 23
_HOOKED = "saved tensors have hooks, under which a call that is repeated must run the same way"
UNMEASURED = ", of which no times are known (0077)"
ANYWAY = " (EDGELESS_GENERATE=on runs it all the same)"

_computed: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def width_of(kwargs: dict[str, Any]) -> int:
    """The most numbers that an argument has for a node or an edge."""
    most = 1
    for value in kwargs.values():
        for x in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(x, Tensor) and x.dim() > 1 and x.size(0):
                most = max(most, x.numel() // x.size(0))
    return most


def refuse_small(num_edges: int, kwargs: dict[str, Any], device: torch.device, width: int = 1) -> None:
    """Refuses a call that computes too little, before anything else is looked at.

    Args:
        width: the numbers an edge of a later call that it may become a part of.
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
    """Refuses a program that would be slower on a graph by what can run it now."""
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
    """Refuses what computes products by edge again and again where tensors of the edges stay in the CPU's caches."""
    numbers = graph.num_edges * program.width
    if graph.device.type == "cpu" and program.products > MANY_PRODUCTS and numbers < LEAST_OF_PRODUCTS:
        raise Refused(
            f"{graph.num_edges} edges with {program.width} numbers each and {program.products:.0f} multiplications for "
            f"each are fewer than the {LEAST_OF_PRODUCTS} numbers from which computing them again is faster{ANYWAY}"
        )


def are_hooked() -> bool:
    """Whether hooks see saved tensors, as those of a checkpoint do. It calls a function twice and compares what is
    saved, so what was computed or compiled in between must decide nothing.
    """
    return torch.is_grad_enabled() and hooks_of_saved_tensors() is not None


def _large(device: torch.device) -> int:
    """The numbers from which a program runs whatever came before."""
    return INTERPRETED if device.type == "cpu" else AT_ONCE
