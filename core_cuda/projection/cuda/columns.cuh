// Column sums in a thread block of 32 x 8 threads: threadIdx.x has four columns, 32 apart, and threadIdx.y (`side`) one
// of eight rows at a time.
#pragma once

#include "../../common/vec.cuh"
#include "columns.h"

namespace edgeless::cuda::projection {

// Tree reduction over the sides of a block; the result is valid on side 0.
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
