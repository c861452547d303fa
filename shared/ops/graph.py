"""The graph ops: from a list of edges to CSR, and from CSR to its transpose."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

INT32_LIMIT = 2**31 - 1


def index_dtype(*sizes: int) -> torch.dtype:
    """int32 where every one of ``sizes`` (numbers of nodes and edges) is below 2**31 - 1, else int64."""
    return torch.int32 if all(size < INT32_LIMIT for size in sizes) else torch.int64


def coo_to_csr(row: Tensor, col: Tensor, num_rows: int, num_cols: int, validate: bool = True):
    dtype = index_dtype(num_rows, num_cols, row.numel())
    if validate and row.numel() and bool((row.min() < 0) | (row.max() >= num_rows) | (col.min() < 0) | (col.max() >= num_cols)):
        raise IndexError("coo_to_csr: id out of range")
    edge_ids = torch.argsort(row, stable=True)
    indptr = torch.zeros(num_rows + 1, dtype=dtype, device=row.device)
    indptr[1:] = torch.bincount(row.long(), minlength=num_rows).cumsum(0)
    return indptr, col[edge_ids].to(dtype), edge_ids.to(dtype)


def csr_transpose(indptr: Tensor, indices: Tensor, edge_ids: Optional[Tensor], num_cols: int):
    rows = torch.arange(indptr.numel() - 1, device=indptr.device).repeat_interleave(indptr.diff())
    order = torch.argsort(indices, stable=True)
    ptr = torch.zeros(num_cols + 1, dtype=indptr.dtype, device=indptr.device)
    ptr[1:] = torch.bincount(indices.long(), minlength=num_cols).cumsum(0)
    ids = order if edge_ids is None else edge_ids[order]
    return ptr, rows[order].to(indptr.dtype), ids.to(indptr.dtype)
