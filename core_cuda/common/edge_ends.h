// One end of every edge: gathers of the rows there, and sums by row, that can be differentiated any number of times.
// Both are SpMM, as their gradients are: each row is summed in a fixed order, without atomics.
#pragma once

#include "../spmm/calls.h"

namespace edgeless {

class EdgeEnds {
 public:
  // index [E]: the row of every edge; num_rows for the last ones, where there is room for more edges than there are.
  EdgeEnds(const Tensor& index, int64_t num_rows);

  // Of edges sorted by row, as a CSR has them.
  static EdgeEnds of_rows(const Tensor& indptr, int64_t num_edges);

  // x[index], [E, ...] of x [num_rows, ...]
  Tensor gather(const Tensor& x) const;

  // x [E, ...] summed by row, [num_rows, ...]
  Tensor sum(const Tensor& x) const;

  // The softmax of logits [E, H] over the edges of a row.
  Tensor softmax(const Tensor& logits) const;

  int64_t num_edges() const { return rows_.size(0); }

 private:
  Tensor rows_, index_;    // [E], int64; as given, and with the last row in the place of none
  Tensor indptr_, edges_;  // the edges of the rows
  Tensor starts_;          // [E + 1]: that every edge has one row, or none
  int64_t num_rows_;
};

// Which of consecutive ranges, the first of which begins at offsets[0] = 0, `count` positions lie in; behind the last
// one, their number.
Tensor ranges_of(const Tensor& offsets, int64_t count);

}  // namespace edgeless
