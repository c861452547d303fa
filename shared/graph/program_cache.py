"""The graph cache inside torch.compile programs.

A tracer sees neither the identity nor the version of a tensor, so the compiled program looks the graph up at run time,
through the ops below. They return copies, since a compiler may overwrite any tensor of its program. They stay out of
CUDA graphs, whose memory must not be kept and whose replays would miss an edit of the edges. Without a torch tag for
that (``cudagraph_unsafe``), and in exported programs, every run builds the graph again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops._registration import is_exporting, register_fake
from ..ops.graph import index_dtype
from ..untraced import untraced
from .handle import Compressed, Graph
from .weak_cache import graph_of_edge_index

_TAG = getattr(torch.Tag, "cudagraph_unsafe", None)
_FLOWS = ("source_to_target", "target_to_source")


def caches() -> bool:
    """Returns whether the program being traced can look graphs up in the cache."""
    return _TAG is not None and not is_exporting()


def graph_in_program(
    edge_index: Tensor, num_src: int, num_dst: int, flow: str, self_loops: bool, by_edge: bool
) -> Graph:
    """The graph of a plain ``edge_index`` as tensors of the program being traced.

    With ``self_loops`` and without ``by_edge``, indices and edge ids are sized for all edges and all loops, a size that
    does not depend on the edges' values. Kernels read only up to ``indptr[-1]``.
    """
    ops = torch.ops.edgeless
    key = (edge_index, num_src, num_dst, flow == _FLOWS[1], self_loops)
    kept = ops.cached_kept_edges(*key) if self_loops and by_edge else None
    num_edges = (edge_index if kept is None else kept).size(-1) + (min(num_src, num_dst) if self_loops else 0)

    def compressed(transposed: bool) -> Compressed:
        rows = num_src if transposed else num_dst
        indptr, indices = ops.cached_rows(*key, num_edges, transposed).split((rows + 1, num_edges))
        return Compressed(indptr, indices, ops.cached_edge_ids(*key, num_edges, transposed))

    # The compiler removes the arrays that the program does not use.
    return Graph(compressed(False), compressed(True), num_src, num_dst, kept=kept)


def _look_up(edge_index, num_src, num_dst, reverse, self_loops) -> Graph:
    return graph_of_edge_index(edge_index, edge_index, num_src, num_dst, _FLOWS[reverse], self_loops)


def _arrays(graph: Graph, transposed: bool, by_edge: bool) -> list[Tensor]:
    return graph.csc_arrays(by_edge) if transposed else graph.csr_arrays(by_edge)


def _joined(parts: list[Tensor], missing: int, dtype: torch.dtype) -> Tensor:
    """A concatenated copy of the parts, padded with ``missing`` zeros, which are valid ids; on a GPU in one launch."""
    if missing:
        parts = [*parts, parts[0].new_zeros(missing)]
    return torch.cat(parts).to(dtype)


@untraced  # a running program must not trace the lookup
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
        # returns indptr and indices, concatenated
        ("cached_rows", ", SymInt num_edges, bool transposed", _cached_rows, _cached_rows_fake),
        ("cached_edge_ids", ", SymInt num_edges, bool transposed", _cached_edge_ids, _cached_edge_ids_fake),
        # returns the ids of the edges that self loops did not replace
        ("cached_kept_edges", "", _cached_kept_edges, _cached_kept_edges_fake),
    ):
        _library.define(f"{_name}({_KEY}{_more}) -> Tensor", tags=(_TAG,))
        _library.impl(_name, _run, "CompositeExplicitAutograd")
        register_fake(f"edgeless::{_name}")(_fake)
