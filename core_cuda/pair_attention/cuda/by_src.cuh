// Backward over pairs, by_src: the only pass over edges. A row is a unique (source, relation) with the row v of values:
//
//   P = e^(s - max_i) / sum_i   ds = P (<grad_i, v> - Delta_i) LeakyReLU'(s)
//   dv = sum P grad_i + (sum ds) key   d key = the sum over all pairs of (sum ds) v
//
// summed over its edges to destinations i. With dropout, <grad_i, v> and the P in dv are multiplied by 0 or 1 / (1 -
// p). ds is stored per edge for the sums on the query side. attention/cuda/walk.cuh describes how work is divided;
// there are no atomics.
#pragma once

#include "../../attention/cuda/by_dst.cuh"
#include "row.cuh"

namespace edgeless::cuda {

// Shared memory for the segment of a row that an earlier worker merges.
template <int kPer>
struct PairSegments {
  float at[kPer][kBlockThreads];

  __device__ __forceinline__ void leave(const float (&sum)[kPer]) {
#pragma unroll
    for (int k = 0; k < kPer; ++k) at[k][threadIdx.x] = sum[k];
  }
  __device__ __forceinline__ void add_to(float (&sum)[kPer], int thread) const {
#pragma unroll
    for (int k = 0; k < kPer; ++k) sum[k] += at[k][thread];
  }
};

template <class S, int kWidth, int kEdges, bool kDropout>
__global__ void __launch_bounds__(kBlockThreads, pair_blocks(Pass::by_src, kVec<S>, kEdges))
    pair_by_src_kernel(const __grid_constant__ PairArgs args) {
  using I = int32_t;
  constexpr int kV = kVec<S>;
  __shared__ BlockShares<I> shares;
  __shared__ PairSegments<kV> segments;
  __shared__ AttShares<float, kV> key_shares;

  const Place<kWidth> place(args.layout, 1);
  divide_range(args.graph, args.part, place, shares);
  Walk<I> walk(args.graph, place, shares);

  const Offsets<1> offsets(place, args.value_vectors);
  const RowPointers<1> value_rows(args.value, 0, offsets);
  RowPointers<1> grads(args.grad_out, 0, offsets);
  grads.hold();
  const float4* stats = held(reinterpret_cast<const float4*>(args.stats));

  const uint64_t seed = kDropout ? static_cast<uint64_t>(*args.seed) : 0;
  float key[kV], value[kV], acc[kV];
  float own = 0;     // <key, v> of the row
  float sum_ds = 0;  // the lane's part, reduced when the row ends
  uint4 value_raw[1] = {};
  load_parameters<S>(args.key, place, args.value_vectors, key);
#pragma unroll
  for (int k = 0; k < kV; ++k) value[k] = 0, acc[k] = 0;
  key_shares.clear();

  bool fresh = false;  // the row's values are in flight and not yet unpacked
  auto begin_row = [&] {
    value_raw[0] = load_once(value_rows.row(0, walk.row));
    fresh = true;
    if (place.lane % 8 == 0 && walk.row + kRowsAhead < walk.last_row) value_rows.prefetch(walk.row + kRowsAhead);
  };
  // Called by whole warps; sub-warps whose row is not fresh only participate in the shuffles. The dot product is summed
  // in the same order as in the forward.
  auto take_rows = [&] {
    if (fresh) unpack_row<S, 1>(value_raw, place, args.value_vectors, value, [](float x) { return x; });
    const float sum = sub_warp_sum(dot<S>(key, value), place.width(), kFullWarp);
    if (fresh) own = sum;
    fresh = false;
  };

  auto close_row = [&] {
    sum_ds = batch_sum<kEdges>(sum_ds, place.mask());
#pragma unroll
    for (int k = 0; k < kV; ++k) {
      key_shares.at[k][threadIdx.x] = fmaf(sum_ds, value[k], key_shares.at[k][threadIdx.x]);
      acc[k] = fmaf(sum_ds, key[k], acc[k]);
    }
  };
  auto clear = [&] {
    sum_ds = 0;
#pragma unroll
    for (int k = 0; k < kV; ++k) acc[k] = 0;
  };
  auto leave = [&] { segments.leave(acc); };
  auto add = [&](int /*sub_warp*/, int thread) { segments.add_to(acc, thread); };
  auto emit = [&](I row, bool lead, bool complete) {
    if (!args.grad_value) return;
    if (lead || !complete) {
      store_segment<S, 1>(carry_at(args, shares, lead, 0), place, args.value_vectors, acc);
    } else {
      store_row<S, 1>(args.grad_value, row, 1, place, acc);
    }
  };

  PairWindow<SubWarpShape<kWidth, kEdges>, kDropout> window(args, walk, place);
  auto take = [&] {  // called by whole warps
    window.begin(walk);
    uint4 raw[1][kEdges][1];
    window.load(grads, raw);
    const float4 stat = __ldg(stats + window.index[0]);
    const float query = __ldg(args.logit_term + window.segment);
    const float keep = kDropout ? dropout_factor(args, seed, int64_t{window.id}, 0) : 1.0f;
    const I position = walk.edge + window.slot;
    window.advance(walk);
    const bool valid = window.slot < window.count;
    if (__any_sync(kFullWarp, fresh)) take_rows();

    float product[kEdges];
#pragma unroll
    for (int u = 0; u < kEdges; ++u) {
      float x[kV];
      unpack_all<S, 1>(raw[0][u], x);
      product[u] = dot<S>(value, x);
    }
    const float sum = sum_of_own_edge<kEdges>(product, place.lane, place.width()), dp = kDropout ? sum * keep : sum;
    const float z = query + own;
    const float p =
        valid ? power_of_two(fmaf(GatScore::leaky(z, args.coefficient) - stat.x, float(kLog2e), -stat.y)) : 0.0f;
    const float ds = valid ? p * (dp - stat.z) * GatScore::derivative(z, args.coefficient) : 0.0f;
    if (valid && place.lane < kEdges) args.ds_out[position] = ds;
    sum_ds += ds;
#pragma unroll
    for (int u = 0; u < kEdges; ++u) {
      const float w = from_owner<kEdges>(kDropout ? p * keep : p, u);
      float x[kV];
      unpack_again<S, true>(raw[0][u][0], x);
#pragma unroll
      for (int k = 0; k < kV; ++k) acc[k] = fmaf(w, x[k], acc[k]);
    }
  };

  walk_rows(walk, place, shares, window, begin_row, take, close_row, clear, leave, add, emit);
  if (args.grad_att) key_shares.template store<S, 1>(args, place);
}

}  // namespace edgeless::cuda
