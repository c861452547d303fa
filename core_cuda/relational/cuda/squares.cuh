// x^T g of two tiles in shared memory, which have 64 rows of up to 64 floats each. A warp computes a square of 32
// columns of x by 32 columns of g. A lane loads four adjacent columns of x and of g at once. Which rows or columns of a
// fragment these are is free, so the results of a lane are four adjacent elements too. The products use TF32 instead of
// float16, because rows differ in their exponents (scaled_halves.cuh).
#pragma once

#include "../../common/tf32.cuh"
#include "segment_tiles.h"

namespace edgeless::cuda::relational {

constexpr int kSquare = 32, kSquareVectors = 2 * kSquare / 4;  // 16-byte vectors of a tile's row

// Swizzled index of a vector in a tile: eight lanes access eight vectors in all banks, two in each of four consecutive
// rows or four in each of two.
__device__ __forceinline__ int place_of(int row, int vector) {
  return row * kSquareVectors + (vector ^ (row % 2 * 4 + row / 2 % 2 * 2));
}

// A warp's part. In lane 4 q + t, element 2 h + c of fragment [i][j] is that of x's column 4 q + 2 i + h and g's column
// 8 t + 4 c + j, counted from the square's first.
using Square = float[2][4][4];

// Recomputes elements of `sum` that are not finite, over rows [begin, end): split() turns an infinity into NaN.
static __device__ __noinline__ void make_again(const float4* x, const float4* g, int down, int side, int begin, int end,
                                               Square& sum) {
  const int q = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  for (int i = 0; i < 32; ++i) {
    float& number = sum[i / 16][i / 4 % 4][i % 4];
    if (isfinite(number)) continue;
    const int row = down + 4 * q + i / 16 * 2 + i / 2 % 2, column = side + 8 * t + i % 2 * 4 + i / 4 % 4;
    number = 0;
    for (int k = begin; k < end; ++k) {
      const auto* const of_x = reinterpret_cast<const float*>(x + place_of(k, row / 4));
      const auto* const of_g = reinterpret_cast<const float*>(g + place_of(k, column / 4));
      number = fmaf(of_x[row % 4], of_g[column % 4], number);
    }
  }
}

// sum += the square that begins at columns `down` of x and `side` of g, over `count` rows, behind which there are zeros
// up to a multiple of eight. Calls visit() with all elements of g in the square's columns, four at a time. To be called
// by the whole warp.
template <class Visit>
__device__ __forceinline__ void add_square(const float4* x, const float4* g, int down, int side, int count, Square& sum,
                                           Visit&& visit) {
  constexpr int kOnCores = 32;  // rows that are summed on the tensor cores, which round towards zero
  const int q = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll 1
  for (int chunk = 0; chunk < count; chunk += kOnCores) {
    Square part = {};
#pragma unroll 1
    for (int row = chunk; row < min(chunk + kOnCores, count); row += 8) {
      uint32_t left[2][2][4], right[2][4][2];  // TF32 parts: nearest, remainder
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float4 four_x = x[place_of(row + t + 4 * i, down / 4 + q)];
        const float4 four_g = g[place_of(row + t + 4 * i, side / 4 + q)];
        visit(four_g);
        const float of_x[4] = {four_x.x, four_x.y, four_x.z, four_x.w};
        const float of_g[4] = {four_g.x, four_g.y, four_g.z, four_g.w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          split(of_x[k], left[0][k / 2][2 * i + k % 2], left[1][k / 2][2 * i + k % 2]);
          split(of_g[k], right[0][k][i], right[1][k][i]);
        }
      }
      multiply_parts(part, left, right, false);
    }
    if (!all_finite(part[0]) || !all_finite(part[1])) {
      Square again;  // a copy in local memory, so that `part` stays in registers
      memcpy(again, part, sizeof(again));
      make_again(x, g, down, side, chunk, min(chunk + kOnCores, count), again);
      memcpy(part, again, sizeof(again));
    }
#pragma unroll
    for (int i = 0; i < 32; ++i) sum[i / 16][i / 4 % 4][i % 4] += part[i / 16][i / 4 % 4][i % 4];
  }
}

// Stores the square as part of a matrix [rows, columns].
__device__ __forceinline__ void store_square(float* to, int rows, int columns, int down, int side, const Square& sum) {
  const int q = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int row = down + 4 * q + 2 * i + k / 2, column = side + 8 * t + k % 2 * 4;
      if (row >= rows || column >= columns) continue;
      *reinterpret_cast<float4*>(to + row * columns + column) =
          make_float4(sum[i][0][k], sum[i][1][k], sum[i][2][k], sum[i][3][k]);
    }
  }
}

}  // namespace edgeless::cuda::relational
