"""AGNNConv of PyG on the fused kernels."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor
from torch_geometric.nn.conv import agnn_conv

from edgeless.autocast import autocasts
from edgeless.functional import cosine_attention

from ..conv import FusedConv
from ..convert import kind_of


class AGNNConv(FusedConv, agnn_conv.AGNNConv):
    r"""The attentional propagation layer (Thekumparampil et al.: "Attention-based Graph Neural Network for
    Semi-supervised Learning", 2018, equation 4).

    Constructor, parameters and results are those of :class:`torch_geometric.nn.AGNNConv`; nothing of the size
    ``[E, F]`` is allocated.

    Shapes:
        x: ``[N, F]``; edge_index: ``[2, E]`` tensor or EdgeIndex, SparseTensor or ``torch.sparse`` COO/CSR ``[N, N]``,
        whose values are ignored, or :class:`edgeless.Graph`; output: ``[N, F]``.
    """

    # Read by PyG when it writes propagate(), which the upstream path uses:
    # propagate_type: (x: Tensor, x_norm: Tensor)

    node_dims = (0, -2)
    layouts = (torch.strided,)
    edge_dim = fill_value = lin_edge = None  # options of other layers, which the conversion of graphs reads

    def forward(self, x, edge_index):
        """The layer's output.

        Raises:
            IndexError: edge_index has an id that x does not have.
            ValueError: edge_index is an edgeless.Graph with other sources than destinations.
        """
        return self._choose(x, edge_index)

    def _fusion_refusals(self, x, edge_index) -> list[str]:
        if not isinstance(x, Tensor):
            return ["x is not a tensor"]
        if x.dim() == 2 and x.size(1) == 0:
            return ["x has no features"]
        return self._refusals(x, x, None, edge_index, None, self.add_self_loops)

    def _edge_refusal(self, edge_attr, num_edges: int) -> Optional[str]:
        return None  # the upstream layer ignores the values of a sparse matrix

    def _fused_forward(self, x, edge_index):
        num_nodes = x.size(0)
        loops = self.add_self_loops
        graph = kind_of(edge_index).graph(edge_index, num_nodes, num_nodes, self.flow, loops, by_edge=False)
        if graph.num_src != graph.num_dst:
            raise ValueError(f"AGNNConv: edge_index must have as many sources as destinations, got {graph}")
        out = cosine_attention(graph, x.unsqueeze(1), beta=self.beta, out_dtype=self._out_dtype(x))
        return out.squeeze(1)

    def _out_dtype(self, x: Tensor) -> torch.dtype:
        """The upstream layer's output dtype: under CUDA autocast its norms and softmax are float32."""
        dtype = torch.promote_types(x.dtype, self.beta.dtype)
        return torch.promote_types(dtype, torch.float32) if x.is_cuda and autocasts("cuda") else dtype
