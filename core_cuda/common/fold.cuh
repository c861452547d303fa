// Segment reduction: reduces the neighbours' rows of each row of the graph, edge by edge.
//
// A block owns a range of the graph (partition.cuh) for one feature tile; each of its sub-warps (`team`) owns an equal
// quota of the range: some whole rows, perhaps the end of a row before them and the start of a row after them. A
// sub-warp runs its tile loop over its edges in batches, across row ends, so that short rows keep as many loads in
// flight as long ones. The segments of a row that several sub-warps share are merged in order: each sub-warp but the
// first leaves its segment in shared memory, and the first merges them. Segments of hubs, which cross blocks, go to the
// fix-up workspace (`carry`), which a second kernel merges.
//
// The functor Fold defines the reduction. The window is the sub-warp's current `width` edges, one index per lane:
//   Piece                        partial result of a segment, per lane
//   begin_walk(position, end)    optional: called once before the tile loop, if it has edges. position: of this lane's
//                                edge in the first window; end: end of the quota's edges
//   own(index, position)         sets this lane's edge of the current window
//   load(u, index, position)     issues the load of the row of edge u of a batch
//   choose(b)                    the batch starts at edge b of the window; called by the whole warp
//   close(b, count, last)        optional: called by the whole warp after the batch, of which the sub-warp had `count`
//                                edges; last: the batch ends the window, or the walk
//   take(u, offset)              reduces edge u; offset: of the edge from the start of the segment
//   take_whole(u, offset)        optional: the same where all lanes of the warp take their edge u
//   begin(row, offset)           starts a segment; offset: of its first edge from the start of the row
//   piece(first, last)           returns the partial result of the edges [first, last)
//   merge(piece, later), store(row, piece), store_empty(row), keep(slot, piece)
//   kept(slot)                   reads what keep() wrote
//   kInStep                      optional: true if all warps of the block take their windows together, so that choose()
//                                may wait for the block
//   kCheapEnd                    row ends are little code, so they are unrolled with the edges of a batch
//   together()                   optional: called by the whole warp after takes and row ends; makes the earlier writes
//                                of a lane visible to the other lanes of its sub-warp
// Fold(args, vector) constructs it for the lane of that vector of a row.
#pragma once

#include <type_traits>

#include "fold.h"
#include "merge.cuh"
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

// True if Fold has together().
template <class Fold, class = void>
constexpr bool kTogether = false;
template <class Fold>
constexpr bool kTogether<Fold, std::void_t<decltype(&Fold::together)>> = true;

// True if Fold has begin_walk().
template <class Fold, class = void>
constexpr bool kBeginsWalk = false;
template <class Fold>
constexpr bool kBeginsWalk<Fold, std::void_t<decltype(&Fold::begin_walk)>> = true;

// True if Fold has take_whole().
template <class Fold, class = void>
constexpr bool kTakesWhole = false;
template <class Fold>
constexpr bool kTakesWhole<Fold, std::void_t<decltype(&Fold::take_whole)>> = true;

// True if Fold has close().
template <class Fold, class = void>
constexpr bool kCloses = false;
template <class Fold>
constexpr bool kCloses<Fold, std::void_t<decltype(&Fold::close)>> = true;

// True if all warps of a block take their windows together.
template <class Fold, class = void>
constexpr bool kTakesStepsTogether = false;
template <class Fold>
constexpr bool kTakesStepsTogether<Fold, std::void_t<decltype(Fold::kInStep)>> = Fold::kInStep;

template <class I>
using FoldShares = RangeShares<I, kMostFoldTeams>;

// kBatch: edges whose rows are loaded before any is reduced, at most the lanes of a sub-warp.
template <int kBatch, class I, class Fold>
__device__ inline void fold_rows(const CompressedGraph& graph, const FoldPlan& plan, Fold& fold) {
  using Piece = typename Fold::Piece;
  constexpr unsigned kWarp = 0xffffffffu;
  __shared__ FoldShares<I> s;
  __shared__ Piece pieces[kFoldThreads];
  const I* indptr = static_cast<const I*>(graph.indptr);
  const I* indices = static_cast<const I*>(graph.indices);
  const int width = 1 << plan.team_log2, lane = threadIdx.x & (width - 1), team = threadIdx.x >> plan.team_log2;
  const int teams = kFoldThreads >> plan.team_log2;
  divide_range(graph, plan.part, Chains{teams}, s);

  const Cut<I> from = s.cuts[team], to = s.cuts[team + 1];
  const I last = to.edge, last_row = to.row;
  I row = from.row, at = from.edge, first = at;  // first: first edge of the current segment
  bool lead = at > indptr[row];                  // the row began in an earlier quota
  const bool follows = at > s.cuts[0].edge;      // earlier quotas of the block have edges
  const I never = -1;
  I row_end = row < last_row ? indptr[row + 1] : never, next_end = row + 1 < last_row ? indptr[row + 2] : never;
  auto next_row = [&] {
    ++row;
    row_end = row < last_row ? next_end : never;  // selected before the next load, as the select waits for the last one
    if (row + 1 < last_row) next_end = indptr[row + 2];
  };
  auto keep = [&](const Piece& piece) { fold.keep(lead ? plan.slots + s.lead_slot : s.last_slot, piece); };
  auto end_row = [&](I edge) {
    const Piece piece = fold.piece(first, edge);
    if (!lead) {
      fold.store(row, piece);
    } else if (follows) {
      pieces[threadIdx.x] = piece;
      s.status[team] = PieceStatus::row_ends;
    } else {
      keep(piece);
    }
    lead = false;
    for (next_row(); row_end == edge; next_row()) fold.store_empty(row);
    first = edge;
    fold.begin(row, 0);
  };

  if (!lead) {
    for (; row_end == at; next_row()) fold.store_empty(row);
  }
  fold.begin(row, at - indptr[row]);
  auto together = [&] {
    if constexpr (kTogether<Fold>) fold.together();
  };
  together();

  const I end_of_all = static_cast<I>(graph.num_edges - 1);
  auto further = [&](I edge, int by) { return end_of_all - edge < by ? end_of_all : static_cast<I>(edge + by); };
  I window = at, next = 0;
  if (graph.num_edges > 0) next = __ldcs(indices + further(window, lane));
  if constexpr (kBeginsWalk<Fold>) {
    if (at < last) fold.begin_walk(further(window, lane), last);
  }
  constexpr bool kInStep = kTakesStepsTogether<Fold>;
  while (kInStep ? __syncthreads_or(at < last) : __any_sync(kWarp, at < last)) {
    const I index = next;
    fold.own(index, further(window, lane));
    window = further(window, width);
    next = __ldcs(indices + further(window, lane));
    for (int b = 0; b < width && (kInStep || __any_sync(kWarp, at < last)); b += kBatch) {
#pragma unroll
      for (int u = 0; u < kBatch; ++u) fold.load(u, __shfl_sync(kWarp, index, b + u, width), further(at, u));
      fold.choose(b);
      const I batch = at;
      // Long code, of which a batch has one edge, exists once.
      const bool within = kBatch > 1 && last - at >= kBatch && (row_end == never || row_end - at > kBatch);
      if (kBatch > 1 && __all_sync(kWarp, within)) {
#pragma unroll
        for (int u = 0; u < kBatch; ++u) {
          if constexpr (kTakesWhole<Fold>) {
            fold.take_whole(u, at - first + u);
          } else {
            fold.take(u, at - first + u);
          }
          together();
        }
        at += kBatch;
      } else if constexpr (kTogether<Fold>) {
        // Steps from row end to row end, all sub-warps of the warp together.
        const int n = static_cast<int>(min(static_cast<I>(kBatch), static_cast<I>(last - at)));
        int begin = 0;
        do {
          const I left = row_end - at;
          const bool ends = begin < n && row_end != never && left <= n;
          const int end = ends ? static_cast<int>(left) : n;
#pragma unroll
          for (int u = 0; u < kBatch; ++u) {
            if (u >= begin && u < end) fold.take(u, at - first + u);
            together();
          }
          begin = end;
          if (ends) end_row(at + end);
          together();
        } while (__any_sync(kWarp, begin < n));
        at += n;
      } else if constexpr (Fold::kCheapEnd) {
        const int n = static_cast<int>(min(static_cast<I>(kBatch), static_cast<I>(last - at)));
#pragma unroll
        for (int u = 0; u < kBatch; ++u) {
          if (u < n) fold.take(u, at - first + u);
          if (row_end - at == u + 1) end_row(at + u + 1);
        }
        at += n;
      } else {
        // Steps from row end to row end: the code of a row end exists once, not once per edge of a batch.
        const int n = static_cast<int>(min(static_cast<I>(kBatch), static_cast<I>(last - at)));
        for (int begin = 0; begin < n;) {
          const I left = row_end - at;
          const bool ends = row_end != never && left <= n;
          const int end = ends ? static_cast<int>(left) : n;
#pragma unroll
          for (int u = 0; u < kBatch; ++u) {
            if (u >= begin && u < end) fold.take(u, at - first + u);
          }
          begin = end;
          if (ends) end_row(at + end);
        }
        at += n;
      }
      if constexpr (kCloses<Fold>) {
        fold.close(b, static_cast<int>(at - batch), b + kBatch >= width || !__any_sync(kWarp, at < last));
      }
    }
  }

  bool leads = false;
  if (last > from.edge && last > indptr[last_row]) {  // the quota ends inside a row
    if (lead && follows) {
      pieces[threadIdx.x] = fold.piece(first, last);
      s.status[team] = PieceStatus::row_goes_on;
    } else {
      leads = true;
    }
  }
  __syncthreads();
  if (!leads) return;
  Piece piece = fold.piece(first, last);
  bool complete = false;
  for (int other = team + 1; other < teams && !complete; ++other) {
    if (s.status[other] == PieceStatus::none) continue;
    complete = s.status[other] == PieceStatus::row_ends;
    fold.merge(piece, pieces[threadIdx.x + (other - team) * width]);
  }
  if (lead || !complete) {
    keep(piece);
  } else {
    fold.store(last_row, piece);
  }
}

// Merges the segments of hubs in order: segment 0 is at the hub's slot, segment p > 0 at slots + slot + p - 1.
template <class Fold, class I, class Args>
__global__ void __launch_bounds__(kMergeThreads) merge_fold_kernel(const __grid_constant__ Args args) {
  using Piece = typename Fold::Piece;
  for_each_hub<I>(args.graph, args.plan.part, [&](const Hub& hub) {
    const MergeLanes lanes(args.vectors, hub.pieces);
    Fold fold(args, lanes.inside ? lanes.number : 0);
    fold.begin(hub.row, 0);
    auto kept = [&](int64_t p) { return fold.kept(p == 0 ? hub.slot : args.plan.slots + hub.slot + p - 1); };
    Piece piece;
    if (lanes.first < lanes.last) piece = kept(lanes.first);
#pragma unroll 4
    for (int64_t p = lanes.first + 1; p < lanes.last; ++p) fold.merge(piece, kept(p));
    piece = lanes.over_shares(piece, [&](Piece earlier, const Piece& later) {
      fold.merge(earlier, later);
      return earlier;
    });
    if (lanes.inside && lanes.share == 0) fold.store(hub.row, piece);
  });
}

}  // namespace edgeless::cuda
