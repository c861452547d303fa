"""Products of edges' rows by a matrix that round every row alike, wherever it stands among the rows.

Libraries choose other instructions for the last rows of a block and for rows at other addresses. Messages that are
equal would then differ in their last bits, and those of an edge between the walks that compute them: the gradient of a
maximum, which looks for equal messages, would find too few of them or none. So the interpreter takes these products
for messages that are compared. On CUDA it takes the library's.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.fx import Node

from ..front import ops
from ..front.rules import name_of, space_of
from ..front.spaces import EDGE

_MOST = 1 << 19  # elements of a matrix that edgeless' kernels take, kMost in core_cuda/projection/projection_cpu.cpp


def compared(walk_ops: Iterable[Node]) -> set[Node]:
    """The products of a walk on which it depends whether messages are equal to an extremum."""
    inside = set(walk_ops)
    waiting = [node.args[0] for node in inside if node.target in (ops.share, ops.extremum)]
    found: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node in inside and node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return {node for node in found if is_by_rows(node)}


def is_by_rows(node: Node) -> bool:
    """Whether a value is a plain product of edges' rows by a matrix of parameters."""
    if name_of(node) not in ("mm", "addmm") or node.kwargs:
        return False
    left, right = map(space_of, node.args[-2:])
    return left.kind == EDGE and left.dim == 0 and not right.rows


def mm(x: Tensor, matrix: Tensor) -> Tensor:
    """``x @ matrix`` for ``x`` ``[E, K]`` and ``matrix`` ``[K, N]``."""
    if not x.is_cpu or not x.is_floating_point():
        return torch.mm(x, matrix)
    if x.dtype.itemsize < 4:
        return mm(x.float(), matrix.float()).to(x.dtype)
    if _has_kernel(x, matrix):
        return torch.ops.edgeless.project(x, [matrix.t()], [None])[0]
    out = x.new_zeros(x.size(0), matrix.size(1))
    for column, row in zip(x.unbind(1), matrix.unbind(0)):
        out += column[:, None] * row  # a product and a sum, each rounded for itself
    return out


def addmm(summand: Tensor, x: Tensor, matrix: Tensor) -> Tensor:
    """``summand + x @ matrix``."""
    if not x.is_cpu or not x.is_floating_point():
        return torch.addmm(summand, x, matrix)
    if x.dtype.itemsize < 4:
        return (summand.float() + mm(x.float(), matrix.float())).to(x.dtype)
    return summand + mm(x, matrix)


def _has_kernel(x: Tensor, matrix: Tensor) -> bool:
    """Whether edgeless multiplies by its own kernels, which sum in the same order for every row."""
    wide = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    return wide and x.dtype is torch.float32 and x.numel() > 0 and 0 < matrix.numel() <= _MOST
