// Teams: 4, 8, 16 or 32 neighbouring lanes of a warp that walk one row of one head together. No torch.
//
// A team takes its edges in batches of four. Each of its quads of lanes owns the scalars (logit, weight) of one batch:
// lane q of a quad owns edge q. So four dot products cost three exchanges and a few plain ones, exponentials and
// dropout are computed once, and a weight reaches all lanes by one shuffle.
#pragma once

#include <cstdint>

namespace edgeless::cuda {

constexpr int kBatch = 4;
constexpr unsigned kFullWarp = 0xffffffffu;

// Sums v[u] over the lanes of the team; the lane that owns edge u gets the sum of v[u]. Whole warp.
template <class A>
__device__ __forceinline__ A sum_of_own_edge(const A (&v)[kBatch], int lane, int width) {
  const bool odd = lane & 1, upper = lane & 2;
  A low = odd ? v[1] : v[0], high = odd ? v[3] : v[2];
  low += __shfl_xor_sync(kFullWarp, odd ? v[0] : v[1], 1);
  high += __shfl_xor_sync(kFullWarp, odd ? v[2] : v[3], 1);
  A sum = upper ? high : low;
  sum += __shfl_xor_sync(kFullWarp, upper ? low : high, 2);
  if (width > 4) sum += __shfl_xor_sync(kFullWarp, sum, 4);
  if (width > 8) sum += __shfl_xor_sync(kFullWarp, sum, 8);
  if (width > 16) sum += __shfl_xor_sync(kFullWarp, sum, 16);
  return sum;
}

template <class A>
__device__ __forceinline__ A quad_sum(A x, unsigned mask) {
  x += __shfl_xor_sync(mask, x, 1);
  return x + __shfl_xor_sync(mask, x, 2);
}

template <class A>
__device__ __forceinline__ A quad_max(A x) {
  x = max(x, __shfl_xor_sync(kFullWarp, x, 1));
  return max(x, __shfl_xor_sync(kFullWarp, x, 2));
}

template <class A>
__device__ __forceinline__ A team_sum(A x, int width, unsigned mask) {
  for (int step = 1; step < width; step *= 2) x += __shfl_xor_sync(mask, x, step);
  return x;
}

// The value that the owner of edge `edge` holds, in every lane. `edge` may differ from quad to quad.
template <class T>
__device__ __forceinline__ T from_owner(T x, int edge) {
  return __shfl_sync(kFullWarp, x, edge, kBatch);
}

}  // namespace edgeless::cuda
