"""GraphConv of PyG on the kernels for sums and extrema."""

from __future__ import annotations

from torch_geometric.nn.conv import graph_conv

from ..conv import FusedConv, pair
from ..neighbors import NeighborReduction


class GraphConv(NeighborReduction, FusedConv, graph_conv.GraphConv):
    r"""The higher-order graph layer (Morris et al.: "Weisfeiler and Leman Go Neural", AAAI 2019, equation 3), with the
    aggregations sum, mean, max and min, the latter two without edge weights.

    Constructor, parameters and results are those of :class:`torch_geometric.nn.GraphConv`; nothing of the size
    ``[E, F]`` is allocated.

    Shapes:
        x: ``[N, F]`` or a pair ``([Ns, F], [Nd, F'] or None)``; edge_index: ``[2, E]`` tensor or EdgeIndex,
        SparseTensor or ``torch.sparse`` COO/CSR ``[Nd, Ns]``, whose values are the weights, or
        :class:`edgeless.Graph`; edge_weight: ``[E]``; size: ``(Ns, Nd)``; output: ``[Nd, C]``.
    """

    # Read by PyG when it writes propagate(), which the upstream path uses:
    # propagate_type: (x: OptPairTensor, edge_weight: OptTensor)

    def forward(self, x, edge_index, edge_weight=None, size=None):
        """The layer's output.

        Raises:
            IndexError: edge_index has an id that x does not have.
        """
        return self._choose(x, edge_index, edge_weight, size)

    def _fusion_refusals(self, x, edge_index, edge_weight=None, size=None) -> list[str]:
        return self._reduction_refusals(x, edge_index, edge_weight, size)

    def _fused_forward(self, x, edge_index, edge_weight, size):
        return self._map_neighbors(pair(x), edge_index, edge_weight, size, self.lin_rel, self.lin_root)
