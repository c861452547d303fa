// Segment reduction: reduces the neighbours' rows of each row of the graph, edge by edge.
//
// A block owns a range of the graph (partition.cuh) for one feature tile; each of its sub-warps owns an equal quota of
// the range: some whole rows, perhaps the end of a row before them and the start of a row after them. A sub-warp runs
// its tile loop over its edges in batches, across row ends, so that short rows have as many loads in flight as long
// rows. The segments of a row that several sub-warps share are merged in order: each sub-warp but the first leaves its
// segment in shared memory, and the first merges them. Segments of hubs, which cross blocks, are stored to the fix-up
// workspace (`carry`) and merged by a second kernel.
//
// The functor Reducer defines the reduction. The window is the sub-warp's current `width` edges, one index per lane:
//   Segment                      partial result of a segment, per lane
//   begin_walk(position, end)    optional: called once before the tile loop, if the quota has edges. position: that of
//                                this lane's edge in the first window; end: end of the quota's edges
//   own(index, position)         sets this lane's edge of the current window
//   load(u, index, position)     issues the load of the row of edge u of a batch
//   choose(b)                    called by the whole warp when a batch starts at edge b of the window
//   close(b, count, last)        optional: called by the whole warp after a batch, of which the sub-warp had `count`
//                                edges; last: the batch ends the window or the tile loop
//   take(u, offset)              reduces edge u; offset: the edge's index in the segment
//   take_whole(u, offset)        optional: called instead of take() when all lanes of the warp reduce their edge u
//   begin(row, offset)           starts a segment; offset: index in the row of the segment's first edge
//   segment(first, last)         returns the partial result of the edges [first, last)
//   merge(segment, later), store(row, segment), store_empty(row), keep(slot, segment)
//   kept(slot)                   returns the segment that keep() stored
//   kInStep                      optional: true if all warps of the block process their windows in step, so that
//                                choose() may synchronise the block
//   kCheapEnd                    true if a row end is little code, which is unrolled with the edges of a batch
//   together()                   optional: called by the whole warp after takes and row ends; makes the earlier writes
//                                of a lane visible to the other lanes of its sub-warp
// Reducer(args, vector) constructs a Reducer for the lane of vector `vector` of a row.
#pragma once

#include <type_traits>

#include "merge.cuh"
#include "segment_reduce.h"
#include "words.cuh"

namespace edgeless::cuda {

// The partial result of most reductions: a sum for each of a lane's values.
template <class A, int kCount>
struct Sums {
  A sum[kCount];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int k = 0; k < kCount; ++k) sum[k] = 0;
  }
  __device__ __forceinline__ void add(const Sums& later) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) sum[k] += later.sum[k];
  }
};

// True if Reducer has together().
template <class Reducer, class = void>
constexpr bool kTogether = false;
template <class Reducer>
constexpr bool kTogether<Reducer, std::void_t<decltype(&Reducer::together)>> = true;

// True if Reducer has begin_walk().
template <class Reducer, class = void>
constexpr bool kBeginsWalk = false;
template <class Reducer>
constexpr bool kBeginsWalk<Reducer, std::void_t<decltype(&Reducer::begin_walk)>> = true;

// True if Reducer has take_whole().
template <class Reducer, class = void>
constexpr bool kTakesWhole = false;
template <class Reducer>
constexpr bool kTakesWhole<Reducer, std::void_t<decltype(&Reducer::take_whole)>> = true;

// True if Reducer has close().
template <class Reducer, class = void>
constexpr bool kCloses = false;
template <class Reducer>
constexpr bool kCloses<Reducer, std::void_t<decltype(&Reducer::close)>> = true;

// True if all warps of a block process their windows in step.
template <class Reducer, class = void>
constexpr bool kTakesStepsTogether = false;
template <class Reducer>
constexpr bool kTakesStepsTogether<Reducer, std::void_t<decltype(Reducer::kInStep)>> = Reducer::kInStep;

template <class I>
using ReduceShares = RangeShares<I, kMostReduceSubWarps>;

// kBatch: edges whose rows are loaded before any is reduced, at most the lanes of a sub-warp.
template <int kBatch, class I, class Reducer>
__device__ inline void reduce_segments(const CompressedGraph& graph, const ReducePlan& plan, Reducer& reducer) {
  using Segment = typename Reducer::Segment;
  constexpr unsigned kWarp = 0xffffffffu;
  __shared__ ReduceShares<I> s;
  __shared__ Segment segments[kReduceThreads];
  const I* indptr = static_cast<const I*>(graph.indptr);
  const I* indices = static_cast<const I*>(graph.indices);
  const int width = 1 << plan.sub_warp_log2, lane = threadIdx.x & (width - 1),
            sub_warp = threadIdx.x >> plan.sub_warp_log2;
  const int sub_warps = kReduceThreads >> plan.sub_warp_log2;
  divide_range(graph, plan.part, Workers{sub_warps}, s);

  const Cut<I> from = s.cuts[sub_warp], to = s.cuts[sub_warp + 1];
  const I last = to.edge, last_row = to.row;
  I row = from.row, at = from.edge, first = at;  // first: first edge of the current segment
  bool lead = at > indptr[row];                  // the row began in an earlier quota
  const bool follows = at > s.cuts[0].edge;      // earlier quotas of the block have edges
  const I never = -1;
  I row_end = row < last_row ? indptr[row + 1] : never, next_end = row + 1 < last_row ? indptr[row + 2] : never;
  auto next_row = [&] {
    ++row;
    row_end = row < last_row ? next_end : never;  // before the next load, since the select waits for the last load
    if (row + 1 < last_row) next_end = indptr[row + 2];
  };
  auto keep = [&](const Segment& segment) { reducer.keep(lead ? plan.slots + s.lead_slot : s.last_slot, segment); };
  auto end_row = [&](I edge) {
    const Segment segment = reducer.segment(first, edge);
    if (!lead) {
      reducer.store(row, segment);
    } else if (follows) {
      segments[threadIdx.x] = segment;
      s.status[sub_warp] = SegmentStatus::row_ends;
    } else {
      keep(segment);
    }
    lead = false;
    for (next_row(); row_end == edge; next_row()) reducer.store_empty(row);
    first = edge;
    reducer.begin(row, 0);
  };

  if (!lead) {
    for (; row_end == at; next_row()) reducer.store_empty(row);
  }
  reducer.begin(row, at - indptr[row]);
  auto together = [&] {
    if constexpr (kTogether<Reducer>) reducer.together();
  };
  together();

  const I end_of_all = static_cast<I>(graph.num_edges - 1);
  auto further = [&](I edge, int by) { return end_of_all - edge < by ? end_of_all : static_cast<I>(edge + by); };
  I window = at, next = 0;
  if (graph.num_edges > 0) next = __ldcs(indices + further(window, lane));
  if constexpr (kBeginsWalk<Reducer>) {
    if (at < last) reducer.begin_walk(further(window, lane), last);
  }
  constexpr bool kInStep = kTakesStepsTogether<Reducer>;
  while (kInStep ? __syncthreads_or(at < last) : __any_sync(kWarp, at < last)) {
    const I index = next;
    reducer.own(index, further(window, lane));
    window = further(window, width);
    next = __ldcs(indices + further(window, lane));
    for (int b = 0; b < width && (kInStep || __any_sync(kWarp, at < last)); b += kBatch) {
#pragma unroll
      for (int u = 0; u < kBatch; ++u) reducer.load(u, __shfl_sync(kWarp, index, b + u, width), further(at, u));
      reducer.choose(b);
      const I batch = at;
      // With one edge per batch, the code of an edge is long: there is no second copy of it for whole batches.
      const bool within = kBatch > 1 && last - at >= kBatch && (row_end == never || row_end - at > kBatch);
      if (kBatch > 1 && __all_sync(kWarp, within)) {
#pragma unroll
        for (int u = 0; u < kBatch; ++u) {
          if constexpr (kTakesWhole<Reducer>) {
            reducer.take_whole(u, at - first + u);
          } else {
            reducer.take(u, at - first + u);
          }
          together();
        }
        at += kBatch;
      } else if constexpr (kTogether<Reducer>) {
        // Steps from row end to row end, all sub-warps of the warp together.
        const int n = static_cast<int>(min(static_cast<I>(kBatch), static_cast<I>(last - at)));
        int begin = 0;
        do {
          const I left = row_end - at;
          const bool ends = begin < n && row_end != never && left <= n;
          const int end = ends ? static_cast<int>(left) : n;
#pragma unroll
          for (int u = 0; u < kBatch; ++u) {
            if (u >= begin && u < end) reducer.take(u, at - first + u);
            together();
          }
          begin = end;
          if (ends) end_row(at + end);
          together();
        } while (__any_sync(kWarp, begin < n));
        at += n;
      } else if constexpr (Reducer::kCheapEnd) {
        const int n = static_cast<int>(min(static_cast<I>(kBatch), static_cast<I>(last - at)));
#pragma unroll
        for (int u = 0; u < kBatch; ++u) {
          if (u < n) reducer.take(u, at - first + u);
          if (row_end - at == u + 1) end_row(at + u + 1);
        }
        at += n;
      } else {
        // Steps from row end to row end: the code of a row end is instantiated once, not once per edge of a batch.
        const int n = static_cast<int>(min(static_cast<I>(kBatch), static_cast<I>(last - at)));
        for (int begin = 0; begin < n;) {
          const I left = row_end - at;
          const bool ends = row_end != never && left <= n;
          const int end = ends ? static_cast<int>(left) : n;
#pragma unroll
          for (int u = 0; u < kBatch; ++u) {
            if (u >= begin && u < end) reducer.take(u, at - first + u);
          }
          begin = end;
          if (ends) end_row(at + end);
        }
        at += n;
      }
      if constexpr (kCloses<Reducer>) {
        reducer.close(b, static_cast<int>(at - batch), b + kBatch >= width || !__any_sync(kWarp, at < last));
      }
    }
  }

  bool leads = false;
  if (last > from.edge && last > indptr[last_row]) {  // the quota ends inside a row
    if (lead && follows) {
      segments[threadIdx.x] = reducer.segment(first, last);
      s.status[sub_warp] = SegmentStatus::row_goes_on;
    } else {
      leads = true;
    }
  }
  __syncthreads();
  if (!leads) return;
  Segment segment = reducer.segment(first, last);
  bool complete = false;
  for (int other = sub_warp + 1; other < sub_warps && !complete; ++other) {
    if (s.status[other] == SegmentStatus::none) continue;
    complete = s.status[other] == SegmentStatus::row_ends;
    reducer.merge(segment, segments[threadIdx.x + (other - sub_warp) * width]);
  }
  if (lead || !complete) {
    keep(segment);
  } else {
    reducer.store(last_row, segment);
  }
}

// Merges the segments of hubs in order: segment 0 is at the hub's slot, segment p > 0 at slots + slot + p - 1.
template <class Reducer, class I, class Args>
__global__ void __launch_bounds__(kMergeThreads) merge_reduced_kernel(const __grid_constant__ Args args) {
  using Segment = typename Reducer::Segment;
  for_each_hub<I>(args.graph, args.plan.part, [&](const Hub& hub) {
    const MergeLanes lanes(args.vectors, hub.segments);
    Reducer reducer(args, lanes.inside ? lanes.number : 0);
    reducer.begin(hub.row, 0);
    auto kept = [&](int64_t p) { return reducer.kept(p == 0 ? hub.slot : args.plan.slots + hub.slot + p - 1); };
    Segment segment;
    if (lanes.first < lanes.last) segment = kept(lanes.first);
#pragma unroll 4
    for (int64_t p = lanes.first + 1; p < lanes.last; ++p) reducer.merge(segment, kept(p));
    segment = lanes.over_shares(segment, [&](Segment earlier, const Segment& later) {
      reducer.merge(earlier, later);
      return earlier;
    });
    if (lanes.inside && lanes.share == 0) reducer.store(hub.row, segment);
  });
}

}  // namespace edgeless::cuda
