"""The types of a graph's edges and nodes, and how each framework's layers over relations are called with them."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Relations(NamedTuple):
    """Types of edges and of nodes.

    Attributes:
        edge_type: ``[E]`` int64, below ``num_types``.
        num_types: R.
        node_type: ``[N]`` int64, ascending: nodes of a type stand together.
        num_node_types: T.
        ends: for every relation the types of its sources and of its destinations, (0, 0) where it has no edge.
    """

    edge_type: Tensor
    num_types: int
    node_type: Tensor
    num_node_types: int
    ends: tuple[tuple[int, int], ...]

    @classmethod
    def of(
        cls, edge_index: Tensor, edge_type: Tensor, num_types: int, node_type: Tensor, num_node_types: int = 1
    ) -> Relations:
        """The same with ``ends`` read from the edges ``[2, E]``."""
        ends = torch.zeros(2, num_types, dtype=torch.int64, device=edge_index.device)
        ends[:, edge_type] = node_type[edge_index]
        return cls(edge_type, num_types, node_type, num_node_types, tuple(zip(*ends.tolist())))

    def to(self, device: torch.device) -> Relations:
        """The same, with its tensors on ``device``."""
        return self._replace(edge_type=self.edge_type.to(device), node_type=self.node_type.to(device))

    @property
    def sizes(self) -> list[int]:
        """Number of nodes of every type."""
        return torch.bincount(self.node_type, minlength=self.num_node_types).tolist()

    @property
    def metadata(self) -> tuple[list[str], list[tuple[str, str, str]]]:
        """Names of the types of nodes and edges, as PyG's heterogeneous layers take them."""
        nodes = [f"n{i}" for i in range(self.num_node_types)]
        return nodes, [(nodes[src], f"r{i}", nodes[dst]) for i, (src, dst) in enumerate(self.ends)]


class TypedInput:
    """What a layer over relations is called with beside its features.

    Features and results are lists, of a tensor for each type of nodes where the layer takes dictionaries and else of
    one. ``rows`` are those of the results.
    """

    rows: list[int]

    def parts(self, x: Tensor) -> list[Tensor]:
        """The features ``[N, F]`` as the layer takes them."""
        return [x]

    def call(self, layer: Any, parts: list[Tensor]) -> list[Tensor]:
        """The layer's results."""
        raise NotImplementedError

    def renewed(self) -> TypedInput:
        """The same in tensors and graphs of its own, which no layer has seen."""
        raise NotImplementedError

    def __call__(self, layer: Any, x: Tensor) -> Tensor:
        """``[N, C]``, where every type of nodes has a result."""
        outs = self.call(layer, self.parts(x))
        return outs[0] if len(outs) == 1 else torch.cat(outs)


class PygEdges(TypedInput):
    """``layer(x, edge_index, of_edges)``, the types of the edges or their features."""

    def __init__(self, edge_index: Tensor, num_nodes: int, of_edges: Tensor):
        self.rows = [num_nodes]
        self.edges = (edge_index, of_edges)

    def renewed(self) -> PygEdges:
        """With copies of the edges and what they have."""
        again = copy.copy(self)
        again.edges = tuple(part.clone() for part in self.edges)
        return again

    def call(self, layer: Any, parts: list[Tensor]) -> list[Tensor]:
        """The result in a list."""
        return [layer(*parts, *self.edges)]


class PygDictionaries(TypedInput):
    """``layer(x_dict, edge_index_dict)``.

    Args:
        sizes: number of nodes by type, whose features stand in this order.
        edges: of every type of the metadata, as PyG's loaders give them.
    """

    def __init__(self, sizes: dict[str, int], edges: dict[tuple[str, str, str], Tensor]):
        self.sizes, self.edges = sizes, edges
        reached = {dst for _, _, dst in edges}
        self.rows = [size for name, size in sizes.items() if name in reached]

    @classmethod
    def of(cls, edge_index: Tensor, num_nodes: int, relations: Relations) -> PygDictionaries:
        """A whole graph, edge types in the order of the metadata."""
        sizes = relations.sizes
        nodes, types = relations.metadata
        first = torch.tensor([0, *sizes[:-1]], device=edge_index.device).cumsum(0)
        local = edge_index - first[relations.node_type][edge_index]
        order = relations.edge_type.argsort(stable=True)
        counts = torch.bincount(relations.edge_type, minlength=relations.num_types).tolist()
        segments = [segment.contiguous() for segment in local[:, order].split(counts, dim=1)]
        return cls(dict(zip(nodes, sizes)), dict(zip(types, segments)))

    def parts(self, x: Tensor) -> list[Tensor]:
        """The features of the nodes of every type."""
        return list(x.split(list(self.sizes.values())))

    def renewed(self) -> PygDictionaries:
        """With copies of the edges of every type."""
        return PygDictionaries(self.sizes, {key: edges.clone() for key, edges in self.edges.items()})

    def call(self, layer: Any, parts: list[Tensor]) -> list[Tensor]:
        """The results of the types that have in-edges in the metadata."""
        outs = layer(dict(zip(self.sizes, parts)), self.edges)
        return [outs[name] for name in self.sizes if name in outs]


class DGLBlock(TypedInput):
    """``layer(block, x, *types)``, of a sampler's block, whose nodes and edges come in its order."""

    def __init__(self, block: Any, *types: Tensor):
        self.rows = [block.num_dst_nodes()]
        self.block, self.types = block, types

    def call(self, layer: Any, parts: list[Tensor]) -> list[Tensor]:
        """The result in a list."""
        return [layer(self.block, *parts, *self.types)]


class DGLEdges(TypedInput):
    """``layer(g, x, etype)``, or with the types of nodes before those of the edges.

    Edges are sorted by type and the layer is told so, which is the stock layer's quickest way.
    """

    def __init__(self, edge_index: Tensor, num_nodes: int, relations: Relations, with_nodes: bool):
        import dgl

        self.rows = [num_nodes]
        edge_type, order = relations.edge_type.sort(stable=True)
        src, dst = edge_index[:, order]
        self.graph = dgl.graph((src, dst), num_nodes=num_nodes)
        self.types = (relations.node_type, edge_type) if with_nodes else (edge_type,)

    def renewed(self) -> DGLEdges:
        """With a graph of the same edges, and copies of the types."""
        again = copy.copy(self)
        again.graph = renewed_graph(self.graph)
        again.types = tuple(part.clone() for part in self.types)
        return again

    def call(self, layer: Any, parts: list[Tensor]) -> list[Tensor]:
        """The result in a list."""
        return [layer(self.graph, *parts, *self.types, presorted=True)]


def renewed_graph(graph: Any) -> Any:
    """What a layer takes as its graph, an edge_index or a DGLGraph, in a tensor or object that no layer has seen."""
    if isinstance(graph, Tensor):
        return graph.clone()
    import dgl

    src, dst = graph.edges(order="eid")
    return dgl.graph((src.clone(), dst.clone()), num_nodes=graph.num_nodes())
