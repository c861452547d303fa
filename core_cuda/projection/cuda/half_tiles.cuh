// Products of tiles of 16-bit elements on tensor cores with float32 accumulation.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "../../common/half_mma.cuh"
#include "../../common/vec.cuh"
#include "tiles.cuh"

namespace edgeless::cuda::projection::half {

using cuda::multiply_add;

constexpr int kInner = 16;  // depth of an mma

template <int kSize, bool kTransposed, int kThreads>
using Operand = Tiles<uint16_t, kSize, kTransposed, 8, kThreads>;

// sum += A B^T for a stage of both operands, whose elements are S.
template <class S, class A, class B, class Place, int kDown, int kSide>
__device__ __forceinline__ void multiply_tiles(const uint16_t* tile_a, const uint16_t* tile_b, const Place& place,
                                               float (&sum)[kDown][kSide][4]) {
#pragma unroll
  for (int inner = 0; inner < kTileDepth; inner += kInner) {
    uint32_t a_parts[kDown][4], b_parts[kSide / 2][4];
#pragma unroll
    for (int i = 0; i < kDown; ++i) A::get(tile_a, place.down + i * 16, inner, false, a_parts[i]);
#pragma unroll
    for (int j = 0; j < kSide / 2; ++j) B::get(tile_b, place.side + j * 16, inner, true, b_parts[j]);
#pragma unroll
    for (int i = 0; i < kDown; ++i) {
#pragma unroll
      for (int j = 0; j < kSide; ++j) {
        multiply_add<S>(sum[i][j], a_parts[i], b_parts[j / 2][j % 2 * 2], b_parts[j / 2][j % 2 * 2 + 1]);
      }
    }
  }
}

}  // namespace edgeless::cuda::projection::half
