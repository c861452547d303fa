// SpMM and SDDMM by cuSPARSE, for calls without an unsupported reason (cusparse_refusal.h).
//
// The sparse matrix is the graph's CSR or CSC, so no call transposes it. The graph caches what calls share
// (cusparse_plans.h): the matrix values, unless they come from edge weights, and descriptors and a workspace per shape.
// Only SDDMM plans are preprocessed. Edge weights are read in every call, because they can change unnoticed. A call
// that is captured into a CUDA graph neither reads nor fills the cache: it creates values and plans inside the capture,
// in the capture's memory pool. Calls that may wait for the GPU are unsupported there (cusparse_capture_refusal).
#pragma once

#include "../common/engine.h"
#include "inputs.h"

namespace edgeless::cuda {

// out [rows, ...] contiguous = the sum of x [columns, H, F], on the current stream; scales are those of the op. Returns
// false, with `out` untouched, if the library has no kernel for the call.
bool cusparse_spmm(Engine engine, const at::Tensor& x, const OptTensor& weight, const OptTensor& src_scale,
                   const OptTensor& dst_scale, at::TensorList csr, const at::Tensor& out);

// products [E, 1], in the order of original edge ids, = <dst[i], src[j]> times the scales; dst [rows, 1, F], src
// [columns, 1, F]. Returns false if the library has no kernel for the call.
bool cusparse_sddmm(const at::Tensor& dst, const at::Tensor& src, const OptTensor& src_scale,
                    const OptTensor& dst_scale, at::TensorList csr, const at::Tensor& products);

}  // namespace edgeless::cuda
