"""Sampled graphs are mostly destinations that nobody sends to: the last hop's nodes have been drawn, not expanded.

What a layer does to the sums of its neighbours need not be done to rows that are empty.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from .graph import Compressed, Graph
from .graph_checks import compiling

MOST = 0.5  # share of the rows from which on leaving the others out does not pay


def receiving(graph: Graph) -> tuple[Optional[Graph], Optional[Tensor]]:
    """The graph with those destinations only that have in-edges, and their ids ``[K]`` (int64) in rising order.

    Edges, their ids and the sources stay the same. (None, None) where most destinations have some, and where to look
    would cost more than it saves: on CUDA, and while torch.compile traces. Nor of a part of a graph: all
    processes have to do the same. The result is kept with ``graph``.
    """
    if type(graph) is not Graph:
        return None, None
    if graph._num_receiving is not None and graph._num_receiving > MOST * graph.num_dst:
        return None, None
    if graph.device.type != "cpu" or compiling():
        return None, None
    return graph.format("receiving", _receiving)


def _receiving(graph: Graph) -> tuple[Optional[Graph], Optional[Tensor]]:
    indptr, indices, edge_ids = graph.csr
    begin, end = indptr[:-1], indptr[1:]
    has_edges = begin != end
    if int(has_edges.sum()) > MOST * graph.num_dst:
        return None, None
    rows = has_edges.nonzero().squeeze(1)
    # An empty row begins where it ends, so leaving it out moves nothing.
    compressed = Compressed(torch.cat((indptr[:1], end.index_select(0, rows))), indices, edge_ids)
    return Graph(compressed, None, graph.num_src, rows.numel()), rows
