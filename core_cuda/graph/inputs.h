// Argument checks of the ops that build graphs, shared by all devices.
#pragma once

#include <ATen/ATen.h>

#include <limits>
#include <tuple>

#include "../common/checks.h"
#include "../common/optional.h"

namespace edgeless {

using CompressedArrays = std::tuple<at::Tensor, at::Tensor, at::Tensor>;  // indptr, indices, edge_ids

// `like` is the op's first index tensor.
inline void check_index(const char* op, const char* name, const at::Tensor& tensor, const at::Tensor& like) {
  check_dim(op, name, tensor, 1, "one-dimensional");
  TORCH_CHECK_VALUE(tensor.scalar_type() == at::kInt || tensor.scalar_type() == at::kLong, op, ": ", name,
                    " must be int32 or int64, got ", tensor.scalar_type());
  check_dtype(op, name, tensor, like.scalar_type());
  check_device(op, name, tensor, like.device());
}

inline void check_count(const char* op, const char* name, int64_t count) {
  TORCH_CHECK_VALUE(count >= 0, op, ": ", name, " must not be negative, got ", count);
}

inline void check_coo(const char* op, const at::Tensor& row, const at::Tensor& col, int64_t num_rows,
                      int64_t num_cols) {
  check_index(op, "row", row, row);
  check_index(op, "col", col, row);
  TORCH_CHECK_VALUE(row.numel() == col.numel(), op, ": row and col must have the same length, got ", row.numel(),
                    " and ", col.numel());
  check_count(op, "num_rows", num_rows);
  check_count(op, "num_cols", num_cols);
}

inline void check_csr(const char* op, const at::Tensor& indptr, const at::Tensor& indices,
                      const Optional<at::Tensor>& edge_ids, int64_t num_cols) {
  check_index(op, "indptr", indptr, indptr);
  check_index(op, "indices", indices, indptr);
  TORCH_CHECK_VALUE(indptr.numel() > 0, op, ": indptr must have shape [rows + 1], got ", indptr.sizes());
  if (edge_ids.has_value()) {
    check_index(op, "edge_ids", *edge_ids, indptr);
    TORCH_CHECK_VALUE(edge_ids->numel() == indices.numel(), op,
                      ": edge_ids and indices must have the same length, got ", edge_ids->numel(), " and ",
                      indices.numel());
  }
  check_count(op, "num_cols", num_cols);
}

// The index dtype that edgeless.Graph chooses (index_dtype in shared/ops/graph.py).
inline at::ScalarType index_type(int64_t num_rows, int64_t num_cols, int64_t num_edges) {
  const int64_t limit = std::numeric_limits<int32_t>::max();
  return num_rows < limit && num_cols < limit && num_edges < limit ? at::kInt : at::kLong;
}

}  // namespace edgeless
