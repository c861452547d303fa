// The row-wise kernels before and after the passes over pairs. A sub-warp holds a row, one vector of 16 bytes per lane.
// A block processes consecutive rows and writes one partial sum per column, in an order that depends on sizes alone.
#pragma once

#include "../../common/vec.cuh"
#include "../../common/warp.cuh"
#include "args.h"

namespace edgeless::cuda {

constexpr int kRowsAtOnce = 4;

// A lane's index in its sub-warp, the sub-warp's index in the block, and the block's rows [begin, end).
template <int kWidth>
struct Lane {
  static constexpr int kSubWarps = kRowThreads / kWidth;
  int lane = threadIdx.x % kWidth, sub_warp = threadIdx.x / kWidth;
  bool inside;  // the row has a vector for this lane
  int64_t begin, end;

  __device__ explicit Lane(const RowSumsArgs& args)
      : inside(lane < args.vectors),
        begin(args.rows * blockIdx.x / args.blocks),
        end(args.rows * (blockIdx.x + 1) / args.blocks) {}

  // Index of this lane's vector of a row.
  __device__ int64_t at(const RowSumsArgs& args, int64_t row) const { return row * args.vectors + lane; }
};

template <class S, int kWidth>
__device__ __forceinline__ void load_row(const RowSumsArgs& args, const Lane<kWidth>& place, float (&row)[kVec<S>]) {
  const bool there = args.row && place.inside;
  unpack(there ? __ldg(static_cast<const uint4*>(args.row) + place.lane) : uint4{0, 0, 0, 0}, row, S{});
}

// Adds up the sums of a block's sub-warps in order and writes the block's partial sums.
template <int kWidth, int kV>
__device__ void store_share(const RowSumsArgs& args, const Lane<kWidth>& place, const float (&sum)[kV]) {
  __shared__ float all[kV][kRowThreads];
  if (!args.shares) return;
#pragma unroll
  for (int k = 0; k < kV; ++k) all[k][threadIdx.x] = sum[k];
  __syncthreads();
  if (place.sub_warp > 0 || !place.inside) return;
  float* to = args.shares + (static_cast<int64_t>(blockIdx.x) * args.vectors + place.lane) * kV;
#pragma unroll
  for (int k = 0; k < kV; ++k) {
    float total = 0;
    for (int sub_warp = 0; sub_warp < Lane<kWidth>::kSubWarps; ++sub_warp)
      total += all[k][threadIdx.x + sub_warp * kWidth];
    to[k] = total;
  }
}

template <class S, int kWidth>
__global__ void __launch_bounds__(kRowThreads) deltas_kernel(const __grid_constant__ RowSumsArgs args) {
  constexpr int kV = kVec<S>;
  const Lane<kWidth> place(args);
  const auto *grads = static_cast<const uint4*>(args.a), *results = static_cast<const uint4*>(args.b);
  float sum[kV] = {};
  for (int64_t first = place.begin; first < place.end; first += kRowsAtOnce * place.kSubWarps) {
    uint4 grad_raw[kRowsAtOnce], result_raw[kRowsAtOnce];
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      const int64_t r = first + i * place.kSubWarps + place.sub_warp;
      grad_raw[i] = result_raw[i] = uint4{0, 0, 0, 0};
      if (place.inside && r < place.end) {
        grad_raw[i] = __ldg(grads + place.at(args, r)), result_raw[i] = __ldcs(results + place.at(args, r));
      }
    }
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      const int64_t r = first + i * place.kSubWarps + place.sub_warp;
      float grad[kV], result[kV], dot = 0;
      unpack(grad_raw[i], grad, S{});
      unpack(result_raw[i], result, S{});
#pragma unroll
      for (int k = 0; k < kV; ++k) dot = fmaf(grad[k], result[k], dot), sum[k] += grad[k];
      dot = sub_warp_sum(dot, kWidth, kFullWarp);
      if (place.lane == 0 && r < place.end && args.stats)
        reinterpret_cast<float4*>(args.stats)[r] = {args.shift[r], args.shift[args.rows + r], dot, 0};
    }
  }
  store_share(args, place, sum);
}

template <class S, int kWidth>
__global__ void __launch_bounds__(kRowThreads) outer_rows_kernel(const __grid_constant__ RowSumsArgs args) {
  constexpr int kV = kVec<S>, kFours = kV / 4;
  const Lane<kWidth> place(args);
  float row[kV], sum[kV] = {};
  load_row<S>(args, place, row);
  for (int64_t r = place.begin + place.sub_warp; r < place.end && place.inside; r += place.kSubWarps) {
    const float factor = args.factor[r];
    const float4* given = static_cast<const float4*>(args.a) + place.at(args, r) * kFours;
    float weight[kV], out[kV];
    unpack(__ldcs(static_cast<const uint4*>(args.b) + place.at(args, r)), weight, S{});
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      const float4 four = given[i];
      out[4 * i] = four.x, out[4 * i + 1] = four.y, out[4 * i + 2] = four.z, out[4 * i + 3] = four.w;
    }
#pragma unroll
    for (int k = 0; k < kV; ++k) out[k] = fmaf(factor, row[k], out[k]), sum[k] = fmaf(factor, weight[k], sum[k]);
    static_cast<uint4*>(args.out)[place.at(args, r)] = pack(out, S{});
  }
  store_share(args, place, sum);
}

template <class S>
__global__ void __launch_bounds__(kShareLanes* kShareSides) sum_shares_kernel(const __grid_constant__ SharesArgs args) {
  __shared__ float sums[kShareSides][kShareLanes];
  const SharesArgs::Sum& of = args.of[blockIdx.y];
  const int column = blockIdx.x * kShareLanes + threadIdx.x;
  float sum = 0;
  if (column < args.width) {
#pragma unroll 8
    for (int64_t i = threadIdx.y; i < of.count; i += kShareSides) sum += of.shares[i * args.width + column];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
#pragma unroll
  for (int step = kShareSides / 2; step > 0; step /= 2) {
    __syncthreads();
    if (threadIdx.y < step) sums[threadIdx.y][threadIdx.x] += sums[threadIdx.y + step][threadIdx.x];
  }
  if (threadIdx.y == 0 && column < args.width) static_cast<S*>(of.out)[column] = to_storage<S>(sums[0][threadIdx.x]);
}

__global__ void __launch_bounds__(kRowThreads) prepare_kernel(const __grid_constant__ PrepareArgs args) {
  int64_t i = static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x;
  if (i < args.segments) {
    const int32_t end = args.ptr[i + 1];
    float sum = 0;
#pragma unroll 4
    for (int32_t e = args.ptr[i]; e < end; ++e) sum += __ldg(args.ds + args.at[e]);
    args.weights[args.pairs + i] = sum;
    return;
  }
  i -= args.segments;
  if (i < args.pairs) {
    args.weights[i] = 1;
    return;
  }
  i -= args.pairs;
  if (i < args.vector_words) static_cast<uint32_t*>(args.rows)[i] = static_cast<const uint32_t*>(args.vectors)[i];
}

}  // namespace edgeless::cuda
