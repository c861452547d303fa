// The kernels of the passes of attention over pairs: header and template arguments, for launches and printed plans. No
// CUDA and no torch.
#pragma once

#include "../../attention/cuda/plan.h"
#include "../../common/kernel_types.h"

namespace edgeless::cuda {

// pass: forward or by_src.
inline jit::Expression pair_expression(Pass pass, Storage storage, const Kernel& k, bool dropout) {
  const bool forward = pass == Pass::forward;
  return {forward ? "pair_attention/cuda/forward.cuh" : "pair_attention/cuda/by_src.cuh",
          forward ? "pair_forward_kernel" : "pair_by_src_kernel",
          {type_of(storage), k.lanes, k.edges, dropout}};
}

// Lanes of the sub-warp that holds a row of `vectors` vectors in the row-wise kernels.
constexpr int lanes_of_row(int vectors) { return vectors <= 8 ? 8 : vectors <= 16 ? 16 : 32; }

inline jit::Expression pair_rows_expression(const char* kernel, Storage storage, int vectors) {
  return {"pair_attention/cuda/rows.cuh", kernel, {type_of(storage), lanes_of_row(vectors)}};
}

inline jit::Expression deltas_expression(Storage storage, int vectors) {
  return pair_rows_expression("deltas_kernel", storage, vectors);
}

}  // namespace edgeless::cuda
