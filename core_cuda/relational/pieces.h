// One direction of a typed graph as the CUDA kernels are given it.
#pragma once

#include <ATen/ATen.h>

#include "../common/optional.h"
#include "inputs.h"

namespace edgeless::cuda::relational {

// What typed_edges gives, [pieces cut into tiles], [the weights of the edges]. ptr may have no elements where every
// piece is one edge, and by_row none where piece i is row i.
struct Pieces {
  const at::Tensor &type_ptr, &rows, &ptr, &indices, &edge_ids, &by_row;
  const at::Tensor *type_tiles = nullptr, *tiles = nullptr;  // null: not cut into tiles
  const at::Tensor* weights = nullptr;                       // [E] in the order of `indices`; null: none

  explicit Pieces(at::TensorList of)
      : type_ptr(of[0]), rows(of[1]), ptr(of[2]), indices(of[3]), edge_ids(of[4]), by_row(of[5]) {
    if (of.size() >= kTiledPieces) type_tiles = &of[6], tiles = &of[7];
    if (of.size() == kWeighedPieces) weights = &of[8];
  }

  bool of_one_edge() const { return ptr.numel() == 0; }

  void check_rows(const char* op, const char* name, int64_t num_rows) const {
    const int64_t found = by_row.numel() ? by_row.size(0) - 1 - indices.size(0) : rows.size(0);
    TORCH_CHECK_VALUE(found == num_rows, op, ": ", name, " must be of ", num_rows, " rows, got ", found);
  }
};

}  // namespace edgeless::cuda::relational
