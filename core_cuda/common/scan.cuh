// The kernels of exclusive prefix sums (scan.h).
#pragma once

#include <cstdint>

#include "scan.h"
#include "warp.cuh"

namespace edgeless::cuda {

// Returns the sum of x over the earlier threads of the block; total: over all of them.
template <class I>
__device__ __forceinline__ I sum_before(I x, I& total) {
  constexpr int kWarps = kScanThreads / 32;
  __shared__ I of_warps[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  I sum = x;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const I before = __shfl_up_sync(kFullWarp, sum, step);
    if (lane >= step) sum += before;
  }
  __syncthreads();  // of_warps is no longer read by an earlier call
  if (lane == 31) of_warps[warp] = sum;
  __syncthreads();
  sum -= x, total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) sum += of_warps[w];
    total += of_warps[w];
  }
  return sum;
}

// sums [scan_blocks(count)]: of the share of each block.
template <class I>
__global__ void __launch_bounds__(kScanThreads) share_sums_kernel(const I* numbers, int64_t count, I* sums) {
  const int64_t share = scan_share(count), begin = blockIdx.x * share, end = min(begin + share, count);
  I sum = 0, total;
#pragma unroll 4
  for (int64_t i = begin + threadIdx.x; i < end; i += kScanThreads) sum += numbers[i];
  sum_before(sum, total);
  if (threadIdx.x == 0) sums[blockIdx.x] = total;
}

template <class I>
__global__ void __launch_bounds__(kScanThreads) exclusive_sum_kernel(I* numbers, int64_t count, const I* sums) {
  const int64_t share = scan_share(count), begin = blockIdx.x * share, end = min(begin + share, count);
  I of_thread = 0, before;  // before: the sum in front of the tile
  for (int i = threadIdx.x; i < static_cast<int>(blockIdx.x); i += kScanThreads) of_thread += sums[i];
  sum_before(of_thread, before);
  for (int64_t first = begin; first < end; first += kScanTile) {
    const int64_t at = first + threadIdx.x * kScanNumbers;
    I x[kScanNumbers], own = 0, total;
#pragma unroll
    for (int k = 0; k < kScanNumbers; ++k) {
      x[k] = at + k < end ? numbers[at + k] : I(0);
      own += x[k];
    }
    I next = before + sum_before(own, total);
#pragma unroll
    for (int k = 0; k < kScanNumbers; ++k) {
      if (at + k < end) numbers[at + k] = next;
      next += x[k];
    }
    before += total;
  }
}

}  // namespace edgeless::cuda
