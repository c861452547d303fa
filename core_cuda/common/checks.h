// Argument checks; each message names the argument, the expected and the actual property.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

namespace edgeless {

// The dtype of arithmetic, statistics and parameters for rows stored in `rows`.
inline at::ScalarType opmath_dtype(at::ScalarType rows) { return rows == at::kDouble ? at::kDouble : at::kFloat; }

inline void check_shape(const char* op, const char* name, const at::Tensor& t, at::IntArrayRef expected) {
  TORCH_CHECK_VALUE(t.sizes() == expected, op, ": ", name, " must have shape ", expected, ", got ", t.sizes());
}

inline void check_dtype(const char* op, const char* name, const at::Tensor& t, at::ScalarType expected) {
  TORCH_CHECK_VALUE(t.scalar_type() == expected, op, ": ", name, " must be ", expected, ", got ", t.scalar_type());
}

inline void check_device(const char* op, const char* name, const at::Tensor& t, const at::Device& expected) {
  TORCH_CHECK_VALUE(t.device() == expected, op, ": ", name, " must be on ", expected, ", got ", t.device());
}

// Checks the shape, and that dtype and device equal those of `like`.
inline void check_like(const char* op, const char* name, const at::Tensor& t, at::IntArrayRef expected,
                       const at::Tensor& like) {
  check_shape(op, name, t, expected);
  check_dtype(op, name, t, like.scalar_type());
  check_device(op, name, t, like.device());
}

inline void check_dim(const char* op, const char* name, const at::Tensor& t, int64_t dim, const char* meaning) {
  TORCH_CHECK_VALUE(t.dim() == dim, op, ": ", name, " must be ", meaning, ", got shape ", t.sizes());
}

inline void check_compressed(const char* op, const char* name, at::TensorList graph, int64_t rows, int64_t edges,
                             const at::Device& device) {
  TORCH_CHECK_VALUE(graph.size() == 2 || graph.size() == 3, op, ": ", name,
                    " must hold [indptr, indices] or [indptr, indices, edge_ids], got ", graph.size(), " tensors");
  const auto index = graph[0].scalar_type();
  TORCH_CHECK_VALUE(index == at::kInt || index == at::kLong, op, ": ", name, " must be int32 or int64, got ", index);
  for (const auto& t : graph) {
    check_dim(op, name, t, 1, "one-dimensional tensors");
    check_dtype(op, name, t, index);
    check_device(op, name, t, device);
    TORCH_CHECK_VALUE(t.is_contiguous(), op, ": ", name, " must be contiguous");
  }
  TORCH_CHECK_VALUE(graph[0].size(0) == rows + 1, op, ": indptr of ", name, " must have ", rows + 1, " elements, got ",
                    graph[0].size(0));
  TORCH_CHECK_VALUE(graph[1].size(0) == edges, op, ": indices of ", name, " must have ", edges, " elements, got ",
                    graph[1].size(0));
  if (graph.size() == 3) check_shape(op, "edge_ids", graph[2], graph[1].sizes());
}

}  // namespace edgeless
