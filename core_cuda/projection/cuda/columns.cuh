// Sums over rows, column by column: a block has 32 lanes side by side, each with four columns 32 apart, and 8 rows
// under way.
#pragma once

#include "../../common/vec.cuh"

namespace edgeless::cuda::projection {

constexpr int kLanes = 32, kSides = 8, kPer = 4;

// The sums over a block's sides, pair by pair; valid on side 0.
template <class A, int kAll>
__device__ __forceinline__ A over_sides(A x, A (&shared)[kAll][kLanes]) {
  shared[threadIdx.y][threadIdx.x] = x;
  __syncthreads();
  A sum[kAll] = {};
  if (threadIdx.y == 0) {
#pragma unroll
    for (int side = 0; side < kAll; ++side) sum[side] = shared[side][threadIdx.x];
#pragma unroll
    for (int step = kAll / 2; step > 0; step /= 2) {
#pragma unroll
      for (int side = 0; side < step; ++side) sum[side] += sum[side + step];
    }
  }
  __syncthreads();
  return sum[0];
}

}  // namespace edgeless::cuda::projection
