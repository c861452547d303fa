// One end (destination or source) of every edge: gathers of its rows and sums by row, differentiable any number of
// times. Both are SpMM, as their gradients are: each row is summed in a fixed order, without atomics.
#pragma once

#include "calls.h"

namespace edgeless {

class EdgeEnds {
 public:
  // index [E]: the row of every edge. Arrays may have room for more than the graph's edges; the unused entries at the
  // end hold num_rows.
  EdgeEnds(const Tensor& index, int64_t num_rows);

  // For edges sorted by row, as in a CSR.
  static EdgeEnds of_rows(const Tensor& indptr, int64_t num_edges);

  // x[index], [E, ...] of x [num_rows, ...]
  Tensor gather(const Tensor& x) const;

  // x [E, ...] summed by row, [num_rows, ...]
  Tensor sum(const Tensor& x) const;

  // The softmax of logits [E, H] over the edges of each row.
  Tensor softmax(const Tensor& logits) const;

  int64_t num_edges() const { return rows_.size(0); }

 private:
  Tensor rows_, index_;    // [E] int64: the index as given, and clamped to the last row
  Tensor indptr_, edges_;  // CSR from rows to edge positions
  Tensor starts_;          // [E + 1]: indptr of the transpose, in which an edge has one row or, if unused, none
  int64_t num_rows_;
};

// [count]: for each position, the index of its range [offsets[i], offsets[i + 1]), where offsets[0] = 0; positions
// beyond the last range get the number of ranges.
Tensor ranges_of(const Tensor& offsets, int64_t count);

}  // namespace edgeless
