"""The cache of graphs in the programs of torch.compile.

A tracer sees no identity of tensors and no versions, so a compiled program asks the cache when it runs, by ops of its
own that call :func:`edgeless.cache.graph_from_edge_index`. What they return are copies: a compiler may write over any
tensor of its program. The ops are kept out of CUDA graphs, whose memory must not be kept and whose replays would not
see an edit. torch without a tag that says so, and programs that are exported, build the graph anew on every run.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .graph import Compressed, Graph
from .ops._registration import register_fake
from .ops.graph import index_dtype

_TAG = getattr(torch.Tag, "cudagraph_unsafe", None)
_FLOWS = ("source_to_target", "target_to_source")


def caches() -> bool:
    """Whether the program that is being traced can ask the cache."""
    return _TAG is not None and not _is_exporting()


@torch.compiler.assume_constant_result
def _is_exporting() -> bool:
    """Run while tracing and not traced: the Dynamo of torch 2.11 takes the function below for True."""
    return torch.compiler.is_exporting()


def graph_in_program(
    edge_index: Tensor, num_src: int, num_dst: int, flow: str, self_loops: bool, by_edge: bool
) -> Graph:
    """The graph of a plain ``edge_index`` as tensors of the program that is being traced.

    With ``self_loops`` and not ``by_edge``, its indices and edge ids have room for all edges and all loops, so that
    their size is known without looking at the edges. Kernels read what the rows hold.
    """
    key = (num_src, num_dst, flow == _FLOWS[1], self_loops)
    *csr, kept = torch.ops.edgeless.cached_csr(edge_index, *key, by_edge)
    csc = torch.ops.edgeless.cached_csc(edge_index, csr[1], *key)  # removed from programs that do not use it
    kept = kept if self_loops and by_edge else None
    return Graph(Compressed(*csr), Compressed(*csc), num_src, num_dst, kept=kept)


def _look_up(edge_index, num_src, num_dst, reverse, self_loops) -> Graph:
    from .cache import graph_from_edge_index

    return graph_from_edge_index(edge_index, num_src, num_dst, flow=_FLOWS[reverse], self_loops=self_loops)


def _copies(arrays: Compressed, num_edges: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Of an index dtype, with room for ``num_edges``; what is beyond the last row is 0, an id like any."""
    missing = num_edges - arrays.indices.size(0)
    by_edge = (pad(t, (0, missing)) if missing else t.clone() for t in arrays[1:])
    return tuple(t.to(dtype) for t in (arrays.indptr.clone(), *by_edge))


@torch.compiler.disable  # what a program runs is not traced again
def _cached_csr(edge_index, num_src, num_dst, reverse, self_loops, by_edge):
    graph = _look_up(edge_index, num_src, num_dst, reverse, self_loops)
    if not self_loops or not by_edge:
        kept = edge_index.new_empty(0, dtype=torch.int64)
    elif graph._kept is None:  # all of them
        kept = torch.arange(edge_index.size(1), device=edge_index.device)
    else:
        kept = graph._kept.clone()
    num_edges = graph.num_edges if by_edge else _room(edge_index, num_src, num_dst, self_loops)
    dtype = index_dtype(num_dst, num_src, num_edges)
    return *_copies(graph.csr, num_edges, dtype), kept


@torch.compiler.disable
def _cached_csc(edge_index, indices, num_src, num_dst, reverse, self_loops):
    graph = _look_up(edge_index, num_src, num_dst, reverse, self_loops)
    return _copies(graph.csc, indices.size(0), indices.dtype)


def _room(edge_index, num_src, num_dst, self_loops):
    return edge_index.size(1) + (min(num_src, num_dst) if self_loops else 0)


def _cached_csr_fake(edge_index, num_src, num_dst, reverse, self_loops, by_edge):
    num_edges, num_kept = _room(edge_index, num_src, num_dst, self_loops), 0
    if self_loops and by_edge:
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
        (
            "cached_csr",
            f"(Tensor edge_index, {_KEY}, bool by_edge) -> ({_ARRAYS}, Tensor kept)",
            _cached_csr,
            _cached_csr_fake,
        ),
        ("cached_csc", f"(Tensor edge_index, Tensor indices, {_KEY}) -> ({_ARRAYS})", _cached_csc, _cached_csc_fake),
    ):
        _library.define(_name + _schema, tags=(_TAG,))
        _library.impl(_name, _run, "CompositeExplicitAutograd")
        register_fake(f"edgeless::{_name}")(_fake)
