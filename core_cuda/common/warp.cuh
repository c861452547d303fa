// Exchanges within sub-warps (`team` in the code): 1 to 32 neighbouring lanes of a warp, a power of two, that reduce
// one row of one head together. No torch.
//
// A sub-warp processes its edges in batches of one, two, four or eight, at most one per lane. Lane q owns the scalars
// (logit, weight) of edge q of the batch; with B edges per batch, lanes q + B, q + 2 B and so on hold copies. So the
// four dot products of a batch take three exchanges plus a butterfly sum, exponentials and dropout are computed once
// per edge, and a weight reaches all lanes by one shuffle.
#pragma once

#include <cstdint>

namespace edgeless::cuda {

constexpr unsigned kFullWarp = 0xffffffffu;

// Sums every v[u] over the lanes of the sub-warp; the lanes that own edge u get the sum of v[u]. To be called by the
// whole warp.
template <int kEdges, class A>
__device__ __forceinline__ A sum_of_own_edge(const A (&v)[kEdges], int lane, int width) {
  A x[kEdges];
#pragma unroll
  for (int u = 0; u < kEdges; ++u) x[u] = v[u];
#pragma unroll
  for (int step = 1; step < kEdges; step *= 2) {
    const bool upper = lane & step;
#pragma unroll
    for (int i = 0; i < kEdges / 2 / step; ++i) {
      const A keep = upper ? x[2 * i + 1] : x[2 * i], give = upper ? x[2 * i] : x[2 * i + 1];
      x[i] = keep + __shfl_xor_sync(kFullWarp, give, step);
    }
  }
  A sum = x[0];
#pragma unroll
  for (int step = kEdges; step < 32; step *= 2) {
    if (width > step) sum += __shfl_xor_sync(kFullWarp, sum, step);
  }
  return sum;
}

// Sum (and below maximum) of x over the edges of a batch: over kEdges neighbouring lanes, which own one edge each.
template <int kEdges, class A>
__device__ __forceinline__ A batch_sum(A x, unsigned mask) {
#pragma unroll
  for (int step = 1; step < kEdges; step *= 2) x += __shfl_xor_sync(mask, x, step);
  return x;
}

template <int kEdges, class A>
__device__ __forceinline__ A batch_max(A x) {
#pragma unroll
  for (int step = 1; step < kEdges; step *= 2) x = max(x, __shfl_xor_sync(kFullWarp, x, step));
  return x;
}

template <class A>
__device__ __forceinline__ A team_sum(A x, int width, unsigned mask) {
  for (int step = 1; step < width; step *= 2) x += __shfl_xor_sync(mask, x, step);
  return x;
}

// Broadcasts x from the owner of edge `edge` to every lane of its sub-warp. `edge` may differ between sub-warps.
template <int kEdges, class T>
__device__ __forceinline__ T from_owner(T x, int edge) {
  if constexpr (kEdges == 1) return x;
  return __shfl_sync(kFullWarp, x, edge, kEdges);
}

}  // namespace edgeless::cuda
