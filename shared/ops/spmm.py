"""Fake kernels of SpMM and SDDMM. The schemas are in ``core_cuda/library.cpp``, the gradients in
``core_cuda/spmm/spmm_autograd.cpp``.
"""

from __future__ import annotations

from ..checks import opmath_dtype
from ._registration import register_fake


@register_fake("edgeless::spmm")
def _spmm_fake(x, weight, src_scale, dst_scale, csr, csc, out_dtype, max_degrees=()):
    return x.new_empty((csr[0].size(0) - 1, *x.shape[1:]), dtype=out_dtype or x.dtype)


@register_fake("edgeless::spmm_into")
def _spmm_into_fake(out, x, csr, max_degrees=()):
    return None


@register_fake("edgeless::sddmm")
def _sddmm_fake(dst, src, src_scale, dst_scale, csr, csc):
    return src.new_empty((csr[1].size(0), src.size(1) if src.dim() == 3 else 1), dtype=opmath_dtype(src.dtype))
