// Teams: 1 to 32 neighbouring lanes of a warp, a power of two, that walk one row of one head together. No torch.
//
// A team takes its edges one, two, four or eight at a time, no more than it has lanes. Lane q owns the scalars
// (logit, weight) of edge q of these, and so do the lanes that are a multiple of their number further on. So four dot
// products cost three exchanges and a few plain ones, exponentials and dropout are computed once, and a weight reaches
// all lanes by one shuffle.
#pragma once

#include <cstdint>

namespace edgeless::cuda {

constexpr unsigned kFullWarp = 0xffffffffu;

// Sums v[u] over the lanes of the team; the lanes that own edge u get the sum of v[u]. Whole warp.
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

// Over the lanes that own the edges of a batch.
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

// The value that the owner of edge `edge` holds, in every lane. `edge` may differ from team to team.
template <int kEdges, class T>
__device__ __forceinline__ T from_owner(T x, int edge) {
  if constexpr (kEdges == 1) return x;
  return __shfl_sync(kFullWarp, x, edge, kEdges);
}

}  // namespace edgeless::cuda
