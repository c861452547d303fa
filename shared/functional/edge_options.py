"""The options of attention that concern every edge, and that all attention functions share: one object, which each
public function builds from its keywords and hands on.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from ..checks import check_number
from .checks import cast, expect, expect_dtype, expect_seed, promoted
from .dropout import Seed

_RETURNABLE = ("softmax", "dropped")


class EdgeOptions(NamedTuple):
    r"""The options of attention that concern every edge, beside its score.

    With the logit :math:`s_{je}` of an edge e from a source j, the dropout mask :math:`m_e` and :attr:`edge_scale`
    :math:`c_e`, a destination's result is :math:`\sum_e c_e\, m_e\, \mathrm{softmax}_e(s_{je})\, v_j`.

    ``E`` is the number of edges, ``H`` of heads, ``De`` of edge features. Edge tensors are in the original order of
    the graph's edges.

    Attributes:
        edge_attr: edge features ``[E, De]``, floating; together with edge_proj.
        edge_proj: the projection of edge features, ``[H, De]`` for gat, else ``[H, C, De]``.
        edge_scale: factors of the weights after softmax and dropout, ``[E]`` or ``[E, H]``, floating.
        dropout: probability to drop an attention weight, in [0, 1]; kept ones are divided by ``1 - dropout``.
        seed: the seed of the dropout mask, an int of 64 bits or a tensor with one; None draws it from torch's
            generator.
        return_weights: ``"softmax"`` also returns the weights before dropout, ``"dropped"`` those after it.
        out_dtype: the dtype of the results; None is the promoted dtype of all inputs.
    """

    edge_attr: Optional[Tensor] = None
    edge_proj: Optional[Tensor] = None
    edge_scale: Optional[Tensor] = None
    dropout: float = 0.0
    seed: Seed = None
    return_weights: Optional[str] = None
    out_dtype: Optional[torch.dtype] = None

    def check(self, call: str, graph, heads: int, proj_sizes: tuple[int, ...], nodes: tuple) -> None:
        """Raise unless the options fit the graph and each other, and all tensors are on the graph's device.

        Args:
            call: the name of the public function, for error messages.
            heads: ``H``.
            proj_sizes: the sizes of edge_proj in front of De: ``(H,)``, ``(H, C)``, or ``()`` without edge features.
            nodes: (name, tensor or None) of the call's other tensors, whose device is checked as well.

        Raises:
            ValueError: a shape, dtype, device or value does not fit.
            TypeError: dropout is no number, seed no seed, or out_dtype no dtype.
        """
        attr, proj, scale = self.edge_attr, self.edge_proj, self.edge_scale
        if (attr is None) != (proj is None):
            missing, given = ("edge_attr", "edge_proj") if attr is None else ("edge_proj", "edge_attr")
            raise ValueError(f"{call}: {given} needs {missing} as well, got None")
        if attr is not None:
            expect(call, "edge_attr", attr, (graph.num_edges, None), "[E, De]")
            meaning = "[H, De]" if len(proj_sizes) == 1 else "[H, C, De]"
            expect(call, "edge_proj", proj, (*proj_sizes, attr.size(1)), meaning)
        if scale is not None:
            sizes = (graph.num_edges,) if isinstance(scale, Tensor) and scale.dim() == 1 else (graph.num_edges, heads)
            expect(call, "edge_scale", scale, sizes, "[E] or [E, H]")
        dropout, returned = self.dropout, self.return_weights
        check_number(call, "dropout", dropout)
        if not 0.0 <= dropout <= 1.0:
            raise ValueError(f"{call}: dropout must lie in [0, 1], got {dropout}")
        if self.seed is not None:
            expect_seed(call, self.seed)
        if returned is not None and not (isinstance(returned, str) and returned in _RETURNABLE):
            raise ValueError(f"{call}: return_weights must be None, 'softmax' or 'dropped', got {returned!r}")
        if self.out_dtype is not None:
            expect_dtype(call, self.out_dtype)
        device = graph.device
        if attr is not None or scale is not None:
            nodes = (*nodes, ("edge_attr", attr), ("edge_proj", proj), ("edge_scale", scale))
        for name, tensor in nodes:
            if tensor is not None and tensor.device != device:
                raise ValueError(f"{call}: {name} must be on the graph's device {device}, got {tensor.device}")

    def dtype_of_results(self, nodes: torch.dtype) -> torch.dtype:
        """out_dtype, or by default the promoted dtype of the edge tensors and ``nodes``, that of all other tensors."""
        return self.out_dtype or promoted((self.edge_attr, self.edge_proj, self.edge_scale), nodes)

    def scale_by_head(self, heads: int, dtype: torch.dtype) -> Optional[Tensor]:
        """edge_scale as ``[E, H]`` in ``dtype``, or None where there is none."""
        if self.edge_scale is None:
            return None
        scale = cast(self.edge_scale, dtype)
        return scale.unsqueeze(1).expand(-1, heads) if scale.dim() == 1 else scale
