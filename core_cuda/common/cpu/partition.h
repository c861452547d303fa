// The merge-path partition: equal work without preprocessing.
//
// A row of n edges is n + 1 items, its edges and its end, so that long rows and many empty rows both count. Part p
// holds the items [p K, (p + 1) K) of the concatenated rows, so many parts share a hub. K, and with it every result,
// depends on the graph alone, never on the number of threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "views.h"

namespace edgeless::cpu {

struct Segment {
  int64_t row;
  int64_t begin, end;  // positions of edges
  bool fresh;          // the segment starts at the start of the row
  bool finished;       // the segment includes the end of the row
};

inline int64_t total_items(const Compressed& g) { return g.num_rows + g.num_edges; }

inline int64_t choose_items_per_part(const Compressed& g) {
  constexpr int64_t most_parts = 256, least_items = 2048;
  return std::max(least_items, (total_items(g) + most_parts - 1) / most_parts);
}

inline int64_t num_parts(const Compressed& g, int64_t items_per_part) {
  return (total_items(g) + items_per_part - 1) / items_per_part;
}

// Iterates over the segments (`Segment`) of a part, one per row, in order.
class Walk {
 public:
  Walk(const Compressed& g, int64_t items_per_part, int64_t part) : g_(g) {
    const int64_t first = part * items_per_part;
    left_ = std::min(items_per_part, total_items(g) - first);
    int64_t low = 0, high = g.num_rows;  // the last row with indptr[row] + row <= first
    while (high - low > 1) {
      const int64_t middle = low + (high - low) / 2;
      if (g.row_begin(middle) + middle <= first) {
        low = middle;
      } else {
        high = middle;
      }
    }
    row_ = low;
    edge_ = first - low;
    fresh_ = g.row_begin(low) == edge_;
  }

  bool next(Segment* segment) {
    if (left_ <= 0) return false;
    const int64_t row_end = g_.row_begin(row_ + 1);
    const int64_t remaining = row_end - edge_;
    const bool finished = remaining + 1 <= left_;
    *segment = {row_, edge_, finished ? row_end : edge_ + left_, fresh_, finished};
    left_ -= finished ? remaining + 1 : left_;
    edge_ = segment->end;
    ++row_;
    fresh_ = true;
    return true;
  }

 private:
  const Compressed& g_;
  int64_t row_, edge_, left_;
  bool fresh_;
};

// The first part that holds a segment of `row`. A row that ends in `part` has its segments in the parts [first, part].
inline int64_t first_part_of_row(const Compressed& g, int64_t row, int64_t items_per_part) {
  return (g.row_begin(row) + row) / items_per_part;
}

}  // namespace edgeless::cpu
