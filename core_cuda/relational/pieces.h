// One direction of a typed graph as the CUDA kernels are given it.
#pragma once

#include <ATen/ATen.h>

#include "../common/optional.h"
#include "inputs.h"

namespace edgeless::cuda::relational {

// What typed_edges gives, [pieces and rows cut into tiles], [the weights of the edges]. ptr may have no elements where
// every piece is one edge, and by_row none where piece i is row i.
struct Pieces {
  const at::Tensor &type_ptr, &rows, &ptr, &indices, &edge_ids, &by_row;
  const at::Tensor *type_tiles = nullptr, *tiles = nullptr;  // null: not cut into tiles
  // Then rows are too, and what they add up lies as by_row does. The pieces of hubs are parts [2, parts], of by_row's
  // from the first to the second, and their sums stand for them, numbered behind the pieces.
  const at::Tensor *row_tiles = nullptr, *of_rows = nullptr, *parts = nullptr;
  const at::Tensor* weights = nullptr;  // [E] in the order of `indices`, or of whole pieces [pieces, 1]; null: none

  explicit Pieces(at::TensorList of)
      : type_ptr(of[0]), rows(of[1]), ptr(of[2]), indices(of[3]), edge_ids(of[4]), by_row(of[5]) {
    if (of.size() >= kTiledPieces) {
      type_tiles = &of[6], tiles = &of[7], row_tiles = &of[8], of_rows = &of[9], parts = &of[10];
    }
    if (of.size() == kWeighedPieces) weights = &of[11];
  }

  // Whether a piece has one weight for all its edges.
  bool weighs_pieces() const { return weights && weights->dim() == 2; }
  bool of_one_edge() const { return ptr.numel() == 0; }

  void check_rows(const char* op, const char* name, int64_t num_rows) const {
    const int64_t found = by_row.numel() ? by_row.size(0) - 1 - rows.size(0) : rows.size(0);
    TORCH_CHECK_VALUE(found == num_rows, op, ": ", name, " must be of ", num_rows, " rows, got ", found);
  }
};

}  // namespace edgeless::cuda::relational
