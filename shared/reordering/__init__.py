"""Reorders the nodes of a graph, so that nodes that are near in the graph are near in memory.

A kernel gathers the rows of a node's neighbours. If nodes with similar neighbours have nearby ids, a row gathered for
one of them is still in cache for the next. :meth:`edgeless.Graph.reorder` and the transforms of both plugins return a
*permutation*: ``permutation[i]`` is the original id of the node whose new id is ``i``. So ``x[permutation]`` has the
features in the new order, and :func:`restore` returns results from the new order to the original one. ``python -m
edgeless reorder`` measures the speedup of an order.
"""

from .methods import METHODS
from .permutations import inverse, permutations, reorder_graph, restore
from .statistics import bandwidth, mean_distance, reuse

__all__ = [
    "METHODS",
    "bandwidth",
    "inverse",
    "mean_distance",
    "permutations",
    "reorder_graph",
    "restore",
    "reuse",
]
