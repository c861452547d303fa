// Device functions that find the cuts of a partition (partition.h).
#pragma once

#include "partition.h"
#include "storage.h"

namespace edgeless::cuda {

// A cut before `edge`, which is the first edge of `row` or an edge inside the row.
template <class I>
struct Cut {
  I row, edge;
};

template <class I>
__device__ __forceinline__ int64_t row_position(const I* indptr, int64_t row) {
  return static_cast<int64_t>(indptr[row]) + kRowUnits * row;
}

// Searches by a whole warp, with 32 probes per step, for the last integer in [0, last] for which `before` holds;
// `before` must be monotonic and hold at 0. It should capture by value: with references the compiler allocates the
// registers of the attention passes, which start with this search, differently, and the backward of the float32 dot
// product takes 5 % longer.
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

// The last row in [0, num_rows] that begins at or before `position`. To be called by the whole warp, as are the two
// functions below.
template <class I>
__device__ inline int64_t find_row(const I* indptr, int64_t num_rows, int64_t position, int lane) {
  return find_last(num_rows, lane, [=](int64_t row) { return row_position(indptr, row) <= position; });
}

// The last row in [0, num_rows) that begins at or before an edge.
template <class I>
__device__ inline int64_t row_of_edge(const I* indptr, int64_t num_rows, int64_t edge, int lane) {
  return find_last(num_rows - 1, lane, [=](int64_t row) { return static_cast<int64_t>(indptr[row]) <= edge; });
}

// The cut before range `range`.
template <class I>
__device__ inline Cut<I> range_cut(const I* indptr, int64_t num_rows, const Partition& part, int64_t range, int lane) {
  const int64_t position = range * part.range_units;
  const int64_t row = find_row(indptr, num_rows, position, lane);
  if (row == num_rows) return {static_cast<I>(num_rows), indptr[num_rows]};
  const int64_t first = indptr[row], degree = indptr[row + 1] - first, inside = position - first - kRowUnits * row;
  if (is_hub(degree, part)) {
    const int64_t offset = inside <= kRowUnits ? 0 : (inside - kRowUnits) / part.segment * part.segment;
    return {static_cast<I>(row), static_cast<I>(first + offset)};
  }
  if (2 * inside <= degree + kRowUnits) return {static_cast<I>(row), static_cast<I>(first)};
  return {static_cast<I>(row + 1), static_cast<I>(first + degree)};
}

// Divides the range between two cuts into `shares` equal quotas; returns the cut before quota `share`. Runs in a single
// thread.
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
  if (low == end.row) {  // the range holds no edge of this row, or only the first edges of a hub
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

enum class SegmentStatus : uint8_t { none, row_ends, row_goes_on };

// Shared memory of a block: the quotas of its up to kMost workers, and the status of the segment that each worker has
// left to be merged.
template <class I, int kMost>
struct RangeShares {
  Cut<I> cuts[kMost + 1];
  int64_t lead_slot, last_slot;  // fix-up slot of a hub that an earlier block began, and of one that begins here
  SegmentStatus status[kMost];
};

struct Workers {
  int workers;
};

// Divides the block's range into place.workers quotas, one per worker; the type of `place` has that member, as Workers
// has. The number of workers is passed in a struct because with a plain int the compiler allocates the registers of the
// attention passes, which start with this function, differently, and some spill. To be called by the whole block.
template <class I, int kMost, class P>
__device__ inline void divide_range(const CompressedGraph& graph, const Partition& part, const P& place,
                                    RangeShares<I, kMost>& s) {
  const I* indptr = static_cast<const I*>(graph.indptr);
  const int warp = threadIdx.x / 32, warp_lane = threadIdx.x % 32;
  if (warp < 2) {
    const Cut<I> cut = range_cut(indptr, graph.num_rows, part, blockIdx.x + warp, warp_lane);
    if (warp_lane == 0) {
      s.cuts[warp ? place.workers : 0] = cut;
      if (warp == 0) s.lead_slot = segment_slot(cut.edge, part.segment);
      if (warp == 1)
        s.last_slot = cut.row < graph.num_rows ? segment_slot(indptr[cut.row] + part.segment, part.segment) : 0;
    }
  }
  if (threadIdx.x < kMost) s.status[threadIdx.x] = SegmentStatus::none;
  __syncthreads();
  const Cut<I> begin = s.cuts[0], end = s.cuts[place.workers];
  const int share = threadIdx.x;
  if (share > 0 && share < place.workers) s.cuts[share] = share_cut(indptr, begin, end, share, place.workers);
  __syncthreads();
}

}  // namespace edgeless::cuda
