"""One direction of a graph's adjacency as arrays, and what makes it, turns it round and takes it apart."""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from .graph_checks import check_compressed, check_num_nodes, compiling, normal_tensors
from .ops.graph import csr_transpose, index_dtype


class Compressed(NamedTuple):
    """One direction of the adjacency: row ``r`` owns the positions ``indptr[r]`` to ``indptr[r + 1]``.

    Shapes: indptr ``[num_rows + 1]``, indices ``[E]`` (column of a position), edge_ids ``[E]`` (original id of the edge
    at a position, or None where position and id are the same). All of the graph's index dtype.
    """

    indptr: Tensor
    indices: Tensor
    edge_ids: Optional[Tensor]


def compress(call, indptr, indices, edge_ids, num_cols, limit_name, validate) -> Compressed:
    """Check compressed arrays and bring them to one dtype and contiguous memory. ``num_cols`` None means square."""
    if num_cols is not None:
        check_num_nodes(call, limit_name, num_cols)
    check_compressed(call, indptr, indices, edge_ids, num_cols, limit_name, validate and not compiling())
    num_rows = indptr.numel() - 1
    dtype = index_dtype(num_rows, num_rows if num_cols is None else num_cols, indices.numel())
    with normal_tensors():
        return Compressed(*(None if t is None else _own(t, dtype) for t in (indptr, indices, edge_ids)))


def _own(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor`` as ``dtype`` in contiguous memory, fit to be saved for backward."""
    tensor = tensor.to(dtype).contiguous()
    return tensor.clone() if not compiling() and tensor.is_inference() else tensor


def transpose(compressed: Compressed, num_cols: int) -> Compressed:
    """The other direction. Its edge ids are the original ones."""
    with normal_tensors():
        return Compressed(*csr_transpose(*compressed, num_cols))


def arrays_of(compressed: Compressed, by_edge: bool) -> list[Tensor]:
    """The arrays as the ops take them: with edge ids where something is by edge and an id is not a position."""
    indptr, indices, edge_ids = compressed
    return [indptr, indices] if edge_ids is None or not by_edge else [indptr, indices, edge_ids]


def uncompress(compressed: Compressed):
    """(row, column) of every edge in original order."""
    indptr, indices, edge_ids = compressed
    rows = torch.arange(indptr.numel() - 1, dtype=indptr.dtype, device=indptr.device)
    rows = rows.repeat_interleave(indptr.diff(), output_size=indices.numel())
    if edge_ids is None:
        return rows, indices
    edge_ids = edge_ids.to(torch.int64)
    return torch.empty_like(rows).scatter_(0, edge_ids, rows), torch.empty_like(indices).scatter_(0, edge_ids, indices)


def check_reverses(call: str, compressed: Compressed, num_nodes: int) -> None:
    """Raise unless every edge of a square graph has its reverse, and as often."""
    if compiling():
        return
    turned = transpose(compressed._replace(edge_ids=None), num_nodes)._replace(edge_ids=None)
    again = transpose(turned, num_nodes)._replace(edge_ids=None)  # the rows of both are sorted
    both = tuple(torch.stack(uncompress(one)) for one in (again, turned))
    differs = (both[0] != both[1]).any(0)
    if bool(differs.any()):
        here, there = (ends[:, int(differs.to(torch.uint8).argmax())].tolist() for ends in both)
        one, other = min(here, there)  # what comes first is missing on the other side
        one, other = (other, one) if here < there else (one, other)
        raise ValueError(
            f"{call}: is_symmetric needs the reverse of every edge, as often as the edge, but {one} to {other} has none"
        )


def replace_self_loops(src: Tensor, dst: Tensor, num_loops: int):
    """Both ends of the edges that are no loops and of the new loops; ids of the former, None when these are all."""
    loops = torch.arange(num_loops, dtype=src.dtype, device=src.device)
    keep, kept = src != dst, None
    if compiling() or not bool(keep.all()):  # a traced program cannot branch on values
        kept = keep.nonzero().squeeze(1)
        src, dst = src.index_select(0, kept), dst.index_select(0, kept)
    return torch.cat((src, loops)), torch.cat((dst, loops)), kept


def move(compressed: Optional[Compressed], device) -> Optional[Compressed]:
    """The same arrays on ``device``."""
    if compressed is None:
        return None
    return Compressed(*(None if t is None else t.to(device) for t in compressed))
