// Forward over pairs: out_i = sum_e softmax(LeakyReLU(q_p + <key, v_e>)) v_e + bias, over the edges e of a destination
// i.
//
// v_e is the row of the edge's unique (source, relation), q_p the query term of the segment p of its destination and
// relation. With dropout, the weight of v_e is multiplied by 0 or 1 / (1 - p). <key, v_e> is computed from the gathered
// row. Logits are not scaled to base 2, so that the difference of nearby logits is exact in float32.
// attention/cuda/forward.cuh describes the softmax, attention/cuda/walk.cuh how work is divided.
#pragma once

#include "../../attention/cuda/forward.cuh"
#include "row.cuh"

namespace edgeless::cuda {

template <class S, int kWidth, int kEdges, bool kDropout>
__global__ void __launch_bounds__(kBlockThreads, pair_blocks(Pass::forward, kVec<S>, kEdges))
    pair_forward_kernel(const __grid_constant__ PairArgs args) {
  using I = int32_t;
  constexpr int kV = kVec<S>;
  __shared__ BlockShares<I> shares;
  __shared__ ForwardSegments<float, kV, true> segments;

  const Place<kWidth> place(args.layout, 1);
  divide_range(args.graph, args.part, place, shares);
  Walk<I> walk(args.graph, place, shares);

  RowPointers<1> values(args.value, 0, Offsets<1>(place, args.value_vectors));
  values.hold();
  const uint64_t seed = kDropout ? static_cast<uint64_t>(*args.seed) : 0;
  float key[kV], acc[kV];
  float m = -INFINITY, l = 0;  // running maximum; the lane's part of the sum, reduced when the row ends
  load_parameters<S>(args.key, place, args.value_vectors, key);
#pragma unroll
  for (int k = 0; k < kV; ++k) acc[k] = 0;

  auto close_row = [&] { l = batch_sum<kEdges>(l, place.mask()); };
  auto clear = [&] {
    m = -INFINITY, l = 0;
#pragma unroll
    for (int k = 0; k < kV; ++k) acc[k] = 0;
  };
  auto leave = [&] { segments.leave(place, acc, m, l); };
  auto add = [&](int sub_warp, int thread) { segments.add_to(acc, m, l, sub_warp, thread); };
  auto emit = [&](I row, bool lead, bool complete) {
    if (lead || !complete) {
      float* segment = carry_at(args, shares, lead, 0);
      store_segment<S, 1>(segment, place, args.value_vectors, acc);
      if (place.lane == 0) segment[args.value_vectors * kV] = m, segment[args.value_vectors * kV + 1] = l;
      return;
    }
    float bias[kV] = {}, out[kV];
    if (args.bias) load_parameters<S>(args.bias, place, args.value_vectors, bias);
    const float inverse = l != 0 ? reciprocal(l) : 0.0f;
#pragma unroll
    for (int k = 0; k < kV; ++k) out[k] = acc[k] * inverse;
    if (args.sums) store_row<S, 1>(args.sums, row, 1, place, out);
#pragma unroll
    for (int k = 0; k < kV; ++k) out[k] += bias[k];
    store_row<S, 1>(args.out, row, 1, place, out);
    if (place.lane == 0) args.shift[row] = m, args.shift[args.graph.num_rows + row] = log_base_two(l);
  };

  PairWindow<SubWarpShape<kWidth, kEdges>, kDropout> window(args, walk, place);
  auto take = [&] {  // called by whole warps
    window.begin(walk);
    uint4 raw[1][kEdges][1];
    window.load(values, raw);
    const float query = __ldg(args.logit_term + window.segment);
    const float keep = kDropout ? dropout_factor(args, seed, int64_t{window.id}, 0) : 1.0f;
    window.advance(walk);
    const bool valid = window.slot < window.count;

    float partial[kEdges];
#pragma unroll
    for (int u = 0; u < kEdges; ++u) {
      float x[kV];
      unpack_all<S, 1>(raw[0][u], x);
      partial[u] = dot<S>(key, x);
    }
    float s = query + sum_of_own_edge<kEdges>(partial, place.lane, place.width());
    s = valid ? GatScore::leaky(s, args.coefficient) : -INFINITY;

    // An idle sub-warp repeats an edge of its last row with weight 0.
    if (__any_sync(kFullWarp, s > m)) {
      const float top = max(m, batch_max<kEdges>(s));
      const float shrink = top > m ? power_of_two((m - top) * float(kLog2e)) : 1.0f;
      m = top;
      l *= shrink;
#pragma unroll
      for (int k = 0; k < kV; ++k) acc[k] *= shrink;
    }
    const float p = power_of_two((s - m) * float(kLog2e));
    l += p;
#pragma unroll
    for (int u = 0; u < kEdges; ++u) {
      const float w = from_owner<kEdges>(kDropout ? p * keep : p, u);
      float x[kV];
      unpack_again<S, true>(raw[0][u][0], x);
#pragma unroll
      for (int k = 0; k < kV; ++k) acc[k] = fmaf(w, x[k], acc[k]);
    }
  };

  walk_rows(walk, place, shares, window, [] {}, take, close_row, clear, leave, add, emit);
}

}  // namespace edgeless::cuda
