// From tensors to what CUDA kernels are told about them (storage.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>

#include "storage.h"

namespace edgeless::cuda {

inline Storage storage_of(at::ScalarType t) {
  switch (t) {
    case at::kDouble: return Storage::f64;
    case at::kBFloat16: return Storage::bf16;
    case at::kHalf: return Storage::f16;
    default: return Storage::f32;
  }
}

// `arrays`: indptr, indices and, if not the positions, edge ids. num_edges is as many as they have room for.
inline CompressedGraph compressed_graph(at::TensorList arrays) {
  CompressedGraph graph;
  graph.indptr = arrays[0].data_ptr();
  graph.indices = arrays[1].data_ptr();
  graph.edge_ids = arrays.size() == 3 ? arrays[2].data_ptr() : nullptr;
  graph.num_rows = arrays[0].size(0) - 1;
  graph.num_edges = arrays[1].size(0);
  return graph;
}

// f(a zero of the type of all arithmetic): float, for double rows double.
template <class F>
auto with_arithmetic(at::ScalarType rows, F&& f) {
  return rows == at::kDouble ? std::forward<F>(f)(double{}) : std::forward<F>(f)(float{});
}

}  // namespace edgeless::cuda
