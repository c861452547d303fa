// The kernel that copies rows of any strides to rows of whole 16-byte vectors. A thread writes one vector; blockIdx.y
// selects the copy.
#pragma once

#include <cstdint>

#include "pad_rows.h"
#include "threads.cuh"

namespace edgeless::cuda {

// N: unsigned integer type of the values' size. T: unsigned integer type that can index all vectors.
template <class N, class T>
__device__ void pad_vector(const RowsCopy& copy, T at) {
  constexpr int kNumbers = 16 / sizeof(N);
  const T vectors = static_cast<T>(copy.padded / kNumbers), heads = static_cast<T>(copy.heads);
  const T place = at / vectors, row = place / heads;
  const int64_t first = static_cast<int64_t>(at - place * vectors) * kNumbers;
  const char* from = copy.from + static_cast<int64_t>(row) * copy.from_row +
                     static_cast<int64_t>(place - row * heads) * copy.from_head + first * copy.from_step;
  union {
    N numbers[kNumbers];
    uint4 whole;
  } x;
  if (copy.halves) {
    const int64_t left = copy.dim - first;
    const uint2 none{0, 0}, *at_halves = reinterpret_cast<const uint2*>(from);
    const uint2 low = left > 0 ? at_halves[0] : none, high = left > kNumbers / 2 ? at_halves[1] : none;
    x.whole = uint4{low.x, low.y, high.x, high.y};
  } else {
#pragma unroll
    for (int k = 0; k < kNumbers; ++k) {
      x.numbers[k] = first + k < copy.dim ? *reinterpret_cast<const N*>(from + k * copy.from_step) : N(0);
    }
  }
  reinterpret_cast<uint4*>(copy.to)[at] = x.whole;
}

template <class T>
__device__ void pad_any(const RowsCopy& copy, T at) {
  if (copy.size == 2) pad_vector<uint16_t>(copy, at);
  if (copy.size == 4) pad_vector<uint32_t>(copy, at);
  if (copy.size == 8) pad_vector<uint64_t>(copy, at);
}

__global__ void pad_rows_kernel(const __grid_constant__ RowsCopies copies) {
  const RowsCopy& copy = copies.at[blockIdx.y];
  const int64_t total = vectors_of(copy), at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= total) return;
  if (total < int64_t(1) << 32) {
    pad_any(copy, static_cast<uint32_t>(at));
  } else {
    pad_any(copy, static_cast<uint64_t>(at));
  }
}

}  // namespace edgeless::cuda
