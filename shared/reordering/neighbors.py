"""The undirected graph that the reordering methods work on, without multi-edges and self loops."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.graph import coo_to_csr, csr_transpose


class Neighbors(NamedTuple):
    """Distinct neighbours of every node in either direction, sorted: indptr ``[N + 1]`` and indices, on the CPU."""

    indptr: Tensor
    indices: Tensor

    @property
    def num_nodes(self) -> int:
        """N."""
        return self.indptr.numel() - 1

    @property
    def degrees(self) -> Tensor:
        """The number of neighbours of every node, ``[N]``."""
        return self.indptr.diff()


def neighbors_of(src: Tensor, dst: Tensor, num_nodes: int) -> Neighbors:
    """The neighbours in a graph of these edges, with ids below ``num_nodes``; may have multi-edges and self loops."""
    src, dst = src.cpu(), dst.cpu()
    ends = torch.cat((src, dst)), torch.cat((dst, src))
    # Two counting sorts, by column and then by row, leave every row sorted.
    sorted_once = coo_to_csr(*ends, num_nodes, num_nodes, False)[:2]
    indptr, indices, _ = csr_transpose(*sorted_once, None, num_nodes)
    nodes = torch.arange(num_nodes, dtype=indices.dtype, device=indices.device)
    rows = nodes.repeat_interleave(indptr.diff(), output_size=indices.numel())
    keep = rows != indices
    keep[1:] &= (rows[1:] != rows[:-1]) | (indices[1:] != indices[:-1])
    kept = indptr.new_zeros(indices.numel() + 1)
    torch.cumsum(keep, 0, dtype=indptr.dtype, out=kept[1:])
    return Neighbors(kept[indptr.long()], indices[keep])
