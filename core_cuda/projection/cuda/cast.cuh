// The kernel that casts several tensors in one launch, as autocast casts an input and the maps of a layer. blockIdx.y
// selects the tensor. A thread converts four elements at a time if the source is aligned to four elements.
#pragma once

#include <cstdint>
#include <type_traits>

#include "fours.cuh"
#include "kernels.h"

namespace edgeless::cuda::projection {

template <class From, class To>
__device__ __forceinline__ To convert(From x) {
  if constexpr (std::is_same_v<From, To>) return x;
  if constexpr (std::is_same_v<To, double>) return static_cast<double>(to_arithmetic(x));
  return to_storage<To>(static_cast<Arithmetic<To>>(to_arithmetic(x)));
}

template <class From, class To>
__device__ __forceinline__ void copy(const From* from, To* to, int64_t numbers) {
  const int64_t step = int64_t(gridDim.x) * kCastThreads, fours = numbers / kCastPer;
  const int64_t thread = int64_t(blockIdx.x) * kCastThreads + threadIdx.x;
  const bool aligned = reinterpret_cast<uintptr_t>(from) % sizeof(Four<From>) == 0;  // the destination always is
  int64_t rest = 0;
  if (aligned) {
    for (int64_t i = thread; i < fours; i += step) {
      const Four<From> x = reinterpret_cast<const Four<From>*>(from)[i];
      Four<To> y;
#pragma unroll
      for (int k = 0; k < kCastPer; ++k) y.x[k] = convert<From, To>(x.x[k]);
      reinterpret_cast<Four<To>*>(to)[i] = y;
    }
    rest = fours * kCastPer;
  }
  for (int64_t i = rest + thread; i < numbers; i += step) to[i] = convert<From, To>(from[i]);
}

template <class To>
__global__ void __launch_bounds__(kCastThreads) cast_kernel(const __grid_constant__ CastArgs args) {
  const int t = blockIdx.y;
  To* to = static_cast<To*>(args.to[t]);
  switch (args.dtype[t]) {
    case Storage::f32: return copy(static_cast<const float*>(args.from[t]), to, args.numbers[t]);
    case Storage::f16: return copy(static_cast<const __half*>(args.from[t]), to, args.numbers[t]);
    case Storage::bf16: return copy(static_cast<const __nv_bfloat16*>(args.from[t]), to, args.numbers[t]);
    default: return copy(static_cast<const double*>(args.from[t]), to, args.numbers[t]);
  }
}

}  // namespace edgeless::cuda::projection
