// Backward, source pass: gradients of the gathered side, d k_j and d v_j or d x_l,j, over the CSC; gathers only, no
// atomics.
//
// A row is a source. Its sub-warp gathers the rows of dst and grad_out of its destinations, and the lanes that own an
// edge read the statistics of the edge's destination:  d v_j = sum w grad_out_i,  d k_j = sum ds d s / d k_j  with ds
// as in by_dst.cuh. Where the values are the keys, the two gradients are added at the end. See walk.cuh for the
// division of work.
#pragma once

#include "by_dst.cuh"

namespace edgeless::cuda {

// Shared memory for segments, like BackwardSegments. Where the values are the keys, a segment has one vector, the sum
// of both gradients.
template <class A, int kPer, bool kTwoVectors>
struct SourceSegments {
  A key[kTwoVectors ? kPer : 1][kTwoVectors ? kBlockThreads : 1];
  A value[kPer][kBlockThreads];
  A scalar[kMaxSubWarps];

  template <class P>
  __device__ __forceinline__ void leave(const P& place, const A (&keys)[kPer], const A (&values)[kPer], A sum) {
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
      value[k][threadIdx.x] = values[k];
      if constexpr (kTwoVectors) key[k][threadIdx.x] = keys[k];
    }
    if (place.lane == 0) scalar[place.sub_warp] = sum;
  }

  __device__ __forceinline__ void add_to(A (&keys)[kPer], A (&values)[kPer], A& sum, int sub_warp, int thread) const {
    sum += scalar[sub_warp];
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
      values[k] += value[k][thread];
      if constexpr (kTwoVectors) keys[k] += key[k][thread];
    }
  }
};

// Writes a row's gradients or, where other blocks hold parts of the row, its segment: first the part of the key, then
// that of the value. Where the values are the keys, there is one gradient, `values`. `sum` is gat's gradient of the
// row's scalar, or gatv2's sum of ds.
template <class Fn, class S, int kVecs, class A, class I, class P, int kPer>
__device__ __forceinline__ void emit_source(const Args<A>& args, const BlockShares<I>& shares, const P& place, I row,
                                            bool lead, bool complete, const A (&keys)[kPer], const A (&values)[kPer],
                                            A sum) {
  const bool partial = lead || !complete;
  A* carry = partial ? carry_at(args, shares, lead, place.head) : nullptr;
  if constexpr (Fn::kScalar) {
    if (place.lane == 0 && args.grad_src) {
      if (partial) {
        *carry = sum;
      } else {
        reinterpret_cast<A*>(args.grad_src.base)[static_cast<int64_t>(row) * args.heads + place.head] = sum;
      }
    }
    if (partial) carry += 1;
  } else if constexpr (!Fn::kOwnValue) {
    if (args.grad_src && partial) store_segment<S, kVecs>(carry, place, args.key_vectors, values);
    if (args.grad_src && !partial) store_row<S, kVecs>(args.grad_src, row, args.grad_src.heads, place, values);
  } else {
    A out[kPer];
#pragma unroll
    for (int k = 0; k < kPer; ++k) out[k] = Fn::finish(keys[k], sum, args.coefficient);
    if (args.grad_src && partial) store_segment<S, kVecs>(carry, place, args.key_vectors, out);
    if (args.grad_src && !partial) store_row<S, kVecs>(args.grad_src, row, args.grad_src.heads, place, out);
    if (partial) carry += args.key_vectors * kVec<S>;
  }
  if constexpr (Fn::kOwnValue) {
    if (args.grad_value && partial) store_segment<S, kVecs>(carry, place, args.value_vectors, values);
    if (args.grad_value && !partial) store_row<S, kVecs>(args.grad_value, row, args.grad_value.heads, place, values);
  }
}

template <class Fn, class S, class I, int kVecs, class SubWarp, int kMode, class Segments, class Shares>
__device__ __noinline__ void by_src_again(const Args<float>& args, BlockShares<I>& shares, Segments& segments,
                                          Shares& att_shares);

// kAgain: see walk_by_dst().
template <class Fn, class S, class I, int kVecs, class SubWarp, int kMode, bool kAgain, class Segments, class Shares>
__device__ __forceinline__ void walk_by_src(const Args<Arithmetic<S>>& args, BlockShares<I>& shares, Segments& segments,
                                            Shares& att_shares, bool& marked) {
  using A = Arithmetic<S>;
  constexpr int kV = kVec<S>, kPer = kVecs * kV, kBytes = sizeof(Raw<S>);
  constexpr int kEdges = SubWarp::kEdges, kRows = SubWarp::kRows, kRounds = SubWarp::kRounds;
  constexpr bool kKeys = !Fn::kScalar;

  const typename SubWarp::Place place(args.layout, args.heads);
  if constexpr (!kAgain) {
    if (kMakesExact<S> && threadIdx.x == 0) marked = false;
    divide_range(args.graph, args.part, place, shares);
  }
  Walk<I> walk(args.graph, place, shares);

  const Offsets<kVecs> key_offsets(place, args.key_vectors, kBytes), value_offsets(place, args.value_vectors, kBytes);
  const RowPointers<kVecs> own_rows(args.src, place.head, key_offsets);
  const RowPointers<kVecs> value_rows(args.value, place.head, value_offsets);
  RowPointers<kVecs> keys(args.dst, place.head, key_offsets), grads(args.grad_out, place.head, value_offsets);
  if constexpr (kKeys) keys.hold();
  grads.hold();
  const InverseNorms<A, Fn::kInverseNorms> norms(args, args.src_over_norm, args.dst_over_norm, place.head);
  const StatPointer<Fn, S> stats(args, place.head);
  const uint64_t seed = draws<kMode>(args) ? static_cast<uint64_t>(*args.seed) : 0;
  const bool has_grad = !has_arrays(kMode) || args.grad_out;

  A att[kPer], own[kPer], value[kPer], key_acc[kPer], value_acc[kPer];
  A own_scalar = 0;  // gat: the row's scalar; gatv2: the lane's part of <att, x> of the row
  A acc_scalar = 0;  // gatv2: sum of ds; gat: the gradient; the lane's part until the row ends
  A own_over = 0;    // 1 / norm of the row (inverse_norms.cuh)
  Raw<S> own_raw[kVecs], value_raw[kVecs];
  if constexpr (Fn::kAtt) load_att<S, kVecs>(args, place, att);
#pragma unroll
  for (int k = 0; k < kPer; ++k) {
    key_acc[k] = 0, value_acc[k] = 0, own[k] = 0;
    if constexpr (Fn::kAtt) att[k] *= A(kLog2e);
    if constexpr (Fn::kOwnValue) value[k] = 0;
  }
  if constexpr (Fn::kAtt) att_shares.clear();

  bool fresh = false;  // the source's rows were prefetched and are not unpacked yet
  auto begin_row = [&] {
    if constexpr (Fn::kScalar) {
      if (args.src) own_scalar = load_scalar<A>(args.src, walk.row, place.head);
    } else {
#pragma unroll
      for (int v = 0; v < kVecs; ++v) own_raw[v] = load_once<Raw<S>>(own_rows.row(v, walk.row));
      own_over = norms.own(walk.row);
    }
    if constexpr (Fn::kOwnValue) {
      if (has_grad) {
#pragma unroll
        for (int v = 0; v < kVecs; ++v) value_raw[v] = load_once<Raw<S>>(value_rows.row(v, walk.row));
      }
    }
    fresh = true;
    if (place.lane % 8 == 0 && walk.row + kRowsAhead < walk.last_row) {
      if constexpr (!Fn::kScalar) own_rows.prefetch(walk.row + kRowsAhead);
      if constexpr (Fn::kOwnValue) {
        if (has_grad) value_rows.prefetch(walk.row + kRowsAhead);
      }
    }
  };
  auto take_row = [&] {
    if constexpr (!Fn::kScalar) {
      unpack_row<S, kVecs>(own_raw, place, args.key_vectors, own, [&](A x) { return Fn::own(x); });
    }
    if constexpr (Fn::kAtt) {
      own_scalar = 0;
#pragma unroll
      for (int k = 0; k < kPer; ++k) own_scalar = fma(att[k], Fn::raw(own[k]), own_scalar);
    }
    if constexpr (Fn::kOwnValue) {
      if (has_grad) unpack_row<S, kVecs>(value_raw, place, args.value_vectors, value, [](A x) { return x; });
    }
    fresh = false;
  };

  // Where the values are the keys, adds the key's gradient to value_acc.
  auto join = [&] {
    if constexpr (Fn::kAtt) {
#pragma unroll
      for (int k = 0; k < kPer; ++k) {
        value_acc[k] = fma(Fn::finish(key_acc[k], acc_scalar, args.coefficient), att[k] * A(kLn2), value_acc[k]);
      }
    }
    if constexpr (Fn::kInverseNorms) {
      norms.close(key_acc, own, own_over, place);
#pragma unroll
      for (int k = 0; k < kPer; ++k) value_acc[k] += key_acc[k];
    }
  };

  auto sum_edges = [&] {
    if constexpr (Fn::kScalar || Fn::kAtt) acc_scalar = SubWarp::batch_sum(place, acc_scalar);
    if constexpr (kKeys) SubWarp::sum_lanes(key_acc, place.mask());
    SubWarp::sum_lanes(value_acc, place.mask());
  };
  auto close_row = [&] {
    if constexpr (!kAgain) {
      sum_edges();
      if (kMakesExact<S> && isnan(Fn::kScalar || Fn::kAtt ? acc_scalar : key_acc[0])) marked = true;
    }
    if constexpr (Fn::kAtt) att_shares.template add<Fn>(own, key_acc, acc_scalar, args.coefficient);
    join();
  };
  auto clear = [&] {
    acc_scalar = 0, own_over = 0;
#pragma unroll
    for (int k = 0; k < kPer; ++k) key_acc[k] = 0, value_acc[k] = 0;
  };
  auto leave = [&] { segments.leave(place, key_acc, value_acc, acc_scalar); };
  auto add = [&](int sub_warp, int thread) { segments.add_to(key_acc, value_acc, acc_scalar, sub_warp, thread); };
  auto emit = [&](I row, bool lead, bool complete) {
    emit_source<Fn, S, kVecs>(args, shares, place, row, lead, complete, key_acc, value_acc, acc_scalar);
  };

  EdgeWindow<I, SubWarp> window(args.graph, walk, place);
  EdgeOptions<Fn, S, SubWarp, I, false, kMode> options(args, place, walk, window.slot);
  auto take = [&] {  // called by whole warps
    window.begin(walk);
    Raw<S> key_raw[kRounds][kRows][kVecs], grad_raw[kRounds][kRows][kVecs];
    if constexpr (kKeys) window.load(keys, key_raw);
    if (has_grad) {
      window.load(grads, grad_raw);
    } else {
      clear_rows(grad_raw);
    }
    Stat<Fn, S> stat[kRounds];
    A target_scalar[kRounds], other_over[kRounds];
#pragma unroll
    for (int t = 0; t < kRounds; ++t) {
      stat[t] = stats.load(window.index[t]);
      other_over[t] = norms.other(window.index[t]);
      target_scalar[t] = !kKeys && args.dst ? load_scalar<A>(args.dst, window.index[t], place.head) : A(0);
    }
    if constexpr (kMode > kPlain) {
      options.prefetch(args, window, walk, place.head);
    } else {
      window.advance(walk);
    }
    if constexpr (kMode > kPlain) options.draw(args, seed, place.head, window.slot);
    if (fresh) take_row();
    if constexpr (has_edge_term(kMode)) EdgeTerms<S, I, SubWarp, kVecs, kMode>::make(args, options.ids);

#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int n = window.count_of(round);
      const bool valid = window.slot < n;

      // logits and dP
      A s, dp;
      A termed[has_edge_term(kMode) ? kRows : 1][kPer];  // keys with the edge term
      if constexpr (has_edge_term(kMode)) {
        EdgeTerms<S, I, SubWarp, kVecs, kMode>::add(args, place, options.ids, round, n, key_raw[round], termed);
      }
      {
        A logit[kRows], product[kRows];
#pragma unroll
        for (int u = 0; u < kRows; ++u) {
          product[u] = 0;
          A other[kPer];
          unpack_all<S, kVecs>(grad_raw[round][u], other);
#pragma unroll
          for (int k = 0; k < kPer; ++k) {
            if constexpr (Fn::kOwnValue) {
              product[u] = fma(other[k], value[k], product[u]);
            } else {
              product[u] = fma(other[k], Fn::raw(own[k]), product[u]);
            }
          }
          if constexpr (!Fn::kScalar) {
            unpack_all<S, kVecs>(key_raw[round][u], other);
            if constexpr (has_edge_term(kMode)) {
#pragma unroll
              for (int k = 0; k < kPer; ++k) other[k] = termed[u][k];
            }
            typename Fn::template Partial<A, has_edge_term(kMode)> sum(own_scalar);
#pragma unroll
            for (int k = 0; k < kPer; ++k) sum.add(own[k], other[k], att[k]);
            logit[u] = sum.sum(args.coefficient);
          }
        }
        if constexpr (Fn::kScalar) {
          s = own_scalar + target_scalar[round];
        } else {
          const A sum = SubWarp::sum_of_own_edge(place, logit);
          s = norms.logit(Fn::scaled(sum, args.base_two_coefficient), own_over, other_over[round]);
        }
        dp = SubWarp::sum_of_own_edge(place, product);
      }
      A derivative = 1, factor = 1;
      if constexpr (kMode > kPlain) {
        const auto edge = options.of(args, round, window.slot, place.head, valid);
        s += edge.logit_term;
        dp += edge.value_term;
        factor = edge.keep * edge.scale;
        dp *= factor;
        if (has_arrays(kMode) && args.grad_weights && valid) dp += edge.keep * args.grad_weights[edge.at];
      }
      if constexpr (Fn::kScalar) {
        derivative = GatScore::derivative(s, args.coefficient);
        s = GatScore::leaky(s, args.coefficient) * A(kLog2e);
      }
      const A p = valid ? power_of_two(s - stat[round].shift) : A(0);
      const A weight = p * factor, ds = valid ? p * (dp - stat[round].delta) : A(0);

      A w[kRows], d[kRows];
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
        w[u] = SubWarp::from_owner(place, weight, u);
        if constexpr (!Fn::kScalar) d[u] = SubWarp::from_owner(place, norms.of_edge(ds, other_over[round], valid), u);
      }
      if constexpr (Fn::kScalar) acc_scalar = fma(ds, derivative, acc_scalar);
      if constexpr (Fn::kAtt) acc_scalar += ds;
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
#pragma unroll
        for (int v = 0; v < kVecs; ++v) {
          A g[kV], x[kV];
          unpack_again<S, kScarce<Fn, SubWarp>>(grad_raw[round][u][v], g);
          if constexpr (!Fn::kScalar && !has_edge_term(kMode)) {
            unpack_again<S, kScarce<Fn, SubWarp>>(key_raw[round][u][v], x);
          }
#pragma unroll
          for (int k = 0; k < kV; ++k) {
            value_acc[v * kV + k] = fma(w[u], g[k], value_acc[v * kV + k]);
            if constexpr (has_edge_term(kMode)) x[k] = termed[u][v * kV + k];
            if constexpr (!Fn::kScalar) Fn::grad(key_acc[v * kV + k], own[v * kV + k], x[k], d[u]);
          }
        }
      }
    }
  };

  if constexpr (kAgain) {
    auto make = [&] {
      if constexpr (kKeys) {
#pragma unroll
        for (int v = 0; v < kVecs; ++v) own_raw[v] = load_once<Raw<S>>(own_rows.row(v, walk.row));
        unpack_row<S, kVecs>(own_raw, place, args.key_vectors, own, [&](A x) { return Fn::own(x); });
        own_over = norms.own(walk.row);
      }
      A of_keys[kPer], of_values[kPer];
      const RowOfSubWarp<I> row{walk.row, walk.edge, walk.row_end, false, kPer};
      acc_scalar = exact_by_src<Fn>(args, SubWarpOfHead(place), row, of_keys, of_values);
#pragma unroll
      for (int k = 0; k < kPer; ++k) key_acc[k] = of_keys[k], value_acc[k] = of_values[k];
    };
    walk_again(walk, place, shares, make, close_row, clear, leave, add, emit);
  } else if constexpr (kMakesExact<S>) {
    bool done = false;
    if (!args.some_large || !*args.some_large) {
      auto failed = [&] { return marked && !args.some_large; };  // with some_large, a NaN here is the user's
      done = walk_rows(walk, place, shares, window, begin_row, take, close_row, clear, leave, add, emit, failed);
    }
    if (!done) return by_src_again<Fn, S, I, kVecs, SubWarp, kMode>(args, shares, segments, att_shares);
  } else {
    walk_rows(walk, place, shares, window, begin_row, take, close_row, clear, leave, add, emit);
  }
  if constexpr (Fn::kAtt) {
    if (args.grad_att) att_shares.template store<S, kVecs>(args, place);
  }
}

template <class Fn, class S, class I, int kVecs, class SubWarp, int kMode, class Segments, class Shares>
__device__ __noinline__ void by_src_again(const Args<float>& args, BlockShares<I>& shares, Segments& segments,
                                          Shares& att_shares) {
  bool marked;
  walk_by_src<Fn, S, I, kVecs, SubWarp, kMode, true>(args, shares, segments, att_shares, marked);
}

template <class Fn, class S, class I, int kVecs, class SubWarp, int kMode>
__global__ void __launch_bounds__(kBlockThreads, min_blocks<Fn, S, I, SubWarp>(Pass::by_src, kMode, kVecs))
    by_src_kernel(const __grid_constant__ Args<Arithmetic<S>> args) {
  using A = Arithmetic<S>;
  constexpr int kPer = kVecs * kVec<S>;
  __shared__ BlockShares<I> shares;
  __shared__ SourceSegments<A, kPer, Fn::kOwnValue && !Fn::kScalar> segments;
  __shared__ std::conditional_t<Fn::kAtt, AttShares<A, kPer>, NoShares> att_shares;
  __shared__ bool marked;  // some row has a destination with large logits (exact.cuh) or a NaN from the inputs
  walk_by_src<Fn, S, I, kVecs, SubWarp, kMode, false>(args, shares, segments, att_shares, marked);
}

}  // namespace edgeless::cuda
