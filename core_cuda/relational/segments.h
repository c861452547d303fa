// One direction of a typed graph, for the CUDA kernels.
#pragma once

#include <ATen/ATen.h>

#include "../common/optional.h"
#include "inputs.h"

namespace edgeless::cuda::relational {

// Names for the tensors of typed_edges and the tiles and weights that may follow them (inputs.h). ptr may be empty if
// every segment is one edge, and by_row if segment i is row i.
struct Segments {
  const at::Tensor &type_ptr, &rows, &ptr, &indices, &edge_ids, &by_row;
  const at::Tensor *type_tiles = nullptr, *tiles = nullptr;  // null: no tiles
  // The tiles of rows, and what each row sums, laid out as by_row. The segments of hubs are summed in parts [2, parts],
  // each from a first to a second index of by_row; in of_rows these sums are numbered after the segments.
  const at::Tensor *row_tiles = nullptr, *of_rows = nullptr, *parts = nullptr;
  const at::Tensor* weights = nullptr;  // [E] in the order of `indices`, or one per segment [segments, 1]; null: none

  explicit Segments(at::TensorList of)
      : type_ptr(of[0]), rows(of[1]), ptr(of[2]), indices(of[3]), edge_ids(of[4]), by_row(of[5]) {
    if (of.size() >= kTiledSegments) {
      type_tiles = &of[6], tiles = &of[7], row_tiles = &of[8], of_rows = &of[9], parts = &of[10];
    }
    if (of.size() == kWeighedSegments) weights = &of[11];
  }

  // Returns whether a segment has one weight for all its edges.
  bool weighs_segments() const { return weights && weights->dim() == 2; }
  bool of_one_edge() const { return ptr.numel() == 0; }

  void check_rows(const char* op, const char* name, int64_t num_rows) const {
    const int64_t found = by_row.numel() ? by_row.size(0) - 1 - rows.size(0) : rows.size(0);
    TORCH_CHECK_VALUE(found == num_rows, op, ": ", name, " must be of ", num_rows, " rows, got ", found);
  }
};

}  // namespace edgeless::cuda::relational
