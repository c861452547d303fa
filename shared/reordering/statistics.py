"""Statistics of a node order: the reuse of rows within windows, and the distance between neighbours' ids."""

from __future__ import annotations

import torch

from ..checks import check_num_nodes
from ..graph.adjacency import transpose


def reuse(graph, height: int) -> float:
    """Edges per gathered row, if a window of ``height`` destinations gathers each of its sources once.

    It is 1 if no two edges of a window share their source, and at most ``height`` without multi-edges. The reuse of the
    backward, which gathers the rows of destinations, is that of ``graph.reverse()``.

    Raises:
        TypeError, ValueError: height is not an int of at least 1.

    Example:
        >>> import torch
        >>> from edgeless import Graph, reordering
        >>> graph = Graph.from_edge_index(torch.tensor([[0, 0, 3], [1, 2, 1]]))
        >>> reordering.reuse(graph, 16)  # three edges, two sources
        1.5
    """
    check_num_nodes("reuse", "height", height)
    if height < 1:
        raise ValueError(f"reuse: height must be at least 1, got {height}")
    if graph.num_edges == 0:
        return 1.0
    # The transpose lists a source's destinations in ascending order: a window is a run of them.
    by_source = transpose(graph.csr._replace(edge_ids=None), graph.num_src)
    window = by_source.indices // height
    begins = torch.ones_like(window, dtype=torch.bool)
    begins[1:] = window[1:] != window[:-1]
    starts = by_source.indptr[:-1]
    begins[starts[starts < window.numel()].long()] = True
    return graph.num_edges / int(begins.sum())


def bandwidth(graph) -> int:
    """The largest difference between the ids of an edge's ends; 0 without edges.

    Example:
        >>> import torch
        >>> from edgeless import Graph, reordering
        >>> graph = Graph.from_edge_index(torch.tensor([[0, 0, 3], [1, 2, 1]]))
        >>> reordering.bandwidth(graph)
        2
    """
    return int(_distances(graph).max()) if graph.num_edges else 0


def mean_distance(graph) -> float:
    """The mean difference between the ids of an edge's ends; 0 without edges.

    Example:
        >>> import torch
        >>> from edgeless import Graph, reordering
        >>> graph = Graph.from_edge_index(torch.tensor([[0, 0, 3], [1, 2, 1]]))
        >>> round(reordering.mean_distance(graph), 3)
        1.667
    """
    return float(_distances(graph).double().mean()) if graph.num_edges else 0.0


def _distances(graph):
    src, dst = graph._ends()
    return (src - dst).abs_()
