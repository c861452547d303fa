// Partial sums for hubs, the rows with very many neighbours: out[i] is the sum of the rows of the neighbours
// [begins[i], ends[i]). A hub's neighbours are divided into parts of up to kHubPart (../tiling.h), one per thread
// block, and row_sums then sums the parts of a hub in place of its neighbours, so that no thread block has much more
// work than others.
//
// The sub-warps of a block process the rows of its part round-robin. Their sums are added in shared memory by a binary
// tree, whose order depends only on the number of sub-warps.
#pragma once

#include "tile_sums.cuh"

namespace edgeless::cuda::relational {

template <class S>
constexpr int kHubBatch = 64 / kVec<S>;  // rows that a sub-warp has in flight

template <class S>
__global__ void __launch_bounds__(kFusedThreads) hub_sums_kernel(const __grid_constant__ HubSumsArgs args) {
  constexpr int kPer = kVec<S>, kBatch = kHubBatch<S>;
  __shared__ float4 shared[kFusedThreads * kPer / 4];
  const Neighbors& of = args.neighbors;
  const int lane = threadIdx.x & ((1 << of.sub_warp_log2) - 1), sub_warp = threadIdx.x >> of.sub_warp_log2;
  const int sub_warps = kFusedThreads >> of.sub_warp_log2;
  const int begin = args.begins[blockIdx.x] + sub_warp, end = args.ends[blockIdx.x];
  const char* base = of.rows + min(lane, of.vectors - 1) * 16;
  float sum[kPer] = {};
  for (int first = begin; first < end; first += kBatch * sub_warps) {
    int rows[kBatch];
    Words<4> raw[kBatch];
#pragma unroll
    for (int u = 0; u < kBatch; ++u) rows[u] = first + u * sub_warps < end ? of.indices[first + u * sub_warps] : 0;
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      if (first + u * sub_warps >= end) continue;
      raw[u] = load_shared_words(reinterpret_cast<const Words<4>*>(row_address(base, rows[u], of.row_bytes)));
    }
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      if (first + u * sub_warps >= end) continue;
      float x[kPer];
      unpack_words<S, 4>(raw[u], x);
#pragma unroll
      for (int k = 0; k < kPer; ++k) sum[k] += x[k];
    }
  }
  float* mine = reinterpret_cast<float*>(shared) + threadIdx.x * kPer;
  for (int half = sub_warps; half > 0; half /= 2) {
    if (half < sub_warps && sub_warp < half) {
#pragma unroll
      for (int k = 0; k < kPer; ++k) sum[k] += mine[(half << of.sub_warp_log2) * kPer + k];
    }
    if (sub_warp < half) {
#pragma unroll
      for (int k = 0; k < kPer; ++k) mine[k] = sum[k];
    }
    __syncthreads();
  }
  if (sub_warp > 0 || lane >= of.vectors) return;
  reinterpret_cast<uint4*>(static_cast<char*>(args.out) + static_cast<int64_t>(blockIdx.x) * of.row_bytes)[lane] =
      pack(sum, S{});
}

}  // namespace edgeless::cuda::relational
