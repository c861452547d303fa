"""The random numbers of attention dropout: a counter-based generator that the kernels and plain PyTorch both compute.

Whether the attention weight of an edge is kept depends on the seed, the id of the edge and the head alone. So the
backward draws the mask of the forward again instead of storing it, and the mask does not depend on the order in which
edges are computed. The kernels' generator is ``core_cuda/common/dropout.h``.
"""

from __future__ import annotations

from typing import Union

import torch
from torch import Tensor

Seed = Union[int, Tensor, None]

_MASK32 = 0xFFFFFFFF


def seed_tensor(seed: Seed, device) -> Tensor:
    """The seed as the kernels take it, int64 ``[1]`` on ``device``. Where it is None, torch's generator draws one."""
    if seed is None:
        return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)
    if isinstance(seed, Tensor):
        return seed.to(device=device, dtype=torch.int64).reshape(1)
    return torch.tensor([seed], dtype=torch.int64, device=device)


def dropout_mask(seed: Tensor | int, num_edges: int, heads: int, p: float, device="cpu", ids=None) -> Tensor:
    """The dropout mask that the kernels draw for a seed.

    The draws are Philox4x32-7 (Salmon et al.: "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011), whose counter
    is the edge's id and whose key is the seed. A weight is dropped where its draw, an integer of 32 bits, is less than
    ``p * 2**32``.

    Args:
        seed (int or int64 Tensor [1]): the seed that the attention was called with.
        num_edges (int): ``E``, the number of edges.
        heads (int): ``H``, the number of attention heads.
        p (float): probability to drop a weight, in [0, 1].
        device (torch.device or str): where the mask is made.
        ids (int64 Tensor [E], optional): the edge id that is the counter of each draw; by default 0 to E - 1.

    Returns:
        bool Tensor ``[E, H]``: True where the attention weight is kept.

    Example:
        >>> import torch
        >>> from edgeless import Graph, functional, reference
        >>> graph = Graph.from_edge_index(torch.tensor([[0, 1, 2, 0], [1, 2, 0, 2]]))
        >>> x, logits = torch.randn(3, 2, 4), torch.randn(3, 2)
        >>> _, weights = functional.gat_attention(
        ...     graph, x, logits, logits, dropout=0.5, seed=7, return_weights="dropped"
        ... )
        >>> torch.equal(weights != 0, reference.dropout_mask(7, 4, 2, 0.5))
        True
    """
    ids = torch.arange(num_edges, dtype=torch.int64, device=device) if ids is None else ids
    groups = (heads + 3) // 4
    lanes = [
        lane
        for group in range(groups)
        for lane in _philox(int(seed), ids, torch.tensor(group, dtype=torch.int64, device=device))
    ]
    return torch.stack(lanes, dim=1)[:, :heads] >= int(p * 2**32)


def _philox(seed: int, edge_id: Tensor, head_group: Tensor) -> list[Tensor]:
    """The four 32-bit draws of Philox4x32-7 for every edge and a group of four heads, as int64 tensors ``[E]``."""
    c0, c1 = edge_id & _MASK32, (edge_id >> 32) & _MASK32
    c2, c3 = head_group.expand_as(c0), torch.zeros_like(c0)
    k0, k1 = seed & _MASK32, (seed >> 32) & _MASK32
    for _ in range(7):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # int64 products wrap around, but their low 64 bits are right
        c0, c2 = ((p1 >> 32) & _MASK32) ^ c1 ^ k0, ((p0 >> 32) & _MASK32) ^ c3 ^ k1
        c1, c3 = p1 & _MASK32, p0 & _MASK32
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return [c0, c1, c2, c3]
