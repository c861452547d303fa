// What CUDA kernels are told about tensors: the numbers' type, and a direction of a graph. No torch.
#pragma once

#include <cstdint>

namespace edgeless::cuda {

// f16x4, bf16x4: of attention's heads of up to four numbers, which are read by 8 bytes, the others by 16.
enum class Storage : uint8_t { f32, f16, bf16, f64, f16x4, bf16x4 };
constexpr bool is_of_four(Storage storage) { return storage == Storage::f16x4 || storage == Storage::bf16x4; }

// Rows and their neighbours (CSR, or CSC as the CSR of the transpose); indices are all of 32 or all of 64 bits.
struct CompressedGraph {
  const void* indptr = nullptr;    // [num_rows + 1]
  const void* indices = nullptr;   // [num_edges]
  const void* edge_ids = nullptr;  // [num_edges] original ids, null: the position itself
  int64_t num_rows = 0;
  int64_t num_edges = 0;
};

}  // namespace edgeless::cuda
