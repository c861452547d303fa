// Argument checks of the neighbor_reduce ops, shared by both devices.
#pragma once

#include <c10/util/string_view.h>

#include "../spmm/inputs.h"

namespace edgeless {

inline void check_rule(const char* op, c10::string_view reduce, c10::string_view ties) {
  TORCH_CHECK_VALUE(reduce == "min" || reduce == "max", op, ": reduce must be 'min' or 'max', got '", reduce, "'");
  TORCH_CHECK_VALUE(ties == "first" || ties == "shared" || ties == "scatter", op,
                    ": ties must be 'first', 'shared' or 'scatter', got '", ties, "'");
}

inline void check_reduce(const char* op, const at::Tensor& x, at::TensorList csr) {
  check_dim(op, "x", x, 2, "[Ns, F]");
  check_spmm(op, x.unsqueeze(1), {}, {}, {}, csr);
}

// The CSC over which gradients are gathered. Its list may have a fourth tensor, the result of edge_positions in CSC
// order; without it, every backward recomputes the positions.
struct GatheredOver {
  at::TensorList graph;
  Optional<at::Tensor> positions;

  explicit GatheredOver(at::TensorList csc) : graph(csc.slice(0, std::min<size_t>(csc.size(), 3))) {
    if (csc.size() > 3) positions = csc[3];
  }

  void check(const char* op, int64_t rows, const at::TensorList csr) const {
    if (graph.empty()) return;
    const int64_t edges = csr[1].size(0);
    const auto device = csr[1].device();
    check_compressed(op, "csc", graph, rows, edges, device);
    if (positions) check_behind_ids(op, "positions of csc", *positions, edges, at::kInt, device);
  }
};

inline void check_edge_positions(const char* op, at::TensorList csr) {
  TORCH_CHECK_VALUE(csr.size() > 1, op, ": csr must hold [indptr, indices] or [indptr, indices, edge_ids], got ",
                    csr.size(), " tensors");
  check_compressed(op, "csr", csr, csr[0].size(0) - 1, csr[1].size(0), csr[0].device());
}

inline int64_t arg_size(const char* op, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(dtype == at::kByte || dtype == at::kShort || dtype == at::kInt, op,
                    ": arg_dtype must be uint8, int16 or int32, got ", dtype);
  return static_cast<int64_t>(c10::elementSize(dtype));
}

}  // namespace edgeless
