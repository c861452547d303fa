// SpMM over weighted sparse blocks, for calls without an unsupported reason (wsb_refusal).
#pragma once

#include "kept_blocks.h"

namespace edgeless::cuda {

// out [rows, ...] contiguous = the sum of x [columns, H, F], on the current stream; scales are those of the op. Returns
// false, with `out` untouched, on devices below compute capability 8.0.
bool wsb_spmm(const at::Tensor& x, const OptTensor& src_scale, const OptTensor& dst_scale, at::TensorList csr,
              const at::Tensor& out);

}  // namespace edgeless::cuda
