// The cuts of a partition (partition.h), found on the device.
#pragma once

#include "partition.h"
#include "storage.h"

namespace edgeless::cuda {

// A place between two edges. `edge` is the row's first edge, or one inside the row.
template <class I>
struct Cut {
  I row, edge;
};

template <class I>
__device__ __forceinline__ int64_t row_position(const I* indptr, int64_t row) {
  return static_cast<int64_t>(indptr[row]) + kRowUnits * row;
}

// Search by a whole warp, 32 probes at a time: `before` is true from 0 up to some number and false behind it; returns
// that number, or `last` if it is smaller. Give `before` a copy of all it needs: with references the passes of the
// attention, which begin with this, get other registers, and the float32 dot product's backward takes 5 % longer.
template <class Before>
__device__ __forceinline__ int64_t find_last(int64_t last, int lane, Before&& before) {
  int64_t low = 0, high = last;
  while (high > low) {
    const int64_t step = (high - low) / 33 + 1, probe = low + step * (lane + 1);
    const bool holds = probe <= high && before(probe);
    const int found = __popc(__ballot_sync(0xffffffffu, holds));
    high = min(high, low + step * (found + 1) - 1);
    low += step * found;
  }
  return low;
}

// The last row in [0, num_rows] that begins at or before `position`. Whole warp.
template <class I>
__device__ inline int64_t find_row(const I* indptr, int64_t num_rows, int64_t position, int lane) {
  return find_last(num_rows, lane, [=](int64_t row) { return row_position(indptr, row) <= position; });
}

// The last row in [0, num_rows) that begins at or before an edge. Whole warp.
template <class I>
__device__ inline int64_t row_of_edge(const I* indptr, int64_t num_rows, int64_t edge, int lane) {
  return find_last(num_rows - 1, lane, [=](int64_t row) { return static_cast<int64_t>(indptr[row]) <= edge; });
}

// The cut before range `range`. Whole warp.
template <class I>
__device__ inline Cut<I> range_cut(const I* indptr, int64_t num_rows, const Partition& part, int64_t range, int lane) {
  const int64_t position = range * part.range_units;
  const int64_t row = find_row(indptr, num_rows, position, lane);
  if (row == num_rows) return {static_cast<I>(num_rows), indptr[num_rows]};
  const int64_t first = indptr[row], degree = indptr[row + 1] - first, inside = position - first - kRowUnits * row;
  if (is_hub(degree, part)) {
    const int64_t offset = inside <= kRowUnits ? 0 : (inside - kRowUnits) / part.piece * part.piece;
    return {static_cast<I>(row), static_cast<I>(first + offset)};
  }
  if (2 * inside <= degree + kRowUnits) return {static_cast<I>(row), static_cast<I>(first)};
  return {static_cast<I>(row + 1), static_cast<I>(first + degree)};
}

// Cut number `share` of `shares` equal shares of the range between two cuts. One thread.
template <class I>
__device__ inline Cut<I> share_cut(const I* indptr, Cut<I> begin, Cut<I> end, int share, int shares) {
  if (share <= 0) return begin;
  if (share >= shares) return end;
  const int64_t from = static_cast<int64_t>(begin.edge) + kRowUnits * static_cast<int64_t>(begin.row);
  const int64_t to = static_cast<int64_t>(end.edge) + kRowUnits * static_cast<int64_t>(end.row);
  const int64_t position = from + (to - from) * share / shares;
  int64_t low = begin.row, high = end.row;
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (row_position(indptr, middle) <= position) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const int64_t first = indptr[low], inside = position - first - kRowUnits * low;
  if (low == end.row) {  // nothing of this row, or the first part of a hub
    const int64_t edge =
        min(static_cast<int64_t>(end.edge), max(static_cast<int64_t>(begin.edge), first + inside / 4 * 4));
    return {end.row, static_cast<I>(edge)};
  }
  const int64_t degree = indptr[low + 1] - first;
  const int64_t least = low == begin.row ? static_cast<int64_t>(begin.edge) : first;
  if (degree <= 8) {
    if (2 * inside > degree + kRowUnits) return {static_cast<I>(low + 1), static_cast<I>(first + degree)};
    return {static_cast<I>(low), static_cast<I>(least)};
  }
  const int64_t offset = inside <= kRowUnits ? 0 : (inside - kRowUnits) / 4 * 4;
  return {static_cast<I>(low), static_cast<I>(max(least, first + offset))};
}

enum class PieceStatus : uint8_t { none, row_ends, row_goes_on };

// How a block deals its range to up to kMost teams, and the pieces of rows that they leave each other (shared memory).
template <class I, int kMost>
struct RangeShares {
  Cut<I> cuts[kMost + 1];
  int64_t lead_slot, last_slot;  // pieces of hubs: the one that an earlier block began, the one that begins here
  PieceStatus status[kMost];
};

struct Chains {
  int chains;
};

// place.chains: shares of the range, as in Chains. Read there: with the number in its place the passes of the
// attention, which begin with this, get other registers and some spill. Whole block.
template <class I, int kMost, class P>
__device__ inline void divide_range(const CompressedGraph& graph, const Partition& part, const P& place,
                                    RangeShares<I, kMost>& s) {
  const I* indptr = static_cast<const I*>(graph.indptr);
  const int warp = threadIdx.x / 32, warp_lane = threadIdx.x % 32;
  if (warp < 2) {
    const Cut<I> cut = range_cut(indptr, graph.num_rows, part, blockIdx.x + warp, warp_lane);
    if (warp_lane == 0) {
      s.cuts[warp ? place.chains : 0] = cut;
      if (warp == 0) s.lead_slot = piece_slot(cut.edge, part.piece);
      if (warp == 1) s.last_slot = cut.row < graph.num_rows ? piece_slot(indptr[cut.row] + part.piece, part.piece) : 0;
    }
  }
  if (threadIdx.x < kMost) s.status[threadIdx.x] = PieceStatus::none;
  __syncthreads();
  const Cut<I> begin = s.cuts[0], end = s.cuts[place.chains];
  const int share = threadIdx.x;
  if (share > 0 && share < place.chains) s.cuts[share] = share_cut(indptr, begin, end, share, place.chains);
  __syncthreads();
}

}  // namespace edgeless::cuda
