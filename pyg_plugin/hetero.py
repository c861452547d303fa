"""From dictionaries of a heterogeneous graph to one typed graph of all its edges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.weak import WeakIdRef
from torch_geometric.typing import SparseTensor

from edgeless.cache import graph_for
from edgeless.graph import Graph
from edgeless.typed_graph import TypedGraph


def joined_graph(
    call: str, edge_index_dict: dict, src_sizes: dict, dst_sizes: dict, types: Mapping[Any, int], num_types: int
) -> TypedGraph:
    """The (cached) graph of all edges between all nodes, types of nodes one behind the other.

    Args:
        call: the layer, for errors.
        edge_index_dict: (source type, name, destination type) -> ``[2, E]`` or a SparseTensor; not empty.
        src_sizes, dst_sizes: numbers of nodes, in the order in which they stand.
        types: the relation of each key of ``edge_index_dict``.
    Raises:
        IndexError: an id is not that of a node.
    """
    own = {key: e.storage if isinstance(e, SparseTensor) else e for key, e in edge_index_dict.items()}
    tensors = []
    for edge_index in edge_index_dict.values():
        tensors += edge_index.coo()[:2] if isinstance(edge_index, SparseTensor) else (edge_index,)

    def build():
        firsts = []
        for sizes in (src_sizes, dst_sizes):
            first, num_nodes = {}, 0
            for key, size in sizes.items():
                first[key], num_nodes = num_nodes, num_nodes + size
            firsts.append((first, num_nodes))
        (first_src, num_src), (first_dst, num_dst) = firsts
        ends, edge_types = [], []
        for key, edge_index in edge_index_dict.items():
            graph = _relation(call, key, edge_index, src_sizes[key[0]], dst_sizes[key[-1]])  # looks at the ids
            src, dst = graph.edge_index()
            ends.append(torch.stack((src.long() + first_src[key[0]], dst.long() + first_dst[key[-1]])))
            edge_types.append(torch.full((graph.num_edges,), types[key], device=src.device))
        graph = Graph.from_edge_index(torch.cat(ends, dim=1), num_src, num_dst, validate=False)
        return TypedGraph(graph, torch.cat(edge_types), num_types)

    places = tuple((key, types[key], WeakIdRef(value)) for key, value in own.items())
    key = ("relations", places, tuple(src_sizes.items()), tuple(dst_sizes.items()), num_types)
    return graph_for(next(iter(own.values())), key, build, tensors=tuple(tensors))


def _relation(call: str, key: tuple, edge_index: Any, num_src: int, num_dst: int) -> Graph:
    if isinstance(edge_index, SparseTensor):
        return Graph.from_sparse_tensor(edge_index)
    names = (f"the sources of {key!r}", f"the destinations of {key!r}")
    return Graph._from_ends(call, names, *edge_index, num_src, num_dst)
