"""Computes the sum of a heterogeneous graph's layers, one per relation, as one relational sum.

Each layer sums or averages neighbours and applies a linear map.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from ..checks import check_ids, normal_tensors
from ..functional.projection import add_row, product
from ..functional.relational import relational_sum
from ..graph.handle import Graph
from ..graph.typed import TypedGraph
from ..ops.graph import index_dtype

# With fewer relations, one call per layer takes no longer (docs/decisions/0029-heteroconv-as-one-relational-sum.md).
FEW_RELATIONS = 4


class Relation(NamedTuple):
    """The edges of one relation, the types of their sources and destinations, and the index of the relation."""

    graph: Graph
    source: Any
    destination: Any
    number: int


def join_relations(
    relations: Iterable[Relation], src_sizes: Mapping[Any, int], dst_sizes: Mapping[Any, int], num_types: int
) -> TypedGraph:
    """Joins relations into one typed graph, whose nodes are those of all types, concatenated.

    Args:
        relations: each with the graph between the nodes of its types.
        src_sizes, dst_sizes: the number of nodes of every type, in the order of concatenation.
        num_types: the number of relation indices.
    """
    first_src, first_dst = _first_nodes(src_sizes), _first_nodes(dst_sizes)
    ends, edge_types = [], []
    for graph, source, destination, number in relations:
        src, dst = graph.edge_index()
        ends.append(torch.stack((src + first_src[source], dst + first_dst[destination])))
        edge_types.append(torch.full((graph.num_edges,), number, dtype=torch.int32, device=src.device))
    num_src, num_dst = sum(src_sizes.values()), sum(dst_sizes.values())
    graph = Graph.from_edge_index(torch.cat(ends, dim=1), num_src, num_dst, validate=False)
    return TypedGraph(graph, torch.cat(edge_types), num_types)


def join_edges(
    call: str,
    edges: Mapping[tuple, Tensor],
    numbers: Mapping[tuple, int],
    src_sizes: Mapping[Any, int],
    dst_sizes: Mapping[Any, int],
    num_types: int,
) -> TypedGraph:
    """Joins edge tensors ``[2, E]`` by (source type, ..., destination type), as :func:`join_relations` joins graphs.

    No relation gets a graph of its own, so the number of operations does not grow with that of relations, and the ids
    are checked at once.

    Args:
        call: the name of the calling function, for error messages.
        edges: int32 or int64, all on one device; not empty.
        numbers: the relation index of every key.
        src_sizes, dst_sizes, num_types: as in :func:`join_relations`.
    Raises:
        IndexError: an id is out of range for its node type.
    """
    first_src, first_dst = _first_nodes(src_sizes), _first_nodes(dst_sizes)
    facts = [
        (e.size(1), src_sizes[key[0]], dst_sizes[key[-1]], first_src[key[0]], first_dst[key[-1]], numbers[key])
        for key, e in edges.items()
    ]
    with normal_tensors():
        ends = torch.cat(list(edges.values()), dim=1)
        columns = torch.tensor(facts).t().to(ends.device)
        counts, sizes, first, number = columns[0], columns[1:3], columns[3:5], columns[5].int()

        def by_edge(fact: Tensor) -> Tensor:
            return fact.repeat_interleave(counts, dim=-1, output_size=ends.size(1))

        if not bool(((ends >= 0) & (ends < by_edge(sizes))).all()):
            for key, e in edges.items():
                check_ids(f"{call}: the sources of {key!r}", e[0], "num_src", src_sizes[key[0]])
                check_ids(f"{call}: the destinations of {key!r}", e[1], "num_dst", dst_sizes[key[-1]])
        num_src, num_dst = sum(src_sizes.values()), sum(dst_sizes.values())
        if index_dtype(num_src, num_dst) is torch.int64:
            ends = ends.long()  # int32 may hold the ids within a type but not the joint ones
        ends += by_edge(first)
        graph = Graph.from_edge_index(ends, num_src, num_dst, validate=False)
        return TypedGraph(graph, by_edge(number), num_types)


def _first_nodes(sizes: Mapping[Any, int]) -> dict[Any, int]:
    return dict(zip(sizes, accumulate(sizes.values(), initial=0)))


class Target(NamedTuple):
    """A destination node type, with what its relations' layers add to their sums.

    Attributes:
        size: the number of nodes.
        x: their features ``[size, F]``.
        roots: for each relation the weight ``[C, F]`` of the destination's features, or None.
        biases: for each relation the bias ``[C]``, or None.
    """

    size: int
    x: Optional[Tensor]
    roots: list[Optional[Tensor]]
    biases: list[Optional[Tensor]]


def sum_of_layers(
    graph: TypedGraph,
    x: Tensor,
    weights: Tensor,
    targets: list[Target],
    edge_weight: Optional[Tensor] = None,
    reduce: str = "sum",
) -> list[Tensor]:
    """Returns for each target the sum ``[size, C]`` of the results of all layers that lead to it.

    Args:
        graph: the result of :func:`join_relations` or :func:`join_edges`.
        x: ``[Ns, F]``, the features of all sources.
        weights: ``[R, F, C]``, one matrix per relation.
        targets: the targets in the order of the graph's destinations.
        edge_weight, reduce: as in :func:`edgeless.functional.relational_sum`.
    """
    sums = relational_sum(graph, x, weights, edge_weight, reduce=reduce)
    # Nothing else refers to `sums`, so the user may change its unsafe splits in place like any layer's result.
    outs = torch.unsafe_split_with_sizes(sums, [target.size for target in targets])
    return [_with_own(out, target) for out, target in zip(outs, targets)]


def _with_own(out: Tensor, target: Target) -> Tensor:
    root, bias = _added(target.roots), _added(target.biases)
    if root is not None:
        return out + product(target.x, root.t(), bias)
    return out if bias is None else add_row(out, bias)


def _added(tensors: list[Optional[Tensor]]) -> Optional[Tensor]:
    given = [tensor for tensor in tensors if tensor is not None]
    if len(given) < 2:
        return given[0] if given else None
    # The backward of sum(0) is one expanded row, so all parameters would share the memory of their .grad; that of mul
    # makes a row for each.
    return torch.stack(given).mul(1).sum(0)
