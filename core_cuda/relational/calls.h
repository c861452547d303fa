// Calls of the typed ops below autograd, for autograd functions that are composed of them.
#pragma once

#include "../common/autograd.h"
#include "inputs.h"

namespace edgeless {

inline Tensor call_typed_mm(const Tensor& x, const Tensor& weight, const Tensor& offsets, const OptTensor& rows) {
  static const Kernels kernels("edgeless::typed_mm", call_typed_mm);
  return kernels(x, weight, offsets, rows);
}

inline Tensor call_typed_outer(const Tensor& x, const Tensor& y, const Tensor& offsets, const OptTensor& rows) {
  static const Kernels kernels("edgeless::typed_outer", call_typed_outer);
  return kernels(x, y, offsets, rows);
}

inline Tensor call_typed_linear(const Tensor& x, const Tensor& weight, const OptTensor& bias, const Tensor& offsets) {
  static const Kernels kernels("edgeless::typed_linear", call_typed_linear);
  return kernels(x, weight, bias, offsets);
}

inline Tensor call_typed_sums(const Tensor& x, const Tensor& offsets) {
  static const Kernels kernels("edgeless::typed_sums", call_typed_sums);
  return kernels(x, offsets);
}

inline Tensor call_typed_blend(const Tensor& y, const Tensor& x, const Tensor& alpha, const Tensor& offsets,
                               const OptTensor& rows) {
  static const Kernels kernels("edgeless::typed_blend", call_typed_blend);
  return kernels(y, x, alpha, offsets, rows);
}

inline std::vector<Tensor> call_typed_blend_backward(const Tensor& grad, const Tensor& y, const Tensor& x,
                                                     const Tensor& alpha, const Tensor& offsets, const OptTensor& rows,
                                                     c10::List<bool> needs) {
  static const Kernels kernels("edgeless::typed_blend_backward", call_typed_blend_backward);
  return kernels(grad, y, x, alpha, offsets, rows, std::move(needs));
}

inline Tensor call_relational_sum(const Tensor& x, const Tensor& weight, const OptTensor& edge_weight,
                                  at::TensorList by_dst, at::TensorList by_src, c10::SymInt num_dst,
                                  Optional<at::ScalarType> out_dtype) {
  static const Kernels kernels("edgeless::relational_sum", call_relational_sum);
  return kernels(x, weight, edge_weight, by_dst, by_src, std::move(num_dst), out_dtype);
}

inline std::vector<Tensor> call_relational_sum_backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                                        const OptTensor& edge_weight, at::TensorList by_dst,
                                                        at::TensorList by_src, c10::List<bool> needs) {
  static const Kernels kernels("edgeless::relational_sum_backward", call_relational_sum_backward);
  return kernels(grad, x, weight, edge_weight, by_dst, by_src, std::move(needs));
}

}  // namespace edgeless
