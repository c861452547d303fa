// Backward, destination pass: gradients of the query side, d q_i or d x_r,i; gathers only, no atomics.
//
//   P = 2^(s - logsumexp)   dP = <grad_out_i, v_j>   Delta_i = <out_i, grad_out_i>   ds = P (dP - Delta_i)
//
// The row's statistics are written for the source pass (Args::stats). With options, dP carries the edge's dropout and
// scale, and per-edge outputs are written by the lane that owns the edge. With only weights_out, this is the pass that
// returns the attention weights. See walk.cuh for the division of work.
#pragma once

#include "by_dst_shares.cuh"
#include "edge_data.cuh"
#include "edge_term.cuh"
#include "exact.cuh"
#include "inverse_norms.cuh"
#include "scores.cuh"

namespace edgeless::cuda {

template <class Fn, class S, class I, int kVecs, class SubWarp, int kMode, class Segments, class Shares>
__device__ __noinline__ void by_dst_again(const Args<float>& args, BlockShares<I>& shares, Segments& segments,
                                          Shares& att_shares);

// kAgain: repeats the block's range after walk_rows() has failed. This case is instantiated in a noinline function,
// since values that live across its calls would take registers from the loop of walk_rows().
template <class Fn, class S, class I, int kVecs, class SubWarp, int kMode, bool kAgain, class Segments, class Shares>
__device__ __forceinline__ void walk_by_dst(const Args<Arithmetic<S>>& args, BlockShares<I>& shares, Segments& segments,
                                            Shares& att_shares, bool& large) {
  using A = Arithmetic<S>;
  constexpr int kV = kVec<S>, kPer = kVecs * kV, kBytes = sizeof(Raw<S>);
  constexpr int kEdges = SubWarp::kEdges, kRows = SubWarp::kRows, kRounds = SubWarp::kRounds;
  constexpr bool kKeys = !Fn::kScalar, kValues = Fn::kOwnValue, kSumsDs = Fn::kAtt || Fn::kInverseNorms;

  const typename SubWarp::Place place(args.layout, args.heads);
  if constexpr (!kAgain) {
    if (kMakesExact<S> && threadIdx.x == 0) large = false;
    divide_range(args.graph, args.part, place, shares);
  }
  Walk<I> walk(args.graph, place, shares);

  const Offsets<kVecs> key_offsets(place, args.key_vectors, kBytes), value_offsets(place, args.value_vectors, kBytes);
  // Row pointers, recomputed for every row where they would spill: GATv2's kernels of four edges have no registers
  // left.
  const auto rows_of = [&](const Rows& rows, Offsets<kVecs> offsets) {
    if constexpr (Fn::kAtt && kMakesExact<S> && kVecs == 1 && SubWarp::kBatch == 4) offsets.at[0] = held(offsets.at[0]);
    return RowPointers<kVecs>(rows, place.head, offsets);
  };
  RowPointers<kVecs> keys(args.src, place.head, key_offsets);
  RowPointers<kVecs> values(kValues ? args.value : args.src, place.head, value_offsets);
  if constexpr (kKeys) keys.hold();
  if constexpr (kValues) values.hold();
  const InverseNorms<A, Fn::kInverseNorms> norms(args, args.dst_over_norm, args.src_over_norm, place.head);
  const uint64_t seed = draws<kMode>(args) ? static_cast<uint64_t>(*args.seed) : 0;
  const bool has_grad = !has_arrays(kMode) || args.grad_out;

  A att[kPer], own[kPer], grad[kPer], acc[kPer];
  A own_scalar = 0;        // gat: the row's scalar; gatv2: the lane's part of <att, x> of the row
  A acc_scalar = 0;        // gatv2, cosine: sum of ds; gat: the gradient; the lane's part until the row ends
  A shift = 0, delta = 0;  // the row's shift, with P = 2^(s - shift) for the s computed here, and its Delta
  A own_over = 0;          // 1 / norm of the row (inverse_norms.cuh)
  Raw<S> own_raw[kVecs], grad_raw[kVecs], out_raw[kVecs];
  if constexpr (Fn::kAtt) load_att<S, kVecs>(args, place, att);
#pragma unroll
  for (int k = 0; k < kPer; ++k) {
    acc[k] = 0, grad[k] = 0, own[k] = 0;
    if constexpr (Fn::kAtt) att[k] *= A(kLog2e);
  }
  if constexpr (Fn::kAtt) att_shares.clear();
  if constexpr (Fn::kInverseNorms) att_shares.clear(place);

  bool fresh = false;  // the destination's rows were prefetched and are not unpacked yet
  auto begin_row = [&] {
    const int64_t at = static_cast<int64_t>(walk.row) * args.heads + place.head;
    const auto own_rows = rows_of(args.dst, key_offsets);
    const auto grad_rows = rows_of(args.grad_out, value_offsets), out_rows = rows_of(args.saved_out, value_offsets);
    shift = args.logsumexp[at];
    if constexpr (Fn::kScalar) {
      if (args.dst) own_scalar = load_scalar<A>(args.dst, walk.row, place.head);
    } else {
#pragma unroll
      for (int v = 0; v < kVecs; ++v) own_raw[v] = load_once<Raw<S>>(own_rows.row(v, walk.row));
      own_over = norms.own(walk.row);
    }
    if (has_grad) {
#pragma unroll
      for (int v = 0; v < kVecs; ++v) grad_raw[v] = load_once<Raw<S>>(grad_rows.row(v, walk.row));
      if (!args.delta_given) {
#pragma unroll
        for (int v = 0; v < kVecs; ++v) out_raw[v] = load_once<Raw<S>>(out_rows.row(v, walk.row));
      }
    }
    fresh = true;
  };
  // Called by whole warps; sub-warps whose row is not fresh only participate in the shuffles.
  auto take_rows = [&] {
    A dot = 0;
    if (fresh) {
      if constexpr (kKeys) {
        unpack_row<S, kVecs>(own_raw, place, args.key_vectors, own, [&](A x) { return Fn::own(x); });
      }
      if constexpr (Fn::kAtt) {
        own_scalar = 0;
#pragma unroll
        for (int k = 0; k < kPer; ++k) own_scalar = fma(att[k], Fn::raw(own[k]), own_scalar);
      }
      if (has_grad) {
        unpack_row<S, kVecs>(grad_raw, place, args.value_vectors, grad, [](A x) { return x; });
#pragma unroll
        for (int v = 0; v < kVecs && !args.delta_given; ++v) {
          A out[kV];
          unpack(out_raw[v], out, S{});
#pragma unroll
          for (int k = 0; k < kV; ++k) dot = fma(grad[v * kV + k], out[k], dot);
        }
      }
    }
    dot = place.sum_of_row(dot, kFullWarp);
    A constant = 0;
    if constexpr (Fn::kAtt && (!has_edge_term(kMode) || kMakesExact<S>)) {
      constant = place.sum_of_row(own_scalar, kFullWarp);
    }
    if (fresh) {
      const int64_t at = static_cast<int64_t>(walk.row) * args.heads + place.head;
      delta = args.delta_given ? args.delta_given[at] : dot;
      shift *= A(kLog2e);
      Stat<Fn, S> stat{!has_edge_term(kMode) ? shift - args.coefficient * constant : shift, delta};
      if constexpr (kMakesExact<S>) {
        const bool found = is_large(max(fabs(shift), fabs(constant)));
        stat.delta = found ? A(NAN) : delta;
        if (Stat<Fn, S>::kPairs) stat.shift = found ? A(NAN) : stat.shift;
        if (found) large = true;
      }
      if (place.lane == 0 && !walk.lead) stat.store(args, at);
      fresh = false;
    }
  };

  // Writes a row's gradient or, where other blocks hold parts of the row, its segment.
  auto emit = [&](I row, bool lead, bool complete) {
    const bool partial = lead || !complete;
    if constexpr (Fn::kInverseNorms) {
      if (args.grad_dst || args.grad_att) {
        const A share = norms.close(acc, own, own_over, place);
        if (args.grad_att) att_shares.add(place, share - norms.center(args.graph, row, shift, acc_scalar));
      }
    }
    if constexpr (kKeys) {
      if (!args.grad_dst) return;
      A out[kPer];
#pragma unroll
      for (int k = 0; k < kPer; ++k) {
        out[k] = Fn::finish(acc[k], acc_scalar, args.coefficient);
        if constexpr (Fn::kAtt) out[k] *= att[k] * A(kLn2);
      }
      if (partial) {
        store_segment<S, kVecs>(carry_at(args, shares, lead, place.head), place, args.key_vectors, out);
      } else {
        store_row<S, kVecs>(args.grad_dst, row, args.grad_dst.heads, place, out);
      }
    } else if (place.lane == 0 && args.grad_dst) {
      if (partial) {
        *carry_at(args, shares, lead, place.head) = acc_scalar;
      } else {
        reinterpret_cast<A*>(args.grad_dst.base)[static_cast<int64_t>(row) * args.heads + place.head] = acc_scalar;
      }
    }
  };

  auto sum_edges = [&] {
    if constexpr (Fn::kScalar || kSumsDs) acc_scalar = SubWarp::batch_sum(place, acc_scalar);
    if constexpr (kKeys) SubWarp::sum_lanes(acc, place.mask());
  };
  auto close_row = [&] {
    if constexpr (!kAgain) sum_edges();
    if constexpr (Fn::kAtt) att_shares.template add<Fn>(own, acc, acc_scalar, args.coefficient);
  };
  auto clear = [&] {
    acc_scalar = 0, own_over = 0;
#pragma unroll
    for (int k = 0; k < kPer; ++k) acc[k] = 0;
  };
  auto leave = [&] { segments.leave(place, acc, acc_scalar); };
  auto add = [&](int sub_warp, int thread) { segments.add_to(acc, acc_scalar, sub_warp, thread); };

  EdgeWindow<I, SubWarp> window(args.graph, walk, place);
  EdgeOptions<Fn, S, SubWarp, I, false, kMode> options(args, place, walk, window.slot);
  constexpr bool kAhead = Fn::kAtt && kMode == kPlain && SubWarp::kBatch <= 4 && SubWarp::kWidth > 4 && kBytes == 16;
  std::conditional_t<kAhead, Ahead<I, SubWarp::kWidth, kVecs, kEdges>, NotAhead> ahead(args.graph, place.lane,
                                                                                       args.key_vectors, walk);
  auto take = [&] {  // called by whole warps
    window.begin(walk);
    Raw<S> key_raw[kRounds][kRows][kVecs], value_raw[kRounds][kRows][kVecs];
    if constexpr (kKeys) window.load(keys, key_raw);
    if constexpr (kValues) {
      if (has_grad) {
        window.load(values, value_raw);
      } else {
        clear_rows(value_raw);
      }
    }
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
    if (__any_sync(kFullWarp, fresh)) take_rows();
    if constexpr (has_edge_term(kMode)) EdgeTerms<S, I, SubWarp, kVecs, kMode>::make(args, options.ids);

#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int n = window.count_of(round);
      const bool valid = window.slot < n;

      // logits and dP
      A logit[kRows], product[kRows];
      A termed[has_edge_term(kMode) ? kRows : 1][kPer];  // keys with the edge term
      if constexpr (has_edge_term(kMode)) {
        EdgeTerms<S, I, SubWarp, kVecs, kMode>::add(args, place, options.ids, round, n, key_raw[round], termed);
      }
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
        A other[kPer];
        product[u] = 0;
        if constexpr (kValues) {
          unpack_all<S, kVecs>(value_raw[round][u], other);
#pragma unroll
          for (int k = 0; k < kPer; ++k) product[u] = fma(grad[k], other[k], product[u]);
        }
        if constexpr (kKeys) {
          unpack_all<S, kVecs>(key_raw[round][u], other);
          if constexpr (!kValues) {
#pragma unroll
            for (int k = 0; k < kPer; ++k) product[u] = fma(grad[k], other[k], product[u]);
          }
          if constexpr (has_edge_term(kMode)) {
#pragma unroll
            for (int k = 0; k < kPer; ++k) other[k] = termed[u][k];
          }
          typename Fn::template Partial<A, true> sum(own_scalar);
#pragma unroll
          for (int k = 0; k < kPer; ++k) sum.add(own[k], other[k], att[k]);
          logit[u] = sum.sum(args.coefficient);
        }
      }
      A s, dp = SubWarp::sum_of_own_edge(place, product);
      if constexpr (kKeys) {
        const A sum = SubWarp::sum_of_own_edge(place, logit);
        s = norms.logit(Fn::scaled(sum, args.base_two_coefficient), own_over, other_over[round]);
      } else {
        s = own_scalar + source_scalar[round];
      }
      A ds, derivative = 1;
      if constexpr (kMode > kPlain) {
        const auto edge = options.of(args, round, window.slot, place.head, valid);
        s += edge.logit_term;
        if constexpr (Fn::kScalar) {
          derivative = GatScore::derivative(s, args.coefficient);
          s = GatScore::leaky(s, args.coefficient) * A(kLog2e);
        }
        const A p = power_of_two(s - shift);
        dp += edge.value_term;
        if (has_arrays(kMode) && args.grad_scale && valid) args.grad_scale[edge.at] = p * edge.keep * dp;
        if (has_arrays(kMode) && args.weights_out && valid) {
          args.weights_out[edge.at] = p * edge.keep * (args.weights_scaled ? edge.scale : A(1));
        }
        dp *= edge.scale;
        if (has_arrays(kMode) && args.grad_weights && valid) dp += args.grad_weights[edge.at];
        ds = valid ? p * (edge.keep * dp - delta) : A(0);
        if (has_arrays(kMode) && args.ds_out && valid) {
          const int64_t position = walk.edge - window.count + round * kEdges + window.slot;
          const bool in_order = has_edge_term(kMode) && args.ds_in_order;
          args.ds_out[in_order ? position * args.heads + place.head : edge.at] = ds * derivative;
        }
      } else {
        if constexpr (Fn::kScalar) {
          derivative = GatScore::derivative(s, args.coefficient);
          s = GatScore::leaky(s, args.coefficient) * A(kLog2e);
        }
        ds = valid ? power_of_two(s - shift) * (dp - delta) : A(0);
      }

      if constexpr (Fn::kScalar) {
        acc_scalar = fma(ds, derivative, acc_scalar);
      } else {
        if constexpr (kSumsDs) acc_scalar += ds;
        A d[kRows];
#pragma unroll
        for (int u = 0; u < kRows; ++u)
          d[u] = SubWarp::from_owner(place, norms.of_edge(ds, other_over[round], valid), u);
#pragma unroll
        for (int u = 0; u < kRows; ++u) {
#pragma unroll
          for (int v = 0; v < kVecs; ++v) {
            A x[kV];
            if constexpr (!has_edge_term(kMode)) unpack_again<S, kScarce<Fn, SubWarp>>(key_raw[round][u][v], x);
#pragma unroll
            for (int k = 0; k < kV; ++k) {
              if constexpr (has_edge_term(kMode)) x[k] = termed[u][v * kV + k];
              Fn::grad(acc[v * kV + k], own[v * kV + k], x[k], d[u]);
            }
          }
        }
      }
    }
  };

  if constexpr (kAgain) {
    auto load_row = [&](I row) {
      shift = args.logsumexp[static_cast<int64_t>(row) * args.heads + place.head] * A(kLog2e);
      if constexpr (kKeys) {
        const auto own_rows = rows_of(args.dst, key_offsets);
#pragma unroll
        for (int v = 0; v < kVecs; ++v) own_raw[v] = load_once<Raw<S>>(own_rows.row(v, row));
        unpack_row<S, kVecs>(own_raw, place, args.key_vectors, own, [&](A x) { return Fn::own(x); });
        own_over = norms.own(row);
      }
    };
    auto make = [&] {
      load_row(walk.row);
      A sums[kPer];
      const RowOfSubWarp<I> row{walk.row, walk.edge, walk.row_end, !walk.lead, kPer};
      acc_scalar = exact_by_dst<Fn, has_edge_term(kMode)>(args, SubWarpOfHead(place), row, sums);
#pragma unroll
      for (int k = 0; k < kPer; ++k) acc[k] = sums[k];
    };
    auto emit_other = [&](I row, bool lead, bool complete) {
      load_row(row);
      emit(row, lead, complete);
    };
    walk_again(walk, place, shares, make, close_row, clear, leave, add, emit_other);
  } else if constexpr (kMakesExact<S>) {
    auto failed = [&] { return large; };
    if (!walk_rows(walk, place, shares, window, begin_row, take, close_row, clear, leave, add, emit, failed)) {
      if (threadIdx.x == 0 && args.some_large) *args.some_large = 1;
      return by_dst_again<Fn, S, I, kVecs, SubWarp, kMode>(args, shares, segments, att_shares);
    }
  } else {
    walk_rows(walk, place, shares, window, begin_row, take, close_row, clear, leave, add, emit);
  }
  if constexpr (Fn::kAtt) {
    if (args.grad_att) att_shares.template store<S, kVecs>(args, place);
  }
  if constexpr (Fn::kInverseNorms) {
    if (args.grad_att) att_shares.store(args, place);
  }
}

template <class Fn, class S, class I, int kVecs, class SubWarp, int kMode, class Segments, class Shares>
__device__ __noinline__ void by_dst_again(const Args<float>& args, BlockShares<I>& shares, Segments& segments,
                                          Shares& att_shares) {
  bool large;
  walk_by_dst<Fn, S, I, kVecs, SubWarp, kMode, true>(args, shares, segments, att_shares, large);
}

template <class Fn, class S, class I, int kVecs, class SubWarp, int kMode>
__global__ void __launch_bounds__(kBlockThreads, min_blocks<Fn, S, I, SubWarp>(Pass::by_dst, kMode, kVecs))
    by_dst_kernel(const __grid_constant__ Args<Arithmetic<S>> args) {
  using A = Arithmetic<S>;
  constexpr int kPer = kVecs * kVec<S>;
  __shared__ BlockShares<I> shares;
  __shared__ BackwardSegments<A, kPer, !Fn::kScalar> segments;
  __shared__ RowShares<Fn, A, kPer> att_shares;
  __shared__ bool large;  // some row of the block has large logits, see exact.cuh
  walk_by_dst<Fn, S, I, kVecs, SubWarp, kMode, false>(args, shares, segments, att_shares, large);
}

}  // namespace edgeless::cuda
