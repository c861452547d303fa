// Descriptors of the tensors that CUDA kernels read: the storage type of values and one direction of a graph. No torch.
#pragma once

#include <cstdint>

namespace edgeless::cuda {

// Storage type of feature rows. f16x4 and bf16x4 are 16-bit attention heads that are loaded as vectors of 8 bytes:
// those of at most four values and, for five lanes, of 17 to 20 (storage_of_rows() in attention/cuda/plan.h). Attention
// loads all others as vectors of 16 bytes.
enum class Storage : uint8_t { f32, f16, bf16, f64, f16x4, bf16x4 };
constexpr bool is_of_four(Storage storage) { return storage == Storage::f16x4 || storage == Storage::bf16x4; }
// True for 16-bit values, eight per vector.
constexpr bool is_half(Storage storage) { return storage == Storage::bf16 || storage == Storage::f16; }

// A CSR, or a CSC as the CSR of the transpose. The three arrays are all int32 or all int64.
struct CompressedGraph {
  const void* indptr = nullptr;    // [num_rows + 1]
  const void* indices = nullptr;   // [num_edges]
  const void* edge_ids = nullptr;  // [num_edges] original edge ids; null: the positions are the ids
  int64_t num_rows = 0;
  int64_t num_edges = 0;
};

}  // namespace edgeless::cuda
