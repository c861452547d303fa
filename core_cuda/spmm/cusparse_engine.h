// Sums and sampled products by cuSPARSE, for what cusparse_refusal.h does not refuse.
//
// The matrix is the graph's own CSR, in either direction, so nothing is ever transposed. What stays the same from call
// to call is kept with the graph (cusparse_plans.h): the values, unless they come from edge weights, and for every
// shape descriptors and a workspace, of which the library is told beforehand for sampled products alone. Edge weights
// are read anew in every call, for they can change without anybody's notice. A call that is captured into a CUDA graph
// keeps nothing and uses nothing that is kept: what it needs is made within the capture, in the capture's own memory,
// and so at every replay. What waits for the GPU is refused there (cusparse_capture_refusal).
#pragma once

#include "../engine.h"
#include "inputs.h"

namespace edgeless::cuda {

// out [rows, ...] contiguous = the sum of x [columns, H, F]; scales as of the op. On the current stream. False where
// the library has no kernel for it, and nothing has been done.
bool cusparse_spmm(Engine engine, const at::Tensor& x, const OptTensor& weight, const OptTensor& src_scale,
                   const OptTensor& dst_scale, at::TensorList csr, const at::Tensor& out);

// products [E, 1] by original edge id = <dst[i], src[j]>, scaled; dst [rows, 1, F], src [columns, 1, F].
bool cusparse_sddmm(const at::Tensor& dst, const at::Tensor& src, const OptTensor& src_scale,
                    const OptTensor& dst_scale, at::TensorList csr, const at::Tensor& products);

}  // namespace edgeless::cuda
