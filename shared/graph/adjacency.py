"""One direction of a graph's adjacency as arrays: how it is checked, transposed and converted to an edge list."""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from ..checks import check_compressed, check_num_nodes, compiling, normal_tensors
from ..ops.graph import csr_transpose, index_dtype
from .deferred_checks import deferred


class Compressed(NamedTuple):
    """One direction of the adjacency: row ``r`` owns the entries ``indptr[r]`` to ``indptr[r + 1]``.

    Shapes: indptr ``[num_rows + 1]``, indices ``[E]`` (the column of an entry), edge_ids ``[E]`` (the original id of an
    entry's edge; None where it is the index of the entry). All have the graph's index dtype.
    """

    indptr: Tensor
    indices: Tensor
    edge_ids: Optional[Tensor]


def compress(call, indptr, indices, edge_ids, num_cols, limit_name, validate) -> Compressed:
    """Checks compressed arrays and makes them contiguous and of one dtype. ``num_cols`` None means a square graph."""
    if num_cols is not None:
        check_num_nodes(call, limit_name, num_cols)
    check_compressed(call, indptr, indices, edge_ids, num_cols, limit_name, validate and not compiling())
    num_rows = indptr.numel() - 1
    dtype = index_dtype(num_rows, num_rows if num_cols is None else num_cols, indices.numel())
    with normal_tensors():
        return Compressed(*(None if t is None else _own(t, dtype) for t in (indptr, indices, edge_ids)))


def _own(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Makes ``tensor`` contiguous and of ``dtype``, and clones an inference tensor, which autograd could not save."""
    tensor = tensor.to(dtype).contiguous()
    return tensor.clone() if not compiling() and tensor.is_inference() else tensor


def transpose(compressed: Compressed, num_cols: int) -> Compressed:
    """Returns the other direction, with the original edge ids."""
    with normal_tensors():
        return Compressed(*csr_transpose(*compressed, num_cols))


def arrays_of(compressed: Compressed, by_edge: bool) -> list[Tensor]:
    """Returns the arrays as ops take them: with edge ids if the op has per-edge data and ids differ from indices."""
    indptr, indices, edge_ids = compressed
    return [indptr, indices] if edge_ids is None or not by_edge else [indptr, indices, edge_ids]


def uncompress(compressed: Compressed):
    """Returns the row ``[E]`` and the column ``[E]`` of every edge, in the order of edge ids."""
    indptr, indices, edge_ids = compressed
    rows = torch.arange(indptr.numel() - 1, dtype=indptr.dtype, device=indptr.device)
    rows = rows.repeat_interleave(indptr.diff(), output_size=indices.numel())
    if edge_ids is None:
        return rows, indices
    edge_ids = edge_ids.to(torch.int64)
    return torch.empty_like(rows).scatter_(0, edge_ids, rows), torch.empty_like(indices).scatter_(0, edge_ids, indices)


def check_reverses(call: str, compressed: Compressed, num_nodes: int) -> None:
    """Raises ValueError unless every edge of a square graph has its reverse, with the same multiplicity."""
    if compiling():
        return
    turned = transpose(compressed._replace(edge_ids=None), num_nodes)._replace(edge_ids=None)
    again = transpose(turned, num_nodes)._replace(edge_ids=None)  # transposing sorts the columns within rows
    both = tuple(torch.stack(uncompress(one)) for one in (again, turned))
    differs = (both[0] != both[1]).any(0)
    if bool(differs.any()):
        here, there = (ends[:, int(differs.to(torch.uint8).argmax())].tolist() for ends in both)
        one, other = min(here, there)  # of two sorted lists, the lesser edge is the unmatched one
        one, other = (other, one) if here < there else (one, other)
        raise ValueError(
            f"{call}: is_symmetric needs the reverse of every edge, as often as the edge, but {one} to {other} has none"
        )


def replace_self_loops(src: Tensor, dst: Tensor, num_loops: int):
    """Replaces all self loops by one at each of the first ``num_loops`` nodes.

    Returns:
        The sources and the destinations of the kept edges followed by the loops, and the ids of the kept edges, None
        if the graph had no self loops.
    """
    loops = torch.arange(num_loops, dtype=src.dtype, device=src.device)
    if (checks := None if compiling() else deferred()) is not None:
        checks.no_loops(src, dst)
        return torch.cat((src, loops)), torch.cat((dst, loops)), None
    keep, kept = src != dst, None
    if compiling() or not bool(keep.all()):  # a traced program cannot branch on values
        kept = keep.nonzero().squeeze(1)
        src, dst = src.index_select(0, kept), dst.index_select(0, kept)
    return torch.cat((src, loops)), torch.cat((dst, loops)), kept


def move(compressed: Optional[Compressed], device) -> Optional[Compressed]:
    """Returns the same arrays on ``device``."""
    if compressed is None:
        return None
    return Compressed(*(None if t is None else t.to(device) for t in compressed))
