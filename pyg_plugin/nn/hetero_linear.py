"""HeteroLinear and HeteroDictLinear of PyG on typed products: rows times the matrix of their type."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch_geometric.nn.dense import linear

from edgeless.autocast import rounds_to
from edgeless.choices.backends import transform_refusal
from edgeless.functional import gather_mm
from edgeless.functional.projection import project
from edgeless.layers.adapter import FusedLayer, inference_refusal, is_plain, typed_rows_refusals

from ..conv import LINEAR, Scriptable, is_plain_float, tracing_refusals


class HeteroLinear(Scriptable, FusedLayer, linear.HeteroLinear):
    r"""``torch_geometric.nn.HeteroLinear`` on :func:`edgeless.functional.gather_mm`.

    Constructor, parameters and results are those of the upstream layer. Every row is multiplied by the matrix of its
    type, which is not copied per row; rows need not be sorted by type.
    """

    stock: ClassVar[type] = linear.HeteroLinear

    def forward(self, x, type_vec):
        """``[N, C]`` for x ``[N, F]`` and type_vec ``[N]`` integers.

        Raises:
            IndexError: type_vec has a type that the layer does not have.
        """
        return self._choose(x, type_vec)

    def _fusion_refusals(self, x, type_vec) -> list[str]:
        if hasattr(self, "_hook"):
            return ["the parameters are not initialised yet"]
        refusals = typed_rows_refusals(x, type_vec, self.in_channels, self.weight)
        return refusals or tracing_refusals()

    def _stock_forward(self, x, type_vec):
        # The upstream layer reads and writes beyond the ends of its tensors for types of another number.
        both = isinstance(x, Tensor) and isinstance(type_vec, Tensor)
        if both and type_vec.shape != x.shape[:1] and not hasattr(self, "_hook"):
            raise ValueError(f"type_vec must have shape [N] = {list(x.shape[:1])}, got {list(type_vec.shape)}")
        return super()._stock_forward(x, type_vec)

    def _fused_forward(self, x, type_vec):
        device = x.device.type
        if (rounded := rounds_to(device)) is None:
            return gather_mm(x, self.weight, type_vec, self.bias)
        # The upstream layer multiplies in the autocast dtype, and writes to a tensor of x's dtype.
        with torch.autocast(device, enabled=False):
            out = gather_mm(x.to(rounded), self.weight.to(rounded), type_vec).to(x.dtype)
            return out if self.bias is None else (out + self.bias[type_vec]).to(x.dtype)


class HeteroDictLinear(Scriptable, FusedLayer, linear.HeteroDictLinear):
    r"""``torch_geometric.nn.HeteroDictLinear``: same signature, parameters and results, one map at a time.

    The order of the types in the input makes no difference. With pyg-lib installed, the upstream layer gives one type's
    result to another if the orders differ.
    """

    stock: ClassVar[type] = linear.HeteroDictLinear

    def forward(self, x_dict):
        """The results of the types that x_dict has."""
        return self._choose(x_dict)

    def _fusion_refusals(self, x_dict) -> list[str]:
        if hasattr(self, "_hook"):
            return ["the parameters are not initialised yet"]
        if not isinstance(x_dict, dict):
            return [f"x_dict is a {type(x_dict).__name__}"]
        for key, lin in self.lins.items():
            x = x_dict.get(key)
            if key in x_dict and (not is_plain_float(x) or x.dim() != 2 or not is_plain(lin, LINEAR)):
                return [f"of {key!r} the features are no plain floating tensor [N, F], or the map is no plain one"]
            if x is not None and (reason := inference_refusal(x)):
                return [reason]
        return [reason] if (reason := transform_refusal()) else tracing_refusals()

    def _fused_forward(self, x_dict):
        return {key: project(x_dict[key], lin, kinds=LINEAR)[0] for key, lin in self.lins.items() if key in x_dict}
