// Forward: out_i = sum_j softmax_j(s_ij) v_j, with online softmax.
//
// A sub-warp owns a row of one head and processes its edges in batches. All rows of a batch are loaded at once;
// occupancy hides their latency, so registers are the scarce resource. Logits are reduced to the lanes that own the
// edges; one maximum and one rescaling serve the whole batch. The softmax is in base 2: the maximum m, the sum l of
// 2^(s - m) and the sum acc of 2^(s - m) v. See walk.cuh for the division of work, scores.cuh for s.
#pragma once

#include <limits>

#include "edge_data.cuh"
#include "edge_term.cuh"
#include "inverse_norms.cuh"
#include "scores.cuh"

namespace edgeless::cuda {

// The initial maximum. It is finite, so that a logit of -infinity, as masks produce, has weight 0 even before the first
// finite logit.
template <class A>
constexpr A kLowest = -std::numeric_limits<A>::max();

// Shared memory for the segment of a row that an earlier worker merges. kNatural: logits are in base e.
template <class A, int kPer, bool kNatural = false>
struct ForwardSegments {
  A acc[kPer][kBlockThreads];
  A m[kMaxSubWarps], l[kMaxSubWarps];

  template <class P>
  __device__ __forceinline__ void leave(const P& place, const A (&sum)[kPer], A top, A total) {
#pragma unroll
    for (int k = 0; k < kPer; ++k) acc[k][threadIdx.x] = sum[k];
    if (place.lane == 0) m[place.sub_warp] = top, l[place.sub_warp] = total;
  }

  // Adds the segment that sub-warp `sub_warp` left; `thread` left the values of this lane.
  __device__ __forceinline__ void add_to(A (&sum)[kPer], A& top, A& total, int sub_warp, int thread) const {
    const A greater = max(top, m[sub_warp]);
    const A unit = kNatural ? A(kLog2e) : A(1);
    const A mine = greater > top ? power_of_two((top - greater) * unit) : A(1);
    const A theirs = power_of_two((m[sub_warp] - greater) * unit);
    top = greater;
    total = total * mine + l[sub_warp] * theirs;
#pragma unroll
    for (int k = 0; k < kPer; ++k) sum[k] = sum[k] * mine + acc[k][thread] * theirs;
  }
};

// Writes a row or, where other blocks hold parts of it, its segment. m, l: see the head of the file.
template <class S, int kVecs, class A, class I, class P, int kPer>
__device__ __forceinline__ void emit_forward(const Args<A>& args, const BlockShares<I>& shares, const P& place, I row,
                                             bool lead, bool complete, const A (&acc)[kPer], A m, A l) {
  if (lead || !complete) {
    A* segment = carry_at(args, shares, lead, place.head);
    store_segment<S, kVecs>(segment, place, args.value_vectors, acc);
    if (place.lane == 0) segment[args.value_vectors * kVec<S>] = m, segment[args.value_vectors * kVec<S> + 1] = l;
    return;
  }
  A out[kPer];
  A inverse = l != 0 ? reciprocal(l) : A(0);
  if (l == 0) {  // no edges, or only logits of -infinity, for which PyTorch's softmax gives NaN
    const I* indptr = static_cast<const I*>(args.graph.indptr);
    if (indptr[row] != indptr[row + 1]) inverse = A(NAN);
  }
#pragma unroll
  for (int k = 0; k < kPer; ++k) out[k] = acc[k] * inverse;
  store_row<S, kVecs>(args.out, row, args.heads, place, out);
  if (place.lane == 0 && args.logsumexp) {
    args.logsumexp[static_cast<int64_t>(row) * args.heads + place.head] = (m + log_base_two(l)) * A(kLn2);
  }
}

// kSettle of walk_rows(). The dot product's forward reads only the query of its row, so it has little to wait for and
// is a few percent slower if it settles (docs/decisions/0035).
template <class Fn>
constexpr bool settles_forward = Fn::kScore != Score::dot;

template <class Fn, class S, class I, int kVecs, class SubWarp, int kMode>
__global__ void __launch_bounds__(kBlockThreads, min_blocks<Fn, S, I, SubWarp>(Pass::forward, kMode, kVecs))
    forward_kernel(const __grid_constant__ Args<Arithmetic<S>> args) {
  using A = Arithmetic<S>;
  constexpr int kV = kVec<S>, kPer = kVecs * kV, kBytes = sizeof(Raw<S>);
  constexpr int kEdges = SubWarp::kEdges, kRows = SubWarp::kRows, kRounds = SubWarp::kRounds;
  constexpr bool kKeys = !Fn::kScalar, kValues = Fn::kOwnValue;
  // gat unpacks its values only once. In batches of eight, bfloat16 is faster with the second conversion of
  // unpack_again() (0054).
  constexpr bool kOther = Fn::kScalar && kEdges > 4 && std::is_same_v<S, __nv_bfloat16>;
  __shared__ BlockShares<I> shares;
  __shared__ ForwardSegments<A, kPer> segments;

  const typename SubWarp::Place place(args.layout, args.heads);
  divide_range(args.graph, args.part, place, shares);
  Walk<I> walk(args.graph, place, shares);

  const Offsets<kVecs> key_offsets(place, args.key_vectors, kBytes), value_offsets(place, args.value_vectors, kBytes);
  const RowPointers<kVecs> own_rows(args.dst, place.head, key_offsets);
  RowPointers<kVecs> keys(args.src, place.head, key_offsets);
  RowPointers<kVecs> values(kValues ? args.value : args.src, place.head, value_offsets);
  if constexpr (kKeys) keys.hold();
  if constexpr (kValues) values.hold();
  const InverseNorms<A, Fn::kInverseNorms> norms(args, args.dst_over_norm, args.src_over_norm, place.head);
  const uint64_t seed = draws<kMode>(args) ? static_cast<uint64_t>(*args.seed) : 0;

  A att[kPer], own[kPer], acc[kPer];
  A m = kLowest<A>, l = 0;              // l: the lane's part until the row ends
  A own_scalar = 0;                     // gat: the row's scalar; gatv2: the lane's part of <att, x> of the row
  A own_over = 0, prefetched_over = 0;  // 1 / norm of the current row and of the row in flight (inverse_norms.cuh)
  Raw<S> own_raw[kVecs];
  if constexpr (Fn::kAtt) load_att<S, kVecs>(args, place, att);
#pragma unroll
  for (int k = 0; k < kPer; ++k) {
    acc[k] = 0, own[k] = 0;
    if constexpr (Fn::kAtt) att[k] *= A(kLog2e);
  }

  // The destination's row is loaded one row ahead.
  I prefetched_row = walk.row;
  auto prefetch_row = [&](I row) {
    prefetched_row = row;
    if constexpr (kKeys) {
#pragma unroll
      for (int v = 0; v < kVecs; ++v) own_raw[v] = load_once<Raw<S>>(own_rows.row(v, row));
      prefetched_over = norms.own(row);
    }
  };
  bool fresh = false;  // the destination's row was prefetched and is not unpacked yet
  auto begin_row = [&] {
    if constexpr (kKeys) {
      if (prefetched_row != walk.row) prefetch_row(walk.row);
    } else if (args.dst) {
      own_scalar = load_scalar<A>(args.dst, walk.row, place.head);
    }
    fresh = kKeys;
  };
  auto take_row = [&] {
    if constexpr (kKeys) {
      unpack_row<S, kVecs>(own_raw, place, args.key_vectors, own, [&](A x) { return Fn::own(x); });
      own_over = prefetched_over;
      if (walk.row < walk.last_row && walk.row + 1 < args.graph.num_rows) prefetch_row(walk.row + 1);
    }
    if constexpr (Fn::kAtt) {
      own_scalar = 0;
#pragma unroll
      for (int k = 0; k < kPer; ++k) own_scalar = fma(att[k], Fn::raw(own[k]), own_scalar);
    }
    fresh = false;
  };

  auto close_row = [&] {
    l = has_arrays(kMode) && args.given ? A(1) : SubWarp::batch_sum(place, l);
    if (has_arrays(kMode) && args.given) m = 0;
    SubWarp::sum_lanes(acc, place.mask());
  };
  auto clear = [&] {
    m = kLowest<A>, l = 0;
#pragma unroll
    for (int k = 0; k < kPer; ++k) acc[k] = 0;
  };
  auto leave = [&] { segments.leave(place, acc, m, l); };
  auto add = [&](int sub_warp, int thread) {
    segments.add_to(acc, m, l, sub_warp, thread);
    if (has_arrays(kMode) && args.given) l = 1;
  };
  auto emit = [&](I row, bool lead, bool complete) {
    emit_forward<S, kVecs>(args, shares, place, row, lead, complete, acc, m, l);
  };

  if (walk.pending) prefetch_row(walk.row);
  EdgeWindow<I, SubWarp> window(args.graph, walk, place);
  EdgeOptions<Fn, S, SubWarp, I, true, kMode> options(args, place, walk, window.slot);
  constexpr bool kAhead = Fn::kAtt && kMode == kPlain && SubWarp::kBatch <= 4 && SubWarp::kWidth > 4 && kBytes == 16;
  std::conditional_t<kAhead, Ahead<I, SubWarp::kWidth, kVecs, kEdges>, NotAhead> ahead(args.graph, place.lane,
                                                                                       args.key_vectors, walk);
  auto take = [&] {  // called by whole warps
    window.begin(walk);
    Raw<S> key_raw[kRounds][kRows][kVecs], value_raw[kRounds][kRows][kVecs];
    if constexpr (kKeys) window.load(keys, key_raw);
    if constexpr (kValues) window.load(values, value_raw);
    A source_scalar[kRounds], other_over[kRounds];
#pragma unroll
    for (int t = 0; t < kRounds; ++t) {
      source_scalar[t] = !kKeys && args.src ? load_scalar<A>(args.src, window.index[t], place.head) : A(0);
      other_over[t] = norms.other(window.index[t]);
    }
    ahead.prefetch(keys.at[0], keys.stride);
    if constexpr (kMode > kPlain) {
      options.prefetch(args, window, walk, place.head);
    } else {
      window.advance(walk);
    }
    ahead.advance(walk);
    if constexpr (kMode > kPlain) options.draw(args, seed, place.head, window.slot);
    if (kKeys && fresh) take_row();
    if constexpr (has_edge_term(kMode)) EdgeTerms<S, I, SubWarp, kVecs, kMode>::make(args, options.ids);

#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int n = window.count_of(round);
      const bool valid = window.slot < n;

      // logits
      A s;
      if constexpr (kKeys) {
        A partial[kRows];
        A termed[has_edge_term(kMode) ? kRows : 1][kPer];  // keys with the edge term
        if constexpr (has_edge_term(kMode)) {
          EdgeTerms<S, I, SubWarp, kVecs, kMode>::add(args, place, options.ids, round, n, key_raw[round], termed);
        }
#pragma unroll
        for (int u = 0; u < kRows; ++u) {
          A other[kPer];
          unpack_all<S, kVecs>(key_raw[round][u], other);
          if constexpr (has_edge_term(kMode)) {
#pragma unroll
            for (int k = 0; k < kPer; ++k) other[k] = termed[u][k];
          }
          typename Fn::template Partial<A, true> sum(own_scalar);
#pragma unroll
          for (int k = 0; k < kPer; ++k) sum.add(own[k], other[k], att[k]);
          partial[u] = sum.sum(args.coefficient);
        }
        const A sum = SubWarp::sum_of_own_edge(place, partial);
        s = norms.logit(Fn::scaled(sum, args.base_two_coefficient), own_over, other_over[round]);
      } else {
        s = own_scalar + source_scalar[round];
      }
      A factor = 1;
      if constexpr (kMode > kPlain) {
        const auto edge = options.of(args, round, window.slot, place.head, valid);
        factor = edge.keep * edge.scale;
        s += edge.logit_term;
        if constexpr (Fn::kScalar) s = GatScore::leaky(s, args.coefficient) * A(kLog2e);
        // logits_out may alias logit_term: the barrier lets the other lanes that own this edge read their term first.
        if (has_arrays(kMode) && args.logits_out) {
          __syncwarp();
          if (valid) args.logits_out[edge.at] = s * A(kLn2);
        }
        if (has_arrays(kMode) && args.given) factor = valid ? args.given[edge.at] : A(0), s = 0;
      } else if constexpr (Fn::kScalar) {
        s = GatScore::leaky(s, args.coefficient) * A(kLog2e);
      }
      if (!valid) s = -INFINITY;

      // Softmax. An idle sub-warp continues with an edge of its last row and weight 0.
      if (__any_sync(kFullWarp, s > m)) {
        const A top = max(m, SubWarp::batch_max(place, s));
        const A shrink = top > m ? power_of_two(m - top) : A(1);
        m = top;
        l *= shrink;
#pragma unroll
        for (int k = 0; k < kPer; ++k) acc[k] *= shrink;
      }
      const A p = power_of_two(s - m);
      l += p;
      A w[kRows];
#pragma unroll
      for (int u = 0; u < kRows; ++u) w[u] = SubWarp::from_owner(place, kMode > kPlain ? p * factor : p, u);
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
#pragma unroll
        for (int v = 0; v < kVecs; ++v) {
          A x[kV];
          unpack_again<S, kOther>(kValues ? value_raw[round][u][v] : key_raw[round][u][v], x);
#pragma unroll
          for (int k = 0; k < kV; ++k) acc[v * kV + k] = fma(w[u], x[k], acc[v * kV + k]);
        }
      }
    }
  };

  walk_rows<settles_forward<Fn>>(walk, place, shares, window, begin_row, take, close_row, clear, leave, add, emit);
}

}  // namespace edgeless::cuda
