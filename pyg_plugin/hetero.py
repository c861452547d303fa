"""Converts the dictionaries of a heterogeneous graph to one typed graph of all its edges."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor
from torch_geometric.typing import SparseTensor

from edgeless import _C
from edgeless.cache import graph_for
from edgeless.checks import compiling
from edgeless.functional.projection import PLAIN
from edgeless.graph.handle import Graph
from edgeless.graph.typed import TypedGraph
from edgeless.layers.hetero_sum import Relation, join_edges, join_relations


def joined_graph(
    call: str, edge_index_dict: dict, src_sizes: dict, dst_sizes: dict, types: Mapping[Any, int], num_types: int
) -> TypedGraph:
    """The cached typed graph of all edges between all nodes, which are ordered by node type.

    Args:
        call: the layer, for errors.
        edge_index_dict: (source type, name, destination type) -> ``[2, E]`` or a SparseTensor; not empty.
        src_sizes, dst_sizes: node type -> number of nodes, in the order of the joined nodes.
        types: the relation of each key of ``edge_index_dict``.
    Raises:
        IndexError: a node id is out of range.
    """

    def build():
        given = list(edge_index_dict.values())
        if not compiling() and type(given[0]) in PLAIN and _C.are_edge_lists(given, given[0].device):
            return join_edges(call, edge_index_dict, types, src_sizes, dst_sizes, num_types)
        relations = (  # building their graphs checks the ids
            Relation(_relation(call, key, e, src_sizes[key[0]], dst_sizes[key[-1]]), key[0], key[-1], types[key])
            for key, e in edge_index_dict.items()
        )
        return join_relations(relations, src_sizes, dst_sizes, num_types)

    if compiling():  # a tracer does not see the identity of tensors
        return build()
    keys, values = (*edge_index_dict,), (*edge_index_dict.values(),)
    own = tensors = values
    if not _C.are_concrete(values)[0]:  # checked in C++: loops in Python over hundreds of relations are slow
        own = tuple(e.storage if isinstance(e, SparseTensor) else e for e in values)
        parts = (e.coo()[:2] if isinstance(e, SparseTensor) else (e,) for e in values)
        tensors = tuple(chain.from_iterable(parts))
    alike = keys == (*types,)  # compares mostly by identity and hashes no key
    numbers = (*types.values(),) if alike else (*map(types.__getitem__, keys),)
    key = _Objects(own, (keys, numbers, (*src_sizes.items(),), (*dst_sizes.items(),), num_types))

    def build_and_watch():
        key.watch(own)  # the cache keeps the key from now on
        return build()

    return graph_for(own[0], key, build_and_watch, tensors=tensors)


class _Objects:
    """A cache key of objects, compared by identity, and of facts, compared by equality. It keeps no object alive.

    The id of a dead object may be reused. The caller of a look-up holds the objects of its key; a key in the cache has
    to :meth:`watch` its own, and equals no other key once one of them is dead.
    """

    __slots__ = ("_facts", "_hash", "_ids", "_references")

    def __init__(self, objects: tuple, facts: tuple):
        self._references: list[weakref.ref] = []
        self._ids = (*map(id, objects),)
        self._facts = facts
        self._hash = hash(self._ids)

    def watch(self, objects: tuple) -> None:
        """Holds weak references to ``objects``, those of this key, to notice their death."""
        self._references = list(map(weakref.ref, objects))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(other) is not _Objects or self._ids != other._ids or self._facts != other._facts:
            return False
        return self._alive() and other._alive()

    def _alive(self) -> bool:
        return not [reference for reference in self._references if reference() is None]


def type_offsets(graph: TypedGraph, sizes: Iterable[int]) -> Tensor:
    """The first node of each type, then the number of nodes: ``[T + 1]`` on the graph's device, cached with it."""

    def build(_):
        return torch.tensor([0, *accumulate(sizes)], device=graph.device)

    return graph.format("type offsets", build)


def _relation(call: str, key: tuple, edge_index: Any, num_src: int, num_dst: int) -> Graph:
    if isinstance(edge_index, SparseTensor):
        return Graph.from_sparse_tensor(edge_index)
    names = (f"the sources of {key!r}", f"the destinations of {key!r}")
    return Graph._from_ends(call, names, *edge_index, num_src, num_dst)
