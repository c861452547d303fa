// How the work of a block is divided, the same in every pass.
//
// A block owns a range of the graph (common/partition.cuh) for one head tile. A worker has one sub-warp for each head
// of the tile; its quota (`share`) is an equal part of the range. The segments of a row that several workers share are
// merged in the order of the workers: the sub-warp with the row's first edges keeps its segment in registers, every
// other sub-warp stores its segment to shared memory, and the first sub-warp adds these segments and writes the row.
#pragma once

#include <type_traits>

#include "../../common/partition.cuh"
#include "../../common/warp.cuh"
#include "args.h"

namespace edgeless::cuda {

constexpr int kMaxSubWarps = kBlockThreads;

// Makes the compiler hold a value in a register instead of recomputing it in the loop.
template <class T>
__device__ __forceinline__ T held(T x) {
  if constexpr (sizeof(T) == 8) {
    asm volatile("" : "+l"(x));
  } else {
    asm volatile("" : "+r"(x));
  }
  return x;
}

// The lane, sub-warp, worker and head of a thread. kWidth: lanes of a sub-warp where known at compile time, else 0.
// Neighbouring sub-warps process the heads of one edge or, with kOneHeadAWarp, are neighbouring workers of one head.
// kRowWidth: lanes that hold a row, all lanes of the sub-warp or one.
template <int kWidth, bool kOneHeadAWarp = false, int kRowWidth = kWidth>
struct Place {
  static constexpr bool kFives = false;
  int runtime_width;
  int lane;  // index in the sub-warp
  int sub_warp, worker, workers;
  int worker_distance;  // sub-warps from one worker to the next
  int head;
  bool working;

  __device__ Place(const Layout& layout, int all_heads) {
    const int thread = threadIdx.x;
    runtime_width = 1 << layout.sub_warp_log2;
    lane = held(thread & (width() - 1));
    sub_warp = thread / width();
    const int heads = layout.heads_per_slice;
    workers = kBlockThreads / width() / heads;
    worker = kOneHeadAWarp ? sub_warp % workers : sub_warp / heads;
    worker_distance = kOneHeadAWarp ? 1 : heads;
    head = static_cast<int>(blockIdx.y) * heads + (kOneHeadAWarp ? sub_warp / workers : sub_warp % heads);
    working = worker < workers && head < all_heads;
    if (!working) head = 0;
  }

  __device__ __forceinline__ int width() const { return kWidth ? kWidth : runtime_width; }
  __device__ __forceinline__ int row_width() const { return kRowWidth ? kRowWidth : runtime_width; }
  __device__ __forceinline__ int row_lane() const { return kRowWidth == kWidth ? lane : lane % kRowWidth; }
  // The thread with this lane's index in the sub-warp `ahead` sub-warps later.
  __device__ __forceinline__ int thread_ahead(int ahead) const { return threadIdx.x + ahead * width(); }
  // Sum of x over the lanes that hold a row.
  template <class A>
  __device__ __forceinline__ A sum_of_row(A x, unsigned mask) const {
    return sub_warp_sum(x, row_width(), mask);
  }
  // The lane mask of the sub-warp in its warp.
  __device__ unsigned mask() const {
    return width() == 32 ? kFullWarp : ((1u << width()) - 1) << (threadIdx.x & 31 & ~(width() - 1));
  }
};

// Place for sub-warps of five or ten lanes.
template <int kWidth>
struct PlaceOfFives : SubWarpOfFives<kWidth> {
  using SubWarp = SubWarpOfFives<kWidth>;
  static constexpr bool kFives = true;
  int sub_warp, worker, workers;
  int worker_distance;
  int head;
  bool working;

  __device__ PlaceOfFives(const Layout& layout, int all_heads)
      : SubWarp(held(SubWarp::first_of_thread()), held(SubWarp::lane_of_thread())) {
    const int heads = layout.heads_per_slice;
    sub_warp = threadIdx.x / 32 * SubWarp::kSubWarps + SubWarp::first / kWidth;
    workers = kBlockThreads / 32 * SubWarp::kSubWarps / heads;
    worker = sub_warp / heads;
    worker_distance = heads;
    head = static_cast<int>(blockIdx.y) * heads + sub_warp % heads;
    working = SubWarp::has_sub_warp() && worker < workers && head < all_heads;
    if (!working) head = 0;
  }

  static constexpr __device__ int width() { return kWidth; }
  static constexpr __device__ int row_width() { return kWidth; }
  __device__ __forceinline__ int row_lane() const { return SubWarp::lane; }
  __device__ __forceinline__ int thread_ahead(int ahead) const {
    const int other = sub_warp + ahead;
    return other / SubWarp::kSubWarps * 32 + other % SubWarp::kSubWarps * kWidth + SubWarp::lane;
  }
  template <class A>
  __device__ __forceinline__ A sum_of_row(A x, unsigned mask) const {
    return SubWarp::sum_of_lanes(x, kWidth, mask);
  }
};

// Lanes of a sub-warp (0: known at run time) and edges per batch; all rows of a batch are loaded before the first is
// used. A batch of more edges than lanes takes several rounds (kRounds). With kSpread, every lane processes an edge of
// its own and reads that edge's whole row; else every row of a round is spread over all lanes.
template <int kLanes, int kBatchEdges, bool kSpreadEdges = false>
struct SubWarpShape {
  static constexpr int kWidth = kLanes, kBatch = kBatchEdges;
  static constexpr bool kFives = has_fives(kWidth);
  static constexpr int kRounds = kWidth && kWidth < kBatch ? kBatch / kWidth : 1;
  static constexpr int kEdges = kBatch / kRounds;
  static constexpr bool kNarrow = is_narrow(kWidth);
  static constexpr bool kSpread = kSpreadEdges;
  static constexpr int kRowWidth = kSpread ? 1 : kWidth;  // lanes that hold a row
  static constexpr int kRows = kSpread ? 1 : kEdges;      // rows per round that a lane reads
  static_assert(!kSpread || kWidth == kEdges);
  static_assert(!kFives || kEdges == 5);
  using Place = std::conditional_t<kFives, PlaceOfFives<kWidth>, cuda::Place<kWidth, false, kRowWidth>>;

  // The edge of a round that a lane owns.
  static __device__ __forceinline__ int slot(const Place& place) {
    if constexpr (kFives) return place.owned;
    return threadIdx.x % kEdges;
  }
  // Returns x of the lane that owns edge u.
  template <class T>
  static __device__ __forceinline__ T from_any_owner(const Place& place, T x, int u) {
    if constexpr (kFives) return place.from_owner(x, u);
    return cuda::from_owner<kEdges>(x, u);
  }
  // Returns x of the lane that owns edge u, to the lanes that read edge u's row: with kSpread, the owner itself.
  template <class T>
  static __device__ __forceinline__ T from_owner(const Place& place, T x, int u) {
    return kSpread ? x : from_any_owner(place, x, u);
  }
  // Sums v[u] over the lanes that hold a row; the lanes that own edge u get the sum of v[u]. Called by whole warps.
  template <class A>
  static __device__ __forceinline__ A sum_of_own_edge(const Place& place, const A (&v)[kRows]) {
    if constexpr (kFives) return place.sum_of_own_edge(v);
    if constexpr (!kFives) return cuda::sum_of_own_edge<kRows>(v, place.row_lane(), place.row_width());
  }
  // Sum and maximum of x over the edges of a round. batch_max() is called by whole warps.
  template <class A>
  static __device__ __forceinline__ A batch_sum(const Place& place, A x) {
    if constexpr (kFives) return place.sum_of_lanes(x, kEdges, place.mask());
    return cuda::batch_sum<kEdges>(x, place.mask());
  }
  template <class A>
  static __device__ __forceinline__ A batch_max(const Place& place, A x) {
    if constexpr (kFives) return place.batch_max(x);
    return cuda::batch_max<kEdges>(x);
  }
  // Adds up over all lanes a vector that each lane has summed over its own edges.
  template <class T, int kPer>
  static __device__ __forceinline__ void sum_lanes(T (&x)[kPer], unsigned mask) {
    if constexpr (kSpread) {
#pragma unroll
      for (int k = 0; k < kPer; ++k) x[k] = cuda::batch_sum<kEdges>(x[k], mask);
    }
  }
};

template <class I>
using BlockShares = RangeShares<I, kMaxSubWarps>;

// Position of a sub-warp in its quota, which it processes row by row. Between batches, `edge` is before row_end; the
// sub-warp is done when the two are equal.
template <class I>
struct Walk {
  const I* indptr;
  I row, edge, row_end, next_end;
  I last_row, last_edge;  // end of the quota: row last_row, before its edge last_edge
  bool lead;              // the row began before this quota
  bool joins;             // the row began in the quota of an earlier worker of this block
  bool pending;           // a row has yet to be finished, perhaps after more edges

  template <class P>
  __device__ Walk(const CompressedGraph& graph, const P& place, const BlockShares<I>& s)
      : indptr(static_cast<const I*>(graph.indptr)) {
    if (!place.working) {
      row = edge = row_end = next_end = last_row = last_edge = 0;
      lead = joins = pending = false;
      return;
    }
    const Cut<I> begin = s.cuts[place.worker], end = s.cuts[place.worker + 1];
    row = begin.row, edge = begin.edge, last_row = end.row, last_edge = end.edge;
    pending = more();
    lead = pending && edge > indptr[row];
    joins = lead && edge > s.cuts[0].edge;
    row_end = !pending ? edge : row < last_row ? indptr[row + 1] : last_edge;
    next_end = row + 1 < last_row ? indptr[row + 2] : last_edge;
  }

  // Returns whether another row follows. Valid only between two rows.
  __device__ bool more() const { return row < last_row || (row == last_row && edge < last_edge); }
  __device__ bool row_complete() const { return row < last_row; }
  __device__ int batch(int most) const {
    return static_cast<int>(min(static_cast<I>(most), static_cast<I>(row_end - edge)));
  }

  __device__ void next_row() {
    ++row;
    lead = joins = false;
    row_end = row < last_row ? next_end : last_edge;  // selects a row after the load of next_end, so without a stall
    if (row + 1 < last_row) next_end = indptr[row + 2];
  }

  __device__ bool at_row_end() const { return edge == row_end && pending; }

  // Called at the end of a row: finishes that row and the empty rows after it. Returns whether a row is left to begin.
  template <class F>
  __device__ bool finish_rows(F&& end_row) {
    do {
      end_row();
      next_row();
    } while (more() && edge == row_end);
    pending = more();
    if (!pending) row_end = edge;
    return pending;
  }
};

// there: the sub-warp holds the block's first edges of a row that the next worker continues. lead: the row began in an
// earlier block.
struct Leader {
  bool there = false, lead = false;
};

struct Never {
  __device__ bool operator()() const { return false; }
};

// The fix-up workspace entry for the segment of a hub.
template <class A, class I>
__device__ inline A* carry_at(const Args<A>& args, const BlockShares<I>& s, bool lead, int head) {
  const int64_t slots = number_of_slots(args.graph.num_edges, args.part.segment);
  const int64_t slot = lead ? slots + s.lead_slot : s.last_slot;
  return args.carry + (slot * args.heads + head) * args.carry_size;
}

// Disposes of the current row's segment in this quota: leaves it in shared memory, emits it, or keeps it in registers
// for merge_segments().
template <class I, class P, class Close, class Clear, class Leave, class Emit>
__device__ __forceinline__ void put_row(const Walk<I>& walk, const P& place, BlockShares<I>& shares, Leader& leader,
                                        Close&& close, Clear&& clear, Leave&& leave, Emit&& emit) {
  close();
  if (walk.joins) {
    leave();
    if (place.lane == 0) {
      shares.status[place.sub_warp] = walk.row_complete() ? SegmentStatus::row_ends : SegmentStatus::row_goes_on;
    }
  } else if (walk.row_complete()) {
    emit(walk.row, walk.lead, true);
  } else {
    leader.there = true, leader.lead = walk.lead;
    return;
  }
  clear();
}

// Merges the segments of rows that several workers share, once all these segments are in shared memory.
template <class I, class P, class Add, class Emit>
__device__ __forceinline__ void merge_segments(const Walk<I>& walk, const P& place, const BlockShares<I>& shares,
                                               const Leader& leader, Add&& add, Emit&& emit) {
  if (!leader.there) return;
  bool complete = false;
  for (int worker = place.worker + 1; worker < place.workers && !complete; ++worker) {
    const int ahead = (worker - place.worker) * place.worker_distance, sub_warp = place.sub_warp + ahead;
    if (shares.status[sub_warp] == SegmentStatus::none) continue;
    complete = shares.status[sub_warp] == SegmentStatus::row_ends;
    add(sub_warp, place.thread_ahead(ahead));
  }
  emit(walk.last_row, leader.lead, complete);
}

// The tile loop: processes a sub-warp's quota, then merges the segments of rows that the block's workers share. With
// kSettle it waits for the first batch's indices ahead of the loop: a warp has six scoreboards for all its loads, so
// with an index in flight at the head of the loop, every batch would wait there for the loads that begin() has just
// issued (docs/decisions/0035). Callbacks:
//   begin()                    issues the loads of the current row
//   take()                     processes the row's next batch of edges, none if the sub-warp is done; by whole warps
//   close()                    finishes the segment: all edges of the row in this quota have been processed
//   clear()                    resets the segment
//   leave()                    stores the segment to shared memory, for the sub-warp that holds the row's first edges
//   add(sub_warp, thread)      adds the segment that `sub_warp` stored; `thread` stored the values of this lane
//   emit(row, lead, complete)  writes the row or, where other blocks hold parts of it, its segment; lead: the row began
//                              in an earlier block, complete: the row ends in this block
//   failed()                   called once all quotas are processed; true if walk_again() has to repeat them
// Returns false if failed() is true; then nothing was merged.
template <bool kSettle = true, class I, class P, class Window, class Begin, class Take, class Close, class Clear,
          class Leave, class Add, class Emit, class Failed = Never>
__device__ __forceinline__ bool walk_rows(Walk<I>& walk, const P& place, BlockShares<I>& shares, Window& window,
                                          Begin&& begin, Take&& take, Close&& close, Clear&& clear, Leave&& leave,
                                          Add&& add, Emit&& emit, Failed&& failed = {}) {
  Leader leader;
  auto end_row = [&] { put_row(walk, place, shares, leader, close, clear, leave, emit); };

  if (walk.edge < walk.row_end) begin();
  if constexpr (kSettle) window.settle();
  while (true) {
    if (walk.at_row_end() && walk.finish_rows(end_row)) begin();
    if (!__any_sync(kFullWarp, walk.edge < walk.row_end)) break;
    take();
  }

  __syncthreads();
  if (failed()) return false;
  merge_segments(walk, place, shares, leader, add, emit);
  return true;
}

// Processes the quotas of a block again. make() computes the segment of the current row and loads the values of the row
// itself that close() and emit() read.
template <class I, class P, class Make, class Close, class Clear, class Leave, class Add, class Emit>
__device__ __forceinline__ void walk_again(Walk<I>& walk, const P& place, BlockShares<I>& shares, Make&& make,
                                           Close&& close, Clear&& clear, Leave&& leave, Add&& add, Emit&& emit) {
  Leader leader;
  for (; walk.more(); walk.next_row()) {
    make();
    walk.edge = walk.row_end;
    put_row(walk, place, shares, leader, close, clear, leave, emit);
  }
  __syncthreads();
  merge_segments(walk, place, shares, leader, add, emit);
}

}  // namespace edgeless::cuda
