"""GINConv of PyG on the kernels for sums and extrema."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Optional

import torch
from torch import Tensor
from torch.nn import Identity, Module, ModuleList, Sequential
from torch_geometric.nn.conv import gin_conv
from torch_geometric.nn.models import MLP

from edgeless.checks import compiling
from edgeless.functional.map_order import first_map, maps_first, narrows
from edgeless.functional.projection import add_row, product
from edgeless.layers.adapter import is_plain

from ..conv import LINEAR, PLAIN, FusedConv, pair
from ..convert import SPARSE, kind_of
from ..neighbors import NeighborReduction


class GINConv(NeighborReduction, FusedConv, gin_conv.GINConv):
    r"""The graph isomorphism layer (Xu et al.: "How Powerful are Graph Neural Networks?", ICLR 2019, equation 4.1).

    Constructor, parameters and results are those of :class:`torch_geometric.nn.GINConv`; nothing of the size
    ``[E, F]`` is allocated.

    Shapes:
        x: ``[N, F]`` or a pair ``([Ns, F], [Nd, F] or None)``; edge_index: ``[2, E]`` tensor or EdgeIndex,
        SparseTensor or ``torch.sparse`` COO/CSR ``[Nd, Ns]``, or :class:`edgeless.Graph`; size: ``(Ns, Nd)``;
        output: that of ``nn`` on ``[Nd, F]``.
    """

    # Read by PyG when it writes propagate(), which the upstream path uses:
    # propagate_type: (x: OptPairTensor)

    drops_values = True

    def forward(self, x, edge_index, size=None):
        """The layer's output.

        Raises:
            IndexError: edge_index has an id that x does not have.
        """
        return self._choose(x, edge_index, size)

    def _fusion_refusals(self, x, edge_index, size=None) -> list[str]:
        return self._reduction_refusals(x, edge_index, None, size)

    def _fused_forward(self, x, edge_index, size):
        x_l, x_r = pair(x)
        graph = self._graph((x_l, x_r), edge_index, size)
        if x_l is x_r and (parts := self._parts(edge_index)):
            linear, rest = parts
            if maps_first(graph, x_l, linear.weight, None, None):
                x = product(x_l, linear.weight.t())
                out = self._plus_own(self._aggregate(graph, x, edge_index, None), x)
                return rest(out if linear.bias is None else add_row(out, linear.bias))
        out = self._aggregate(graph, x_l, edge_index, None)
        return self.nn(out if x_r is None else self._plus_own(out, x_r))

    def _plus_own(self, out: Tensor, x: Tensor) -> Tensor:
        """``out + (1 + eps) * x``."""
        eps = self.eps
        if x.is_cpu and not compiling() and type(eps) in PLAIN and not eps.requires_grad and eps.is_cpu:
            alike = eps.dtype is x.dtype is out.dtype and x.dtype in (torch.float32, torch.float64)
            return torch.add(out, x, alpha=1 + eps.item()) if alike else out + (1 + eps) * x  # one op in place of three
        return out + (1 + eps) * x

    def _parts(self, edge_index) -> Optional[tuple[Module, Callable[[Tensor], Tensor]]]:
        """The first linear map of ``nn`` and the rest of it, if neighbours may be summed between the two, else None."""
        if self._reduce not in ("sum", "mean") or kind_of(edge_index) in SPARSE:
            return None
        nn = self.nn
        if type(nn) is Sequential and nn._modules and not narrows(next(iter(nn._modules.values()))):
            return None  # a cheap check, before the exact one of first_map
        if is_plain(nn, (MLP,)) and not compiling() and len(nn.lins) and is_plain(nn.lins[0], LINEAR):
            return nn.lins[0], lambda x: _without_first_map(nn)(x)
        return first_map(nn, LINEAR)


def _without_first_map(mlp: MLP) -> MLP:
    """``mlp`` without its first linear map; it shares the parameters and the norms' statistics of ``mlp``."""
    rest = copy.copy(mlp)
    rest._modules = {**mlp._modules, "lins": ModuleList([Identity(), *list(mlp.lins)[1:]])}
    return rest
