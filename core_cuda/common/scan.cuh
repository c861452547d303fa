// The kernels of prefix sums and maxima (scan.h), which take three launches: every block reduces its tile to a total,
// one block scans the totals, and every block scans its tile, starting from the scanned total of the tiles before it.
// If there is one tile, the last launch suffices.
//
// A warp has kScanItems consecutive groups of 32 values of a tile, and a lane has one value of each group. So global
// memory is accessed in whole lines, and the shuffles that scan the groups do not wait for each other. The same thread
// reads and writes a value.
#pragma once

#include <cstdint>

#include "scan.h"
#include "warp.cuh"

namespace edgeless::cuda {

template <Scan kOf, class I>
__device__ __forceinline__ I scanned(I a, I b) {
  if constexpr (kOf == Scan::sum) return a + b;
  return a < b ? b : a;
}

// The identity of the scan.
template <Scan kOf, class I>
constexpr I kScanOfNone = kOf == Scan::sum ? I(0) : static_cast<I>(I(1) << (8 * sizeof(I) - 1));

// Inclusive scan over the lanes. Called by whole warps.
template <Scan kOf, class I>
__device__ __forceinline__ I scan_of_warp(I x) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const I below = __shfl_up_sync(kFullWarp, x, step);
    if (lane >= step) x = scanned<kOf>(below, x);
  }
  return x;
}

template <class I>
struct Scanned {
  I before, all;
};

// The sum or maximum over the warps before this one, and over all warps. of_warp: the warp's total, in all lanes.
// Called by the whole block.
template <Scan kOf, class I, int kWarps>
__device__ __forceinline__ Scanned<I> scan_of_warps(I of_warp, I (&of_warps)[kWarps]) {
  const int warp = threadIdx.x / 32;
  if (threadIdx.x % 32 == 0) of_warps[warp] = of_warp;
  __syncthreads();
  Scanned<I> found{kScanOfNone<kOf, I>, kScanOfNone<kOf, I>};
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const I x = of_warps[w];
    if (w < warp) found.before = scanned<kOf>(found.before, x);
    found.all = scanned<kOf>(found.all, x);
  }
  __syncthreads();  // before of_warps is used again
  return found;
}

// The sum or maximum of x over the threads before this one, and over all threads. Called by the whole block.
template <Scan kOf, class I, int kWarps>
__device__ __forceinline__ Scanned<I> scan_of_threads(I x, I (&of_warps)[kWarps]) {
  const I here = scan_of_warp<kOf>(x), below = __shfl_up_sync(kFullWarp, here, 1);
  Scanned<I> found = scan_of_warps<kOf>(__shfl_sync(kFullWarp, here, 31), of_warps);
  if (threadIdx.x % 32 > 0) found.before = scanned<kOf>(found.before, below);
  return found;
}

constexpr int kScanWarps = kScanThreads / 32;

// Scans the tile that begins at value `begin` of `count`. before: the scan of all tiles before this one. Returns the
// tile's total. Called by the whole block.
template <Scan kOf, bool kInclusive, class I>
__device__ __forceinline__ I scan_tile(I* numbers, int64_t begin, int64_t count, I before, I (&of_warps)[kScanWarps]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t first = begin + warp * (kScanItems * 32) + lane;
  I x[kScanItems], all = kScanOfNone<kOf, I>;  // all: total of the warp's groups so far
#pragma unroll
  for (int k = 0; k < kScanItems; ++k) x[k] = first + k * 32 < count ? numbers[first + k * 32] : kScanOfNone<kOf, I>;
#pragma unroll
  for (int k = 0; k < kScanItems; ++k) x[k] = scan_of_warp<kOf>(x[k]);
#pragma unroll
  for (int k = 0; k < kScanItems; ++k) {
    const I of_group = __shfl_sync(kFullWarp, x[k], 31);
    if constexpr (kInclusive) {
      x[k] = scanned<kOf>(all, x[k]);
    } else {
      const I below = __shfl_up_sync(kFullWarp, x[k], 1);
      x[k] = lane > 0 ? scanned<kOf>(all, below) : all;
    }
    all = scanned<kOf>(all, of_group);
  }
  const Scanned<I> warps = scan_of_warps<kOf>(all, of_warps);
  before = scanned<kOf>(before, warps.before);
#pragma unroll
  for (int k = 0; k < kScanItems; ++k) {
    if (first + k * 32 < count) numbers[first + k * 32] = scanned<kOf>(before, x[k]);
  }
  return warps.all;
}

template <class I, Scan kOf>
__global__ void __launch_bounds__(kScanThreads) scan_totals_kernel(const I* numbers, int64_t count, I* totals) {
  __shared__ I of_warps[kScanWarps];
  const int64_t first = blockIdx.x * kScanTile + threadIdx.x;
  I own = kScanOfNone<kOf, I>;
#pragma unroll
  for (int k = 0; k < kScanItems; ++k) {
    const int64_t at = first + k * kScanThreads;
    if (at < count) own = scanned<kOf>(own, numbers[at]);
  }
  const I all = scan_of_threads<kOf>(own, of_warps).all;
  if (threadIdx.x == 0) totals[blockIdx.x] = all;
}

// Exclusive scan of the totals, by one block.
template <class I, Scan kOf>
__global__ void __launch_bounds__(kScanThreads) scan_of_totals_kernel(I* totals, int64_t count) {
  __shared__ I of_warps[kScanWarps];
  I before = kScanOfNone<kOf, I>;
  for (int64_t begin = 0; begin < count; begin += kScanTile) {
    before = scanned<kOf>(before, scan_tile<kOf, false>(totals, begin, count, before, of_warps));
  }
}

// befores [tiles]: the scan of all tiles before each; null: there is one tile.
template <class I, Scan kOf, bool kInclusive>
__global__ void __launch_bounds__(kScanThreads) scan_tiles_kernel(I* numbers, int64_t count, const I* befores) {
  __shared__ I of_warps[kScanWarps];
  const I before = befores ? befores[blockIdx.x] : kScanOfNone<kOf, I>;
  scan_tile<kOf, kInclusive>(numbers, blockIdx.x * kScanTile, count, before, of_warps);
}

}  // namespace edgeless::cuda
