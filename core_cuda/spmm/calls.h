// SpMM below autograd, for the functions of autograd that are made of it.
#pragma once

#include "../common/autograd.h"
#include "inputs.h"

namespace edgeless {

inline Tensor call_spmm(const Tensor& x, const OptTensor& weight, const OptTensor& src_scale,
                        const OptTensor& dst_scale, at::TensorList csr, at::TensorList csc,
                        Optional<at::ScalarType> out_dtype, at::IntArrayRef longest) {
  static const Kernels kernels("edgeless::spmm", call_spmm);
  return kernels(x, weight, src_scale, dst_scale, csr, csc, out_dtype, longest);
}

// For the op that takes csc for csr.
inline std::vector<int64_t> turned_round(at::IntArrayRef longest) {
  return longest.size() == 2 ? std::vector<int64_t>{longest[1], longest[0]} : std::vector<int64_t>();
}

}  // namespace edgeless
