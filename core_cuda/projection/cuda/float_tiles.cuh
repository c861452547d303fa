// Products of float32 tiles on tensor cores, as exact as on the other units and up to a fifth faster.
//
// Tensor cores multiply numbers of 11 significant bits (TF32). A float is the nearest of those and what is left, of
// which they take the first 11 bits: three products of the parts leave out less than a rounding of the float32 product.
// What a tensor core adds it rounds towards zero, so sums of 16 products are taken out and added as floats. (Ootomo,
// Yokota: "Recovering single precision accuracy from Tensor Cores while surpassing the FP32 theoretical peak
// performance", 2022, sections 3 and 4.)
#pragma once

#include <cstdint>

#include "tiles.cuh"

namespace edgeless::cuda::projection::floats {

constexpr int kInner = 8, kKept = 16;  // depth of an mma, and of the sums that a tensor core makes

template <int kSize, bool kTransposed>
struct Operand : Tiles<float, kSize, kTransposed, kTransposed ? 8 : 4> {
  using Base = Tiles<float, kSize, kTransposed, kTransposed ? 8 : 4>;
  using Base::Base, Base::kStride;

  static __device__ __forceinline__ float get(const float* tile, int at, int depth) {
    return tile[kTransposed ? depth * kStride + at : at * kStride + depth];
  }
};

constexpr int kStageA = Operand<kTileRows, false>::kNumbers, kStageB = Operand<kTileColumns, false>::kNumbers;
constexpr int kSharedBytes = kTileStages * (kStageA + kStageB) * static_cast<int>(sizeof(float));
static_assert(Operand<kTileRows, true>::kNumbers <= kStageA && Operand<kTileColumns, true>::kNumbers <= kStageB);

__device__ __forceinline__ void split(float x, uint32_t& nearest, uint32_t& rest) {
  nearest = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
  rest = __float_as_uint(x - __uint_as_float(nearest)) + 0x1000u;  // of which the lowest 13 bits are not looked at
}

// c = a b, to which c is added where it is not `fresh`.
__device__ __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                             bool fresh) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %11, %12, %13};"
      : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(fresh ? 0.0f : c[0]),
        "f"(fresh ? 0.0f : c[1]), "f"(fresh ? 0.0f : c[2]), "f"(fresh ? 0.0f : c[3]));
#endif
}

// sum += A B^T for a stage of both operands.
template <class A, class B>
__device__ __forceinline__ void multiply_tiles(const float* tile_a, const float* tile_b, const WarpPlace& place,
                                               float (&sum)[kDown][kSide][4], float (&part)[kDown][kSide][4]) {
#pragma unroll
  for (int inner = 0; inner < kTileDepth; inner += kInner) {
    uint32_t b_parts[2][kSide][2], a_parts[2][kDown][4];  // the nearest numbers, and what is left
#pragma unroll
    for (int j = 0; j < kSide; ++j) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        split(B::get(tile_b, place.side + j * 8 + place.group, inner + place.in_group + 4 * h), b_parts[0][j][h],
              b_parts[1][j][h]);
      }
    }
#pragma unroll
    for (int i = 0; i < kDown; ++i) {
#pragma unroll
      for (int h = 0; h < 4; ++h) {
        split(A::get(tile_a, place.down + i * 16 + place.group + h % 2 * 8, inner + place.in_group + h / 2 * 4),
              a_parts[0][i][h], a_parts[1][i][h]);
      }
    }
    // The small products first; those that follow each other do not wait for each other.
#pragma unroll
    for (int product = 0; product < 3; ++product) {
#pragma unroll
      for (int i = 0; i < kDown; ++i) {
#pragma unroll
        for (int j = 0; j < kSide; ++j) {
          multiply_add(part[i][j], a_parts[product == 0][i], b_parts[product == 1][j],
                       product == 0 && inner % kKept == 0);
        }
      }
    }
    if (inner % kKept == kKept - kInner) {
#pragma unroll
      for (int i = 0; i < kDown; ++i) {
#pragma unroll
        for (int j = 0; j < kSide; ++j) {
#pragma unroll
          for (int h = 0; h < 4; ++h) sum[i][j][h] += part[i][j][h];
        }
      }
    }
  }
}

}  // namespace edgeless::cuda::projection::floats
