// The weights of pair attention, out [types, 2 heads, size]: for every type and head the key matrix times its scale and
// a factor that all key matrices share, and the value matrix; and the gradients of the matrices and scales
// (PairWeightsArgs in pair_weights.h has the shapes). A thread block computes one matrix, and a thread four adjacent
// elements at a time.
#pragma once

#include <type_traits>

#include "../../common/vec.cuh"
#include "../../common/warp.cuh"
#include "geometry.h"
#include "pair_weights.h"

namespace edgeless::cuda::relational::pair_weights {

constexpr int kAtOnce = 4;  // adjacent elements that a thread processes at a time

// Four elements of a parameter or of a row as one vector: 16 bytes of floats, 8 bytes of 16-bit elements.
template <class S>
using InFours = std::conditional_t<sizeof(S) == 4, S, OfFour<S>>;

template <class S>
__device__ __forceinline__ void read(const S* from, float (&to)[kAtOnce]) {
  unpack(*reinterpret_cast<const Raw<InFours<S>>*>(from), to, InFours<S>{});
}

template <class S>
__device__ __forceinline__ void write(S* to, const float (&from)[kAtOnce]) {
  *reinterpret_cast<Raw<InFours<S>>*>(to) = pack(from, InFours<S>{});
}

// The matrix, or the single element, of the block's type and of a head.
template <class P, class Data>
__device__ __forceinline__ P* matrix(const TypedMatrices<Data>& of, int head) {
  return static_cast<P*>(of.numbers) + blockIdx.x * of.type + head * of.head;
}
template <class P>
__device__ __forceinline__ P* matrix_if_wanted(const TypedMatrices<void>& of, int head) {
  return of.numbers ? matrix<P>(of, head) : nullptr;
}

// S: dtype of rows, P: dtype of parameters.
template <class S, class P>
__global__ void __launch_bounds__(kThreads) pair_weights_kernel(const __grid_constant__ PairWeightsArgs args) {
  const int head = blockIdx.y % args.heads;
  const bool of_keys = blockIdx.y < args.heads;
  const P* from = matrix<const P>(of_keys ? args.keys : args.values, head);
  S* to = static_cast<S*>(args.out) + (blockIdx.x * gridDim.y + blockIdx.y) * args.size;
  const float scale = of_keys ? args.factor * to_arithmetic(*matrix<const P>(args.scale, head)) : 1;
#pragma unroll 2
  for (int64_t i = threadIdx.x * kAtOnce; i < args.size; i += kThreads * kAtOnce) {
    float numbers[kAtOnce];
    read(from + i, numbers);
#pragma unroll
    for (float& number : numbers) number *= scale;
    write(to + i, numbers);
  }
}

template <class P>
__global__ void __launch_bounds__(kThreads) pair_weight_gradients_kernel(const __grid_constant__ PairWeightsArgs args) {
  __shared__ float sums[kThreads / 32];
  const int head = blockIdx.y % args.heads;
  const bool of_keys = blockIdx.y < args.heads;
  const float* grad = args.grad + (blockIdx.x * gridDim.y + blockIdx.y) * args.size;
  P* const to = matrix_if_wanted<P>(of_keys ? args.of_keys : args.of_values, head);
  P* const of_scale = of_keys ? matrix_if_wanted<P>(args.of_scale, head) : nullptr;
  const P* const keys = matrix<const P>(args.keys, head);
  const float scale = of_keys ? to_arithmetic(*matrix<const P>(args.scale, head)) : 1;
  float sum = 0;
#pragma unroll 2
  for (int64_t i = threadIdx.x * kAtOnce; i < args.size; i += kThreads * kAtOnce) {
    float numbers[kAtOnce], key[kAtOnce];
    read(grad + i, numbers);
    if (of_scale) {
      read(keys + i, key);
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) sum = fmaf(numbers[j], key[j], sum);
    }
    if (!to) continue;
#pragma unroll
    for (float& number : numbers) number *= scale;
    write(to + i, numbers);
  }
  if (!of_scale) return;
  sum = sub_warp_sum(sum, 32, kFullWarp);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  sum = sub_warp_sum(threadIdx.x < kThreads / 32 ? sums[threadIdx.x] : 0.0f, 32, kFullWarp);
  if (threadIdx.x == 0) *of_scale = to_storage<P>(sum);
}

}  // namespace edgeless::cuda::relational::pair_weights
