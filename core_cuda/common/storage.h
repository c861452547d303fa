// What CUDA kernels are told about tensors: the numbers' type, and a direction of a graph. No torch.
#pragma once

#include <cstdint>

namespace edgeless::cuda {

enum class Storage : uint8_t { f32, f16, bf16, f64 };

// Rows and their neighbours (CSR, or CSC as the CSR of the transpose); indices are all of 32 or all of 64 bits.
struct CompressedGraph {
  const void* indptr = nullptr;    // [num_rows + 1]
  const void* indices = nullptr;   // [num_edges]
  const void* edge_ids = nullptr;  // [num_edges] original ids, null: the position itself
  int64_t num_rows = 0;
  int64_t num_edges = 0;
};

}  // namespace edgeless::cuda
