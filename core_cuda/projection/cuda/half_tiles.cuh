// Products of tiles of 16-bit elements on tensor cores with float32 accumulation.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "../../common/vec.cuh"
#include "tiles.cuh"

namespace edgeless::cuda::projection::half {

constexpr int kInner = 16;  // depth of an mma

template <int kSize, bool kTransposed, int kThreads>
using Operand = Tiles<uint16_t, kSize, kTransposed, 8, kThreads>;

template <class S>
__device__ __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  if constexpr (std::is_same_v<S, __nv_bfloat16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
#endif
}

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
