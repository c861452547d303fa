// Sums over rows, column by column: a block has 32 lanes side by side, each with four columns 32 apart, and 8 rows
// under way.
#pragma once

#include "../../common/vec.cuh"

namespace edgeless::cuda::maps {

constexpr int kLanes = 32, kSides = 8, kPer = 4;

// The sums over a block's sides, in their order; valid on side 0.
template <class A>
__device__ __forceinline__ A over_sides(A x, A (&shared)[kSides][kLanes]) {
  shared[threadIdx.y][threadIdx.x] = x;
  __syncthreads();
  A sum = 0;
  if (threadIdx.y == 0) {
#pragma unroll
    for (int side = 0; side < kSides; ++side) sum += shared[side][threadIdx.x];
  }
  __syncthreads();
  return sum;
}

}  // namespace edgeless::cuda::maps
