// SpMM and SDDMM below autograd, for autograd functions that are composed of them.
#pragma once

#include "../common/autograd.h"
#include "inputs.h"

namespace edgeless {

using SpmmSignature = Tensor(const Tensor& x, const OptTensor& weight, const OptTensor& src_scale,
                             const OptTensor& dst_scale, at::TensorList csr, at::TensorList csc,
                             Optional<at::ScalarType> out_dtype, at::IntArrayRef max_degrees);

inline const auto& spmm_kernels() {
  static const Kernels kernels("edgeless::spmm", static_cast<SpmmSignature*>(nullptr));
  return kernels;
}

inline Tensor call_spmm(const Tensor& x, const OptTensor& weight, const OptTensor& src_scale,
                        const OptTensor& dst_scale, const GraphArrays& graph, Optional<at::ScalarType> out_dtype = {}) {
  return spmm_kernels()(x, weight, src_scale, dst_scale, graph.csr, graph.csc, out_dtype, graph.max_degrees);
}

using SddmmSignature = Tensor(const Tensor& dst, const Tensor& src, const OptTensor& src_scale,
                              const OptTensor& dst_scale, at::TensorList csr, at::TensorList csc);

inline Tensor call_sddmm(const Tensor& dst, const Tensor& src, const GraphArrays& graph) {
  static const Kernels kernels("edgeless::sddmm", static_cast<SddmmSignature*>(nullptr));
  return kernels(dst, src, {}, {}, graph.csr, graph.csc);
}

// The op with autograd.
inline Tensor spmm_op(const Tensor& x, const OptTensor& weight, const OptTensor& src_scale, const OptTensor& dst_scale,
                      const GraphArrays& graph) {
  return spmm_kernels().op(x, weight, src_scale, dst_scale, graph.csr, graph.csc, {}, graph.max_degrees);
}

}  // namespace edgeless
