// Conversions from tensors to the descriptors of storage.h.
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

// `arrays`: indptr, indices and, unless they equal the positions, edge ids. num_edges is the size of the arrays, which
// may exceed indptr's last value.
inline CompressedGraph compressed_graph(at::TensorList arrays) {
  CompressedGraph graph;
  graph.indptr = arrays[0].data_ptr();
  graph.indices = arrays[1].data_ptr();
  graph.edge_ids = arrays.size() == 3 ? arrays[2].data_ptr() : nullptr;
  graph.num_rows = arrays[0].size(0) - 1;
  graph.num_edges = arrays[1].size(0);
  return graph;
}

// Calls f with a zero of the opmath type: double for double rows, float for all others.
template <class F>
auto with_arithmetic(at::ScalarType rows, F&& f) {
  return rows == at::kDouble ? std::forward<F>(f)(double{}) : std::forward<F>(f)(float{});
}

}  // namespace edgeless::cuda
