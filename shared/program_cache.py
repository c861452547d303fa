"""The cache of graphs in the programs of torch.compile.

A tracer sees no identity of tensors and no versions, so a compiled program asks the cache when it runs, by ops of its
own that call :func:`edgeless.cache.graph_from_edge_index`. What they return are copies: a compiler may write over any
tensor of its program. The ops are kept out of CUDA graphs, whose memory must not be kept and whose replays would not
see an edit. torch without a tag that says so, and programs that are exported, build the graph anew on every run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .graph import Compressed, Graph
from .ops._registration import register_fake
from .ops.graph import index_dtype

_TAG = getattr(torch.Tag, "cudagraph_unsafe", None)
_FLOWS = ("source_to_target", "target_to_source")


def caches() -> bool:
    """Whether the program that is being traced can ask the cache."""
    return _TAG is not None and not torch.compiler.is_exporting()


def graph_in_program(edge_index: Tensor, num_src: int, num_dst: int, flow: str, self_loops: bool) -> Graph:
    """The graph of a plain ``edge_index`` as tensors of the program that is being traced."""
    key = (num_src, num_dst, flow == _FLOWS[1], self_loops)
    *csr, kept = torch.ops.edgeless.cached_csr(edge_index, *key)
    csc = torch.ops.edgeless.cached_csc(edge_index, csr[1], *key)  # removed from programs that do not use it
    kept = kept if self_loops else None
    return Graph(Compressed(*csr), Compressed(*csc), num_src, num_dst, kept=kept)


def _look_up(edge_index, num_src, num_dst, reverse, self_loops) -> Graph:
    from .cache import graph_from_edge_index

    return graph_from_edge_index(edge_index, num_src, num_dst, flow=_FLOWS[reverse], self_loops=self_loops)


@torch.compiler.disable  # what a program runs is not traced again
def _cached_csr(edge_index, num_src, num_dst, reverse, self_loops):
    graph = _look_up(edge_index, num_src, num_dst, reverse, self_loops)
    kept = graph._kept
    if not self_loops:
        kept = edge_index.new_empty(0, dtype=torch.int64)
    elif kept is None:  # all of them
        kept = torch.arange(edge_index.size(1), device=edge_index.device)
    return *(t.clone() for t in graph.csr), kept.clone()


@torch.compiler.disable
def _cached_csc(edge_index, indices, num_src, num_dst, reverse, self_loops):
    graph = _look_up(edge_index, num_src, num_dst, reverse, self_loops)
    return tuple(t.clone() for t in graph.csc)


def _cached_csr_fake(edge_index, num_src, num_dst, reverse, self_loops):
    num_edges, num_kept = edge_index.size(1), 0
    if self_loops:
        num_kept = torch.library.get_ctx().new_dynamic_size()
        num_edges = num_kept + min(num_src, num_dst)
    dtype = index_dtype(num_dst, num_src, num_edges)
    sizes = (num_dst + 1, num_edges, num_edges)
    return *(edge_index.new_empty(n, dtype=dtype) for n in sizes), edge_index.new_empty(num_kept, dtype=torch.int64)


def _cached_csc_fake(edge_index, indices, num_src, num_dst, reverse, self_loops):
    return indices.new_empty(num_src + 1), torch.empty_like(indices), torch.empty_like(indices)


if _TAG is not None:
    _library = torch.library.Library("edgeless", "FRAGMENT")
    _KEY = "SymInt num_src, SymInt num_dst, bool reverse, bool self_loops"
    _ARRAYS = "Tensor indptr, Tensor indices, Tensor edge_ids"
    for _name, _schema, _run, _fake in (
        ("cached_csr", f"(Tensor edge_index, {_KEY}) -> ({_ARRAYS}, Tensor kept)", _cached_csr, _cached_csr_fake),
        ("cached_csc", f"(Tensor edge_index, Tensor indices, {_KEY}) -> ({_ARRAYS})", _cached_csc, _cached_csc_fake),
    ):
        _library.define(_name + _schema, tags=(_TAG,))
        _library.impl(_name, _run, "CompositeExplicitAutograd")
        register_fake(f"edgeless::{_name}")(_fake)
