// The kernel that only gathers rows: out[i] = passes * sum over neighbours j of <x[i], x[j]>. One warp owns one row of
// any length. All variants do the same arithmetic, so they differ only in their access pattern.
#pragma once

#include "../../common/threads.cuh"
#include "../../common/warp.cuh"
#include "dots.h"

namespace edgeless::cuda::gathers {

__device__ __forceinline__ float product(const float* a, const float* b) { return __ldg(a) * __ldg(b); }

__device__ __forceinline__ float product(const float4* a, const float4* b) {
  const float4 p = __ldg(a), q = __ldg(b);
  return p.x * q.x + p.y * q.y + p.z * q.z + p.w * q.w;
}

// `Load`: float or float4.
template <class Index, class Load, bool kByNeighbor>
__global__ void dots_kernel(const __grid_constant__ DotsArgs args) {
  const int64_t row = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  if (row >= args.graph.num_rows) return;
  const Index* indptr = static_cast<const Index*>(args.graph.indptr);
  const Index* indices = static_cast<const Index*>(args.graph.indices);
  const int loads = args.dim / static_cast<int>(sizeof(Load) / sizeof(float));
  const Load* x = reinterpret_cast<const Load*>(args.x);
  const Load* own = x + row * loads;
  const int64_t begin = indptr[row], end = indptr[row + 1];
  float sum = 0;
  for (int pass = 0; pass < args.passes; ++pass) {
    if constexpr (kByNeighbor) {
      for (int64_t edge = begin + lane; edge < end; edge += 32) {
        const Load* other = x + static_cast<int64_t>(__ldg(indices + edge)) * loads;
        for (int d = 0; d < loads; ++d) sum += product(own + d, other + d);
      }
    } else {
      for (int64_t edge = begin; edge < end; ++edge) {
        const Load* other = x + static_cast<int64_t>(__ldg(indices + edge)) * loads;
        for (int d = lane; d < loads; d += 32) sum += product(own + d, other + d);
      }
    }
  }
  sum = sub_warp_sum(sum, 32, kFullWarp);
  if (lane == 0) args.out[row] = sum;
}

}  // namespace edgeless::cuda::gathers
