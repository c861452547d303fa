// Forward for 16-bit rows: forward.cuh with the logits on the tensor cores (mma.cuh).
//
// A sub-warp processes a row of one head, four edges at a time. All its lanes hold all logits of a batch, so the
// softmax needs no exchange between lanes. Sums are float, as everywhere.
#pragma once

#include "forward.cuh"
#include "mma.cuh"

namespace edgeless::cuda {

template <class Fn, class S, int kSubWarp, int kVecs, int kEdges, bool kWhole, int kMode>
__global__ void __launch_bounds__(kBlockThreads,
                                  mma_blocks(Pass::forward, Fn::kScore, kMode == kPlain, kSubWarp, kVecs))
    mma_forward_kernel(const __grid_constant__ Args<float> args) {
  using I = int32_t;
  constexpr int kPer = kVecs * 8;
  constexpr bool kValues = Fn::kOwnValue;
  __shared__ BlockShares<I> shares;
  __shared__ ForwardSegments<float, kPer> segments;

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
  const uint64_t seed = draws<kMode>(args) ? static_cast<uint64_t>(*args.seed) : 0;
  const MmaShare<kEdges> share;

  MmaScore<Fn, S, kSubWarp, kVecs, kEdges> score;
  score.load(args, place.head);
  uint4 own[kVecs];
  float own_scalar = 0;  // gatv2: <att, x> of the row
  float own_over = 0;    // 1 / norm of the row (inverse_norms.cuh)
  float acc[kPer], m = -INFINITY, l = 0;
#pragma unroll
  for (int k = 0; k < kPer; ++k) acc[k] = 0;
#pragma unroll
  for (int v = 0; v < kVecs; ++v) own[v] = uint4{0, 0, 0, 0};

  bool fresh = false;  // the destination's row was prefetched and is not paired yet
  auto begin_row = [&] {
    own_rows.load_own(walk.row, own);
    own_over = norms.own(walk.row);
    fresh = true;
    if (Fn::kAtt && place.lane == 0 && walk.row + kRowsAhead < walk.last_row) own_rows.prefetch(walk.row + kRowsAhead);
  };
  auto take_rows = [&] {  // called by whole warps
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      if (fresh) own[v] = paired(Fn::kAtt ? negated(own[v]) : own[v]);
    }
    if constexpr (Fn::kAtt) {
      const float constant = score.of_row(own);
      if (fresh) own_scalar = constant;
    }
    fresh = false;
  };

  auto close_row = [&] {
    if (has_arrays(kMode) && args.given) m = 0, l = 1;
  };
  auto clear = [&] {
    m = -INFINITY, l = 0;
#pragma unroll
    for (int k = 0; k < kPer; ++k) acc[k] = 0;
  };
  auto leave = [&] { segments.leave(place, acc, m, l); };
  auto add = [&](int sub_warp, int thread) {
    segments.add_to(acc, m, l, sub_warp, thread);
    if (has_arrays(kMode) && args.given) l = 1;
  };
  auto emit = [&](I row, bool lead, bool complete) {
    emit_forward<S, kVecs>(args, shares, place, row, lead, complete, acc, Fn::kAtt ? m + own_scalar : m, l);
  };

  MmaWindow<I, kEdges> window(args.graph, walk);
  MmaEdge<Fn, I, kEdges, true, kMode> owned(args.graph, walk);
  auto take = [&] {  // called by whole warps
    window.take(walk);
    const int n = window.count;
    uint4 key_raw[kEdges][kVecs], value_raw[kEdges][kVecs];
    window.load(keys, key_raw);
    if constexpr (kValues) window.load(values, value_raw);
    float other_over[kEdges];
#pragma unroll
    for (int u = 0; u < kEdges; ++u) other_over[u] = norms.other(window.index[u]);
    if constexpr (kMode > kPlain) {
      owned.take(args, seed, walk, place.head, n);
    }
    if (__any_sync(kFullWarp, fresh)) take_rows();

    float s[kEdges];
    score.template logits<true>(key_raw, own, quad, args.coefficient, s);
#pragma unroll
    for (int u = 0; u < kEdges; ++u) s[u] = norms.logit(s[u], own_over, other_over[u]);
    float factor[kEdges];
    if constexpr (kMode > kPlain) {
      const bool valid = share.edge < n;
      const auto edge = owned.factors(args, place.head);
      float mine = share.mine(s), weight = edge.keep * edge.scale;
      mine += edge.logit_term;
      // logits_out may alias logit_term: the barrier lets the other lanes that own this edge read their term first.
      if (has_arrays(kMode) && args.logits_out) {
        __syncwarp();
        if (valid) args.logits_out[edge.at] = (mine + (Fn::kAtt ? own_scalar : 0)) * float(kLn2);
      }
      if (has_arrays(kMode) && args.given) weight = valid ? args.given[edge.at] : 0, mine = 0;
      share.all(mine, s);
      share.all(weight, factor);
    }
#pragma unroll
    for (int u = 0; u < kEdges; ++u) {
      if (u >= n) s[u] = -INFINITY;
    }

    // Softmax. An idle sub-warp continues with an edge of its last row and weight 0.
    float top = m;
#pragma unroll
    for (int u = 0; u < kEdges; ++u) top = max(top, s[u]);
    if (__any_sync(kFullWarp, top > m)) {
      const float shrink = top > m ? power_of_two(m - top) : 1;
      m = top;
      l *= shrink;
#pragma unroll
      for (int k = 0; k < kPer; ++k) acc[k] *= shrink;
    }
#pragma unroll
    for (int u = 0; u < kEdges; ++u) {
      float w = power_of_two(s[u] - m);
      l += w;
      if constexpr (kMode > kPlain) w *= factor[u];
#pragma unroll
      for (int v = 0; v < kVecs; ++v) {
        float x[8];
        unpack(kValues ? value_raw[u][v] : key_raw[u][v], x, S{});
#pragma unroll
        for (int k = 0; k < 8; ++k) acc[v * 8 + k] = fma(w, x[k], acc[v * 8 + k]);
      }
    }
  };

  walk_rows<settles_forward<Fn>>(walk, place, shares, window, begin_row, take, close_row, clear, leave, add, emit);
}

}  // namespace edgeless::cuda
