"""GINConv of PyG on the kernels for sums and extrema."""

from __future__ import annotations

from torch.nn import Module, Sequential
from torch_geometric.nn.conv import gin_conv

from edgeless.map_order import maps_first
from edgeless.projection import add_row, is_plain, product

from ..conv import LINEAR, FusedConv, pair
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

    # Read by PyG when it writes propagate(), which the stock path uses:
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
        if x_l is x_r and (steps := self._steps(edge_index)):
            graph, (linear, *rest) = self._graph((x_l, x_r), edge_index, size), steps
            if maps_first(graph, x_l, linear.weight, None, None):
                x = product(x_l, linear.weight.t())
                out = self._aggregate(graph, x, edge_index, None) + (1 + self.eps) * x
                out = out if linear.bias is None else add_row(out, linear.bias)
                for step in rest:
                    out = step(out)
                return out
        out = self._propagate((x_l, x_r), edge_index, None, size)
        return self.nn(out if x_r is None else out + (1 + self.eps) * x_r)

    def _steps(self, edge_index) -> list[Module]:
        """What ``nn`` runs, where that begins with a linear map which a sum of neighbours may follow; else nothing."""
        if self._reduce not in ("sum", "mean") or kind_of(edge_index) in SPARSE:
            return []
        steps = list(self.nn) if is_plain(self.nn, (Sequential,)) else [self.nn]
        return steps if steps and is_plain(steps[0], LINEAR) else []
