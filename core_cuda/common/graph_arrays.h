// A graph as the ops are given it, and as functions of autograd hand it on.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>

namespace edgeless {

// Which direction of a graph: its rows are destinations or sources.
enum Direction : size_t { kInCsr, kInCsc };

struct GraphArrays {
  at::TensorList csr, csc;  // each indptr, indices and, where an op needs them and they are not positions, edge ids;
                            // of csc perhaps more, see the op
  // Edges of the longest row of csr, and of csc; -1 where that is not known.
  std::array<int64_t, 2> max_degrees{-1, -1};

  GraphArrays(at::TensorList csr, at::TensorList csc, at::IntArrayRef known = {}) : csr(csr), csc(csc) {
    for (size_t i = 0; i < std::min<size_t>(known.size(), 2); ++i) max_degrees[i] = known[i];
  }

  GraphArrays reversed() const { return {csc, csr, {max_degrees[kInCsc], max_degrees[kInCsr]}}; }
};

}  // namespace edgeless
