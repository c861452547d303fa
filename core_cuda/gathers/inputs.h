// Checks of gather_dots' arguments.
#pragma once

#include "../common/checks.h"

namespace edgeless {

inline void check_gather_dots(const at::Tensor& x, const at::Tensor& indptr, const at::Tensor& indices, bool vectors,
                              int64_t passes) {
  const char* op = "edgeless::gather_dots";
  check_dim(op, "x", x, 2, "[N, F]");
  check_dtype(op, "x", x, at::kFloat);
  check_dim(op, "indptr", indptr, 1, "[N + 1]");
  check_dim(op, "indices", indices, 1, "[E]");
  const bool wide = indices.scalar_type() == at::kLong;
  TORCH_CHECK_VALUE(wide || indices.scalar_type() == at::kInt, op, ": indices must be int32 or int64, got ",
                    indices.scalar_type());
  check_dtype(op, "indptr", indptr, indices.scalar_type());
  check_device(op, "indptr", indptr, x.device());
  check_device(op, "indices", indices, x.device());
  TORCH_CHECK_VALUE(indptr.size(0) == x.size(0) + 1, op, ": indptr must have shape [N + 1] = [", x.size(0) + 1,
                    "], got ", indptr.sizes());
  TORCH_CHECK_VALUE(x.is_contiguous() && indptr.is_contiguous() && indices.is_contiguous(), op,
                    ": x, indptr and indices must be contiguous");
  TORCH_CHECK_VALUE(passes >= 0 && passes <= 1 << 20, op, ": passes must be in [0, 2**20], got ", passes);
  TORCH_CHECK_VALUE(!vectors || (x.size(1) % 4 == 0 && reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0), op,
                    ": vectors need rows of a multiple of 4 numbers that begin on 16 bytes, got F = ", x.size(1));
}

}  // namespace edgeless
