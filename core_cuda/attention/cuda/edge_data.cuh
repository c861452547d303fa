// The data of a batch's edges: prefetched indices, the softmax statistics of gathered destinations, and edge options,
// which the lane that owns an edge computes.
#pragma once

#include "../../common/dropout.h"
#include "lane.cuh"

namespace edgeless::cuda {

// Loads gat's scalar of a node and head.
template <class A, class I>
__device__ __forceinline__ A load_scalar(const Rows& rows, I index, int head) {
  return *reinterpret_cast<const A*>(rows.base + head * rows.head + static_cast<uint64_t>(index) * rows.row);
}

template <class I>
__device__ __forceinline__ int64_t edge_id(const CompressedGraph& graph, I position) {
  const I* ids = static_cast<const I*>(graph.edge_ids);
  return ids ? static_cast<int64_t>(ids[position]) : static_cast<int64_t>(position);
}

// The current batch: up to kEdges edges of one row in each of kRounds rounds. Indices are prefetched one batch ahead,
// one by each lane that owns an edge. Beyond the batch's end, load() repeats one of the batch's edges: a weight of zero
// would not stop a NaN in a feature row of another row's edges.
template <class I, class SubWarp>
struct EdgeWindow {
  static constexpr int kEdges = SubWarp::kEdges, kRounds = SubWarp::kRounds;
  using Place = typename SubWarp::Place;
  const Place& place;
  const I* indices;
  int slot;          // edge of a round that this lane owns
  I index[kRounds];  // the gathered end of that edge
  int count;         // edges of the batch, 0 for an idle sub-warp

  __device__ EdgeWindow(const CompressedGraph& graph, const Walk<I>& walk, const Place& place)
      : place(place), indices(held(static_cast<const I*>(graph.indices))), slot(held(SubWarp::slot(place))) {
    const int64_t last = graph.num_edges - 1;
#pragma unroll
    for (int t = 0; t < kRounds; ++t) {
      index[t] = last < 0 ? 0 : __ldg(indices + min(static_cast<int64_t>(walk.edge) + t * kEdges + slot, last));
    }
  }

  // Waits for the first indices, see walk_rows().
  __device__ __forceinline__ void settle() {
#pragma unroll
    for (int t = 0; t < kRounds; ++t) index[t] = max(index[t], I(0));
  }

  __device__ __forceinline__ void begin(const Walk<I>& walk) { count = walk.batch(kEdges * kRounds); }

  // Number of edges in a round.
  __device__ __forceinline__ int count_of(int round) const {
    return kRounds == 1 ? count : min(max(count - round * kEdges, 0), kEdges);
  }

  // Loads the original ids of the edges that this lane owns; 0 beyond the batch's end.
  __device__ __forceinline__ void load_ids(const CompressedGraph& graph, const Walk<I>& walk, I (&ids)[kRounds]) const {
#pragma unroll
    for (int t = 0; t < kRounds; ++t) {
      const int place = t * kEdges + slot;
      ids[t] = place < count ? static_cast<I>(edge_id(graph, walk.edge + place)) : I(0);
    }
  }

  // Moves to the next batch and prefetches its indices. Called once the loads of this batch's rows are issued.
  __device__ __forceinline__ void advance(Walk<I>& walk) {
    walk.edge += count;
#pragma unroll
    for (int t = 0; t < kRounds; ++t) {
      const int place = t * kEdges + slot;
      if (place < walk.last_edge - walk.edge) index[t] = __ldg(indices + (walk.edge + place));
    }
  }

  // Loads the rows of all edges of all rounds or, for kRows = 1, of the edges that this lane owns.
  template <class R, int kRows, int kVecs>
  __device__ __forceinline__ void load(const RowPointers<kVecs>& rows, R (&raw)[kRounds][kRows][kVecs]) const {
    static_assert(kRows == kEdges || kRows == 1);
#pragma unroll
    for (int t = 0; t < kRounds; ++t) {
      const I owned = t == 0 || t * kEdges < count ? index[t] : index[0];
      const int last = max(count_of(t), 1) - 1;
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
        const I j = SubWarp::from_any_owner(place, owned, min(kRows == kEdges ? u : slot, last));
#pragma unroll
        for (int v = 0; v < kVecs; ++v) raw[t][u][v] = load_shared_row<R>(rows.row(v, j));
      }
    }
  }
};

// The original id of the edge that a lane owns, prefetched one batch ahead like the indices, so that dropout draws and
// per-edge loads wait neither for the id nor for rows in flight. Beyond a batch's end, the id of any edge.
template <class I>
struct IdAhead {
  I next = 0;

  __device__ __forceinline__ void begin(const CompressedGraph& graph, const Walk<I>& walk, int slot) {
    const int64_t last = graph.num_edges - 1;
    if (last >= 0) next = static_cast<I>(edge_id(graph, static_cast<I>(min(walk.edge + int64_t(slot), last))));
  }

  // Called after a batch; walk is at the beginning of the next one.
  __device__ __forceinline__ void advance(const CompressedGraph& graph, const Walk<I>& walk, int slot) {
    if (slot < walk.last_edge - walk.edge) next = static_cast<I>(edge_id(graph, walk.edge + slot));
  }
};

// Prefetches the rows of the next batch to L2, which needs no registers: one line of 128 bytes per lane. Profitable
// where rows have few edges and a sub-warp stalls at each row; elsewhere other warps hide the latency.
template <class I, int kLanes, int kVecs, int kEdges>
struct Ahead {
  static constexpr int kLines = kLanes * kVecs > 8 ? kLanes * kVecs / 8 : 1;  // per row
  const I* indices;
  int edge, shift;  // edge: its index in the batch, -1: none; shift: bytes from the lane's own vector to the line
  I index;          // -1: nothing to prefetch

  __device__ Ahead(const CompressedGraph& graph, int lane, int vectors, const Walk<I>& walk)
      : indices(held(static_cast<const I*>(graph.indices))),
        edge(held(lane / kLines < kEdges ? lane / kLines : -1)),
        shift(held((min(lane % kLines * 8, vectors - 1) - min(lane, vectors - 1)) * 16)) {
    advance(walk);
  }

  // walk is at the beginning of the next batch.
  __device__ __forceinline__ void advance(const Walk<I>& walk) {
    index = edge >= 0 && kEdges + edge < walk.last_edge - walk.edge ? __ldg(indices + (walk.edge + kEdges + edge)) : -1;
  }

  __device__ __forceinline__ void prefetch(const char* base, uint32_t stride) const {
    if (index >= 0) prefetch_l2(row_address(base, index, stride) + shift);
  }
};

struct NotAhead {
  template <class... T>
  __device__ explicit NotAhead(const T&...) {}
  template <class... T>
  __device__ void advance(const T&...) const {}
  template <class... T>
  __device__ void prefetch(const T&...) const {}
};

template <class R, int kRounds, int kRows, int kVecs>
__device__ __forceinline__ void clear_rows(R (&raw)[kRounds][kRows][kVecs]) {
#pragma unroll
  for (int t = 0; t < kRounds; ++t) {
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
#pragma unroll
      for (int v = 0; v < kVecs; ++v) raw[t][u][v] = R{};
    }
  }
}

// Softmax statistics of a destination, see Args::stats. kPairs: stored as pairs.
template <class Fn, class S>
struct Stat {
  using A = Arithmetic<S>;
  static constexpr bool kPairs = Fn::kAtt || sizeof(S) == 2;
  A shift, delta;

  __device__ __forceinline__ void store(const Args<A>& args, int64_t at) const {
    if (kPairs) {
      if (args.stats) args.stats[2 * at] = shift, args.stats[2 * at + 1] = delta;
    } else {
      if (args.delta) args.delta[at] = delta;
    }
  }
};

// A lane's pointers to the statistics of its head.
template <class Fn, class S>
struct StatPointer {
  using A = Arithmetic<S>;
  using Pair = std::conditional_t<sizeof(A) == 8, double2, float2>;
  static constexpr bool kPairs = Stat<Fn, S>::kPairs;
  const char *first, *second;  // first: pairs; without pairs, first: logsumexp, second: Delta
  uint32_t stride;

  __device__ StatPointer(const Args<A>& args, int head)
      : first(held(reinterpret_cast<const char*>(kPairs ? args.stats + 2 * head : args.logsumexp + head))),
        second(kPairs ? nullptr : held(reinterpret_cast<const char*>(args.delta + head))),
        stride(held(static_cast<uint32_t>(args.heads * sizeof(A) * (kPairs ? 2 : 1)))) {}

  template <class I>
  __device__ __forceinline__ Stat<Fn, S> load(I index) const {
    if constexpr (kPairs) {
      const Pair pair = __ldg(reinterpret_cast<const Pair*>(row_address(first, index, stride)));
      return {pair.x, pair.y};
    } else {
      return {__ldg(reinterpret_cast<const A*>(row_address(first, index, stride))) * A(kLog2e),
              __ldg(reinterpret_cast<const A*>(row_address(second, index, stride)))};
    }
  }
};

template <int kMode, class A>
__device__ __forceinline__ bool draws(const Args<A>& args) {
  return has_edge_term(kMode) ? args.has_dropout : kMode == kDropout || kMode == kOptions;
}

template <class A>
__device__ __forceinline__ bool dropout_keeps(const Args<A>& args, uint64_t seed, int64_t edge_id, int head) {
  const Philox4 drawn = philox(seed, static_cast<uint64_t>(edge_id), static_cast<uint32_t>(head) >> 2);
  return drawn.of(head) >= args.threshold;
}

// The dropout factor of one edge and head: 0 or 1 / (1 - p).
template <class A>
__device__ __forceinline__ A dropout_factor(const Args<A>& args, uint64_t seed, int64_t edge_id, int head) {
  return dropout_keeps(args, seed, edge_id, head) ? args.keep_scale : A(0);
}

// Values of the per-edge arrays for one edge. Logit terms exist for gat and the dot product, value terms for the dot
// product.
template <class Fn, class A, int kMode>
struct EdgeArrays {
  static constexpr bool kLogitTerm = has_arrays(kMode) && Fn::kOwnValue, kValueTerm = kLogitTerm && !Fn::kScalar;
  A scale = 1, logit_term = 0, value_term = 0;

  EdgeArrays() = default;
  __device__ __forceinline__ EdgeArrays(const Args<A>& args, int64_t id, int head, bool valid) {
    const int64_t at = id * args.heads + head;
    if (has_arrays(kMode) && args.scale && valid) scale = args.scale[id * args.scale_edge + head * args.scale_head];
    if (kLogitTerm && args.logit_term && valid)
      logit_term = __ldcs(args.logit_term + at) * (Fn::kScalar ? A(1) : A(kLog2e));
    if (kValueTerm && args.value_term && valid) value_term = __ldcs(args.value_term + at);
  }
};

// All options of an edge that a lane owns.
template <class Fn, class A, int kMode>
struct EdgeFactors : EdgeArrays<Fn, A, kMode> {
  int64_t at;  // index in [E, H] arrays
  A keep;      // the dropout factor: 0 or 1 / (1 - p)

  __device__ __forceinline__ EdgeFactors(const EdgeArrays<Fn, A, kMode>& arrays, const Args<A>& args, int64_t id,
                                         int head, A keep)
      : EdgeArrays<Fn, A, kMode>(arrays), at(id * args.heads + head), keep(keep) {}
};

// The options of the edges of a batch that a lane owns, one edge in each round (kRounds).
//
// With one round, ids are prefetched a batch ahead, and the loads and draws that depend on ids are issued together with
// the loads of the batch's rows.
//
// With several rounds, ids are loaded with the rows. A Philox draw serves four heads of an edge. So the lanes of
// neighbouring sub-warps that process the same edges, for two or four heads, draw for one edge each and vote, and each
// lane gets a bit per edge. (Votes that also cover later batches would need even fewer draws. But a draw that is not
// made in every batch waits for its edge's id, and so for all rows in flight.)
template <class Fn, class S, class SubWarp, class I, bool kForward, int kMode>
struct EdgeOptions {
  using A = Arithmetic<S>;
  using Arrays = EdgeArrays<Fn, A, kMode>;
  static constexpr int kRounds = SubWarp::kRounds;
  // Arrays are read before the draw, except where ptxas would then move a row's load behind the draw
  // (docs/decisions/0043).
  static constexpr bool kEarlyArrays = kRounds == 1 && (!kForward || !Fn::kOwnValue || (Fn::kScalar && sizeof(S) == 2));
  // With edge terms, ids are prefetched a batch ahead in any case.
  static constexpr int kAhead = has_edge_term(kMode) ? kRounds : 1;
  I ids[kRounds] = {};
  IdAhead<I> ahead[kAhead];
  // Used with one round.
  Arrays arrays;
  A keep = 1;  // the dropout factor: 0 or 1 / (1 - p)
  // Used with several rounds.
  int voters = 0;     // lanes that vote together; 0: each lane draws for its own edges
  I voted = 0;        // id of the edge that this lane votes on
  unsigned kept = 0;  // a bit for each edge of the batch

  template <class P>
  __device__ EdgeOptions(const Args<A>& args, const P& place, const Walk<I>& walk, int slot) {
#pragma unroll
    for (int t = 0; t < kAhead; ++t) ahead[t].begin(args.graph, walk, t * SubWarp::kEdges + slot);
    const int heads = args.heads | args.layout.heads_per_slice;
    const int together = (heads % 4 == 0 ? 4 : heads % 2 == 0 ? 2 : 1) * place.width();
    if (kRounds > 1 && draws<kMode>(args) && together >= SubWarp::kBatch) voters = together;
  }

  // Issues the loads of the batch's options and moves to the next batch. Called once the loads of the batch's rows are
  // issued.
  template <class W>
  __device__ __forceinline__ void prefetch(const Args<A>& args, W& window, Walk<I>& walk, int head) {
    if (kRounds > 1 && voters) {
      const int edge = threadIdx.x & (voters - 1);
      voted = edge < window.count ? static_cast<I>(edge_id(args.graph, walk.edge + edge)) : I(0);
    }
    if constexpr (kAhead == kRounds) {
#pragma unroll
      for (int t = 0; t < kRounds; ++t) ids[t] = ahead[t].next;
      if constexpr (kEarlyArrays) {
        arrays = Arrays(args, static_cast<int64_t>(ids[0]), head, window.slot < window.count);
      }
      if (has_edge_term(kMode) && args.proj) {
#pragma unroll
        for (int t = 0; t < kRounds; ++t) {
          prefetch_l2(args.edge_attr.base + static_cast<int64_t>(ids[t]) * args.edge_attr.row);
        }
      }
      window.advance(walk);
#pragma unroll
      for (int t = 0; t < kRounds; ++t) ahead[t].advance(args.graph, walk, t * SubWarp::kEdges + window.slot);
    } else {
      if (!voters || has_arrays(kMode)) window.load_ids(args.graph, walk, ids);
      window.advance(walk);
    }
  }

  // Called by whole warps.
  __device__ __forceinline__ void draw(const Args<A>& args, uint64_t seed, int head, int slot) {
    if (Fn::kScalar) __syncwarp();  // without it, ptxas moves the last row's load behind the draw, to its first use
    if (!draws<kMode>(args)) return;
    if constexpr (kRounds == 1) {
      keep = dropout_factor(args, seed, static_cast<int64_t>(ids[0]), head);
      return;
    }
    kept = 0;
    if (voters) {
      const Philox4 drawn = philox(seed, static_cast<uint64_t>(voted), static_cast<uint32_t>(head) >> 2);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const unsigned votes = __ballot_sync(kFullWarp, drawn.lane[k] >= args.threshold);
        if (k == (head & 3)) kept = votes;
      }
      kept >>= threadIdx.x % 32 & ~(voters - 1);
      return;
    }
#pragma unroll
    for (int t = 0; t < kRounds; ++t) {
      if (dropout_keeps(args, seed, static_cast<int64_t>(ids[t]), head)) kept |= 1u << (t * SubWarp::kEdges + slot);
    }
  }

  // The options of the edge that this lane owns in a round.
  __device__ __forceinline__ EdgeFactors<Fn, A, kMode> of(const Args<A>& args, int round, int slot, int head,
                                                          bool valid) const {
    const int64_t id = static_cast<int64_t>(ids[round]);
    if constexpr (kEarlyArrays) return {arrays, args, id, head, keep};
    if constexpr (kRounds == 1) return {Arrays(args, id, head, valid), args, id, head, keep};
    const bool drops = draws<kMode>(args), keeps = !drops || kept >> (round * SubWarp::kEdges + slot) & 1;
    return {Arrays(args, id, head, valid), args, id, head, !drops ? A(1) : keeps ? args.keep_scale : A(0)};
  }
};

}  // namespace edgeless::cuda
