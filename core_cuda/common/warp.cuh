// Exchanges within sub-warps: 1 to 32 neighbouring lanes of a warp that reduce one row of one head together, a power of
// two except in SubWarpOfFives. No torch.
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

// Sum and (below) maximum of x over the edges of a batch: over kEdges neighbouring lanes, which own one edge each.
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
__device__ __forceinline__ A sub_warp_sum(A x, int width, unsigned mask) {
  for (int step = 1; step < width; step *= 2) x += __shfl_xor_sync(mask, x, step);
  return x;
}

// Broadcasts x from the owner of edge `edge` to every lane of its sub-warp. `edge` may differ between sub-warps.
template <int kEdges, class T>
__device__ __forceinline__ T from_owner(T x, int edge) {
  if constexpr (kEdges == 1) return x;
  return __shfl_sync(kFullWarp, x, edge, kEdges);
}

// These exchanges for sub-warps of one or two groups of five lanes. A group owns the five edges of a batch. The two
// last lanes of a warp have no sub-warp and act as the warp's first lane.
template <int kLanes>
struct SubWarpOfFives {
  static_assert(kLanes == 5 || kLanes == 10);
  static constexpr int kSubWarps = 32 / kLanes;  // per warp
  int first;                                     // the sub-warp's first lane in its warp
  int lane;                                      // index in the sub-warp
  int owned;                                     // edge of the batch that this lane owns
  // Lanes of the warp. next: those 1, 2 and 4 positions later in the group, cyclically; other: the lane in this
  // position of the other group.
  int next[3], other;

  __device__ SubWarpOfFives(int first, int lane)
      : first(first), lane(lane), owned(lane % 5), other(first + (lane + 5) % kLanes) {
#pragma unroll
    for (int i = 0; i < 3; ++i) next[i] = first + lane - owned + (owned + (1 << i)) % 5;
  }

  static __device__ bool has_sub_warp() { return threadIdx.x % 32 < kSubWarps * kLanes; }
  static __device__ int lane_of_thread() { return has_sub_warp() ? threadIdx.x % 32 % kLanes : 0; }
  static __device__ int first_of_thread() { return has_sub_warp() ? threadIdx.x % 32 / kLanes * kLanes : 0; }
  __device__ unsigned mask() const { return ((1u << kLanes) - 1) << first; }

  template <class T>
  __device__ __forceinline__ T from_owner(T x, int edge) const {
    return __shfl_sync(kFullWarp, x, first + edge);
  }

  // A lane's sum for the lane j positions earlier moves to that lane in steps of 4, 2 and 1; sums that meet are added.
  template <class A>
  __device__ __forceinline__ A sum_of_own_edge(const A (&v)[5]) const {
    A x[5];  // indexed by j
#pragma unroll
    for (int j = 0; j < 5; ++j) x[j] = v[(5 - j) % 5];
#pragma unroll
    for (int step = 1; step < 5; step *= 2) {
      A turned[5];
#pragma unroll
      for (int j = 0; j < 5; ++j) turned[j] = owned & step ? x[(j + 5 - step) % 5] : x[j];
#pragma unroll
      for (int j = 0; j < 5; ++j) x[j] = turned[j];
    }
    x[0] += __shfl_sync(kFullWarp, x[4], next[2]);
    x[0] += __shfl_sync(kFullWarp, x[2], next[1]);
    x[1] += __shfl_sync(kFullWarp, x[3], next[1]);
    x[0] += __shfl_sync(kFullWarp, x[1], next[0]);
    if constexpr (kLanes > 5) x[0] += __shfl_sync(kFullWarp, x[0], other);
    return x[0];
  }

  template <class A>
  __device__ __forceinline__ A batch_max(A x) const {
#pragma unroll
    for (int i = 0; i < 3; ++i) x = max(x, __shfl_sync(kFullWarp, x, next[i]));
    return x;
  }

  // Sum of x over the first `lanes` lanes of the sub-warp, the same bits in every lane.
  template <class A>
  __device__ __forceinline__ A sum_of_lanes(A x, int lanes, unsigned mask) const {
    A sum = 0;
    for (int i = 0; i < lanes; ++i) sum += __shfl_sync(mask, x, first + i);
    return sum;
  }
};

}  // namespace edgeless::cuda
