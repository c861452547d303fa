"""New numbers for the nodes of a graph, so that nodes that are near in the graph are near in memory.

A kernel gathers the rows of a node's neighbours. Where nodes with like neighbours have numbers close to each other, a
row that was gathered for one of them is still in the cache for the next. :meth:`edgeless.Graph.reorder` and the
transforms of both plugins give out a *permutation*: ``permutation[i]`` is the original number of the node that now has
number ``i``. So ``x[permutation]`` are features in the new order, and :func:`restore` takes what was computed in it
back to the original one. ``python -m edgeless reorder`` measures what an order is worth.
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
