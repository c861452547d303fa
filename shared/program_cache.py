"""The cache of graphs in the programs of torch.compile.

A tracer sees no identity of tensors and no versions, so a compiled program asks the cache when it runs, by ops of its
own that do. What they return are copies: a compiler may write over any
tensor of its program. The ops are kept out of CUDA graphs, whose memory must not be kept and whose replays would not
see an edit. torch without a tag that says so, and programs that are exported, build the graph anew on every run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .graph import Compressed, Graph
from .graph_cache import graph_of_edge_index
from .ops._registration import is_exporting, register_fake
from .ops.graph import index_dtype
from .untraced import untraced

_TAG = getattr(torch.Tag, "cudagraph_unsafe", None)
_FLOWS = ("source_to_target", "target_to_source")


def caches() -> bool:
    """Whether the program that is being traced can ask the cache."""
    return _TAG is not None and not is_exporting()


def graph_in_program(
    edge_index: Tensor, num_src: int, num_dst: int, flow: str, self_loops: bool, by_edge: bool
) -> Graph:
    """The graph of a plain ``edge_index`` as tensors of the program that is being traced.

    With ``self_loops`` and not ``by_edge``, its indices and edge ids have room for all edges and all loops, so that
    their size is known without looking at the edges. Kernels read what the rows hold.
    """
    ops = torch.ops.edgeless
    key = (edge_index, num_src, num_dst, flow == _FLOWS[1], self_loops)
    kept = ops.cached_kept_edges(*key) if self_loops and by_edge else None
    num_edges = (edge_index if kept is None else kept).size(-1) + (min(num_src, num_dst) if self_loops else 0)

    def compressed(transposed: bool) -> Compressed:
        rows = num_src if transposed else num_dst
        indptr, indices = ops.cached_rows(*key, num_edges, transposed).split((rows + 1, num_edges))
        return Compressed(indptr, indices, ops.cached_edge_ids(*key, num_edges, transposed))

    # What a program does not use is removed from it.
    return Graph(compressed(False), compressed(True), num_src, num_dst, kept=kept)


def _look_up(edge_index, num_src, num_dst, reverse, self_loops) -> Graph:
    return graph_of_edge_index(edge_index, edge_index, num_src, num_dst, _FLOWS[reverse], self_loops)


def _arrays(graph: Graph, transposed: bool, by_edge: bool) -> list[Tensor]:
    return graph.csc_arrays(by_edge) if transposed else graph.csr_arrays(by_edge)


def _joined(parts: list[Tensor], missing: int, dtype: torch.dtype) -> Tensor:
    """A copy of the parts, one behind the other, and zeros, an id like any; on a GPU by one launch."""
    if missing:
        parts = [*parts, parts[0].new_zeros(missing)]
    return torch.cat(parts).to(dtype)


@untraced  # what a program runs is not traced again
def _cached_rows(edge_index, num_src, num_dst, reverse, self_loops, num_edges, transposed):
    graph = _look_up(edge_index, num_src, num_dst, reverse, self_loops)
    dtype = index_dtype(num_dst, num_src, num_edges)
    return _joined(_arrays(graph, transposed, False), num_edges - graph.num_edges, dtype)


@untraced
def _cached_edge_ids(edge_index, num_src, num_dst, reverse, self_loops, num_edges, transposed):
    graph = _look_up(edge_index, num_src, num_dst, reverse, self_loops)
    dtype = index_dtype(num_dst, num_src, num_edges)
    return _joined(_arrays(graph, transposed, True)[2:], num_edges - graph.num_edges, dtype)


@untraced
def _cached_kept_edges(edge_index, num_src, num_dst, reverse, self_loops):
    kept = _look_up(edge_index, num_src, num_dst, reverse, self_loops)._kept
    return torch.arange(edge_index.size(1), device=edge_index.device) if kept is None else kept.clone()


def _cached_rows_fake(edge_index, num_src, num_dst, reverse, self_loops, num_edges, transposed):
    rows = num_src if transposed else num_dst
    return edge_index.new_empty(rows + 1 + num_edges, dtype=index_dtype(num_dst, num_src, num_edges))


def _cached_edge_ids_fake(edge_index, num_src, num_dst, reverse, self_loops, num_edges, transposed):
    return edge_index.new_empty(num_edges, dtype=index_dtype(num_dst, num_src, num_edges))


def _cached_kept_edges_fake(edge_index, num_src, num_dst, reverse, self_loops):
    return edge_index.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.int64)


if _TAG is not None:
    _library = torch.library.Library("edgeless", "FRAGMENT")
    _KEY = "Tensor edge_index, SymInt num_src, SymInt num_dst, bool reverse, bool self_loops"
    for _name, _more, _run, _fake in (
        # indptr, then indices
        ("cached_rows", ", SymInt num_edges, bool transposed", _cached_rows, _cached_rows_fake),
        ("cached_edge_ids", ", SymInt num_edges, bool transposed", _cached_edge_ids, _cached_edge_ids_fake),
        # of those that self loops did not replace
        ("cached_kept_edges", "", _cached_kept_edges, _cached_kept_edges_fake),
    ):
        _library.define(f"{_name}({_KEY}{_more}) -> Tensor", tags=(_TAG,))
        _library.impl(_name, _run, "CompositeExplicitAutograd")
        register_fake(f"edgeless::{_name}")(_fake)
