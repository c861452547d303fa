"""Plans of whole layers over relations, for a GPU that need not be there.

The graph is made and sorted on the CPU; the layer's calls then run on stand-ins of its tensors, which have sizes and a
device but no contents, and the ops that they reach are recorded. So a layer takes here the decisions that it takes on
the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from edgeless.functional.pair_attention import fits, pair_attention, walks
from edgeless.functional.pair_maps import pair_dot_attention
from edgeless.functional.relational_layer import relational_layer
from edgeless.graph.adjacency import Compressed
from edgeless.graph.handle import Graph
from edgeless.graph.typed import _TILED_CUT, CUT, Compact, TypedGraph
from edgeless.ops.relational import OF_ROW, OF_ROW_TILE, OF_SEGMENT, OF_TILE
from edgeless.plan.recording import record_stand_ins
from edgeless.plan.steps import Device, Step, planned_for

__all__ = ["PLANNED", "layer_steps"]

_HUB = 512  # kHubPart of core_cuda/relational/tiling.h


def layer_steps(
    name: str,
    edges: tuple[Tensor, Tensor, int, int],
    dtype: torch.dtype,
    sizes: tuple[int, int, int],
    device: Device,
    inference: bool = False,
) -> list[Step]:
    """The steps of a layer, forward and backward.

    Args:
        name: one of :data:`PLANNED`.
        edges: edge_index ``[2, E]``, edge_type ``[E]``, the number of types and that of nodes, on the CPU.
        sizes: input features, heads, and channels of a head.
        inference: without gradients.
    """
    edge_index, edge_type, num_types, num_nodes = edges
    graph = TypedGraph.from_edge_index(edge_index, edge_type, num_types, num_nodes, num_nodes)
    counted = _Counts(graph, device)
    with planned_for(device), FakeTensorMode(), torch.set_grad_enabled(not inference):

        def tensor(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="cuda", requires_grad=not inference)

        return record_stand_ins(PLANNED[name](counted.stand_in(), tensor, *sizes))


# The calls of the layers ---------------------------------------------------------------------------------------------

_Tensor = Callable[..., Tensor]


def _rgcn(graph: TypedGraph, tensor: _Tensor, features: int, heads: int, channels: int) -> Callable:
    width = heads * channels
    x, weight = tensor(graph.num_src, features), tensor(graph.num_types, features, width)
    root, bias = tensor(features, width), tensor(width)
    return lambda: relational_layer(graph, x, weight, root=root, bias=bias, reduce="mean", out_dtype=x.dtype)


def _rgat(graph: TypedGraph, tensor: _Tensor, features: int, heads: int, channels: int) -> Callable:
    """The layer of one head, which is one op."""
    x, weight = tensor(graph.num_src, features), tensor(graph.num_types, features, channels)
    query, key, bias = tensor(channels, 1), tensor(channels, 1), tensor(channels)
    if heads != 1 or not fits(graph, x, weight, (query, key, bias)):
        raise ValueError("rgat is planned with one head, rows of up to 512 bytes and ids of 32 bits")
    return lambda: pair_attention(graph, x, weight, query, key, bias, 0.2)


def _hgt(graph: TypedGraph, tensor: _Tensor, features: int, heads: int, channels: int) -> Callable:
    """Of nodes of one type: one map to keys, queries and values, the attention, and the map of its result."""
    width, types = heads * channels, graph.num_types
    x, first, last = tensor(graph.num_src, features), tensor(1, 3 * width, features), tensor(1, width, width)
    first_bias, last_bias, scale = tensor(1, 3 * width), tensor(1, width), tensor(types, heads)
    matrices = tensor(types, heads, channels, channels), tensor(types, heads, channels, channels)

    def call() -> Tensor:
        offsets = torch.empty(2, dtype=torch.int64, device=x.device)
        k, q, v = torch.ops.edgeless.typed_linear(x, first, first_bias, offsets).split(width, dim=1)
        out = pair_dot_attention(graph.compact, q, k, v, *matrices, scale, channels**-0.5)
        return torch.ops.edgeless.typed_linear(out, last, last_bias, offsets)

    return call


PLANNED = {"rgcn": _rgcn, "rgat": _rgat, "hgt": _hgt}


# Stand-ins of a graph on a GPU ---------------------------------------------------------------------------------------


class _Side(NamedTuple):
    """What is counted of one direction: rows, segments, tiles of segments and of rows, and parts of hubs."""

    rows: int
    segments: int
    tiles: int
    row_tiles: int
    parts: int

    @classmethod
    def of(cls, graph: TypedGraph, direction: Compressed, num_rows: int, cut: int) -> _Side:
        """As ``segment_tiles`` counts them, without its arrays."""
        rows = graph._sorted(direction, cut)[1]
        segments, of_row = rows.numel(), torch.bincount(rows.long(), minlength=num_rows)
        parts = torch.where(of_row > _HUB, (of_row + _HUB - 1) // _HUB, 0)
        added = int(torch.where(of_row > _HUB, parts, of_row).sum())
        tiles = (graph.num_edges + OF_SEGMENT * segments) // OF_TILE + graph.num_types
        row_tiles = (added + OF_ROW * num_rows + OF_ROW_TILE - 1) // OF_ROW_TILE
        return cls(num_rows, segments, tiles, row_tiles, int(parts.sum()))


class _Counts:
    """What the formats of a typed graph would count on a GPU, from the same graph on the CPU."""

    def __init__(self, graph: TypedGraph, device: Device):
        cut = _TILED_CUT if device.most_fused_width(torch.float16, False) > 0 else CUT
        self.graph, self.ids = graph, graph.graph.csr.indptr.dtype
        self.sides = {
            "by dst": _Side.of(graph, graph.graph.csr, graph.num_dst, cut),
            "by src": _Side.of(graph, graph.graph.csc, graph.num_src, cut),
        }
        edges = graph.compact.edges
        self.num_pairs = edges.num_src
        self.degrees = [int(d.indptr.diff().max()) if graph.num_edges else 0 for d in (edges.csr, edges.csc)]
        self.walks = walks(graph)

    def stand_in(self) -> TypedGraph:
        """The graph on a GPU, with the formats that layers ask it for; within a FakeTensorMode."""
        of, edges = self.graph, self.graph.num_edges
        csr = Compressed(self._ids(of.num_dst + 1), self._ids(edges), self._ids(edges))
        csc = Compressed(self._ids(of.num_src + 1), self._ids(edges), self._ids(edges))
        graph = TypedGraph(Graph(csr, csc, of.num_src, of.num_dst), self._ids(edges), of.num_types)
        for side in self.sides:
            self._set(graph, side, self._segments(side))
            self._set(graph, ("tiles", side), self._tiles(side))
        for dtype in (torch.float32, torch.float64):
            segments = self.sides["by dst"].segments
            self._set(graph, ("mean", "by dst", dtype), torch.empty(segments, 1, dtype=dtype, device="cuda"))
            self._set(graph, ("mean", "by src", dtype), torch.empty(edges, dtype=dtype, device="cuda"))
        self._set(graph, "compact", self._compact(csr))
        arrays = [self._ids(t.numel()) for t in self.walks.arrays]
        self._set(graph, "walks over pairs", type(self.walks)(arrays, self.walks.max_degrees))
        return graph

    @staticmethod
    def _set(graph: TypedGraph, key, value) -> None:
        graph.format(key, lambda _: value)

    def _ids(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.ids, device="cuda")

    def _segments(self, side: str) -> list[Tensor]:
        num_rows, segments, *_ = self.sides[side]
        edges = self.graph.num_edges
        sizes = (self.graph.num_types + 1, segments, segments + 1, edges, edges, num_rows + 1 + segments)
        return [self._ids(size) for size in sizes]

    def _tiles(self, side: str) -> list[Tensor]:
        of = self.sides[side]
        sizes = (self.graph.num_types + 1, of.tiles + 1, of.row_tiles + 1, of.rows + 1 + of.segments)
        return [*map(self._ids, sizes), self._ids(2, of.parts)]

    def _compact(self, csr: Compressed) -> Compact:
        of, pairs, edges = self.graph, self.num_pairs, self.graph.num_edges
        offsets, rows, ids, none = self._ids(of.num_types + 1), self._ids(pairs), self._ids(pairs), self._ids(0)
        by_node = Compressed(self._ids(of.num_src + 1), rows, rows)
        graph = Graph(Compressed(self._ids(pairs + 1), rows, None), by_node, of.num_src, pairs)
        split = TypedGraph(graph, self._ids(pairs), of.num_types)
        self._set(split, "offsets", offsets)
        self._set(split, "by dst", [offsets, ids, none, rows, ids, none])
        self._set(split, "by src", [offsets, rows, none, ids, ids, self._ids(of.num_src + 1 + pairs)])
        by_pair = Compressed(self._ids(pairs + 1), self._ids(edges), self._ids(edges))
        in_edges = Compressed(csr.indptr, self._ids(edges), csr.edge_ids)
        joined = Graph(in_edges, by_pair, pairs, of.num_dst)
        joined._max_degrees.known = self.degrees  # which a graph in use asks its device for
        return Compact(split, joined)
