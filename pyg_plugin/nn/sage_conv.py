"""SAGEConv of PyG on the kernels for sums and extrema."""

from __future__ import annotations

import torch.nn.functional as F
from torch_geometric.nn.conv import sage_conv

from ..conv import FusedConv, pair
from ..neighbors import NeighborReduction


class SAGEConv(NeighborReduction, FusedConv, sage_conv.SAGEConv):
    r"""The GraphSAGE layer (Hamilton, Ying, Leskovec: "Inductive Representation Learning on Large Graphs", NeurIPS
    2017, algorithm 1), with the aggregations sum, mean, max and min.

    Constructor, parameters and results are those of :class:`torch_geometric.nn.SAGEConv`; nothing of the size
    ``[E, F]`` is allocated.

    Shapes:
        x: ``[N, F]`` or a pair ``([Ns, F], [Nd, F'] or None)``; edge_index: ``[2, E]`` tensor or EdgeIndex,
        SparseTensor or ``torch.sparse`` COO/CSR ``[Nd, Ns]``, or :class:`edgeless.Graph`; size: ``(Ns, Nd)``;
        output: ``[Nd, C]``.
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
        if self.project:
            x_l = self.lin(x_l).relu()
        own = self.lin_r if self.root_weight else None
        out = self._map_neighbors((x_l, x_r), edge_index, None, size, self.lin_l, own)
        return F.normalize(out, p=2.0, dim=-1) if self.normalize else out
