// Vectorized loads and stores of one element or four consecutive ones.
#pragma once

#include "../../common/vec.cuh"

namespace edgeless::cuda::projection {

template <class S>
struct alignas(4 * sizeof(S)) Four {
  S x[4];
};

template <class S, int kCount>
__device__ __forceinline__ void load_numbers(const S* from, Arithmetic<S> (&to)[kCount]) {
  static_assert(kCount == 1 || kCount == 4);
  if constexpr (kCount == 1) {
    to[0] = to_arithmetic(*from);
  } else {
    const Four<S> four = *reinterpret_cast<const Four<S>*>(from);
#pragma unroll
    for (int k = 0; k < 4; ++k) to[k] = to_arithmetic(four.x[k]);
  }
}

template <class S, int kCount>
__device__ __forceinline__ void store_numbers(S* to, const Arithmetic<S> (&from)[kCount]) {
  static_assert(kCount == 1 || kCount == 4);
  if constexpr (kCount == 1) {
    *to = to_storage<S>(from[0]);
  } else {
    Four<S> four;
#pragma unroll
    for (int k = 0; k < 4; ++k) four.x[k] = to_storage<S>(from[k]);
    *reinterpret_cast<Four<S>*>(to) = four;
  }
}

}  // namespace edgeless::cuda::projection
