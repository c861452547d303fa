// Products of float32 tiles on tensor cores (3xTF32), about as exact as on CUDA cores and up to a third faster.
//
// Tensor cores multiply TF32 values, which have 11 significant bits. A float is split into the nearest TF32 value and
// the TF32 part of the remainder; three of the four products of the parts lose less than one rounding of the float32
// product. Tensor cores round sums towards zero, so sums of 32 products are moved out and added as floats. (Ootomo,
// Yokota: "Recovering single precision accuracy from Tensor Cores while surpassing the FP32 theoretical peak
// performance", 2022, sections 3 and 4.)
#pragma once

#include <cstdint>

#include "../../common/tf32.cuh"
#include "tiles.cuh"

namespace edgeless::cuda::projection::floats {

constexpr int kInner = 8;  // depth of an mma

template <int kSize, bool kTransposed, int kThreads>
using Operand = Tiles<float, kSize, kTransposed, float_pad(kTransposed), kThreads>;

// sum += A B^T for a stage of both operands. part: accumulators of the tensor cores.
template <class A, class B, class Place, int kDown, int kSide>
__device__ __forceinline__ void multiply_tiles(const float* tile_a, const float* tile_b, const Place& place,
                                               float (&sum)[kDown][kSide][4], float (&part)[kDown][kSide][4]) {
#pragma unroll
  for (int inner = 0; inner < kTileDepth; inner += kInner) {
    uint32_t b_parts[2][kSide][2], a_parts[2][kDown][4];  // TF32 parts: nearest, remainder
#pragma unroll
    for (int j = 0; j < kSide; j += 2) {
      uint32_t x[4];
      B::get(tile_b, place.side + j * 8, inner, true, x);
#pragma unroll
      for (int h = 0; h < 4; ++h) {
        split(__uint_as_float(x[h]), b_parts[0][j + h / 2][h % 2], b_parts[1][j + h / 2][h % 2]);
      }
    }
#pragma unroll
    for (int i = 0; i < kDown; ++i) {
      uint32_t x[4];
      A::get(tile_a, place.down + i * 16, inner, false, x);
#pragma unroll
      for (int h = 0; h < 4; ++h) split(__uint_as_float(x[h]), a_parts[0][i][h], a_parts[1][i][h]);
    }
    multiply_parts(part, a_parts, b_parts, inner == 0);
  }
#pragma unroll
  for (int i = 0; i < kDown; ++i) {
#pragma unroll
    for (int j = 0; j < kSide; ++j) {
#pragma unroll
      for (int h = 0; h < 4; ++h) sum[i][j][h] += part[i][j][h];
    }
  }
}

}  // namespace edgeless::cuda::projection::floats
