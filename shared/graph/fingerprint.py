"""64-bit hashes of the contents of graphs and tensors: equal on every device, in every process and for both id dtypes.

Every row of an integer table is hashed by itself and the hashes are added up, so a fingerprint takes one pass over the
data, on the device that holds it. It recognises known contents; it is no cryptographic hash.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Optional, Union

import torch
from torch import Tensor

from .. import _C

if TYPE_CHECKING:
    from .handle import Graph

__all__ = ["Fingerprint", "of_graph", "of_tensors", "of_text"]

_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / the golden ratio, odd
_MASK = 2**64 - 1
_CHUNK = 1 << 20  # rows hashed at a time: temporary tensors stay small, and on the CPU in its caches


class Fingerprint:
    """The fingerprint of a sequence of integer tables.

    Args:
        *sizes: integers that are hashed before the tables.
    """

    def __init__(self, *sizes: int):
        self._total = 0
        for size in sizes:
            self._total = _mixed(self._total, size)

    def add(self, *columns: Tensor) -> Fingerprint:
        """Adds a table, whose rows are hashed with their index.

        Args:
            *columns: ``[n]`` integers each, on one device.
        """
        total = torch.zeros((), dtype=torch.int64, device=columns[0].device)
        for first in range(0, columns[0].numel(), _CHUNK):
            total += _sum_of_hashes([column[first : first + _CHUNK] for column in columns], first)
        self._total = _mixed(self._total, int(total))
        return self

    def __int__(self) -> int:
        """Returns the fingerprint, an integer in [0, 2**64)."""
        return self._total

    def __str__(self) -> str:
        return f"{self._total:016x}"


def _mixed(total: int, value: int) -> int:
    total = ((total ^ (value & _MASK)) * _GOLDEN) & _MASK
    return total ^ (total >> 32)


def _sum_of_hashes(columns: list[Tensor], first: Optional[int]) -> Union[int, Tensor]:
    """Returns the sum of the rows' hashes (:func:`_mixed`); ``first`` is the first row's index, None if unordered."""
    columns = [column.to(torch.int64) for column in columns]
    if columns[0].device.type == "cpu":
        return _C.sum_of_row_hashes([column.contiguous() for column in columns], first)
    return _sum_by_torch(columns, first)


def _sum_by_torch(columns: list[Tensor], first: Optional[int]) -> Tensor:
    hashes = torch.zeros_like(columns[0])
    places = [] if first is None else [torch.arange(first, first + hashes.numel(), device=hashes.device)]
    for value in (*places, *columns, 1, 2):
        hashes = hashes.bitwise_xor_(value).mul_(_GOLDEN - 2**64)  # int64 products wrap around
        hashes ^= (hashes >> 32) & 0xFFFFFFFF
    return hashes.sum()


def of_graph(graph: Graph) -> int:
    """Returns the fingerprint of a graph's sizes and edges, regardless of the edge order. Waits for the GPU."""
    by_dst = graph.has_csr
    indptr, indices = graph.csr_arrays(False) if by_dst else graph.csc_arrays(False)
    total = torch.zeros((), dtype=torch.int64, device=indices.device)
    for rows, columns in _edges(indptr, indices):
        total += _sum_of_hashes([columns, rows] if by_dst else [rows, columns], None)
    return _mixed(int(Fingerprint(graph.num_src, graph.num_dst, graph.num_edges)), int(total))


def _edges(indptr: Tensor, indices: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the rows and columns of a CSR's edges, a chunk of edges at a time."""
    num_edges, device = indices.numel(), indices.device
    firsts = torch.arange(0, num_edges, _CHUNK, device=device)
    lasts = (firsts + _CHUNK - 1).clamp(max=num_edges - 1)
    bounds = torch.searchsorted(indptr.to(torch.int64), torch.stack([firsts, lasts]), right=True) - 1
    for first, begin, end in zip(firsts.tolist(), *bounds.tolist()):
        columns = indices[first : first + _CHUNK]
        counts = indptr[begin : end + 2].clamp(first, first + columns.numel()).diff()
        rows = torch.arange(begin, end + 1, device=device)
        yield torch.repeat_interleave(rows, counts, output_size=columns.numel()), columns


def of_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Returns the fingerprint of named CPU tensors: of their names, dtypes, shapes and bits."""
    found = Fingerprint()
    for name in sorted(tensors):
        tensor = tensors[name]
        _add_bytes(found, _bytes_of(f"{name} {tensor.dtype} {list(tensor.shape)}"))
        if tensor.numel():
            _add_bytes(found, tensor.contiguous().reshape(-1).view(torch.uint8))
    return str(found)


def of_text(text: str) -> str:
    """Returns the fingerprint of a text."""
    found = Fingerprint()
    _add_bytes(found, _bytes_of(text))
    return str(found)


def _bytes_of(text: str) -> Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _add_bytes(found: Fingerprint, values: Tensor) -> None:
    """Adds bytes as int64 words, the last padded with zeros, and then the number of bytes."""
    if values.storage_offset() % 8:
        values = values.clone()
    whole = values.numel() // 8 * 8
    rest = torch.cat((values[whole:], values.new_zeros(8 - values.numel() + whole)))
    found.add(values[:whole].view(torch.int64)).add(rest.view(torch.int64))
    found.add(torch.tensor([values.numel()], device="cpu"))
