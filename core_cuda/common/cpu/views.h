// Views of graphs and of tensor rows for the CPU kernels: plain pointers and sizes, no torch.
//
// Rows are [H, D] with contiguous elements and any stride between nodes. "Padded" means that each head is filled up
// with zeros to a multiple of the vector width.
#pragma once

#include <cstdint>

namespace edgeless::cpu {

enum class Dtype : uint8_t { f32, f64, bf16, f16 };

struct Rows {
  const void* data = nullptr;  // [N, heads, dim]
  int64_t stride = 0;          // elements from node to node
  Dtype dtype = Dtype::f32;
  explicit operator bool() const { return data != nullptr; }
};

struct OutRows {
  void* data = nullptr;  // [N, heads, dim], each row contiguous
  int64_t stride = 0;    // elements from row to row
  Dtype dtype = Dtype::f32;
  bool bypass = false;  // larger than the caches: written by non-temporal stores
  explicit operator bool() const { return data != nullptr; }
};

// CSR or CSC; the three arrays share one index type.
struct Compressed {
  const void* indptr = nullptr;    // [num_rows + 1]
  const void* indices = nullptr;   // [num_edges]
  const void* edge_ids = nullptr;  // [num_edges] original edge ids; null: the positions are the ids
  bool wide = false;               // int64 instead of int32
  int64_t num_rows = 0;
  int64_t num_edges = 0;

  int64_t at(const void* array, int64_t i) const {
    return wide ? static_cast<const int64_t*>(array)[i] : static_cast<const int32_t*>(array)[i];
  }
  int64_t row_begin(int64_t row) const { return at(indptr, row); }
  int64_t index(int64_t position) const { return at(indices, position); }
  int64_t edge_id(int64_t position) const { return edge_ids ? at(edge_ids, position) : position; }
};

}  // namespace edgeless::cpu
