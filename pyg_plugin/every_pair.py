"""Products of a relation's matrix with every node, for layers over relations on small graphs.

A large graph has far fewer unique (source, relation) pairs than nodes times relations, so :class:`TypedGraph` finds
them. On a graph of a few hundred edges that takes longer than the products that it saves, most of all where the graph
is new in every step, as a batch of molecules is. Here the pairs are not searched for: the product of relation r and
node n is row ``r * N + n``, and a plain :class:`Graph` leads from these rows to the destinations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdRef

from edgeless import cache
from edgeless.checks import check_ids
from edgeless.graph.handle import Graph

# Most values in the products, with several heads and with one, where the other way is one op; and most products for an
# edge (docs/decisions/0066).
_MOST_VALUES = 1 << 17
_MOST_OF_ONE_HEAD = 1 << 14
_MOST_PER_EDGE = 4


def pays(edge_index: Any, edge_type: Any, num_nodes: int, num_types: int, heads: int, channels: int) -> bool:
    """True if the products of all nodes with matrices of ``heads * channels`` columns take less time than finding the
    pairs that the edges have.

    The edges must be plain tensors on the CPU.
    """
    if type(edge_index) is not Tensor or type(edge_type) is not Tensor or not edge_index.is_cpu:
        return False
    rows, most = num_nodes * num_types, _MOST_OF_ONE_HEAD if heads == 1 else _MOST_VALUES
    return rows * heads * channels <= most and rows <= _MOST_PER_EDGE * edge_index.size(1)


def graph_of_every_pair(edge_index: Tensor, edge_type: Tensor, num_nodes: int, num_types: int, flow: str) -> Graph:
    """The cached graph from all ``num_types * num_nodes`` pairs to the nodes. It lives as long as ``edge_type``.

    Raises:
        IndexError: an id or a type is out of range.
    """

    def build() -> Graph:
        src, dst = _ends(edge_index, flow)
        _check(edge_index, edge_type, num_nodes, num_types)
        pairs = torch.add(src, edge_type, alpha=num_nodes)
        names = ("the pairs of edge_index", "edge_index")
        return Graph._from_ends("RGATConv", names, pairs.long(), dst.long(), num_types * num_nodes, num_nodes)

    key = ("every pair", WeakIdRef(edge_index), flow, num_nodes, num_types)
    return cache.graph_for(edge_type, key, build, tensors=(edge_type, edge_index))


def pairs_of_destinations(graph: Graph, edge_index: Tensor, edge_type: Tensor, flow: str) -> Tensor:
    """``[E]``: the pair of each edge's destination and relation; kept with the graph."""

    def build(_):
        return torch.add(_ends(edge_index, flow)[1], edge_type, alpha=graph.num_dst).long()

    return graph.format("pairs of destinations", build)


def every_product(x: Tensor, weights: Tensor) -> Tensor:
    """``[R * N, M]``: the products of all rows of ``x`` ``[N, K]`` with all of ``weights`` ``[R, K, M]``."""
    return torch.bmm(x.expand(weights.size(0), -1, -1), weights).flatten(0, 1)


def _ends(edge_index: Tensor, flow: str) -> tuple[Tensor, Tensor]:
    src, dst = edge_index.unbind(0)
    return (src, dst) if flow == "source_to_target" else (dst, src)


def _check(edge_index: Tensor, edge_type: Tensor, num_nodes: int, num_types: int) -> None:
    # A pair hides which of its two ids is out of range, so each row is checked.
    rows = zip(("edge_index[0]", "edge_index[1]"), edge_index.unbind(0))
    for name, ids in rows:
        check_ids(f"graph_from_edge_index: {name}", ids, "num_nodes", num_nodes)
    check_ids("TypedGraph: edge_type", edge_type, "num_types", num_types)
