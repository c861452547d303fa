// Sums over weighted sparse blocks, for what wsb_refusal does not refuse.
#pragma once

#include "kept_blocks.h"

namespace edgeless::cuda {

// out [rows, ...] contiguous = the sum of x [columns, H, F]; scales as of the op. On the current stream. False where
// the device has no tensor cores for it, and nothing has been done.
bool wsb_spmm(const at::Tensor& x, const OptTensor& src_scale, const OptTensor& dst_scale, at::TensorList csr,
              const at::Tensor& out);

}  // namespace edgeless::cuda
