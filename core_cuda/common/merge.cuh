// Device functions that find the hubs, the rows that a partition splits (partition.h), and merge their segments in an
// order that depends on the graph alone.
#pragma once

#include "partition.cuh"
#include "vec.cuh"

namespace edgeless::cuda {

// The last range cut inside the row, as a number of segment lengths from the row's start.
__device__ inline int64_t last_cut(int64_t row_begin, int64_t degree, const Partition& part) {
  const int64_t last = (row_begin + kRowUnits + degree - 1) / part.range_units * part.range_units;
  return (last - row_begin - kRowUnits) / part.segment;
}

// A split row whose first cut has this fix-up slot. segments: its segments, one more than its cuts; 0: the slot has no
// hub.
struct Hub {
  int64_t slot, row, segments;
};

// Only the row that holds the slot's first edge can have its first cut in the slot. To be called by the whole warp.
template <class I>
__device__ inline Hub find_hub(const CompressedGraph& graph, const Partition& part, int64_t slot) {
  const I* indptr = static_cast<const I*>(graph.indptr);
  const int64_t row = row_of_edge(indptr, graph.num_rows, slot * part.segment, threadIdx.x % 32);
  const int64_t first = indptr[row], degree = indptr[row + 1] - first;
  if (!is_hub(degree, part) || segment_slot(first + part.segment, part.segment) != slot) return {slot, 0, 0};
  const int64_t cuts = last_cut(first + kRowUnits * row, degree, part);
  return {slot, row, cuts > 0 ? cuts + 1 : 0};
}

// Calls merge(hub) for every hub whose first cut has one of the block's slots. Each warp checks one slot, as most have
// no hub. To be called by the whole block, as are the device functions below.
template <class I, class F>
__device__ inline void for_each_hub(const CompressedGraph& graph, const Partition& part, F&& merge) {
  __shared__ Hub hubs[kSlotsOfBlock];
  const int warp = threadIdx.x / 32;
  const int64_t slot = static_cast<int64_t>(blockIdx.x) * kSlotsOfBlock + warp;
  Hub hub{slot, 0, 0};
  if (slot < number_of_slots(graph.num_edges, part.segment)) hub = find_hub<I>(graph, part, slot);
  if (threadIdx.x % 32 == 0) hubs[warp] = hub;
  __syncthreads();
  for (int k = 0; k < kSlotsOfBlock; ++k) {
    if (hubs[k].segments > 0) merge(hubs[k]);
  }
}

// Assigns the threads of a merge block to values and to the segments of a hub. Where a segment has fewer values than
// the block has threads, several threads divide the segments of a value among them: a sequential read would cost one
// memory latency per segment.
struct MergeLanes {
  int number;         // index of the value that this thread merges
  bool inside;        // the value exists
  int share, shares;  // this thread's quota [first, last) of the segments, in order; empty from `shares` on
  int width = 1;      // threads along the values
  int64_t first, last;

  __device__ MergeLanes(int numbers, int64_t segments) {
    const int from = static_cast<int>(blockIdx.y) * kMergeThreads, count = min(numbers - from, kMergeThreads);
    while (width < count) width *= 2;
    number = from + threadIdx.x % width, inside = threadIdx.x % width < count;
    share = threadIdx.x / width;
    shares = static_cast<int>(min(segments, static_cast<int64_t>(kMergeThreads / width)));
    first = segments * share / shares;
    last = inside && share < shares ? segments * (share + 1) / shares : first;
  }

  // Reduces x over the quotas with combine(), in order; the result is valid in the threads with share 0.
  template <class A, class Combine>
  __device__ A over_shares(A x, Combine&& combine) const {
    __shared__ A parts[kMergeThreads];
    __syncthreads();
    parts[threadIdx.x] = x;
    __syncthreads();
    x = parts[threadIdx.x % width];
    for (int s = 1; s < shares; ++s) x = combine(x, parts[threadIdx.x % width + s * width]);
    return x;
  }
  template <class A>
  __device__ A sum_of_shares(A x) const {
    return over_shares(x, [](A a, A b) { return a + b; });
  }
};

// Calls store(k, sum over the segments p of segment(p)[k]) for this block's values k.
template <class A, class Segment, class Store>
__device__ inline void sum_segments(int64_t segments, int numbers, Segment&& segment, Store&& store) {
  const MergeLanes lanes(numbers, segments);
  A sum = 0;
#pragma unroll 4
  for (int64_t p = lanes.first; p < lanes.last; ++p) sum += segment(p)[lanes.number];
  sum = lanes.sum_of_shares(sum);
  if (lanes.inside && lanes.share == 0) store(lanes.number, sum);
}

// Like sum_segments(), for segments of an online softmax. Each of `heads` heads has `size` values: sums of exponentials
// times values, then the maximum logit and the sum of exponentials. Calls store(k, sum, maximum logit, sum of
// exponentials) with the merged state. kNatural: logits are in base e, else in base 2.
template <class A, bool kNatural, class Segment, class Store>
__device__ inline void merge_softmax(int64_t segments, int heads, int size, Segment&& segment, Store&& store) {
  const MergeLanes lanes(heads * size, segments);
  const int number = lanes.inside ? lanes.number : 0, logit = number / size * size + size - 2;
  A top = -INFINITY, sum = 0, total = 0;
#pragma unroll 4
  for (int64_t p = lanes.first; p < lanes.last; ++p) top = max(top, segment(p)[logit]);
  top = lanes.over_shares(top, [](A a, A b) { return max(a, b); });
#pragma unroll 4
  for (int64_t p = lanes.first; p < lanes.last; ++p) {
    const A factor = power_of_two((segment(p)[logit] - top) * (kNatural ? A(kLog2e) : A(1)));
    sum = fma(segment(p)[number], factor, sum), total = fma(segment(p)[logit + 1], factor, total);
  }
  sum = lanes.sum_of_shares(sum), total = lanes.sum_of_shares(total);
  if (lanes.inside && lanes.share == 0) store(number, sum, top, total);
}

}  // namespace edgeless::cuda
