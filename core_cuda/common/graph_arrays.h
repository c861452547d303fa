// The arrays of a graph, in the form that ops and autograd functions receive.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>

namespace edgeless {

// Direction of a graph: the rows of the CSR are destinations, those of the CSC sources.
enum Direction : size_t { kInCsr, kInCsc };

struct GraphArrays {
  // Each is indptr, indices and, where the op needs edge ids and they differ from the positions, edge ids; for some ops
  // csc has further arrays.
  at::TensorList csr, csc;
  // Edges of the longest row of csr and of csc; -1 if unknown.
  std::array<int64_t, 2> max_degrees{-1, -1};

  GraphArrays(at::TensorList csr, at::TensorList csc, at::IntArrayRef known = {}) : csr(csr), csc(csc) {
    for (size_t i = 0; i < std::min<size_t>(known.size(), 2); ++i) max_degrees[i] = known[i];
  }

  GraphArrays reversed() const { return {csc, csr, {max_degrees[kInCsc], max_degrees[kInCsr]}}; }
};

}  // namespace edgeless
