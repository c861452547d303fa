// Products of floats as three products of float16 values each. float16 has as many significant bits as TF32, and takes
// half as many instructions and half the memory.
//
// A float is split into the nearest float16 value and the remainder, which is rounded to float16 too. With the sign of
// the remainder these have 22 significant bits or more, so omitting the product of the two remainders loses no more
// than rounding the float32 product does. float16 has few exponents, so every row and every column is first multiplied
// by a power of two that brings its largest value to [2^14, 2^15); remainders then have bits down to 2^-24. Tensor
// cores round sums towards zero, so sums of 32 products are moved out and added as floats. (Ootomo, Yokota 2022, as in
// projection/cuda/float_tiles.cuh, with a scale per row and column in place of one for the remainders.)
#pragma once

#include <cuda_fp16.h>

#include "../../projection/cuda/half_tiles.cuh"
#include "geometry.h"
#include "shared_access.cuh"

namespace edgeless::cuda::relational {

// by: brings values of which the largest is `most` to the range of float16. back: the inverse.
struct Scale {
  float by, back;
};

__device__ __forceinline__ Scale scale_of(float most) {
  const uint32_t exponent = __float_as_uint(most) >> 23 & 255;
  const uint32_t by = min(2 * 127 + 14 - exponent, 253u);  // 254 would make `back` zero
  return {__uint_as_float(by << 23), __uint_as_float((254 - by) << 23)};
}

__device__ __forceinline__ void split_pair(float x, float y, float by, uint32_t& nearest, uint32_t& rest) {
  const auto as_word = [](const __half2& pair) { return reinterpret_cast<const uint32_t&>(pair); };
  x *= by, y *= by;
  const __half2 near = __floats2half2_rn(x, y);
  const float2 back = __half22float2(near);
  nearest = as_word(near), rest = as_word(__floats2half2_rn(x - back.x, y - back.y));
}

// Layout of a matrix [kWidth, kWidth], the right factor, in 16-byte vectors: for 16 depths and 16 columns a vector for
// every lane, then one for every lane with the remainders. Behind all of them are the factors by which the columns of
// the product are multiplied.
template <int kWidth>
struct WeightParts {
  static constexpr int kSteps = kWidth / 16;  // steps of 16 depths or columns
  static constexpr int kVectors = part_vectors(kWidth), kParts = kVectors - kWidth / 4;  // in all; without the factors
  // Index of the lane's vector for depths from 16 step and columns from 16 pair on; that of the remainders is 32
  // higher.
  static constexpr int place(int step, int pair, int lane) { return (step * kSteps + pair) * 64 + lane; }
  // The values of a row stay in registers in the order of the load, four adjacent ones per lane, which is not the order
  // of a fragment. So each half of a lane's fragment has this depth and the next, of this column, in place of the
  // fragment's own.
  static __device__ __forceinline__ int depth_of(int lane, int half) { return lane % 4 * 4 + half * 2; }
  static __device__ __forceinline__ int column_of(int lane, int half) { return lane / 8 * 4 + lane / 4 % 2 + half * 2; }
};

// Stores a matrix in this layout; elements outside [depth, columns] are zero. kTransposed: it is stored as [columns,
// depth]. To be called by a block of kPartThreads.
template <int kWidth, bool kTransposed>
__device__ __forceinline__ void put_parts(uint4* to, const float* from, int64_t row_numbers, int depth, int columns) {
  using Parts = WeightParts<kWidth>;
  constexpr int kLines = kPartThreads / kWidth, kEach = kWidth / kLines;
  __shared__ float matrix[kWidth][kWidth + 1], most[kLines][kWidth], by[kWidth];
  const int column = threadIdx.x % kWidth, line = threadIdx.x / kWidth;
  float x[kEach], found = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int row = line + i * kLines;
    const bool inside = kTransposed ? row < columns && column < depth : row < depth && column < columns;
    x[i] = inside ? __ldg(from + row * row_numbers + column) : 0;
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    (kTransposed ? matrix[column][line + i * kLines] : matrix[line + i * kLines][column]) = x[i];
  if constexpr (kTransposed) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kEach; ++i) x[i] = matrix[line + i * kLines][column];
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) found = fmaxf(found, fabsf(x[i]));
  most[line][column] = found;
  __syncthreads();
  if (line == 0) {
#pragma unroll
    for (int i = 1; i < kLines; ++i) found = fmaxf(found, most[i][column]);
    const Scale scale = scale_of(found);
    by[column] = scale.by, reinterpret_cast<float*>(to + Parts::kParts)[column] = scale.back;
  }
  __syncthreads();
#pragma unroll
  for (int i = threadIdx.x; i < Parts::kParts / 2; i += kPartThreads) {
    const int lane = i % 32, pair = i / 32 % Parts::kSteps, step = i / 32 / Parts::kSteps;
    uint32_t nearest[4], rest[4];
#pragma unroll
    for (int h = 0; h < 4; ++h) {
      const int row = step * 16 + Parts::depth_of(lane, h % 2), at = pair * 16 + Parts::column_of(lane, h / 2);
      split_pair(matrix[row][at], matrix[row + 1][at], by[at], nearest[h], rest[h]);
    }
    uint4* const place = to + Parts::place(step, pair, lane);
    place[0] = make_uint4(nearest[0], nearest[1], nearest[2], nearest[3]);
    place[32] = make_uint4(rest[0], rest[1], rest[2], rest[3]);
  }
}

// Sixteen rows in the registers of a warp: lane 4 i + t has elements 4 t to 4 t + 3 of rows i and i + 8, and those 16,
// 32 and 48 further.
template <int kWidth>
using WarpRows = float[2][kWidth / 4];

// product = rows times the matrix whose parts are in shared memory. To be called by the whole warp.
template <int kWidth>
__device__ __forceinline__ void multiply_rows(const WarpRows<kWidth>& rows, const uint4* parts,
                                              WarpRows<kWidth>& product) {
  using Parts = WeightParts<kWidth>;
  constexpr int kOnCores = 2;  // steps of 16 depths that the tensor cores sum
  const int lane = threadIdx.x % 32;
  Scale scale[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float most = 0;
#pragma unroll
    for (int k = 0; k < kWidth / 4; ++k) most = fmaxf(most, fabsf(rows[i][k]));
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
    scale[i] = scale_of(fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2)));
  }
#pragma unroll
  for (int chunk = 0; chunk < Parts::kSteps; chunk += kOnCores) {
    float sum[kWidth / 8][4] = {};
#pragma unroll
    for (int step = chunk; step < min(chunk + kOnCores, Parts::kSteps); ++step) {
      uint32_t left[2][4];  // remainders, nearest values
#pragma unroll
      for (int h = 0; h < 4; ++h) {
        const float* const pair = rows[h % 2] + step * 4 + h / 2 * 2;
        split_pair(pair[0], pair[1], scale[h % 2].by, left[1][h], left[0][h]);
      }
#pragma unroll
      for (int j = 0; j < Parts::kSteps; j += 2) {  // four independent fragments of columns
        uint4 right[2][2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint4* const place = parts + Parts::place(step, j + h, lane);
          right[0][h] = place[0], right[1][h] = place[32];
        }
        // The small products come first.
#pragma unroll
        for (int product = 0; product < 3; ++product) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const uint4& columns = right[product == 1][h];
            const auto& of = left[product != 0];
            projection::half::multiply_add<__half>(sum[2 * (j + h)], of, columns.x, columns.y);
            projection::half::multiply_add<__half>(sum[2 * (j + h) + 1], of, columns.z, columns.w);
          }
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kWidth / 2; ++k) {
      const int row = k / 2 % 2, at = k / 8 * 4 + k / 4 % 2 * 2 + k % 2;
      const float more = sum[k / 4][k % 4];
      product[row][at] = chunk == 0 ? more : product[row][at] + more;
    }
  }
  const float4* const back = reinterpret_cast<const float4*>(parts + Parts::kParts) + lane % 4;
#pragma unroll
  for (int m = 0; m < Parts::kSteps; ++m) {
    const float4 of = back[m * 4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float* const four = product[i] + 4 * m;
      four[0] = four[0] * scale[i].back * of.x, four[1] = four[1] * scale[i].back * of.y;
      four[2] = four[2] * scale[i].back * of.z, four[3] = four[3] * scale[i].back * of.w;
    }
  }
}

}  // namespace edgeless::cuda::relational
