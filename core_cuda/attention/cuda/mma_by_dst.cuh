// Backward, destination pass, for 16-bit rows: by_dst.cuh with both dot products of an edge on the tensor cores
// (mma.cuh).
#pragma once

#include "by_dst.cuh"
#include "mma.cuh"

namespace edgeless::cuda {

template <class Fn, class S, int kSubWarp, int kVecs, int kEdges, bool kWhole, int kMode>
__global__ void __launch_bounds__(kBlockThreads, mma_blocks(Pass::by_dst, Fn::kScore, kMode == kPlain, kSubWarp, kVecs))
    mma_by_dst_kernel(const __grid_constant__ Args<float> args) {
  using I = int32_t;
  constexpr int kPer = kVecs * 8;
  constexpr bool kValues = Fn::kOwnValue;
  __shared__ BlockShares<I> shares;
  __shared__ BackwardSegments<float, kPer> segments;
  __shared__ RowShares<Fn, float, kPer> att_shares;

  const Place<kSubWarp, true> place(args.layout, args.heads);
  divide_range(args.graph, args.part, place, shares);
  Walk<I> walk(args.graph, place, shares);

  const int quad = threadIdx.x / kQuad % 8;
  using Pointers = MmaPointers<kSubWarp, kVecs, kWhole>;
  const Pointers own_rows(args.dst, place, args.key_vectors);
  Pointers keys(args.src, place, args.key_vectors);
  Pointers values(kValues ? args.value : args.src, place, args.value_vectors);
  keys.hold();
  if constexpr (kValues) values.hold();
  const InverseNorms<float, Fn::kInverseNorms> norms(args, args.dst_over_norm, args.src_over_norm, place.head);
  const Pointers grad_rows(args.grad_out, place, args.value_vectors),
      out_rows(args.saved_out, place, args.value_vectors);
  const uint64_t seed = draws<kMode>(args) ? static_cast<uint64_t>(*args.seed) : 0;
  const bool has_grad = !has_arrays(kMode) || args.grad_out;
  const MmaShare<kEdges> share;

  MmaScore<Fn, S, kSubWarp, kVecs, kEdges> score;
  score.load(args, place.head);
  uint4 own[kVecs], grad[kVecs];
  float own_scalar = 0;             // gatv2: <att, x> of the row
  float own_over = 0;               // 1 / norm of the row (inverse_norms.cuh)
  float shift = 0, delta = 0;       // the row's shift, with P = 2^(s - shift) for s of MmaScore, and its Delta
  float acc[kPer], acc_scalar = 0;  // gatv2, cosine: sum of ds
#pragma unroll
  for (int k = 0; k < kPer; ++k) acc[k] = 0;
#pragma unroll
  for (int v = 0; v < kVecs; ++v) own[v] = grad[v] = uint4{0, 0, 0, 0};
  if constexpr (Fn::kAtt) att_shares.clear();
  if constexpr (Fn::kInverseNorms) att_shares.clear(place);

  bool fresh = false;  // the destination's rows were prefetched and are not paired yet
  uint4 out_raw[kVecs];
  auto begin_row = [&] {
    shift = args.logsumexp[static_cast<int64_t>(walk.row) * args.heads + place.head];
    own_rows.load_own(walk.row, own);
    own_over = norms.own(walk.row);
    if (has_grad) {
      grad_rows.load_own(walk.row, grad);
      if (!args.delta_given) out_rows.load_own(walk.row, out_raw);
    }
    fresh = true;
  };
  // The lane's part of <out, grad_out>.
  auto delta_share = [&] {
    float sum = 0;
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      float g[8], o[8];
      unpack(grad[v], g, S{});
      unpack(out_raw[v], o, S{});
#pragma unroll
      for (int k = 0; k < 8; ++k) sum = fma(g[k], o[k], sum);
    }
    return sum;
  };
  auto take_rows = [&] {  // called by whole warps
    const float dot = sub_warp_sum(fresh && has_grad && !args.delta_given ? delta_share() : 0.0f, kSubWarp, kFullWarp);
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      if (fresh) own[v] = paired(Fn::kAtt ? negated(own[v]) : own[v]), grad[v] = paired(grad[v]);
    }
    if constexpr (Fn::kAtt) {
      const float constant = score.of_row(own);
      if (fresh) own_scalar = constant;
    }
    if (fresh) {
      const int64_t at = static_cast<int64_t>(walk.row) * args.heads + place.head;
      delta = args.delta_given ? args.delta_given[at] : dot;
      shift *= float(kLog2e);
      if (place.lane == 0 && !walk.lead) {
        Stat<Fn, S>{Fn::kAtt ? fma(-args.coefficient, own_scalar, shift) : shift, delta}.store(args, at);
      }
      if constexpr (Fn::kAtt) shift -= own_scalar;
      fresh = false;
    }
  };

  // Writes a row's gradient or, where other blocks hold parts of the row, its segment.
  auto emit = [&](I row, bool lead, bool complete) {
    const bool partial = lead || !complete;
    if constexpr (Fn::kInverseNorms) {
      if (args.grad_dst || args.grad_att) {
        const float share = norms.template close_words<S, kVecs>(acc, own, own_over, place);
        if (args.grad_att) att_shares.add(place, share - norms.center(args.graph, row, shift, acc_scalar));
      }
    }
    if (!args.grad_dst) return;
    float out[kPer];
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      float att[8];
      if constexpr (Fn::kAtt) load_att_part<S>(args, place, v, att);
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        float& one = out[v * 8 + k];
        one = Fn::finish(acc[v * 8 + k], acc_scalar, args.coefficient);
        if constexpr (Fn::kAtt) one *= att[k];
      }
    }
    if (partial) {
      store_segment<S, kVecs>(carry_at(args, shares, lead, place.head), place, args.key_vectors, out);
    } else {
      store_row<S, kVecs>(args.grad_dst, row, args.grad_dst.heads, place, out);
    }
  };

  auto close_row = [&] {
    if constexpr (Fn::kAtt) att_shares.template add_words<Fn, S, kVecs>(own, acc, acc_scalar, args.coefficient);
  };
  auto clear = [&] {
    acc_scalar = 0, own_over = 0;
#pragma unroll
    for (int k = 0; k < kPer; ++k) acc[k] = 0;
  };
  auto leave = [&] { segments.leave(place, acc, acc_scalar); };
  auto add = [&](int sub_warp, int thread) { segments.add_to(acc, acc_scalar, sub_warp, thread); };

  MmaWindow<I, kEdges> window(args.graph, walk);
  MmaEdge<Fn, I, kEdges, false, kMode> owned(args.graph, walk);
  auto take = [&] {  // called by whole warps
    window.take(walk);
    const int n = window.count;
    uint4 key_raw[kEdges][kVecs], value_raw[kEdges][kVecs];
    window.load(keys, key_raw);
    if constexpr (kValues) {
      if (has_grad) {
        window.load(values, value_raw);
      } else {
#pragma unroll
        for (int u = 0; u < kEdges; ++u) {
#pragma unroll
          for (int v = 0; v < kVecs; ++v) value_raw[u][v] = uint4{0, 0, 0, 0};
        }
      }
    }
    float other_over[kEdges];
#pragma unroll
    for (int u = 0; u < kEdges; ++u) other_over[u] = norms.other(window.index[u]);
    if constexpr (kMode > kPlain) {
      owned.take(args, seed, walk, place.head, n);
    }
    if (__any_sync(kFullWarp, fresh)) take_rows();

    float s[kEdges], dp[kEdges], ds[kEdges];
    score.template logits<true>(key_raw, own, quad, args.coefficient, s);
#pragma unroll
    for (int u = 0; u < kEdges; ++u) {
      s[u] = norms.logit(s[u], own_over, other_over[u]);
      dp[u] = times_own<S, kSubWarp>(kValues ? value_raw[u] : key_raw[u], grad, quad);
    }

    if constexpr (kMode > kPlain) {
      const bool valid = share.edge < n;
      const auto edge = owned.factors(args, place.head);
      float logit = share.mine(s), product = share.mine(dp);
      logit += edge.logit_term;
      const float p = power_of_two(logit - shift);
      product += edge.value_term;
      const bool writes = valid && place.lane < kEdges;
      if (has_arrays(kMode) && args.grad_scale && writes) args.grad_scale[edge.at] = p * edge.keep * product;
      if (has_arrays(kMode) && args.weights_out && writes) {
        args.weights_out[edge.at] = p * edge.keep * (args.weights_scaled ? edge.scale : 1);
      }
      product *= edge.scale;
      if (has_arrays(kMode) && args.grad_weights && valid) product += args.grad_weights[edge.at];
      const float mine = valid ? p * (edge.keep * product - delta) : 0;
      if (has_arrays(kMode) && args.ds_out && writes) args.ds_out[edge.at] = mine;
      share.all(mine, ds);
    } else {
#pragma unroll
      for (int u = 0; u < kEdges; ++u) ds[u] = u < n ? power_of_two(s[u] - shift) * (dp[u] - delta) : 0;
    }
#pragma unroll
    for (int u = 0; u < kEdges; ++u) {
      if constexpr (Fn::kAtt || Fn::kInverseNorms) acc_scalar += ds[u];
#pragma unroll
      for (int v = 0; v < kVecs; ++v) {
        score.grad(*reinterpret_cast<float (*)[8]>(&acc[v * 8]), key_raw[u][v], own[v],
                   norms.of_edge(ds[u], other_over[u], u < n));
      }
    }
  };

  walk_rows(walk, place, shares, window, begin_row, take, close_row, clear, leave, add, emit);
  if constexpr (Fn::kAtt) {
    if (args.grad_att) att_shares.template store<S, kVecs>(args, place);
  }
  if constexpr (Fn::kInverseNorms) {
    if (args.grad_att) att_shares.store(args, place);
  }
}

}  // namespace edgeless::cuda
