// Backward, source pass, for 16-bit rows: by_src.cuh with both dot products of an edge on the tensor cores (mma.cuh).
#pragma once

#include "by_src.cuh"
#include "mma.cuh"

namespace edgeless::cuda {

template <class Fn, class S, int kSubWarp, int kVecs, int kEdges, bool kWhole, int kMode>
__global__ void __launch_bounds__(kBlockThreads, mma_blocks(Pass::by_src, Fn::kScore, kMode == kPlain, kSubWarp, kVecs))
    mma_by_src_kernel(const __grid_constant__ Args<float> args) {
  using I = int32_t;
  constexpr int kPer = kVecs * 8;
  constexpr bool kTwoVectors = Fn::kOwnValue;
  __shared__ BlockShares<I> shares;
  __shared__ SourceSegments<float, kPer, kTwoVectors> segments;
  __shared__ std::conditional_t<Fn::kAtt, AttShares<float, kPer>, NoShares> att_shares;

  const Place<kSubWarp, true> place(args.layout, args.heads);
  divide_range(args.graph, args.part, place, shares);
  Walk<I> walk(args.graph, place, shares);

  const int quad = threadIdx.x / kQuad % 8;
  using Pointers = MmaPointers<kSubWarp, kVecs, kWhole>;
  const Pointers own_rows(args.src, place, args.key_vectors), value_rows(args.value, place, args.value_vectors);
  Pointers keys(args.dst, place, args.key_vectors), grads(args.grad_out, place, args.value_vectors);
  keys.hold();
  grads.hold();
  const InverseNorms<float, Fn::kInverseNorms> norms(args, args.src_over_norm, args.dst_over_norm, place.head);
  const StatPointer<Fn, S> stats(args, place.head);
  const uint64_t seed = draws<kMode>(args) ? static_cast<uint64_t>(*args.seed) : 0;
  const bool has_grad = !has_arrays(kMode) || args.grad_out;
  const MmaShare<kEdges> share;

  MmaScore<Fn, S, kSubWarp, kVecs, kEdges> score;
  score.load(args, place.head);
  uint4 own[kVecs], value[kVecs];
  float own_scalar = 0;                                  // gatv2: <att, x> of the row
  float own_over = 0;                                    // 1 / norm of the row (inverse_norms.cuh)
  float key_acc[kPer], value_acc[kPer], acc_scalar = 0;  // gatv2: sum of ds
#pragma unroll
  for (int k = 0; k < kPer; ++k) key_acc[k] = 0, value_acc[k] = 0;
#pragma unroll
  for (int v = 0; v < kVecs; ++v) own[v] = value[v] = uint4{0, 0, 0, 0};
  if constexpr (Fn::kAtt) att_shares.clear();

  bool fresh = false;  // the source's rows were prefetched and are not paired yet
  auto begin_row = [&] {
    own_rows.load_own(walk.row, own);
    own_over = norms.own(walk.row);
    if constexpr (Fn::kOwnValue) {
      if (has_grad) value_rows.load_own(walk.row, value);
    }
    fresh = true;
    if (Fn::kAtt && place.lane == 0 && walk.row + kRowsAhead < walk.last_row) own_rows.prefetch(walk.row + kRowsAhead);
  };
  auto take_rows = [&] {  // called by whole warps
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      if (fresh) own[v] = paired(Fn::kAtt ? negated(own[v]) : own[v]), value[v] = paired(value[v]);
    }
    if constexpr (Fn::kAtt) {
      const float constant = score.of_row(own);
      if (fresh) own_scalar = constant;
    }
    fresh = false;
  };

  // Where the values are the keys, adds the key's gradient to value_acc.
  auto join = [&] {
    if constexpr (Fn::kAtt) {
#pragma unroll
      for (int v = 0; v < kVecs; ++v) {
        float att[8];
        if constexpr (kVecs == 1) {  // with one vector this spills less
          load_att<S, 1>(args, place, att);
        } else {  // all vectors at once would spill
          load_att_part<S>(args, place, v, att);
        }
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          float& sum = value_acc[v * 8 + k];
          sum = fma(Fn::finish(key_acc[v * 8 + k], acc_scalar, args.coefficient), att[k], sum);
        }
      }
    }
    if constexpr (Fn::kInverseNorms) {
      norms.template close_words<S, kVecs>(key_acc, own, own_over, place);
#pragma unroll
      for (int k = 0; k < kPer; ++k) value_acc[k] += key_acc[k];
    }
  };

  auto close_row = [&] {
    if constexpr (Fn::kAtt) att_shares.template add_words<Fn, S, kVecs>(own, key_acc, acc_scalar, args.coefficient);
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

  MmaWindow<I, kEdges> window(args.graph, walk);
  MmaEdge<Fn, I, kEdges, false, kMode> owned(args.graph, walk);
  auto take = [&] {  // called by whole warps
    window.take(walk);
    const int n = window.count;
    uint4 key_raw[kEdges][kVecs], grad_raw[kEdges][kVecs];
    Stat<Fn, S> stat[kEdges];
#pragma unroll
    for (int u = 0; u < kEdges; ++u) stat[u] = stats.load(window.index[u]);
    float other_over[kEdges];
#pragma unroll
    for (int u = 0; u < kEdges; ++u) other_over[u] = norms.other(window.index[u]);
    window.load(keys, key_raw);
    if (has_grad) {
      window.load(grads, grad_raw);
    } else {
#pragma unroll
      for (int u = 0; u < kEdges; ++u) {
#pragma unroll
        for (int v = 0; v < kVecs; ++v) grad_raw[u][v] = uint4{0, 0, 0, 0};
      }
    }
    if constexpr (kMode > kPlain) {
      owned.take(args, seed, walk, place.head, n);
    }
    if (__any_sync(kFullWarp, fresh)) take_rows();

    float s[kEdges], dp[kEdges], ds[kEdges], w[kEdges];
    score.template logits<false>(key_raw, own, quad, args.coefficient, s);
#pragma unroll
    for (int u = 0; u < kEdges; ++u) {
      if constexpr (Fn::kOwnValue) {
        dp[u] = times_own<S, kSubWarp>(grad_raw[u], value, quad);
      } else if constexpr (Fn::kInverseNorms) {
        dp[u] = times_own<S, kSubWarp>(grad_raw[u], own, quad);
        s[u] = norms.logit(s[u], own_over, other_over[u]);
      } else {
        dp[u] = -times_own<S, kSubWarp>(grad_raw[u], own, quad);
        s[u] += own_scalar;
      }
    }

    if constexpr (kMode > kPlain) {
      const bool valid = share.edge < n;
      const auto edge = owned.factors(args, place.head);
      float logit = share.mine(s), product = share.mine(dp);
      logit += edge.logit_term;
      product += edge.value_term;
      const float factor = edge.keep * edge.scale;
      product *= factor;
      if (has_arrays(kMode) && args.grad_weights && valid) product += edge.keep * args.grad_weights[edge.at];
      float shift = stat[0].shift, delta = stat[0].delta;
#pragma unroll
      for (int u = 1; u < kEdges; ++u) {
        if (share.edge == u) shift = stat[u].shift, delta = stat[u].delta;
      }
      const float p = valid ? power_of_two(logit - shift) : 0;
      share.all(p * factor, w);
      share.all(valid ? p * (product - delta) : 0, ds);
    } else {
#pragma unroll
      for (int u = 0; u < kEdges; ++u) {
        w[u] = u < n ? power_of_two(s[u] - stat[u].shift) : 0;
        ds[u] = u < n ? w[u] * (dp[u] - stat[u].delta) : 0;
      }
    }
#pragma unroll
    for (int u = 0; u < kEdges; ++u) {
      if constexpr (Fn::kAtt) acc_scalar += ds[u];
#pragma unroll
      for (int v = 0; v < kVecs; ++v) {
        float g[8];
        unpack(grad_raw[u][v], g, S{});
#pragma unroll
        for (int k = 0; k < 8; ++k) value_acc[v * 8 + k] = fma(w[u], g[k], value_acc[v * 8 + k]);
        score.grad(*reinterpret_cast<float (*)[8]>(&key_acc[v * 8]), key_raw[u][v], own[v],
                   norms.of_edge(ds[u], other_over[u], u < n));
      }
    }
  };

  walk_rows(walk, place, shares, window, begin_row, take, close_row, clear, leave, add, emit);
  if constexpr (Fn::kAtt) {
    if (args.grad_att) att_shares.template store<S, kVecs>(args, place);
  }
}

}  // namespace edgeless::cuda
