// What the ops of neighbor_reduce receive, checked once for both devices.
#pragma once

#include <c10/util/string_view.h>

#include "../spmm/inputs.h"

namespace edgeless {

inline void check_rule(const char* op, c10::string_view reduce, c10::string_view ties) {
  TORCH_CHECK_VALUE(reduce == "min" || reduce == "max", op, ": reduce must be 'min' or 'max', got '", reduce, "'");
  TORCH_CHECK_VALUE(ties == "first" || ties == "shared" || ties == "scatter", op,
                    ": ties must be 'first', 'shared' or 'scatter', got '", ties, "'");
}

inline void check_reduce(const char* op, const at::Tensor& x, at::TensorList csr) {
  check_dim(op, "x", x, 2, "[Ns, F]");
  check_spmm(op, x.unsqueeze(1), {}, {}, {}, csr);
}

inline int64_t arg_size(const char* op, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(dtype == at::kByte || dtype == at::kShort || dtype == at::kInt, op,
                    ": arg_dtype must be uint8, int16 or int32, got ", dtype);
  return static_cast<int64_t>(c10::elementSize(dtype));
}

}  // namespace edgeless
