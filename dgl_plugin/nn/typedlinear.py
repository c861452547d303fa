"""TypedLinear of DGL, fused."""

from __future__ import annotations

from torch import Tensor

from edgeless import FusedLayer
from edgeless.checks import compiling
from edgeless.functional import gather_mm
from edgeless.layers.adapter import typed_rows_refusals

from .._autocast import as_products_read
from .._framework import stock_linear
from ..generated.deferred import computed, watched_calls


class TypedLinear(FusedLayer, stock_linear.TypedLinear):
    r"""``dgl.nn.TypedLinear`` on :func:`edgeless.functional.gather_mm`: same signature, parameters and results.

    Every row of x is multiplied by the matrix of its type, which is not copied per row; rows need not be sorted by
    type. float32, float64, bfloat16, float16.
    """

    def forward(self, x, x_type, sorted_by_type=False):
        """``[N, C]`` for x ``[N, F]`` and x_type ``[N]`` integers.

        Raises:
            IndexError: x_type has a type that the layer does not have.
            edgeless.NotFusedError: under ``edgeless.backend("fused")``, where :func:`edgeless.explain` says why.
        """
        if not compiling() and watched_calls():
            x, x_type = computed((x, x_type))
        return self._choose(x, x_type, sorted_by_type)

    def _fusion_refusals(self, x, x_type, sorted_by_type=False) -> list[str]:
        return typed_rows_refusals(x, x_type, self.in_size, self.W)

    def _fused_forward(self, x, x_type, sorted_by_type):
        return gather_mm(*as_products_read(x, weights_of(self)), x_type)


TYPED_LINEARS = (stock_linear.TypedLinear, TypedLinear)


def weights_of(linear: stock_linear.TypedLinear) -> Tensor:
    """The matrices ``[types, in, out]``, or their blocks ``[types, blocks, in / blocks, out / blocks]``."""
    weight = linear.get_weight()
    if linear.regularizer != "bdd":
        return weight
    return weight.view(linear.num_types, linear.num_bases, linear.submat_in, linear.submat_out)
