"""The ops that convert an edge list to CSR and transpose a CSR. Their schemas are in ``core_cuda/library.cpp``.

``coo_to_csr(row, col, num_rows, num_cols, validate)`` sorts edges (int32 or int64) by row and keeps the original order
within a row. ``csr_transpose(indptr, indices, edge_ids, num_cols)`` sorts edges by column, those of a column by row.
Both return (indptr, indices, edge_ids), where edge_ids are the original ids of the edges.
"""

from __future__ import annotations

import torch

from .. import _C  # noqa: F401  registers the ops
from ._registration import if_known, is_exporting, register_fake

coo_to_csr = torch.ops.edgeless.coo_to_csr
csr_transpose = torch.ops.edgeless.csr_transpose

_INT32_LIMIT = 2**31 - 1


def index_dtype(*sizes: int) -> torch.dtype:
    """Returns int32 if all ``sizes`` (numbers of nodes and edges) are below 2**31 - 1, else int64."""
    return torch.int32 if all(_below_limit(size) for size in sizes) else torch.int64


def _below_limit(size) -> bool:
    # A size that is known only at run time counts as below: nobody compiles a graph of two billion edges with one.
    if isinstance(size, int):
        return size < _INT32_LIMIT
    if is_exporting():  # a comparison would become a bound, which torch.export reports against the declared sizes
        return True
    return if_known(lambda: bool(size < _INT32_LIMIT)) is not False


@register_fake("edgeless::coo_to_csr")
def _coo_to_csr_fake(row, col, num_rows, num_cols, validate):
    dtype = index_dtype(num_rows, num_cols, row.size(0))
    return _empty(row, num_rows, row.size(0), dtype)


@register_fake("edgeless::csr_transpose")
def _csr_transpose_fake(indptr, indices, edge_ids, num_cols):
    return _empty(indptr, num_cols, indices.size(0), indptr.dtype)


def _empty(like, num_rows, num_edges, dtype):
    return tuple(like.new_empty((size,), dtype=dtype) for size in (num_rows + 1, num_edges, num_edges))
