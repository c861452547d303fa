"""Subgraphs of the destinations that have in-edges.

In a sampled graph most destinations have no in-edges, since the nodes of the last hop are drawn but not expanded. A
layer need not apply its linear map to their sums, which are zero.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from ..checks import compiling
from .handle import Compressed, Graph

MOST = 0.5  # fraction of non-empty rows above which skipping the empty ones is not profitable


def receiving(graph: Graph) -> tuple[Optional[Graph], Optional[Tensor]]:
    """Returns the graph with only the destinations that have in-edges, and their ids ``[K]`` (int64), rising.

    Edges, their ids and the sources stay the same. The result is kept with ``graph``. It is (None, None) if most
    destinations have in-edges; on CUDA and while torch.compile traces, where counting them costs more than it saves;
    and for a partition, since all processes have to take the same path.
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
    # An empty row begins where it ends, so dropping its indptr entry moves no edge.
    compressed = Compressed(torch.cat((indptr[:1], end.index_select(0, rows))), indices, edge_ids)
    return Graph(compressed, None, graph.num_src, rows.numel()), rows
